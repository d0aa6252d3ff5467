"""Explain: what limits a plan, or why an op or module is where it is, found by trying alternatives.

Elsewhere: the ops of the target, with all that must be with them, are put on every other device, all else as
it is, and the step is simulated; then a plan is looked for that has them there. Changes: one thing at a time
is altered (memory, a link, the speed of a device, a device more, half the batch) and planned for again. In
a pipeline a module goes to a stage of the other device, with what lies between (`stages.py`). A
sentence is only said of what one of these runs has shown.
"""

from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches

import numpy as np

from loadmaster.core.answers.outcomes import Changed, Elsewhere, Explanation
from loadmaster.core.answers.review import Review
from loadmaster.core.arrays import Bools
from loadmaster.core.check import check_plan
from loadmaster.core.cluster import CHANNEL
from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.problem import FREE, Objective, Problem, Split
from loadmaster.core.timeline import SpanKind, Timeline
from loadmaster.core.units import format_bytes, format_percent, format_seconds
from loadmaster.graph.origin import origin_of
from loadmaster.review.binding import find_binding
from loadmaster.review.look import review_plan, shown_plan
from loadmaster.review.replanning import Replanner
from loadmaster.review.settings import Settings
from loadmaster.review.stages import close_over, try_stages
from loadmaster.review.steps import has_steps, microbatches_of, op_seconds, samples_of
from loadmaster.review.whatif import try_change
from loadmaster.simulator.events.engine import Simulator, prepare

_MOST_DEVICES, _MOST_LINKS = 4, 3
_WORTH = 1e-3  # a change of less is none


def explain_plan(
    placement: Placement, target: str, replanner: Replanner, *, replan: bool = True
) -> Explanation:
    """Why the whole plan ('' as target), or a part of it, is as it is."""
    problem, plan = placement.problem, shown_plan(placement)
    review = review_plan(placement)
    simulator = prepare(problem)
    chosen = find_ops(problem.graph, target) if target else np.ones(problem.graph.num_ops, dtype=np.bool_)
    own_s, critical_s = _times(review, chosen)
    if has_steps(problem, plan):
        own_s, critical_s = _times_in_step(placement, plan, review, chosen)
    names = problem.cluster.device_name
    where = tuple(names[d] for d in np.unique(plan.copies[:, chosen]))
    # What is planned again for the lowered graph of a strategy would be no strategy.
    is_lowered = CHANNEL in problem.cluster.kind_name
    elsewhere: tuple[Elsewhere, ...] = ()
    if target and has_steps(problem, plan):
        elsewhere = tuple(try_stages(placement, plan, chosen))
    if target and problem.cluster.num_devices > 1 and plan.pipeline is None:
        moved = close_over(problem.graph, chosen)
        replan = replan and not is_lowered
        elsewhere = tuple(_try_elsewhere(placement, simulator, moved, replanner, replan=replan))
    changes = () if target or is_lowered else tuple(_try_changes(placement, review, replanner))
    found = Explanation(
        target=target,
        ops=tuple(problem.graph.op_name[op] for op in np.flatnonzero(chosen)),
        where=where,
        time_s=review.timeline.step_s if has_steps(problem, plan) else _score(simulator, plan),
        fits=placement.fits,
        own_s=own_s,
        critical_s=critical_s,
        reasons=(),
        elsewhere=elsewhere,
        changes=changes,
    )
    return replace(found, reasons=tuple(_list_reasons(placement, review, found)))


def find_ops(graph: Graph, target: str) -> Bools:
    """[N] the op of that name, or the ops of a module and all below it; the end of its path will do."""
    hit = np.array([name == target for name in graph.op_name], dtype=np.bool_)
    if not hit.any():
        hit = _below(graph, target)
    if not hit.any():
        ends = _paths_ending_in(graph, target)
        if len(ends) > 1:
            few = f"{', '.join(ends[:4])}{' and others' if len(ends) > 4 else ''}"
            raise InputError(f"{target!r} may be {few}; write more of the path")
        hit = _below(graph, ends[0]) if ends else hit
    if not hit.any():
        modules, some_ops = set(graph.module), set(graph.op_name[:20000])
        see = "loadmaster show PLAN --ops 100 lists some ops"
        known = (
            modules if len(modules - {""}) > 1 and not _resembles(target, some_ops) else modules | some_ops
        )
        raise UnknownNameError("op or module", target, known, see=see)
    return hit


def _below(graph: Graph, module: str) -> Bools:
    return np.array(
        [path == module or path.startswith(f"{module}.") for path in graph.module], dtype=np.bool_
    )


def _paths_ending_in(graph: Graph, target: str) -> list[str]:
    """Modules whose path ends in the target, shortest first."""
    found = set()
    for path in set(graph.module):
        at = f".{path}.".find(f".{target}.")
        if at >= 0:
            found.add(path[: at + len(target)])
    return sorted(found, key=lambda path: (path.count("."), path))


def _resembles(target: str, names: set[str]) -> bool:
    return bool(get_close_matches(target, names, n=1, cutoff=0.8))


def move_ops(plan: Plan, chosen: Bools, device: int) -> Plan:
    """The plan with these ops on a device, in the order in which they were."""
    return replace(plan, device=np.where(chosen, device, plan.device).astype(np.int32))


def _times_in_step(placement: Placement, plan: Plan, review: Review, chosen: Bools) -> tuple[float, float]:
    """The same in a step of micro-batches, where the path is one of passes: their share of each pass."""
    assert plan.pipeline is not None
    assert review.graph is not None
    problem, timeline = placement.problem, review.timeline
    seconds = op_seconds(problem, plan).sum(axis=1)
    num, phases = plan.pipeline.num_stages, problem.graph.phase
    bins = plan.pipeline.stage * len(Phase) + phases
    whole = np.bincount(bins, seconds, minlength=num * len(Phase))
    share = np.bincount(bins, seconds * chosen, minlength=num * len(Phase)) / np.where(whole > 0, whole, 1.0)
    on_path = 0.0
    for span in review.critical_ops:
        if timeline.kind[span] == SpanKind.COMPUTE:
            op = int(timeline.item[span])
            stage = int(review.graph.module[op].rpartition(" ")[2])
            length = float(timeline.end_s[span] - timeline.start_s[span])
            on_path += length * float(share[stage * len(Phase) + int(review.graph.phase[op])])
    return float(seconds[chosen].sum()), on_path


def _score(simulator: Simulator, plan: Plan) -> float:
    return simulator.score(plan).time_s


def _times(review: Review, chosen: Bools) -> tuple[float, float]:
    """Seconds that the ops take, and those of them on the critical path."""
    timeline = review.timeline
    mine: Bools = (timeline.kind == SpanKind.COMPUTE) & chosen[
        np.where(timeline.kind == SpanKind.COMPUTE, timeline.item, 0)
    ]
    seconds = timeline.end_s - timeline.start_s
    on_path = np.zeros(len(mine), dtype=np.bool_)
    on_path[list(review.critical_ops)] = True
    return float(seconds[mine].sum()), float(seconds[mine & on_path].sum())


def sent_bytes(problem: Problem, timeline: Timeline) -> int:
    """Bytes that are sent between devices in a step."""
    moved = timeline.item[timeline.kind != SpanKind.COMPUTE]
    return int(problem.graph.tensor_bytes[moved].sum())


def _try_elsewhere(
    placement: Placement, simulator: Simulator, moved: Bools, replanner: Replanner, *, replan: bool
) -> Iterable[Elsewhere]:
    problem, plan = placement.problem, shown_plan(placement)
    cluster = problem.cluster
    here = set(np.unique(plan.device[moved]).tolist())
    before_s = simulator.score(plan).time_s
    runs = np.asarray(np.isfinite(problem.device_compute_s[moved]).all(axis=0))  # [D]
    for device, name in enumerate(cluster.device_name):
        if cluster.is_channel[device]:
            continue
        is_here = here == {device}
        pins = np.unique(problem.pinned[moved & (problem.pinned != FREE)]).tolist()
        if not runs[device] or (pins and pins != [device]):
            note = "pinned elsewhere" if runs[device] else "its kind cannot run these ops"
            yield Elsewhere(name, is_here, None, 0, 0, "", None, note)
            continue
        replanner.progress(f"on {name}", device / cluster.num_devices)
        other = plan if is_here else move_ops(plan, moved, device)
        score = simulator.score(other)
        over = np.maximum(np.array(score.peak_bytes) - cluster.usable_bytes, 0)
        worst = int(over.argmax())
        best = None
        if replan:
            pinned = np.where(moved, device, problem.pinned).astype(np.int32)
            found = replanner.find(replace(problem, pinned=pinned), other)
            best = found.score_s
        timeline = simulator.timeline(other)
        binds = f"memory of {cluster.device_name[worst]}" if over[worst] and not is_here else ""
        yield Elsewhere(
            device=name,
            is_here=is_here,
            time_s=score.time_s,
            moved_bytes=sent_bytes(problem, timeline),
            over_bytes=int(over[worst]),
            over_device=cluster.device_name[worst] if over[worst] else "",
            replanned_s=best,
            note="" if is_here else _broken_split(problem, other),
            binds=binds or find_binding(problem, other, timeline, moved, before_s, plan),
        )


def _broken_split(problem: Problem, plan: Plan) -> str:
    """What a plan for throughput is no longer that the question asks for, '' = nothing."""
    rules = {found.rule for found in check_plan(problem, plan)} & {Split.CHAIN.value, Split.CONVEX.value}
    return f"no longer {min(rules)}, as --split asks" if rules else ""


# ---- changes of the whole


def list_ideas(placement: Placement, review: Review) -> list[Settings]:
    """Single changes worth trying, in the words of `whatif`."""
    problem = placement.problem
    cluster, timeline = problem.cluster, review.timeline
    names = cluster.device_name
    full = sorted(range(len(names)), key=lambda d: -placement.peak_bytes[d] / cluster.usable_bytes[d])
    ideas = [
        Settings(sets=(f"{names[d]}.memory=2x",))
        for d in full[:_MOST_DEVICES]
        if placement.peak_bytes[d] > 0.5 * cluster.usable_bytes[d]
    ]
    if len(ideas) > 1 or not placement.fits:
        every = tuple(f"{name}.memory=unlimited" for name in names)
        ideas.append(Settings(sets=every))
    busy = sorted((d for d in range(len(names)) if timeline.busy_s[d] > 0), key=lambda d: -timeline.busy_s[d])
    ideas += [Settings(sets=(f"{names[d]}.speed=2x",)) for d in busy[:_MOST_DEVICES]]
    pairs: dict[tuple[int, int], float] = {}
    moved = np.flatnonzero(timeline.kind == SpanKind.TRANSFER)
    for span in moved.tolist():
        i, j = divmod(int(timeline.resource[span]), len(names))
        if i != j:
            seconds = float(timeline.end_s[span] - timeline.start_s[span])
            key = (min(i, j), max(i, j))
            pairs[key] = pairs.get(key, 0.0) + seconds
    for i, j in sorted(pairs, key=lambda pair: -pairs[pair])[:_MOST_LINKS]:
        ideas.append(Settings(sets=(f"{names[i]}-{names[j]}.rate=2x",)))
    preset = _another_device(placement, busy or [0])
    ideas += [Settings(add=(preset,))] if preset else []
    plan = shown_plan(placement)
    samples, parts = samples_of(problem, plan), microbatches_of(problem, plan)
    if (
        samples is not None
        and samples > 1
        and samples % (2 * parts) == 0
        and origin_of(problem.graph) is not None
    ):
        accumulation = (origin_of(problem.graph) or ("", {}))[1].get("accumulation") or 1
        ideas.append(Settings(batch=max(1, samples // int(accumulation) // 2)))
    return ideas


def _another_device(placement: Placement, busy: list[int]) -> str:
    """The busiest device's kind as a word of `cluster`, where it is one."""
    from loadmaster.cluster.presets import find_kind

    cluster = placement.problem.cluster
    for device in busy:
        kind = cluster.kind_name[int(cluster.kind[device])]
        preset = find_kind(kind)
        if preset is None or cluster.on_host[cluster.kind[device]]:
            continue
        memory_bytes = int(cluster.memory_bytes[device])
        usual = memory_bytes == preset.memory_bytes
        return f"1x{kind}" if usual else f"1x{kind}-{memory_bytes // 10**6}MB"
    return ""


def _try_changes(placement: Placement, review: Review, replanner: Replanner) -> list[Changed]:
    """Every idea on its own, the best first; the plan as it is, planned for again, stands at its place."""
    rows = []
    ideas = [Settings(), *list_ideas(placement, review)]
    for at, settings in enumerate(ideas):
        replanner.progress(f"{settings} ({at + 1} of {len(ideas)})", at / len(ideas))
        row, _ = try_change(placement, settings, replanner)
        if row.note.startswith("cannot be asked"):
            continue
        rows.append(row)

    def rank(row: Changed) -> float:
        time_s = row.per_sample_s if row.per_sample_s is not None else row.time_s
        return float("inf") if time_s is None else time_s

    return sorted(rows, key=rank)


# ---- sentences


def _list_reasons(placement: Placement, review: Review, found: Explanation) -> list[str]:
    if not found.target:
        return _explain_whole(placement, review, found)
    through = placement.problem.objective == Objective.THROUGHPUT
    what, would = ("the time per pass", "be") if through else ("the step", "take")
    num = len(found.ops)
    its = (
        "it takes"
        if num == 1 and found.ops[0] == found.target
        else f"its {num} op{'s' * (num > 1)} take{'s' * (num == 1)}"
    )
    path = (
        f"{format_seconds(review.timeline.step_s)} of one pass" if through else format_seconds(found.time_s)
    )
    said = [
        f"{found.target} runs on {', '.join(found.where)}: {its}"
        f" {format_seconds(found.own_s)}, of which {format_seconds(found.critical_s)} lie on the"
        f" critical path of {path}."
    ]
    if through:
        said.append(f"While the pipeline runs, {what} is {format_seconds(found.time_s)}.")
    pinned = placement.problem.pinned[find_ops(placement.problem.graph, found.target)]
    if (pinned != FREE).all():
        said.append("It is pinned there by the question.")
    others = [row for row in found.elsewhere if not row.is_here and row.time_s is not None]
    said += [
        f"It cannot go to {row.device}: {row.note}."
        for row in found.elsewhere
        if row.time_s is None and row.note and not row.is_here
    ]
    for row in others:
        row = replace(row, device=f"{row.device} ({row.note})") if row.note else row
        assert row.time_s is not None
        if row.over_bytes and row.over_device != row.device.split(" (")[0] and not found.fits:
            said.append(
                f"With it on {row.device} the plan would still not fit: {row.over_device} has"
                f" {format_bytes(row.over_bytes)} too little{_after_replanning(row, found.time_s)}."
            )
        elif row.over_bytes:
            said.append(
                f"On {row.device} the memory of {row.over_device} would be too small:"
                f" {format_bytes(row.over_bytes)}"
                f" missing, with everything else unchanged{_after_replanning(row, found.time_s)}."
            )
        elif row.time_s > found.time_s * (1 + _WORTH):
            slower = row.time_s - found.time_s
            said.append(
                f"On {row.device} {what} would {would} {format_seconds(row.time_s)},"
                f" {format_seconds(slower)} longer"
                f" (+{format_percent(slower / found.time_s)}), with {format_bytes(row.moved_bytes)}"
                " sent instead of"
                f" {format_bytes(_sent_now(found, review, placement))}{_because(row)}"
                f"{_after_replanning(row, found.time_s)}."
            )
        elif row.time_s < found.time_s * (1 - _WORTH):
            said.append(
                f"On {row.device} {what} would {would} {format_seconds(row.time_s)}: faster than this"
                " plan, which"
                " is not the best."
            )
        else:
            same = "the same" if through else "the same time"
            said.append(f"On {row.device} {what} would {would} {same}.")
    return said


def _sent_now(found: Explanation, review: Review, placement: Placement) -> int:
    return next(
        (row.moved_bytes for row in found.elsewhere if row.is_here),
        sent_bytes(placement.problem, review.timeline),
    )


def _because(row: Elsewhere) -> str:
    return f"; most of that is due to the {row.binds}" if row.binds else ""


def _after_replanning(row: Elsewhere, time_s: float) -> str:
    if row.replanned_s is None:
        return ""
    if row.replanned_s < time_s * (1 - _WORTH):
        return f"; planned again with it there, {format_seconds(row.replanned_s)}: faster than this plan"
    return f"; planned again with it there, {format_seconds(row.replanned_s)}"


def _explain_whole(placement: Placement, review: Review, found: Explanation) -> list[str]:
    said = [f"What limits the step: {review.limit}."] if review.limit and placement.fits else []
    unit = "a pass" if placement.problem.objective == Objective.THROUGHPUT else "a step"
    before = next((row for row in found.changes if row.name == "as it is"), None)
    if before is None:
        return said
    if before.time_s is None:
        fitting = [row.name for row in found.changes if row.time_s is not None]
        said.append(
            f"No plan fits; each of these changes alone makes one fit: {', '.join(fitting)}."
            if fitting
            else "No plan fits, and none of the single changes that were tried makes one fit."
        )
        return said
    if found.fits and before.time_s < found.time_s * (1 - _WORTH):
        said.append(
            f"The plan itself can be improved: planned again, it takes {format_seconds(before.time_s)}"
            f" {unit}."
        )
    useful = [row for row in found.changes if row is not before and _gain(row, before) > _WORTH]
    if not useful:
        said.append("None of the single changes that were tried makes it faster by more than 0.1 %.")
        return said
    best = max(useful, key=lambda row: _gain(row, before))
    assert best.time_s is not None
    said.append(
        f"Of all changes that were tried, this helps most: {best.name}, {format_seconds(best.time_s)} {unit}"
        f" ({format_percent(_gain(best, before))} less"
        f" time{' a sample' if best.per_sample_s is not None else ''})."
    )
    idle = [
        row.name
        for row in found.changes
        if row is not before and row not in useful and row.time_s is not None
    ]
    if idle:
        said.append(f"What would not help: {', '.join(idle)}.")
    return said


def _gain(row: Changed, before: Changed) -> float:
    """Share of time saved, of a sample where batches differ."""
    if row.time_s is None or before.time_s is None:
        return 0.0
    if row.per_sample_s is not None and before.per_sample_s:
        return 1 - row.per_sample_s / before.per_sample_s
    return 1 - row.time_s / before.time_s
