"""Steps of a plan on a virtual clock: units, copies and updates on their streams share bus and host memory.

    compute  F0 F1 ... L ... B1 B0 | F0 ...            in order, when the weights are there
    up 0     weights, `depth` units ahead              into a place that is free, once their update is done
    up 1     state of device-stepped pieces            when a ring is free, after the weights sent before it
    down 0   gradients                                 in order
    down 1   stepped state                             in order
    host     updates                                   of those whose gradients have landed the lowest shard

Each way has one engine: it ends the copy it is at, and stays with a lane that has more to copy. Beside the
optimizer, copies and it have the rates that were measured with the same ones under way; where that was not
measured and host memory is short, all slow down alike. Issuing takes no time here, so this is what order and
rates allow, not what a program reaches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loadmaster.shards.model.built_model import BuiltModel
from loadmaster.shards.plan.rates import Rates
from loadmaster.shards.plan.sizes import Sizes
from loadmaster.shards.plan.unit_order import count_forwards, list_units

if TYPE_CHECKING:
    from loadmaster.shards.plan.shard_plan import ShardPlan

_AHEAD, _NEAR = 64, 8  # jobs of a stream that are looked at
_ROUNDS = 3  # until steps follow each other alike
_UPDATE_BYTES = 28  # of host memory, a parameter
_STREAMS = ("compute", "up 0", "up 1", "down 0", "down 1", "host")
_FORWARD, _LAST, _BACKWARD = 1.0, 3.0, 4.0  # units of a shard's forward


@dataclass(eq=False)
class _Job:
    stream: str
    left: float  # seconds, bytes or parameters
    rank: int = 0  # on the host: lowest first
    num_awaited: int = 0
    then: list["_Job"] = field(default_factory=list)
    done: bool = False

    def finish(self) -> None:
        """Let those go on that waited for it."""
        self.done = True
        for job in self.then:
            job.num_awaited -= 1


@dataclass(eq=False)
class _Steps:
    """All jobs of some steps, in the order they are issued."""

    queues: dict[str, list[_Job]] = field(default_factory=lambda: {name: [] for name in _STREAMS})

    def add(self, stream: str, work: float, after: Sequence[_Job | None], rank: int = 0) -> _Job:
        """One more job at the end of a stream."""
        job = _Job(stream, work, rank)
        for before in after:
            if before is not None:
                before.then.append(job)
                job.num_awaited += 1
        self.queues[stream].append(job)
        return job


def forecast_step_s(
    built: BuiltModel, plan: "ShardPlan", sizes: Sizes, rates: Rates, *, num_trials: int = 1
) -> float:
    """Seconds of a step once steps follow each other, of one trial or of several that take turns."""
    steps, ends = _JobIssuer(built, plan, sizes, rates, num_trials).steps()
    clock, found = 0.0, []
    waiting = {name: list(queue) for name, queue in steps.queues.items()}
    engines = {way: _CopyEngine(way) for way in ("up", "down")}
    while any(waiting.values()):
        ready = [_pick_job(name, waiting[name]) for name in ("compute", "host")]
        ready += [engine.pick_copy(waiting) for engine in engines.values()]
        active = [job for job in ready if job is not None]
        assert active, "an order of jobs in which nothing can run"
        speed = _compute_speeds(active, rates)
        taken = min(job.left / each for job, each in zip(active, speed, strict=True))
        clock += taken
        for job, each in zip(active, speed, strict=True):
            job.left -= taken * each
            if job.left <= 1e-9 * max(1.0, each):
                job.finish()
                waiting[job.stream].remove(job)
                if job in ends:
                    found.append(clock)
    return (found[-1] - found[-1 - num_trials]) / num_trials


def _pick_job(stream: str, queue: list[_Job]) -> _Job | None:
    """What a stream works on: the first; weights and updates may pass those that cannot run yet."""
    if stream == "host":
        ready = (job for job in queue[:_AHEAD] if not job.num_awaited)
        return min(ready, key=lambda job: job.rank, default=None)
    if stream == "up 0":
        return next((job for job in queue[:_NEAR] if not job.num_awaited), None)
    return queue[0] if queue and not queue[0].num_awaited else None


@dataclass(eq=False)
class _CopyEngine:
    """Copies one way, one at a time."""

    way: str
    lane: int = 0
    job: _Job | None = None

    def pick_copy(self, waiting: dict[str, list[_Job]]) -> _Job | None:
        """What is copied now."""
        if self.job is None or self.job.done:
            self.job = None
            for lane in (self.lane, 1 - self.lane):
                self.job = _pick_job(f"{self.way} {lane}", waiting[f"{self.way} {lane}"])
                if self.job is not None:
                    self.lane = lane
                    break
        return self.job


def _compute_speeds(active: Sequence[_Job], rates: Rates) -> list[float]:
    """Of each job, at most one of which is copied each way."""
    streams = {job.stream.split()[0] for job in active}
    ways = [way for way in ("up", "down") if way in streams]
    speed = {
        "up": rates.up_bytes_per_s, "down": rates.down_bytes_per_s, "host": rates.host_params_per_s,
        "compute": 1.0,
    }  # fmt: skip
    if rates.beside is not None and "host" in streams:
        found = rates.beside[" ".join(ways)]
        speed |= {"up": found.up_bytes_per_s, "down": found.down_bytes_per_s, "host": found.params_per_s}
    elif rates.beside is None:
        asked = sum(speed[way] for way in ways) + ("host" in streams) * _UPDATE_BYTES * speed["host"]
        share = min(1.0, rates.host_bytes_per_s / asked) if asked else 1.0
        speed = {name: each if name == "compute" else share * each for name, each in speed.items()}
    return [speed[job.stream.split()[0]] for job in active]


class _JobIssuer:
    """The jobs of some steps, as the executor issues them."""

    def __init__(
        self, built: BuiltModel, plan: "ShardPlan", sizes: Sizes, rates: Rates, num_trials: int
    ) -> None:
        self._plan, self._layout, self._sizes = plan, plan.layout, sizes
        self._unit_s = _unit_seconds(built, plan, rates)
        turns = range((_ROUNDS + (num_trials == 1)) * num_trials)
        self._num_forwards = count_forwards(built.trial, built.facts)
        units = list_units(self._layout, self._num_forwards)
        if self._layout.calls is not None:
            units = units * self._num_forwards
        last_use = {shard: at for at, (_, shard) in enumerate(units)}
        self._ends = {(kind, shard, at) for at, (kind, shard) in enumerate(units) if last_use[shard] == at}
        self._num_units = len(units)
        self._order = [(turn, turn % num_trials, kind, shard) for turn in turns for kind, shard in units]
        self._jobs = _Steps()
        self._loads: dict[int, list[_Job]] = {}  # [unit]
        self._fresh: dict[tuple[int, int], _Job] = {}  # [trial, piece] its host copy is whole
        self._uses: list[_Job] = []  # units that used a place, in order
        self._num_loads = 0
        self._rings: list[_Job] = []

    def steps(self) -> tuple[_Steps, set[_Job]]:
        """All jobs, and the units that end a step."""
        ends, unit, num_lasts = set(), None, 0
        for at, (turn, trial, kind, shard) in enumerate(self._order):
            if unit is not None and turn != self._order[at - 1][0]:
                ends.add(unit)
            self._load(at)
            ahead = at + 1
            while ahead <= min(at + self._plan.depth, len(self._order) - 1) and self._can_load(at, ahead):
                self._load(ahead)
                ahead += 1
            by_call = self._layout.calls is not None
            passes = 1 if kind == "B" or by_call else self._num_forwards
            unit = self._jobs.add("compute", self._unit_s[kind, shard] / passes, self._loads[at])
            self._uses += [unit] * len(self._loads[at])
            num_lasts = num_lasts + 1 if kind == "L" else num_lasts
            if by_call:
                if (kind, shard, at % self._num_units) in self._ends:
                    self._issue_updates(turn, trial, shard, unit)
            elif kind == "B" or (kind == "L" and num_lasts % self._num_forwards == 0):
                self._issue_updates(turn, trial, shard, unit)
        assert unit is not None
        return self._jobs, ends | {unit}

    def _streamed(self, shard: int) -> list[int]:
        return [p for p in self._layout.pieces_of[shard] if self._plan.placement[p] != "pinned"]

    def _can_load(self, at: int, ahead: int) -> bool:
        """Whether a later unit's weights can be asked for: places known to be free, updates told of."""
        if ahead in self._loads:
            return True
        _, trial, _, shard = self._order[ahead]
        pieces = self._streamed(shard)
        stepped = {
            piece
            for _, other, kind, earlier in self._order[at:ahead]
            if kind != "F" and other == trial
            for piece in self._streamed(earlier)
        }
        last = self._num_loads + len(pieces) - 1 - self._plan.num_slots
        return last < len(self._uses) and not stepped & set(pieces)

    def _load(self, at: int) -> None:
        if at in self._loads:
            return
        _, trial, _, shard = self._order[at]
        self._loads[at] = found = []
        for piece in self._streamed(shard):
            size = sum(self._sizes.compute_bytes[n] for n in self._layout.pieces[piece].parameters)
            before = self._num_loads - self._plan.num_slots
            free = self._uses[before] if 0 <= before < len(self._uses) else None
            found.append(self._jobs.add("up 0", size, [free, self._fresh.get((trial, piece))]))
            self._num_loads += 1

    def _issue_updates(self, turn: int, trial: int, shard: int, unit: _Job) -> None:
        layout, sizes, jobs = self._layout, self._sizes, self._jobs
        for piece in self._streamed(shard):
            numbers = [n for n in layout.pieces[piece].parameters if sizes.trained[n]]
            if not numbers:  # frozen: nothing is stepped, and nothing goes down
                continue
            if self._plan.placement[piece] == "host":
                grads = jobs.add("down 0", sum(sizes.grad_bytes[n] for n in numbers), [unit])
                work = sum(sizes.numel[n] for n in numbers)
                rank = turn * layout.num_shards + shard
                self._fresh[trial, piece] = jobs.add("host", work, [grads], rank=rank)
                continue
            weights, grads_before = jobs.queues["up 0"][-2:-1], jobs.queues["down 0"][-1:]
            for up, down in _split_chunks(numbers, sizes, self._plan.ring_bytes):
                used = len(self._rings) - self._plan.num_rings
                free = self._rings[used] if used >= 0 else None
                brought = jobs.add("up 1", up, [free, self._fresh.get((trial, piece)), *weights])
                self._rings.append(jobs.add("down 1", down, [brought, unit, *grads_before]))
            self._fresh[trial, piece] = self._rings[-1]


def _split_chunks(numbers: Sequence[int], sizes: Sizes, ring_bytes: int) -> list[tuple[float, float]]:
    """Bytes up and down of runs of parameters that fit a ring."""
    found: list[tuple[float, float]] = []
    room = 0
    for n in numbers:
        up, down = sizes.pinned_bytes[n], sizes.pinned_bytes[n] + sizes.copy_bytes[n]
        if found and sizes.update_bytes[n] <= room:
            found[-1] = (found[-1][0] + up, found[-1][1] + down)
            room -= sizes.update_bytes[n]
        else:
            found.append((up, down))
            room = ring_bytes - sizes.update_bytes[n]
    return found


def _unit_seconds(built: BuiltModel, plan: "ShardPlan", rates: Rates) -> dict[tuple[str, int], float]:
    """The step's compute, parted by FLOPs."""
    weight = {"F": _FORWARD, "L": _LAST, "B": _BACKWARD}
    flops = {
        (kind, shard): weight[kind] * sum(built.facts.flops[slice(*plan.layout.cuts[shard])])
        for kind, shard in dict.fromkeys(list_units(plan.layout))
    }
    if plan.layout.calls is not None:
        return _call_seconds(built, plan, rates)
    total = sum(flops.values())
    whole = plan.work.flops / rates.flops_per_s if rates.compute_s is None else rates.compute_s
    return {key: whole * each / total if total else 0.0 for key, each in flops.items()}


def _call_seconds(built: BuiltModel, plan: "ShardPlan", rates: Rates) -> dict[tuple[str, int], float]:
    """The same by call: a backward with or without another forward."""
    calls = plan.layout.calls or ()
    again = plan.layout.recompute or (False,) * plan.layout.num_shards
    weight = {"F": 1.0, "B": 2.0}
    total = built.trial.accumulate * sum(
        built.facts.flops[shard] * (3 + again[shard]) for shard in set(calls)
    )
    whole = plan.work.flops / rates.flops_per_s if rates.compute_s is None else rates.compute_s
    return {
        (kind, shard): whole
        * built.facts.flops[shard]
        * (weight[kind] + (again[shard] and kind == "B"))
        / calls.count(shard)
        / total
        if total
        else 0.0
        for kind, shard in dict.fromkeys(list_units(plan.layout))
    }
