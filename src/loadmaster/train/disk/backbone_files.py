"""Frozen weights on disk once, however many trials and generations share them.

    checkpoints/.backbones/HASH.safetensors      named by its content: names, shapes, dtypes and every byte
    checkpoints/TRIAL/GENERATION/backbone.safetensors    the same file under a second name, where links exist

A generation of a model that is mostly frozen holds what is trained, and this reference.
"""

import errno
import hashlib
import os
import re
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from loadmaster.core.errors import FileError
from loadmaster.modules.tensor_files import match_tensors, read_tensors, write_tensors
from loadmaster.train.disk.journal import make_write_error, sync_folder

FOLDER, LINK = ".backbones", "backbone.safetensors"  # no trial's folder begins with a dot
_LEAST = 0.5  # of a model's bytes: less is not worth a file of its own
_CHUNK_BYTES = 1 << 26
_OWN_NAME = re.compile(r"[0-9a-f]{40}\.(safetensors|\d+-\d+\.part)")
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class Backbone:
    """A file of frozen weights."""

    key: str
    size_bytes: int
    crc: int


def frozen_part(model: Mapping[str, torch.Tensor], frozen: Iterable[str]) -> dict[str, torch.Tensor]:
    """The frozen weights of a model, where they are most of it."""
    part = {name: model[name] for name in sorted(frozen) if name in model}
    total = sum(tensor.nbytes for tensor in model.values())
    return part if sum(tensor.nbytes for tensor in part.values()) > _LEAST * total else {}


def store_backbone(root: Path, tensors: Mapping[str, torch.Tensor], known: dict[str, Backbone]) -> Backbone:
    """The file of these weights; written where it is not there, or is not what it should be."""
    key = _hash_tensors(tensors)
    folder = root / FOLDER
    path = folder / f"{key}.safetensors"
    if key in known and path.exists():
        return known[key]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = match_tensors(path, tensors)
        if found is None:
            draft = folder / f"{key}.{os.getpid()}-{threading.get_ident()}.part"  # each device has a writer
            found = write_tensors(draft, tensors)
            os.replace(draft, path)
            sync_folder(folder)
    except OSError as problem:
        raise make_write_error(path, problem) from None
    known[key] = Backbone(key, *found)
    return known[key]


def link_backbone(root: Path, folder: Path, backbone: Backbone) -> None:
    """Give the file a second name in a generation's folder, which is then whole."""
    try:
        os.link(root / FOLDER / f"{backbone.key}.safetensors", folder / LINK)
    except OSError as problem:
        if problem.errno not in _NO_LINKS:
            raise


def read_backbone(folder: Path, backbone: Backbone) -> dict[str, torch.Tensor]:
    """The weights a generation refers to, checked."""
    here, there = folder / LINK, folder.parent.parent / FOLDER / f"{backbone.key}.safetensors"
    path = here if here.exists() else there
    if not path.exists():
        raise FileError(f"the frozen weights of {folder} are missing: neither {here} nor {there} is there")
    return read_tensors(path, size=backbone.size_bytes, crc=backbone.crc)


def sweep_backbones(root: Path, keys: Iterable[str]) -> None:
    """Delete the files of this module that no generation refers to."""
    keep, folder = {f"{key}.safetensors" for key in keys}, root / FOLDER
    if folder.is_dir():
        for each in sorted(folder.iterdir()):
            if each.name not in keep and _OWN_NAME.fullmatch(each.name):
                each.unlink(missing_ok=True)


def _hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(_hash_tensor, tensors.values()))
    whole = hashlib.blake2b(digest_size=20)
    for name, part in zip(tensors, parts, strict=True):
        whole.update(f"{len(name)} {name} {part}\n".encode())
    return whole.hexdigest()


def _hash_tensor(tensor: torch.Tensor) -> str:
    found = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        found.update(memoryview(flat[start : start + _CHUNK_BYTES].numpy()))
    return found.hexdigest()
