"""The host's optimizer is measured as a step uses it: in the updater's thread, beside one that issues."""

import threading
import time

import torch

from loadmaster.shards.device.host_kernels import adam_step, table_of
from loadmaster.shards.plan.host_rates import make_pieces, measure_rates_beside

_NUM_PARAMS = 64 * 1024


def test_this_thread_issues_while_another_steps() -> None:
    pieces = make_pieces(2, _NUM_PARAMS)
    seen = []
    rates = measure_rates_beside(
        pieces, lambda: seen.append(threading.get_ident()), num_threads=1, num_updates=5
    )
    assert len(rates) == 5
    assert all(rate > 0 for rate in rates)
    assert set(seen) == {threading.get_ident()}
    assert "host-updater" not in {thread.name for thread in threading.enumerate()}


def test_rates_are_those_of_the_kernel_by_itself_within_an_order() -> None:
    pieces = make_pieces(2, _NUM_PARAMS)
    rates = sorted(measure_rates_beside(pieces, lambda: time.sleep(1e-3), num_threads=1, num_updates=9))
    slab = torch.zeros(_NUM_PARAMS * 16, dtype=torch.uint8)
    wide = slab[: _NUM_PARAMS * 12].view(torch.float32).view(3, _NUM_PARAMS)
    half = slab[_NUM_PARAMS * 12 :].view(torch.bfloat16).view(2, _NUM_PARAMS)
    table = table_of(slab, [(0, wide[0], wide[1], wide[2], half[0], half[1])])
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    times = []
    for _ in range(9):
        began = time.perf_counter()
        adam_step(slab, table, steps=[5], options=[options], decoupled=[True], num_threads=1)
        times.append(time.perf_counter() - began)
    alone = _NUM_PARAMS / sorted(times)[4]
    assert alone / 10 < rates[4] < alone * 10


def test_every_piece_is_stepped_in_turn() -> None:
    pieces = make_pieces(3, 32)
    for slab in pieces.slabs:
        slab[32 * 12 : 32 * 14].view(torch.bfloat16).fill_(1.0)
    measure_rates_beside(pieces, lambda: time.sleep(1e-4), num_threads=1, num_updates=4)  # and two before
    means = [slab[32 * 4 : 32 * 8].view(torch.float32) for slab in pieces.slabs]
    expected = torch.full((32,), 1 - 0.9**2)
    assert all(torch.allclose(mean, expected) for mean in means)
