"""Fit: the whole answer, put together from verdicts, breakdowns, batches and changes."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from loadmaster.capacity.breakdown import modules_of, parts_of
from loadmaster.capacity.changes import NOT_A_DEVICE, propose_changes
from loadmaster.capacity.clusters import limit_of, preset_cluster, single_device_cluster
from loadmaster.capacity.fit_search import FitSearch
from loadmaster.capacity.host_kernels import is_mixed, judge_mixed_cluster
from loadmaster.capacity.largest import find_largest_batch, guess_largest_batch
from loadmaster.capacity.peak_moment import replay_to_peaks
from loadmaster.capacity.step_setting import StepSetting, setting_of
from loadmaster.capacity.verdict import (
    Verdict,
    judge_cluster,
    judge_single_device,
    needed_bytes,
    plan_on_device,
)
from loadmaster.cluster.parse import parse_cluster, with_reserve
from loadmaster.cluster.presets import KINDS
from loadmaster.core.answers.fit_answer import (
    SCHEMA_VERSION,
    Change,
    ClusterFit,
    DeviceFit,
    Fit,
    LargestBatch,
    PresetFit,
)
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import ClusterError, LoadmasterError
from loadmaster.core.problem import Problem
from loadmaster.core.question import Question
from loadmaster.core.run import Budget, ignore_progress
from loadmaster.core.units import parse_bytes
from loadmaster.graph.source import is_model
from loadmaster.questions.problem import target_of
from loadmaster.simulator.events.engine import prepare


def answer_fit(
    question: Question,
    *,
    budget: Budget,
    quick: bool = False,
    every: bool = False,
    progress: Callable[[str, float], None] = ignore_progress,
) -> Fit:
    """Read what must be read, and answer; `quick`: no other batch, no change."""
    devices, reserve = question.devices, parse_bytes(question.reserve_bytes)
    cluster = parse_cluster(devices, max_bytes=question.max_bytes) if devices is not None else None
    search = FitSearch(question, budget, is_model(question.source), progress)
    setting = setting_of(question)
    if not search.is_model:
        workload = search.workload(setting)
        cluster = workload.cluster if cluster is None else cluster
        setting = replace(setting, optimizer=setting.optimizer or workload.optimizer)
    if cluster is not None and reserve:
        cluster = with_reserve(cluster, reserve)
    return _assess_fit(search, setting, cluster, quick=quick, every=every)


def _assess_fit(
    search: FitSearch, setting: StepSetting, cluster: Cluster | None, *, quick: bool, every: bool
) -> Fit:
    """Everything there is to say."""
    named = search.question.devices is not None
    meant = cluster if cluster is not None else preset_cluster(KINDS["H100"])  # any accelerator
    base = _with_target(search, setting, meant)
    lone = search.problem(base, single_device_cluster(meant, _roomiest_device(meant)))
    whole = _assess_cluster(search, base, cluster, quick=quick) if cluster is not None else None
    offers: list[Change] = []
    if whole is not None and not whole[0].fits and not quick:
        offers = list(propose_changes(search, base, cluster, whole[0], every=every))
    graph = lone.graph
    _, held = replay_to_peaks(prepare(lone), plan_on_device(lone))
    return Fit(
        loadmaster="fit",
        schema=SCHEMA_VERSION,
        source=_title_of(search.question),
        graph=graph.name,
        capture=graph.capture,
        assumptions=graph.assumptions,
        warnings=graph.warnings,
        notes=graph.notes,
        num_ops=graph.num_ops,
        batch=setting.batch,
        seq=setting.seq,
        optimizer=setting.optimizer,
        precision=setting.precision,
        fits=whole[1].fits if whole is not None else None,
        parts=parts_of(graph, held[0]),
        modules=modules_of(graph, held[0]),
        devices=tuple(_assess_devices(search, setting, cluster, quick=quick)) if cluster is not None else (),
        cluster=whole[1] if whole is not None else None,
        presets=() if named else tuple(_assess_presets(search, setting, quick=quick)),
        changes=tuple(offers),
        cheapest=next((change.name for change in offers if change.fits), None),
    )


def _title_of(question: Question) -> str:
    """What to call the source."""
    graph = getattr(question.source, "graph", question.source)
    return str(getattr(graph, "name", graph))


def _with_target(search: FitSearch, setting: StepSetting, cluster: Cluster) -> StepSetting:
    return replace(setting, target=target_of(cluster)) if search.is_model else setting


def _roomiest_device(cluster: Cluster) -> int:
    """The device of the kind that is meant: an accelerator where there is one."""
    return int(np.where(cluster.on_host[cluster.kind], -1, cluster.usable_bytes).argmax())


def _assess_devices(
    search: FitSearch, setting: StepSetting, cluster: Cluster, *, quick: bool
) -> Iterator[DeviceFit]:
    """Every device alone; devices that are alike are asked once."""
    known: dict[tuple[int, int], DeviceFit] = {}
    for d, name in enumerate(cluster.device_name):
        alike = int(cluster.kind[d]), int(cluster.usable_bytes[d])
        if alike not in known:
            known[alike] = _assess_device(search, setting, single_device_cluster(cluster, d), quick=quick)
        yield replace(known[alike], device=name)


def _assess_device(search: FitSearch, setting: StepSetting, cluster: Cluster, *, quick: bool) -> DeviceFit:
    own = _with_target(search, setting, cluster)
    problem = search.problem(own, cluster)
    verdict, limit = judge_single_device(search, problem), limit_of(cluster, 0)
    return DeviceFit(
        device=cluster.device_name[0],
        kind=cluster.kind_name[0],
        memory_bytes=limit,
        needs_bytes=verdict.peak_bytes[0] if verdict.fits else needed_bytes(problem),
        fits=verdict.fits,
        proven=verdict.proven,
        reason=verdict.reason,
        step_s=verdict.step_s if verdict.fits else None,
        largest=_find_largest_batch(
            search, own, cluster, lambda p: judge_single_device(search, p).fits, quick=quick
        ),
    )


def _assess_cluster(
    search: FitSearch, setting: StepSetting, cluster: Cluster, *, quick: bool
) -> tuple[Verdict, ClusterFit]:
    """All devices, by a plan, with what each of them holds."""
    search.say("looking for a plan on all devices", 0.0)
    verdict = judge_mixed_cluster(search, setting, search.problem(setting, cluster))
    simulator = prepare(verdict.problem)
    outcome, held = replay_to_peaks(simulator, verdict.plan)
    counted = setting
    if is_mixed(cluster) and "kernels of cuda" not in verdict.problem.graph.capture:
        counted = replace(setting, target="cpu")  # the kernels that the answer above is counted with
    largest = _find_largest_batch(
        search, counted, cluster, lambda p: judge_cluster(search, p).fits, quick=quick
    )
    return verdict, ClusterFit(
        devices=cluster.device_name,
        memory_bytes=tuple(limit_of(cluster, d) for d in range(cluster.num_devices)),
        fits=verdict.fits,
        proven=verdict.proven,
        reason=verdict.reason,
        algorithm=verdict.algorithm,
        step_s=verdict.step_s if verdict.fits else None,
        peak_bytes=tuple(outcome.peak_bytes.tolist()),
        parts=tuple(parts_of(verdict.problem.graph, what) for what in held),
        largest=largest,
    )


def _find_largest_batch(
    search: FitSearch,
    setting: StepSetting,
    cluster: Cluster,
    judge: Callable[[Problem], bool],
    *,
    quick: bool,
) -> LargestBatch | None:
    """None where the batch is not ours to choose, or nobody waits for it."""
    if quick or not search.is_model:
        return None
    if any(limit_of(cluster, d) is None for d in range(cluster.num_devices)):
        return LargestBatch(None, True, "the device has no memory limit")
    return find_largest_batch(search, setting, cluster, judge)


def _assess_presets(search: FitSearch, setting: StepSetting, *, quick: bool) -> Iterator[PresetFit]:
    """Every kind of device that can be named, alone; largest batches are read off the line."""
    for kind in KINDS.values():
        if kind.name == NOT_A_DEVICE:
            continue
        cluster = preset_cluster(kind)
        own = _with_target(search, setting, cluster)
        try:
            problem = search.problem(own, cluster)
        except ClusterError:  # what is kept free is all it has
            continue
        needs, usable = needed_bytes(problem), int(problem.cluster.usable_bytes[0])
        largest = None
        if search.is_model and not quick and setting.batch is not None:
            largest = _guess_largest_batch(search, own, cluster)
        yield PresetFit(kind.name, usable, needs, needs <= usable, largest)


def _guess_largest_batch(search: FitSearch, setting: StepSetting, cluster: Cluster) -> LargestBatch:
    try:
        found = guess_largest_batch(
            search, setting, cluster, lambda p: needed_bytes(p) <= p.cluster.usable_bytes[0]
        )
    except LoadmasterError as problem:
        return LargestBatch(None, False, str(problem))
    return LargestBatch(found, False, "" if found is not None else "captures at two batch sizes differ")
