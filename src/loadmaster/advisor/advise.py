"""`advise`: one job, the state of a cluster, a deadline. Pure: no clock, no files; the same input, the
same answer."""

import math
from collections.abc import Sequence

import numpy as np

from loadmaster.advisor.advice import Advice, Offer, Reason
from loadmaster.advisor.jobs.curve import ScalingCurve
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import Block, ClusterState, Decision, idle
from loadmaster.advisor.policies.registry import Policy, Run, policy
from loadmaster.core.errors import InputError
from loadmaster.core.units import format_seconds

_NORMAL_90 = 1.6448536
_FEWEST_RESIDUALS = 20


def advise(
    job: Job,
    state: ClusterState,
    *,
    deadline_s: float | None = None,
    by: str | Policy = "smallest",
    residuals: Sequence[float] = (),
    run: Run | None = None,
) -> Advice:
    """Whether to admit a job, on which devices, and when it will be done.

    `by` is a policy or its name. `residuals` are measured times over predicted ones of earlier jobs; from
    20 on the error bar and the probability come from them, else from the curve's own error.
    """
    if deadline_s is not None:
        job = Job(
            job.name, job.curve, float(deadline_s), job.value, job.requested, job.sequential_s, job.needs
        )
    if not job.curve.degrees:
        return _advise_unknown(job, state)
    _require_possible_size(job, state)
    options = _options(job, state)
    if not options and job.curve.degrees[0] > np.isfinite(state.free_at_s).sum():
        return _none_free(job, state)
    if not options:
        raise InputError(
            f"job {job.name!r} runs on none of the cluster's devices ({', '.join(state.layout.kinds)})"
        )
    in_time = [o for o in options if o.deadline_s <= job.deadline_s]
    chosen = policy(by) if isinstance(by, str) else by
    decision = chosen(job, state, run or Run())
    block, time = _resolve(decision, job, state)
    if block is not None and (decision.start_s or state.now_s) - state.now_s + time <= job.deadline_s:
        return _admitted(job, state, decision, block, time, options, in_time, residuals)
    return _rejected(job, state, decision, options, in_time)


def _require_possible_size(job: Job, state: ClusterState) -> None:
    fewest, there = job.curve.degrees[0], state.layout.num_devices
    if fewest > there:
        raise InputError(
            f"job {job.name!r} needs at least {fewest} devices and the cluster has {there};"
            " use a larger cluster, or give the job's time on fewer devices"
        )


def _none_free(job: Job, state: ClusterState) -> Advice:
    """Too many devices are taken until a time that nobody has told: no offer can be made."""
    fewest = job.curve.degrees[0]
    taken = int((~np.isfinite(state.free_at_s)).sum())
    reason = (
        f"{state.num_free} of {state.layout.num_devices} devices are free and at least {fewest} needed;"
        f" it is not known when {taken} of them become free, so no start can be offered"
    )
    return _refuse(job, Reason.NO_CAPACITY_UNTIL, reason, warnings=job.curve.findings())


def _refuse(
    job: Job,
    code: Reason,
    reason: str,
    *,
    warnings: tuple[str, ...],
    earliest_deadline_s: float | None = None,
    cheapest: Offer | None = None,
    offers: tuple[Offer, ...] = (),
) -> Advice:
    """Advice not to admit a job: no devices, and what would help."""
    return Advice(
        admit=False,
        devices=(),
        device_names=(),
        start_s=None,
        finish_s=None,
        finish_interval_s=None,
        on_time_probability=0.0,
        cost=0.0,
        code=code,
        reason=reason,
        earliest_deadline_s=earliest_deadline_s,
        cheapest=cheapest,
        offers=offers,
        curve_origin=job.curve.origin,
        warnings=warnings,
    )


def _options(job: Job, state: ClusterState) -> list[Offer]:
    """The earliest end on every number of devices."""
    offers = []
    times = state.free_at_s[np.isfinite(state.free_at_s)]
    starts = np.unique(np.maximum(times, state.now_s))
    ordered = np.sort(np.maximum(times, state.now_s))
    for n in job.curve.degrees:
        best: Offer | None = None
        fastest = job.curve.best(n)
        if n > len(ordered):
            continue
        for start in starts[starts >= ordered[n - 1]]:
            wait = float(start) - state.now_s
            if best is not None and wait + fastest >= best.deadline_s:
                break
            block, time = state.at(float(start)).best_block(job, n)
            if block is not None and math.isfinite(time) and (best is None or wait + time < best.deadline_s):
                best = Offer(n, block.kind, wait, wait + time, n * time)
        if best is not None:
            offers.append(best)
    return offers


def _resolve(decision: Decision, job: Job, state: ClusterState) -> tuple[Block | None, float]:
    if not decision.admit:
        return None, math.inf
    if decision.block is not None:
        block = decision.block
        return block, job.curve.time(decision.degree, block.kind, block.form)
    return state.best_block(job, decision.degree)


def _admitted(
    job: Job,
    state: ClusterState,
    decision: Decision,
    block: Block,
    time: float,
    options: list[Offer],
    in_time: list[Offer],
    residuals: Sequence[float],
) -> Advice:
    wait = max(0.0, (decision.start_s or state.now_s) - state.now_s)
    low, high, probability = _error_bar(job, time, wait, residuals)
    words = f"{_count(decision.degree)} in {format_seconds(wait + time)}"
    if math.isfinite(job.deadline_s):
        words += f" (deadline {format_seconds(job.deadline_s)})"
    others = [
        f"{o.degree} would take {format_seconds(o.deadline_s)}"
        for o in options
        if o.degree != decision.degree
    ]
    return Advice(
        admit=True,
        devices=block.devices,
        device_names=tuple(state.layout.name[d] for d in block.devices),
        start_s=wait,
        finish_s=wait + time,
        finish_interval_s=(wait + low, wait + high),
        on_time_probability=probability,
        cost=state.price * len(block.devices) * time,
        code=Reason.FITS,
        reason="; ".join([words, *others[:3]]),
        earliest_deadline_s=min(o.deadline_s for o in options),
        cheapest=min(in_time, key=lambda o: (o.device_s, o.degree), default=None),
        offers=tuple(in_time),
        curve_origin=job.curve.origin,
        warnings=_warnings(job, decision),
    )


def _warnings(job: Job, decision: Decision) -> tuple[str, ...]:
    return (*job.curve.findings(), *([decision.warning] if decision.warning else []))


def _count(n: int) -> str:
    return "1 device finishes" if n == 1 else f"{n} devices finish"


def _error_bar(job: Job, time: float, wait: float, residuals: Sequence[float]) -> tuple[float, float, float]:
    """The 90 % interval of the running time, and the chance to be in time."""
    room = job.deadline_s - wait
    if len(residuals) >= _FEWEST_RESIDUALS:
        ratios = np.asarray(residuals, dtype=np.float64)
        if not np.isfinite(ratios).all() or (ratios <= 0).any():
            raise InputError("residuals are measured over predicted times; give positive numbers")
        low, high = np.quantile(ratios, [0.05, 0.95])
        return float(low * time), float(high * time), float(np.mean(ratios * time <= room))
    sigma = job.curve.rel_error
    low, high = time * max(0.0, 1 - _NORMAL_90 * sigma), time * (1 + _NORMAL_90 * sigma)
    if sigma == 0 or math.isinf(room):
        return low, high, float(time <= room)
    return low, high, 0.5 * math.erfc((1 - room / time) / sigma / math.sqrt(2))


def _rejected(
    job: Job, state: ClusterState, decision: Decision, options: list[Offer], in_time: list[Offer]
) -> Advice:
    earliest = min(options, key=lambda o: o.deadline_s)
    there = state.layout.num_devices
    alone = {n: _alone_s(job, state, n) for n in job.curve.degrees if n <= there}
    fastest = min(alone.values())
    beyond = [n for n in job.curve.degrees if n > there and job.curve.best(n) <= job.deadline_s]
    told = f"the deadline is {format_seconds(job.deadline_s)}"
    now = [o for o in in_time if o.start_s <= 0]
    least = min((n for n, time in alone.items() if time <= job.deadline_s), default=0)
    if fastest > job.deadline_s:
        code = Reason.IMPOSSIBLE_DEADLINE
        reason = (
            f"{told} and the job takes at least {format_seconds(fastest)} on any number of"
            f" {f'the {there} ' if len(alone) < len(job.curve.degrees) else ''}devices;"
            f" the earliest deadline that can be kept is {format_seconds(earliest.deadline_s)},"
            f" on {earliest.degree}"
        )
        if beyond:
            reason += f"; {beyond[0]} devices would be in time, and the cluster has {there}"
    elif decision.note.startswith("priced out"):
        code = Reason.PRICED_OUT
        cost = float(decision.note.rpartition(": ")[2])
        reason = f"its devices are worth {cost:.3g} to other jobs; this one is worth {job.value:g}"
    elif now:
        code = Reason.PRICED_OUT
        reason = f"{now[0]} would be in time, but the policy would not give it these devices"
    elif least and state.num_free >= least:
        code = Reason.FRAGMENTED
        reason = f"{state.num_free} devices are free, but no block of {least} that finishes in time; {told}"
    else:
        code = Reason.NO_CAPACITY_UNTIL
        first = min(in_time, key=lambda o: o.start_s, default=earliest)
        reason = (
            f"{state.num_free} of {state.layout.num_devices} devices are free and {least} are needed;"
            f" {first.degree} come free in {format_seconds(first.start_s)}; {told}"
        )
    offers = sorted(in_time, key=lambda o: o.device_s) or sorted(options, key=lambda o: o.deadline_s)[:4]
    return _refuse(
        job,
        code,
        reason,
        earliest_deadline_s=earliest.deadline_s,
        cheapest=min(in_time, key=lambda o: (o.device_s, o.degree), default=None),
        offers=tuple(offers),
        warnings=_warnings(job, decision),
    )


def _alone_s(job: Job, state: ClusterState, count: int) -> float:
    """Time on so many devices of the cluster if no other job were there."""
    if state.layout.blocks:
        return job.curve.best(count)
    return idle(state.layout).best_block(job, count)[1]


def _advise_unknown(job: Job, state: ClusterState) -> Advice:
    """No curve: the requested count if it is free, and no prediction."""
    if job.requested > state.layout.num_devices:
        raise InputError(
            f"job {job.name!r} asks for {job.requested} devices and the cluster has"
            f" {state.layout.num_devices}; ask for fewer"
        )
    block = next(state.free_blocks(job.requested), None)
    asked = f"{job.requested} device{'s' * (job.requested > 1)} as requested, no prediction"
    told = f"nothing is known of how job {job.name!r} scales: {asked}"
    free_at = float(np.sort(state.free_at_s)[job.requested - 1]) - state.now_s
    offers = () if block is not None else (Offer(job.requested, "", max(0.0, free_at), math.inf, math.inf),)
    devices = block.devices if block is not None else ()
    return Advice(
        admit=block is not None,
        devices=devices,
        device_names=tuple(state.layout.name[d] for d in devices),
        start_s=0.0 if block is not None else None,
        finish_s=None,
        finish_interval_s=None,
        on_time_probability=0.0,
        cost=0.0,
        code=Reason.UNKNOWN_CURVE,
        reason=told,
        earliest_deadline_s=None,
        cheapest=None,
        offers=offers,
        curve_origin="unknown",
    )


def unknown_curve() -> ScalingCurve:
    """The curve of a job of which nothing is known."""
    return ScalingCurve({}, "unknown", 0.0)
