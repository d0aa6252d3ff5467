"""The next micro-batches of a trial, epoch after epoch, with the trial's own generators in place.

A loader may draw from the global generators with every batch (a shuffle buffer), and the model draws between
its batches. To skip batches after a resume such a loader must find the generators as it found them then:
where it drew, and somebody else had drawn before, their states are kept for the epoch (`data_draws`).
"""

import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_map

from loadmaster.core.errors import RunError
from loadmaster.modules import randomness
from loadmaster.shards.model.loaders import LoaderError, decode_loader_state, has_state
from loadmaster.shards.spec.trial import split_batch
from loadmaster.train.execute.trial_state import TrialState

_NOT_KEPT = -1
MOST_DRAWS = 20_000  # states that are kept in an epoch, 5 to 20 kB each


def next_batches(state: TrialState, device: torch.device) -> list[Any]:
    """The micro-batches of the next step; [] where training is over. A step never spans two epochs."""
    if state.peeked:
        taken, state.peeked = state.peeked, []
        return taken
    while state.epoch < state.trial.epochs:
        if state.trial.max_steps is not None and state.step >= state.trial.max_steps:
            break
        before = state.batch, state.epoch_generators, state.position
        try:
            _open_epoch(state, device)
            taken = _take_batches(state, device)
        except BaseException:  # the trial may still be saved: it stands before these batches
            state.batch, state.epoch_generators, state.position = before
            state.iterator = state.source = None
            randomness.restore_generators(state.generators, device)
            raise
        if taken:
            return taken
        state.iterator = state.source = None
        if state.batch == 0:
            raise RunError(f"trial {state.trial.name!r}: epoch {state.epoch} of its data is empty")
        state.epoch, state.batch, state.epoch_generators = state.epoch + 1, 0, None
        state.data_draws, state.data_left = {}, None
    state.exhausted = True
    return []


def _take_batches(state: TrialState, device: torch.device) -> list[Any]:
    taken: list[Any] = []
    assert state.iterator is not None
    skips = not has_state(state.source)
    before = randomness.capture_generators(device) if skips else None
    while len(taken) < state.trial.accumulate:
        try:
            batch = next(state.iterator)
        except StopIteration:
            break
        taken.append(split_batch(batch) or tuple(batch))
        if before is not None:
            after = randomness.capture_generators(device)
            _note_draws(state, before, after)
            before = after
        state.batch += 1
    return taken


def _note_draws(state: TrialState, before: randomness.Generators, after: randomness.Generators) -> None:
    """Keep how a batch found the generators, where it drew and the batch before did not leave them so."""
    left, state.data_left = state.data_left, after
    drew = not randomness.is_same_generators(before, after)
    if drew and left is not None and not randomness.is_same_generators(left, before):
        if _NOT_KEPT in state.data_draws:
            return
        if len(state.data_draws) >= MOST_DRAWS:
            nothing = torch.empty(0, dtype=torch.uint8)
            state.data_draws = {_NOT_KEPT: randomness.Generators(nothing, None)}
            warnings.warn(
                _explain_draws(state, "cannot be resumed before its end"), RuntimeWarning, stacklevel=2
            )
            return
        torch_drew = not torch.equal(before.host, after.host)
        assert before.others is not None, "they were captured"
        assert after.others is not None, "they were captured"
        others_drew = not randomness.is_same_others(before.others, after.others)
        state.data_draws[state.batch] = randomness.Generators(
            before.host if torch_drew else torch.empty(0, dtype=torch.uint8),
            before.device,
            before.others if others_drew else None,
        )


def _open_epoch(state: TrialState, device: torch.device) -> None:
    """Open this epoch's data; after a resume, go to where it was left."""
    if state.iterator is not None:
        return
    if state.epoch_generators is None:
        state.epoch_generators = randomness.capture_generators(device)
        state.source = state.trial.data()
        state.iterator = iter(state.source)
        state.data_draws, state.data_left = {}, randomness.capture_generators(device)
        return
    if _NOT_KEPT in state.data_draws:
        raise LoaderError(_explain_draws(state, "cannot be resumed"))
    with randomness.preserve_generators(device):
        randomness.restore_generators(state.epoch_generators, device)
        state.source = state.trial.data()
        position, state.position = state.position, None
        if position is not None and has_state(state.source):
            state.source.load_state_dict(decode_loader_state(position))
            state.iterator = iter(state.source)
            return
        state.iterator = iter(state.source)
        for at in range(state.batch):
            if at in state.data_draws:
                _put_back(state.data_draws[at], device)
            if next(state.iterator, None) is None:
                raise LoaderError(
                    f"the data of trial {state.trial.name!r} gave {at} batches where it had given"
                    f" {state.batch} before; it must give the same ones every time"
                )
        state.data_left = randomness.capture_generators(device)


def _explain_draws(state: TrialState, what: str) -> str:
    return (
        f"the data of trial {state.trial.name!r} draws from the global generators with every batch, between"
        f" draws of the model, more than {MOST_DRAWS} times in epoch {state.epoch}, which {what}; give it a"
        " generator of its own, made in `data`, or state_dict and load_state_dict"
    )


def _put_back(found: randomness.Generators, device: torch.device) -> None:
    """The generators as a batch found them, of those that it drew from."""
    host = found.host if found.host.numel() else torch.get_rng_state()
    randomness.restore_generators(randomness.Generators(host, found.device, found.others), device)


def move_to_device(tree: Any, device: torch.device) -> Any:
    """A batch on the device; through pinned memory, so that the caller need not wait for what runs there."""
    if device.type == "cpu":
        return tree

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == device:
            return leaf
        return (leaf.pin_memory() if leaf.device.type == "cpu" else leaf).to(device, non_blocking=True)

    return tree_map(put, tree)
