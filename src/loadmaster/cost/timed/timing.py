"""Timing: the seconds of a call on a device, after a warm-up; on a GPU also the host's to launch it.

The lower quartile of several rounds: what disturbs a machine only ever adds.

CPU    calls are timed in rounds that each last long enough for the clock, by the wall or by the processor's
       clock, whichever is less: a busy machine is not taken for a slow one
CUDA   device time: a round of calls is issued while the GPU is kept busy by a wait, between two events, so
       that it runs without gaps and a slow host is not taken for a slow kernel.
       issue time: the same calls by the host's clock, before anything is waited for

wait ▒▒▒▒▒▒▒▒▒▒▒▒|event|k k k k k k|event|         GPU
|issue issue issue issue issue issue|                 host
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ROUND_S = 3e-4  # a round is at least that long
MOST_ROUNDS = 15
LEAST_ROUNDS = 3
ENOUGH_S = 0.025  # of rounds, once there are LEAST_ROUNDS; an op has its turn several times
_MOST_CALLS = 100  # in a round
_MOST_QUEUED = 30  # in a round on a GPU: its queue holds about a thousand launches, an op makes a few dozen
_WAIT_CYCLES_PER_S = 2e9  # at least the clock of any GPU
_WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """What a call takes."""

    seconds: float  # lower quartile
    spread: float  # half the distance between the quartiles, relative to the seconds
    count: int  # calls timed
    issue_s: float = 0.0


def time_call(
    call: Callable[[], Any], device: torch.device, *, warm_ups: int = _WARM_UPS, limit_s: float = math.inf
) -> Timing:
    """The time of a call; after `limit_s` no more rounds are begun once there is one."""
    end = time.perf_counter() + limit_s
    if device.type == "cuda":
        return _time_on_cuda(call, device, max(warm_ups, _WARM_UPS), end)
    return _time_on_cpu(call, max(warm_ups, _WARM_UPS), end)


def _time_on_cpu(call: Callable[[], Any], warm_ups: int, end: float) -> Timing:
    first_s = _time_calls(call, 1)
    for _ in range(_more_warm_ups(warm_ups, first_s)):
        first_s = _time_calls(call, 1)
    num_calls = _num_calls_for(ROUND_S, first_s)
    rounds: list[float] = []
    enough = time.perf_counter() + ENOUGH_S
    while _wants_more(len(rounds), enough, end):
        rounds.append(_time_calls(call, num_calls) / num_calls)
    return _summarise_rounds(rounds, num_calls)


def _more_warm_ups(wanted: int, first_s: float) -> int:
    """After the first: none for what is long enough to be warm by itself."""
    return min(wanted - 1, int(ENOUGH_S / max(first_s, 1e-9)))


def _wants_more(num_rounds: int, enough: float, end: float) -> bool:
    now = time.perf_counter()
    if num_rounds < LEAST_ROUNDS:
        return num_rounds == 0 or now < end
    return num_rounds < MOST_ROUNDS and now < min(enough, end)


def _time_on_cuda(call: Callable[[], Any], device: torch.device, warm_ups: int, end: float) -> Timing:
    with torch.cuda.device(device):
        call()  # libraries choose their kernels, the allocator gets its blocks
        torch.cuda.synchronize()
        for _ in range(_more_warm_ups(warm_ups, _time_with_events(call, 1, wait_s=0.0)[0])):
            call()
        torch.cuda.synchronize()
        first_s = _time_with_events(call, 1, wait_s=0.0)[0]
        issue_s = lower_quartile([_time_with_events(call, 1, wait_s=1e-4)[1] for _ in range(LEAST_ROUNDS)])
        num_calls = min(_MOST_QUEUED, _num_calls_for(ROUND_S, max(first_s, 1e-6)))
        rounds: list[float] = []
        issues = [issue_s]
        enough = time.perf_counter() + ENOUGH_S
        while _wants_more(len(rounds), enough, end):
            seconds, host_s = _time_with_events(call, num_calls, wait_s=2 * num_calls * issue_s)
            rounds.append(seconds / num_calls)
            issues.append(host_s / num_calls)
    timing = _summarise_rounds(rounds, num_calls)
    return Timing(timing.seconds, timing.spread, timing.count, lower_quartile(issues))


def _time_with_events(call: Callable[[], Any], num_calls: int, *, wait_s: float) -> tuple[float, float]:
    """Device seconds and host seconds of a round of calls, issued while the GPU waits."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(wait_s * _WAIT_CYCLES_PER_S))
    begin.record()
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    host_s = time.perf_counter() - started
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, host_s


def lower_quartile(seconds: list[float]) -> float:
    """The lower quartile."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]


def _time_calls(call: Callable[[], Any], num_calls: int) -> float:
    before = read_clocks()
    for _ in range(num_calls):
        call()
    return work_seconds_since(before)


def read_clocks() -> tuple[float, float]:
    """Wall time and this process's processor time, for `work_seconds_since`."""
    return time.perf_counter(), time.process_time()


def work_seconds_since(before: tuple[float, float]) -> float:
    """Seconds of work on the CPU: what other processes took of the machine meanwhile is not counted."""
    wall, used = read_clocks()
    return min(wall - before[0], used - before[1])


def _num_calls_for(round_s: float, call_s: float) -> int:
    return max(1, min(_MOST_CALLS, round(round_s / max(call_s, 1e-9))))


def _summarise_rounds(rounds: list[float], num_calls: int) -> Timing:
    if len(rounds) == 1:
        return Timing(rounds[0], 0.0, num_calls)
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return Timing(low, (high - low) / 2 / low if low > 0 else 0.0, len(rounds) * num_calls)
