"""Compile the kernels of all placers before any budget runs, once on a machine."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from loadmaster.core.problem import FREE, Links, Load, Objective, Problem, Split
from loadmaster.core.run import Bound, Budget, Run, silent
from loadmaster.graph.generate import brought, fork_join
from loadmaster.placers.grouping import grouped
from loadmaster.placers.registry import own, placer, why_not
from loadmaster.simulator.engine import prepare
from loadmaster.simulator.jit import is_warm, mark_warm

_MESSAGE = "compiling (once on this machine, about a minute)"
_OPS = 40
_TRIES = 60
_TIGHT = 0.55  # of the memory: some plans have to be repaired


def warm_up(progress: Callable[[str, float], None] = silent) -> None:
    """Have every algorithm answer tiny problems, unless they did so on this machine before."""
    if is_warm("placers"):
        return
    progress(_MESSAGE, 0.0)
    problem = _tiny()
    cluster = problem.cluster
    less = (_TIGHT * cluster.memory_bytes).astype(np.int64)
    grouped(problem, max_ops=1)
    tight = replace(problem, cluster=replace(cluster, memory_bytes=less))
    pipelined = replace(problem, objective=Objective.THROUGHPUT, links=Links.HALF_DUPLEX)
    chained = replace(pipelined, split=Split.CHAIN)
    for question in (problem, tight, pipelined, chained):
        simulator = prepare(question)
        simulator.warm_up(progress)
        for name in own():
            algorithm = placer(name)
            if why_not(algorithm, question):
                continue
            progress(_MESSAGE, 0.0)
            algorithm(
                question,
                Run(
                    budget=Budget(count=_TRIES),
                    rng=np.random.default_rng(0),
                    score=simulator.score,
                    arrange=simulator.arranged,
                    bound=Bound(0.0, "none"),
                ),
            )
    mark_warm("placers")


def _tiny() -> Problem:
    work = brought(fork_join(_OPS))
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
