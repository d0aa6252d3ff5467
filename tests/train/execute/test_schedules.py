"""Schedules and what a study tells of its steps: the same after a stop, for batches of all lengths."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from loadmaster.train.disk.json_values import decode_plain, encode_plain
from loadmaster.train.plain_loop import reference
from loadmaster.train.shard_engine import count_steps
from loadmaster.train.study import Study
from tests.train.small_trials import trial
from tests.train.study.test_study import Stop

torch.set_num_threads(1)


def test_what_json_does_not_know_comes_back_as_it_was() -> None:
    value = {
        "milestones": Counter({3: 1, 8: 2}),
        "by step": {1: 0.5, 2: (1, 2)},
        "rates": [torch.tensor(0.1), torch.tensor([1, 2])],
        "nested": {"__kind__": "mine", "content": None},
    }
    found = decode_plain(json.loads(json.dumps(encode_plain(value))))
    assert repr(found) == repr(value)
    assert type(found["milestones"]) is Counter
    assert found["rates"][1].dtype == torch.int64


SCHEDULES = {
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [9, 14], gamma=0.1),
    "one after another": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.MultiStepLR(o, [4, 9])], [5]
    ),
    "a rate that is a tensor": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_after_a_stop_where_it_was(kind: str, tmp_path: Path) -> None:
    def optim(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=torch.tensor(0.01) if "tensor" in kind else 0.01)

    one = trial(
        "t",
        optim=optim,
        lr_schedule=SCHEDULES[kind],
        evaluate=None,
        eval_every=None,
    )
    given: dict[str, Any] = {"dir": tmp_path, "devices": "cpu", "optimizer_placement": "device"}
    with pytest.raises(KeyboardInterrupt):
        Study(one, **given, callbacks=[Stop(7, "interrupt")]).fit()
    found = Study(one, **given).fit()["t"]
    assert found.error == ""
    ours, plain = found.state_dict(), reference(one).state_dict
    assert [name for name, tensor in plain.items() if not torch.equal(tensor, ours[name])] == []


class _Told:
    """Steps as they were told."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def on_step(self, trial: str, done: Any) -> None:
        self.steps.append(done)


def test_tokens_are_those_of_each_batch_and_a_loss_keeps_its_digits(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(0)
    sizes = [3, 9, 1, 5, 2]
    data = [
        (torch.randn(n, 6, generator=made).double(), torch.randint(3, (n,), generator=made)) for n in sizes
    ]
    more: dict[str, Any] = {"build": _double, "evaluate": None, "eval_every": None}
    one = trial("t", data=lambda: data, epochs=1, accumulate=2, **more)
    told_of = _Told()
    result = Study(one, dir=tmp_path, devices="cpu", callbacks=[told_of]).fit()
    assert [done.num_tokens for done in told_of.steps] == [12, 6, 2]
    assert result["t"].num_tokens == sum(sizes)
    assert [done.loss for done in told_of.steps] == list(reference(one).losses)


def _double() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def test_steps_of_a_stream_without_an_end_are_counted_whatever_the_epochs() -> None:
    endless = trial("t", data=lambda: itertools.repeat((None, None)), epochs=3, max_steps=7, accumulate=2)
    assert count_steps(endless, None) == 7
    short = trial("t", data=lambda: iter([(None, None)] * 5), epochs=3, max_steps=99, accumulate=2)
    assert count_steps(short, None) == 9
