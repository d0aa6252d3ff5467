"""Answers: what a model reads out of its tensors (an `if` on a value, a count of matches), without values.

Fake tensors have none. Where the weights are there and fit, the example is run once for real and what it
read is answered in the same order; else every read is answered by the same assumption: a scalar is
`assume` (every LOOP-th time the contrary, so that loops end), a choice of elements takes all of them. Both
are counted.

Most reads are ops. `tolist` and `numpy` of a real tensor run none, so both runs are watched one level higher,
too (`ReadMode`).
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from loadmaster.graph.torch_capture.record import packed_sequences
from loadmaster.graph.torch_capture.record.data_dependent_sizes import (
    CHOICES,
    has_data_dependent_shape,
    make_fake_outputs,
)
from loadmaster.modules.fake_model import rebuild_modules
from loadmaster.modules.tensor_trees import find_tensors

_aten = torch.ops.aten
_SCALARS = {_aten._local_scalar_dense, _aten.is_nonzero, _aten.item}
_TRUTHS = {_aten.equal, _aten.allclose}
LOOP = 64
MOST_REAL_BYTES = 8 * 2**30
MOST_MADE_BYTES = 4 * 2**30  # by all ops of the real run
Read = tuple[str, Any]


@dataclass(slots=True)
class Answers:
    """Answers reads in order; `reads` come from a real run."""

    assume: float = 1.0
    reads: list[Read] = field(default_factory=list)
    num_followed: int = 0
    num_assumed: int = 0
    _at: int = 0

    def wants(self, func: Any, args: Any) -> bool:
        """Whether an op's result, or its shape, depends on values."""
        packet = getattr(func, "overloadpacket", None)
        return packet in _SCALARS or packet in _TRUTHS or has_data_dependent_shape(func, args)

    def answer_op(self, func: Any, args: Any) -> Any:
        """The result of such an op."""
        packet = func.overloadpacket
        known, value = self.next_read(str(func))
        if packet in CHOICES:
            return make_fake_outputs(packet, args, value if known else None)
        value = value if known else self._assume_value()
        if packet in _TRUTHS or packet is _aten.is_nonzero or args[0].dtype == torch.bool:
            return bool(value)
        return float(value) if args[0].dtype.is_floating_point else int(value)

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """All values of a tensor, which leave PyTorch as a list or an array."""
        known, value = self.next_read(name)
        if known and isinstance(value, torch.Tensor):
            return value
        return torch.full(tuple(tensor.shape), self._assume_value()).to(tensor.dtype)

    def again(self) -> None:
        """The model runs, maybe once more, on the same example: it reads the same."""
        self._at = self.num_followed = self.num_assumed = 0

    def next_read(self, name: str) -> tuple[bool, Any]:
        """What the real run read here, if it read the same."""
        read = self.reads[self._at] if self._at < len(self.reads) else None
        known = read is not None and read[0] == name
        self._at += known
        self.num_followed += known
        self.num_assumed += not known
        return known, read[1] if known and read is not None else None

    def _assume_value(self) -> float:
        """Now and then the other way, so that a loop which waits for a value comes to an end."""
        return self.assume if self.num_assumed % LOOP else float(not self.assume)


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
            return self._answers.whole(name, args[0]).numpy()

    def _run_packed(self, name: str, func: Any, args: Any) -> Any:
        if name == packed_sequences.PACK:
            known, shapes = self._answers.next_read(packed_sequences.READ)
            return packed_sequences.pack(shapes if known else None, *args)
        return (
            packed_sequences.unpack(*args)
            if name == packed_sequences.UNPACK
            else packed_sequences.run_recurrent(func, *args)
        )


def _record_read(name: str, tensor: torch.Tensor) -> list[Read]:
    """What a list or an array was made of; a fake tensor makes a list element by element."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
        if name == "tolist":
            return [(str(_aten._local_scalar_dense.default), value) for value in tensor.reshape(-1).tolist()]
        return [(name, tensor.detach().clone())]


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
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or func._schema.is_mutable):
            self._made_bytes += sum(tensor.nbytes for tensor in find_tensors(out))
        if self._made_bytes > MOST_MADE_BYTES:
            raise _TooLarge
        if self._answers.wants(func, args):
            shapes = [tuple(tensor.shape) for tensor in find_tensors(out)]
            self.reads.append((str(func), shapes if func.overloadpacket in CHOICES else out))
        return out
