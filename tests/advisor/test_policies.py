"""Every policy: the engine's rule against the policy as called, on a second simulator; and what all must
hold."""

import numpy as np
import pytest

from loadmaster.advisor.environments.blocks import DEGREES, all_blocks
from loadmaster.advisor.environments.engine import Cause, Rule, replay
from loadmaster.advisor.environments.streams import draw_stream
from loadmaster.advisor.jobs.curve import measured_curve
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import ClusterState, host_layout
from loadmaster.advisor.policies.registry import Policy, Run, list_policies, policy
from loadmaster.core.errors import InputError, UnknownNameError
from tests.advisor.plain_ramp import ALL, BLOCKS, play
from tests.advisor.shared import needs_graphs, world

WORDS = {
    Cause.ACCEPTED: "accepted",
    Cause.REJECTED: "rejected",
    Cause.NO_BLOCK: "no block",
    Cause.LATE: "late",
}
WITH_RULES = [
    policy("para_max"),
    policy("para_min"),
    policy("random_degree"),
    policy("constant:8"),
    policy("smallest"),
    policy("smallest", floor=4),
    policy("smallest", floor=2, go_on=False),
]
OWN = [policy("best_fit"), policy("best_fit", floor=4), policy("shadow_price", device_price=2e-5)]
ALL_POLICIES = [policy(name) for name in list_policies() if name not in ("learned", "rollout")]
ALL_POLICIES.append(policy("rollout", horizon=4, futures=3))


def test_the_second_simulator_has_the_same_blocks() -> None:
    blocks = all_blocks()
    masks = [sum(1 << ALL.index(m) for m in members) for k in DEGREES for _, members in BLOCKS[k]]
    assert masks == blocks.mask.tolist()


@needs_graphs
@pytest.mark.parametrize("name", ["compat", "own", "fixed"])
@pytest.mark.parametrize("seed", [0, 1])
def test_engine_and_plain_simulator_agree_on_every_decision(name: str, seed: int) -> None:
    w, jobs = world(name), 60
    stream = draw_stream("ABCD"[seed], 40 + seed, poisson=bool(seed))
    for one in WITH_RULES + (OWN if name != "compat" else []):
        rule: Rule = one.rule  # type: ignore[attr-defined]
        fast = replay(w, stream, rule)
        slow = play(w, stream, one, jobs)
        assert [WORDS[Cause(c)] for c in fast.cause[:jobs]] == [word for word, _, _ in slow], one
        assert fast.degree[:jobs].tolist() == [degree for _, degree, _ in slow], one


def _states() -> list[ClusterState]:
    rng = np.random.default_rng(5)
    layout = host_layout([4, 4, 2])
    return [
        ClusterState(layout, np.where(rng.random(10) < share, 100.0, 0.0)) for share in (0, 0.3, 0.6, 1.0)
    ]


@pytest.mark.parametrize("one", ALL_POLICIES, ids=lambda p: type(p).__name__)
def test_a_policy_takes_free_devices_once_and_repeats(one: Policy) -> None:
    curve = measured_curve({1: 100, 2: 60, 4: 35, 8: 30})
    for state in _states():
        for limit in (10.0, 31.0, 40.0, 1e9):
            job = Job("j", curve, limit)
            decisions = [one(job, state, Run(np.random.default_rng(3), (job,), 10.0)) for _ in range(2)]
            assert decisions[0] == decisions[1]
            decision = decisions[0]
            block = decision.block or (state.place(job, decision.degree) if decision.admit else None)
            if block is not None:
                assert len(set(block.devices)) == decision.degree
                start = decision.start_s if decision.start_s is not None else state.now_s
                assert all(state.free_at_s[d] <= start for d in block.devices)


def test_an_unknown_policy_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'smallest'"):
        policy("smalest")
    with pytest.raises(InputError, match="not a whole number"):
        policy("constant:four")


@pytest.mark.parametrize(
    ("name", "parameters", "told"),
    [
        ("rollout:-3", {}, "looks at -3 arrivals in 20 futures"),
        ("rollout", {"futures": 0}, "in 0 futures"),
        ("smallest:0", {}, "smallest has a floor of 0 devices"),
        ("best_fit:-1", {}, "best_fit has a floor of -1 devices"),
        ("shadow_price", {"device_price": -1.0}, "has a price of -1.0"),
        ("shadow_price", {"block_price": (0.0, float("nan"))}, "has a price of nan"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(
    name: str, parameters: dict[str, object], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        policy(name, **parameters)


def test_superlinear_and_falling_curves_are_scanned_whole() -> None:
    curve = measured_curve({1: 100, 2: 30, 4: 40, 8: 5})
    assert any("slower" in note for note in curve.findings())
    assert any("proportional" in n for n in curve.findings())
    state = ClusterState(host_layout([8]), np.zeros(8))
    assert policy("smallest")(Job("j", curve, 20), state, Run()).degree == 8


def test_a_compiled_future_lets_in_what_the_policy_does_step_by_step() -> None:
    from loadmaster.advisor.environments.host_futures import draw_futures, future_value, job_table
    from loadmaster.advisor.jobs.curve import ScalingCurve
    from loadmaster.advisor.policies.rollout import play_futures

    rng = np.random.default_rng(1)
    layout = host_layout([4, 4, 2, 3], ["a", "b", "a", "a"])
    spread = {("a", n, "spread"): 50.0 / n + 3 * n for n in (2, 4, 8)}
    curves = [
        measured_curve({1: 60, 2: 33, 4: 20}),
        ScalingCurve({("a", 1, "host"): 40, ("a", 2, "host"): 25, ("b", 4, "host"): 9} | spread),
    ]
    jobs = tuple(
        Job(str(i), curves[i % 2], float(limit), value=1.0 + i) for i, limit in enumerate((15, 30, 45, 70))
    )
    futures = draw_futures(rng, len(jobs), 6.0, (5, 25))
    table = job_table(jobs, layout)
    for share in (0.0, 0.4, 0.8):
        free_at = np.where(rng.random(13) < share, 100.0 + rng.integers(1, 60, 13), 0.0)
        state = ClusterState(layout, free_at, now_s=100.0)
        plain = play_futures(state, policy("smallest"), jobs, futures)
        assert future_value(state, table, futures) == plain
        assert plain > 0


def test_a_rollout_refuses_a_job_whose_devices_serve_more_valuable_ones() -> None:
    slow, fast = Job("slow", measured_curve({4: 900}), 1000), Job("fast", measured_curve({2: 10}), 12)
    state = ClusterState(host_layout([4]), np.zeros(4))
    with_fast = Run(np.random.default_rng(0), (fast,), 20.0)
    assert policy("smallest")(slow, state, with_fast).admit
    assert not policy("rollout")(slow, state, with_fast).admit
    alone = policy("rollout")(slow, state, Run())
    assert alone.admit
    assert "smallest answered" in alone.warning
    assert "no price" in policy("shadow_price")(slow, state, Run()).warning
    with pytest.raises(InputError, match="constant has 0 devices"):
        policy("constant:0")
