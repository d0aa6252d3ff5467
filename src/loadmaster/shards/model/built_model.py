"""A model built from its trial, with its blocks and its profile; nothing is laid out in memory yet.

What was found out about it (`BuildRecord`) is plain data: another process that builds the model again needs
neither an example batch nor a profile nor a probe of the optimizer.
"""

import time
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from loadmaster.core.errors import InputError, LoadmasterError
from loadmaster.modules import randomness
from loadmaster.modules.meta_build import build_on_meta, free_weights
from loadmaster.shards.model.blocks import Chain, build_call_chain, build_chain
from loadmaster.shards.model.call_profile import profile_calls
from loadmaster.shards.model.call_shards import find_call_shards
from loadmaster.shards.model.loaders import (
    LoaderError,
    blame_loader,
    encode_loader_state,
    has_state,
    open_source,
)
from loadmaster.shards.model.optimizer_probe import OptimizerProbe, probe_optimizer
from loadmaster.shards.model.profile import Profile, profile, tree_bytes
from loadmaster.shards.model.refusals import (
    ValueReadError,
    check_dense_grads,
    check_extra_state,
    check_not_lazy,
    check_not_quantised,
    check_not_wrapped,
    refuse_value_reads,
)
from loadmaster.shards.model.shared_storage import check_shared_memory
from loadmaster.shards.spec.trial import Trial, split_batch

_MOST_LOOKED_AT = 1000  # batches, to find the longest
_LONGEST_LOOK_S = 2.0
_CACHES_OFF = (
    "its caches of keys and values (use_cache) are off while it trains, as the Trainer of transformers has"
    " them; a loop that leaves them on may differ in the last bits"
)


@dataclass(frozen=True, slots=True, eq=False)
class BuildRecord:
    """What was found out about a trial when it was built; the same in every process that builds it."""

    facts: Profile
    probe: OptimizerProbe
    num_batches: int | None  # of an epoch, where the data says
    empty: bool  # built without memory: its numbers are drawn when it is held
    note: str = ""  # what else is to be said of it, such as which batch memory is planned for


@dataclass(frozen=True, slots=True, eq=False)
class BuiltModel:
    """A model with its blocks, looked at but not laid out yet."""

    trial: Trial
    chain: Chain
    generators: randomness.Generators
    device: torch.device
    record: BuildRecord
    batch: Any = None  # that it was profiled on; None: known from another build
    optimizer: Any = None  # that was looked at

    @property
    def facts(self) -> Profile:
        """What its blocks need."""
        return self.record.facts

    @property
    def probe(self) -> OptimizerProbe:
        """What its optimizer keeps."""
        return self.record.probe

    @property
    def empty(self) -> bool:
        """Whether its numbers are drawn when it is held."""
        return self.record.empty


def build_trial(trial: Trial, *, device: torch.device, known: BuildRecord | None = None) -> BuiltModel:
    """Build the model as a plain script would after seeding, and profile it on a batch of its own.

    `build` is called twice where the model cannot be built on `meta`: that is known only once it was tried.
    With what is `known` from an earlier build, it is called once, and nothing else of the trial is.
    """
    with randomness.preserve_generators(device):
        randomness.seed_all(trial.seed, device)
        empty = build_on_meta(trial.build) if known is None or known.empty else None
        if empty is not None and not all(parameter.requires_grad for parameter in empty.parameters()):
            empty = None  # frozen numbers are compared with those of other trials, so they must be there
        try:
            return _build_once(trial, device, known, empty)
        except Exception as problem:
            said = isinstance(problem, LoadmasterError) and not isinstance(problem, ValueReadError)
            if empty is None or trial.blocks is not None or said:
                raise
        return _build_once(trial, device, known, None)  # with values, it is looked at as it runs


def _build_once(
    trial: Trial, device: torch.device, known: BuildRecord | None, empty: nn.Module | None
) -> BuiltModel:
    """The model, on `meta` if it is given, looked at and ready."""
    if empty is None:
        randomness.seed_all(trial.seed, device)
    model = trial.build() if empty is None else empty
    if not isinstance(model, nn.Module):
        raise InputError(f"trial {trial.name!r}: build gave {type(model).__name__}, not a torch.nn.Module")
    check_not_lazy(trial, model)
    check_not_wrapped(trial, model)
    check_not_quantised(trial, model)
    check_dense_grads(trial, model)
    generators = randomness.capture_generators(device)
    calls = None if known is None else known.facts.calls
    chain = build_chain(trial, model, shards=None if calls is None else calls.shards)
    check_shared_memory(trial.name, chain)
    check_extra_state(trial, model)
    model.train()
    if known is None:
        chain, facts, num_batches, note, batch = _profile_batch(trial, chain, device)
    else:
        facts, num_batches, note, batch = known.facts, known.num_batches, known.note, None
    if empty is not None:
        free_weights(model)
        chain = build_chain(trial, model, shards=None if facts.calls is None else facts.calls.shards)
    probe, optimizer = (known.probe, None) if known is not None else probe_optimizer(trial, chain)
    record = BuildRecord(facts, probe, num_batches, empty is not None, note)
    return BuiltModel(trial, chain, generators, device, record, batch, optimizer)


def _profile_batch(
    trial: Trial, chain: Chain, device: torch.device
) -> tuple[Chain, Profile, int | None, str, Any]:
    with blame_loader(trial.name):
        batch, num_batches = take_first_batch(trial, open_source(trial.data, trial=trial.name))
    if not chain.by_call:
        try:
            with refuse_value_reads(trial):
                return chain, profile(trial, chain, batch, device=device), num_batches, "", batch
        except ValueReadError:
            if trial.blocks is not None or any(parameter.is_meta for parameter in chain.parameters):
                raise
            chain = build_call_chain(trial, chain.model, find_call_shards(chain.model))
    with blame_loader(trial.name):
        batch, note = _find_longest_batch(trial, batch)
    if chain.switches is not None and chain.switches.has_caches:
        note = f"{note}; {_CACHES_OFF}" if note else _CACHES_OFF
    return *profile_calls(trial, chain, batch, device=device), num_batches, note, batch


def _find_longest_batch(trial: Trial, first: Any) -> tuple[Any, str]:
    """The largest of the batches that can be looked at: collators pad to the longest row of each batch."""
    began, longest, seen = time.monotonic(), first, 0
    sizes = {tree_bytes(first[0])}
    for batch in open_source(trial.data, trial=trial.name):
        pair = split_batch(batch)
        if pair is None or seen >= _MOST_LOOKED_AT or time.monotonic() - began > _LONGEST_LOOK_S:
            break
        seen += 1
        sizes.add(tree_bytes(pair[0]))
        if tree_bytes(pair[0]) > tree_bytes(longest[0]):
            longest = pair
    if len(sizes) == 1:
        return first, ""
    shape = next((tuple(e.shape) for e in tree_leaves(longest[0]) if isinstance(e, torch.Tensor)), ())
    return longest, f"memory is planned for the longest of {seen} batches looked at, {shape}"


def take_first_batch(trial: Trial, data: Iterable[Any]) -> tuple[Any, int | None]:
    """The first batch of an epoch's data, and how many the epoch has."""
    for batch in data:
        pair = split_batch(batch)
        if pair is None:
            raise InputError(
                f"trial {trial.name!r}: data must give (inputs, targets), or a dict of the model's keywords,"
                f" not {type(batch).__name__}"
            )
        if has_state(data):
            try:
                encode_loader_state(data, trial=trial.name)  # refused now, not at the first checkpoint
            except LoaderError as problem:
                raise InputError(str(problem)) from None
        return pair, _count_batches(data)
    raise InputError(f"trial {trial.name!r}: data is empty")


def _count_batches(data: Any) -> int | None:
    """Batches of an epoch, where the source knows; a loader of a stream has a length that raises."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:
        return None
