"""Values that a model reads out of its tensors (an `if` on a value, a count), while capture has none.

Fake tensors have none. What depends on constants, whole-number inputs and random numbers only is known all
the same (`known_values.py`). Of the rest, where the weights are there and fit, the example is run once for
real and what it read is answered in the same order; else a read is answered by an assumption: a scalar is
`assume` (every LOOP-th time the contrary, so that loops end), a choice of elements takes all of them. What
is read again where a checkpoint runs again is what was read the first time.

Most reads are ops. `tolist` and `numpy` of a real tensor run none, so both runs are watched one level higher,
too (`ReadMode`).
"""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from loadmaster.core.findings import Assumption
from loadmaster.graph.torch_capture.record import packed_sequences
from loadmaster.graph.torch_capture.record.call_site import find_call_site
from loadmaster.graph.torch_capture.record.data_dependent_sizes import (
    CHOICES,
    Shapes,
    count_shapes,
    count_values,
    has_data_dependent_shape,
    make_fake_outputs,
    values_that_decide,
)
from loadmaster.graph.torch_capture.record.known_values import KnownValues, run_really
from loadmaster.modules.fake_model import rebuild_modules
from loadmaster.modules.randomness import preserve_rng, seed_rng
from loadmaster.modules.tensor_trees import find_tensors, list_tensors

_aten = torch.ops.aten
_SCALARS = {_aten._local_scalar_dense, _aten.is_nonzero, _aten.item}
_TRUTHS = {_aten.equal, _aten.allclose}
LOOP = 64
SEED = 0  # of the one draw that a captured step follows
MOST_REAL_BYTES = 8 * 2**30
MOST_MADE_BYTES = 4 * 2**30  # by all ops of the real run
Read = tuple[str, str, Any]  # what is read, the line that reads it, the value
_ALL = "all of them"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model reads."""

    module: str = ""
    line: str = ""  # '' = the innermost line of the model's code on the stack
    again: bool = False  # in a forward pass that runs again for the backward pass

    def find_line(self) -> str:
        """The line of code."""
        return self.line or find_call_site()


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of a read: a value or shapes, and for shapes the results if they are known, too."""

    value: Any
    drawn: bool
    real: Any = None


@dataclass(slots=True)
class Answers:
    """Answers reads in order; `reads` come from a real run."""

    assume: float = 1.0
    reads: list[Read] = field(default_factory=list)
    known: KnownValues = field(default_factory=KnownValues)
    num_followed: int = 0
    num_assumed: int = 0
    drawn: dict[tuple[str, str], int] = field(default_factory=dict)  # line, module -> reads of random numbers
    _assumed: dict[tuple[str, str, str, str], int] = field(default_factory=dict)
    _given: dict[tuple[str, str], deque[Any]] = field(default_factory=dict)
    _at: dict[tuple[str, str], int] = field(default_factory=dict)  # reads of a line that were answered
    others_drawn: str = ""  # whose random numbers the model drew beside torch's
    _by_line: dict[tuple[str, str], list[Any]] = field(default_factory=dict)  # `reads`, line by line
    _follows: bool = True

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What was assumed, place by place."""
        return tuple(Assumption(*place, count) for place, count in self._assumed.items())

    def wants(self, func: Any, args: Any) -> bool:
        """Whether an op's result, or its shape, depends on values."""
        packet = getattr(func, "overloadpacket", None)
        return packet in _SCALARS or packet in _TRUTHS or has_data_dependent_shape(func, args)

    def answer_op(self, func: Any, args: Any, kwargs: Any = None, place: Place | None = None) -> Any:
        """The result of such an op."""
        packet, place = func.overloadpacket, place or Place()
        shaped = packet in CHOICES
        found = (
            self._find_shapes(func, args, kwargs or {})
            if shaped
            else self._find_scalar(func, args, kwargs or {})
        )
        value = self._choose(str(func), found, place, shaped=shaped, truth=self._is_truth(packet, args))
        if shaped:
            out = make_fake_outputs(packet, args, value)
            if found is not None and found.real is not None:
                self.known.note(out, found.real, drawn=found.drawn)
            return out
        if self._is_truth(packet, args):
            return bool(value)
        return _as_number(value, args[0].dtype)

    def answer_whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """All values of a tensor, which leave PyTorch as a list or an array."""
        value = self.known.value_of(tensor)
        found = None if value is None else _Found(value.tensor.clone(), value.drawn)
        chosen = self._choose(name, found, Place(), shaped=False, truth=tensor.dtype == torch.bool)
        if isinstance(chosen, torch.Tensor):
            return chosen
        return torch.full(tuple(tensor.shape), chosen).to(tensor.dtype)

    def answer_lengths(self, lengths: Any) -> Shapes:
        """The shapes of a packed sequence: all rows, and the longest; None where they must be assumed."""
        value = self.known.value_of(lengths) if isinstance(lengths, torch.Tensor) else None
        found = None
        if value is not None and value.tensor.numel():
            with run_really():
                shapes = [(int(value.tensor.sum()),), (int(value.tensor.max()),)]
            found = _Found(shapes, value.drawn)
        shapes_found: Shapes = self._choose(packed_sequences.READ, found, Place(), shaped=True, truth=False)
        return shapes_found

    def begin_run(self) -> None:
        """The model runs, maybe once more, on the same example: it reads the same, and draws the same."""
        self.num_followed = self.num_assumed = 0
        self._follows = True
        self._at.clear()
        self.drawn.clear()
        self._assumed.clear()
        self._given.clear()
        seed_draws()

    def leave_forward(self) -> None:
        """The model has run; loss, gradients and updates were no part of the real run."""
        self._follows = False

    def _find_scalar(self, func: Any, args: Any, kwargs: Any) -> _Found | None:
        values = [self.known.value_of(tensor) for tensor in list_tensors((args, kwargs))]
        result = self.known.compute(func, args, kwargs)
        if result is None:
            return None
        return _Found(result, any(value is not None and value.drawn for value in values))

    def _find_shapes(self, func: Any, args: Any, kwargs: Any) -> _Found | None:
        """From the whole result where all operands are known, else from the values that decide."""
        deciding = [self.known.value_of(tensor) for tensor in values_that_decide(func, args)]
        given = [value for value in deciding if value is not None]
        if len(given) < len(deciding):
            return None
        drawn = any(value.drawn for value in given)
        real = self.known.compute(func, args, kwargs)
        if real is not None:
            return _Found([tuple(tensor.shape) for tensor in list_tensors(real)], drawn, real)
        counted = [value.tensor for value in given]
        with run_really():
            counts = count_values(func, counted)
        shapes = count_shapes(func, args, counts, counted)
        return None if shapes is None else _Found(shapes, drawn)

    def _choose(self, name: str, found: _Found | None, place: Place, *, shaped: bool, truth: bool) -> Any:
        """What was read before, in a real run, or is known; else what is assumed (None: all elements)."""
        key = place.module, name
        if place.again and self._given.get(key):
            return self._given[key].popleft()
        line = place.find_line() if self.reads or found is None or found.drawn else ""
        logged, value = self._next_read(name, line)
        if found is not None and found.drawn:
            where = line, place.module
            self.drawn[where] = self.drawn.get(where, 0) + 1
        elif found is None and logged:
            self.num_followed += 1
        if found is not None and not (found.drawn and logged):
            value = found.value
        elif not logged:
            value = self._assume_read(name, line, place.module, shaped=shaped, truth=truth)
        if not place.again:
            self._given.setdefault(key, deque()).append(value)
        return value

    def _assume_read(self, name: str, line: str, module: str, *, shaped: bool, truth: bool) -> Any:
        """The assumption, written down; now and then the other way, so that a loop which waits ends."""
        self.num_assumed += 1
        value = None if shaped else self.assume if self.num_assumed % LOOP else float(not self.assume)
        text = _ALL if value is None else str(bool(value)) if truth else f"{value:g}"
        read = name.removeprefix("aten.").split(".")[0] if shaped else "a condition" if truth else "a number"
        where = line, module, f"the result of {read}" if shaped else read, text
        self._assumed[where] = self._assumed.get(where, 0) + 1
        return value

    def _next_read(self, name: str, line: str) -> tuple[bool, Any]:
        """What the same line read in the real run, the first time, the second time, and so on.

        A library may look at a value only where it is real, so the reads of both runs are not the same.
        """
        key = name, line
        if not self._by_line:
            for read, where, value in self.reads:
                self._by_line.setdefault((read, where), []).append(value)
        same = self._by_line.get(key, []) if self._follows else []
        at = self._at.get(key, 0)
        if at >= len(same):
            return False, None
        self._at[key] = at + 1
        return True, same[at]

    @staticmethod
    def _is_truth(packet: Any, args: Any) -> bool:
        return packet in _TRUTHS or packet is _aten.is_nonzero or args[0].dtype == torch.bool


def _as_number(value: Any, dtype: torch.dtype) -> Any:
    if dtype.is_complex:
        return complex(value)
    return float(value) if dtype.is_floating_point else int(value)


def seed_draws() -> None:
    """Every run of an example draws the same numbers: from torch on the host, Python and NumPy."""
    torch.default_generator.manual_seed(SEED)
    seed_rng(SEED)


@contextmanager
def watch_others(answers: Answers) -> Iterator[None]:
    """Note whether a model draws from Python or NumPy; with preserved generators, as in `capture`."""
    seed_draws()
    with preserve_rng() as drawn:
        yield
        answers.others_drawn = answers.others_drawn or drawn()


class ReadMode(TorchFunctionMode):
    """Tensors that leave PyTorch as lists or arrays: noted where they have values, answered where not."""

    def __init__(self, answers: Answers, log: list[Read] | None = None) -> None:
        """`log`: where to note what is read, in a real run."""
        super().__init__()
        self._answers = answers
        self._log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        name = getattr(func, "__name__", "")
        if self._log is None and packed_sequences.is_packed(name, args):
            return self._run_packed(name, func, args)
        if name not in ("tolist", "numpy", "__array__") or not args or not isinstance(args[0], torch.Tensor):
            return func(*args, **(kwargs or {}))
        if self._log is not None:
            self._log += _record_read(name, args[0])
            return func(*args, **(kwargs or {}))
        if name == "tolist" or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return self._answers.answer_whole(name, args[0]).numpy()

    def _run_packed(self, name: str, func: Any, args: Any) -> Any:
        if name == packed_sequences.PACK:
            return packed_sequences.pack(self._answers.answer_lengths(args[1]), *args)
        return (
            packed_sequences.unpack(*args)
            if name == packed_sequences.UNPACK
            else packed_sequences.run_recurrent(func, *args)
        )


def _record_read(name: str, tensor: torch.Tensor) -> list[Read]:
    """What a list or an array was made of; a fake tensor makes a list element by element."""
    line = find_call_site()
    with torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
        if name == "tolist":
            read = str(_aten._local_scalar_dense.default)
            return [(read, line, value) for value in tensor.reshape(-1).tolist()]
        return [(name, line, tensor.detach().clone())]


def record_reads(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool
) -> list[Read]:
    """What the model reads in one real run of the example; nothing where it has no memory or too much."""
    tensors = [*model.parameters(), *model.buffers(), *find_tensors((args, kwargs))]
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors):
        return []
    if sum(tensor.untyped_storage().nbytes() for tensor in tensors) > MOST_REAL_BYTES:
        return []
    shared, log = with_same_weights(model), _ReadLog()
    args, kwargs = copy.deepcopy((args, kwargs))  # a cache that grows is the user's
    functions = ReadMode(Answers(), log.reads)
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(train), functions, log:
        seed_draws()
        try:
            shared(*args, **kwargs)
        except _TooLarge:
            return []
    return log.reads


def with_same_weights(model: nn.Module) -> nn.Module:
    """A copy of the model on its own weights; buffers, which a run may change, are copied."""
    weights: dict[int, Any] = {id(weight): weight for weight in model.parameters()}
    try:
        return copy.deepcopy(model, dict(weights))
    except Exception:  # a lock, a tensor that was computed: such attributes are shared instead
        buffers = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
        return rebuild_modules(model, weights | buffers)


class _TooLarge(BaseException):
    """The real run would take too much memory."""


class _ReadLog(TorchDispatchMode):
    """Notes what a real run reads out of its tensors, as long as it makes no more than MOST_MADE_BYTES."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self._made_bytes = 0
        self._answers = Answers()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and note what it reads."""
        out = func(*args, **self._answers.known.copy_generators(kwargs or {}))
        if not (func.is_view or func._schema.is_mutable):
            self._made_bytes += sum(tensor.nbytes for tensor in find_tensors(out))
        if self._made_bytes > MOST_MADE_BYTES:
            raise _TooLarge
        if self._answers.wants(func, args):
            shapes = [tuple(tensor.shape) for tensor in find_tensors(out)]
            self.reads.append(
                (str(func), find_call_site(), shapes if func.overloadpacket in CHOICES else out)
            )
        return out
