"""Answers: what a model reads out of its tensors (an `if` on a value, a count of matches), without values.

Fake tensors have none. Where the weights are there and fit, the example is run once for real and what it
read is answered in the same order; else every read is answered by the same assumption: a scalar is
`assume` (every LOOP-th time the contrary, so that loops end), a choice of elements takes all of them. Both
are counted.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_SCALARS = {_aten._local_scalar_dense, _aten.is_nonzero, _aten.item}
_TRUTHS = {_aten.equal, _aten.allclose}
_CHOICES = {_aten.nonzero, _aten.masked_select, _aten._unique2, _aten.unique_dim, _aten.repeat_interleave}
_MASKS = (torch.bool, torch.uint8)
LOOP = 64
MOST_REAL_BYTES = 8 * 2**30
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
        if packet is _aten.index:
            return any(index is not None and index.dtype in _MASKS for index in args[1])
        if packet is _aten.repeat_interleave:
            return str(func).endswith(".Tensor")
        return packet in _SCALARS or packet in _TRUTHS or packet in _CHOICES

    def give(self, func: Any, args: Any) -> Any:
        """The result of such an op."""
        packet = func.overloadpacket
        read = self.reads[self._at] if self._at < len(self.reads) else None
        known = read is not None and read[0] == str(func)
        self._at += known
        self.num_followed += known
        self.num_assumed += not known
        if packet in _CHOICES or packet is _aten.index:
            shapes = read[1] if known and read is not None else None
            return _chosen(packet, args, shapes)
        value = read[1] if known and read is not None else self._assumed()
        if packet in _TRUTHS or packet is _aten.is_nonzero or args[0].dtype == torch.bool:
            return bool(value)
        return float(value) if args[0].dtype.is_floating_point else int(value)

    def _assumed(self) -> float:
        """Now and then the other way, so that a loop which waits for a value comes to an end."""
        return self.assume if self.num_assumed % LOOP else float(not self.assume)


def _chosen(packet: Any, args: Any, shapes: Any) -> Any:
    """Fake outputs of an op that chooses elements: as many as were seen, else all."""
    source: torch.Tensor = args[0]
    count = source.numel()
    if packet is _aten.index:
        return source.new_empty(shapes[0]) if shapes else _indexed(source, args[1])
    if packet is _aten.nonzero:
        return source.new_empty(shapes[0] if shapes else (count, source.dim()), dtype=torch.int64)
    if packet is _aten.masked_select:
        return source.new_empty(shapes[0] if shapes else (count,))
    if packet is _aten.repeat_interleave:
        return source.new_empty(shapes[0] if shapes else (count,), dtype=torch.int64)
    rows = shapes[0] if shapes else (count,)
    made = source.new_empty(rows)
    return (
        made,
        source.new_empty(source.shape, dtype=torch.int64),
        source.new_empty((rows[0],), dtype=torch.int64),
    )


def _indexed(source: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """Rows picked by masks, all of them: a mask over two axes is an index for each."""
    whole: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in _MASKS:
            whole += [index.new_empty((index.numel(),), dtype=torch.int64) for _ in range(index.dim())]
        else:
            whole.append(index)
    return _aten.index.Tensor(source, whole)


def reads_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Read]:
    """What the model reads in one real run of the example; nothing where it has no memory or too much."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs))]
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors):
        return []
    if sum(tensor.untyped_storage().nbytes() for tensor in tensors) > MOST_REAL_BYTES:
        return []
    shared = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})  # buffers are copied
    log = _ReadLog()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), log:
        shared(*args, **kwargs)
    return log.reads


class _ReadLog(TorchDispatchMode):
    """Notes what a real run reads out of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self._answers = Answers()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and note what it reads."""
        out = func(*args, **(kwargs or {}))
        if self._answers.wants(func, args):
            chosen = func.overloadpacket in _CHOICES or func.overloadpacket is _aten.index
            shapes = [tuple(leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            self.reads.append((str(func), shapes if chosen else out))
        return out
