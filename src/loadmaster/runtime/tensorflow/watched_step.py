"""Watched step: where and when ops ran, as TensorFlow itself recorded them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorflow.python.eager import context as eager_context  # run metadata of functions are nowhere else

_LOCAL = "/job:localhost/replica:0/task:0/device:"


@dataclass(frozen=True, slots=True)
class RanOp:
    """One op of a step."""

    name: str
    kind: str
    device: str  # 'CPU:1'
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, eq=False)
class WatchedStep:
    """What a step gave, and its ops."""

    result: Any
    ops: tuple[RanOp, ...]
    placed: dict[str, str]  # node -> device, of the graphs that TensorFlow cut the step into

    def devices(self) -> dict[str, str]:
        """The device of each op, by name."""
        return dict(self.placed)


def watch_step(call: Callable[[], Any]) -> WatchedStep:
    """Run a step under TensorFlow's own trace."""
    context = eager_context.context()
    context.enable_run_metadata()
    try:
        result = call()
        found = context.export_run_metadata()
    finally:
        context.disable_run_metadata()
    kinds: dict[str, str] = {}
    placed: dict[str, str] = {}
    for function in found.function_graphs:
        for part in function.partition_graphs:
            for node in part.node:
                placed[node.name], kinds[node.name] = node.device.removeprefix(_LOCAL), node.op
    ops = []
    for device in found.step_stats.dev_stats:
        for one in device.node_stats:
            begin = one.all_start_micros * 1e-6
            kind = kinds.get(one.node_name, "")
            where = device.device.removeprefix(_LOCAL)
            ops.append(RanOp(one.node_name, kind, where, begin, begin + one.all_end_rel_micros * 1e-6))
    return WatchedStep(result, tuple(ops), placed)
