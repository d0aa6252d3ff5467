"""Shard training in `fit`: the trainer's forecast against hand counts, and why there is none."""

from pathlib import Path

import pytest

import loadmaster as lm
from loadmaster.capacity.shard_training import forecast_shards, rates_of
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.errors import DeviceMemoryError, InputError
from loadmaster.core.question import Question
from loadmaster.shards.plan.rates import TYPICAL_GPU

_ROWS, _WIDTH, _LAYERS = 64, 1024, 24
_MODEL = f"""
import torch
from torch import nn

def build():
    layers = [part for _ in range({_LAYERS}) for part in (nn.Linear({_WIDTH}, {_WIDTH}), nn.ReLU())]
    model, args = nn.Sequential(*layers), (torch.randn({_ROWS}, {_WIDTH}),)
    return {{"model": model, "args": args, "optimizer": "adamw"}}

def named():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(256, 256), nn.Linear(256, 256)
        def forward(self, x, *, scale):
            return self.two(self.one(x) * scale)
    return Two(), (torch.randn(8, 256),), {{"scale": torch.ones(8, 1)}}
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(_MODEL, encoding="utf-8")
    return f"{tmp_path / 'net.py'}:build"


def test_fit_names_training_by_shards_with_its_step_and_memory(source: str) -> None:
    found = lm.fit(source, "RTX4090-300MB")
    change = next(change for change in found.changes if change.name == "shards")
    assert found.fits is False
    assert change.fits
    weights = _LAYERS * (_WIDTH + 1) * _WIDTH
    assert "on gpu0" in change.text
    assert "lt.train(model, data, memory_cap=" in change.reason
    assert change.step_s is not None
    flops = _ROWS * 2 * weights * 3  # forward, gradients of inputs and of weights
    assert change.step_s > flops / 82.6e12  # no faster than the datasheet's peak
    told = forecast_shards(Question(source, "RTX4090-300MB"), parse_cluster("RTX4090-300MB"))
    assert told.step_s == change.step_s
    assert told.peak_bytes <= 300 * 10**6
    assert told.num_shards > 1
    # fp32 weight, two moments and a gradient wait in the host's memory, each on a border of its own
    assert 16 * weights <= told.host_bytes <= 1.01 * 16 * weights


def test_less_memory_takes_no_less_time_and_too_little_is_refused_with_both_numbers(source: str) -> None:
    steps = []
    for words in ("RTX4090-1GB", "RTX4090-300MB"):
        steps.append(forecast_shards(Question(source, words), parse_cluster(words)).step_s)
    assert steps[0] <= steps[1]
    with pytest.raises(DeviceMemoryError, match="MiB of a cap of"):
        forecast_shards(Question(source, "RTX4090-160MB"), parse_cluster("RTX4090-160MB"))
    change = next(c for c in lm.fit(source, "RTX4090-160MB").changes if c.name == "shards")
    assert change.fits is False
    assert "of a cap of" in change.reason


def test_named_inputs_reach_the_model(source: str) -> None:
    other = source.replace(":build", ":named")
    assert forecast_shards(Question(other, "T4"), parse_cluster("T4")).peak_bytes > 0


def test_what_cannot_be_trained_by_shards_says_why(source: str) -> None:
    with pytest.raises(InputError, match="is a graph; only a model"):
        forecast_shards(Question("gen:transformer:200", "T4"), parse_cluster("T4"))
    with pytest.raises(InputError, match="accelerator; there is none"):
        forecast_shards(Question(source, "cpu16"), parse_cluster("cpu16"))
    with pytest.raises(InputError, match="keeps fp32 weights"):
        forecast_shards(Question(source, "T4", precision="bf16"), parse_cluster("T4"))


def test_rates_of_the_typical_kind_are_those_that_the_trainer_plans_with() -> None:
    found = rates_of(parse_cluster("H200"), 0, "bf16")
    assert found.flops_per_s == pytest.approx(TYPICAL_GPU.flops_per_s, rel=1e-3)
    assert found.up_bytes_per_s == pytest.approx(TYPICAL_GPU.up_bytes_per_s)
    assert rates_of(parse_cluster("T4"), 0, "bf16").up_bytes_per_s == pytest.approx(
        found.up_bytes_per_s / 4
    )  # PCIe 3 against 5
    assert rates_of(parse_cluster("H200"), 0, "fp32").flops_per_s < found.flops_per_s / 5
