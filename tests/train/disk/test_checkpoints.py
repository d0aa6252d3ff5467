"""Generations: equal to the bit, readable by safetensors, damage found, a full disk leaves the old one."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from loadmaster.core.errors import FileError, FormatError
from loadmaster.modules.tensor_files import read_tensors
from loadmaster.train.disk import checkpoints
from loadmaster.train.disk.checkpoints import (
    FACTS,
    MODEL,
    STATE,
    SavedCheckpoint,
    Snapshot,
    load,
    save,
    sweep,
)
from loadmaster.train.disk.journal import DiskFullError


def snapshot(step: int = 3) -> Snapshot:
    torch.manual_seed(step)
    model = {
        "w": torch.randn(7, 5),
        "half": torch.randn(3).to(torch.bfloat16),
        "count": torch.tensor(step),
        "none": torch.empty(0, 4),
        "turned": torch.randn(4, 6).t(),
        "yes": torch.tensor([True, False]),
    }
    tensors = {"weight/w": model["w"], "adam/w": torch.randn(7, 5), "scale": torch.tensor(2.0**16)}
    return Snapshot(step, model, tensors, {"step": step, "rng": [1, 2**63], "name": "ä"})


def assert_equal(a: Snapshot, b: Snapshot) -> None:
    assert (a.step, a.facts) == (b.step, b.facts)
    for mine, other in ((a.model, b.model), (a.tensors, b.tensors)):
        assert mine.keys() == other.keys()
        for name, each in mine.items():
            assert each.dtype == other[name].dtype
            assert torch.equal(each, other[name])


def test_a_generation_comes_back_equal_to_the_bit(tmp_path: Path) -> None:
    saved = save(tmp_path, snapshot(), trial="a/b: c", generation=1, fence=4)
    assert_equal(snapshot(), load(tmp_path, saved))


def test_what_is_in_the_model_is_stored_once(tmp_path: Path) -> None:
    saved = save(tmp_path, snapshot(), trial="a", generation=1, fence=0)
    folder = tmp_path / saved.folder
    assert (folder / STATE).stat().st_size < 2 * 7 * 5 * 4 + 300
    assert snapshot().num_bytes == sum(t.nbytes for t in snapshot().model.values()) + 7 * 5 * 4 + 4


def test_the_library_safetensors_reads_the_model(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="the witness reads files with safetensors")
    saved = save(tmp_path, snapshot(), trial="a", generation=1, fence=0)
    found = safetensors.load_file(str(tmp_path / saved.folder / MODEL))
    assert found.keys() == snapshot().model.keys()
    assert all(torch.equal(found[name], each) for name, each in snapshot().model.items())


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="the witness reads files with safetensors")
    tensors = {"odd": torch.arange(3, dtype=torch.uint8), "w": torch.randn(5)}
    safetensors.save_file(tensors, str(tmp_path / "t"), metadata={"by": "them"})
    found = read_tensors(tmp_path / "t")
    assert all(torch.equal(found[name], each) for name, each in tensors.items())


@pytest.mark.parametrize("name", [MODEL, STATE, FACTS])
def test_every_flipped_bit_and_every_cut_is_found(name: str, tmp_path: Path) -> None:
    saved = save(tmp_path, snapshot(), trial="a", generation=1, fence=0)
    path = tmp_path / saved.folder / name
    data = path.read_bytes()
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        with pytest.raises(FormatError):
            load(tmp_path, saved)
    for length in range(0, len(data), 5):
        path.write_bytes(data[:length])
        with pytest.raises(FormatError):
            load(tmp_path, saved)
    path.unlink()
    with pytest.raises(FileError):
        load(tmp_path, saved)


def test_files_are_on_disk_before_their_folder_and_that_before_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    sync = os.fsync

    def noted(handle: int) -> None:
        seen.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    save(tmp_path, snapshot(), trial="t", generation=7, fence=2)
    assert seen == [MODEL, STATE, FACTS, "00000007-2", "t", tmp_path.name]


def test_a_full_disk_leaves_the_old_generation_and_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save(tmp_path, snapshot(1), trial="a", generation=1, fence=0)
    sync, left = os.fsync, [0]

    def full(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    for allowed in range(6):
        left[0] = allowed
        with pytest.raises(DiskFullError, match="free some space"):
            save(tmp_path, snapshot(2), trial="a", generation=2, fence=0)
        assert [p.name for p in (tmp_path / "a").iterdir()] == ["00000001-0"]
    monkeypatch.undo()
    assert_equal(snapshot(1), load(tmp_path, old))


def test_sweeping_keeps_the_last_two_committed_and_deletes_what_nobody_committed(tmp_path: Path) -> None:
    all_saved = [save(tmp_path, snapshot(g), trial="a", generation=g, fence=g) for g in range(1, 5)]
    save(tmp_path, snapshot(9), trial="a", generation=4, fence=9)  # of a late worker
    other = save(tmp_path, snapshot(9), trial="b", generation=1, fence=0)
    sweep(tmp_path, "a", all_saved)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["00000003-3", "00000004-4"]
    assert_equal(snapshot(9), load(tmp_path, other))


def test_odd_names_of_trials_stay_inside_the_folder_and_apart(tmp_path: Path) -> None:
    names = ["..", ".", "", "a/b", "a%2Fb", "/etc", "A" * 40, "ä", "x\0y", "a b"]
    folders = [checkpoints.folder_name(name) for name in names]
    assert len(set(folders)) == len(names)
    for name in names:
        saved = save(tmp_path, snapshot(), trial=name, generation=1, fence=0)
        assert tmp_path in (tmp_path / saved.folder).resolve().parents


def test_a_state_that_is_not_json_is_refused(tmp_path: Path) -> None:
    bad: dict[str, Any] = {"loader": object()}
    with pytest.raises(FileError, match="not JSON"):
        save(tmp_path, Snapshot(1, {}, {}, bad), trial="a", generation=1, fence=0)
    assert isinstance(SavedCheckpoint("a", 1, 0, 1, 0).folder, str)
