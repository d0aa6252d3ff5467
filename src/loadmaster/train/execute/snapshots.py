"""A trial's state as named tensors and JSON facts, and back: what checkpoints hold.

Tensors are views of the host store: masters, optimizer state, buffers, generators. Compute copies are not
among them: they are the masters, rounded. Facts are counts, the learning rates and the schedule.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from loadmaster.core.errors import RunError
from loadmaster.modules import randomness
from loadmaster.modules.randomness import Generators
from loadmaster.shards.model.loaders import encode_loader_state, has_state
from loadmaster.shards.plan.host_store import HostPiece
from loadmaster.train.disk.json_values import decode_plain, encode_plain
from loadmaster.train.execute.trial_state import TrialState

_COUNTS = ("step", "epoch", "batch", "exhausted", "checked")


def collect_tensors(state: TrialState) -> dict[str, torch.Tensor]:
    """Every tensor that must survive, by name."""
    found: dict[str, torch.Tensor] = {}
    for host, position, name in _iter_parameters(state):
        found[f"model/{name}"] = host.master[position]
        if host.started[position]:
            for key, value in host.state[position].items():
                found[f"optim/{name}/{key}"] = value
        for key, value in host.small[position].items():
            if isinstance(value, torch.Tensor):
                found[f"small/{name}/{key}"] = value
    for name, buffer in zip(state.chain.buffer_name, state.chain.buffers, strict=True):
        found[f"buffer/{name}"] = buffer.detach()
    for name, generators in (("rng", state.generators), ("epoch_rng", state.epoch_generators)):
        if generators is not None:
            found |= {f"{name}/{key}": each for key, each in _pack_generators(generators).items()}
    for at, drawn in state.data_draws.items():
        found |= {f"data_rng/{at}/{key}": each for key, each in _pack_generators(drawn).items()}
    return found


def _pack_generators(generators: Generators) -> dict[str, torch.Tensor]:
    found = {"host": generators.host}
    if generators.device is not None:
        found["device"] = generators.device
    if generators.others is not None:
        found["others"] = randomness.pack_others(generators.others)
    return found


def collect_facts(state: TrialState) -> dict[str, Any]:
    """Counts, options and the schedule, as JSON."""
    facts: dict[str, Any] = {name: getattr(state, name) for name in _COUNTS}
    if state.iterator is not None and state.batch and has_state(state.source):
        facts["loader"] = encode_loader_state(state.source, trial=state.trial.name)
    facts["scaler"] = [state.scaler.scale, state.scaler.good_steps]
    facts["pieces"] = [host.step for host in state.pieces]
    facts["started"] = {name: host.started[position] for host, position, name in _iter_parameters(state)}
    facts["small"] = {
        name: {k: v for k, v in host.small[position].items() if not isinstance(v, torch.Tensor)}
        for host, position, name in _iter_parameters(state)
    }
    facts["groups"] = [
        {key: _as_number(value) for key, value in group.items() if key != "params"}
        for group in state.optimizer.param_groups
    ]
    if state.schedule is not None:
        facts["schedule"] = encode_plain(state.schedule.state_dict())
    try:
        json.dumps(facts)
    except (TypeError, ValueError) as problem:
        raise RunError(
            f"trial {state.trial.name!r}: the state of its optimizer or schedule is not JSON: {problem};"
            " use one whose state_dict holds numbers, texts, lists and dicts"
        ) from None
    return facts


def restore_state(state: TrialState, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Stand where a snapshot was taken; the store keeps its memory, only values change."""
    with torch.no_grad():
        for host, position, name in _iter_parameters(state):
            master = host.master[position]
            master.copy_(_require_tensor(tensors, f"model/{name}", state))
            if host.compute[position] is not master:
                host.compute[position].copy_(master)
            host.started[position] = facts["started"][name]
            for key, value in host.state[position].items():
                if host.started[position]:
                    value.copy_(_require_tensor(tensors, f"optim/{name}/{key}", state))
                else:
                    value.zero_()  # as memory is at the beginning: an update on the host begins in it
            begins = f"small/{name}/"
            numbers = {k.removeprefix(begins): v.clone() for k, v in tensors.items() if k.startswith(begins)}
            host.small[position] = numbers | facts["small"][name]
        for name, buffer in zip(state.chain.buffer_name, state.chain.buffers, strict=True):
            buffer.copy_(_require_tensor(tensors, f"buffer/{name}", state))
    for host, step in zip(state.pieces, facts["pieces"], strict=True):
        host.step = step
    _restore_counts(state, tensors, facts)


def _restore_counts(state: TrialState, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    for name in _COUNTS:
        setattr(state, name, facts[name])
    state.scaler.scale, state.scaler.good_steps = facts["scaler"]
    rng = _read_generators(tensors, "rng")
    assert rng is not None, "every snapshot has it"
    state.generators, state.epoch_generators = rng, _read_generators(tensors, "epoch_rng")
    drawn = {name.split("/")[1] for name in tensors if name.startswith("data_rng/")}
    read = {int(at): _read_generators(tensors, f"data_rng/{at}") for at in drawn}
    state.data_draws = {at: each for at, each in sorted(read.items()) if each is not None}
    state.data_left = None
    if state.schedule is not None:
        state.schedule.load_state_dict({**state.schedule.state_dict(), **decode_plain(facts["schedule"])})
    for group, options in zip(state.optimizer.param_groups, facts["groups"], strict=True):
        for key, value in options.items():
            before = group[key]
            if isinstance(before, torch.Tensor):
                before.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(before, tuple) else value
    state.iterator = state.source = None
    state.position = facts.get("loader")
    state.peeked.clear()


def _read_generators(tensors: Mapping[str, torch.Tensor], name: str) -> Generators | None:
    host, device = tensors.get(f"{name}/host"), tensors.get(f"{name}/device")
    if host is None:
        return None
    others = tensors.get(f"{name}/others")  # older checkpoints have none
    return Generators(
        host.clone(),
        None if device is None else device.clone(),
        None if others is None else randomness.unpack_others(others),
    )


def _iter_parameters(state: TrialState) -> Iterator[tuple[HostPiece, int, str]]:
    """Every parameter once: its piece, its position there, its name."""
    for host in state.pieces:
        for position, number in enumerate(host.piece.parameters):
            yield host, position, state.chain.parameter_name[number]


def _require_tensor(tensors: Mapping[str, torch.Tensor], name: str, state: TrialState) -> torch.Tensor:
    if name not in tensors:
        raise RunError(
            f"the checkpoint of trial {state.trial.name!r} has no {name!r}: its model or optimizer is another"
            " now; give the trial another name"
        )
    return tensors[name]


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
