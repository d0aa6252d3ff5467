"""The order of ops that run in order: by priority, then by index, however far apart priorities are."""

import numpy as np
import pytest

import loadmaster as lm
from loadmaster.core.plan import plan_of
from loadmaster.simulator.events.engine import Dispatch, prepare


@pytest.mark.parametrize("tied", [1, 3])
@pytest.mark.parametrize("apart", [5, 10**6, -1])
def test_priorities_far_apart_give_the_timeline_of_ranks(tied: int, apart: int) -> None:
    problem = lm.problem("gen:fork_join:60")
    num_ops = problem.graph.num_ops
    simulator = prepare(problem)
    device = np.arange(num_ops, dtype=np.int32) % problem.cluster.num_devices
    ranks = np.arange(num_ops, dtype=np.int32)
    wanted = simulator.run(plan_of(device, ranks), dispatch=Dispatch.IN_ORDER)
    low = -(2**31)
    spread = (2**32 - 1) // num_ops if apart < 0 else apart  # as far as numbers of 32 bits go
    sparse = ((ranks // tied).astype(np.int64) * spread + (low if apart < 0 else 7)).astype(np.int32)
    found = simulator.run(plan_of(device, sparse), dispatch=Dispatch.IN_ORDER)
    for column in ("op_start", "op_end", "start_rank", "peak_bytes"):
        assert np.array_equal(getattr(found, column), getattr(wanted, column)), column
    assert np.array_equal(np.sort(found.start_rank), ranks)
