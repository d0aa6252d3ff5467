"""Strategies for the small models of this folder, one for each way of running them."""

from typing import Any

import numpy as np

from loadmaster.core.graph import Graph, Phase
from loadmaster.core.problem import Problem
from loadmaster.core.question import Question
from loadmaster.core.strategy import Mode, OpGroup, Strategy, Sync
from loadmaster.questions.problem import build_problem
from loadmaster.strategies.splitting.splits import find_splits
from loadmaster.strategies.splitting.units import find_units
from tests.unit.strategies.models import wide_step

MIXED_DEVICES = "2xV100-16GB, 1xGTX1080Ti, 1xP100"
TWO_HOSTS = "2xV100-16GB | 2xP100 ; inter=10gbit"
BATCH = 12


def problem_for(graph: Graph, devices: str = MIXED_DEVICES) -> Problem:
    return build_problem(Question(source=graph, devices=devices))


def wide_problem(width: int = 256, devices: str = MIXED_DEVICES) -> Problem:
    return problem_for(wide_step(BATCH, width), devices)


def strategy_of(problem: Problem, *groups: OpGroup, batch: int = BATCH, schedule: str = "") -> Strategy:
    return Strategy("test", problem.graph.digest, problem.cluster.digest, batch, groups, schedule=schedule)


def group_of(ops: Any, devices: tuple[int, ...], rows: tuple[int, ...], **fields: Any) -> OpGroup:
    return OpGroup(ops=np.asarray(ops), devices=devices, rows=rows, **{"mode": Mode.REPLICATE, **fields})


def every_op(problem: Problem) -> np.ndarray[Any, Any]:
    return np.arange(problem.graph.num_ops)


def halves(problem: Problem, batch: int = BATCH) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The units of the first and of the second half of the model."""
    unit, num = find_units(problem.graph, find_splits(problem.graph, batch))
    return np.flatnonzero(unit < num // 2), np.flatnonzero(unit >= num // 2)


def weights(graph: Graph) -> list[int]:
    """Parameters of linear layers that are matrices."""
    named = enumerate(graph.op_name)
    return [op for op, name in named if graph.phase[op] == Phase.PARAM and name.endswith("weight")]


def all_ways(problem: Problem) -> dict[str, Strategy]:
    """One strategy for every mode, sync and change of layout."""
    ops, (head, tail) = every_op(problem), halves(problem)
    two = {"sync": Sync.ALLREDUCE}
    return {
        "place": strategy_of(problem, group_of(ops, (1,), (12,), mode=Mode.PLACE)),
        "even": strategy_of(problem, group_of(ops, (0, 1), (6, 6), **two)),
        "uneven": strategy_of(problem, group_of(ops, (0, 1, 2, 3), (5, 4, 2, 1), **two)),
        "server": strategy_of(problem, group_of(ops, (0, 1, 2), (6, 4, 2), sync=Sync.PS, server=2)),
        "factors": strategy_of(
            problem, group_of(ops, (0, 1, 3), (6, 3, 3), sfb=tuple(weights(problem.graph)), **two)
        ),
        "duplicate": strategy_of(problem, group_of(ops, (0, 3), (12, 12), mode=Mode.DUPLICATE)),
        "other devices": strategy_of(
            problem, group_of(head, (0, 1), (8, 4), **two), group_of(tail, (2, 3), (3, 9), **two)
        ),
        "more devices": strategy_of(
            problem, group_of(head, (0, 1), (7, 5), **two), group_of(tail, (0, 1, 2), (2, 8, 2), **two)
        ),
        "then placed": strategy_of(
            problem, group_of(head, (0, 1), (8, 4), **two), group_of(tail, (2,), (12,), mode=Mode.PLACE)
        ),
        "then duplicated": strategy_of(
            problem,
            group_of(head, (0, 1), (8, 4), **two),
            group_of(tail, (0, 1), (12, 12), mode=Mode.DUPLICATE),
        ),
        "1f1b": strategy_of(
            problem,
            group_of(head, (0,), (12,), mode=Mode.PIPELINE, microbatches=4),
            group_of(tail, (2,), (12,), mode=Mode.PIPELINE, microbatches=4),
            schedule="1f1b",
        ),
        "gpipe": strategy_of(
            problem,
            group_of(head, (0,), (12,), mode=Mode.PIPELINE, microbatches=5),
            group_of(tail, (3,), (12,), mode=Mode.PIPELINE, microbatches=5),
            schedule="gpipe",
        ),
    }
