"""The next micro-batches of a trial, epoch after epoch, with the trial's own generators in place."""

from typing import Any

import torch
from torch.utils._pytree import tree_map

from loadmaster.core.errors import RunError
from loadmaster.modules import randomness
from loadmaster.shards.model.loaders import LoaderError, decode_loader_state, has_state
from loadmaster.train.execute.trial_state import TrialState


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
            taken = _take_batches(state)
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
    state.exhausted = True
    return []


def _take_batches(state: TrialState) -> list[Any]:
    taken: list[Any] = []
    assert state.iterator is not None
    while len(taken) < state.trial.accumulate:
        try:
            batch = next(state.iterator)
        except StopIteration:
            break
        taken.append(tuple(batch))
        state.batch += 1
    return taken


def _open_epoch(state: TrialState, device: torch.device) -> None:
    """Open this epoch's data; after a resume, go to where it was left."""
    if state.iterator is not None:
        return
    if state.epoch_generators is None:
        state.epoch_generators = randomness.capture_generators(device)
        state.source = state.trial.data()
        state.iterator = iter(state.source)
        return
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
            if next(state.iterator, None) is None:
                raise LoaderError(
                    f"the data of trial {state.trial.name!r} gave {at} batches where it had given"
                    f" {state.batch} before; it must give the same ones every time"
                )


def move_to_device(tree: Any, device: torch.device) -> Any:
    """A batch on the device; through pinned memory, so that the caller need not wait for what runs there."""
    if device.type == "cpu":
        return tree

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == device:
            return leaf
        return (leaf.pin_memory() if leaf.device.type == "cpu" else leaf).to(device, non_blocking=True)

    return tree_map(put, tree)
