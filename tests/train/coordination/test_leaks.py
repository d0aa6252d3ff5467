"""A fit leaves nothing behind in its process, and takes its number of threads from its caller."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import loadmaster.train as lt
from tests.train.lora_trials import lora
from tests.train.small_trials import trial


@pytest.mark.parametrize("make", [lambda n: trial(n, epochs=1), lora])
def test_fits_leak_no_thread_and_no_file(make: Any, tmp_path: Path) -> None:
    counts = []
    for at in range(3):
        lt.Study([make("a"), make("b")], dir=tmp_path / str(at), devices="cpu").fit()
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert counts[0] == counts[1] == counts[2]


def test_one_study_fitted_again_leaks_no_thread(tmp_path: Path) -> None:
    study = lt.Study([trial("a", epochs=1)], dir=tmp_path, devices="cpu")
    study.fit()
    before = threading.active_count()
    study.fit()
    assert threading.active_count() == before


@pytest.mark.slow
def test_processes_use_the_threads_of_the_caller(tmp_path: Path) -> None:
    def score(model: Any) -> dict[str, float]:
        return {"loss": float(torch.get_num_threads())}

    for wanted in (1, 3):
        torch.set_num_threads(wanted)
        for launcher, devices in (("inline", "cpu"), ("processes", ["cpu#0"])):
            one = trial("a", epochs=1, evaluate=score)
            folder = tmp_path / f"{launcher}{wanted}"
            result = lt.Study([one], dir=folder, devices=devices, launcher=launcher).fit()
            assert result["a"].metrics["loss"] == wanted
            assert torch.get_num_threads() == wanted
