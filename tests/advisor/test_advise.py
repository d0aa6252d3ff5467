"""What a user asks and is told, from Python and from the command line, and what bad input is answered
with."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import loadmaster as lm
from loadmaster.advisor.advice import Reason
from loadmaster.advisor.advise import advise, unknown_curve
from loadmaster.advisor.jobs.curve import ScalingCurve, measured_curve
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import Block, ClusterState, Layout, host_layout, idle
from loadmaster.advisor.replay_traces import TRACE_RULES
from loadmaster.core.errors import InputError
from tests.advisor.shared import GAVEL, GRAPHS, needs_graphs, needs_traces

TIMES = {1: 4000.0, 2: 2100.0, 4: 1200.0, 8: 900.0}
JOB = Job("j", measured_curve(TIMES))


def test_the_smallest_number_in_time_with_reason_and_interval() -> None:
    answer = lm.advise(TIMES, "8xA100-80GB", deadline_s=1500)
    assert answer.admit
    assert len(answer.devices) == 4
    assert answer.finish_s == 1200.0
    assert lm.advise(TIMES, "8xA100-80GB", deadline_s="25min") == answer
    low, high = answer.finish_interval_s or (0, 0)
    assert low < 1200 < high
    assert answer.on_time_probability > 0.99
    assert answer.reason.startswith("4 devices finish in 20 min 0 s (deadline 25 min 0 s)")
    assert answer.cheapest is not None
    assert answer.cheapest.degree == 4


def test_residuals_of_earlier_jobs_make_the_error_bar() -> None:
    ratios = [1.0 + i / 100 for i in range(21)]
    answer = advise(JOB, idle(host_layout([8])), deadline_s=1300, residuals=ratios)
    assert answer.finish_interval_s == pytest.approx((1212.0, 1428.0))
    assert answer.on_time_probability == pytest.approx(9 / 21)


def test_an_impossible_deadline_is_answered_with_the_earliest_that_can_be_kept() -> None:
    busy = ClusterState(host_layout([8]), np.array([0.0] * 2 + [50.0] * 6))
    answer = advise(JOB, busy, deadline_s=300)
    assert not answer.admit
    assert answer.code == Reason.IMPOSSIBLE_DEADLINE
    assert answer.earliest_deadline_s == 950.0
    kept = advise(JOB, busy, deadline_s=answer.earliest_deadline_s, by="elasticflow")
    assert kept.admit
    assert kept.start_s == 50.0


def test_a_full_cluster_tells_when_devices_come_free() -> None:
    busy = ClusterState(host_layout([8]), np.full(8, 100.0))
    answer = advise(JOB, busy, deadline_s=2500)
    assert (answer.code == Reason.NO_CAPACITY_UNTIL and "1 min" in answer.reason) or "100 s" in answer.reason
    assert {o.degree for o in answer.offers} == {2, 4, 8}
    assert all(o.start_s == 100.0 for o in answer.offers)


def test_devices_taken_until_nobody_knows_when_reject_without_an_offer() -> None:
    busy = ClusterState(host_layout([4]), np.full(4, np.inf))
    answer = advise(JOB, busy, deadline_s=1e6)
    assert not answer.admit
    assert (answer.code, answer.offers) == (Reason.NO_CAPACITY_UNTIL, ())
    assert "it is not known when 4 of them become free" in answer.reason


def test_a_number_that_only_a_larger_cluster_has_is_told_and_not_waited_for() -> None:
    answer = advise(Job("j", measured_curve({1: 2000.0, 16: 100.0})), idle(host_layout([8])), deadline_s=150)
    assert answer.code == Reason.IMPOSSIBLE_DEADLINE
    assert answer.earliest_deadline_s == 2000.0
    assert "at least 33 min 20 s on any number of the 8 devices" in answer.reason
    assert answer.reason.endswith("16 devices would be in time, and the cluster has 8")


def test_times_on_kinds_that_the_cluster_lacks_make_no_deadline_possible() -> None:
    curve = ScalingCurve({("slow", 1, "host"): 10.0, ("fast", 1, "host"): 2.0})
    answer = advise(Job("j", curve), idle(host_layout([1], ["slow"])), deadline_s=5)
    assert answer.code == Reason.IMPOSSIBLE_DEADLINE
    assert "at least 10 s" in answer.reason


def test_free_devices_without_a_block_are_fragmented() -> None:
    layout = Layout(
        tuple("abcd"),
        np.zeros(4, np.int64),
        np.zeros(4, np.int64),
        ("",),
        {2: (Block((0, 1), "", "host"), Block((2, 3), "", "host"))},
    )
    state = ClusterState(layout, np.array([0.0, 9.0, 0.0, 9.0]))
    answer = advise(Job("j", measured_curve({2: 5.0})), state, deadline_s=6)
    assert answer.code == Reason.FRAGMENTED
    assert "2 devices are free" in answer.reason


def test_a_job_worth_less_than_its_devices_is_priced_out() -> None:
    state = ClusterState(host_layout([8]), np.zeros(8), price=1e-3)
    answer = advise(JOB, state, deadline_s=5000, by="shadow_price")
    assert answer.code == Reason.PRICED_OUT
    assert answer.offers
    assert advise(Job("j", JOB.curve, 5000, value=100.0), state, by="shadow_price").cost > 1


def test_without_a_curve_the_requested_number_is_given_and_nothing_promised() -> None:
    answer = advise(Job("j", unknown_curve(), requested=3), idle(host_layout([4])))
    assert answer.admit
    assert len(answer.devices) == 3
    assert answer.finish_s is None
    assert answer.code == Reason.UNKNOWN_CURVE


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: lm.advise(TIMES, "8xA100-80GB", deadline_s=-1), "-1"),
        (lambda: lm.advise({16: 5.0}, "8xA100-80GB"), "at least 16 devices and the cluster has 8"),
        (lambda: lm.advise({1: -5.0}, "8xA100-80GB"), "-5.0 s on 1 device; give a time > 0"),
        (lambda: lm.advise({1.5: 5.0}, "8xA100-80GB"), "5.0 s on 1.5 devices"),  # type: ignore[dict-item]
        (lambda: lm.advise({1: "x"}, "8xA100-80GB"), "'x' s on 1 devices"),  # type: ignore[dict-item]
        (lambda: lm.advise({1: math.nan}, "8xA100-80GB"), "nan"),
        (lambda: lm.advise({0: 5.0}, "8xA100-80GB"), "0 devices"),
        (lambda: lm.advise("hf:no-such-model", "2xA100-80GB"), "no-such-model"),
        (lambda: lm.advise(TIMES, "2xA100-80GB", by="best"), "unknown policy 'best'"),
        (
            lambda: lm.advise(TIMES, "2xA100-80GB", deadline_s=9999, by="learned"),
            "these weights decide for 32",
        ),
        (lambda: ClusterState(host_layout([2]), np.zeros(3)), "3 times for 2 devices"),
        (lambda: ClusterState(host_layout([1]), np.array([-1.0])), "negative"),
        (lambda: Job("j", JOB.curve, requested=0), "0 devices"),
        (lambda: host_layout([]), "at least one host"),
    ],
)
def test_bad_input_is_told_with_its_value(call, told: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=told):
        call()


def test_advice_is_pure() -> None:
    state = ClusterState(host_layout([8]), np.arange(8.0))
    assert advise(JOB, state, deadline_s=1000).to_json() == advise(JOB, state, deadline_s=1000).to_json()


def test_a_curve_of_two_kinds_takes_the_faster_that_is_free() -> None:
    curve = ScalingCurve({("slow", 1, "host"): 10.0, ("fast", 1, "host"): 2.0})
    state = idle(host_layout([1, 1], ["slow", "fast"]))
    assert advise(Job("j", curve), state).devices == (1,)


def _job_file(folder: Path, text: str) -> str:
    (folder / "job.toml").write_text(text)
    return str(folder / "job.toml")


def test_the_command_line_advises_from_files(say, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    job = _job_file(tmp_path, 'name = "train"\ndeadline = "30min"\n[times]\n1 = 4000\n2 = 2100\n4 = 1200\n')
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"busy": [{"devices": ["gpu0", 1], "until_s": 60}]}))
    code, out, _ = say("advise", job, "--cluster", "8xA100-80GB", "--state", str(state), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["devices"] == [2, 3, 4, 5]
    assert found["code"] == "fits"
    code, out, _ = say("advise", job, "--devices", "8xA100-80GB", "--deadline", "5min")
    assert code == 1
    assert out.startswith("reject: the deadline is 5 min")
    assert "would do: 4" in out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("times = 3", "give either source"),
        ("[times]\nmany = 3", "'many' is not a number of devices"),
        ("[times]\n1 = -3", "give a number >= 0"),
        ("[times]\n1 = 0", "job.toml: the time on 1 device is '0'; give a time > 0"),
        ("colour = 1\n[times]\n1 = 3", "unknown field 'colour'"),
        ("= =", "job.toml"),
        ("requested = 0\n[times]\n1 = 3", "requested is '0'"),
    ],
)
def test_a_bad_job_file_is_one_line(say, tmp_path: Path, text: str, told: str) -> None:  # type: ignore[no-untyped-def]
    code, _, err = say("advise", _job_file(tmp_path, text), "--devices", "2xA100-80GB")
    assert code == 2
    assert told in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("busy", "told"),
    [
        ([{"devices": [0], "until": 60}], "unknown field 'until'; known: devices, until_s"),
        ([{"devices": [0], "until_s": 0}, {"devices": ["gpu0"]}], "device 'gpu0' is given twice"),
        ([{"devices": [0], "until_s": -1}], "until_s is '-1'; give a number >= 0"),
    ],
)
def test_a_bad_state_is_one_line(say, tmp_path: Path, busy: object, told: str) -> None:  # type: ignore[no-untyped-def]
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"busy": busy}))
    job = _job_file(tmp_path, "[times]\n1 = 3\n")
    code, _, err = say("advise", job, "--devices", "2xA100-80GB", "--state", str(state))
    assert code == 2
    assert told in err
    assert len(err.splitlines()) == 1


def test_a_misspelt_command_is_not_taken_for_a_job(say) -> None:  # type: ignore[no-untyped-def]
    code, _, err = say("advise", "replai", "x.trace", "--devices", "4")
    assert code == 2
    assert "unknown command of advise 'replai'; did you mean 'replay'" in err


@needs_traces
@pytest.mark.slow
def test_replay_whatif_and_pages(say, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rates = str(GAVEL / "simulation_throughputs.json")
    page = tmp_path / "page.html"
    code, out, _ = say(
        "advise",
        "replay",
        str(GAVEL / "51b7ef.trace"),
        "--throughputs",
        rates,
        "--devices",
        "4",
        "--seeds",
        "2",
        "--html",
        str(page),
        "--json",
    )
    rows = json.loads(out)["rows"]
    assert code == 0
    assert {row["policy"] for row in rows} == set(TRACE_RULES)
    assert all(row["mean"] <= row["bound"] + 1e-6 for row in rows)
    addresses = re.findall(r"(?:src|href)=[\"']?([^\"' >]*)", page.read_text())
    assert addresses
    assert all(address.startswith("#") for address in addresses), "nothing is loaded from elsewhere"
    code, out, _ = say(
        "advise",
        "whatif",
        str(GAVEL / "51b7ef.trace"),
        "--throughputs",
        rates,
        "--devices",
        "2,8",
        "--deadline-scale",
        "1,2",
        "--seeds",
        "2",
    )
    assert code == 0
    assert out.count("No policy has more than") == 4
    code, _, err = say("advise", "whatif", "x", "--throughputs", rates, "--devices", "2,x")
    assert code == 2
    assert "--devices '2,x'" in err


@needs_graphs
@pytest.mark.slow
def test_bench_and_policies_list(say) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = say("advise", "bench", "own", "--graphs", str(GRAPHS), "--seeds", "2", "--json")
    assert code == 0
    assert len(json.loads(out)["rows"]) == 4 * 13
    code, out, _ = say("advise", "policies", "--json")
    assert code == 0
    assert "elasticflow" in out
    code, _, err = say("advise", "bench", "compact", "--graphs", str(GRAPHS))
    assert code == 2
    assert "did you mean 'compat'" in err


@pytest.mark.slow
def test_a_captured_model_has_a_curve_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = "gen:transformer:200"
    first = lm.advise(source, "4xA100-80GB", steps=1e6)
    assert len(list((tmp_path / "loadmaster" / "curves").glob("*.json"))) == 1
    assert lm.advise(source, "4xA100-80GB", steps=1e6).to_json() == first.to_json()
    assert first.curve_origin == "simulated"
    assert first.finish_s is not None


def test_seconds_of_a_step_are_taken_as_many_times_as_there_are_steps() -> None:
    whole = lm.advise({1: 4000.0, 2: 2200.0}, "2xA100-80GB", deadline_s=3000)
    of_steps = lm.advise({1: 4.0, 2: 2.2}, "2xA100-80GB", steps=1000, deadline_s=3000)
    assert of_steps.finish_s == whole.finish_s == 2200.0
    with pytest.raises(InputError, match="steps is 0"):
        lm.advise({1: 4.0}, "2xA100-80GB", steps=0)


def test_a_state_tells_which_jobs_may_come_and_a_rollout_looks_ahead_to_them(say, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    job, state = tmp_path / "job.toml", tmp_path / "s.json"
    job.write_text('deadline = "1000s"\n[times]\n4 = 900\n')
    coming = {"mean_gap_s": 20, "jobs": [{"times": {"2": 10}, "deadline_s": 12}]}
    state.write_text(json.dumps({"coming": coming}))
    command = ("advise", str(job), "--cluster", "4xT4", "--state", str(state), "--policy")
    assert say(*command, "smallest")[0] == 0
    code, out, _ = say(*command, "rollout")
    assert code == 1
    assert "would not give it these devices" in out
    state.write_text(json.dumps({"coming": {"mean_gap_s": 0, "jobs": coming["jobs"]}}))
    code, _, err = say(*command, "rollout")
    assert code == 2
    assert "mean_gap_s" in err
    state.write_text(json.dumps({"coming": {"jobs": [{"times": {"0": 1}}]}}))
    assert say(*command, "rollout")[0] == 2
