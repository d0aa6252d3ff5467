"""Transfers that take no time, several on one link: all start, and arrive, in the same round.

d0  |top|                        top makes a tensor of 0 bytes for d1 and one for d2, over one link
d1      |  late  |               both arrive at 1, so that their one engine takes `soon` (priority 1)
d2      |soon|                   before `late` (priority 7)
"""

import pytest

from loadmaster.core.problem import Links
from loadmaster.graph.build import GraphBuilder
from loadmaster.simulator.events.engine import Dispatch, prepare
from tests import reference
from tests.builders import cluster_of, plan_on, problem_of

ONE_LINK = {(a, b): [0] for a in range(3) for b in range(3) if a != b}


@pytest.mark.parametrize("first_bytes", [0, 2])
def test_transfers_without_duration_do_not_queue_behind_each_other(first_bytes: int) -> None:
    builder = GraphBuilder("two takers")
    top, before, late, soon = (builder.op(name) for name in ("top", "before", "late", "soon"))
    builder.use(builder.tensor(top, first_bytes), before)  # with 2 bytes the link is busy for 2 s first
    builder.use(builder.tensor(top, 0), late)
    builder.use(builder.tensor(top, 0), soon)
    cluster = cluster_of(ONE_LINK, kind=[0, 0, 0], engine=[0, 1, 1])
    problem = problem_of(builder.build(), cluster, [1.0, 0.0, 1.0, 1.0], links=Links.SHARED)
    plan = plan_on([0, 1, 1, 2], [0, 0, 7, 1])
    outcome = prepare(problem).run(plan, dispatch=Dispatch.READY)
    expected = reference.simulate(problem, plan, dispatch="ready", links="shared")
    assert outcome.op_start.tolist() == expected.op_start
    assert outcome.op_start[soon] < outcome.op_start[late]


def test_transfers_without_duration_that_begin_later_start_in_one_round() -> None:
    """d0 sends until 7; then two tensors of 0 bytes come to it at once, and it takes the first op of both."""
    builder = GraphBuilder("two that wait")
    ops = [builder.op(f"op{number}") for number in range(8)]
    made = [builder.tensor(ops[op], size) for op, size in ((0, 3), (1, 0), (2, 0), (5, 0), (6, 0))]
    for tensor, reader in ((0, 1), (1, 2), (2, 3), (2, 4), (1, 5), (3, 6), (0, 6), (4, 7)):
        builder.use(made[tensor], ops[reader])
    cluster = cluster_of(ONE_LINK, kind=[0, 0, 0], engine=[0, 1, 2])
    problem = problem_of(builder.build(), cluster, [1.0] * 8, links=Links.HALF_DUPLEX)
    plan = plan_on([0, 1, 1, 0, 0, 0, 2, 0], [0] * 8)
    outcome = prepare(problem).run(plan, dispatch=Dispatch.READY)
    expected = reference.simulate(problem, plan, dispatch="ready", links="half-duplex")
    assert outcome.op_start.tolist() == expected.op_start
    assert outcome.op_start[3] == 7.0
