"""Request: the Graph of a TensorFlow source: a model with inputs, `keras:NAME`, or a folder."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadmaster.core.errors import InputError
from loadmaster.core.graph import Graph

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its greetings are no news

import tensorflow as tf
from loadmaster.graph.origin import TENSORFLOW
from loadmaster.graph.tf_capture.keras_zoo import keras_example
from loadmaster.graph.tf_capture.optimised import OptimisedStep, optimise_step
from loadmaster.graph.tf_capture.step_graph import build_step_graph
from loadmaster.graph.tf_capture.steps import Step, load_saved_model, make_step
from loadmaster.graph.tf_capture.trace import trace_step

KERAS = "keras:"
_NOT_HERE = {
    "seq": "build the model for its length",
    "path": "it has one way only",
    "assume": "nothing is assumed",
    "accumulation": "write it into the train_step",
    "ranges": "trace it again for each size",
}


@dataclass(frozen=True, slots=True, eq=False)
class CapturedStep:
    """A step, the ops it runs, and their Graph."""

    step: Step
    optimised: OptimisedStep
    graph: Graph


def capture_step(step: Step, specs: Any = None) -> CapturedStep:
    """Trace a step and write its Graph, for its own example inputs or for other specs."""
    optimised = optimise_step(trace_step(step, specs))
    what = "training step" if step.trains else "step"
    capture = f"{TENSORFLOW} {tf.__version__}; {what} of {step.name.replace(';', ',')}"
    return CapturedStep(step, optimised, build_step_graph(optimised, name=step.name, capture=capture))


def capture_source(source: str, asked: Any) -> Graph:
    """The Graph of `keras:NAME` or of a SavedModel folder."""
    return capture_step(load_step(source, asked)).graph


def load_step(source: str, asked: Any) -> Step:
    """The step of `keras:NAME` or of a SavedModel folder, its model built."""
    refuse_options(asked, source)
    if source.startswith(KERAS):
        model, args = keras_example(source.removeprefix(KERAS), batch=asked.batch, optimizer=asked.optimizer)
        return make_step(model, args)
    if asked.optimizer is not None:
        raise InputError(
            f"{source} is an exported model, which has no optimizer; leave {asked.optimizer!r} out"
        )
    serve, args, _ = load_saved_model(source, asked.batch)
    return make_step(serve, args)


def step_of_parts(parts: Mapping[str, Any], asked: Any, source: str) -> Step:
    """The step of what a user's function gives."""
    refuse_options(asked, source)
    if asked.optimizer is not None:
        raise InputError(f"{source} brings its optimizer itself; compile the model with {asked.optimizer!r}")
    if parts.get("kwargs"):
        raise InputError(f"{source} gives kwargs; pass all inputs of a TensorFlow step by position")
    if "args" not in parts:
        raise InputError(f"{source} gives no example inputs; it must give (model, inputs)")
    return make_step(parts["model"], parts["args"])


def refuse_options(asked: Any, source: str) -> None:
    """Refuse what only a PyTorch model can be asked."""
    for name, remedy in _NOT_HERE.items():
        if getattr(asked, name) is not None:
            raise InputError(f"{source} is a TensorFlow model, which has no {name}: {remedy}")
    if asked.precision != "fp32":
        raise InputError(
            f"{source} is TensorFlow's, whose precision is its own; set it where the model is built, e.g."
            " keras.config.set_dtype_policy('mixed_bfloat16')"
        )
    if asked.recompute:
        raise InputError(
            f"{source} is a TensorFlow model; recomputation is written into it (tf.recompute_grad)"
        )
