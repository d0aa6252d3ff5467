"""Where a trial stands in its data, so that it can go on there.

`data` is a factory: each call gives a fresh iterable of (inputs, targets). Three kinds are served:

- with `state_dict` and `load_state_dict`: its state must be JSON or tensors, and it goes on in place;
- re-iterable or counted (a DataLoader, a list, a generator function): batches are skipped by counting, with
  the random state at the beginning of the epoch put back first, so that a shuffle is the same shuffle;
- one that is its own iterator and has no state (a generator that was made once): refused by name, because
  the second epoch, or a resumed one, would get nothing.

Random state: samplers and transforms draw from torch's global generator. While a feed reads, a generator of
its own stands there, seeded by (trial's seed, epoch), so that what it gives depends on the trial alone.
"""

import base64
import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loadmaster.core.errors import InputError, RunError

Batch = Any  # (inputs, targets), pytrees
Position = dict[str, Any]  # JSON


class LoaderError(RunError):
    """A trial's data cannot be read on."""


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


def open_source(data: Callable[[], Iterable[Batch]], *, trial: str) -> Iterable[Batch]:
    """The data of an epoch; refuses what could not be resumed: a factory that gives the same iterator again.

    An iterator without a state is asked for twice, to see that the second one is another.
    """
    if not callable(data):
        raise InputError(
            f"the data of trial {trial!r} is a {type(data).__name__}; give a function that returns it,"
            " for example data=lambda: loader"
        )
    source = data()
    if isinstance(source, Iterator) and not has_state(source) and data() is source:
        raise InputError(
            f"the data of trial {trial!r} gives the same {type(source).__name__} every time, which can"
            " be read once and not resumed; make it inside the function, or give it state_dict and"
            " load_state_dict"
        )
    return source


def has_state(source: Any) -> bool:
    """Whether a loader can say where it stands, and go there."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


_TENSOR = "loadmaster tensor"


def encode_loader_state(source: Any, *, trial: str) -> Any:
    """What a loader says of where it stands, as JSON (tensors as text); anything else is refused by name."""
    try:
        state = _encode_value(source.state_dict())
        json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise LoaderError(
            f"the loader of trial {trial!r} ({type(source).__name__}) has a state that is not JSON:"
            f" {problem}; give numbers, texts, lists, dicts and tensors, or no state_dict at all"
        ) from None
    return state


def decode_loader_state(state: Any) -> Any:
    """What a loader is to get back."""
    if isinstance(state, list):
        return [decode_loader_state(each) for each in state]
    if not isinstance(state, dict):
        return state
    if _TENSOR in state:
        flat = torch.frombuffer(bytearray(base64.b64decode(state[_TENSOR])), dtype=torch.uint8).clone()
        return flat.view(getattr(torch, state["dtype"])).reshape(state["shape"])
    return {key: decode_loader_state(each) for key, each in state.items()}


def _encode_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel():
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        text = base64.b64encode(flat.numpy().tobytes()).decode()
        return {_TENSOR: text, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, dict):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise TypeError(f"the key {odd[0]!r} is not a text")
        return {key: _encode_value(each) for key, each in value.items()}
    return [_encode_value(each) for each in value] if isinstance(value, list | tuple) else value


def with_timeout(
    data: Callable[[], Iterable[Batch]], timeout_s: float, *, trial: str
) -> Callable[[], Iterable[Batch]]:
    """The same data, read by a thread beside; a batch that takes too long is a `LoaderError`."""

    def open_timed() -> Iterable[Batch]:
        return _TimedSource(data(), timeout_s, trial)

    return open_timed


class _TimedSource:
    """A source whose batches are waited for at most so long."""

    def __init__(self, source: Iterable[Batch], timeout_s: float, trial: str) -> None:
        self._source, self._timeout_s, self._trial = source, timeout_s, trial

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        asked: queue.Queue[bool] = queue.Queue()
        answers: queue.Queue[tuple[str, Any]] = queue.Queue()
        batches = iter(self._source)
        threading.Thread(target=_serve_batches, args=(batches, asked, answers), daemon=True).start()
        try:
            while True:
                asked.put(True)  # one batch at a time: reading ahead would move the loader's own state
                try:
                    kind, value = answers.get(timeout=self._timeout_s)
                except queue.Empty:
                    raise LoaderError(
                        f"the data of trial {self._trial!r} gave no batch within {self._timeout_s:g} s"
                    ) from None
                if kind == "end":
                    return
                if kind == "error":
                    raise value
                yield value
        finally:
            asked.put(False)


def _serve_batches(
    batches: Iterator[Batch], asked: "queue.Queue[bool]", answers: "queue.Queue[tuple[str, Any]]"
) -> None:
    while asked.get():
        try:
            answers.put(("batch", next(batches)))
        except StopIteration:
            answers.put(("end", None))
            return
        except BaseException as problem:  # handed to the trial, which fails by it
            answers.put(("error", problem))
            return
