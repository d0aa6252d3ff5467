"""Known values: numbers that a step has although its tensors are fake.

What depends on constants, buffers, whole-number inputs and random numbers only is computed for real beside
the fake run, op by op. Each fake storage whose values are known has a real one; a view of the fake tensor is
the same view of the real one, so what is written in place is seen by all. What depends on weights or on
floating inputs is not known, and neither is anything it is written into.

Random numbers come of torch's own generator, which `capture` seeds and puts back, and of copies of a model's
own generators. A value that depends on such a draw says so (`drawn`), unless its range alone decides it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from loadmaster.graph.torch_capture.record.value_ranges import (
    Range,
    decide_comparison,
    range_of_draw,
    range_of_result,
    range_of_values,
)
from loadmaster.modules.live_storages import LiveStorages
from loadmaster.modules.op_work import count_flops
from loadmaster.modules.tensor_trees import list_tensors

MOST_ELEMENTS = 2**22
_FAILED = object()
MOST_FLOPS = 2e9
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_UNFILLED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
_BY_SHAPE = {  # ops that look at no value of their first operand
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "empty_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided",
}  # fmt: skip
_OVERWRITES = {  # ops in place that leave nothing of what was there
    "fill_", "zero_", "copy_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "geometric_",
    "cauchy_", "log_normal_",
}  # fmt: skip


@dataclass(slots=True)
class _Known:
    """What a fake storage holds."""

    storage: torch.UntypedStorage
    drawn: bool = False
    range: Range | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that is known."""

    tensor: torch.Tensor
    drawn: bool


class KnownValues:
    """Follows the ops of a fake run."""

    def __init__(self) -> None:
        self._known = LiveStorages[_Known](lambda _: None)
        self._generators: dict[int, tuple[Any, torch.Generator]] = {}

    def give(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """A fake tensor has the values of a real one, unless these are too many, or have no memory."""
        if not _is_plain(real) or not 0 < real.numel() <= MOST_ELEMENTS:
            return
        with run_really():
            self._add(fake, real.detach().to("cpu"))

    def value_of(self, fake: torch.Tensor) -> Value | None:
        """The values of a tensor, where they are known."""
        known = self._known.get(fake.untyped_storage())
        if known is None:
            return Value(fake, drawn=False) if _is_constant(fake) else None
        with run_really():
            try:
                made = torch.empty(0, dtype=fake.dtype).set_(
                    known.storage,
                    int(fake.storage_offset()),
                    _plain_sizes(fake.shape),
                    _plain_sizes(fake.stride()),
                )
            except (RuntimeError, TypeError):
                return None
        made = made.conj() if fake.is_conj() else made
        return Value(made.neg() if fake.is_neg() else made, known.drawn)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor are known; a real one, which the model brings along, has them."""
        return tensor.untyped_storage() in self._known or _is_constant(tensor)

    def forget(self, fakes: list[torch.Tensor]) -> None:
        """Something unknown was written into these."""
        for fake in fakes:
            self._known.drop(fake.untyped_storage())

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op gives on the values of its operands, None where one is not known; nothing is noted."""
        given = list_tensors((args, kwargs))
        values = [self.value_of(tensor) for tensor in given]
        if any(value is None for value in values):
            return None
        try:
            with run_really():
                return func(*self._to_real(args), **self._to_real(kwargs))
        except Exception:  # no kernel for these dtypes, or the values are not allowed: then it is not known
            return None

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any, written: list[torch.Tensor]) -> None:
        """An op has run on fake tensors: note what is known of its results."""
        given, made = list_tensors((args, kwargs)), list_tensors(out)
        fresh = [tensor for tensor in made if not any(tensor is one for one in given)]
        if not written and not fresh:
            return
        name = _name_of(func)
        if not self._may_know(func, name, args, kwargs, given, made, written):
            self.forget(written)
            return
        if not written and fresh and all(tensor.untyped_storage() in self._known for tensor in fresh):
            return  # views of what is known
        before = [self._known.get(tensor.untyped_storage()) for tensor in given]
        drawn = any(known is not None and known.drawn for known in before)
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        span = self._find_range(name.rstrip("_"), args, kwargs)
        decided = self._decide(name.rstrip("_"), args)
        if draws:
            span = range_of_draw(name, args, kwargs)
            drawn |= span is None or span.low != span.high
        real = self._run(func, name, args, kwargs)
        if real is _FAILED:
            self.forget(written)
            return
        if decided is not None:
            drawn = False
            for tensor in list_tensors(real):
                tensor.fill_(decided)
        for fake, value in zip(made, list_tensors(real), strict=False):
            if fake.untyped_storage() not in self._known and tuple(fake.shape) == tuple(value.shape):
                self._add(fake, value, drawn=drawn, span=span if drawn else None)
        for tensor in written:
            known = self._known.get(tensor.untyped_storage())
            if known is not None:
                whole = tensor.numel() * tensor.itemsize == known.storage.nbytes()
                known.drawn = (
                    drawn if whole and (name in _OVERWRITES or decided is not None) else known.drawn | drawn
                )
                known.range = span if whole and known.drawn else None

    def note(self, out: Any, real: Any, *, drawn: bool) -> None:
        """The results of an op whose sizes depend on values, which are known."""
        for fake, value in zip(list_tensors(out), list_tensors(real), strict=False):
            if tuple(fake.shape) == tuple(value.shape) and value.numel() <= MOST_ELEMENTS:
                self._add(fake, value, drawn=drawn)

    def copy_generators(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments in which a model's own generator is a copy of it, always the same one."""
        own = kwargs.get("generator")
        if own is None:
            return kwargs
        if id(own) not in self._generators:
            self._generators[id(own)] = own, own.clone_state()
        return {**kwargs, "generator": self._generators[id(own)][1]}

    def _may_know(
        self, func: Any, name: str, args: Any, kwargs: Any, given: Any, made: Any, written: Any
    ) -> bool:
        """Whether all that the op looks at is known and it is small; what it overwrites becomes known."""
        if name in _OVERWRITES and written and args and args[0] is written[0]:
            self._make_room(written[0], given)
        looked_at = given[1:] if name in _BY_SHAPE and args and given and args[0] is given[0] else given
        if not all(map(self.has, looked_at)):
            return False
        if sum(tensor.numel() for tensor in made) > MOST_ELEMENTS:
            return False
        try:
            return (
                not made
                or count_flops(func, args, kwargs, made[0] if len(made) == 1 else tuple(made)) <= MOST_FLOPS
            )
        except Exception:  # a formula that wants other operands
            return True

    def _make_room(self, target: torch.Tensor, given: list[torch.Tensor]) -> None:
        """A storage that is overwritten as a whole by known values is known, whatever it held."""
        storage = target.untyped_storage()
        others = [tensor for tensor in given if tensor is not target]
        whole = target.numel() * target.itemsize == storage.nbytes() and target.numel() <= MOST_ELEMENTS
        if storage not in self._known and whole and all(map(self.has, others)):
            with run_really():
                blank = torch.zeros(1, dtype=target.dtype).expand(_plain_sizes(target.shape))
                self._add(target, blank)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        try:
            with run_really():
                real = func(*self._to_real(args), **self.copy_generators(self._to_real(kwargs)))
                if name in _UNFILLED:  # the same in every run
                    for tensor in list_tensors(real):
                        tensor.zero_()
                return real  # None of an op that writes into a list of tensors
        except Exception:  # as above
            return _FAILED

    def _to_real(self, tree: Any) -> Any:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                value = self.value_of(leaf)
                if value is not None:
                    return value.tensor
                return torch.empty((), dtype=leaf.dtype).expand(_plain_sizes(leaf.shape))
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        return tree_map(real, tree)

    def _add(
        self, fake: torch.Tensor, value: torch.Tensor, *, drawn: bool = False, span: Range | None = None
    ) -> None:
        """A real storage as large as the fake one, with these values where the tensor looks."""
        with run_really():
            storage = torch.UntypedStorage(fake.untyped_storage().nbytes())
            mine = torch.empty(0, dtype=fake.dtype).set_(
                storage, int(fake.storage_offset()), _plain_sizes(fake.shape), _plain_sizes(fake.stride())
            )
            if mine.numel() * mine.itemsize < storage.nbytes():
                storage.fill_(0)
            for axis, stride in enumerate(mine.stride()):
                if stride == 0 and mine.shape[axis] > 1:  # expanded: the same memory all along
                    mine, value = mine.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
            mine.copy_(value)
        self._known.add(fake.untyped_storage(), _Known(storage, drawn, span))

    def _range_of(self, operand: Any) -> Range | None:
        if isinstance(operand, int | float):
            return Range(float(operand), float(operand))
        if not isinstance(operand, torch.Tensor):
            return None
        known = self._known.get(operand.untyped_storage())
        if known is None or known.drawn:
            return None if known is None else known.range
        value = self.value_of(operand)
        with run_really():
            return None if value is None else range_of_values(value.tensor)

    def _is_drawn(self, operand: Any) -> bool:
        known = self._known.get(operand.untyped_storage()) if isinstance(operand, torch.Tensor) else None
        return known is not None and known.drawn

    def _find_range(self, name: str, args: Any, kwargs: Any) -> Range | None:
        if not any(map(self._is_drawn, args)):
            return None
        operands = [arg for arg in args[:2] if isinstance(arg, torch.Tensor | int | float)]
        return range_of_result(name, [self._range_of(arg) for arg in operands], kwargs)

    def _decide(self, name: str, args: Any) -> bool | None:
        """A comparison of drawn numbers that is the same whatever was drawn."""
        if name not in _COMPARISONS or len(args) < 2 or not any(map(self._is_drawn, args)):
            return None
        return decide_comparison(name, self._range_of(args[0]), self._range_of(args[1]))


@contextmanager
def run_really() -> Iterator[None]:
    """Run on real tensors, unseen by whoever watches the fake ones."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


def _name_of(func: Any) -> str:
    packet = getattr(func, "overloadpacket", func)
    return str(getattr(packet, "__name__", ""))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values in memory that can be copied."""
    return not (
        tensor.is_meta
        or isinstance(tensor, FakeTensor)
        or tensor.layout != torch.strided
        or tensor.is_quantized
    )


def _is_constant(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad and _is_plain(tensor) and tensor.numel() <= MOST_ELEMENTS


def _plain_sizes(sizes: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)
