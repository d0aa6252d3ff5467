"""Checkpoints: what a run of several processes leaves on disk, in the shape of the plain model.

    DIR/step-00000020/
        model-00001-of-00002.safetensors     written by the ranks side by side, each what it has
        model.safetensors.index.json         which file has which tensor, as Hugging Face writes it
        optimizer-00001-of-00002.safetensors NAME|exp_avg, ...
        training.json                        step, options of the optimizer, scheduler, the plan's digest

The names are those of the plain model's `state_dict`, so it loads there, or into any other plan. All files
are written into a hidden folder, which gets its name when every rank has written and synced its part: a
checkpoint is whole, or is not there.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import nn

from loadmaster.core.errors import FileError, FormatError, InputError
from loadmaster.core.files import write_bytes
from loadmaster.modules.checkpoint import Checkpoint
from loadmaster.modules.tensor_files import TensorEntry, read_entries, read_tensor, write_tensors
from loadmaster.runtime.distributed.transports import Waits

INDEX, FACTS = "model.safetensors.index.json", "training.json"
RUN_NAME = "LOADMASTER_RUN"  # in the environment of workers
_MOST_FILE_BYTES = 4 * 2**30
_SEPARATOR = "|"


class Holder(Protocol):
    """A process that has a part of a model, and an optimizer of it."""

    rank: int
    model: nn.Module
    optimizer: Any
    scheduler: Any
    steps_done: int

    def saved_names(self) -> set[str]:
        """First names of the weights and buffers that this process writes."""
        ...

    def held_names(self) -> set[str]:
        """First names of those that it has."""
        ...

    def plan_digest(self) -> str:
        """Of the plan that is run."""
        ...


class _Facts(msgspec.Struct):
    """What training.json holds."""

    step: int
    loadmaster: str
    plan: str
    groups: list[tuple[list[str], dict[str, Any]]]  # of the optimizer: names and options
    scheduler: dict[str, Any] | None = None
    scalars: dict[str, dict[str, Any]] = {}  # [name][key] state of the optimizer that is no tensor


def own_state(holder: Holder) -> dict[str, torch.Tensor]:
    """The part of the plain model's state_dict that this process writes; every name of a tied weight."""
    saved = holder.saved_names()
    first = _first_names(holder.model)
    return {
        name: tensor.detach().cpu()
        for name, tensor in holder.model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and first[id(tensor)] in saved
    }


def save(holder: Holder, folder: Path, waits: Waits) -> str:
    """Write a checkpoint with all ranks; gives its path."""
    target = folder / f"step-{holder.steps_done:08d}"
    scratch = folder / f".partial-{_run_name()}-{target.name}"
    model, (optimizer, groups, scalars) = own_state(holder), _optimizer_state(holder)
    model_parts, optimizer_parts = _in_files(model), _in_files(optimizer)
    if holder.rank == 0:
        _begin(scratch, target)
    counts = waits.gather((len(model_parts), len(optimizer_parts)), "all ranks to begin a checkpoint")
    if not scratch.is_dir():
        raise FileError(
            f"rank {holder.rank} does not see {folder} as rank 0 does; all hosts must write"
            " checkpoints to one"
            " shared folder"
        )
    weight_map: dict[str, str] = {}
    for kind, parts, at in (("model", model_parts, 0), ("optimizer", optimizer_parts, 1)):
        before, total = sum(one[at] for one in counts[: holder.rank]), sum(one[at] for one in counts)
        for number, part in enumerate(parts, before + 1):
            name = f"{kind}-{number:05d}-of-{total:05d}.safetensors"
            try:
                write_tensors(scratch / name, part)
            except OSError as problem:
                raise FileError(f"cannot write {scratch / name}: {problem.strerror or problem}") from None
            if kind == "model":
                weight_map |= dict.fromkeys(part, name)
    scheduler = _plain(holder.scheduler.state_dict()) if holder.scheduler is not None else None
    size = sum(tensor.nbytes for tensor in model.values())
    told = waits.gather(
        (weight_map, groups, scalars, size, scheduler), "all ranks to write their part of a checkpoint"
    )
    if holder.rank == 0:
        _finish(holder, scratch, target, told)
    waits.gather(None, "rank 0 to finish a checkpoint")
    return str(target)


def _run_name() -> str:
    """Of this run: torchrun's, or the parent's process."""
    return os.environ.get(RUN_NAME) or os.environ.get("TORCHELASTIC_RUN_ID") or str(os.getpid())


def remove_partial(folder: Path, run: str) -> None:
    """What a run that was brought down had begun to write; nothing else."""
    for scratch in folder.glob(f".partial-{run}-step-*"):
        shutil.rmtree(scratch, ignore_errors=True)


def find_latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder."""
    found = [one for one in folder.glob("step-*") if (one / FACTS).is_file() and one.name[5:].isdigit()]
    return max(found, key=lambda one: int(one.name[5:]), default=None)


def _find(folder: Path) -> Path:
    source = folder if (folder / FACTS).is_file() else find_latest(folder)
    if source is None:
        raise FileError(f"{folder} holds no checkpoint of a run (no step-*/{FACTS})")
    return source


def read_step(folder: Path) -> int:
    """The step after which a checkpoint was written."""
    return _read_facts(_find(folder) / FACTS).step


def load(holder: Holder, folder: Path) -> int:
    """Read a checkpoint, of whatever plan, into the parts that this process has; gives its step."""
    source = _find(folder)
    facts = _read_facts(source / FACTS)
    weights = Checkpoint(source)
    first = _first_names(holder.model)
    held = holder.held_names()
    alias: dict[str, str] = {}
    for name, tensor in holder.model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and name in weights.names:
            alias.setdefault(first[id(tensor)], name)
    lasting = {
        first[id(t)] for t in holder.model.state_dict(keep_vars=True).values() if isinstance(t, torch.Tensor)
    }
    lacking = sorted((held & lasting) - set(alias))
    if lacking:
        raise InputError(
            f"{source} lacks {lacking[0]!r}, which the model has; is it a checkpoint of another model?"
        )
    tensors = {**dict(holder.model.named_parameters()), **dict(holder.model.named_buffers())}
    with torch.no_grad():
        for name in sorted(held & set(alias)):
            value, target = weights.read(alias[name]), tensors[name]
            if value.shape != target.shape:
                raise InputError(
                    f"{source}: {name!r} has shape {tuple(value.shape)}, the model's {tuple(target.shape)}"
                )
            target.copy_(value)
    if holder.optimizer is not None:
        _load_optimizer(holder, source, facts)
    if holder.scheduler is not None and facts.scheduler is not None:
        holder.scheduler.load_state_dict(facts.scheduler)
    holder.steps_done = facts.step
    return facts.step


def _begin(scratch: Path, target: Path) -> None:
    try:
        if target.exists():
            raise FileError(f"{target} exists already; name another folder, or resume from it")
        scratch.parent.mkdir(parents=True, exist_ok=True)
        remove_partial(scratch.parent, _run_name())  # it began them and was restarted
        scratch.mkdir()
    except OSError as problem:
        raise FileError(f"cannot write {scratch}: {problem.strerror or problem}") from None


def _finish(holder: Holder, scratch: Path, target: Path, told: Sequence[Any]) -> None:
    weight_map: dict[str, str] = {}
    groups: list[tuple[list[str], dict[str, Any]]] = []
    scalars: dict[str, dict[str, Any]] = {}
    for own_map, own_groups, own_scalars, _, _ in told:
        weight_map |= own_map
        groups += own_groups
        scalars |= own_scalars
    index = {
        "metadata": {"total_size": sum(one[3] for one in told)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_bytes(msgspec.json.encode(index), scratch / INDEX)
    scheduler = next((one[4] for one in told if one[4] is not None), None)  # some ranks train nothing
    facts = _Facts(holder.steps_done, version("loadmaster"), holder.plan_digest(), groups, scheduler, scalars)
    write_bytes(msgspec.json.encode(facts), scratch / FACTS)
    _sync(scratch)
    try:
        os.rename(scratch, target)
    except OSError as problem:
        raise FileError(f"cannot write {target}: {problem.strerror or problem}") from None
    _sync(target.parent)


def _sync(folder: Path) -> None:
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _in_files(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Tensors in files that are not too large."""
    parts: list[dict[str, torch.Tensor]] = []
    room = 0
    for name, tensor in tensors.items():
        if not parts or tensor.nbytes > room:
            parts.append({})
            room = _MOST_FILE_BYTES
        parts[-1][name] = tensor
        room -= tensor.nbytes
    return parts


def _first_names(model: nn.Module) -> dict[int, str]:
    """The first name of every weight and buffer, by identity."""
    found = {id(tensor): name for name, tensor in model.named_buffers()}
    return found | {id(tensor): name for name, tensor in model.named_parameters()}


def _optimizer_state(holder: Holder) -> tuple[dict[str, torch.Tensor], list[Any], dict[str, Any]]:
    """Tensors by NAME|key, the groups' names and options, and what is no tensor."""
    tensors: dict[str, torch.Tensor] = {}
    groups: list[Any] = []
    scalars: dict[str, Any] = {}
    if holder.optimizer is None:
        return tensors, groups, scalars
    first, saved = _first_names(holder.model), holder.saved_names()
    for group in holder.optimizer.param_groups:
        names = [first[id(weight)] for weight in group["params"]]
        options = _plain({key: value for key, value in group.items() if key != "params"})
        groups.append(([name for name in names if name in saved], options))
    for weight, state in holder.optimizer.state.items():
        name = first[id(weight)]
        if name not in saved:
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}{_SEPARATOR}{key}"] = value.detach().cpu()
            else:
                scalars.setdefault(name, {})[key] = _plain(value)
    return tensors, groups, scalars


def _load_optimizer(holder: Holder, source: Path, facts: _Facts) -> None:
    entries: dict[str, TensorEntry] = {}
    for path in sorted(source.glob("optimizer-*.safetensors")):
        entries |= read_entries(path)
    first = _first_names(holder.model)
    by_name = {name: options for names, options in facts.groups for name in names}
    keys: dict[str, list[str]] = {}
    for full in entries:
        name, _, key = full.rpartition(_SEPARATOR)
        keys.setdefault(name, []).append(key)
    for group in holder.optimizer.param_groups:
        names = [first[id(weight)] for weight in group["params"]]
        options = next((by_name[name] for name in names if name in by_name), {})
        group.update(
            {key: tuple(v) if isinstance(v, list) else v for key, v in options.items() if key in group}
        )
        for weight, name in zip(group["params"], names, strict=True):
            state = {
                key: _on_device(key, read_tensor(key, entries[f"{name}{_SEPARATOR}{key}"]), weight)
                for key in keys.get(name, ())
            }
            state |= facts.scalars.get(name, {})
            if state:
                holder.optimizer.state[weight] = state


def _on_device(key: str, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Counters stay on the host, where optimizers want them."""
    return value if key == "step" else value.to(weight.device)


def _read_facts(path: Path) -> _Facts:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Facts)
    except OSError as problem:
        raise FileError(f"cannot read {path}: {problem.strerror or problem}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise FormatError(f"{path}: not a checkpoint's facts: {problem!r}") from None


def _plain(value: Any) -> Any:
    """What JSON can hold of a value; what it cannot is left out."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if _is_plain(v)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value if _is_plain(one)]
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)
