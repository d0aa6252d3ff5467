"""Compile the kernels of placers before any budget runs, once on a machine.

All of them take more than a minute of processor time, so a question compiles what its own answer needs: the
algorithm that is asked, on tiny problems like the one that is asked.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from loadmaster.core.graph import Phase
from loadmaster.core.problem import FREE, Links, Load, Objective, Problem, Split, Workload
from loadmaster.core.run import Bound, Budget, Run, ignore_progress
from loadmaster.graph.build import GraphBuilder
from loadmaster.graph.generate import fork_join, with_benchmark_cluster
from loadmaster.placers.grouping.groups import group_ops
from loadmaster.placers.registry import own_algorithms, placer, why_not
from loadmaster.simulator.events.engine import Simulator, prepare
from loadmaster.simulator.jit import is_warm, mark_warm

_MESSAGE = "compiling (once on this machine)"
_OPS = 40
_TRIES = 60
_TIGHT = 0.55  # of the memory: some plans have to be repaired


def warm_up_for(
    problem: Problem, algorithm: object, progress: Callable[[str, float], None] = ignore_progress
) -> None:
    """Have the algorithm that is asked answer tiny problems like this one."""
    if is_warm("placers"):
        return  # before any algorithm is imported to be told apart
    name = next((one for one in own_algorithms() if type(placer(one)) is type(algorithm)), None)
    part = f"placers-{problem.objective}-{problem.split}-{problem.pipeline != ''}-{name}"
    if name is None or is_warm(part):
        return
    questions = [one for one in _tiny_problems() if _is_alike(one, problem)]
    _answer(questions, [name], progress)
    mark_warm(part)


def warm_up(progress: Callable[[str, float], None] = ignore_progress) -> None:
    """Have every algorithm answer tiny problems, unless they did so on this machine before."""
    if is_warm("placers"):
        return
    _answer(_tiny_problems(), own_algorithms(), progress)
    mark_warm("placers")


def _is_alike(tiny: Problem, problem: Problem) -> bool:
    """Whether a tiny problem reaches the kernels that another one does; few need repair."""
    same = tiny.objective == problem.objective and tiny.split == problem.split
    roomy = bool((tiny.cluster.memory_bytes >= _tiny_problem().cluster.memory_bytes).all())
    trains = bool((problem.graph.mirror >= 0).any())  # only then are layers searched
    known = trains or not (tiny.graph.mirror >= 0).any() or bool(tiny.pipeline)
    return same and roomy and known and bool(tiny.pipeline) == bool(problem.pipeline)


def _answer(
    questions: Sequence[Problem], names: Iterable[str], progress: Callable[[str, float], None]
) -> None:
    progress(_MESSAGE, 0.0)
    group_ops(_tiny_problem(), max_ops=1)
    tasks = [(at, name) for at, asked in enumerate(questions) for name in names if _serves(name, asked)]
    simulators: dict[int, Simulator] = {}
    for done, (at, name) in enumerate(tasks):
        progress(f"{_MESSAGE}: {done + 1} of {len(tasks)}", done / len(tasks))
        if at not in simulators:
            simulators[at] = prepare(questions[at])
            simulators[at].warm_up()
        run = Run(
            budget=Budget(count=_TRIES),
            rng=np.random.default_rng(0),
            score=simulators[at].score,
            arrange=simulators[at].order_and_score,
            bound=Bound(0.0, "none"),
        )
        placer(name)(questions[at], run)


def _serves(name: str, question: Problem) -> bool:
    return not why_not(placer(name), question)


def _tiny_problems() -> tuple[Problem, ...]:
    """Tiny problems that between them reach every kernel."""
    problem = _tiny_problem()
    cluster = problem.cluster
    less = (_TIGHT * cluster.memory_bytes).astype(np.int64)
    tight = replace(problem, cluster=replace(cluster, memory_bytes=less))
    pipelined = replace(problem, objective=Objective.THROUGHPUT, links=Links.HALF_DUPLEX)
    chained = replace(pipelined, split=Split.CHAIN)
    return problem, tight, _tiny_training_problem(), pipelined, chained, _tiny_pipeline_problem()


def _tiny_problem() -> Problem:
    return _make_problem(with_benchmark_cluster(fork_join(_OPS)))


def _tiny_training_problem() -> Problem:
    """Three layers, walked both ways."""
    builder = GraphBuilder("layers")
    saved: list[int] = []
    for at in range(3):
        forward = builder.op(f"f{at}", group=at, flops=1e9)
        if at:
            builder.use(saved[-1], forward)
        saved.append(builder.tensor(forward, 1))
    gradient = saved[-1]
    for at in (2, 1, 0):
        backward = builder.op(f"b{at}", group=at, flops=1e9, phase=Phase.BACKWARD, mirror=at)
        builder.use(saved[at], backward)
        builder.use(gradient, backward)
        gradient = builder.tensor(backward, 1)
    return _make_problem(with_benchmark_cluster(builder.build()))


def _tiny_pipeline_problem() -> Problem:
    """Two layers of a training step in a pipeline."""
    builder = GraphBuilder("layers")
    for at in range(2):
        forward = builder.op(f"f{at}", group=at, flops=1e9, resident_bytes=1)
        backward = builder.op(f"b{at}", group=at, flops=1e9, phase=Phase.BACKWARD, mirror=forward)
        builder.use(builder.tensor(forward, 1), backward)
    chained = replace(
        _make_problem(with_benchmark_cluster(builder.build())),
        objective=Objective.THROUGHPUT,
        split=Split.CHAIN,
    )
    return replace(chained, pipeline="1f1b:2")


def _make_problem(work: Workload) -> Problem:
    assert work.cluster is not None
    assert work.costs is not None
    return Problem(
        graph=work.graph,
        cluster=work.cluster,
        costs=work.costs,
        objective=Objective.STEP,
        links=Links.SHARED,
        split=Split.FREE,
        load=Load.SUM,
        pinned=np.full(work.graph.num_ops, FREE, dtype=np.int32),
    )
