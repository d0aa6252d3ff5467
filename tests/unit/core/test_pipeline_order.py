"""The order of a pipeline: drawn by hand, torch's own, and never a circle of waits."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.pipelines.order import (
    NO_MICROBATCH,
    SCHEDULES,
    SEVERAL_STAGES,
    Action,
    Work,
    find_deadlock,
    forward_order,
    in_flight_of,
    make_order,
    with_transfers,
)

HAND_DRAWN = {
    ("gpipe", 2, 4, 1): [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3",
    ],
    ("1f1b", 3, 4, 1): [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ],
    ("1f1b", 3, 1, 1): ["0F0 0B0", "1F0 1B0", "2F0 2B0"],
    ("interleaved", 4, 4, 2): [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ],
    ("zb-h1", 3, 4, 1): [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ],
}


def written(actions: tuple[Action, ...]) -> str:
    return " ".join(str(a) for a in actions if a.microbatch != NO_MICROBATCH)


@pytest.mark.parametrize("asked", HAND_DRAWN, ids=str)
def test_orders_are_those_drawn_by_hand(asked: tuple[str, int, int, int]) -> None:
    assert [written(actions) for actions in make_order(*asked)] == HAND_DRAWN[asked]


def test_each_rank_ends_with_sums_and_updates_of_its_stages() -> None:
    ending = [str(a) for a in make_order("interleaved", 4, 2, 2)[1][-4:]]
    assert ending == ["1REDUCE", "3REDUCE", "1UPDATE", "3UPDATE"]


def test_sends_stand_after_what_they_send_and_receives_before_their_use() -> None:
    ranks = with_transfers(make_order("1f1b", 2, 2), 2)
    assert written(ranks[0]) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert written(ranks[1]) == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


def test_stages_of_one_rank_hand_over_without_a_transfer() -> None:
    (alone,) = with_transfers(make_order("interleaved", 3, 2, 3), 3)
    assert not [a for a in alone if "SEND" in a.work or "RECV" in a.work]


shapes = st.tuples(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 17), st.integers(1, 4)).map(
    lambda s: s if s[0] in SEVERAL_STAGES else (*s[:3], 1)
)


@settings(max_examples=150, deadline=None)
@given(shapes)
def test_every_order_ends_and_does_each_thing_once(shape: tuple[str, int, int, int]) -> None:
    schedule, ranks, batches, each = shape
    stages = ranks * each
    order = make_order(schedule, stages, batches, each)
    assert find_deadlock(order, stages) is None
    assert find_deadlock(with_transfers(order, stages), stages) is None
    computed = [a for actions in order for a in actions]
    back = "IW" if schedule == "zb-h1" else "B"
    expected = {f"{s}{w}{m}" for s in range(stages) for w in "F" + back for m in range(batches)}
    expected |= {f"{s}{w}" for s in range(stages) for w in ("REDUCE", "UPDATE")}
    assert sorted(map(str, computed)) == sorted(expected)


@settings(max_examples=100, deadline=None)
@given(shapes)
def test_gradients_are_added_in_the_order_of_micro_batches(shape: tuple[str, int, int, int]) -> None:
    schedule, ranks, batches, each = shape
    for actions in make_order(schedule, ranks * each, batches, each):
        for stage in {a.stage for a in actions}:
            for work in ("F", "B", "I", "W"):
                seen = [a.microbatch for a in actions if a.stage == stage and a.work == work]
                assert seen == sorted(seen)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("batches", [1, 2, 8])
def test_a_stage_holds_what_its_schedule_says(stages: int, batches: int) -> None:
    held = {name: in_flight_of(make_order(name, stages, batches), stages) for name in SCHEDULES}
    assert held["gpipe"] == (batches,) * stages
    assert held["1f1b"] == tuple(min(stages - s, batches) for s in range(stages))
    assert max(held["zb-h1"]) == min(stages, batches)


# ------------------------------------------------------------------------------------------ torch


class RecordingStage:
    """Stands where torch's schedule expects a stage, and writes down what it is asked to compute."""

    def __init__(self, index: int) -> None:
        self.stage_index, self.asked = index, list[str]()

    def forward_one_chunk(self, batch: int, *_: Any, **__: Any) -> None:
        self.asked.append(f"{self.stage_index}F{batch}")

    def backward_one_chunk(self, batch: int, **_: Any) -> None:
        self.asked.append(f"{self.stage_index}B{batch}")

    def perform_reduce_grad(self, _: int) -> None:
        self.asked.append(f"{self.stage_index}REDUCE")

    def get_fwd_recv_ops(self, _: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops


def run_by_torch(schedule_class: Any, stage: int, stages: int, batches: int) -> str:
    """What torch's loop over micro-batches computes on one rank."""
    schedule, recorder = object.__new__(schedule_class), RecordingStage(stage)
    schedule._stage, schedule._num_stages, schedule._n_microbatches = recorder, stages, batches
    schedule._check_inputs = lambda *_: ([()] * batches, [{}] * batches)
    schedule._maybe_compute_loss = schedule._maybe_get_loss = lambda *_, **__: None
    schedule._initialize_stage = schedule._update_losses = lambda *_, **__: None
    schedule.scale_grads = False
    schedule._step_microbatches()
    return " ".join(recorder.asked[:-1])


@pytest.mark.parametrize(("name", "torch_name"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
@pytest.mark.parametrize(("stages", "batches"), [(1, 3), (2, 2), (3, 7), (4, 8)])
def test_the_order_is_torch_s_loop(name: str, torch_name: str, stages: int, batches: int) -> None:
    from torch.distributed.pipelining import schedules

    order = make_order(name, stages, batches)
    for stage in range(stages):
        expected = run_by_torch(getattr(schedules, torch_name), stage, stages, batches)
        assert written(order[stage]) == expected


@pytest.mark.parametrize(
    ("name", "torch_name"),
    [("interleaved", "ScheduleInterleaved1F1B"), ("zb-h1", "ScheduleInterleavedZeroBubble")],
)
@pytest.mark.parametrize(
    ("ranks", "each", "batches"), [(2, 2, 4), (2, 1, 8), (3, 2, 6), (4, 2, 10), (4, 3, 8), (4, 2, 3)]
)
def test_the_order_is_torch_s_list(name: str, torch_name: str, ranks: int, each: int, batches: int) -> None:
    from torch.distributed.pipelining import schedules

    schedule = object.__new__(getattr(schedules, torch_name))
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = ranks, each, batches
    schedule.microbatches_per_round = batches // max(1, batches // ranks)
    order = make_order(name, ranks * each, batches, each)
    for rank in range(ranks):
        listed = [a for a in schedule._calculate_single_rank_operations(rank) if a is not None]
        assert written(order[rank]) == " ".join(map(str, listed))


# ---------------------------------------------------------------------------------- what is wrong


def test_a_deadlock_says_who_waits_for_whom() -> None:
    f, b = Work.FORWARD, Work.BACKWARD
    first = (Action(f, 0, 0), Action(b, 0, 0), Action(f, 0, 1), Action(b, 0, 1))
    second = (Action(f, 1, 0), Action(f, 1, 1), Action(b, 1, 0), Action(b, 1, 1))
    found = find_deadlock((first, second), 2)
    assert found == "rank 0 waits in 0B0 for rank 1; rank 1 waits in 1F1 for rank 0"
    with pytest.raises(InputError, match="rank 0 waits in 0B0 for rank 1"):
        with_transfers((first, second), 2)


def test_two_sends_that_meet_are_a_deadlock() -> None:
    send_f, recv_f = Work.SEND_FORWARD, Work.RECEIVE_FORWARD
    send_b, recv_b, f, b = Work.SEND_BACKWARD, Work.RECEIVE_BACKWARD, Work.FORWARD, Work.BACKWARD
    start = [Action(f, 0, 0), Action(send_f, 0, 0), Action(f, 0, 1)]
    first = [*start, Action(send_f, 0, 1), Action(recv_b, 0, 0)]
    second = [Action(recv_f, 1, 0), Action(f, 1, 0), Action(b, 1, 0), Action(send_b, 1, 0)]
    second += [Action(recv_f, 1, 1)]
    assert find_deadlock((first, second), 2) == (
        "rank 0 waits in 0SEND_F1 for rank 1; rank 1 waits in 1SEND_B0 for rank 0"
    )


def test_an_action_that_stands_twice_is_said() -> None:
    forward = Action(Work.FORWARD, 0, 0)
    assert find_deadlock(((forward, forward),), 1) == "0F0 stands in the order more than once"


def test_an_evaluation_has_forward_passes_alone() -> None:
    order = forward_order(2, 2)
    assert [written(actions) for actions in order] == ["0F0 0F1", "1F0 1F1"]
    assert find_deadlock(with_transfers(order, 2), 2) is None


def test_what_cannot_be_ordered_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="gpipe"):
        make_order("gpip", 2, 2)
    with pytest.raises(InputError, match="0 micro-batches"):
        make_order("1f1b", 2, 0)
    with pytest.raises(InputError, match="allows 1"):
        make_order("1f1b", 4, 2, 2)
    with pytest.raises(InputError, match="3 stages cannot be dealt"):
        make_order("interleaved", 3, 2, 2)
