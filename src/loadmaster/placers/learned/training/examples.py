"""Examples: problems with the best answers the project's own solvers find, and what is proven of them.

For throughput `ideal_dp` gives the best chain, mostly proven; for a step `branch_and_bound` proves tiny
problems and `refine` answers the others. The label of a node is the share of the step after which it starts,
or the stage it is in; the label of a device is its kind, because devices of a kind may change names.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats, Ints
from loadmaster.core.placement import Placement, Status
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.run import Budget, Run
from loadmaster.placers.bounds import quick_bound
from loadmaster.placers.learned._groups import Groups, group_problem
from loadmaster.placers.learned._scene import Scene
from loadmaster.placers.learned._slicers import LoadSlicer, Slicer, StepSlicer, slicer_of
from loadmaster.placers.learned._stages import device_ranks
from loadmaster.placers.learned.training.problems import draw_problem
from loadmaster.placers.registry import placer
from loadmaster.simulator.events.engine import Simulator, prepare

VERSION = 2
_MOST_UNITS = 12
_BUDGETS = {"refine": Budget(count=3000), "ideal_dp": Budget(count=2)}  # others: one constructor's call
_USUAL = Budget(count=200)
HELD_OUT = 1_000_000  # seeds from here on are never trained on


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A problem ready to be learned from."""

    seed: int
    problem: Problem
    groups: Groups
    slicer: Slicer
    simulator: Simulator
    scene: Scene
    place: Floats  # [N] from 0 to 1, when its answer has it start or in which stage it is
    alike: Ints  # [D] kind of each device
    device: Ints  # [N] kind of device the answer has it on; -1: not learned
    best_s: float
    usual_s: float  # what nobody learned: the best of the usual orders, or HEFT
    proven: bool


def make_example(seed: int, objective: Objective) -> Example | None:
    """The example of a seed; None where no plan fits."""
    problem = draw_problem(seed, objective)
    groups = group_problem(problem)
    slicer, simulator = slicer_of(problem, groups), prepare(problem)
    if isinstance(slicer, StepSlicer):
        usual, best = _solve(problem, "heft"), _solve(problem, *_exact_or_search(groups))
    else:
        usual, best = _solve(problem, "linear_dp"), _solve(problem, "ideal_dp")
    if best.plan is None or usual.plan is None or best.score_s is None or usual.score_s is None:
        return None
    if usual.score_s < best.score_s:
        best = usual
    assert best.plan is not None
    assert best.score_s is not None
    assert usual.score_s is not None
    _, kind = np.unique(problem.cluster.kind, return_inverse=True)
    if isinstance(slicer, StepSlicer):
        started_s = slicer.earliest(simulator.run(best.plan).op_start)
        place = started_s / max(best.score_s, 1e-300)
        device = kind[best.plan.device[slicer.first]].astype(np.int32)
    else:
        place = _stage_places(slicer, best)
        device = np.full(len(place), -1, dtype=np.int32)
    return Example(
        seed=seed,
        problem=problem,
        groups=groups,
        slicer=slicer,
        simulator=simulator,
        scene=slicer.scene(),
        place=place,
        alike=kind.astype(np.int32),
        device=device,
        best_s=best.score_s,
        usual_s=usual.score_s,
        proven=best.status == Status.OPTIMAL,
    )


def _exact_or_search(groups: Groups) -> tuple[str, str]:
    small = groups.num <= _MOST_UNITS and groups.num_devices <= 3
    return ("branch_and_bound", "") if small else ("refine", "heft")


def _solve(problem: Problem, name: str, start: str = "") -> Placement:
    simulator = prepare(problem)
    run = Run(
        budget=_BUDGETS.get(name, _USUAL),
        rng=np.random.default_rng(0),
        score=simulator.score,
        arrange=simulator.order_and_score,
        bound=quick_bound(problem),
    )
    return placer(name, **({"start": start} if start else {}))(problem, run)


def _stage_places(slicer: LoadSlicer, best: Placement) -> Floats:
    """[C] the stage of each class, from 0 to 1."""
    assert best.plan is not None
    model = slicer.chain.model
    device = np.zeros(model.num_classes, dtype=np.int64)
    device[model.of_op] = best.plan.device
    rank = device_ranks(model.source, model.target, device)
    return np.asarray(rank[device] / max(float(rank.max()), 1.0), dtype=np.float64)


def digest_of(examples: Iterable[Example]) -> str:
    """What names weights: the problems and answers they were trained on."""
    digest = hashlib.sha256(f"learned_order examples {VERSION}".encode())
    for one in examples:
        digest.update(one.problem.digest.encode())
        digest.update(f"{one.best_s:.9e}".encode())
    return digest.hexdigest()
