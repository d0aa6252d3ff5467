"""Strategy: for each group of ops which devices run it, on how many rows each, and how gradients meet.

    place       one device runs the group on the whole batch
    replicate   every device runs it on rows of its own; gradients of its weights are summed (`sync`)
    duplicate   every device runs it on the whole batch; gradients are equal without being sent
    pipeline    one device runs it micro-batch by micro-batch and adds up its own gradients

Rows are of the batch, in the order of `devices`: the first device takes the first rows. Between two groups
tensors are cut and joined along the batch as the rows of both ask for; nothing is said of that here, it
follows. A strategy is data: `strategies/` finds one and predicts it, the runtime runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from loadmaster.core.arrays import Ints, content_digest, set_column
from loadmaster.core.errors import PlanError


class Mode(StrEnum):
    """How the devices of a group share its work."""

    PLACE = "place"
    REPLICATE = "replicate"
    DUPLICATE = "duplicate"
    PIPELINE = "pipeline"


class Sync(StrEnum):
    """How gradients of a group's weights meet."""

    NONE = "none"
    ALLREDUCE = "allreduce"  # every device has the sum and steps its own copy
    PS = "ps"  # `server` has the sum, steps, and sends the weights back


@dataclass(frozen=True, slots=True, eq=False)
class OpGroup:
    """Ops that go together. `rows` are of the batch, one number for each device."""

    ops: Ints  # [n] ascending indices into the graph
    devices: tuple[int, ...]
    rows: tuple[int, ...]
    mode: Mode
    sync: Sync = Sync.NONE
    server: int = -1  # the device that sums under `ps`, else -1
    sfb: tuple[int, ...] = ()  # parameter ops whose gradients are made from gathered factors instead
    microbatches: int = 1  # more than one under `pipeline` only

    def __post_init__(self) -> None:
        """Check every invariant once."""
        set_column(self, "ops", np.int32, (-1,), PlanError)
        for field, word in (("mode", Mode), ("sync", Sync)):
            value = getattr(self, field)
            try:
                object.__setattr__(self, field, word(value))
            except ValueError:
                known = ", ".join(member.value for member in word)
                raise PlanError(f"OpGroup.{field}: {value!r} is none of {known}") from None
        for field in ("devices", "rows", "sfb"):
            object.__setattr__(self, field, _whole_numbers(getattr(self, field), f"OpGroup.{field}"))
        for field in ("server", "microbatches"):
            object.__setattr__(self, field, _whole_numbers((getattr(self, field),), f"OpGroup.{field}")[0])
        if not len(self.ops):
            raise PlanError("a group has no ops; leave it out")
        if (np.diff(self.ops) <= 0).any() or self.ops[0] < 0:
            raise PlanError("OpGroup.ops must ascend, each op once, from 0 up")
        self._check_devices()
        self._check_sync()

    def _check_devices(self) -> None:
        devices, rows, mode = self.devices, self.rows, self.mode
        if not devices or min(devices) < 0:
            raise PlanError(f"OpGroup.devices is {list(devices)}; name at least one device, from 0 up")
        twice = next((d for d in devices if devices.count(d) > 1), None)
        if twice is not None:
            raise PlanError(f"device {twice} stands twice in one group; give it the rows of both once")
        if len(rows) != len(devices):
            raise PlanError(f"{len(rows)} numbers of rows for {len(devices)} devices; give one for each")
        if min(rows) < 1:
            idle = devices[rows.index(min(rows))]
            raise PlanError(f"device {idle} takes {min(rows)} rows; leave it out, or give it at least one")
        if mode in (Mode.PLACE, Mode.PIPELINE) and len(devices) != 1:
            raise PlanError(
                f"mode {mode.value!r} is for one device and {len(devices)} are named; use replicate"
                " or duplicate"
            )
        if self.microbatches < 1 or (self.microbatches > 1) != (mode == Mode.PIPELINE):
            raise PlanError(
                f"{self.microbatches} micro-batches under mode {mode.value!r}; pipelines have two or more,"
                " other modes one"
            )

    def _check_sync(self) -> None:
        several = self.mode == Mode.REPLICATE and len(self.devices) > 1
        if (self.sync != Sync.NONE or self.sfb) and not several:
            raise PlanError(
                f"sync {self.sync.value!r} under mode {self.mode.value!r} on {len(self.devices)} device(s);"
                " only gradients of several replicas are summed"
            )
        if self.sync == Sync.PS and self.server not in self.devices:
            raise PlanError(
                f"the server {self.server} is none of the group's devices {list(self.devices)};"
                " name one of them"
            )
        if self.sync != Sync.PS and self.server != -1:
            raise PlanError(f"a server is named under sync {self.sync.value!r}; only 'ps' has one")
        if self.sfb and self.sync != Sync.ALLREDUCE:
            raise PlanError(
                f"sfb beside sync {self.sync.value!r}; factors are gathered under 'allreduce' only"
            )
        strange = [p for p in self.sfb if p not in self.ops]
        if strange:
            raise PlanError(f"sfb names op {strange[0]}, which is not in the group")

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each device; all 0 where each has the whole batch."""
        if self.mode == Mode.DUPLICATE:
            return (0,) * len(self.devices)
        return tuple(int(at) for at in np.cumsum((0, *self.rows[:-1])))

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the content."""
        return content_digest(self)


@dataclass(frozen=True, slots=True, eq=False)
class Strategy:
    """G groups that hold every op of a graph once. Semantics () = exact up to the order of sums."""

    name: str
    graph_digest: str
    cluster_digest: str
    batch: int
    groups: tuple[OpGroup, ...]
    semantics: tuple[str, ...] = ()  # how its numbers differ from those of one device, one sentence each
    schedule: str = ""  # order of micro-batches: '1f1b' or 'gpipe'; '' = there are none

    def __post_init__(self) -> None:
        """Check every invariant once."""
        object.__setattr__(self, "batch", _whole_numbers((self.batch,), "Strategy.batch")[0])
        if self.batch < 1:
            raise PlanError(f"Strategy.batch is {self.batch}; a batch has at least one row")
        groups = tuple(self.groups)
        object.__setattr__(self, "groups", groups)
        if not groups or not all(isinstance(group, OpGroup) for group in groups):
            raise PlanError("Strategy.groups needs at least one OpGroup, and nothing else")
        for field in ("graph_digest", "cluster_digest", "name"):
            if not isinstance(getattr(self, field), str):
                raise PlanError(f"Strategy.{field} is {getattr(self, field)!r}; needs text")
        object.__setattr__(self, "semantics", tuple(self.semantics))
        self._check_rows()
        self._check_ops()
        counts = {group.microbatches for group in groups if group.mode == Mode.PIPELINE}
        if len(counts) > 1:
            raise PlanError(f"groups are cut into {sorted(counts)} micro-batches; a strategy has one number")
        if counts and max(counts) > self.batch:
            raise PlanError(f"{max(counts)} micro-batches of {self.batch} rows; each needs at least one row")
        if (self.schedule in ("1f1b", "gpipe")) != bool(counts) or (self.schedule and not counts):
            raise PlanError(
                f"Strategy.schedule is {self.schedule!r}; '1f1b' or 'gpipe' with a pipeline, else ''"
            )

    def _check_rows(self) -> None:
        for g, group in enumerate(self.groups):
            if group.mode == Mode.DUPLICATE:
                if set(group.rows) != {self.batch}:
                    raise PlanError(
                        f"group {g} is duplicated with rows {list(group.rows)};"
                        f" each device takes all {self.batch}"
                    )
            elif sum(group.rows) != self.batch:
                raise PlanError(
                    f"rows {list(group.rows)} of group {g} add up to {sum(group.rows)}, the batch has"
                    f" {self.batch}; give every row to one device"
                )

    def _check_ops(self) -> None:
        ops = np.sort(np.concatenate([group.ops for group in self.groups]))
        twice = ops[1:][ops[1:] == ops[:-1]]
        if len(twice):
            raise PlanError(f"op {twice[0]} is in two groups; every op is in one")
        if ops[-1] != len(ops) - 1:
            lost = int(np.flatnonzero(ops != np.arange(len(ops)))[0])
            raise PlanError(f"op {lost} is in no group; every op is in one")

    @property
    def num_ops(self) -> int:
        """N."""
        return sum(len(group.ops) for group in self.groups)

    @property
    def group_of(self) -> Ints:
        """[N] the group of each op."""
        found = np.empty(self.num_ops, dtype=np.int32)
        for g, group in enumerate(self.groups):
            found[group.ops] = g
        return found

    @property
    def devices(self) -> tuple[int, ...]:
        """All that it uses, ascending."""
        return tuple(sorted({d for group in self.groups for d in group.devices}))

    @property
    def microbatches(self) -> int:
        """Of its pipeline; 1 without."""
        return max(group.microbatches for group in self.groups)

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the content, the name left out."""
        return content_digest(self)

    def __repr__(self) -> str:
        """One line; the columns may be long."""
        modes = ", ".join(f"{sum(g.mode == m for g in self.groups)} {m.value}" for m in Mode)
        return f"<Strategy {self.name!r}: {self.num_ops} ops in {len(self.groups)} groups ({modes})>"


def share_rows(batch: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole rows in proportion to `weights`, by largest remainder, whose sum is the batch."""
    weight = np.asarray(weights, dtype=np.float64)
    if len(weight) == 0 or not np.isfinite(weight).all() or weight.min() < 0 or weight.sum() <= 0:
        raise PlanError(f"rows cannot be shared by the weights {list(weights)}; give numbers >= 0, not all 0")
    exact = batch * weight / weight.sum()
    rows = np.floor(exact).astype(np.int64)
    left = batch - int(rows.sum())
    rows[np.argsort(rows - exact, kind="stable")[:left]] += 1
    return tuple(int(r) for r in rows)


def microbatch_bounds(batch: int, count: int) -> tuple[int, ...]:
    """[count + 1] first rows of each micro-batch and the batch: as equal as whole rows allow."""
    return tuple(int(b) for b in np.linspace(0, batch, count + 1).round())


def _whole_numbers(values: Sequence[int], label: str) -> tuple[int, ...]:
    given = tuple(values)
    if any(isinstance(v, bool) or not isinstance(v, int | np.integer) for v in given):
        raise PlanError(f"{label} is {list(given)}; needs whole numbers")
    beyond = next((v for v in given if not -1 <= v < 2**31 - 1), None)
    if beyond is not None:  # judged before it is put into an array: a file may hold any number
        raise PlanError(f"{label}: {beyond} at position {given.index(beyond)}; needs -1..{2**31 - 2}")
    return tuple(int(v) for v in given)
