"""Ways: every way to run one step, in one table.

    one_device      the whole step on the device that is quickest at it
    placed          every op on a device of its own choice
    spill           weights wait on the host and arrive in time
    recompute       activations are computed again in the backward pass
    accumulate      several smaller passes before an update
    pipeline        stages on several devices, micro-batches flow through them
    data_parallel   every device its rows, as many as it can compute in the same time
    mixed           some groups replicated, others duplicated or placed
    shards          one device, shard by shard, weights in host memory

A way that model or devices cannot take is in the table with the reason. Answers that can be run are kept, so
that the best of them need not be looked for again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from loadmaster.capacity.clusters import hosts_apart
from loadmaster.capacity.fit_search import FitSearch
from loadmaster.capacity.shard_training import forecast_shards
from loadmaster.capacity.step_setting import is_training, setting_of
from loadmaster.core.answers.ways_answer import BIT_EQUAL, ROUNDING, SCHEMA_VERSION, Way, Ways
from loadmaster.core.errors import FileError, InputError, LoadmasterError, PlanError
from loadmaster.core.graph import Phase
from loadmaster.core.io import save
from loadmaster.core.pipelines.order import ONE_F_ONE_B
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective, Problem
from loadmaster.core.question import Question
from loadmaster.core.reasons import why_none_fits_in_short
from loadmaster.core.run import Budget, ignore_progress
from loadmaster.core.strategy import Mode
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.cost.microbatch import make_microbatch
from loadmaster.graph.origin import origin_of
from loadmaster.graph.source import is_model
from loadmaster.graph.spill import LOAD
from loadmaster.placers.ask import CAPTURED, PlanRequest, find_placement
from loadmaster.placers.microbatches import counts_of, with_steps
from loadmaster.placers.registry import placer
from loadmaster.questions.problem import batch_of, build_problem, target_of

Answer = Placement | StrategyAnswer
_MICRO_BATCHES = "batch norm sees micro-batches"
_MOST_PASSES = 8  # numbers of passes that are tried


@dataclass(frozen=True, slots=True, eq=False)
class WeighedWays:
    """The table, and the answers that can be run, by the name of their way."""

    table: Ways
    answers: dict[str, Answer]


@dataclass(slots=True, eq=False)
class _Asked:
    """One question, and what every way needs of it."""

    question: Question
    problem: Problem
    batch: int | None
    budget: Budget
    seed: int
    say: Callable[[str, float], None]
    folder: Path | None
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def is_captured(self) -> bool:
        """Whether `loadmaster run` can make the model again."""
        return origin_of(self.problem.graph) is not None

    def plan(
        self, problem: Problem, algorithm: str, spill: str | None = None, budget: Budget | None = None
    ) -> Placement:
        """What an algorithm answers; refuses an answer that does not fit."""
        order = CAPTURED if is_training(problem.graph) and not problem.pipeline else "free"
        request = PlanRequest(placer(algorithm), budget or self.budget, self.seed, order, spill, self.say)
        found = find_placement(problem, request)
        if found.plan is None:
            raise PlanError(why_none_fits_in_short(found))
        return found

    def plan_here(self, problem: Problem, algorithm: str, spill: str | None = None) -> Placement:
        """The same for a plan of one process, which drives the devices of one host: the best host's."""
        clusters = hosts_apart(problem.cluster)
        seconds = self.budget.seconds
        each = self.budget if seconds is None else Budget(seconds=seconds / len(clusters))
        found: list[Placement] = []
        refused: LoadmasterError | None = None
        for cluster in clusters:
            try:
                found.append(self.plan(replace(problem, cluster=cluster), algorithm, spill, each))
            except LoadmasterError as reason:
                refused = refused or reason
        if not found:
            assert refused is not None, "there is a host"
            raise refused
        return min(found, key=lambda one: np.inf if one.score_s is None else one.score_s)


def weigh_ways(
    question: Question,
    *,
    budget: Budget,
    seed: int = 0,
    folder: str | None = None,
    progress: Callable[[str, float], None] = ignore_progress,
) -> WeighedWays:
    """Ask every way; with a folder the answers are saved there, and commands name these files."""
    question = replace(question, objective=Objective.STEP, pipeline=None)
    if is_model(question.source):
        question = _with_defaults(question)
    if folder is not None:
        _make_folder(folder)
    progress("reading", 0.0)
    problem = build_problem(question, progress=progress)
    asked = _Asked(
        question,
        problem,
        batch_of(problem.graph, question),
        budget,
        seed,
        progress,
        Path(folder) if folder is not None else None,
    )
    rows = []
    for number, (name, (text, way)) in enumerate(_WAYS.items()):
        progress(text, number / len(_WAYS))
        try:
            rows.append(way(asked, name, text))
        except LoadmasterError as reason:
            rows.append(_make_refused_way(name, text, str(reason)))
    rows.sort(key=lambda row: np.inf if row.step_s is None else row.step_s)
    best = next((row.name for row in rows if row.step_s is not None and not row.deviations), None)
    cluster = problem.cluster
    table = Ways(
        loadmaster="ways",
        schema=SCHEMA_VERSION,
        source=str(getattr(question.source, "name", question.source)),
        graph=problem.graph.name,
        batch=asked.batch,
        devices=cluster.device_name,
        memory_bytes=tuple(cluster.usable_bytes.tolist()),
        best=best,
        ways=tuple(rows),
    )
    return WeighedWays(table, asked.answers)


def best_answer(found: WeighedWays) -> Answer:
    """The answer of the fastest way that keeps the numbers and can be run as a plan."""
    for way in found.table.ways:
        if way.name in found.answers and way.step_s is not None and not way.deviations:
            return found.answers[way.name]
    reasons = "; ".join(f"{way.name}: {way.reason}" for way in found.table.ways if way.reason)
    raise PlanError(f"no way that fits and can be written as a plan keeps the numbers ({reasons})")


def _make_folder(folder: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as trouble:
        raise FileError(
            f"the plans cannot be saved in {folder!r}: {trouble.strerror or trouble}; name another folder"
        ) from None


def _with_defaults(question: Question) -> Question:
    setting = setting_of(question)
    return replace(question, batch=setting.batch, seq=setting.seq, optimizer=setting.optimizer)


# ---- rows


def _make_refused_way(name: str, text: str, reason: str) -> Way:
    return Way(name, text, reason, None, None, (), None, None, "", (), "")


def _row_of_placement(
    asked: _Asked, name: str, text: str, found: Placement, exactness: str, note: str = ""
) -> Way:
    assert found.score_s is not None, "it fits"
    command = _keep(asked, name, found)
    note = "; ".join([*([note] if note else []), *_describe_processes(found)])
    deviations = (_MICRO_BATCHES,) if found.problem.is_stepped and _has_norms(asked.problem) else ()
    names = found.problem.cluster.device_name
    whole = len(names) == asked.problem.cluster.num_devices  # what is proven of one host is not of all
    bound = found.bound_s if whole and found.bound_s > 0 else None
    held = dict(zip(names, found.peak_bytes.tolist(), strict=True))
    peaks = tuple(held.get(device, 0) for device in asked.problem.cluster.device_name)
    speed = asked.batch / found.score_s if asked.batch and found.score_s else None
    gap = found.gap if whole else None
    return Way(name, text, "", found.score_s, speed, peaks, bound, gap, exactness, deviations, command, note)


def _row_of_strategy(asked: _Asked, name: str, text: str, found: StrategyAnswer) -> Way:
    command = _keep(asked, name, found)
    strategy = found.strategy
    words = [_describe_rows(found)] if name == "data_parallel" else []
    note = "; ".join([*words, *_describe_processes(found)])
    bound = found.bound_s if found.bound_s > 0 else None
    peaks = tuple(found.peak_bytes.tolist())
    return Way(
        name,
        text,
        "",
        found.score_s,
        strategy.batch / found.score_s if found.score_s else None,
        peaks,
        bound,
        found.gap,
        ROUNDING,
        strategy.semantics,
        command,
        note,
    )


def _describe_rows(found: StrategyAnswer) -> str:
    """The rows of those that share them, and what does not take part."""
    shared = [group for group in found.strategy.groups if group.mode == Mode.REPLICATE]
    if not shared:
        why = found.notes[0] if found.notes else "its rows are not known"
        raise PlanError(f"no part of the model can be cut along the batch: {why}")
    most = max(shared, key=lambda group: len(group.ops))
    note = f"rows {', '.join(map(str, most.rows))}"
    apart = [group for group in found.strategy.groups if group.mode != Mode.REPLICATE]
    return f"{note}; {found.notes[0]}" if apart and found.notes else note


def _keep(asked: _Asked, name: str, found: Answer) -> str:
    """Keep an answer, save it where there is a folder, and say what runs it."""
    asked.answers[name] = found
    if asked.folder is None or not asked.is_captured:
        return ""
    path = asked.folder / f"{name}.json"
    save(found, path)
    counts = _count_processes(found)
    if not counts:
        return f"loadmaster run {path}"
    if len(counts) == 1:
        return f"loadmaster run {path} --launch local"
    each = str(counts[0]) if len(set(counts)) == 1 else "K"
    return (
        f"torchrun --nnodes {len(counts)} --node-rank N --master-addr HOST --nproc-per-node {each}"
        f" -m loadmaster run {path}"
    )


def _count_processes(found: Answer) -> list[int]:
    """How many each host has, of the hosts that take part; none where one process has all devices."""
    used = _used_devices(found)
    if used is None:
        return []
    counts: list[int] = np.unique(found.problem.cluster.host[used], return_counts=True)[1].tolist()
    return counts


def _describe_processes(found: Answer) -> list[str]:
    counts = _count_processes(found)
    return [f"K is {', '.join(map(str, counts))}"] if len(set(counts)) > 1 else []


def _used_devices(found: Answer) -> list[int] | None:
    """Devices with a process each; None: one process has them all."""
    if isinstance(found, StrategyAnswer):
        return list(found.strategy.devices)
    if not found.problem.is_stepped or found.plan is None or found.plan.pipeline is None:
        return None
    rows = found.plan.pipeline.replica_device or (tuple(found.plan.device.tolist()),)
    return sorted({int(device) for row in rows for device in row})


def _has_norms(problem: Problem) -> bool:
    return any("batch_norm" in kind for kind in problem.graph.op_kind)


def _require_training(asked: _Asked, what: str) -> None:
    if not is_training(asked.problem.graph):
        raise InputError(f"nothing is trained in this graph, and {what} is for training")


def _require_model(asked: _Asked, what: str) -> None:
    if not is_model(asked.question.source):
        raise InputError(f"{what} needs the model itself (hf:NAME, zoo:NAME, file.py:function)")


def _require_batch(asked: _Asked) -> int:
    if asked.batch is None:
        raise InputError("the graph does not say how many samples its batch has")
    if asked.batch < 2:
        raise InputError("a batch of 1 cannot be divided; give --batch 2 or more")
    return asked.batch


def _build_at(question: Question) -> Problem:
    """The problem at another batch; a function that is asked for a batch must take one."""
    try:
        return build_problem(question)
    except InputError as problem:
        if "takes no batch" not in str(problem):
            raise
        raise InputError(
            f"it runs the model with {question.batch} rows at a time, and {question.source} takes no batch;"
            " add the argument"
        ) from None


def _require_several(asked: _Asked) -> None:
    if asked.problem.cluster.num_devices < 2:
        raise InputError("there is one device only")


# ---- ways


def _one_device(asked: _Asked, name: str, text: str) -> Way:
    found = asked.plan(asked.problem, "single_device")
    used = found.problem.cluster.device_name[int(np.bincount(_device(found)).argmax())]
    return _row_of_placement(asked, name, text, found, BIT_EQUAL, f"on {used}")


def _device(found: Placement) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
    assert found.plan is not None, "it fits"
    return found.plan.device


def _placed(asked: _Asked, name: str, text: str) -> Way:
    _require_several(asked)
    found = asked.plan_here(asked.problem, "auto")
    used = sorted(set(_device(found).tolist()))
    note = "" if len(used) > 1 else f"all on {found.problem.cluster.device_name[used[0]]}"
    return _row_of_placement(asked, name, text, found, BIT_EQUAL, note)


def _spill(asked: _Asked, name: str, text: str) -> Way:
    cluster = asked.problem.cluster
    on_host = cluster.on_host[cluster.kind]
    if not on_host.any():
        raise InputError("no host memory is among the devices; add it, e.g. cpu-64GB")
    if on_host.all():
        raise InputError("all devices are hosts; there is nothing to spill from")
    found = asked.plan_here(asked.problem, "auto", "host")
    if LOAD not in found.problem.graph.op_kind:
        raise PlanError("no weight needs to wait on the host; see 'placed'")
    return _row_of_placement(asked, name, text, found, BIT_EQUAL)


def _recompute(asked: _Asked, name: str, text: str) -> Way:
    _require_training(asked, "recomputation")
    _require_model(asked, "recomputation")
    search = FitSearch(asked.question, asked.budget, True, asked.say)
    cluster = asked.problem.cluster
    setting = replace(setting_of(asked.question), recompute=True, target=target_of(cluster))
    found = asked.plan_here(search.problem(setting, cluster), "auto")
    apart = replace(asked, folder=None, answers={})  # a saved plan would not say to recompute
    note = "in your own loop: torch.utils.checkpoint around the blocks"
    return _row_of_placement(apart, name, text, found, BIT_EQUAL, note)


def _accumulate(asked: _Asked, name: str, text: str) -> Way:
    _require_training(asked, "accumulation")
    _require_model(asked, "accumulation")
    batch = _require_batch(asked)
    passes = [k for k in range(2, batch + 1) if batch % k == 0][:_MOST_PASSES]
    problem_of = {}
    refused: LoadmasterError = PlanError("no number of passes fits")
    for k in passes:  # the fewest that fit are the quickest
        asked.say(f"{k} passes", 0.0)
        question = replace(asked.question, batch=batch // k, accumulation=k)
        try:
            problem_of[k] = _build_at(question)
            found = asked.plan_here(problem_of[k], "auto")
        except LoadmasterError as problem:
            refused = problem
            continue
        norms = (_MICRO_BATCHES,) if _has_norms(asked.problem) else ()
        row = _row_of_placement(asked, name, text, found, ROUNDING, f"{k} passes of {batch // k}")
        return replace(row, deviations=norms)
    raise refused


def _pipeline(asked: _Asked, name: str, text: str) -> Way:
    _require_several(asked)
    _require_training(asked, "a pipeline of micro-batches")
    batch = _require_batch(asked)
    tried = []
    for count in counts_of(batch)[:_MOST_PASSES]:
        asked.say(f"{count} micro-batches", 0.0)
        part = with_steps(make_microbatch(asked.problem, count), count, ONE_F_ONE_B)
        try:
            tried.append((asked.plan(part, "pipeline").score_s or 0.0, count))
        except LoadmasterError as problem:
            refused = problem
    if not tried:
        raise refused
    count = min(tried)[1]
    if is_model(asked.question.source):
        part = _build_at(replace(asked.question, batch=batch // count))
        found = asked.plan(with_steps(part, count, ONE_F_ONE_B), "pipeline")
    else:
        part = with_steps(make_microbatch(asked.problem, count), count, ONE_F_ONE_B)
        found = asked.plan(part, "pipeline")
    return _row_of_placement(asked, name, text, found, ROUNDING, f"1f1b, {count} micro-batches")


def _strategy(asked: _Asked, name: str, text: str, algorithm: str) -> Way:
    from loadmaster.strategies.ask import StrategyRequest, find_strategy

    _require_several(asked)
    _require_training(asked, "a strategy")
    batch = _require_batch(asked)
    request = StrategyRequest(
        batch=batch, algorithm=algorithm, budget=asked.budget, seed=asked.seed, progress=asked.say
    )
    return _row_of_strategy(asked, name, text, find_strategy(asked.problem, request))


def _data_parallel(asked: _Asked, name: str, text: str) -> Way:
    return _strategy(asked, name, text, "proportional")


def _mixed(asked: _Asked, name: str, text: str) -> Way:
    row = _strategy(asked, name, text, "guided")
    found = asked.answers.get(name)
    if isinstance(found, StrategyAnswer):
        modes = [group.mode for group in found.strategy.groups if Mode(group.mode)]
        counts = (f"{modes.count(mode)} {mode.value}" for mode in Mode if mode in modes)
        words = [f"groups: {', '.join(counts)}", *_describe_processes(found), *found.notes[:1]]
        return replace(row, note="; ".join(words))
    return row


def _shards(asked: _Asked, name: str, text: str) -> Way:
    _require_training(asked, "training shard by shard")
    cluster = asked.problem.cluster
    found = forecast_shards(asked.question, cluster)
    at = cluster.device_name.index(found.device)
    peaks = [0] * cluster.num_devices
    peaks[at] = found.peak_bytes
    step_s = max(found.step_s, _passes_s(asked.problem, at)) if found.step_s is not None else None
    speed = asked.batch / step_s if asked.batch and step_s else None
    note = f"{found.num_shards} shards on {found.device}"
    return Way(
        name,
        text,
        "",
        step_s,
        speed,
        tuple(peaks),
        None,
        None,
        BIT_EQUAL,
        (),
        found.command,
        note,
    )


def _passes_s(problem: Problem, device: int) -> float:
    """Seconds of all ops of both passes on a device: shards run the same ones, whatever else they do."""
    own = np.isin(problem.graph.phase, (Phase.FORWARD, Phase.BACKWARD))
    seconds = problem.costs.compute_s[own, int(problem.cluster.kind[device])]
    return float(seconds[np.isfinite(seconds)].sum())


_WAYS: dict[str, tuple[str, Callable[[_Asked, str, str], Way]]] = {
    "one_device": ("one device", _one_device),
    "placed": ("op placement", _placed),
    "spill": ("weights spilled to the host", _spill),
    "recompute": ("activations recomputed", _recompute),
    "accumulate": ("gradients accumulated", _accumulate),
    "pipeline": ("pipeline", _pipeline),
    "data_parallel": ("data parallel, rows by speed", _data_parallel),
    "mixed": ("mixed strategy", _mixed),
    "shards": ("shard by shard", _shards),
}
