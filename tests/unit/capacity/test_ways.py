"""Ways: one row for every way, with a reason where it cannot be taken, and commands that run."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import loadmaster as lm
from loadmaster.capacity.ways import weigh_ways
from loadmaster.core.answers.ways_answer import BIT_EQUAL, Ways
from loadmaster.core.errors import InputError
from loadmaster.core.question import Question
from loadmaster.core.run import Budget

SOURCE = "tests/distributed/run_models.py:build_rows"


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
    assert found.answers == {}


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
