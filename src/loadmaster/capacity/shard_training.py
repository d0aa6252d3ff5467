"""Shard training: the model that a question names, trained shard by shard on one of its devices.

The step and its memory are those of the trainer's own forecast (`shards/plan/forecast`), at the rates of the
kind of device that is asked about.
"""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from loadmaster.capacity.clusters import limit_of
from loadmaster.cluster.presets import find_kind, link_preset
from loadmaster.core.answers.shard_forecast import ShardForecast
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import InputError
from loadmaster.core.graph import Dtype
from loadmaster.core.question import Question
from loadmaster.graph.framework import is_tensorflow_model
from loadmaster.graph.models import CaptureOptions, is_tensorflow_source, load_model_parts
from loadmaster.graph.source import is_model

if TYPE_CHECKING:
    from loadmaster.shards.plan.rates import Rates
    from loadmaster.shards.spec.trial import Trial

_PRECISION = {"fp32": "fp32", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}
_DTYPE = {"fp32": Dtype.FLOAT32, "bf16": Dtype.BFLOAT16, "fp16": Dtype.FLOAT16}
_BUS = "pcie4"  # of a kind that no preset knows


def forecast_shards(question: Question, cluster: Cluster, device: int | None = None) -> ShardForecast:
    """The forecast on a device of the cluster; without one, the accelerator that holds most.

    Raises a `LoadmasterError` that says why it cannot be trained so.
    """
    from loadmaster.shards.plan.forecast import forecast_trial

    at = _roomiest_accelerator(cluster) if device is None else device
    cap_bytes = limit_of(cluster, at)
    if cap_bytes is None:
        raise InputError(f"{cluster.device_name[at]} has no memory limit; the whole model stays there")
    trial = trial_of(question)
    rates = rates_of(cluster, at, trial.precision)
    return forecast_trial(trial, device=cluster.device_name[at], cap_bytes=cap_bytes, rates=rates)


def trial_of(question: Question) -> "Trial":
    """One step of the model that a question names, as the trainer would take it."""
    from loadmaster.shards.spec.trial import Trial

    source = question.source
    if not is_model(source):
        raise InputError(f"{source!r} is a graph; only a model can be trained (hf:NAME, file.py:function)")
    assert isinstance(source, str), "models are named"
    if question.precision not in _PRECISION:
        raise InputError(
            f"shard-by-shard training keeps fp32 weights; precision {question.precision!r} has others"
        )
    asked = CaptureOptions.of(question)
    held = "cpu" if source.startswith("zoo:") else "meta"  # their losses hold targets, and they are small
    parts = None if is_tensorflow_source(source) else load_model_parts(source, asked, device=held)
    if parts is None or is_tensorflow_model(parts["model"]):
        raise InputError("shard-by-shard training is for PyTorch models, and this is one of TensorFlow")
    inputs, loss, optimizer = _bind_inputs(parts), parts.get("loss"), parts.get("optimizer") or "adamw"
    return Trial(
        name=str(parts.get("name") or source),
        build=lambda: parts["model"],
        data=lambda: [(inputs, None)],
        loss=lambda out, _: _compute_loss(out, loss),
        optim=lambda weights: _make_optimizer(optimizer, weights),
        precision=_PRECISION[question.precision],  # type: ignore[arg-type]
        verify=False,
    )


def rates_of(cluster: Cluster, device: int, precision: str) -> "Rates":
    """Of a kind of GPU: its peaks and its bus, at the shares of them that a typical one reaches."""
    from loadmaster.shards.plan.rates import typical_rates

    kind = int(cluster.kind[device])
    preset = find_kind(cluster.kind_name[kind])
    bus = link_preset(_BUS if preset is None or preset.on_host else preset.bus).bytes_per_s
    peak = float(cluster.flops_per_s[kind, _DTYPE[precision]])
    return typical_rates(precision, peak_flops_per_s=peak, bus_bytes_per_s=bus)


def _roomiest_accelerator(cluster: Cluster) -> int:
    """The device for it: of those with most memory the first."""
    room = np.where(cluster.on_host[cluster.kind], -1, cluster.usable_bytes)
    if (room < 0).all():
        raise InputError(
            "shard-by-shard training brings weights from the host's memory to an accelerator; there is none"
        )
    return int(room.argmax())


def _bind_inputs(parts: Mapping[str, Any]) -> Any:
    """The model's inputs by name, where its forward names them."""
    args, kwargs = tuple(parts.get("args") or ()), dict(parts.get("kwargs") or {})
    if not kwargs:
        return args
    if not args:
        return kwargs
    try:
        bound = inspect.signature(parts["model"].forward).bind(*args, **kwargs)
    except (TypeError, ValueError) as problem:
        raise InputError(f"the model's inputs cannot be given by name: {problem}") from None
    found = dict(bound.arguments)
    variadic = [each.name for each in bound.signature.parameters.values() if each.name in found]
    for name in variadic:
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name)
        elif bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            raise InputError("the model takes any number of inputs by position beside named ones")
    return found


def _compute_loss(out: Any, loss: Any) -> Any:
    from loadmaster.modules.loss import compute_loss

    return compute_loss(out, loss)


def _make_optimizer(optimizer: Any, weights: Any) -> Any:
    from loadmaster.modules.named_optimizers import make_optimizer

    return make_optimizer(optimizer, list(weights))
