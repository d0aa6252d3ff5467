"""Changes: what would make it fit, in the order of what it costs, each checked by simulation.

    accumulate    a smaller batch, several passes a step: the same gradients, up to rounding
    precision     activations in 16 bits: usually faster, seldom less accurate
    recompute     blocks run again in the backward pass: the same numbers, a third more compute
    weights       16-bit weights and moments: small updates may be lost to rounding
    optimizer     one that keeps less: it learns differently
    host          host memory as a device: the same numbers, but the bus is slow
    shards        shard by shard (`lt.train`): the same numbers, weights wait in host memory
    devices       more devices like those
    device        the smallest one that holds it alone

What needs a capture is checked until one change fits; a combination is tried where none of them does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from loadmaster.capacity.clusters import (
    limit_of,
    preset_cluster,
    single_device_cluster,
    with_more,
    with_preset,
)
from loadmaster.capacity.fit_search import FitSearch
from loadmaster.capacity.host_kernels import judge_mixed_cluster
from loadmaster.capacity.shard_training import forecast_shards
from loadmaster.capacity.step_setting import StepSetting, is_training
from loadmaster.capacity.verdict import Verdict, judge_cluster, judge_single_device, needed_bytes
from loadmaster.cluster.presets import KINDS, KindPreset
from loadmaster.core.answers.fit_answer import Change
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import ClusterError, LoadmasterError
from loadmaster.core.graph import Phase
from loadmaster.core.units import format_bytes

_LEANER: dict[str, tuple[str, ...]] = {
    "adamw": ("adafactor", "momentum", "sgd"),
    "adam": ("adafactor", "momentum", "sgd"),
    "momentum": ("adafactor", "sgd"),
    "adafactor": ("sgd",),
    "sgd": (),
}
_HOST = replace(KINDS["cpu16"], memory_bytes=64 * 10**9)
_MOST_MORE = 64  # devices
_TRIES = 4
NOT_A_DEVICE = "ref"


@dataclass(frozen=True, slots=True)
class _Idea:
    """A change that is not checked yet."""

    name: str
    text: str
    price: str
    setting: StepSetting
    cluster: Cluster | None
    captures: bool = True


def propose_changes(
    search: FitSearch, setting: StepSetting, cluster: Cluster | None, verdict: Verdict, *, every: bool = False
) -> Iterator[Change]:
    """Changes to a step that does not fit, the cheapest first; `every`: check all of them."""
    found = False
    for idea in _list_ideas(search, setting, cluster, verdict):
        if found and idea.captures and not every:
            yield Change(idea.name, idea.text, idea.price, None, "not checked: a cheaper one fits", None)
            continue
        change = _check_idea(search, idea)
        found |= bool(change.fits)
        yield change
    if search.is_model and is_training(verdict.problem.graph):
        change = _try_shards(search, setting, verdict.problem.cluster)
        found |= bool(change.fits)
        yield change
    several = bool(_smaller_batches(setting)) and search.is_model and is_training(verdict.problem.graph)
    if several and not found:
        yield _check_idea(search, _combine_ideas(setting, cluster))
    yield from _propose_hardware(search, setting, verdict)


def _check_idea(search: FitSearch, idea: _Idea) -> Change:
    search.say(f"trying: {idea.text}", 0.0)
    try:
        asked = search.problem(idea.setting, idea.cluster)
        found = judge_mixed_cluster(search, idea.setting, asked)
    except LoadmasterError as problem:  # such a step cannot be captured
        return Change(idea.name, idea.text, idea.price, False, str(problem), None)
    return _make_change(idea.name, idea.text, idea.price, found, passes=idea.setting.passes)


def _try_shards(search: FitSearch, setting: StepSetting, cluster: Cluster) -> Change:
    """The trainer's own forecast, on the accelerator with most memory."""
    text, price = "train shard by shard (lt.train)", "same numbers; weights wait in host memory"
    search.say(f"trying: {text}", 0.0)
    asked = replace(
        search.question,
        batch=setting.batch,
        seq=setting.seq,
        optimizer=setting.optimizer,
        precision=setting.precision,
    )
    try:
        found = forecast_shards(asked, cluster)
    except LoadmasterError as problem:
        return Change("shards", text, price, False, str(problem), None)
    text = f"{text} on {found.device}: {format_bytes(found.peak_bytes)}"
    price = f"same numbers; {format_bytes(found.host_bytes)} of host memory"
    reason = f"{found.num_shards} shards, bound by {found.bound_by}: {found.command}"
    return Change("shards", text, price, True, reason, found.step_s)


def _make_change(name: str, text: str, price: str, found: Verdict, *, passes: int = 1) -> Change:
    seconds = found.step_s * passes if found.fits and found.step_s is not None else None
    return Change(name, text, price, found.fits, found.reason, seconds)


def _list_ideas(
    search: FitSearch, setting: StepSetting, cluster: Cluster | None, verdict: Verdict
) -> Iterator[_Idea]:
    """Changes of how the step is run, on the same devices; last, host memory besides."""
    graph = verdict.problem.graph
    trains = is_training(graph)
    if search.is_model and trains:
        yield from _find_fitting_passes(search, setting, cluster)
    has_weights = bool((graph.phase == Phase.PARAM).any())
    mixed, narrow = _lower_precisions(search, setting) if has_weights else (None, None)
    if mixed is not None:
        price = "activations in 16 bits; usually faster"
        yield _Idea("precision", f"precision {mixed}", price, replace(setting, precision=mixed), cluster)
    if search.is_model and trains:
        price = "same numbers; the forward pass is computed twice"
        yield _Idea("recompute", "recompute activations", price, replace(setting, recompute=True), cluster)
    if narrow is not None:
        text, price = f"precision {narrow} (16-bit weights)", "small updates may be lost to rounding"
        yield _Idea("weights", text, price, replace(setting, precision=narrow), cluster)
    for other in _leaner_optimizers(setting, trains=trains and has_weights):
        price = "converges differently; retune the rate"
        yield _Idea(
            "optimizer",
            f"optimizer {other}",
            price,
            replace(setting, optimizer=other),
            cluster,
            search.is_model,
        )
    devices = verdict.problem.cluster
    if not devices.on_host[devices.kind].any():
        price = "same numbers; data on the host crosses the bus"
        yield _Idea(
            "host", "host memory as a device (cpu-64GB)", price, setting, with_preset(devices, _HOST), False
        )


def _lower_precisions(search: FitSearch, setting: StepSetting) -> tuple[str | None, str | None]:
    """A mixed precision and one of 16-bit weights, where the step is not in them already."""
    if not search.is_model:  # of other graphs only weights with an optimizer know a precision
        return "mixed" if setting.precision == "fp32" and setting.optimizer is not None else None, None
    mixed = "bf16-mixed" if setting.precision == "fp32" else None
    return mixed, None if setting.precision == "bf16" else "bf16"


def _leaner_optimizers(setting: StepSetting, *, trains: bool) -> tuple[str, ...]:
    return _LEANER.get((setting.optimizer or "adamw").lower(), ()) if trains else ()


def _smaller_batches(setting: StepSetting) -> list[int]:
    """Batches of which several passes make the whole, largest first."""
    whole = setting.batch or 1
    return [batch for batch in range(whole - 1, 0, -1) if whole % batch == 0]


def _find_fitting_passes(search: FitSearch, setting: StepSetting, cluster: Cluster | None) -> Iterator[_Idea]:
    """The largest batch that divides the whole and fits, or else the smallest; none where the batch is 1."""
    smaller = _smaller_batches(setting)
    for batch in smaller:
        passes = (setting.batch or 1) // batch
        text = f"batch {batch}, {passes} passes a step"
        idea = _Idea(
            "accumulate",
            text,
            "same gradients up to rounding; smaller passes",
            replace(setting, batch=batch, passes=passes),
            cluster,
        )
        if batch == smaller[-1] or (_may_fit(search, setting, idea) and _check_idea(search, idea).fits):
            yield idea
            return


def _may_fit(search: FitSearch, setting: StepSetting, idea: _Idea) -> bool:
    """Whether a smaller batch is worth a capture, by the line through those at two batches."""
    assert idea.setting.batch is not None
    assert idea.cluster is not None, "models bring no devices"
    try:
        asked = replace(setting, passes=idea.setting.passes)
        guess = search.guess(asked, idea.setting.batch, idea.cluster)
    except LoadmasterError:  # a batch cannot be chosen: the check itself will say so
        return True
    return guess is None or judge_cluster(search, guess).fits


def _combine_ideas(setting: StepSetting, cluster: Cluster | None) -> _Idea:
    """All that leaves optimizer and devices alone."""
    whole = setting.batch or 1
    precision = "bf16-mixed" if setting.precision == "fp32" else setting.precision
    text = f"batch 1, {whole} passes, {precision}, recompute: all at once"
    together_ = replace(setting, batch=1, passes=whole, precision=precision, recompute=True)
    return _Idea("combined", text, "as each of them", together_, cluster)


# ---- other devices


def _propose_hardware(search: FitSearch, setting: StepSetting, verdict: Verdict) -> Iterator[Change]:
    """More devices like the largest, and the smallest other one."""
    devices = verdict.problem.cluster
    like = int(np.where(devices.on_host[devices.kind], -1, devices.usable_bytes).argmax())
    yield _try_more_devices(search, setting, devices, like, _needed_bytes_of(search, setting, devices, like))
    smallest = find_smallest_preset(search, setting, host=bool(devices.on_host[devices.kind[like]]))
    price = "another device"
    if smallest is None:
        yield Change("device", "one larger device", price, False, "no preset holds it alone", None)
        return
    found = judge_single_device(search, search.problem(setting, preset_cluster(smallest)))
    text = f"1x{smallest.name} ({format_bytes(smallest.memory_bytes)}) alone"
    yield _make_change("device", text, price, found)


def _needed_bytes_of(search: FitSearch, setting: StepSetting, cluster: Cluster, device: int) -> int:
    """The peak in the step's own order, whatever the device holds."""
    return needed_bytes(search.problem(setting, single_device_cluster(cluster, device)))


def _try_more_devices(
    search: FitSearch, setting: StepSetting, devices: Cluster, like: int, need_bytes: int
) -> Change:
    """So many devices more as there is memory lacking, and a few tries beyond."""
    room = limit_of(devices, like) or 1
    have = int(devices.usable_bytes.astype(np.float64).sum())
    first = max(-(-(need_bytes - have) // room), 1)
    kind, price = devices.kind_name[devices.kind[like]], "more devices"
    num, verdict = first, None
    for num in range(first, min(first + _TRIES, _MOST_MORE + 1)):
        search.say(f"trying: {num} more {kind}", 0.0)
        asked = search.problem(setting, with_more(devices, like, num))
        verdict = judge_mixed_cluster(search, setting, asked)
        if verdict.fits:
            break
    if verdict is None:
        text = f"more than {_MOST_MORE} more {kind}"
        return Change("devices", text, price, False, f"{first} would be needed", None)
    return _make_change("devices", f"{'' if verdict.fits else 'up to '}{num} more {kind}", price, verdict)


def find_smallest_preset(search: FitSearch, setting: StepSetting, *, host: bool) -> KindPreset | None:
    """The device with the least memory that holds the step alone."""
    kinds = [kind for kind in KINDS.values() if kind.on_host == host and kind.name != NOT_A_DEVICE]
    for kind in sorted(kinds, key=lambda kind: (kind.memory_bytes, kind.name)):
        try:
            problem = search.problem(setting, preset_cluster(kind))
        except ClusterError:  # what is kept free is all it has
            continue
        if needed_bytes(problem) <= problem.cluster.usable_bytes[0]:
            return kind
    return None
