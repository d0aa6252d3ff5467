"""Stopwatch: measures the keys of a graph on one local device, the most time first, within seconds. [torch]

Nothing here needs the model: every op is rebuilt from its signature, timed and forgotten, so no more memory
is needed than the largest op takes. Random numbers of the caller's are left as they were.

Every op has its turn several times, all others in between, as far as the budget reaches: what disturbs the
machine for a while disturbs one turn of each and not all turns of some. The quickest turn counts, and how far
the turns lie apart is the row's spread. On a CPU whose processors other work takes, the threads of an op wait
for each other a thousand times as long as the op; there each op is also timed on one thread, and the lesser
of both counts: more threads do not make an op slower than one.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from loadmaster.cost.busy_machine import BUSY, CALM, BusyWatch
from loadmaster.cost.database import CostRow, today
from loadmaster.cost.keys import UPDATE, split_key
from loadmaster.cost.signature import TensorSpec, parse_signature
from loadmaster.cost.timed.after_forward import CannotRebuild
from loadmaster.cost.timed.rebuild import autocast_context, input_bytes, normal_values, rebuild_call
from loadmaster.cost.timed.timing import Timing, time_call

MOST_WEIGHTS = 16  # updated together: the more, the less a disturbance counts
_MOST_UPDATE_BYTES = 2**28
_LARGE_WEIGHT_BYTES = 2**20
TURNS = 3  # of every op, as far as the budget reaches
_FREE_SHARE = 0.6  # of the free memory that one op may take
_COLD_BYTES = {"cpu": 2**26, "cuda": 2**28}
_COLD_S = 0.02
_MOST_COPIES = 16
_LOOK_BACK = 9
_LONGEST_REASON = 200
Say = Callable[[str, float], None]
_LEAST_CALLS = 4  # a warm-up and three rounds
_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-3),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "adamw": lambda weights: torch.optim.AdamW(weights),
    "sgd_fused": lambda weights: torch.optim.SGD(weights, lr=1e-3, fused=True),
    "momentum_fused": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, fused=True),
    "adamw_fused": lambda weights: torch.optim.AdamW(weights, fused=True),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One key to be measured."""

    key: str
    count: int  # ops with that key
    expected_s: float  # of one, by the roofline
    num_bytes: int  # that it reads and writes


class DeviceLost(Exception):  # noqa: N818
    """The device answers nothing any more; the process has to end before it does."""


def torch_version() -> str:
    """As rows write it."""
    return str(torch.__version__)


def watch_machine(torch_name: str) -> BusyWatch:
    """Watches whether other work leaves enough processors to measure on a device."""
    return BusyWatch(threads=torch.get_num_threads() if torch_name == "cpu" else 1)


def measure_jobs(
    jobs: Sequence[Job],
    torch_name: str,
    chip: str,
    *,
    budget_s: float,
    say: Say,
    watch: BusyWatch | None = None,
) -> Iterator[CostRow]:
    """A row for every job that was reached, those first that make up most of a step.

    A job that has its turn again gives its row again, if that is the better for it.
    """
    device, watch = torch.device(torch_name), watch or watch_machine(torch_name)
    end = time.perf_counter() + budget_s
    found: dict[str, CostRow] = {}
    with preserve_state(device):
        for turn in range(TURNS):
            left = [job for job in jobs if not turn or (job.key in found and found[job.key].seconds)]
            for row in _measure_in_turn(left, device, chip, end, say if not turn else _say_nothing, watch):
                better = merge_rows(found[row.signature], row) if row.signature in found else row
                if better is not found.get(row.signature):
                    found[row.signature] = better
                    yield better


def merge_rows(one: CostRow, other: CostRow) -> CostRow:
    """Two turns of one op: of two calm ones (or two busy ones) the quicker, and how far apart they lie."""
    if other.seconds is None or (other.moment == BUSY and one.moment != BUSY):
        return one
    if one.seconds is None or (one.moment == BUSY and other.moment != BUSY):
        return other
    quick, slow = (one, other) if one.seconds <= other.seconds else (other, one)
    apart = ((slow.seconds or 0.0) - (quick.seconds or 0.0)) / 2 / (quick.seconds or 1.0)
    spread = max(quick.spread, apart)
    return replace(quick, spread=spread, count=one.count + other.count, date=other.date)


def _say_nothing(what: str, share: float) -> None:
    """Only the first turn is news."""


def _measure_in_turn(
    jobs: Sequence[Job], device: torch.device, chip: str, end: float, say: Say, watch: BusyWatch
) -> Iterator[CostRow]:
    """Every job once, while there is time; updates first, which are few and may be all that a host does."""
    order = sorted(jobs, key=lambda job: (not job.key.startswith(UPDATE), -job.count * job.expected_s))
    slower = [1.0]  # than expected, as seen so far
    for number, job in enumerate(order):
        left_s = end - time.perf_counter()
        if left_s <= 0:
            return
        likely_s = job.expected_s * max(1.0, statistics.median(slower[-_LOOK_BACK:]))
        if _LEAST_CALLS * likely_s > left_s or job.num_bytes > _FREE_SHARE * free_bytes(device):
            continue
        say(f"measuring op {number + 1} of {len(order)} on {chip}", number / len(order))
        row = _measure_row(job, device, chip, left_s, watch)
        if row is not None:
            if row.seconds is not None and job.expected_s > 0:
                slower.append(row.seconds / job.expected_s)
            yield row


def _measure_row(
    job: Job, device: torch.device, chip: str, left_s: float, watch: BusyWatch
) -> CostRow | None:
    """What was measured, or why it cannot be; None where another day may do better."""
    version, date = torch_version(), today()
    try:
        busy = watch.is_busy_now()
        timing = _time_job(job, device, left_s)
        if busy and device.type == "cpu" and torch.get_num_threads() > 1:
            with at_most_threads(1):
                timing = min(timing, _time_job(job, device, left_s), key=lambda one: one.seconds)
    except (MemoryError, torch.OutOfMemoryError):
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return None
    except Exception as problem:  # torch may raise anything on an op out of its place
        text = " ".join(str(problem).split())[:_LONGEST_REASON]
        if device.type == "cuda" and "CUDA error" in text:
            raise DeviceLost(f"{chip} failed on {job.key[:100]!r}: {text}") from None
        if "alloc" in text and "memory" in text:
            return None
        return CostRow(job.key, chip, version, date, None, reason=f"{type(problem).__name__}: {text}")
    moment = BUSY if busy or watch.is_busy_now() else CALM
    measured = timing.seconds, timing.spread, timing.count, timing.issue_s
    return CostRow(job.key, chip, version, date, *measured, moment=moment)


@contextmanager
def at_most_threads(number: int) -> Iterator[None]:
    """Ops run on no more threads than that, within."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, number))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _time_job(job: Job, device: torch.device, left_s: float) -> Timing:
    if job.key.startswith(UPDATE):
        return _time_update(job, device, left_s)
    signature, grad = split_key(job.key)
    if signature is None:
        raise CannotRebuild("its signature cannot be read")
    if input_bytes(signature) > _FREE_SHARE * free_bytes(device):
        raise MemoryError
    copies = _num_copies(job, device)
    for wants_grad in (True, False) if grad else (False,):
        with torch.set_grad_enabled(wants_grad), autocast_context(signature, device):
            call = rebuild_call(signature, device, grad=wants_grad, copies=copies)
            try:
                return time_call(call, device, warm_ups=copies + 1, limit_s=left_s)
            except RuntimeError:
                if not wants_grad:  # some ops have no gradient at all
                    raise
    raise AssertionError("the last attempt returns or raises")


def _num_copies(job: Job, device: torch.device) -> int:
    """So many that they are more than a cache holds, if an op is short enough for caches to matter."""
    by_size = _COLD_BYTES[device.type] // max(job.num_bytes, 1)
    by_time = _COLD_S / max(job.expected_s, 1e-9)
    return int(max(1, min(_MOST_COPIES, by_size, by_time)))


def _time_update(job: Job, device: torch.device, left_s: float) -> Timing:
    """What one weight more adds to a step of the optimizer: calling it costs something once per step only."""
    name, _, rest = job.key.removeprefix(UPDATE).partition(" ")
    signature = parse_signature(f"aten.update.default {rest}")
    word = signature.args[0] if signature is not None and signature.args else None
    if not isinstance(word, TensorSpec) or name not in _OPTIMIZERS:
        raise CannotRebuild("its weight cannot be known")
    num = min(MOST_WEIGHTS, _MOST_UPDATE_BYTES // max(word.num_bytes, 1))
    if word.num_bytes >= _LARGE_WEIGHT_BYTES:  # calling the optimizer is nothing beside it, and differences
        num = max(1, num // 4)  # of large times are mostly noise
        all_s = time_call(_make_optimizer_step(name, word, num, device), device, limit_s=left_s)
        issue_s = _time_update_issue(name, word, device) if device.type == "cuda" else 0.0
        return Timing(all_s.seconds / num, all_s.spread, all_s.count * num, issue_s)
    one = time_call(_make_optimizer_step(name, word, 1, device), device, limit_s=left_s / 2)
    more = time_call(_make_optimizer_step(name, word, 1 + num, device), device, limit_s=left_s / 2)
    seconds, issue_s = (
        max((b - a) / num, b / (2 * num + 2))
        for a, b in ((one.seconds, more.seconds), (one.issue_s, more.issue_s))
    )
    return Timing(seconds, max(one.spread, more.spread), one.count + more.count, issue_s)


def _time_update_issue(name: str, word: TensorSpec, device: torch.device) -> float:
    """The host's time for one weight more, which does not depend on its size; small ones fit often."""
    small = TensorSpec(word.dtype, (1,) * len(word.shape), (1,) * len(word.shape))
    one, more = (
        time_call(_make_optimizer_step(name, small, num, device), device) for num in (1, 1 + MOST_WEIGHTS)
    )
    return max((more.issue_s - one.issue_s) / MOST_WEIGHTS, more.issue_s / (2 * MOST_WEIGHTS + 2))


def time_optimizer_call(device: torch.device) -> float:
    """What a step of AdamW takes beyond its weights: the host's time, which on a GPU is that to launch."""
    word = TensorSpec("float32", (16,), (1,))
    one, more = (
        time_call(_make_optimizer_step("adamw", word, num, device), device) for num in (1, 1 + MOST_WEIGHTS)
    )
    few, many = ((t.issue_s if device.type == "cuda" else t.seconds) for t in (one, more))
    return max(0.0, few - (many - few) / MOST_WEIGHTS)


def _make_optimizer_step(name: str, word: TensorSpec, num: int, device: torch.device) -> Callable[[], Any]:
    """A step of an optimizer on that many weights, which have gradients."""
    dtype = getattr(torch, word.dtype)

    def values() -> torch.Tensor:
        return normal_values(word.num_elements, dtype, device).as_strided(word.shape, word.stride)

    weights = [torch.nn.Parameter(values()) for _ in range(num)]
    for weight in weights:
        weight.grad = values()
    step: Callable[[], Any] = _OPTIMIZERS[name](weights).step
    return step


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + int(held)
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 2**33  # unknown: a usual laptop


@contextmanager
def preserve_state(where: str | torch.device) -> Iterator[None]:
    """The caller's random numbers are untouched, torch's warnings unheard, the GPU's memory given back."""
    device = torch.device(where)
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            if gpus:
                torch.cuda.empty_cache()
