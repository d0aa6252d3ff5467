"""Generations of a trial's whole state on disk: complete or not there.

    DIR/checkpoints/TRIAL/00000007-12/         generation 7, written under fencing number 12
        model.safetensors                      loads into the plain model
        state.safetensors                      optimizer state and whatever else is not in the model
        facts.json                             step, RNG, schedule, loader position; sizes and CRC-32 of files

Order: write the files and fsync them, fsync the folder, commit in the journal (by the caller), only then
delete all but the last two committed generations. A crash in between leaves files nobody committed; they are
deleted at the next start. A late worker has another fencing number, so it cannot write over a generation.

Nothing is deleted but the files above, and only where the journal has newer ones: whatever else lies in these
folders stays, and generations that the journal cannot have left behind (`find_unlisted`) are never touched.
"""

import os
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import torch

from loadmaster.core.errors import FileError, FormatError
from loadmaster.modules.tensor_files import read_tensors, write_tensors
from loadmaster.train.disk.backbone_files import (
    LINK,
    Backbone,
    frozen_part,
    link_backbone,
    read_backbone,
    store_backbone,
    sweep_backbones,
)
from loadmaster.train.disk.journal import make_write_error, sync_folder

MODEL, STATE, FACTS = "model.safetensors", "state.safetensors", "facts.json"
_Count = Annotated[int, msgspec.Meta(ge=0)]
KEPT = 2  # the last committed generations: the newest, and one to fall back on
FENCES_OF_A_RUN = 10**9  # fencing numbers of the n-th run of a study begin at n times this
_GENERATION = re.compile(r"(\d{8,})-(\d+)")
_MOST_DEBRIS = 2  # generations a crash can leave after the last committed one: one written, one being written


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A trial's state at a step boundary; `model` is what the plain model loads."""

    step: int
    model: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]
    frozen: frozenset[str] = frozenset()  # names in `model` of what is never trained

    @property
    def num_bytes(self) -> int:
        """What the tensors hold, those of the model counted once."""
        rest, _ = _without_shared(self.tensors, self.model)
        return sum(each.nbytes for each in (*self.model.values(), *rest.values()))


class _StoredFile(msgspec.Struct):
    """Size and CRC-32 of a file of tensors."""

    bytes: _Count
    crc: _Count


class _StoredBackbone(msgspec.Struct):
    """Which file of frozen weights a generation refers to; it is named by its hash."""

    key: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]+$")]
    size_bytes: _Count
    crc: _Count


class _StoredFacts(msgspec.Struct):
    """What facts.json holds."""

    step: _Count
    files: dict[str, _StoredFile]
    shared: dict[str, str]
    facts: dict[str, Any]
    backbone: _StoredBackbone | None = None

    def find_backbone(self) -> Backbone | None:
        """The frozen weights that the generation refers to."""
        kept = self.backbone
        return None if kept is None else Backbone(kept.key, kept.size_bytes, kept.crc)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A generation that is on disk; it counts once the journal says so."""

    trial: str
    generation: int
    fence: int
    step: int
    crc: int  # of facts.json, which has those of the other files

    @property
    def folder(self) -> str:
        """Where it is, below the checkpoints of the study."""
        return f"{folder_name(self.trial)}/{self.generation:08d}-{self.fence}"


def folder_name(trial: str) -> str:
    """A name that any file system takes; different trials have different ones."""
    return quote(trial, safe=" +=,@").replace(".", "%2E") or "%"


def save(
    root: Path,
    snapshot: Snapshot,
    *,
    trial: str,
    generation: int,
    fence: int,
    known: dict[str, Backbone] | None = None,
) -> SavedCheckpoint:
    """Write a generation; when this returns it is on disk. A failed one leaves nothing behind.

    Frozen weights are written once for all; `known`: those this process has written or compared.
    """
    draft = SavedCheckpoint(trial, generation, fence, snapshot.step, 0)
    folder = root / draft.folder
    try:
        _delete_generation(folder)
        folder.mkdir(parents=True, exist_ok=True)
        part = frozen_part(snapshot.model, snapshot.frozen)
        backbone = store_backbone(root, part, {} if known is None else known) if part else None
        if backbone is not None:
            link_backbone(root, folder, backbone)
        crc = write_snapshot(folder, snapshot, backbone=backbone, without=part)
        sync_folder(folder.parent)
        sync_folder(root)
    except OSError as problem:
        _delete_generation(folder)
        raise make_write_error(folder, problem) from None
    except FileError:
        _delete_generation(folder)
        raise
    return SavedCheckpoint(trial, generation, fence, snapshot.step, crc)


def write_snapshot(
    folder: Path, snapshot: Snapshot, *, backbone: Backbone | None = None, without: Collection[str] = ()
) -> int:
    """The three files of a snapshot, less what is in its backbone; returns the CRC-32 of the facts."""
    own = {name: tensor for name, tensor in snapshot.model.items() if name not in without}
    rest, shared = _without_shared(snapshot.tensors, snapshot.model)
    files = {}
    for name, tensors in ((MODEL, own), (STATE, rest)):
        try:
            size, crc = write_tensors(folder / name, tensors)
        except OSError as problem:
            raise make_write_error(folder / name, problem) from None
        files[name] = {"bytes": size, "crc": crc}
    document = {"step": snapshot.step, "files": files, "shared": shared, "facts": snapshot.facts}
    if backbone is not None:
        document["backbone"] = {"key": backbone.key, "size_bytes": backbone.size_bytes, "crc": backbone.crc}
    try:
        data = msgspec.json.encode(document)
    except (TypeError, UnicodeEncodeError) as problem:
        raise FileError(f"the state of a trial is not JSON: {problem}") from None
    with open(folder / FACTS, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
    return zlib.crc32(data)


def _without_shared(
    tensors: Mapping[str, torch.Tensor], model: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors that are not in the model, and for the others their names there."""
    places = {memory_key(each): name for name, each in model.items() if each.numel()}
    shared = {name: places[memory_key(each)] for name, each in tensors.items() if memory_key(each) in places}
    return {name: each for name, each in tensors.items() if name not in shared}, shared


def memory_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor stands in memory, and how: equal for two views of the same numbers."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def load(root: Path, saved: SavedCheckpoint) -> Snapshot:
    """The snapshot of a committed generation; damage is an error."""
    return read_snapshot(root / saved.folder, crc=saved.crc)


def read_snapshot(folder: Path, *, crc: int | None = None) -> Snapshot:
    """A snapshot from its three files, each checked."""
    stored = _read_facts(folder, crc=crc)
    found = {name: _read_stored(folder, name, stored) for name in (MODEL, STATE)}
    backbone = stored.find_backbone()
    if backbone is not None:
        found[MODEL] |= read_backbone(folder, backbone)
    lost = sorted(other for other in stored.shared.values() if other not in found[MODEL])
    if lost:
        raise FormatError(f"{folder / FACTS} refers to tensor {lost[0]!r}, which {MODEL} does not hold")
    tensors = found[STATE] | {name: found[MODEL][other] for name, other in stored.shared.items()}
    return Snapshot(stored.step, found[MODEL], tensors, stored.facts)


def read_model(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a generation, frozen ones among them, for the plain model; damage is an error."""
    stored = _read_facts(folder)
    found, backbone = _read_stored(folder, MODEL, stored), stored.find_backbone()
    return found if backbone is None else found | read_backbone(folder, backbone)


def _read_facts(folder: Path, *, crc: int | None = None) -> _StoredFacts:
    path = folder / FACTS
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise FileError(f"cannot read {path}: {problem.strerror or problem}") from None
    if crc is not None and zlib.crc32(data) != crc:
        raise FormatError(f"{path} is damaged: its check sum is {zlib.crc32(data):08x} instead of {crc:08x}")
    try:
        return msgspec.json.decode(data, type=_StoredFacts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise FormatError(f"{path} is not what was written: {problem}") from None


def _read_stored(folder: Path, name: str, stored: _StoredFacts) -> dict[str, torch.Tensor]:
    kept = stored.files.get(name)
    if kept is None:
        raise FormatError(f"{folder / FACTS} is not what was written: it says nothing of {name}")
    return read_tensors(folder / name, size=kept.bytes, crc=kept.crc)


def _find_backbone(folder: Path) -> Backbone | None:
    try:
        return _read_facts(folder).find_backbone()
    except FileError:
        return None  # whoever reads the generation says what is wrong


def sweep_shared(root: Path) -> None:
    """Delete frozen weights that no generation of any trial refers to, listed in the journal or not."""
    folders = [each for each in root.glob("*/*") if _GENERATION.fullmatch(each.name)]
    found = [_find_backbone(folder) for folder in folders]
    sweep_backbones(root, [backbone.key for backbone in found if backbone is not None])


def sweep(
    root: Path,
    trial: str,
    committed: Sequence[SavedCheckpoint],
    *,
    kept: int = KEPT,
    best: SavedCheckpoint | None = None,
    writing: bool = False,
) -> None:
    """Delete every generation of a trial but its last committed ones (committed by the caller's journal).

    `best`: another one that stays. `writing`: later ones are left alone, somebody may be writing them.
    """
    keep = {Path(each.folder).name for each in (*committed[-kept:], *([best] if best else []))}
    newest = max((each.generation for each in committed), default=0)
    for folder, generation, _ in list_generations(root, trial):
        if folder.name not in keep and not (writing and generation > newest):
            _delete_generation(folder)


def list_generations(root: Path, trial: str) -> list[tuple[Path, int, int]]:
    """Folders of a trial that are named as generations are, with generation and fencing number, in order."""
    above, found = root / folder_name(trial), []
    if above.is_dir():
        for each in above.iterdir():
            named = _GENERATION.fullmatch(each.name)
            if named and each.is_dir() and not each.is_symlink():
                found.append((each, int(named[1]), int(named[2])))
    return sorted(found, key=lambda row: row[1:])


def find_unlisted(
    root: Path, trial: str, committed: Sequence[SavedCheckpoint], *, num_runs: int
) -> list[SavedCheckpoint]:
    """Whole generations that are newer than the journal: it was lost, or is an older copy; oldest first.

    A crash leaves the one or two generations after the last committed one, which is still there, under a
    fencing number of a run that the journal knows. Anything more is not a crash.
    """
    newest = max((each.generation for each in committed), default=0)
    rows = [row for row in list_generations(root, trial) if row[1] > newest]
    lost = bool(committed) and not any((root / each.folder).is_dir() for each in committed[-KEPT:])
    ahead = any(g > newest + _MOST_DEBRIS or fence // FENCES_OF_A_RUN > num_runs for _, g, fence in rows)
    if not (lost or ahead):
        return []
    found = [_inspect_generation(folder, trial, g, fence) for folder, g, fence in rows]
    return [each for each in found if each is not None]


def _inspect_generation(folder: Path, trial: str, generation: int, fence: int) -> SavedCheckpoint | None:
    """What a folder holds, or None where it was never whole."""
    try:
        data = (folder / FACTS).read_bytes()
        document = msgspec.json.decode(data)
        if any((folder / name).stat().st_size != each["bytes"] for name, each in document["files"].items()):
            return None
        return SavedCheckpoint(trial, generation, fence, document["step"], zlib.crc32(data))
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return None


def _delete_generation(folder: Path) -> None:
    """Delete the files of a generation, and its folder unless somebody keeps other things there."""
    for name in (FACTS, STATE, MODEL, LINK):  # the facts first: without them it is no generation
        with suppress(OSError):
            (folder / name).unlink()
    with suppress(OSError):
        folder.rmdir()
