"""Steps of a plan on a virtual clock: units, copies and updates on their streams share bus and host memory.

    compute  F0 F1 ... L ... B1 B0 | F0 ...            in order, when the weights are there
    up 0     weights, `num_slots` ahead                host-stepped ones when their update is done
    up 1     state of device-stepped pieces            when a ring is free
    down 0   gradients                                 in order
    down 1   stepped state                             in order
    host     updates                                   of those whose gradients have landed the lowest shard

Rates flow: the bus is shared by the lanes of each way, and host memory by everything. Beside the optimizer,
copies and it have the rates that were measured with the same ones under way; where that was not measured and
memory is short, all slow down alike. Issuing takes no time here, so this is what order and rates allow, not
what a program reaches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loadmaster.train.rates import Rates
from loadmaster.train.slots import unit_order
from loadmaster.train.state import Built, Sizes

if TYPE_CHECKING:
    from loadmaster.train.partition import ShardPlan

_AHEAD, _NEAR = 64, 8  # jobs of a stream that are looked at
_ROUNDS = 3  # until steps follow each other alike
_UPDATE_BYTES = 28  # of host memory, a parameter
_STREAMS = ("compute", "up 0", "up 1", "down 0", "down 1", "host")
_FORWARD, _LAST, _BACKWARD = 1.0, 3.0, 4.0  # units of a shard's forward


@dataclass(eq=False)
class _Job:
    stream: str
    left: float  # seconds, bytes or parameters
    after: list["_Job"]
    rank: int = 0  # on the host: lowest first
    done: bool = False

    @property
    def ready(self) -> bool:
        return all(job.done for job in self.after)


@dataclass(eq=False)
class _Steps:
    """All jobs of some steps, in the order they are issued."""

    queues: dict[str, list[_Job]] = field(default_factory=lambda: {name: [] for name in _STREAMS})

    def add(self, stream: str, work: float, after: Sequence[_Job | None], rank: int = 0) -> _Job:
        """One more job at the end of a stream."""
        job = _Job(stream, work, [each for each in after if each is not None], rank)
        self.queues[stream].append(job)
        return job


def forecast_step_s(
    built: Built, plan: "ShardPlan", sizes: Sizes, rates: Rates, *, num_trials: int = 1
) -> float:
    """Seconds of a step once steps follow each other, of one trial or of several that take turns."""
    steps, ends = _issued(built, plan, sizes, rates, num_trials)
    clock, found = 0.0, []
    waiting = {name: list(queue) for name, queue in steps.queues.items()}
    while any(waiting.values()):
        active = [job for name in _STREAMS if (job := _next(name, waiting[name])) is not None]
        assert active, "an order of jobs in which nothing can run"
        speed = _speeds(active, rates)
        taken = min(job.left / each for job, each in zip(active, speed, strict=True))
        clock += taken
        for job, each in zip(active, speed, strict=True):
            job.left -= taken * each
            if job.left <= 1e-9 * max(1.0, each):
                job.done = True
                waiting[job.stream].remove(job)
                if job in ends:
                    found.append(clock)
    return (found[-1] - found[-1 - num_trials]) / num_trials


def _next(stream: str, queue: list[_Job]) -> _Job | None:
    """What a stream works on: the first; weights and updates may pass those that cannot run yet."""
    if stream == "host":
        return min((job for job in queue[:_AHEAD] if job.ready), key=lambda job: job.rank, default=None)
    if stream == "up 0":
        return next((job for job in queue[:_NEAR] if job.ready), None)
    return queue[0] if queue and queue[0].ready else None


def _speeds(active: Sequence[_Job], rates: Rates) -> list[float]:
    lanes = {way: sum(job.stream.startswith(way) for job in active) for way in ("up", "down")}
    up, down, host, share = rates.up_bytes_per_s, rates.down_bytes_per_s, rates.host_params_per_s, 1.0
    updating = any(job.stream == "host" for job in active)
    if updating and rates.beside is not None:
        found = rates.beside[" ".join(way for way, count in lanes.items() if count)]
        up, down, host = found.up_bytes_per_s, found.down_bytes_per_s, found.params_per_s
    elif rates.beside is None:
        asked = up * (lanes["up"] > 0) + down * (lanes["down"] > 0) + updating * _UPDATE_BYTES * host
        share = min(1.0, rates.host_bytes_per_s / asked) if asked else 1.0
    rate = {"up": up / max(1, lanes["up"]), "down": down / max(1, lanes["down"]), "host": host}
    return [1.0 if job.stream == "compute" else share * rate[job.stream.split()[0]] for job in active]


def _issued(
    built: Built, plan: "ShardPlan", sizes: Sizes, rates: Rates, num_trials: int
) -> tuple[_Steps, set[_Job]]:
    """The jobs of some steps, as the executor issues them."""
    layout, steps, ends = plan.layout, _Steps(), set()
    unit_s = _unit_seconds(built, plan, rates)
    fresh: dict[tuple[int, int], _Job] = {}  # [trial, piece] its host copy is whole
    uses: list[_Job] = []  # units that used a slot, in order
    rings: list[_Job] = []
    for turn in range((_ROUNDS + (num_trials == 1)) * num_trials):
        trial = turn % num_trials
        unit: _Job | None = None
        for kind, shard in unit_order(layout.num_shards):
            loads = []
            streamed = [p for p in layout.pieces_of[shard] if plan.placement[p] != "pinned"]
            for piece in streamed:
                size = sum(sizes.compute_bytes[n] for n in layout.pieces[piece].parameters)
                free = uses[-plan.num_slots] if len(uses) >= plan.num_slots else None
                loads.append(steps.add("up 0", size, [free, fresh.get((trial, piece))]))
            unit = steps.add("compute", unit_s[kind, shard], loads)
            uses += [unit] * len(streamed)
            if kind == "F":
                continue
            for piece in streamed:
                numbers = [n for n in layout.pieces[piece].parameters if sizes.trained[n]]
                if plan.placement[piece] == "host":
                    grads = steps.add("down 0", sum(sizes.grad_bytes[n] for n in numbers), [unit])
                    work = sum(sizes.numel[n] for n in numbers)
                    fresh[trial, piece] = steps.add(
                        "host", work, [grads], rank=turn * layout.num_shards + shard
                    )
                    continue
                for up, down in _chunks(numbers, sizes, plan.ring_bytes):
                    free = rings[-plan.num_rings] if len(rings) >= plan.num_rings else None
                    brought = steps.add("up 1", up, [free, fresh.get((trial, piece))])
                    rings.append(steps.add("down 1", down, [brought, unit]))
                fresh[trial, piece] = rings[-1]
        assert unit is not None
        ends.add(unit)
    return steps, ends


def _chunks(numbers: Sequence[int], sizes: Sizes, ring_bytes: int) -> list[tuple[float, float]]:
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


def _unit_seconds(built: Built, plan: "ShardPlan", rates: Rates) -> dict[tuple[str, int], float]:
    """The step's compute, parted by FLOPs."""
    weight = {"F": _FORWARD, "L": _LAST, "B": _BACKWARD}
    flops = {
        (kind, shard): weight[kind] * sum(built.facts.flops[slice(*plan.layout.cuts[shard])])
        for kind, shard in unit_order(plan.layout.num_shards)
    }
    total = sum(flops.values())
    whole = plan.work.flops / rates.flops_per_s if rates.compute_s is None else rates.compute_s
    return {key: whole * each / total if total else 0.0 for key, each in flops.items()}
