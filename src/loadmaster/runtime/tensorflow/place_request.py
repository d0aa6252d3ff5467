"""Place requests for TensorFlow: a Keras model or a function, checked and placed."""

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import InputError, PlanError, UnknownNameError
from loadmaster.core.io import load
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Plan
from loadmaster.core.reasons import why_none_fits_in_short
from loadmaster.graph.origin import is_tensorflow_graph
from loadmaster.graph.tf_capture.request import CapturedStep, capture_step
from loadmaster.graph.tf_capture.steps import Step, is_keras_model, make_step, refuse_xla
from loadmaster.runtime.tensorflow.devices import locate_devices
from loadmaster.runtime.tensorflow.placed_model import PlacedFunction, PlacedModel
from loadmaster.runtime.tensorflow.placed_step import PlacedStep

OPTIONS = ("budget", "costs")


def check_place_request(model: Any, wishes: Mapping[str, Any]) -> None:
    """Refuse options that only PyTorch models have."""
    given = [name for name, value in wishes.items() if name not in OPTIONS and value is not None]
    if given:
        raise UnknownNameError("argument of place for a TensorFlow model", given[0], OPTIONS)
    if isinstance(model, PlacedFunction):
        raise InputError("the model is placed already; place the original model")
    if isinstance(model, type):
        raise InputError(f"{model.__name__} is a class; pass an instance, {model.__name__}(...)")
    refuse_xla(model)


def resolve_placement(given: Any) -> Placement | None:
    """The Placement that is given, or lies in the file that is named; None where inputs are given."""
    if isinstance(given, str | os.PathLike):
        given = load(given)
        if not isinstance(given, Placement):
            raise InputError(f"the file holds a {type(given).__name__}; it must hold what lm.plan returns")
    if isinstance(given, Placement):
        return given
    if isinstance(given, Plan):
        raise InputError(
            "a bare Plan does not name its ops; pass what lm.plan(problem, algorithm=plan) returns"
        )
    return None


def capture_example(model: Any, given: Any) -> CapturedStep:
    """The step of a model on example inputs, with its graph."""
    return capture_step(make_step(model, given))


def start_devices(cluster: Cluster) -> None:
    """Make the logical devices of a plan that is still to be made: later is too late."""
    locate_devices(cluster)


def refuse_planning_options(devices: Any, wishes: Mapping[str, Any]) -> None:
    """Refuse options that only matter for planning, if there is a plan already."""
    if devices != "auto":
        raise InputError("the plan has its devices already; leave devices out, or pass inputs to plan again")
    for name in OPTIONS:
        if wishes.get(name) is not None:
            raise InputError(f"the plan is made already; leave {name} out, or pass inputs to plan again")


def place_on_plan(model: Any, placement: Placement, wishes: Mapping[str, Any]) -> PlacedFunction:
    """The model or function on the devices of a plan."""
    step = model if isinstance(model, Step) else _step_without_inputs(model, placement)
    return place_step(step, placement)


def place_captured(captured: CapturedStep, placement: Placement) -> PlacedFunction:
    """A step on the plan that was just made of its graph."""
    made = place_step(captured.step, placement)
    if not made.step.is_ready:
        made.step.start(captured)
    return made


def place_step(step: Step, placement: Placement) -> PlacedFunction:
    """A step on its plan; it is traced at its first call."""
    require_plan(placement)
    placed = PlacedStep(step, placement, locate_devices(placement.problem.cluster))
    return PlacedFunction(placed) if step.model is None else PlacedModel(placed)


def require_plan(placement: Placement) -> None:
    """Refuse what holds no plan, or none for TensorFlow."""
    plan = placement.plan
    if plan is None:
        raise PlanError(f"{why_none_fits_in_short(placement)}; lm.fit says which change is the cheapest")
    if not is_tensorflow_graph(placement.problem.graph):
        raise PlanError(
            f"the plan is of {placement.problem.graph.name!r}, which is not TensorFlow's; plan this model"
        )
    for what, wanted in (("a pipeline", plan.pipeline is not None), ("recomputation", plan.recompute.any())):
        if wanted:
            raise PlanError(f"the plan has {what}, which TensorFlow models are not run with; plan without it")


def _step_without_inputs(model: Any, placement: Placement) -> Step:
    """What the plan says of inputs is known when the first batch comes."""
    if not is_keras_model(model):
        return make_step(model, ())
    if "; training step of" in placement.problem.graph.capture:
        if not model.compiled:
            raise InputError("the plan is of a training step; call model.compile(optimizer, loss) before")
        return make_step(model, (tf.TensorSpec([]), tf.TensorSpec([])))
    return make_step(model, tf.TensorSpec([]))
