"""Watched step: where ops ran, as TensorFlow itself recorded it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorflow.python.eager import context as eager_context  # run metadata of functions are nowhere else

_LOCAL = "/job:localhost/replica:0/task:0/device:"


@dataclass(frozen=True, slots=True, eq=False)
class WatchedStep:
    """What a step gave, and where TensorFlow ran its ops."""

    result: Any
    device_of: dict[str, str]  # node -> 'CPU:1', of the graphs that TensorFlow cut the step into


def watch_step(call: Callable[[], Any]) -> WatchedStep:
    """Run a step while TensorFlow collects the graphs that it runs."""
    context = eager_context.context()
    context.enable_run_metadata()
    try:
        result = call()
        found = context.export_run_metadata()
    finally:
        context.disable_run_metadata()
    graphs = [
        [node for part in function.partition_graphs for node in part.node]
        for function in found.function_graphs
    ]
    nodes = max(graphs, key=len, default=[])  # the step itself; others read and copy variables
    return WatchedStep(result, {node.name: node.device.removeprefix(_LOCAL) for node in nodes})
