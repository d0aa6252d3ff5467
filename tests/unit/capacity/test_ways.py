"""Ways: one row for every way, with a reason where it cannot be taken, and commands that run."""

import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
import torch

import loadmaster as lm
from loadmaster.capacity.clusters import hosts_apart
from loadmaster.capacity.ways import weigh_ways
from loadmaster.core.answers.ways_answer import BIT_EQUAL, Ways
from loadmaster.core.errors import FileError, InputError
from loadmaster.core.question import Question
from loadmaster.core.run import Budget
from tests.distributed.run_models import Rows, square

OWN = """import torch
from torch import nn


def build():
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return layers, (torch.zeros(6, 8),)
"""
NAPS = """
[kind.naps]  # so slow that rows alone count
flops = "1T"
memory = "2GB"
memory_rate = "64KB/s"
overhead = "0us"
host = true

[[device]]
kind = "naps"
name = "cpu#0"
engine = "cpu"

[[device]]
kind = "naps"
name = "cpu#1"
engine = "cpu"
"""
SOURCE = "tests/distributed/run_models.py:build_rows"


class Meet(torch.nn.Module):
    """Every row meets every other at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x @ x.t())


def test_a_way_that_cannot_be_taken_says_why() -> None:
    found = weigh_ways(Question("gen:transformer:60", "ref"), budget=Budget(count=5))
    table = found.table
    assert len({way.name for way in table.ways}) == len(table.ways) == 9
    taken = {way.name for way in table.ways if way.step_s is not None}
    assert "one_device" in taken
    for way in table.ways:
        assert (way.step_s is None) == bool(way.reason)
        assert not way.command  # a generated graph is no model
    reasons = {way.name: way.reason for way in table.ways if way.reason}
    assert reasons["placed"] == "there is one device only"
    assert "no host memory" in reasons["spill"]
    assert "there is one device only" in str(table)
    assert set(found.answers) == taken  # a graph can be planned all the same


def test_a_function_without_a_batch_has_that_of_its_inputs(tmp_path: Path) -> None:
    source = f"{tmp_path / 'own.py'}:build"
    (tmp_path / "own.py").write_text(OWN)
    asked = {"budget": Budget(count=3), "folder": str(tmp_path / "ways")}
    table = weigh_ways(Question(source, "cpu#0-2GB | cpu#0-2GB, cpu#1-2GB ; inter=10gbit"), **asked).table
    assert table.batch == 6
    ways = {way.name: way for way in table.ways}
    assert ways["one_device"].samples_per_s == pytest.approx(6 / (ways["one_device"].step_s or 0))
    for name in ("accumulate", "pipeline"):
        assert "rows at a time, and" in ways[name].reason
        assert "takes no batch; add the argument" in ways[name].reason
    assert ways["data_parallel"].note == "rows 2, 2, 2; K is 1, 2"  # processes of each host
    assert ways["data_parallel"].command.startswith("torchrun --nnodes 2 --node-rank N --master-addr HOST")
    assert "--nproc-per-node K " in ways["data_parallel"].command


def test_a_plan_of_one_process_stays_on_one_host() -> None:
    graph = lm.capture(Rows(), (torch.randn(4, 16),), loss=square, optimizer="adam")
    found = weigh_ways(
        Question(graph, "2xV100-16GB | 1xP100 | 1xP100 ; inter=25gbit"), budget=Budget(count=3)
    )
    ways = {way.name: way for way in found.table.ways}
    used = [peak > 0 for peak in ways["placed"].peak_bytes]
    assert used in ([True, True, False, False], [True, False, False, False], [False, True, False, False])
    assert ways["placed"].gap is None  # what is proven of one host is not of all
    assert ways["mixed"].reason == ""  # nor is it refused where nothing is replicated
    answer = found.answers["placed"]
    assert len(set(answer.problem.cluster.host.tolist())) == 1
    apart = hosts_apart(found.answers["one_device"].problem.cluster)
    assert [cluster.num_devices for cluster in apart] == [2, 1]  # two hosts are alike


def test_shards_are_no_quicker_than_the_ops_they_run() -> None:
    table = weigh_ways(Question(SOURCE, "2xV100-16GB"), budget=Budget(count=3)).table
    ways = {way.name: way for way in table.ways}
    shards, whole = ways["shards"].step_s, ways["one_device"].step_s
    assert shards is not None
    assert whole is not None
    assert shards > 0.5 * whole  # all but the update


def test_data_parallelism_says_what_takes_no_part_in_it() -> None:
    graph = lm.capture(Meet(), (torch.randn(4, 16),), loss=square, optimizer="sgd")
    found = weigh_ways(Question(graph, "2xV100-16GB"), budget=Budget(count=3))
    way = next(way for way in found.table.ways if way.name == "data_parallel")
    assert "multiplies rows of the batch with each other" in way.note + way.reason


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"cannot be saved in '.*file': File exists; name another folder"):
        weigh_ways(Question("hf:gpt2", "ref"), budget=Budget(count=5), folder=str(tmp_path / "file"))


def test_any_is_the_only_choice_of_ways() -> None:
    with pytest.raises(InputError, match="choice of ways"):
        lm.plan("gen:transformer:60", "ref", ways="all")
    with pytest.raises(InputError, match="pass the source"):
        lm.plan(lm.problem("gen:transformer:60", "ref"), ways="any")  # type: ignore[call-overload]


@pytest.mark.slow
def test_every_way_that_names_a_command_runs(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "loadmaster", "ways", SOURCE, "--devices", "cpu#0-2GB, cpu#1-2GB"]
    words += ["--budget", "20x", "--out", str(tmp_path), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    table = msgspec.json.decode(done.stdout, type=Ways)
    steps = [way.step_s for way in table.ways if way.step_s is not None]
    assert steps == sorted(steps)
    commands = {way.name: way.command for way in table.ways if way.command}
    assert {"one_device", "placed", "accumulate", "pipeline", "data_parallel", "mixed"} <= set(commands)
    for name, command in commands.items():
        program, *rest = shlex.split(command)
        assert program == "loadmaster"
        run = [sys.executable, "-m", "loadmaster", *rest, "--steps", "2", "--json"]
        ran = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 0, (name, ran.stderr)
        losses = json.loads(ran.stdout)["losses"]
        assert len(losses) == 2, name
        assert all(loss is not None for loss in losses), name
    best = lm.plan(SOURCE, "cpu#0-2GB, cpu#1-2GB", ways="any", budget="20x")
    assert best.score_s == pytest.approx(steps[0])
    assert next(way for way in table.ways if way.name == "one_device").exactness == BIT_EQUAL


@pytest.mark.slow
def test_ways_are_as_quick_as_their_order_says(tmp_path: Path) -> None:
    (tmp_path / "naps.toml").write_text(NAPS)
    words = [sys.executable, "-m", "loadmaster", "ways", "tests/distributed/nap_models.py:build"]
    words += ["--devices", str(tmp_path / "naps.toml"), "--budget", "20x", "--out", str(tmp_path), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    ways = {way.name: way for way in msgspec.json.decode(done.stdout, type=Ways).ways if way.command}
    predicted, measured = {}, {}
    for name in ("data_parallel", "mixed", "pipeline", "one_device"):
        rest = shlex.split(ways[name].command)[1:]
        run = [sys.executable, "-m", "loadmaster", *rest, "--steps", "4", "--json"]
        ran = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 0, (name, ran.stderr)
        predicted[name] = ways[name].step_s or 0.0
        measured[name] = json.loads(ran.stdout)["step_s"]["measured"]
    assert max(predicted[name] for name in ("data_parallel", "mixed", "pipeline")) < predicted["one_device"]
    for one, other in itertools.permutations(predicted, 2):
        if predicted[one] * 1.1 < predicted[other]:
            assert measured[one] < measured[other], (predicted, measured)
