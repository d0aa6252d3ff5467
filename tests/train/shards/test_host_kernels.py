"""The one-pass kernel gives the framework's fused bits."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loadmaster.shards.device import host_kernels
from loadmaster.shards.device.host_kernels import adam_step, table_of, worker_cores


@pytest.mark.parametrize("apart", [0, 32])  # bytes: whether the copy begins with a cache line
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("factors", [(), (0.37,), (0.5, 0.37)])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_equals_torch_fused_and_writes_the_rounded_copy(
    kind: Any, factors: Any, narrow: bool, apart: int
) -> None:
    size = 3 * 16384 + 4800
    slab = torch.zeros(size * 18 + 64, dtype=torch.uint8)
    assert slab.data_ptr() % 64 == 0
    assert size % 512
    wide = slab[: 16 * size].view(torch.float32).view(4, size)
    copy = slab[16 * size + apart :].view(torch.bfloat16)[:size]
    grad = wide[3].view(torch.bfloat16)[:size] if narrow else wide[3]
    torch.manual_seed(0)
    plain = torch.nn.Parameter(torch.randn(size))
    wide[0].copy_(plain.detach())
    optimizer = kind([plain], lr=1e-3, weight_decay=0.01, fused=True)
    table = table_of(slab, [(0, wide[0], wide[1], wide[2], grad, copy)])
    for step in range(1, 6):
        grad.copy_(torch.randn(size))
        plain.grad = grad.float().clone()
        for factor in factors:
            plain.grad = plain.grad * factor
        optimizer.step()
        adam_step(
            slab,
            table,
            steps=[step],
            options=[optimizer.param_groups[0]],
            decoupled=[kind is torch.optim.AdamW],
            factors=factors,
            num_threads=1,
        )
    state = optimizer.state[plain]
    assert torch.equal(wide[0], plain.detach())
    assert torch.equal(wide[1], state["exp_avg"])
    assert torch.equal(wide[2], state["exp_avg_sq"])
    assert torch.equal(copy, plain.detach().bfloat16())


def test_every_block_is_stepped_once_however_many_threads_take_them() -> None:
    sizes = [5 * 16384 + 16, 16, 48, 3 * 16384]  # several parameters, ends that are no whole block
    found = []
    for num_threads in (1, 2, 4):
        parts = [torch.zeros(size * 16 + 64, dtype=torch.uint8) for size in sizes]
        slab = torch.zeros(sum(part.numel() for part in parts), dtype=torch.uint8)
        rows, at = [], 0
        torch.manual_seed(1)
        for size, part in zip(sizes, parts, strict=True):
            mine = slab[at : at + size * 16]
            wide = mine[: size * 12].view(torch.float32).view(3, size)
            half = mine[size * 12 :].view(torch.bfloat16).view(2, size)
            wide[0].normal_()
            half[0].normal_()
            rows.append((0, wide[0], wide[1], wide[2], half[0], half[1]))
            at += part.numel()
        options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        table = table_of(slab, rows)
        for step in (1, 2):
            adam_step(slab, table, steps=[step], options=[options], decoupled=[True], num_threads=num_threads)
        for _, param, mean, _, grad, _ in rows:  # by hand: twice, not once and not three times
            assert torch.allclose(mean, 0.19 * grad.float(), rtol=1e-5, atol=1e-7)
            assert bool(param.isfinite().all())
        found.append(slab)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_threads_keep_off_an_eighth_of_many_cores() -> None:
    bits = np.unpackbits(worker_cores(set(range(16))), bitorder="little")
    assert np.flatnonzero(bits).tolist() == list(range(2, 16))
    assert len(worker_cores({0, 1, 2, 3})) == 0, "few cores: all of them"
    assert len(worker_cores(set(range(5000)))) == 0, "more than a set can name"


@pytest.mark.skipif(sys.platform != "linux", reason="threads are moved between cores on Linux alone")
def test_the_caller_may_run_where_it_could_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core: there is nothing to keep off")
    mask = np.zeros(1024, dtype=np.uint8)
    mask[max(before)] = 1
    monkeypatch.setattr(host_kernels, "worker_cores", lambda _: np.packbits(mask, bitorder="little"))
    size = 1 << 15
    slab = torch.zeros(size * 16, dtype=torch.uint8)
    wide = slab[: 12 * size].view(torch.float32).view(3, size)
    half = slab[12 * size :].view(torch.bfloat16).view(2, size)
    table = table_of(slab, [(0, wide[0], wide[1], wide[2], half[0], half[1])])
    adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    adam_step(slab, table, steps=[1], options=[adam], decoupled=[True], num_threads=2)
    assert os.sched_getaffinity(0) == before
    others = {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}
    assert frozenset({max(before)}) in others, "a worker keeps to its cores"
    monkeypatch.setattr(host_kernels, "worker_cores", lambda _: np.packbits(np.ones(1024, dtype=np.uint8)))
    adam_step(slab, table, steps=[2], options=[adam], decoupled=[True], num_threads=2)  # as it was for others


@pytest.mark.slow
def test_the_kernel_is_compiled_before_the_first_step_is_timed() -> None:
    """In a process of its own: here it has long been compiled."""
    text = """
import sys
import torch
torch.set_num_threads(1)
from torch import nn
import loadmaster.train as lt
from loadmaster.shards.device.cpu_device import CpuDevice
x = torch.ones(4, 16)
def trial(fused):
    return lt.Trial(name="t", build=lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)),
        loss=nn.functional.mse_loss, data=lambda: [(x, x)] * 3,
        optim=lambda ps: torch.optim.AdamW(ps, fused=fused))
for fused in (False, True):
    device = CpuDevice(cap_bytes=1 << 20)
    runner = lt.open_runner(trial(fused), device=device, num_threads=1, placement=["host"] * 2)
    runner._open_executor(device)
    print("numba" in sys.modules)
from loadmaster.shards.device.adam_kernel import step_table
print(len(step_table.signatures))
"""
    assert run_apart(text) == ["False", "True", "1"]


@pytest.mark.slow
def test_a_second_process_reads_the_compiled_kernel_and_gives_the_same_bits(tmp_path: Path) -> None:
    text = """
import torch
from loadmaster.shards.device.adam_kernel import step_table
from loadmaster.shards.device.host_kernels import adam_step, compile_kernels, table_of
compile_kernels()
size = 16384 + 512 + 16
torch.manual_seed(0)
slab = torch.zeros(size * 16, dtype=torch.uint8)
wide = slab[: 12 * size].view(torch.float32).view(3, size)
half = slab[12 * size :].view(torch.bfloat16).view(2, size)
wide[0].normal_()
half[0].normal_()
options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
table = table_of(slab, [(0, wide[0], wide[1], wide[2], half[0], half[1])])
adam_step(slab, table, steps=[1], options=[options], decoupled=[True], num_threads=2)
print(sum(step_table.stats.cache_misses.values()), sum(step_table.stats.cache_hits.values()))
print(hash(slab.numpy().tobytes()))
"""
    given = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": "0"}
    first, second = run_apart(text, **given), run_apart(text, **given)
    assert first[:2] == ["1", "0"], "compiled"
    assert second[:2] == ["0", "1"], "read"
    assert first[2] == second[2]


def test_the_cache_of_kernels_knows_the_file_of_this_one() -> None:
    """The folder's name is a digest of all files with a line that begins with '@kernel'."""
    source = Path(host_kernels.__file__).with_name("adam_kernel.py").read_text()
    assert "\n@kernel(parallel=True, nogil=True)\n" in source


def run_apart(text: str, **environment: str) -> list[str]:
    kept = os.environ | environment
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, env=kept)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
