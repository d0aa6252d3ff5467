"""Ledger: ops, storages and who reads what, as a step runs; it becomes a Graph. Knows no torch.

A *key* names what a tensor looks at: (storage, offset, shape, strides, dtype). A storage made by an op
and still there when the op closes is an output; one that is gone by then was workspace. A view becomes a
tensor of the Graph only when another op reads it. A write in place is a new tensor on the old storage, so
that whoever reads it afterwards comes after the write.

A storage that is let go of while a backward op runs was held for it: where that op mirrors an op which
made or read the storage, the Graph says that the backward op reads it. So it is with what another backward op
of the same forward op made: the parts of a formula are held to its end.
"""

from dataclasses import dataclass, field

from loadmaster.core.graph import NO_GROUP, NO_MIRROR, Dtype, Graph, Phase
from loadmaster.graph.build import OWN_STORAGE, GraphBuilder
from loadmaster.graph.torch_capture.record.autograd_formulas import find_weight_uses

Key = tuple[int, int, tuple[int, ...], tuple[int, ...], object]  # the storage's number first
NO_OP = -1
_UNMADE = -1


@dataclass(slots=True)
class Op:
    """One op in the making."""

    name: str
    kind: str
    module: str
    phase: Phase
    mirror: int = NO_MIRROR
    signature: str = ""
    dtype: Dtype = Dtype.FLOAT32
    has_grad: bool = True  # ran while gradients were wanted
    flops: float = 0.0
    bytes_moved: int = 0
    resident_bytes: int = 0
    workspace_bytes: int = 0
    made: list[int] = field(default_factory=list)  # storages
    live_bytes: int = 0  # of storages made here and still there
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the Graph: a base (`base` is OWN_STORAGE) or a look at one."""

    op: int
    num_bytes: int
    base: int
    floating: bool


@dataclass(slots=True)
class _Storage:
    num_bytes: int
    op: int
    floating: bool
    tensor: int = _UNMADE  # the base, once the producer has closed
    freed: bool = False
    keep: bool = False
    users: set[int] = field(default_factory=set)
    last_write: "_Look | None" = None


@dataclass(slots=True)
class _Look:
    """What an op made of a storage: the base itself, a view, or what a write left behind."""

    op: int
    storage: int
    num_bytes: int
    age: int
    whole: bool  # the base
    tensor: int = _UNMADE


class Ledger:
    """Written by a recorder, read once by `graph`."""

    def __init__(self, *, holds: bool = False) -> None:
        """`holds`: what runs is plain Python, whose names hold tensors beyond their last use."""
        self._holds = holds
        self.ops: list[Op] = []
        self.current = NO_OP
        self.suffix = ""  # of the names of forward ops
        self._storages: dict[int, _Storage] = {}
        self._looks: dict[Key, _Look] = {}
        self.tensors: list[Tensor] = []
        self._uses: dict[tuple[int, int], None] = {}
        self._together: list[tuple[int, int]] = []
        self._names: dict[str, int] = {}
        self._kept: set[int] = set()
        self._age = 0

    def open(self, op: Op) -> int:
        """Begin an op; all that is recorded until `close` is part of it. Its name is made unique."""
        assert self.current == NO_OP, f"op {self.ops[self.current].name} is still open"
        op.name = make_unique(op.name + self.suffix if op.phase == Phase.FORWARD else op.name, self._names)
        self.ops.append(op)
        self.current = len(self.ops) - 1
        if op.mirror != NO_MIRROR and self.ops[op.mirror].phase == Phase.PARAM:  # a sum of its gradients
            self.tie(self.current, op.mirror)
            op.mirror = NO_MIRROR
        return self.current

    def close(self) -> None:
        """End the op: what it made and is still there becomes its outputs."""
        op, index = self.ops[self.current], self.current
        outputs = 0
        for storage in op.made:
            record = self._storages[storage]
            if not record.freed:
                outputs += record.num_bytes
                self._base(storage)
        op.workspace_bytes += max(0, op.peak_bytes - outputs)
        self.current = NO_OP
        if op.phase == Phase.BACKWARD and op.mirror != NO_MIRROR:
            self.tie(index, op.mirror)

    def param(self, op: Op, key: Key, num_bytes: int) -> int:
        """A weight or buffer: an op whose output is resident with it."""
        op.name = make_unique(op.name, self._names)
        self.ops.append(op)  # maybe in the midst of another: nothing but an order follows from that
        index, storage, interrupted = len(self.ops) - 1, key[0], self.current
        self.current = index
        if storage in self._storages:  # another name for memory that is resident already
            self.tie(index, self._storages[storage].op)
            op.resident_bytes = max(0, op.resident_bytes - num_bytes)
        else:
            self._storages[storage] = _Storage(num_bytes, index, _is_floating(key))
            self._base(storage)
        self._look(key, num_bytes)
        self.current = interrupted
        return index

    def make(self, key: Key, num_bytes: int, storage_bytes: int) -> None:
        """The open op made a storage, seen through `key`."""
        storage = key[0]
        self._storages[storage] = _Storage(storage_bytes, self.current, _is_floating(key))
        op = self.ops[self.current]
        op.made.append(storage)
        op.live_bytes += storage_bytes
        op.peak_bytes = max(op.peak_bytes, op.live_bytes)
        self._look(key, num_bytes)

    def knows(self, storage: int) -> bool:
        """Whether anything was said about a storage."""
        return storage in self._storages

    def maker(self, key: Key) -> int:
        """The op that made a storage, or the look at it."""
        look = self._looks.get(key)
        return look.op if look is not None else NO_OP

    def read(self, key: Key, num_bytes: int) -> None:
        """The open op reads what `key` looks at."""
        storage = key[0]
        record, look = self._storages[storage], self._looks.get(key)
        record.users.add(self.current)
        if look is None:  # seen through an eye that no op made: the base
            look = self._looks[key] = _Look(record.op, storage, num_bytes, self._age, whole=True)
        self._use(look)
        if record.last_write is not None and record.last_write.age > look.age:
            self._use(record.last_write)

    def view(self, key: Key, num_bytes: int, of: Key) -> None:
        """The open op looks at the storage of `of` in another way (or the same way once more)."""
        self.read(of, num_bytes)
        self._look(key, num_bytes)

    def absorb(self, key: Key, of: Key) -> None:
        """A view that is no op's: whoever reads it reads what it looks at."""
        if of in self._looks:
            self._looks.setdefault(key, self._looks[of])

    def write(self, key: Key, num_bytes: int, *, tied: bool = True) -> None:
        """The open op changes what `key` looks at, in place: where that was made, if `tied`."""
        self.read(key, num_bytes)
        record = self._storages[key[0]]
        record.last_write = self._look(key, num_bytes)
        if tied and self.current not in (NO_OP, record.op):
            self.tie(self.current, record.op)

    def free(self, storage: int) -> None:
        """A storage is let go of."""
        record = self._storages.get(storage)
        if record is None or record.freed:
            return
        record.freed = True
        if self.current != NO_OP and record.op == self.current:
            self.ops[self.current].live_bytes -= record.num_bytes
            return
        last = self.current if self.current != NO_OP else len(self.ops) - 1
        op = self.ops[last]
        maker = self.ops[record.op]
        held_for = op.mirror in record.users or op.mirror == record.op
        held_for |= maker.phase == Phase.BACKWARD and maker.mirror == op.mirror  # to the end of its formula
        if op.phase == Phase.FORWARD:
            held_for = self._holds
        if (
            op.phase in (Phase.FORWARD, Phase.BACKWARD)
            and held_for
            and record.tensor != _UNMADE
            and record.op < last
        ):
            self._uses[(record.tensor, last)] = None

    def keep(self, storage: int) -> None:
        """A storage that lives to the end of the step."""
        if storage in self._storages:
            self._storages[storage].keep = True

    def keep_for_next_step(self, storage: int) -> None:
        """A storage that the model still holds when its step is over: it stands there in the next one."""
        record = self._storages.get(storage)
        if record is None or record.freed or record.keep:
            return
        maker = self.ops[record.op]
        if maker.phase == Phase.FORWARD:
            maker.resident_bytes += record.num_bytes

    def tensor(self, key: Key) -> int:
        """The tensor that is what `key` looks at."""
        return self._find_tensor(self._looks[key])

    def producer(self, storage: int) -> int:
        """The op that made a storage."""
        return self._storages[storage].op

    def tie(self, one: int, other: int) -> None:
        """Two ops that must sit on one device."""
        self._together.append((one, other))

    def add(self, op: Op, reads: list[int], makes: list[int]) -> list[int]:
        """An op that nobody ran: what it reads, the bytes of what it makes; gives the tensors made."""
        index = self.open(op)
        for tensor in reads:
            self._uses[(tensor, index)] = None
        made = []
        for num_bytes in makes:
            made.append(len(self.tensors))
            self.tensors.append(Tensor(index, num_bytes, OWN_STORAGE, True))
        self.close()
        return made

    def add_into(self, op: Op, reads: list[int], target: int, *, tied: bool = True) -> int:
        """An op that nobody ran, and that writes a tensor in place; gives what it leaves behind."""
        self.add(op, reads, [])
        index, base = len(self.ops) - 1, self.tensors[target].base
        whole = target if base == OWN_STORAGE else base
        self.tensors.append(Tensor(index, self.tensors[target].num_bytes, whole, True))
        if tied:
            self.tie(index, self.tensors[target].op)
        return len(self.tensors) - 1

    def base(self, storage: int) -> int:
        """The tensor that is a storage itself."""
        return self._base(storage)

    def output(self, num_bytes: int) -> int:
        """One more tensor of the last op."""
        self.tensors.append(Tensor(len(self.ops) - 1, num_bytes, OWN_STORAGE, True))
        return len(self.tensors) - 1

    def use(self, tensor: int, op: int) -> None:
        """An op reads a tensor."""
        self._uses[(tensor, op)] = None

    def uses(self) -> list[tuple[int, int]]:
        """Every (tensor, op) so far."""
        return list(self._uses)

    def pairs(self) -> list[tuple[int, int]]:
        """Ops that sit on one device, as far as was said."""
        return list(self._together)

    def rewritten(self, first: int) -> list[tuple[int, int]]:
        """Tensors on memory that ops from `first` on wrote last, and what these left there."""
        found = {}
        for record in self._storages.values():
            if record.op < first and record.last_write is not None and record.last_write.op >= first:
                found[self._base(record.last_write.storage)] = self._find_tensor(record.last_write)
        return [
            (at, found[base])
            for at, one in enumerate(self.tensors)
            if one.op < first and (base := at if one.base == OWN_STORAGE else one.base) in found
        ]

    def make_copy(self, op: Op) -> int:
        """An op that runs as another did."""
        op.name = make_unique(op.name, self._names)
        self.ops.append(op)
        return len(self.ops) - 1

    def redirect(self, to_op: dict[int, int], to_tensor: dict[int, int]) -> None:
        """What is still to be said of these ops and tensors is said of others."""
        for record in self._storages.values():
            record.op = to_op.get(record.op, record.op)
            record.tensor = to_tensor.get(record.tensor, record.tensor)
        written = [record.last_write for record in self._storages.values() if record.last_write is not None]
        for look in {id(look): look for look in [*self._looks.values(), *written]}.values():
            look.op, look.tensor = to_op.get(look.op, look.op), to_tensor.get(look.tensor, look.tensor)

    def keep_tensor(self, tensor: int) -> None:
        """A tensor of `add` that lives to the end of the step."""
        base = self.tensors[tensor].base
        self._kept.add(tensor if base == OWN_STORAGE else base)

    def graph(self, name: str, capture: str) -> Graph:
        """All of it, ops in the order in which they ran."""
        builder = GraphBuilder(name, capture=capture)
        group = _group_ops(len(self.ops), self._together)
        for op, label in zip(self.ops, group, strict=True):
            builder.op(
                op.name,
                kind=op.kind,
                module=op.module,
                phase=op.phase,
                mirror=op.mirror,
                group=label,
                signature=op.signature,
                dtype=op.dtype,
                flops=op.flops,
                bytes_moved=op.bytes_moved,
                resident_bytes=op.resident_bytes,
                workspace_bytes=op.workspace_bytes,
            )
        kept = self._kept | {record.tensor for record in self._storages.values() if record.keep}
        for index, made in enumerate(self.tensors):
            builder.tensor(made.op, made.num_bytes, storage=made.base, keep=index in kept)
        columns = [op.phase for op in self.ops], [op.mirror for op in self.ops], [t.op for t in self.tensors]
        for tensor, user in self._uses | find_weight_uses(*columns, self._uses):
            builder.use(tensor, user)
        return builder.build()

    def _look(self, key: Key, num_bytes: int) -> _Look:
        storage = key[0]
        self._age += 1
        record = self._storages[storage]
        whole = record.op == self.current and num_bytes == record.num_bytes
        look = _Look(self.current, storage, num_bytes, self._age, whole=whole)
        self._looks[key] = look
        return look

    def _base(self, storage: int) -> int:
        """The tensor that is the storage itself."""
        record = self._storages[storage]
        if record.tensor == _UNMADE:
            record.tensor = len(self.tensors)
            self.tensors.append(Tensor(record.op, record.num_bytes, OWN_STORAGE, record.floating))
        return record.tensor

    def _use(self, look: _Look) -> None:
        """The open op reads a look made by another op."""
        if look.op == self.current:
            return
        self._uses[(self._find_tensor(look), self.current)] = None

    def _find_tensor(self, look: _Look) -> int:
        """The tensor of a look."""
        base = self._base(look.storage)
        if look.tensor == _UNMADE:
            same = look.whole and look.op == self._storages[look.storage].op
            look.tensor = base if same else len(self.tensors)
            if not same:
                self.tensors.append(
                    Tensor(look.op, look.num_bytes, base, self._storages[look.storage].floating)
                )
        return look.tensor


def make_unique(name: str, counts: dict[str, int]) -> str:
    """A name that nobody has yet, and is now taken: the second 'mean' is 'mean.2'."""
    while counts.get(name):
        counts[name] += 1
        name = f"{name}.{counts[name]}"
    counts[name] = 1
    return name


def _is_floating(key: Key) -> bool:
    return bool(getattr(key[4], "is_floating_point", True))


def _group_ops(num_ops: int, pairs: list[tuple[int, int]]) -> list[int]:
    """[N] the first op of each op's group, or NO_GROUP (union-find, the smaller index leads)."""
    leader = list(range(num_ops))

    def find(op: int) -> int:
        while leader[op] != op:
            leader[op] = leader[leader[op]]
            op = leader[op]
        return op

    for one, other in pairs:
        a, b = sorted((find(one), find(other)))
        leader[b] = a
    root = [find(op) for op in range(num_ops)]
    size: dict[int, int] = {}
    for op in root:
        size[op] = size.get(op, 0) + 1
    return [op if size[op] > 1 else NO_GROUP for op in root]
