"""What every registered algorithm promises, whoever wrote it: dropping a file in enrols it here.

The witness of scores and peaks is the reference simulator, not the compiled one that placers use.
"""

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadmaster import api
from loadmaster.core.errors import InputError, ProblemError, UnknownNameError
from loadmaster.core.graph import NO_GROUP
from loadmaster.core.placement import Placement, Status
from loadmaster.core.plan import Plan
from loadmaster.core.problem import FREE, Links, Objective, Problem
from loadmaster.core.run import Budget, Run, Score
from loadmaster.placers.registry import list_algorithms, own_algorithms, placer, why_not
from loadmaster.placers.traits import traits_of
from loadmaster.simulator.bounds.lower_bounds import lower_bound
from loadmaster.simulator.events.engine import prepare
from tests import reference
from tests.conformance.problems import INFEASIBLE, PROBLEMS, all_columns, tiny_chain, total_shortfall

ROOT = Path(__file__).resolve().parents[2]
BUDGET = "60x"


@functools.cache
def problem_named(name: str) -> Problem:
    return PROBLEMS[name]()


@functools.cache
def answered(algorithm: str, name: str) -> Placement:
    return api.plan(problem_named(name), algorithm=algorithm, budget=BUDGET)


@functools.cache
def served() -> list[tuple[str, str]]:
    pairs = [(algorithm, name) for algorithm in list_algorithms() for name in PROBLEMS]
    return [(algorithm, name) for algorithm, name in pairs if not reason(algorithm, name)]


def reason(algorithm: str, name: str) -> str:
    return why_not(placer(algorithm), problem_named(name))


@pytest.mark.parametrize("algorithm", own_algorithms())
def test_the_traits_in_its_file_are_those_of_its_class(algorithm: str) -> None:
    assert own_algorithms()[algorithm].traits == traits_of(placer(algorithm))


every_pair = pytest.mark.parametrize(("algorithm", "name"), served())


@every_pair
def test_the_plan_obeys_every_rule(algorithm: str, name: str) -> None:
    problem, plan = problem_named(name), answered(algorithm, name).plan
    if plan is None:
        return  # the status is looked at below
    assert api.check_plan(problem, plan) == []
    assert ((problem.pinned == FREE) | (problem.pinned == plan.device)).all()
    group = problem.graph.group
    for together in set(group.tolist()) - {NO_GROUP}:
        assert len(set(plan.device[group == together].tolist())) == 1
    assert np.isfinite(
        problem.costs.compute_s[range(len(plan.device)), problem.cluster.kind[plan.device]]
    ).all()
    assert sorted(plan.priority.tolist()) == list(
        range(problem.graph.num_ops)
    )  # a whole order, to be replayed


@every_pair
def test_score_and_peaks_are_those_of_the_reference_simulator(algorithm: str, name: str) -> None:
    problem, placement = problem_named(name), answered(algorithm, name)
    plan = placement.plan or placement.least_overflow_plan
    assert plan is not None
    replay = reference.simulate(problem, plan, dispatch="in_order", links=problem.links.value)
    assert placement.peak_bytes.tolist() == replay.peak_bytes
    assert placement.shortfall_bytes.tolist() == total_shortfall(problem, replay.peak_bytes)
    if placement.score_s is None:
        return
    if problem.objective == Objective.STEP:
        assert placement.score_s == replay.step_s
    elif problem.links == Links.HOST:
        assert placement.score_s == pytest.approx(reference.throughput(problem, plan), rel=1e-12)
    assert placement.bound_s <= placement.score_s


@every_pair
def test_status_plan_and_proof_agree(algorithm: str, name: str) -> None:
    placement = answered(algorithm, name)
    fits = placement.plan is not None
    assert fits == (placement.status in (Status.OPTIMAL, Status.FEASIBLE))
    assert fits == (placement.score_s is not None) == (placement.least_overflow_plan is None)
    assert fits == (name not in INFEASIBLE) or placement.status == Status.NOT_FOUND
    if placement.status in (Status.OPTIMAL, Status.INFEASIBLE):
        assert placement.proof
    if placement.status == Status.FEASIBLE:
        assert placement.proof == ""
    if fits:
        assert placement.shortfall_bytes.sum() == 0
    else:
        assert placement.shortfall_bytes.sum() > 0 or placement.proof
    assert placement.algorithm == algorithm
    assert placement.problem.digest == problem_named(name).digest


@every_pair
def test_the_same_seed_and_count_give_the_same_plan_and_leave_the_problem_as_it_was(
    algorithm: str, name: str
) -> None:
    problem = PROBLEMS[name]()
    before, columns = problem.digest, [column.copy() for column in all_columns(problem)]
    first, again = answered(algorithm, name), api.plan(problem, algorithm=algorithm, budget=BUDGET)
    assert (again.digest, again.score_s, again.status) == (first.digest, first.score_s, first.status)
    assert problem.digest == before
    for now, then in zip(all_columns(problem), columns, strict=True):
        assert not now.flags.writeable
        assert now.tobytes() == then.tobytes()


class Scorer:
    """A scorer that counts."""

    def __init__(self, problem: Problem) -> None:
        self.simulator = prepare(problem)
        self.calls = 0

    def __call__(self, plan: Plan) -> Score:
        self.calls += 1
        return self.simulator.score(plan)

    def arrange(self, plan: Plan) -> tuple[Plan, Score]:
        self.calls += 1
        return self.simulator.order_and_score(plan)


@pytest.mark.parametrize("count", [1, 5])
@every_pair
def test_a_count_budget_is_kept(algorithm: str, name: str, count: int) -> None:
    problem = problem_named(name)
    scorer = Scorer(problem)
    run = Run(
        budget=Budget(count=count),
        rng=np.random.default_rng(0),
        score=scorer,
        arrange=scorer.arrange,
        bound=lower_bound(problem),
    )
    placement = placer(algorithm)(problem, run)
    assert scorer.calls >= 1
    # A portfolio may give each member that has no plan yet one try.
    assert scorer.calls <= count + (len(list_algorithms()) if algorithm == "auto" else 0)
    assert placement.plan is not None or placement.least_overflow_plan is not None


def test_the_same_plan_under_another_hash_seed() -> None:
    """R19: no order of a set or a dictionary of objects reaches a plan."""
    pairs = [(a, n) for a, n in served() if n in ("one layer", "pipeline, free", "pinned")]
    script = (
        "import json, sys; from tests.conformance.test_placers import answered;"
        "print(json.dumps([answered(a, n).digest for a, n in json.loads(sys.argv[1])]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(pairs)],
        env={**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert json.loads(done.stdout) == [answered(a, n).digest for a, n in pairs]


@pytest.mark.parametrize(
    ("algorithm", "name"), [(a, n) for a in list_algorithms() for n in PROBLEMS if (a, n) not in served()]
)
def test_a_problem_it_does_not_serve_is_refused_in_words(algorithm: str, name: str) -> None:
    with pytest.raises(ProblemError) as refused:
        api.plan(problem_named(name), algorithm=algorithm, budget=BUDGET)
    message = str(refused.value)
    assert message.startswith(algorithm)
    assert "choose another algorithm" in message


def test_some_pairs_are_refused_and_most_are_served() -> None:
    """Guards the two lists above against going empty."""
    assert reason("brute_force", "fork_join") == "brute_force supports at most 12 ops, not 112"
    assert "not chain" in reason("round_robin", "pipeline, chain")
    assert len(served()) >= 80


class TestInfeasible:
    """What is said when nothing fits: the lacking bytes, and the certificate."""

    @pytest.mark.parametrize("algorithm", [a for a in list_algorithms() if not reason(a, "too large")])
    def test_an_op_larger_than_every_device(self, algorithm: str) -> None:
        placement = answered(algorithm, "too large")
        assert placement.status == Status.INFEASIBLE
        assert "30 B on one device, the largest allowed has 25 B (5 B short)" in placement.proof
        assert int(placement.shortfall_bytes.sum()) >= 5

    @pytest.mark.parametrize("algorithm", [a for a in list_algorithms() if not reason(a, "too much")])
    def test_more_than_all_devices_hold(self, algorithm: str) -> None:
        placement = answered(algorithm, "too much")
        assert placement.status == Status.INFEASIBLE
        assert "hold 50 B at the end of the step, all devices have 45 B" in placement.proof
        assert int(placement.shortfall_bytes.sum()) >= 5

    def test_without_a_certificate_it_is_not_found(self) -> None:
        for algorithm in ("single_device", "round_robin", "fastest_device", "chain_balance"):
            placement = answered(algorithm, "untold")
            assert placement.status == Status.NOT_FOUND
            assert "needs 24 B but has 20 B (4 B short)" in placement.proof
            assert placement.shortfall_bytes.tolist() == [4]  # three times 8 bytes in 20

    def test_trying_everything_is_a_certificate(self) -> None:
        for algorithm in ("brute_force", "auto"):
            placement = api.plan(problem_named("untold"), algorithm=algorithm, budget="1000x")
            assert placement.status == Status.INFEASIBLE
            assert "plans tried, and none" in placement.proof
            assert placement.shortfall_bytes.tolist() == [4]

    def test_a_search_cut_short_claims_nothing(self) -> None:
        placement = api.plan(problem_named("untold"), algorithm="brute_force", budget="3x")
        assert placement.status == Status.NOT_FOUND
        assert "tried" not in placement.proof
        fitting = api.plan(problem_named("diamond"), algorithm="brute_force", budget="3x")
        assert fitting.status == Status.FEASIBLE

    def test_a_chain_that_cannot_be_is_told_from_a_lack_of_memory(self) -> None:
        problem = problem_named("pinned chain")
        torn = replace(problem, pinned=[1, -1, 0, -1, -1, 1])  # out of device 1 and back into it
        placement = api.plan(torn, algorithm="single_device", budget=BUDGET)
        assert placement.status == Status.NOT_FOUND
        assert "feed each other in a cycle" in placement.proof
        assert placement.shortfall_bytes.sum() == 0


class TestRegistry:
    """Names, third parties, and what is said about them."""

    def test_an_unknown_name_is_answered_with_the_nearest(self) -> None:
        with pytest.raises(UnknownNameError, match=r"'chain_balence'; did you mean 'chain_balance'\?"):
            api.plan(tiny_chain(), algorithm="chain_balence")

    def test_parameters_are_passed_and_wrong_ones_refused(self) -> None:
        assert getattr(placer("chain_balance", max_candidates=3), "max_candidates", None) == 3
        with pytest.raises(InputError, match=r"'chain_balance'.*colour"):
            placer("chain_balance", colour=3)

    def test_every_own_algorithm_has_a_family_and_a_summary(self) -> None:
        assert {"single_device", "round_robin", "fastest_device", "chain_balance", "brute_force"} <= set(
            list_algorithms()
        )
        for entry in list_algorithms().values():
            assert entry.family
            assert 10 < len(entry.summary) < 120

    def test_a_third_party_is_found_by_its_entry_point(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(
            tmp_path, "mine = loadmaster_mine:LastDevice\ngone = loadmaster_mine:Gone\nlost = no_such:Thing\n"
        )
        monkeypatch.syspath_prepend(tmp_path)  # type: ignore[no-untyped-call]
        entry = list_algorithms()["mine"]
        assert (entry.family, entry.summary) == ("third party", "loadmaster_mine:LastDevice")
        assert "loadmaster_mine" not in sys.modules  # listed without being imported
        placement = api.plan(tiny_chain(), algorithm="mine", budget=BUDGET)
        assert placement.plan is not None
        assert placement.plan.device.tolist() == [1, 1, 1, 1]
        assert placement.score_s == 10.0
        for broken in ("gone", "lost"):
            with pytest.raises(InputError, match=f"{broken}.*cannot be loaded"):
                placer(broken)
        with pytest.raises(UnknownNameError, match="did you mean 'mine'"):
            placer("mina")

    def test_a_third_party_cannot_take_the_name_of_our_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(tmp_path, "round_robin = loadmaster_mine:LastDevice\n")
        monkeypatch.syspath_prepend(tmp_path)  # type: ignore[no-untyped-call]
        assert list_algorithms()["round_robin"].family == "heuristic"


MINE = '''
from dataclasses import dataclass
import numpy as np
from loadmaster.core.plan import plan_of
from loadmaster.placers.answer import best_of

@dataclass(frozen=True)
class LastDevice:
    """Everything on the last device."""

    def __call__(self, problem, run):
        device = np.full(problem.graph.num_ops, problem.cluster.num_devices - 1, dtype=np.int32)
        return best_of(problem, run, [plan_of(device)], algorithm="mine")
'''


def install(folder: Path, points: str) -> None:
    """What pip leaves behind when it installs a package with these entry points."""
    (folder / "loadmaster_mine.py").write_text(MINE)
    info = folder / "loadmaster_mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loadmaster-mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[loadmaster.placers]\n{points}")
