"""Placed step: a step whose every op runs on the device of its plan.

The step is traced, optimised once as TensorFlow would (`tf_capture.optimised`), and imported again with a
device on every node. It is called with soft placement off and TensorFlow's own optimiser off: no op moves,
and no op is replaced, so that a plan does not change the numbers. For inputs of other sizes (the last batch
of an epoch) it is traced again; ops are known by their names, and an op that the plan does not have goes
where its inputs are.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context as eager_context  # options of a single call are nowhere else

import tensorflow as tf
from loadmaster.core.errors import PlanError, RunError
from loadmaster.core.graph import Graph
from loadmaster.core.placement import Placement
from loadmaster.graph.differences import list_differences
from loadmaster.graph.tf_capture.optimised import OptimisedStep, optimise_step
from loadmaster.graph.tf_capture.request import CapturedStep, capture_step
from loadmaster.graph.tf_capture.step_graph import INPUT
from loadmaster.graph.tf_capture.steps import Step, specs_of
from loadmaster.graph.tf_capture.trace import Traced, trace_step
from loadmaster.runtime.tensorflow.devices import PlacedDevice
from loadmaster.runtime.tensorflow.variables import copy_variable, move_variable

_LEAST_SHARE = 0.5  # of the plan's work that another trace must have by name


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """A traced and placed function."""

    call: Callable[..., Any]
    results: Any  # nest of what it gives
    device_of: Mapping[str, int]  # by node
    optimised: OptimisedStep


@dataclass(slots=True, eq=False)
class PlacedStep:
    """A step on a plan; call it like the function it was made of."""

    step: Step
    placement: Placement
    devices: tuple[PlacedDevice, ...]
    copies: bool = False  # it works on copies of the variables, which stay as and where they are
    planned: dict[str, int] = field(default_factory=dict)  # device by op
    _ready: dict[Any, _Ready] = field(default_factory=dict)
    _options: Any = None
    _has_run: bool = False
    _homes: dict[int, int] = field(default_factory=dict)  # id of a variable -> its device
    _copied: dict[int, Any] = field(default_factory=dict)  # id of a variable -> its copy

    def __post_init__(self) -> None:
        """Devices by the names of ops."""
        plan = self.placement.plan
        assert plan is not None, "checked before"
        self.planned = dict(zip(self.placement.problem.graph.op_name, plan.device.tolist(), strict=True))

    def __call__(self, *args: Any) -> Any:
        """One step."""
        flat = [value if tf.is_tensor(value) else tf.convert_to_tensor(value) for value in _flatten(args)]
        ready = self._ready.get(_key(flat)) or self._prepare(args, flat)
        self._has_run = True
        with self._call_options():
            given = ready.call(*flat)
        return _pack(ready.results, given)

    @property
    def is_ready(self) -> bool:
        """Whether it has been traced."""
        return bool(self._ready)

    def device_of_ops(self) -> dict[str, str]:
        """Where each op of the last trace is, as TensorFlow names devices."""
        last = next(reversed(self._ready.values()), None)
        found = last.device_of if last is not None else {}
        return {name: self.devices[d].where for name, d in found.items()}

    def traced_for(self, *args: Any) -> Traced:
        """The step as it was traced for inputs of these sizes: what TensorFlow runs unplaced."""
        flat = _flatten(args)
        ready = self._ready.get(_key(flat)) or self._prepare(args, flat)
        return ready.optimised.traced

    def copy_of(self, variable: Any) -> Any:
        """The copy of a variable that the step works on."""
        return self._copied[id(variable)]

    def import_again(self) -> None:
        """New functions of ops that have run: TensorFlow tells of a function at its first run only."""
        if not self._has_run:
            return
        for key, ready in self._ready.items():
            call = _import_placed(ready.optimised, ready.device_of, self.devices, self._copied)
            self._ready[key] = replace(ready, call=call)

    def start(self, captured: CapturedStep | None = None) -> None:
        """Trace the step for the sizes of its plan, check that it is the plan's, and move its variables."""
        captured = captured or capture_step(self.step)
        self._require_same(captured.graph)
        self._add(captured.optimised, self.planned)

    def _prepare(self, args: Any, flat: list[Any]) -> _Ready:
        """Trace for inputs of sizes that were not seen before."""
        specs = specs_of(args)
        _run_eagerly(lambda: self._trace_and_place(specs))
        return self._ready[_key(flat)]

    def _trace_and_place(self, specs: Any) -> None:
        if not self._ready:
            self.start(capture_step(self.step, self._planned_specs(specs)))
        if _key(_flatten(specs)) not in self._ready:
            optimised = optimise_step(trace_step(self.step, specs))
            self._add(optimised, self._devices_by_name(optimised))

    def _planned_specs(self, specs: Any) -> Any:
        """The given nest with the shapes that the plan was made for."""
        graph = self.placement.problem.graph
        inputs = [op for op, kind in enumerate(graph.op_kind) if kind == INPUT]
        planned = [_parse_spec(graph.signature_table[graph.signature[op]]) for op in inputs]
        flat = _flatten(specs)
        if len(flat) != len(planned) or any(
            one.dtype != other.dtype or (one.shape.rank is not None and one.shape.rank != other.shape.rank)
            for one, other in zip(flat, planned, strict=True)
        ):
            raise PlanError(
                f"the plan is for inputs {_describe(planned)}, and the step got {_describe(flat)};"
                " pass inputs like those of the plan, or plan again"
            )
        rest = iter(planned)
        return tf.nest.map_structure(lambda spec: None if spec is None else next(rest), specs)

    def _require_same(self, graph: Graph) -> None:
        changed = list_differences(self.placement.problem.graph, graph)
        if changed:
            raise PlanError(
                f"the plan is for another version of {self.step.name!r} than this one: {'; '.join(changed)};"
                " plan it again"
            )

    def _devices_by_name(self, optimised: OptimisedStep) -> dict[str, int]:
        """Planned devices of the same names; other ops follow their inputs or readers."""
        nodes = optimised.graph_def.node
        known = {node.name for node in nodes} & set(self.planned)
        graph = self.placement.problem.graph
        flops = dict(zip(graph.op_name, (graph.flops + 1.0).tolist(), strict=True))
        share = sum(flops[name] for name in known) / sum(flops.values())
        if share < _LEAST_SHARE:
            raise PlanError(
                f"for these inputs {self.step.name!r} runs other ops: the plan has {100 * share:.0f} % of its"
                " work; plan it for inputs like these"
            )
        return {name: self.planned[name] for name in known}

    def _add(self, optimised: OptimisedStep, known: Mapping[str, int]) -> None:
        device_of = _complete(optimised, known, self._homes)
        for held in optimised.captured:
            if held.variable is not None and id(held.variable) not in self._homes:
                home = device_of.setdefault(held.node, 0)
                if self.copies:
                    self._copied[id(held.variable)] = copy_variable(held.variable, self.devices[home].where)
                else:
                    move_variable(held.variable, self.devices[home].where)
                self._homes[id(held.variable)] = home
        call = _import_placed(optimised, device_of, self.devices, self._copied)
        specs = _flatten(optimised.traced.specs)
        self._ready[_key(specs)] = _Ready(call, optimised.traced.results, device_of, optimised)

    @contextmanager
    def _call_options(self) -> Iterator[None]:
        """No soft placement, and no optimiser: every op runs where and as it was placed."""
        context = eager_context.context()
        before = context.function_call_options
        if self._options is None:
            config = config_pb2.ConfigProto()
            config.CopyFrom(context.config)
            config.allow_soft_placement = False
            config.graph_options.rewrite_options.disable_meta_optimizer = True
            self._options = eager_context.FunctionCallOptions(config_proto=config)
        context.function_call_options = self._options
        try:
            yield
        except tf.errors.InvalidArgumentError as problem:
            if "Cannot assign a device" in str(problem):
                raise RunError(
                    f"an op cannot run where its plan has it: {str(problem).splitlines()[0]}"
                ) from problem
            raise
        finally:
            context.function_call_options = before


def loss_of(result: Any) -> float:
    """The loss among what a step gives: by its name, else its first number."""
    if isinstance(result, dict) and "loss" in result:
        return float(result["loss"])
    leaves = [leaf for leaf in tf.nest.flatten(result, expand_composites=True) if leaf is not None]
    if not leaves:
        return 0.0
    return float(tf.reduce_mean(tf.cast(leaves[0], tf.float32)))


def _run_eagerly(work: Callable[[], None]) -> None:
    """Run something that traces a function of its own, also where a function is just being traced (`fit`).

    A thread has a context of its own; `tf.init_scope` would stop the gradient tapes of what is traced within.
    """
    if tf.executing_eagerly():
        return work()
    with ThreadPoolExecutor(1) as other:
        other.submit(work).result()
    return None


def _complete(optimised: OptimisedStep, known: Mapping[str, int], homes: Mapping[int, int]) -> dict[str, int]:
    """A device for every node: the plan's, its variable's, its first input's, or its first reader's."""
    graph_def = optimised.graph_def
    found = dict(known)
    for held in optimised.captured:
        if held.variable is not None and id(held.variable) in homes:
            found[held.node] = homes[id(held.variable)]
    for _ in range(2):  # readers may stand before what they read
        for node in graph_def.node:
            inputs = [name.split(":")[0] for name in node.input if not name.startswith("^")]
            if node.name not in found:
                home = next((found[name] for name in inputs if name in found), None)
                if home is not None:
                    found[node.name] = home
    for node in reversed(list(graph_def.node)):
        for name in (name.split(":")[0].removeprefix("^") for name in node.input):
            if name not in found and node.name in found:
                found[name] = found[node.name]
    for node in graph_def.node:
        found.setdefault(node.name, 0)
    return found


def _import_placed(
    optimised: OptimisedStep,
    device_of: Mapping[str, int],
    devices: tuple[PlacedDevice, ...],
    copied: Mapping[int, Any],
) -> Callable[..., Any]:
    """A concrete function of the nodes, each on its device; arguments are copied to theirs first."""
    graph_def = tf.compat.v1.GraphDef()
    graph_def.CopyFrom(optimised.graph_def)
    given = {held.node for held in optimised.captured} | set(optimised.args)
    kept = [node for node in graph_def.node if node.name not in given]
    nodes = [type(node).FromString(node.SerializeToString()) for node in kept]
    del graph_def.node[:]
    for node in nodes:
        node.attr.pop("_class", None)
        node.device = devices[device_of[node.name]].full_name
    graph_def.node.extend(nodes)
    flat = _flatten(optimised.traced.specs)
    held = [
        one.tensor if one.variable is None else copied.get(id(one.variable), one.variable).handle
        for one in optimised.captured
    ]

    def body(*args: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        inputs = {}
        for name, tensor in zip(optimised.args, args, strict=True):
            with tf.device(devices[device_of[name]].full_name):
                inputs[f"{name}:0"] = tf.identity(tensor, name=f"{name}/arrived")
        for one, tensor in zip(optimised.captured, held, strict=True):
            inputs[f"{one.node}:0"] = graph.capture(tensor)
        used = _used_inputs(nodes, optimised.outputs)
        chosen = {name: tensor for name, tensor in inputs.items() if name in used}
        return tf.graph_util.import_graph_def(
            graph_def, input_map=chosen, return_elements=list(optimised.outputs), name=""
        )

    signature = [tf.TensorSpec(spec.shape, spec.dtype) for spec in flat]
    function = tf.function(
        body, input_signature=signature, autograph=False, experimental_attributes={"_noinline": True}
    )
    return function.get_concrete_function()


def _used_inputs(nodes: list[Any], outputs: tuple[str, ...]) -> set[str]:
    read = {name if ":" in name else f"{name}:0" for node in nodes for name in node.input if name[:1] != "^"}
    return read | set(outputs)


def _flatten(args: Any) -> list[Any]:
    return [value for value in tf.nest.flatten(args) if value is not None]


def _key(flat: list[Any]) -> tuple[Any, ...]:
    return tuple((value.dtype, str(value.shape)) for value in flat)


def _pack(results: Any, given: Any) -> Any:
    """The nest that the step gives."""
    rest = iter(given if isinstance(given, list | tuple) else [given])
    flat = tf.nest.flatten(results, expand_composites=True)
    leaves = [None if leaf is None else next(rest) for leaf in flat]
    return tf.nest.pack_sequence_as(results, leaves, expand_composites=True)


def _parse_spec(text: str) -> Any:
    dtype, _, shape = text.split(" ")[1].removesuffix("]").partition("[")
    return tf.TensorSpec(
        [int(size) for size in shape.split(",") if size], np.dtype(dtype) if dtype != "bfloat16" else dtype
    )


def _describe(specs: list[Any]) -> str:
    return ", ".join(f"{tf.as_dtype(spec.dtype).name}{spec.shape}" for spec in specs)
