"""A model built from its trial, with its blocks and its profile; nothing is laid out in memory yet."""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loadmaster.core.errors import InputError
from loadmaster.modules import randomness
from loadmaster.modules.meta_build import build_on_meta, free_weights
from loadmaster.shards.model.blocks import Chain, build_chain
from loadmaster.shards.model.loaders import LoaderError, encode_loader_state, has_state
from loadmaster.shards.model.profile import Profile, profile
from loadmaster.shards.model.refusals import (
    check_dense_grads,
    check_extra_state,
    check_not_wrapped,
    refuse_value_reads,
)
from loadmaster.shards.model.shared_storage import check_shared_memory
from loadmaster.shards.spec.trial import Trial


@dataclass(frozen=True, slots=True, eq=False)
class BuiltModel:
    """A model with its blocks, looked at but not laid out yet."""

    trial: Trial
    chain: Chain
    facts: Profile
    generators: randomness.Generators
    num_batches: int | None
    device: torch.device
    empty: bool = False  # its numbers are drawn when it is held


def build_trial(trial: Trial, *, device: torch.device) -> BuiltModel:
    """Build the model as a plain script would after seeding, and profile it on a batch of its own."""
    with randomness.preserve_generators(device):
        randomness.seed_all(trial.seed, device)
        empty = build_on_meta(trial.build)
        if empty is None:
            randomness.seed_all(trial.seed, device)
        model = trial.build() if empty is None else empty
        if not isinstance(model, nn.Module):
            raise InputError(
                f"trial {trial.name!r}: build gave {type(model).__name__}, not a torch.nn.Module"
            )
        check_not_wrapped(trial, model)
        check_dense_grads(trial, model)
        generators = randomness.capture_generators(device)
        chain = build_chain(trial, model)
        check_shared_memory(trial.name, chain)
        check_extra_state(trial, model)
        batch, num_batches = take_first_batch(trial)
        model.train()
        with refuse_value_reads(trial):
            facts = profile(trial, chain, batch, device=device)
        if empty is not None:
            free_weights(model)
            chain = build_chain(trial, model)
    return BuiltModel(trial, chain, facts, generators, num_batches, device, empty is not None)


def take_first_batch(trial: Trial) -> tuple[Any, int | None]:
    """A batch from an iterator of its own, and how many an epoch has."""
    data = trial.data()
    for batch in data:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise InputError(
                f"trial {trial.name!r}: data must give (inputs, targets), not {type(batch).__name__}"
            )
        if has_state(data):
            try:
                encode_loader_state(data, trial=trial.name)  # refused now, not at the first checkpoint
            except LoaderError as problem:
                raise InputError(str(problem)) from None
        return tuple(batch), _count_batches(data)
    raise InputError(f"trial {trial.name!r}: data is empty")


def _count_batches(data: Any) -> int | None:
    """Batches of an epoch, where the source knows; a loader of a stream has a length that raises."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:
        return None
