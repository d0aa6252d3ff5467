"""The devices of a study: a cluster's words for devices of this machine, with a cap after the dash."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loadmaster.core.errors import InputError
from loadmaster.train.plain_loop import reference
from loadmaster.train.shard_engine import ShardEngine
from tests.train.small_trials import digest
from tests.train.study.test_shard_study import study, trial

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        ("cpu", ["cpu"]),
        (" cpu#0 ,cpu#1", ["cpu#0", "cpu#1"]),
        (["cpu", "cpu#7"], ["cpu", "cpu#7"]),
        ("cpu-4GB", ["cpu-4GB"]),
        ("CPU#1 - 512 MiB, cpu#2", ["cpu#1-512 MiB", "cpu#2"]),
    ],
)
def test_words_of_this_machine_are_taken(devices: str | list[str], names: list[str]) -> None:
    assert ShardEngine().device_names(devices) == names


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("tpu", "unknown device 'tpu'; write 'auto', 'cuda:0', 'cpu', or 'cpu#0, cpu#1'"),
        ("cpu,", "unknown device ''"),
        ("cpu:0", "unknown device 'cpu:0'"),
        ("2xcpu", "unknown device '2xcpu'"),
        ("lab.toml", "unknown device 'lab.toml'"),
        ([3], "unknown device 3"),
        ("RTX4090", "'RTX4090' is a kind of device to plan for, not a device of this machine; write 'auto'"),
        ("A100-80GB", "'A100-80GB' is a kind of device to plan for"),
        ("V100#0-8GB", "'V100#0-8GB' is a kind of device to plan for"),
        ("cpu64-8GB", "'cpu64-8GB' is a kind of device to plan for"),
        ("cpu#x", "logical devices are numbered"),
        ("cpu#1-8", "'8' is not a memory size"),
        ("cpu-0GB", "memory is 0"),
        ("cpu, cpu", "must be given, each once"),
        ("cpu#1-4GB, cpu#1-8GB", r"devices \['cpu#1', 'cpu#1'\] must be given, each once"),
        ([], "must be given, each once"),
        pytest.param("cuda:0", "there is no cuda:0 here: torch sees no GPU; use devices='cpu'", marks=NO_GPU),
        pytest.param("cuda", "there is no cuda here: torch sees no GPU", marks=NO_GPU),
        pytest.param("cuda:0-8GB", "there is no cuda:0-8GB here: torch sees no GPU", marks=NO_GPU),
    ],
)
def test_other_words_are_refused_with_what_to_write(devices: str | list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ShardEngine().device_names(devices)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    engine = ShardEngine(memory_cap_bytes=1 << 20)
    with pytest.raises(InputError, match="this machine has no cuda:99; it has "):
        engine.open_device("cuda:99")


def test_the_memory_of_a_word_caps_that_device_and_the_smaller_cap_holds() -> None:
    engine = ShardEngine(memory_cap_bytes=1 << 20)
    caps = [engine.open_device(name).arena.cap_bytes for name in ("cpu#0", "cpu#1-18KiB", "cpu#2-1GB")]
    assert caps == [1 << 20, 18 << 10, 1 << 20]
    assert ShardEngine().open_device("cpu#1-18KiB").name == "cpu#1"


def test_a_capped_word_trains_as_memory_cap_does(tmp_path: Path) -> None:
    one = trial("adamw")
    plan = study(tmp_path / "cap", [one]).plan()
    capped = study(tmp_path / "word", [one], devices="cpu-18KiB", memory_cap=None)
    ours, theirs = (replace(each.trials[0], step_s=0.0) for each in (capped.plan(), plan))  # it is timed
    assert str(ours) == str(theirs)
    assert plan.trials[0].num_shards > 1
    assert digest(capped.fit()["adamw"].state_dict()) == digest(reference(one).state_dict)
