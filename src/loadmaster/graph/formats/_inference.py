"""What the readers of model files share: values with shapes, written op by op into an inference Graph.

A file names the values that its ops read and make; here each is known by such a name. Weights and constants
are param ops, inputs and outputs are held to the end of the step. A view has no memory of its own.
"""

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from loadmaster.core.errors import FormatError, GraphError
from loadmaster.core.graph import Dtype, Graph, Phase
from loadmaster.graph.torch_capture.record.ledger import Key, Ledger, Op

MOST_BYTES = 2**62
MOST_AXES = 64
_LONGEST_SIGNATURE = 2000
_FEW = 5


@dataclass(frozen=True, slots=True)
class Element:
    """An element type as files have them; `dtype` is the nearest of ours."""

    name: str
    dtype: Dtype
    bits: int

    @property
    def is_floating(self) -> bool:
        """Whether ops compute in it."""
        return "float" in self.name or "complex" in self.name


ELEMENTS = {
    name: Element(name, dtype, bits)
    for dtype, bits, names in (
        (Dtype.FLOAT64, 64, "float64"),
        (Dtype.FLOAT64, 128, "complex128"),
        (Dtype.FLOAT32, 32, "float32"),
        (Dtype.FLOAT32, 64, "complex64"),
        (Dtype.FLOAT16, 16, "float16"),
        (Dtype.FLOAT16, 32, "complex32"),
        (Dtype.BFLOAT16, 16, "bfloat16"),
        (Dtype.FLOAT8, 8, "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"),
        (Dtype.FLOAT8, 6, "float6_e2m3 float6_e3m2"),
        (Dtype.FLOAT8, 4, "float4_e2m1 nfloat4"),
        (Dtype.INT64, 64, "int64 uint64"),
        (Dtype.INT32, 32, "int32 uint32"),
        (Dtype.INT32, 16, "int16 uint16"),
        (Dtype.INT8, 8, "int8 uint8"),
        (Dtype.INT8, 6, "uint6"),
        (Dtype.INT8, 4, "int4 uint4"),
        (Dtype.INT8, 3, "uint3"),
        (Dtype.INT8, 2, "int2 uint2"),
        (Dtype.INT8, 1, "uint1"),
        (Dtype.BOOL, 8, "bool"),
    )
    for name in names.split()
}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor by its looks; without strides it lies in order."""

    shape: tuple[int, ...]
    element: Element
    strides: tuple[int, ...] | None = None
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements; an expanded axis counts once."""
        axes = self.shape if self.strides is None else self._own_axes(self.strides)
        return -(-math.prod(axes) * self.element.bits // 8)

    def _own_axes(self, strides: tuple[int, ...]) -> list[int]:
        return [n for n, step in zip(self.shape, strides, strict=True) if step or not n]

    @property
    def in_order(self) -> bool:
        """Whether its elements lie as its shape says."""
        return self.strides is None or 0 in self.shape or _strides_fit_shape(self.shape, self.strides)

    def __str__(self) -> str:
        """As a signature writes it: 'float32[8,16]', with strides where they say something."""
        turned = "" if self.in_order else f"/{','.join(map(str, self.strides or ()))}"
        return f"{self.element.name}[{','.join(map(str, self.shape))}]{turned}"


def _strides_fit_shape(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for length, step in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def check_size(value: Value, what: str) -> Value:
    """The value, refused where no machine could hold it."""
    if len(value.shape) > MOST_AXES:
        raise FormatError(f"{what} has {len(value.shape)} axes; at most {MOST_AXES} are read")
    if any(not 0 <= length < MOST_BYTES for length in value.shape) or value.num_bytes >= MOST_BYTES:
        shown = str(list(value.shape))[:200]
        raise FormatError(
            f"{what} has the absurd shape {shown}; the file is broken or its axes are not fixed"
        )
    return value


@dataclass(frozen=True, slots=True)
class Row:
    """An op as a file has it: names of the values it reads and makes, in order; '' is one left out."""

    name: str
    kind: str
    module: str
    reads: tuple[Hashable, ...]
    makes: tuple[tuple[Hashable, Value], ...]
    signature: str = ""
    flops: float = 0.0
    views: tuple[Hashable, ...] = ()  # those made that look at the first value read
    writes: tuple[Hashable, ...] = ()  # those read that are changed in place, and given out again
    picks: bool = False  # reads no more of its first value than it gives
    ignores: bool = False  # reads the shapes of its values only


class Recording:
    """Written by a reader, read once by `graph`."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._keys: dict[Hashable, Key] = {}
        self._values: dict[Hashable, Value] = {}
        self._storage_of: dict[Hashable, int] = {}
        self._names: dict[str, int] = {}
        self._num_storages = 0
        self.notes: list[str] = []  # what the graph says of how it was read

    def value(self, name: Hashable, reader: str) -> Value:
        """The value of a name; `reader` is the op that wants it."""
        if name not in self._values:
            raise FormatError(f"op {reader!r} reads {name!r}, which nothing makes; the file is broken")
        return self._values[name]

    def weight(
        self,
        name: Hashable,
        value: Value,
        *,
        title: str,
        kind: str = "param",
        module: str = "",
        storage: Hashable = None,
        storage_bytes: int | None = None,
    ) -> None:
        """A weight, buffer or constant; those that name one `storage` are one memory."""
        num_bytes = max(value.num_bytes, storage_bytes or 0)
        number = self._storage_of.get(storage) if storage is not None else None
        if number is None:
            number = self._next()
        if storage is not None:
            self._storage_of[storage] = number
        op = Op(self._make_unique(title), kind, module, Phase.PARAM, resident_bytes=num_bytes)
        op.signature, op.dtype = f"{kind} {value}", value.element.dtype
        key = self._define(name, value, number)
        self._ledger.param(op, key, num_bytes)

    def input(self, name: Hashable, value: Value, *, title: str) -> None:
        """What the caller hands in and holds."""
        key = self._define(name, value, self._next())
        op = Op(self._make_unique(title), "input", "", Phase.FORWARD, signature=f"input {value}")
        op.dtype = value.element.dtype
        self._ledger.open(op)
        self._ledger.make(key, value.num_bytes, value.num_bytes)
        self._ledger.close()
        self._ledger.keep(key[0])

    def op(self, row: Row) -> None:
        """An op; what it reads must be known."""
        given = [(name, self.value(name, row.name)) for name in row.reads if name != ""]
        values = [value for _, value in given]
        fresh = [value for name, value in row.makes if name not in row.views]
        op = Op(self._make_unique(row.name), row.kind, row.module, Phase.FORWARD)
        op.signature = row.signature[:_LONGEST_SIGNATURE]
        op.dtype = _compute_dtype([*values, *(value for _, value in row.makes)])
        op.flops = row.flops
        if fresh or row.writes:
            op.bytes_moved = _count_bytes_moved(
                row, given, fresh or [self._values[name] for name in row.writes]
            )
        self._ledger.open(op)
        for name, value in given:
            self._ledger.read(self._keys[name], value.num_bytes)
        for name in row.writes:
            self._ledger.write(self._keys[name], self._values[name].num_bytes)
        for name, value in row.makes:
            self._record_output(row, name, value)
        self._ledger.close()

    def _record_output(self, row: Row, name: Hashable, value: Value) -> None:
        if name in row.views:
            base = self._keys[row.reads[0]]
            key = self._define(name, value, base[0])
            self._ledger.view(key, value.num_bytes, base)
        else:
            key = self._define(name, value, self._next())
            self._ledger.make(key, value.num_bytes, value.num_bytes)

    def add_alias(self, name: Hashable, as_: Hashable) -> None:
        """Another name of a value."""
        self._keys[name], self._values[name] = self._keys[as_], self._values[as_]

    def keep(self, name: Hashable) -> None:
        """An output: its owner holds it to the end of the step."""
        if name in self._keys:
            self._ledger.keep(self._keys[name][0])

    def graph(self, name: str, capture: str) -> Graph:
        """All of it; a graph that breaks an invariant was a broken file."""
        if not self._ledger.ops:
            raise FormatError("the file has no ops; nothing can be placed")
        try:
            return self._ledger.graph(name, "; ".join([capture, *self.notes]))
        except GraphError as problem:
            raise FormatError(str(problem)) from None

    def _define(self, name: Hashable, value: Value, storage: int) -> Key:
        if name in self._keys:
            raise FormatError(f"two ops make {name!r}; the file is broken")
        # values that lie in order have no strides to tell two looks at one storage apart
        offset = value.offset if value.strides is not None else len(self._keys)
        key = (storage, offset, value.shape, value.strides or (), value.element)
        self._keys[name], self._values[name] = key, value
        return key

    def _next(self) -> int:
        self._num_storages += 1
        return self._num_storages

    def _make_unique(self, name: str) -> str:
        unique = name
        while unique in self._names:
            self._names[name] += 1
            unique = f"{name}.{self._names[name]}"
        self._names[unique] = 1
        return unique


def _compute_dtype(values: Sequence[Value]) -> Dtype:
    """That of the first floating value, else of the first."""
    floating = [value for value in values if value.element.is_floating]
    found = floating or values
    return found[0].element.dtype if found else Dtype.FLOAT32


def _count_bytes_moved(row: Row, given: Iterable[tuple[Hashable, Value]], written: Sequence[Value]) -> int:
    """Every distinct value read once, every value written once."""
    out = sum(value.num_bytes for value in written)
    sizes = [value.num_bytes for value in dict(given).values()]
    if row.ignores:
        sizes = []
    if sizes and row.picks:
        sizes[0] = min(sizes[0], out)
    return sum(sizes) + out


def sort_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows so that values are made before they are read, else as they stand; a cycle is refused."""
    maker = {name: at for at, row in enumerate(rows) for name, _ in row.makes}
    before = [{maker[name] for name in row.reads if name in maker} for row in rows]
    after: list[list[int]] = [[] for _ in rows]
    for at, makers in enumerate(before):
        for one in makers:
            after[one].append(at)
    waits = [len(makers) for makers in before]
    ready = [at for at, count in enumerate(waits) if count == 0]
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for at in after[order[-1]]:
            waits[at] -= 1
            if waits[at] == 0:
                heapq.heappush(ready, at)
    if len(order) != len(rows):
        stuck = [repr(row.name) for row, count in zip(rows, waits, strict=True) if count]
        raise FormatError(f"ops wait for each other in a cycle: {', '.join(stuck[:_FEW])}; break it")
    return [rows[at] for at in order]


def module_of_name(name: str) -> str:
    """The module path in an op's name: 'seq.0' of '/seq/seq.0/MatMul', 'fc' of '__module.fc/aten::linear'."""
    path: list[str] = []
    for part in name.removeprefix("__module.").split("/")[:-1]:
        if path and part.startswith(f"{path[-1]}."):
            path.pop()
        if part and "::" not in part:
            path.append(part)
    return ".".join(path)
