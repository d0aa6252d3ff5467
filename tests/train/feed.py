"""The batches of a trial, read plainly: what studies and shards are compared with.

Samplers and transforms draw from torch's global generator. While a feed reads, a generator of its own stands
there, seeded by (trial's seed, epoch), so that what it gives depends on the trial alone.
"""

import base64
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loadmaster.core.errors import InputError
from loadmaster.shards.model.loaders import (
    Batch,
    LoaderError,
    decode_loader_state,
    encode_loader_state,
    has_state,
)

Position = dict[str, Any]  # JSON


class Feed:
    """The batches of a trial, epoch after epoch, with a position that is JSON."""

    def __init__(self, data: Callable[[], Iterable[Batch]], *, trial: str, seed: int = 0) -> None:
        self._data, self._trial, self._seed = data, trial, seed
        self.epoch = 0
        self.num_read = 0  # batches of this epoch
        self._source: Any = None
        self._batches: Iterator[Batch] | None = None
        self._rng = torch.get_rng_state()

    def batches(self) -> Iterator[Batch]:
        """The rest of this epoch's batches; after the last one the feed stands at the next epoch."""
        while True:
            try:
                batch = self._read()
            except StopIteration:
                self._end_epoch()
                return
            self.num_read += 1
            yield batch

    def position(self) -> Position:
        """Where the next batch comes from, as JSON."""
        found: Position = {"epoch": self.epoch, "num_read": self.num_read}
        # Between epochs a loader has nothing to say yet.
        if self._batches is not None and self.num_read and has_state(self._source):
            found["state"] = encode_loader_state(self._source, trial=self._trial)
            found["rng"] = base64.b64encode(self._rng.numpy().tobytes()).decode()
        return found

    def seek(self, position: Position) -> None:
        """Stand where `position` was taken."""
        self.epoch, self.num_read = position["epoch"], 0
        self._source = self._batches = None
        if position["num_read"] == 0:
            return
        state = position.get("state")
        if state is not None:
            self._make_source()
            self._source.load_state_dict(decode_loader_state(state))
            self._begin()
            rng = bytearray(base64.b64decode(position["rng"]))
            self._rng = torch.frombuffer(rng, dtype=torch.uint8).clone()
        else:
            for at in range(position["num_read"]):
                try:
                    self._read()
                except StopIteration:
                    raise LoaderError(
                        f"the data of trial {self._trial!r} gave {at} batches where it had given"
                        f" {position['num_read']} before; it must give the same ones every time"
                    ) from None
        self.num_read = position["num_read"]

    def __len__(self) -> int:
        """Batches of an epoch, where the source says."""
        self._make_source()
        return len(self._source)

    def _read(self) -> Batch:
        if self._batches is None:
            self._make_source()
            self._begin()
        assert self._batches is not None
        with self._use_own_rng():
            try:
                return next(self._batches)
            except (StopIteration, LoaderError):
                raise
            except Exception as problem:
                raise LoaderError(
                    f"the data of trial {self._trial!r} raised {type(problem).__name__} after {self.num_read}"
                    f" batches of epoch {self.epoch}: {problem}"
                ) from problem

    def _make_source(self) -> None:
        if self._source is None:
            source = self._data()
            if not isinstance(source, Iterable):
                raise InputError(
                    f"the data of trial {self._trial!r} gives {type(source).__name__}; give a function that"
                    " returns an iterable of (inputs, targets)"
                )
            self._source = source

    def _begin(self) -> None:
        """Open the epoch."""
        self._rng = torch.Generator().manual_seed(epoch_seed(self._seed, self.epoch)).get_state()
        with self._use_own_rng():
            if hasattr(self._source, "set_epoch"):
                self._source.set_epoch(self.epoch)
            self._batches = iter(self._source)

    @contextmanager
    def _use_own_rng(self) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self._rng)
        try:
            yield
        finally:
            self._rng = torch.get_rng_state()
            torch.set_rng_state(before)

    def _end_epoch(self) -> None:
        if self.num_read == 0:
            raise LoaderError(
                f"the data of trial {self._trial!r} gave no batch in epoch {self.epoch}; if it is an iterator"
                " that was made once, give a function that makes it anew"
            )
        self.epoch += 1
        self.num_read = 0
        self._batches = None
        if isinstance(self._source, Iterator):
            self._source = None  # an iterator is spent; the factory makes the next


def epoch_seed(seed: int, epoch: int) -> int:
    """What an epoch's order is drawn from."""
    return (seed * 1_000_003 + epoch * 7919 + 12345) % 2**63
