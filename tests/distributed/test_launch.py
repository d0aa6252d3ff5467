"""Pipelines over real processes: numbers, checkpoints, and what happens when one dies."""

import copy
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loadmaster as lm
from loadmaster.core.errors import InputError, LoadmasterError, PlanError
from loadmaster.modules.checkpoint import Checkpoint
from loadmaster.runtime.distributed.processes import WorkerError
from loadmaster.zoo.example import Example
from tests.distributed.pipelines import (
    as_batch,
    largest_difference,
    pipeline_placement,
    train_plainly,
    whole_batch,
)
from tests.distributed.run_models import (
    HalfFrozen,
    Net,
    Slow,
    adamw,
    compare,
    fail_at_seven,
    halve,
    sgd,
    square,
)
from tests.torch_models import example

LIMIT_S = 10.0  # from a worker's end to the end of the run


def _net(rows: int = 4) -> Example:
    torch.manual_seed(2)
    return Example(Net(), (torch.randn(rows, 16),), loss=square)


def test_a_pipeline_trains_evaluates_and_saves_as_one_process_does(tmp_path: Path) -> None:
    built = _net()
    plain = Example(copy.deepcopy(built.model), built.args, loss=square)
    placement = pipeline_placement(built, 2, 3)
    given = whole_batch(built, 3)
    given = ((given[0][0][:11],), {})  # 4, 4 and 3 rows
    with lm.launch(placement, built.model, loss=square, optimizer=adamw, clip=0.05, seed=5) as run:
        losses = [run.step(as_batch(given)) for _ in range(3)]
        norm, path, state = run.grad_norm, run.save(tmp_path), run.state_dict()
        outputs, loss = run.predict(as_batch(given)), run.evaluate(as_batch(given))
        timeline, stages, links = run.timeline(), run.stage_times(), run.link_times()
        pids = [one.pid for one in run._group.processes]  # type: ignore[union-attr]
    expected = train_plainly(plain, given, [4, 4, 3], adamw, steps=3, seed=5, clip=0.05)
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert largest_difference(state, expected.state) < 1e-5
    assert norm is not None
    assert norm > 0.05
    plain.model.eval()
    whole = plain.model(given[0][0])
    assert torch.allclose(outputs, whole, rtol=1e-4, atol=1e-6)
    assert loss == pytest.approx(square(whole).item(), rel=1e-5)
    saved = Checkpoint(path)
    assert saved.names == set(plain.model.state_dict())
    fresh = Net()
    fresh.load_state_dict({name: saved.read(name) for name in saved.names})
    assert not list(tmp_path.glob(".partial*"))
    assert timeline.step_s > 0
    assert [one.stage for one in stages] == [0, 1]
    assert [(one.stage, one.to_stage, one.rank, one.to_rank) for one in links] == [(0, 1, 0, 1), (1, 0, 1, 0)]
    assert all(one.num_bytes > 0 and one.predicted_s > 0 for one in links)
    assert len(timeline.kind) == 2 * (3 + 3 + 2)
    assert all(not os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_a_plan_with_other_stages(tmp_path: Path) -> None:
    built = _net()
    plain = Example(copy.deepcopy(built.model), built.args, loss=square)
    given = whole_batch(built, 2)
    with lm.launch(pipeline_placement(built, 2, 2), built.model, loss=square, optimizer=adamw) as run:
        run.step(as_batch(given))
        run.save(tmp_path)
    other = _net()
    with lm.launch(
        pipeline_placement(other, 3, 2, "gpipe"), other.model, loss=square, optimizer=adamw
    ) as run:
        run.load(tmp_path)
        run.step(as_batch(given))
        state = run.state_dict()
    expected = train_plainly(plain, given, [4, 4], adamw, steps=2)
    assert largest_difference(state, expected.state) < 1e-5


@pytest.mark.slow
def test_targets_are_split_and_the_schedule_of_the_optimizer_counts() -> None:
    built = Example(_net().model, (torch.randn(4, 16),), loss=square)
    placement = pipeline_placement(built, 2, 2, recompute=True)
    batch, target = torch.randn(8, 16), torch.randint(0, 3, (8,))
    plain = copy.deepcopy(built.model)
    with lm.launch(placement, built.model, loss=compare, optimizer=sgd, scheduler=halve) as run:
        losses = [run.step(batch, target) for _ in range(2)]
        state = run.state_dict()
    from loadmaster.runtime.distributed.pipeline.executor import micro_batch_seed

    optimizer = sgd(list(plain.parameters()))
    schedule = halve(optimizer)
    for step in range(2):
        optimizer.zero_grad()
        for number in range(2):
            torch.manual_seed(micro_batch_seed(0, step, number))
            rows = slice(4 * number, 4 * number + 4)
            (compare(plain(batch[rows]), target[rows]) / 2).backward()
        optimizer.step()
        schedule.step()
    assert losses[0] > 0
    assert largest_difference(state, plain.state_dict()) < 1e-5


@pytest.mark.slow
def test_gpt2_with_a_tied_embedding_stays_equal_over_interleaved_stages() -> None:
    built = example("gpt2")
    plain = Example(copy.deepcopy(built.model), built.args, built.kwargs)
    given = whole_batch(built, 2)
    placement = pipeline_placement(built, 4, 2, "interleaved", per_rank=2)
    with lm.launch(placement, built.model, optimizer=sgd) as run:
        losses = [run.step(as_batch(given)) for _ in range(2)]
        state = run.state_dict()
    expected = train_plainly(plain, given, [3, 3], sgd, steps=2)
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert largest_difference(state, expected.state) < 1e-5


@pytest.mark.slow
def test_replicas_add_up_their_gradients() -> None:
    torch.manual_seed(4)
    built = Example(
        torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))), (torch.randn(3, 8),), loss=square
    )
    plain = Example(copy.deepcopy(built.model), built.args, loss=square)
    given = whole_batch(built, 3)
    placement = pipeline_placement(built, 1, 3, replicas=2)
    with lm.launch(placement, built.model, loss=square, optimizer=sgd, clip=0.1) as run:
        losses = [run.step(as_batch(given)) for _ in range(2)]
        state = run.state_dict()
    expected = train_plainly(plain, given, [3, 3, 3], sgd, steps=2, clip=0.1)
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert largest_difference(state, expected.state) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_stopped_ends_the_run(how: signal.Signals, tmp_path: Path) -> None:
    built = Example(Slow(), (torch.randn(4, 16),), loss=square)
    placement = pipeline_placement(built, 2, 2)
    batch = as_batch(whole_batch(built, 2))
    struck: list[float] = []
    pids: list[int] = []

    def strike() -> None:
        time.sleep(0.3)
        struck.append(time.monotonic())
        os.kill(pids[1], how)

    def train() -> None:
        with lm.launch(placement, built.model, loss=square, optimizer=sgd) as run:
            run.step(batch)
            pids.extend(one.pid for one in run._group.processes)  # type: ignore[union-attr]
            threading.Thread(target=strike).start()
            while True:
                run.step(batch)
                run.save(tmp_path / str(run.steps_done))

    with pytest.raises(WorkerError) as raised:
        train()
    assert time.monotonic() - struck[0] < LIMIT_S
    assert "rank 1" in str(raised.value)
    assert ("SIGKILL" if how == signal.SIGKILL else "stopped") in str(raised.value)
    assert all(not os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not list(tmp_path.glob("*/.partial*"))
    for path in tmp_path.glob("*/step-*"):
        assert Checkpoint(path).names == set(built.model.state_dict())


@pytest.mark.slow
def test_a_worker_that_raises_shows_its_own_traceback_in_the_parent() -> None:
    built = _net()
    placement = pipeline_placement(built, 2, 2)
    with lm.launch(placement, built.model, loss=fail_at_seven, optimizer=sgd) as run:
        run.step(torch.randn(8, 16), torch.zeros(8, dtype=torch.int64))
        with pytest.raises(WorkerError) as raised:
            run.step(torch.randn(8, 16), torch.full((8,), 2))
    text = str(raised.value)
    assert text.startswith("rank 1 raised ValueError: the target has a seven")
    assert "run_models.py" in text


@pytest.mark.slow
def test_a_checkpoint_has_the_schedule_where_the_first_stage_trains_nothing(tmp_path: Path) -> None:
    torch.manual_seed(3)
    built = Example(HalfFrozen(), (torch.randn(4, 16),), loss=square)
    placement = pipeline_placement(built, 2, 2)
    batch = as_batch(whole_batch(built, 2))
    given: dict[str, Any] = {"loss": square, "optimizer": sgd, "scheduler": halve}
    with lm.launch(placement, copy.deepcopy(built.model), **given) as run:
        with pytest.raises(InputError, match="batch of 1 cannot be split into 2 micro-batches"):
            run.step(torch.randn(1, 16))
        for _ in range(2):  # the run goes on
            run.step(batch)
        path = run.save(tmp_path)
        assert run.save(tmp_path) == path  # nothing has changed
        for _ in range(2):
            run.step(batch)
        state = run.state_dict()
    with lm.launch(placement, copy.deepcopy(built.model), **given) as run:
        run.load(tmp_path)
        for _ in range(2):
            run.step(batch)
        assert largest_difference(run.state_dict(), state) < 1e-7
        run.load(tmp_path)
        with pytest.raises(LoadmasterError, match="exists already"):  # another run wrote it
            run.save(tmp_path)


def test_what_cannot_be_run_is_said_before_a_process_is_started() -> None:
    built = _net()
    placement = pipeline_placement(built, 2, 2)
    with pytest.raises(InputError, match="top level of a module"):
        lm.launch(placement, built.model, optimizer=lambda weights: torch.optim.SGD(weights))
    small = replace(placement, peak_bytes=np.array([2**40, 0]))
    with pytest.raises(PlanError, match="does not fit on cpu#0"):
        lm.launch(small, built.model)
    with pytest.raises(PlanError, match=r"lm\.launch"):
        lm.place(built.model, placement)
    with pytest.raises(PlanError, match="the plan is for another model"):
        lm.launch(placement, Net(layers=5))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"clip": -1.0}, "clip is -1.0"),
        ({"threads": 0}, "threads is 0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"autocast": "bf16"}, "autocast is 'bf16'"),
        ({"scheduler": 7, "optimizer": sgd}, "scheduler is 7"),
        ({"scheduler": halve}, "no optimizer"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(given: dict[str, Any], words: str) -> None:
    built = _net()
    with pytest.raises(InputError, match=words):
        lm.launch(pipeline_placement(built, 2, 2), built.model, **given)


def test_fewer_rows_than_micro_batches_are_refused() -> None:
    from loadmaster.runtime.distributed.pipeline.layout import layout_of

    layout = layout_of(pipeline_placement(_net(), 2, 4))
    assert layout.split_rows(10) == (3, 3, 2, 2)
    with pytest.raises(InputError, match="batch of 3 cannot be split into 4 micro-batches"):
        layout.split_rows(3)


def test_too_few_processes_are_said_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    built = _net()
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="needs 2 processes, 1 were started"):
        lm.launch(pipeline_placement(built, 2, 2), built.model)
