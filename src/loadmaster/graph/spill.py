"""Spill: weights and activations that wait in host memory, written out as a bigger flat graph.

    weight ──load──► reader          a load for the forward pass; its copy is gone after the reader
       └─────load──► reader.backward another one for the backward pass
             ▲
    an earlier reader                a load waits until copies before it are gone: no more than a window of
                                     bytes is on its way to a device or there at any time
    gradients ──landed──► updates    gradients go down as they are made; updates begin when all are there

    op ──► restore ──► backward      an activation goes down as soon as it is made, and comes back as a
     └───► landed ──► a later op     load does, within the same window; few may be on their way down

A load takes no time: it sends. It is of phase PARAM, so that its output takes memory only where it is sent.
So does a restore. A *reading* is a forward op that reads a weight, with all that looks at the same memory
after it; a *stash* is what a forward op made and the backward pass reads.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from loadmaster.core.arrays import Ints
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, NO_SIGNATURE, NO_STORAGE, Graph, Phase

LOAD, LANDED, RESTORE = "load", "landed", "restore"
NEW = -1  # an op that the graph it was made of does not have


@dataclass(slots=True)
class Reading:
    """One forward op that reads a weight, and who else needs its copy."""

    param: int
    reader: int
    forward: list[int] = field(default_factory=list)  # ops that need the copy, the reader first
    backward: list[int] = field(default_factory=list)
    aliases: list[int] = field(default_factory=list)  # tensors that look into the copy


@dataclass(frozen=True, slots=True)
class Stash:
    """A tensor of the forward pass that waits on the store, and who needs it in the backward pass."""

    op: int  # that makes it
    tensor: int
    direct: tuple[int, ...]  # backward ops that read it, or a view that the forward pass made
    backward: tuple[int, ...]  # with those that read views of it made in the backward pass, in order
    aliases: tuple[int, ...]  # tensors of the forward pass that look at its memory, itself among them
    late_views: tuple[int, ...]  # views of it that the backward pass makes


@dataclass(frozen=True, slots=True, eq=False)
class SpilledGraph:
    """A graph with loads, and the op of the first graph behind each of its ops."""

    graph: Graph
    origin: Ints  # [N'] or NEW


def max_outgoing_bytes(largest_bytes: int) -> int:
    """Gradients that may be kept on a device until they are down, by the largest spilled weight."""
    return 2 * largest_bytes


def find_readings(graph: Graph) -> dict[int, list[Reading]]:
    """The readings of every weight that may be spilled, by param op; views of weights are followed."""
    tensor = {int(op): t for t, op in enumerate(graph.tensor_op.tolist()) if graph.phase[op] == Phase.PARAM}
    weights = {t: op for op, t in tensor.items() if graph.op_kind[op] not in (LOAD, RESTORE, LANDED)}
    found: dict[int, list[Reading]] = {op: [] for op in weights.values()}
    users = _group_by_key(graph.use_tensor.tolist(), graph.use_op.tolist())
    phase, made = graph.phase.tolist(), _group_by_key(graph.tensor_op.tolist(), range(graph.num_tensors))
    for weight, param in weights.items():
        by_reader = {}
        for op in sorted(users.get(weight, ())):
            if phase[op] == Phase.FORWARD:
                by_reader[op] = Reading(param, op, [op])
                found[param].append(by_reader[op])
        _follow_views(graph, weight, by_reader, users, made)
        first = found[param][0] if found[param] else None
        for op in users.get(weight, ()):
            if phase[op] == Phase.BACKWARD:
                home = by_reader.get(int(graph.mirror[op]), first)
                if home is None:
                    found[param] = []
                    break
                home.backward.append(op)
    _hold_until_done(graph, found)
    return {param: some for param, some in found.items() if some}


def find_stashes(graph: Graph) -> dict[int, list[Stash]]:
    """What each forward op makes that the backward pass reads, by op, in the order of the program."""
    users = _group_by_key(graph.use_tensor.tolist(), graph.use_op.tolist())
    views = _group_by_key(graph.tensor_storage.tolist(), range(graph.num_tensors))
    phase, found = graph.phase.tolist(), dict[int, list[Stash]]()
    for op in np.flatnonzero(graph.phase == Phase.FORWARD).tolist():
        if graph.op_kind[op] == "input":
            continue
        found[op] = []
    for t, op in enumerate(graph.tensor_op.tolist()):
        if op not in found or graph.tensor_storage[t] != t or not graph.tensor_bytes[t]:
            continue
        alike = views[t]
        early = tuple(v for v in alike if phase[graph.tensor_op[v]] == Phase.FORWARD)
        late = tuple(v for v in alike if phase[graph.tensor_op[v]] != Phase.FORWARD)
        reads = sorted({user for v in alike for user in users.get(v, ()) if phase[user] != Phase.FORWARD})
        direct = sorted({user for v in early for user in users.get(v, ()) if phase[user] != Phase.FORWARD})
        if not direct or graph.keep[list(alike)].any() or any(phase[op] != Phase.BACKWARD for op in reads):
            continue
        found[op].append(Stash(op, t, tuple(direct), tuple(reads), early, late))
    return {op: some for op, some in found.items() if some}


def _follow_views(
    graph: Graph,
    weight: int,
    by_reader: dict[int, Reading],
    users: dict[int, list[int]],
    made: dict[int, list[int]],
) -> None:
    """Add whoever needs a view of the weight to the reading that the view is of."""
    waiting = list(by_reader.items())
    while waiting:
        op, reading = waiting.pop()
        for view in made.get(op, ()):
            if graph.tensor_storage[view] != weight or view in reading.aliases:
                continue
            reading.aliases.append(view)
            for user in users.get(view, ()):
                if graph.phase[user] == Phase.BACKWARD:
                    reading.backward.append(user)
                elif user not in reading.forward:
                    reading.forward.append(user)
                    waiting.append((user, reading))


def _hold_until_done(graph: Graph, found: dict[int, list[Reading]]) -> None:
    """A copy is held until the whole backward of its reader is done: autograd lets go of it then."""
    mirrored: dict[int, int] = {}
    for op in np.flatnonzero(graph.mirror != NO_MIRROR).tolist():
        mirrored[int(graph.mirror[op])] = op
    for some in found.values():
        for reading in some:
            last = mirrored.get(reading.reader)
            reading.forward = sorted(set(reading.forward))
            reading.backward = sorted(set(reading.backward))
            if last is not None and reading.backward and last > reading.backward[-1]:
                reading.backward.append(last)


def _group_by_key(keys: Iterable[int], values: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(key, []).append(value)
    return found


@dataclass(slots=True)
class _Load:
    source: Reading | Stash
    users: Sequence[int]
    backward: bool
    size: int
    after: int = NEW  # the op whose end makes room for it


def list_loads(
    graph: Graph,
    chosen: Sequence[Reading],
    device: Sequence[int],
    window_bytes: int,
    stashes: Sequence[Stash] = (),
) -> list[_Load]:
    """The loads in order, each with the op that it waits for; windows are per device."""
    size = {int(op): int(graph.tensor_bytes[t]) for t, op in enumerate(graph.tensor_op.tolist())}
    made = [_Load(one, one.forward, False, size[one.param]) for one in chosen]
    made += [_Load(one, one.backward, True, size[one.param]) for one in chosen if one.backward]
    made += [_Load(one, one.backward, True, int(graph.tensor_bytes[one.tensor])) for one in stashes]
    made.sort(key=lambda load: load.users[0])
    firsts = np.flatnonzero(graph.phase == Phase.BACKWARD)
    before = np.flatnonzero(graph.phase[: int(firsts[0])] == Phase.FORWARD) if len(firsts) else firsts
    turn = int(before[-1]) if len(before) else NEW  # nothing is loaded for the backward pass before it begins
    held: dict[int, list[_Load]] = {}
    after: dict[int, int] = {}
    for load in made:
        where = device[load.users[0]]
        there, latest = held.setdefault(where, []), after.get(where, NEW)
        if load.backward and turn > latest:
            there, latest = held[where], turn
            there[:] = [other for other in there if other.users[-1] > turn]
        while there and sum(other.size for other in there) + load.size > window_bytes:
            gone = min(there, key=lambda other: other.users[-1])
            there.remove(gone)
            latest = max(latest, gone.users[-1])
        there.append(load)
        load.after = after[where] = latest if latest < load.users[0] else max(NEW, after.get(where, NEW))
    return made


def max_window_bytes(graph: Graph) -> int:
    """The most bytes of copies that a graph's loads let be on one device at a time, or on the way to it."""
    loads = [op for op, kind in enumerate(graph.op_kind) if kind in (LOAD, RESTORE)]
    users = _group_by_key(graph.use_tensor.tolist(), graph.use_op.tolist())
    made = {int(op): t for t, op in enumerate(graph.tensor_op.tolist())}
    inputs = _group_by_key(graph.use_op.tolist(), graph.tensor_op[graph.use_tensor].tolist())
    most, held = 0, dict[int, tuple[int, int]]()
    for op in loads:
        waits = [source for source in inputs[op] if graph.phase[source] != Phase.PARAM]
        held = {k: v for k, v in held.items() if not waits or v[0] > max(waits)}
        t = made[op]
        held[op] = (max(users.get(t, [op])), int(graph.tensor_bytes[t]))
        most = max(most, sum(size for _, size in held.values()))
    return most


def add_loads(
    graph: Graph,
    chosen: Sequence[Reading],
    device: Sequence[int],
    *,
    window_bytes: int,
    stashes: Sequence[Stash] = (),
) -> SpilledGraph:
    """The graph whose chosen readings and stashes are loads; `device` [N] says where ops run."""
    writer = _Writer(graph, chosen)
    waiting: dict[int, list[_Load]] = {}
    for load in list_loads(graph, chosen, device, window_bytes, stashes):
        source = load.source
        made_by = source.op if isinstance(source, Stash) else source.param
        waiting.setdefault(max(load.after, made_by), []).append(load)
    writer.hold_gradients(device)
    landing = list_landings(graph, stashes, device, largest_spilled_bytes(graph, chosen, stashes))
    landed_before = writer.find_landing()
    for op in range(graph.num_ops):
        if op == landed_before:
            writer.add_gradients_op()
        for stash in landing.get(op, ()):
            writer.add_landing(stash, op)
        writer.op(op)
        for load in waiting.get(op, ()):
            writer.add(load)
    return writer.finish()


def largest_spilled_bytes(graph: Graph, chosen: Sequence[Reading], stashes: Sequence[Stash]) -> int:
    """Of one weight or activation that is spilled."""
    size = {int(op): int(graph.tensor_bytes[t]) for t, op in enumerate(graph.tensor_op.tolist())}
    sizes = [size[one.param] for one in chosen] + [int(graph.tensor_bytes[one.tensor]) for one in stashes]
    return max(sizes, default=0)


def list_landings(
    graph: Graph, stashes: Sequence[Stash], device: Sequence[int], largest_bytes: int
) -> dict[int, list[Stash]]:
    """Ops that wait for stashes on their way down: no more than a few may be on a device at a time."""
    limit, found = max_outgoing_bytes(largest_bytes), dict[int, list[Stash]]()
    forward = _group_by_key(
        (device[op] for op in np.flatnonzero(graph.phase == Phase.FORWARD).tolist()),
        np.flatnonzero(graph.phase == Phase.FORWARD).tolist(),
    )
    going: dict[int, list[Stash]] = {}
    for stash in sorted(stashes, key=lambda one: one.op):
        there = going.setdefault(device[stash.op], [])
        there.append(stash)
        while len(there) > 1 and sum(int(graph.tensor_bytes[one.tensor]) for one in there) > limit:
            oldest, ops = there.pop(0), forward[device[stash.op]]
            at = bisect_right(ops, stash.op)
            if at < len(ops):
                found.setdefault(ops[at], []).append(oldest)
    return found


class _Writer:
    """Writes the new graph op by op: old ops and tensors keep their order, new ones stand among them."""

    def __init__(self, graph: Graph, chosen: Sequence[Reading]) -> None:
        self.graph = graph
        self.origin: list[int] = []
        self.names: list[str] = []
        self.place: dict[int, int] = {}  # of an old op in the new graph
        self.params = sorted({one.param for one in chosen})
        self.num_tensors = graph.num_tensors
        self.extra: list[tuple[int, int, int]] = []  # new tensors: new op, bytes, own storage or not
        self.uses: list[tuple[int, int]] = []  # new uses: tensor, new op
        self.swap: dict[tuple[int, int], int] = {}  # (old tensor, old op) -> new tensor
        self.base: dict[int, int] = {}  # old view -> the load whose copy it looks into
        self.later: list[tuple[int, int]] = []  # new tensor, old op that comes later
        self.control: dict[int, int] = {}
        self.kinds: dict[int, tuple[str, int, int]] = {}  # new op -> kind, phase, param
        self._taken = set(graph.op_name)
        self._weight = {int(op): t for t, op in enumerate(graph.tensor_op.tolist())}
        self._grads = self._find_gradients()

    def _find_gradients(self) -> list[int]:
        """Tensors that the updates of spilled weights read, but for the weights."""
        graph, own = self.graph, set(self.params)
        maker = graph.tensor_op[graph.use_tensor]
        update = graph.phase[graph.use_op] == Phase.UPDATE
        mine = {int(op) for op, m in zip(graph.use_op[update], maker[update], strict=True) if int(m) in own}
        pairs = zip(graph.use_tensor.tolist(), graph.use_op.tolist(), maker.tolist(), strict=True)
        self.updates = sorted(mine)
        return sorted({t for t, op, m in pairs if op in mine and graph.phase[m] != Phase.PARAM})

    def hold_gradients(self, device: Sequence[int]) -> None:
        """A gradient stays until later ones are made, as many as may be on their way down."""
        graph = self.graph
        limit = max_outgoing_bytes(
            max((int(graph.tensor_bytes[self._weight[p]]) for p in self.params), default=0)
        )
        made: dict[int, list[int]] = {}
        for t in sorted(self._grads, key=lambda t: int(graph.tensor_op[t])):
            going = made.setdefault(device[graph.tensor_op[t]], [])
            going.append(t)
            while len(going) > 1 and sum(int(graph.tensor_bytes[one]) for one in going) > limit:
                oldest = going.pop(0)
                if graph.tensor_op[oldest] < graph.tensor_op[t]:
                    self.later.append((oldest, int(graph.tensor_op[t])))

    def find_landing(self) -> int:
        """The first update of a spilled weight, where every gradient is made before it; else NEW."""
        last = max((int(self.graph.tensor_op[t]) for t in self._grads), default=-1)
        return self.updates[0] if self.updates and last < self.updates[0] else NEW

    def op(self, op: int) -> None:
        """An old op."""
        self.place[op] = len(self.origin)
        self.origin.append(op)
        self.names.append(self.graph.op_name[op])

    def _new(self, name: str, kind: str, phase: int, param: int) -> int:
        text, count = name, 1
        while text in self._taken:
            count += 1
            text = f"{name}.{count}"
        self._taken.add(text)
        self.kinds[len(self.origin)] = (kind, phase, param)
        self.origin.append(NEW)
        self.names.append(text)
        return len(self.origin) - 1

    def _tensor(self, op: int, num_bytes: int, *, stored: bool) -> int:
        self.extra.append((op, num_bytes, int(stored)))
        self.num_tensors += 1
        return self.num_tensors - 1

    def add(self, load: _Load) -> None:
        """One load, after the op that it waits for."""
        if isinstance(load.source, Stash):
            self._restore(load, load.source)
        else:
            self._load(load, load.source)

    def _restore(self, load: _Load, stash: Stash) -> None:
        op = self._new(f"{self.graph.op_name[stash.op]}.restore", RESTORE, Phase.PARAM, stash.op)
        copy = self._send(op, stash.tensor, load)
        for user in stash.direct:
            self.swap.update(((old, user), copy) for old in stash.aliases)
            self.later.append((copy, user))
        self.base.update(dict.fromkeys(stash.late_views, copy))

    def add_landing(self, stash: Stash, before: int) -> None:
        """An old op waits until a stash is down."""
        op = self._new(f"{self.graph.op_name[stash.op]}.landed", LANDED, Phase.PARAM, stash.op)
        self.uses.append((stash.tensor, op))
        self.later.append((self._tensor(op, 0, stored=False), before))

    def _send(self, op: int, tensor: int, load: _Load) -> int:
        """The copy that a load makes of a tensor once there is room."""
        copy = self._tensor(op, load.size, stored=True)
        self.uses.append((tensor, op))
        if load.after != NEW:
            if load.after not in self.control:
                self.control[load.after] = self._tensor(self.place[load.after], 0, stored=False)
            self.uses.append((self.control[load.after], op))
        return copy

    def _load(self, load: _Load, reading: Reading) -> None:
        weight = self._weight[reading.param]
        name = f"{self.graph.op_name[reading.param]}.load{'.backward' * load.backward}"
        op = self._new(name, LOAD, Phase.PARAM, reading.param)
        copy = self._send(op, weight, load)
        seen = [weight, *reading.aliases] if load.backward else [weight]
        for user in load.users:
            if load.backward or user == reading.reader:
                self.swap.update(((old, user), copy) for old in seen)
            if load.backward:
                self.later.append((copy, user))
        if not load.backward:
            self.base.update(dict.fromkeys(reading.aliases, copy))

    def add_gradients_op(self) -> None:
        """All gradients of spilled weights are there."""
        op = self._new("spilled gradients", LANDED, Phase.UPDATE, self.params[0])
        done = self._tensor(op, 0, stored=False)
        self.uses += [(t, op) for t in self._grads]
        self.later += [(done, update) for update in self.updates]

    def finish(self) -> SpilledGraph:
        """The new graph."""
        origin = np.array(self.origin, dtype=np.int32)
        graph, old = self.graph, np.maximum(origin, 0)
        for op, (_, _, param) in self.kinds.items():
            old[op] = param  # names of modules, groups and dtypes are the weight's
        fresh = origin == NEW
        group, mirror = graph.group.copy(), graph.mirror[old]
        top = int(graph.group.max()) + 1
        for at, param in enumerate(self.params):
            if group[param] == NO_GROUP:
                group[param] = top + at
        place = np.array([self.place[op] for op in range(graph.num_ops)], dtype=np.int32)
        phase, kind = graph.phase[old], [graph.op_kind[op] for op in old.tolist()]
        for op, (what, when, _) in self.kinds.items():
            phase[op], kind[op] = when, what
        own_group = np.where(self._list_ungrouped(kind), NO_GROUP, group[old]).astype(np.int32)
        use_tensor, use_op = self._uses(place)
        made = replace(
            graph,
            op_name=tuple(self.names),
            op_kind=tuple(kind),
            module=tuple(graph.module[op] for op in old.tolist()),
            phase=phase,
            mirror=np.where(fresh | (mirror < 0), NO_MIRROR, place[np.maximum(mirror, 0)]),
            group=own_group,
            signature=np.where(fresh, NO_SIGNATURE, graph.signature[old]),
            dtype=graph.dtype[old],
            flops=np.where(fresh, 0.0, graph.flops[old]),
            bytes_moved=np.where(fresh, 0, graph.bytes_moved[old]),
            resident_bytes=np.where(fresh, 0, graph.resident_bytes[old]),
            workspace_bytes=np.where(fresh, 0, graph.workspace_bytes[old]),
            tensor_op=np.concatenate([place[graph.tensor_op], self._column(0, np.int32)]),
            tensor_bytes=np.concatenate([graph.tensor_bytes, self._column(1, np.int64)]),
            tensor_storage=self._storages(),
            keep=np.concatenate([self._find_kept(), np.zeros(len(self.extra), dtype=np.bool_)]),
            use_tensor=use_tensor,
            use_op=use_op,
        )
        return SpilledGraph(made, origin)

    def _list_ungrouped(self, kind: Sequence[str]) -> list[bool]:
        """[N'] new ops that belong to no weight."""
        landed = {op for op, (what, when, _) in self.kinds.items() if what == LANDED and when == Phase.PARAM}
        return [what == RESTORE or op in landed for op, what in enumerate(kind)]

    def _column(self, at: int, dtype: type) -> Ints:
        return np.array([row[at] for row in self.extra], dtype=dtype).reshape(-1)

    def _storages(self) -> Ints:
        storage = self.graph.tensor_storage.copy()
        for view, copy in self.base.items():
            storage[view] = copy
        first = self.graph.num_tensors
        new = [first + at if stored else NO_STORAGE for at, (_, _, stored) in enumerate(self.extra)]
        return np.concatenate([storage, np.array(new, dtype=np.int32).reshape(-1)])

    def _find_kept(self) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """A gradient of a spilled weight is not kept where it was made."""
        keep = self.graph.keep.copy()
        keep[self._grads] = False
        return keep

    def _uses(self, place: Ints) -> tuple[Ints, Ints]:
        pairs = dict.fromkeys(
            (self.swap.get((t, op), t), int(place[op]))
            for t, op in zip(self.graph.use_tensor.tolist(), self.graph.use_op.tolist(), strict=True)
        )
        pairs |= dict.fromkeys(self.uses)
        pairs |= dict.fromkeys((t, int(place[op])) for t, op in self.later)
        both = np.array(list(pairs), dtype=np.int32).reshape(-1, 2)
        return both[:, 0], both[:, 1]
