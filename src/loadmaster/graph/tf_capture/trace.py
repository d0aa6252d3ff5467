"""Trace: the concrete function of a step, with its variables and what `tf.function` refused."""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from loadmaster.core.errors import InputError
from loadmaster.core.raised import shorten_error
from loadmaster.graph.tf_capture.steps import Step, specs_of

_XLA = "_XlaMustCompile"


@dataclass(frozen=True, slots=True)
class Captured:
    """What a function takes from outside beside its arguments."""

    node: str  # the placeholder's name
    tensor: Any  # a resource handle, or a constant
    variable: Any  # the tf.Variable of the handle, or None


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A concrete function, its flat arguments, captures and results by the names of their nodes."""

    concrete: Any
    args: tuple[str, ...]  # [A] nodes of the flat arguments
    captured: tuple[Captured, ...]
    outputs: tuple[str, ...]  # tensors
    specs: Any  # nest of TensorSpec
    name: str

    @property
    def results(self) -> Any:
        """The nest that the function gives."""
        return self.concrete.structured_outputs


def trace_step(step: Step, specs: Any = None) -> Traced:
    """The step's concrete function for its own example inputs or for other specs.

    It is traced twice: a first call also makes what is made only once (weights, the optimizer's state).
    """
    specs = specs_of(step.args) if specs is None else specs
    try:
        _trace_once(step, specs)
        concrete = _trace_once(step, specs)
    except InputError:
        raise
    except Exception as problem:  # the user's code may raise anything
        raise InputError(
            f"tf.function refused {step.name!r}: {shorten_error(problem)}; a step must be made of TensorFlow"
            " ops alone (no .numpy(), no Python branch on a tensor's value)"
        ) from problem
    _refuse_compiled_parts(concrete.graph.as_graph_def(), step.name)
    return _describe(concrete, specs, step.name)


def _trace_once(step: Step, specs: Any) -> Any:
    function = tf.function(step.function, autograph=step.autograph)
    return function.get_concrete_function(*specs)


def _describe(concrete: Any, specs: Any, name: str) -> Traced:
    inputs = concrete.graph.inputs
    held = concrete.captured_inputs
    num_args = len(inputs) - len(held)
    variables = {id(variable.handle): variable for variable in concrete.graph.variables}
    captured = tuple(
        Captured(inside.op.name, outside, variables.get(id(outside)))
        for outside, inside in zip(held, inputs[num_args:], strict=True)
    )
    return Traced(
        concrete,
        tuple(tensor.op.name for tensor in inputs[:num_args]),
        captured,
        tuple(tensor.name for tensor in concrete.outputs),
        specs,
        name,
    )


def _refuse_compiled_parts(graph_def: Any, name: str) -> None:
    nodes = list(graph_def.node)
    for function in graph_def.library.function:
        if _XLA in function.attr and function.attr[_XLA].b:
            nodes = [None]
            break
    if any(node is None or (_XLA in node.attr and node.attr[_XLA].b) for node in nodes):
        raise InputError(
            f"{name!r} calls a function with jit_compile=True, which XLA compiles whole; its ops cannot"
            " be placed one by one: use jit_compile=False"
        )
