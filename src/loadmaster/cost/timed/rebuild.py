"""Rebuild: from a signature to an op that can be run on a device, with data of its shapes and dtypes. [torch]

Floats are drawn from a normal distribution; truth values are a coin; indices stay inside what they index, and
whole numbers that nothing is known about are 0, which is inside everything. Ops are those of aten alone, as
signatures may come from files. What cannot be rebuilt raises `CannotRebuild` with the reason.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any

import torch

from loadmaster.cost.signature import PlainWord, Signature, TensorSpec, Value
from loadmaster.cost.timed.after_forward import CannotRebuild, prepare_call

_aten = torch.ops.aten
_REFUSED = ("from_file", "_cudnn_rnn_backward", "_local_scalar_dense", "item")
_BY_DIM = ("gather", "scatter", "scatter_add", "scatter_reduce", "take_along_dim")
_BY_DIM_TOO = ("index_select", "index_add", "index_copy", "index_fill", "index_reduce")
_BY_AXIS = ("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put")
_CUDNN = ("cudnn_enabled", "cudnn_enable")  # a setting of the machine's, not of the model's
_MOST_DRAWN = 2**18
_CONSTANTS = ("running_", "total_weight", "target")  # arguments that have no gradient


def rebuild_call(
    signature: Signature, device: torch.device, *, grad: bool, copies: int = 1
) -> Callable[[], Any]:
    """A call of the op on new data; with `grad` its inputs want gradients, as in a training step.

    The calls go round `copies` of the data and as many results are held, so that, as in a real step, neither
    inputs nor outputs are still in a cache from the call before.
    """
    op = _find_op(signature)
    maker = _ArgumentMaker(signature, op, device, grad=grad)
    calls = [prepare_call(op, *_make_arguments(signature, maker)) for _ in range(copies)]
    held: deque[Any] = deque(maxlen=copies)
    turn = cycle(calls)
    looks = [normal_values(1, torch.float32, device)] * signature.num_views

    def call() -> None:
        op, args, kwargs = next(turn)
        held.append(op(*args, **kwargs))
        for tensor in looks:
            _aten.alias.default(tensor)

    return call


def build_arguments(signature: Signature, device: torch.device) -> tuple[Any, list[Any], dict[str, Any]]:
    """The op of a signature with new data for its arguments; none wants a gradient."""
    op = _find_op(signature)
    return op, *_make_arguments(signature, _ArgumentMaker(signature, op, device, grad=False))


def autocast_context(signature: Signature, device: torch.device) -> AbstractContextManager[Any]:
    """Mixed precision, if the op ran in it; a weight is cast once in a step, so nothing is remembered."""
    if not signature.autocast:
        return nullcontext()
    dtype = getattr(torch, signature.autocast, None)
    if not isinstance(dtype, torch.dtype):
        raise CannotRebuild(f"this torch has no dtype {signature.autocast}")
    cast: AbstractContextManager[Any] = torch.autocast(device.type, dtype=dtype, cache_enabled=False)
    return cast


def _make_arguments(signature: Signature, maker: "_ArgumentMaker") -> tuple[list[Any], dict[str, Any]]:
    args = [maker.make_argument(value, at) for at, value in enumerate(signature.args)]
    kwargs = {name: maker.make_argument(value, name) for name, value in signature.kwargs.items()}
    return args, kwargs


def normal_values(
    size: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Normal numbers, a long piece of them over and over: drawing takes longer than most ops."""
    piece = min(size, _MOST_DRAWN)
    drawn = torch.float32 if dtype.itemsize == 1 else dtype  # none are drawn in 8 bits
    values = torch.randn(piece, dtype=drawn, device=device, generator=generator).to(dtype)
    return values.repeat(-(-size // piece))[:size] if size > piece else values


def input_bytes(signature: Signature) -> int:
    """The memory its tensors take."""
    return sum(word.num_bytes for word in signature.tensors)


def _find_op(signature: Signature) -> Any:
    space, name, overload = signature.op
    if space != "aten" or name in _REFUSED:
        raise CannotRebuild(f"{space}.{name} is not run on its own")
    op = getattr(getattr(_aten, name, None), overload, None)
    if op is None:
        raise CannotRebuild(f"this torch has no aten.{name}.{overload}")
    return op


class _ArgumentMaker:
    """Makes the arguments of one op."""

    def __init__(self, signature: Signature, op: Any, device: torch.device, *, grad: bool) -> None:
        self._signature, self._device, self._grad = signature, device, grad
        self._arguments = list(op._schema.arguments)
        self._name = signature.op[1].rstrip("_")
        self._generator = torch.Generator(device).manual_seed(0)

    def make_argument(self, value: Value, where: int | str) -> Any:
        """A real argument, for a place in the op's schema."""
        argument = self._argument(where)
        if argument.name in _CUDNN:
            return bool(torch.backends.cudnn.enabled) and self._device.type == "cuda"
        if isinstance(value, list):
            return [self._make_one(part, argument, axis) for axis, part in enumerate(value)]
        return self._make_one(value, argument, 0)

    def _argument(self, where: int | str) -> Any:
        if isinstance(where, int):
            if where >= len(self._arguments):
                raise CannotRebuild(f"aten.{self._name} takes {len(self._arguments)} arguments")
            return self._arguments[where]
        found = [argument for argument in self._arguments if argument.name == where]
        if not found:
            raise CannotRebuild(f"aten.{self._name} has no argument {where}")
        return found[0]

    def _make_one(self, value: Value, argument: Any, axis: int) -> Any:
        if isinstance(value, TensorSpec):
            return self._tensor(value, argument, axis)
        if isinstance(value, PlainWord):
            return self._word(value.text, argument)
        return value

    def _word(self, text: str, argument: Any) -> Any:
        """A dtype, a layout, a device, or a plain text such as 'mean'."""
        if argument.name == "device":
            return self._device
        if text.startswith("torch."):
            found = getattr(torch, text.removeprefix("torch."), None)
            if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
                raise CannotRebuild(f"{text} is not a dtype, layout or memory format")
            return found
        if not str(argument.type).startswith(("str", "Optional[str]")):
            raise CannotRebuild(f"{argument.name}={text} is not understood")
        return text

    def _tensor(self, word: TensorSpec, argument: Any, axis: int) -> torch.Tensor:
        dtype = getattr(torch, word.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CannotRebuild(f"this torch has no dtype {word.dtype}")
        flat = self._values(word, dtype, argument, axis)
        tensor = flat.as_strided(word.shape, word.stride)
        changes = argument.alias_info is not None and argument.alias_info.is_write
        learns = dtype.is_floating_point and not changes and not argument.name.startswith(_CONSTANTS)
        if self._grad and learns:
            tensor = tensor.detach().requires_grad_()
        return tensor

    def _values(self, word: TensorSpec, dtype: torch.dtype, argument: Any, axis: int) -> torch.Tensor:
        """The memory that the tensor looks at."""
        size, device, generator = word.num_elements, self._device, self._generator
        if dtype == torch.bool:
            return torch.rand(size, device=device, generator=generator) < 0.5
        if dtype.is_floating_point or dtype.is_complex:
            return normal_values(size, dtype, device, generator)
        if argument.name == "offs":
            return self._group_ends(size, dtype)
        high = self._bound(argument, axis)
        if high <= 1:
            return torch.zeros(size, dtype=dtype, device=device)
        return torch.randint(high, (size,), dtype=dtype, device=device, generator=generator)

    def _bound(self, argument: Any, axis: int) -> int:
        """How many values an index may take; 1 where nothing is known."""
        args, name = self._signature.args, self._name
        if argument.name == "indices" and name == "embedding":
            return _size(args[0], 0)
        if argument.name == "indices" and name == "embedding_dense_backward":
            return args[2] if isinstance(args[2], int) else 1
        if argument.name == "indices" and name in _BY_AXIS:
            return _size(args[0], axis)
        if argument.name == "indices" and name.endswith("_with_indices_backward"):
            spatial = 3 if "pool3d" in name else 2
            return _size(args[1], -1) * _size(args[1], -2) * (_size(args[1], -3) if spatial == 3 else 1)
        if argument.name == "index" and name in (*_BY_DIM, *_BY_DIM_TOO) and isinstance(args[1], int):
            return _size(args[0], args[1])
        if argument.name == "target" and ("nll_loss" in name or name == "cross_entropy_loss"):
            scores = args[1 if name.endswith("backward") else 0]
            return _size(scores, 1) if isinstance(scores, TensorSpec) and len(scores.shape) > 1 else 1
        if name == "one_hot" and len(args) > 1 and isinstance(args[1], int):
            return args[1]
        return 1

    def _group_ends(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Equal groups of all rows (or, of two matrices, of what is summed over)."""
        first, second = self._signature.args[:2]
        total = _size(first, -1) if len(_shape(first)) == len(_shape(second)) == 2 else _size(first, 0)
        return (torch.arange(1, size + 1, device=self._device) * total // size).to(dtype)


def _shape(value: Value) -> tuple[int, ...]:
    return value.shape if isinstance(value, TensorSpec) else ()


def _size(value: Value, axis: int) -> int:
    shape = _shape(value)
    return shape[axis] if -len(shape) <= axis < len(shape) else 1
