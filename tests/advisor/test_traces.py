"""Traces: files as data, replays against a plain simulator, promises, bounds."""

import json
from pathlib import Path

import numpy as np
import pytest

from loadmaster.advisor.environments.trace import (
    DEADLINES,
    LEVELS,
    Throughputs,
    Trace,
    TraceStream,
    draw_trace_stream,
    read_throughputs,
    read_trace,
)
from loadmaster.core.errors import FileError, FormatError, InputError, UnknownNameError
from tests.advisor.plain_traces import plain_elasticflow, plain_rigid
from tests.advisor.shared import GAVEL, needs_traces

LINE = "LM\tpython3 -c 'import os'\t-n\t1\t{steps}\t{at}\t{n}"


@needs_traces
def test_recorded_traces_have_the_published_numbers() -> None:
    assert [len(read_trace(GAVEL / f"{n}.trace").jobs) for n in ("51b7ef", "2869ce", "0e4a51")] == [
        18,
        533,
        1181,
    ]
    rates = read_throughputs(GAVEL / "simulation_throughputs.json")
    v100 = rates.rate[rates.kinds.index("v100"), 0]
    assert len(rates.types) == 26
    assert (v100[:, 1:] > 0).any(axis=1).sum() == 26 - 7


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"steps": "ten", "at": 0, "n": 1}, "number of steps is 'ten'"),
        ({"steps": -1, "at": 0, "n": 1}, "not positive"),
        ({"steps": 1, "at": -5, "n": 1}, "negative"),
        ({"steps": 1, "at": "nan", "n": 1}, "not a number"),
        ({"steps": 1, "at": 0, "n": "__import__('os')"}, "not a number"),
        ({"steps": 1, "at": 0, "n": 1.5}, "whole number"),
        ({"steps": 1, "at": 0, "n": "1\textra"}, "8 fields"),
    ],
)
def test_a_malformed_line_stops_with_its_number_or_is_skipped(
    tmp_path: Path, fields: dict[str, object], told: str
) -> None:
    file = tmp_path / "t.trace"
    file.write_text(f"{LINE.format(steps=5, at=1, n=1)}\n{LINE.format(**fields)}\n")
    with pytest.raises(FormatError, match=f"line 2: .*{told}"):
        read_trace(file)
    kept = read_trace(file, skip_malformed=True)
    assert len(kept.jobs) == 1
    assert kept.skipped[0].startswith("line 2")


def test_keys_of_throughputs_are_read_and_never_evaluated(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"v100": {"(__import__('os').system('true'), 1)": {"null": 1.0}}}))
    with pytest.raises(FormatError, match="is not"):
        read_throughputs(file)


def test_a_file_that_is_not_there_is_not_told_to_be_malformed(tmp_path: Path) -> None:
    for read in (read_throughputs, read_trace):
        with pytest.raises(FileError, match=r"^cannot read"):
            read(tmp_path / "none")


def test_unknown_kinds_and_types_are_told() -> None:
    rates = Throughputs(("v100",), ("LM",), np.ones((1, 2, 1, 4)))
    trace = Trace("t", ())
    with pytest.raises(UnknownNameError, match="device kind 'a100'"):
        draw_trace_stream(trace, rates, 0, kinds=("a100",))
    with pytest.raises(UnknownNameError, match="deadline range"):
        draw_trace_stream(trace, rates, 0, deadline="soon")
    with pytest.raises(UnknownNameError, match="job type"):
        rates.type_index("LN")


def _random_stream(seed: int, jobs: int = 40) -> TraceStream:
    rng = np.random.default_rng(seed)
    arrival = np.sort(rng.uniform(0, 300, jobs).round(1))
    base = rng.uniform(5, 120, jobs)
    speed = np.cumsum(rng.uniform(0.1, 1.2, (jobs, len(LEVELS))), axis=1)
    host = base[:, None] / speed
    host[rng.random(host.shape) < 0.15] = np.inf
    host[:, 0] = base
    duration = np.stack([host, host * rng.uniform(1.0, 1.6, host.shape)], axis=1)[:, None]
    reference = np.array([rng.choice(np.flatnonzero(np.isfinite(row))) for row in host])
    due = arrival + rng.uniform(0.5, 3, jobs) * base
    return TraceStream("random", ("gpu",), arrival, due, duration, reference, np.ones(jobs))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["fifo", "edf", "always-max", "smallest"])
@pytest.mark.parametrize("seed", range(6))
def test_rigid_rules_agree_with_a_plain_simulator(seed: int, order: str) -> None:
    from loadmaster.advisor.environments.trace_engine import replay_trace
    from loadmaster.advisor.replay_traces import TRACE_RULES

    stream, hosts = _random_stream(seed), [4, 2, 3]
    found = replay_trace(stream, TRACE_RULES[order], np.array(hosts))
    plain = plain_rigid(stream, hosts, order)
    assert sorted(plain) == np.flatnonzero(~np.isnan(found.end_s)).tolist()
    for j, (start, end) in plain.items():
        assert (found.start_s[j], found.end_s[j]) == pytest.approx((start, end))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_elasticflow_agrees_with_a_plain_simulator(seed: int) -> None:
    from loadmaster.advisor.environments.trace_engine import Order, TraceRule, replay_trace

    stream = _random_stream(seed, 60)
    found = replay_trace(stream, TraceRule(Order.RESERVE), np.array([8]), elastic=True)
    plain = plain_elasticflow(stream, 8)
    assert len(plain) > 10
    assert sorted(plain) == np.flatnonzero(~np.isnan(found.end_s)).tolist()
    for j, end in plain.items():
        assert found.end_s[j] == pytest.approx(end)


@pytest.mark.slow
def test_the_largest_set_plans_a_job_that_does_not_fit_in_its_turn_before_the_others() -> None:
    from loadmaster.advisor.environments.trace_engine import Order, TraceRule, replay_trace

    duration = np.full((2, 1, 2, len(LEVELS)), np.inf)
    duration[0, 0, 0, :2] = 8.0, 5.0  # cheapest on one device, where it leaves the other too little
    duration[1, 0, 0, 1] = 4.0
    stream = TraceStream(
        "two", ("gpu",), np.zeros(2), np.array([10.0, 10.5]), duration, np.array([0, 1]), np.ones(2)
    )
    for elastic in (False, True):
        met = [
            replay_trace(stream, TraceRule(order, True), np.array([2]), elastic=elastic).num_met
            for order in (Order.RESERVE, Order.SET)
        ]
        assert met == [1, 2]


@needs_traces
@pytest.mark.slow
def test_a_replay_on_two_kinds_leaves_out_rules_that_reserve(say) -> None:  # type: ignore[no-untyped-def]
    rates = str(GAVEL / "simulation_throughputs.json")
    command = ("advise", "replay", str(GAVEL / "51b7ef.trace"), "--throughputs", rates, "--seeds", "2")
    code, out, _ = say(*command, "--cluster", "2xv100,4xk80", "--json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert {row["policy"] for row in rows} == {"fifo", "edf", "always-max", "smallest", "least-work"}
    assert rows[0]["setting"].startswith("2 v100 and 4 k80")
    assert all(row["mean"] <= row["bound"] + 1e-6 for row in rows)
    code, _, err = say(*command, "--devices", "2xv100,4xk80", "--policy", "elasticflow")
    assert code == 2
    assert "rules that reserve devices serve one kind" in err
    code, _, err = say(*command, "--devices", "2xv100,4xk80", "--elastic")
    assert code == 2
    assert "resized jobs have one kind of device" in err
    code, _, err = say(*command, "--devices", "2", "--resize", "30s")
    assert code == 2
    assert "give a time >= 0, and elastic jobs" in err


@pytest.mark.parametrize("text", ["", "0", "-2", "2x", "x2", "2xv100,3xv100", "2,3", "99999999"])
def test_what_is_no_number_of_devices_is_refused(text: str) -> None:
    from loadmaster.advisor.replay_traces import parse_sizes

    assert parse_sizes("32xv100, 16xk80", "p100") == {"v100": 32, "k80": 16}
    assert parse_sizes("7", "p100") == {"p100": 7}
    with pytest.raises(InputError, match="is not a number of devices"):
        parse_sizes(text, "v100")


def test_notes_of_the_solver_do_not_reach_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    import ctypes

    from loadmaster.advisor.bounds.traces import _quiet_stdout

    library = ctypes.CDLL(None)
    print("before")
    with _quiet_stdout():
        library.printf(b"a note of a library\n")
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_every_trace_rule_keeps_devices_promises_and_the_bound(seed: int) -> None:
    from loadmaster.advisor.bounds.traces import most_met
    from loadmaster.advisor.environments.trace_engine import ELASTIC_ORDERS, replay_trace
    from loadmaster.advisor.replay_traces import TRACE_RULES

    stream, hosts = _random_stream(seed), np.array([8, 4])
    rigid, elastic = most_met(stream, hosts), most_met(stream, hosts, elastic=True)
    assert rigid <= elastic + 1e-3
    for name, rule in TRACE_RULES.items():
        one, again = (replay_trace(stream, rule, hosts) for _ in range(2))
        assert np.array_equal(one.end_s, again.end_s, equal_nan=True)
        assert one.num_met <= rigid + 1e-6, name
        ran = np.flatnonzero(~np.isnan(one.start_s))
        assert (one.start_s[ran] >= stream.arrival_s[ran]).all()
        for t in one.start_s[ran]:
            assert one.devices[ran][(one.start_s[ran] <= t) & (one.end_s[ran] > t)].sum() <= 12, name
        if rule.order in ELASTIC_ORDERS:
            resized = replay_trace(stream, rule, hosts, elastic=True)
            assert resized.num_met <= elastic + 1e-6
            assert resized.device_s <= 12 * (np.nanmax(resized.end_s) if resized.met.any() else 0) + 1e-6


@pytest.mark.slow
def test_elastic_replays_serve_one_kind_and_resizing_costs() -> None:
    from dataclasses import replace

    from loadmaster.advisor.environments.trace_engine import Order, TraceRule, replay_trace

    stream = _random_stream(1)
    with pytest.raises(InputError, match="serves one kind"):
        replay_trace(stream, TraceRule(Order.EDF), np.array([4]), elastic=True)
    with pytest.raises(InputError, match="has kind 1"):
        replay_trace(stream, TraceRule(Order.EDF), np.array([4]), host_kind=np.array([1]))
    free, paid = (
        replay_trace(stream, replace(TraceRule(Order.RESERVE), resize_s=s), np.array([8]), elastic=True)
        for s in (0, 60)
    )
    assert paid.device_s > free.device_s


@needs_traces
@pytest.mark.slow
def test_unequal_kinds_and_all_deadlines_replay() -> None:
    from loadmaster.advisor.environments.trace_engine import replay_trace
    from loadmaster.advisor.replay_traces import TRACE_RULES

    rates = read_throughputs(GAVEL / "simulation_throughputs.json")
    trace = read_trace(GAVEL / "51b7ef.trace")
    for deadline in DEADLINES:
        stream = draw_trace_stream(trace, rates, 3, deadline=deadline, kinds=("v100", "k80"))
        for name in ("edf", "smallest", "least-work"):
            outcome = replay_trace(stream, TRACE_RULES[name], np.array([2, 4]), host_kind=np.array([0, 1]))
            assert outcome.num_late == 0
            assert outcome.num_met > 0


def _brute_force(stream: TraceStream, hosts: list[int]) -> int:
    """Most jobs in time over every set, order and option, each started as early as it can be."""
    from itertools import combinations, permutations, product

    num = len(stream.due_s)
    for size in range(num, 0, -1):
        for jobs in combinations(range(num), size):
            for order in permutations(jobs):
                for levels in product(range(2), repeat=size):
                    if _all_in_time(stream, hosts, order, levels):
                        return size
    return 0


def _all_in_time(
    stream: TraceStream, hosts: list[int], order: tuple[int, ...], levels: tuple[int, ...]
) -> bool:
    """Serial schedule generation: each job in turn at its earliest feasible start in one host."""
    placed: list[tuple[float, float, int, int]] = []
    for j, q in zip(order, levels, strict=True):
        n, time = LEVELS[q], float(stream.duration_s[j, 0, 0, q])
        starts = sorted({float(stream.arrival_s[j]), *(end for _, end, _, _ in placed)})
        for start in (s for s in starts if s >= stream.arrival_s[j]):
            if start + time > stream.due_s[j]:
                return False
            moments = [start, *(b for b, _, _, _ in placed if start < b < start + time)]
            room = [
                max(sum(m for b, e, g, m in placed if g == h and b <= t < e) for t in moments)
                for h in range(len(hosts))
            ]
            at = [h for h in range(len(hosts)) if room[h] + n <= hosts[h]]
            if at:
                placed.append((start, start + time, at[0], n))
                break
        else:
            return False
    return True


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_of_small_streams_exceeds_the_bound(seed: int) -> None:
    from loadmaster.advisor.bounds.traces import most_met

    rng = np.random.default_rng(seed)
    num = 4
    duration = np.full((num, 1, 2, len(LEVELS)), np.inf)
    one = rng.uniform(2, 10, num)
    duration[:, 0, 0, 0], duration[:, 0, 0, 1] = one, one / rng.uniform(1.2, 2.2, num)
    arrival = np.sort(rng.uniform(0, 6, num))
    due = arrival + one * rng.uniform(0.6, 1.6, num)
    stream = TraceStream("s", ("g",), arrival, due, duration, np.zeros(num, np.int64), np.ones(num))
    hosts = [2, 1] if seed % 2 else [2]
    best = _brute_force(stream, hosts)
    rigid, elastic = (most_met(stream, np.array(hosts), elastic=e) for e in (False, True))
    assert best <= rigid + 1e-6
    assert best <= elastic + 1e-6


def test_counts_that_no_host_has_are_not_counted_on() -> None:
    from loadmaster.advisor.bounds.traces import most_met

    duration = np.full((1, 1, 2, len(LEVELS)), np.inf)
    duration[0, 0, 0, 3] = 5.0  # eight devices in one host
    stream = TraceStream("s", ("g",), np.zeros(1), np.full(1, 9.0), duration, np.full(1, 3), np.ones(1))
    assert most_met(stream, np.array([8])) == pytest.approx(1.0, abs=1e-3)
    assert most_met(stream, np.array([4, 4])) == 0


def _trace_env() -> object:
    from loadmaster.advisor.environments.trace import TraceJob
    from loadmaster.advisor.environments.trace_env import TraceEnv

    rng = np.random.default_rng(4)
    rate = np.cumsum(rng.uniform(0.4, 1.0, (2, 2, 3, len(LEVELS))), axis=3)
    rate[:, 1] *= 0.7
    rates = Throughputs(("v100", "k80"), ("a", "b", "c"), rate)
    arrivals = np.sort(rng.uniform(0, 400, 30))
    jobs = [TraceJob(i, "abc"[i % 3], 40.0 + i, float(at), 2) for i, at in enumerate(arrivals)]
    kinds = {"kinds": ("v100", "k80"), "host_kind": np.array([0, 0, 1])}
    return TraceEnv(Trace("t", tuple(jobs)), rates, np.array([2, 2, 4]), deadline="loose", **kinds)


def test_gymnasiums_checker_passes_on_recorded_arrivals() -> None:
    from gymnasium.utils.env_checker import check_env

    env = _trace_env()
    check_env(env, skip_render_check=True)  # type: ignore[arg-type]
    first = [env.reset(seed=9)[0].tolist() for _ in range(2)]  # type: ignore[attr-defined]
    assert first[0] == first[1]


def test_an_action_outside_of_the_space_is_refused() -> None:
    env = _trace_env()
    env.reset(seed=1)  # type: ignore[attr-defined]
    for action in (-1, 9):
        with pytest.raises(InputError, match=f"action {action} is not in Discrete"):
            env.step(action)  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(3))
def test_the_mask_of_recorded_arrivals_offers_exactly_what_ends_in_time(seed: int) -> None:
    env = _trace_env()
    _, info = env.reset(seed=seed)  # type: ignore[attr-defined]
    stream, rng = env._stream, np.random.default_rng(seed)  # type: ignore[attr-defined]
    hosts, kinds = [(0, 1), (2, 3), (4, 5, 6, 7)], [0, 0, 1]
    busy: list[tuple[float, float, set[int]]] = []
    for j in range(len(stream.due_s)):
        now, due = stream.arrival_s[j], stream.due_s[j]
        ends = {d: max([e for _, e, held in busy if d in held], default=0.0) for d in range(8)}
        for action in range(1, 9):
            g, q = divmod(action - 1, len(LEVELS))
            n, best = LEVELS[q], np.inf
            for start in {now, *(e for e in ends.values() if e > now)}:
                free = [
                    [d for d in host if ends[d] <= start]
                    for host, k in zip(hosts, kinds, strict=True)
                    if k == g
                ]
                if any(len(one) >= n for one in free):
                    best = min(best, start + stream.duration_s[j, g, 0, q])
                elif sum(map(len, free)) >= n:
                    best = min(best, start + stream.duration_s[j, g, 1, q])
            assert info["action_mask"][action] == (best <= due * (1 + 1e-12))
            assert env.plan_of(action)[1] == pytest.approx(best)  # type: ignore[attr-defined]
        action = int(rng.choice(np.flatnonzero(info["action_mask"])))
        if action:
            start, end, devices = env.plan_of(action)  # type: ignore[attr-defined]
            assert all(ends[d] <= start for d in devices), "a device is given twice"
            busy.append((start, end, set(devices.tolist())))
        _, reward, over, _, info = env.step(action)  # type: ignore[attr-defined]
        assert reward == (action > 0)
    assert over
