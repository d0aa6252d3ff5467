"""A trial's data: what can be read again, states of loaders as JSON, and how long a batch may take.

`data` is a factory: each call gives a fresh iterable of (inputs, targets). Three kinds are served:

- with `state_dict` and `load_state_dict`: its state must be JSON or tensors, and it goes on in place;
- re-iterable or counted (a DataLoader, a list, a generator function): batches are skipped by counting;
- one that is its own iterator and has no state (a generator that was made once): refused by name, because
  the second epoch, or a resumed one, would get nothing.
"""

import base64
import json
import queue
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from loadmaster.core.errors import InputError, LoadmasterError, RunError
from loadmaster.shards.spec.trial import wrap_user_errors

Batch = Any  # (inputs, targets), pytrees


class LoaderError(RunError):
    """A trial's data cannot be read on."""


class UnreadableDataError(InputError):
    """A trial's data raised while the trial was planned: its own fault, and nobody else's."""


_WORKER_DEATH = re.compile(r"DataLoader worker \(pid|DataLoader timed out|Pin memory thread exited")


def is_worker_death(problem: BaseException) -> bool:
    """Whether an exception is what a DataLoader raises when one of its processes is gone.

    A process may die between sending a batch and handing over the batch's memory: then the connection fails.
    """
    if isinstance(problem, RuntimeError):
        return _WORKER_DEATH.search(str(problem)) is not None
    if not isinstance(problem, EOFError | ConnectionError | FileNotFoundError):
        return False
    files = [Path(frame.filename).parts[-2:] for frame in traceback.extract_tb(problem.__traceback__)]
    return ("multiprocessing", "resource_sharer.py") in files


@contextmanager
def blame_loader(trial: str) -> Iterator[None]:
    """While a trial is planned: what its data raises is told from what its model raises."""
    try:
        with wrap_user_errors(trial):
            yield
    except InputError as problem:
        if problem.__cause__ is None or isinstance(problem.__cause__, LoadmasterError):
            raise
        raise UnreadableDataError(str(problem)) from problem.__cause__


@contextmanager
def confine_worker_deaths() -> Iterator[None]:
    """A loader's process that dies is found by who reads that loader, within seconds, and by nobody else.

    Torch's handler of SIGCHLD raises in the main thread, wherever that is: in the step of another trial, or
    in the study itself. Meanwhile it is not installed, or what it raises goes nowhere; whoever waits for a
    batch looks after the processes of its own loader anyway.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        yield
        return
    from torch.utils.data._utils import signal_handling

    before = signal.getsignal(signal.SIGCHLD)
    installed = getattr(signal_handling, "_SIGCHLD_handler_set", None)  # private: another torch may lack it

    def on_child(number: int, frame: Any) -> None:
        try:
            before(number, frame)  # type: ignore[operator, misc]
        except RuntimeError as problem:
            if not is_worker_death(problem):
                raise

    if callable(before):
        signal.signal(signal.SIGCHLD, on_child)
    if installed is False:
        signal_handling._SIGCHLD_handler_set = True
    try:
        yield
    finally:
        if installed is False:
            signal_handling._SIGCHLD_handler_set = False
        if callable(before) and signal.getsignal(signal.SIGCHLD) is on_child:
            signal.signal(signal.SIGCHLD, before)


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
