"""Frozen weights are on disk once; every checkpoint still loads into the plain model."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import loadmaster.train as lt
from loadmaster.train.disk.backbone_files import FOLDER
from tests.train.lora_trials import build, lora
from tests.train.small_trials import digest
from tests.train.study.test_study import Stop


def study(folder: Path, trials: list[Any], **options: Any) -> lt.Study:
    return lt.Study(trials, dir=folder / "run", devices="cpu", checkpoint_every=2, **options)


def test_trials_of_one_backbone_have_one_copy_of_it_and_load_into_the_plain_model(tmp_path: Path) -> None:
    trials = [lora("a", lr=1e-2), lora("b", lr=1e-3), lora("other", backbone=1)]
    result = study(tmp_path, trials).fit()
    root = tmp_path / "run/checkpoints"
    assert len(list((root / FOLDER).iterdir())) == 2
    for one in trials:
        state = result[one.name].state_dict()
        assert digest(state) == digest(lt.reference(one).state_dict)
        model = build()
        model.load_state_dict(state)
        folder = result[one.name].folder
        assert folder is not None
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
        assert set(safetensors.load_file(folder / "model.safetensors")) == trained
        both = safetensors.load_file(folder / "model.safetensors") | safetensors.load_file(
            folder / "backbone.safetensors"
        )
        assert digest(both) == digest(state)
        result[one.name].save_model(tmp_path / "whole.safetensors")
        assert digest(safetensors.load_file(tmp_path / "whole.safetensors")) == digest(state)


def test_a_stop_and_a_damaged_backbone_end_in_the_same_weights(tmp_path: Path) -> None:
    one = lora("a")
    for damage in (False, True):
        folder = tmp_path / str(damage)
        with pytest.raises(KeyboardInterrupt):
            study(folder, [one], callbacks=[Stop(5, "interrupt")]).fit()
        if damage:
            (path,) = (folder / "run/checkpoints" / FOLDER).iterdir()
            data = bytearray(path.read_bytes())
            data[-5] ^= 1
            path.write_bytes(data)  # every generation's link is the same file
        with (
            pytest.warns(RuntimeWarning, match=r"trial 'a' (continues from step \d+|begins again): .*damaged")
            if damage
            else nullcontext()
        ):
            result = study(folder, [one]).fit()
        assert digest(result["a"].state_dict()) == digest(lt.reference(one).state_dict)


def test_what_no_generation_refers_to_is_deleted_at_the_next_start(tmp_path: Path) -> None:
    study(tmp_path, [lora("a")]).fit()
    folder = tmp_path / "run/checkpoints" / FOLDER
    (folder / f"{'0' * 40}.123-4.part").write_bytes(b"half")
    study(tmp_path, [lora("a")]).fit()
    assert len(list(folder.iterdir())) == 1
