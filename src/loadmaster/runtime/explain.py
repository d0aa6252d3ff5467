"""Explain: where the ops and weights of a placed model are, in a few lines."""

from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective
from loadmaster.core.units import format_apart, format_bytes
from loadmaster.cost.error_bar import format_error, step_error
from loadmaster.modules.live_storages import count_storage_bytes
from loadmaster.runtime.graph_engine.engine import GraphEngine
from loadmaster.runtime.hook_engine.engine import HookEngine

_WHY_GRAPH = "torch.export made a graph of the model, so each op runs where the plan has it"


def explain_engine(engine: GraphEngine, hooks: HookEngine | None, why_hooks: str = "") -> str:
    """One line for the engine, one for why it runs, one for each device, one for each note."""
    graphs = engine.graphs
    copies = "not run yet"
    if graphs:
        number = graphs[0].rewritten.num_copies
        copies = f"{number} cop{'y' if number == 1 else 'ies'} in a forward pass"
    if hooks is not None:
        copies = f"{len(hooks.places)} modules"
    lines = [f"{'graph' if hooks is None else 'hook'} engine: {len(engine.devices)} devices, {copies}"]
    why = f"it runs module by module, since {why_hooks}" if hooks is not None else _WHY_GRAPH
    lines.append(f"why: {why}")
    lines += [_describe_device(engine, at) for at in range(len(engine.devices))]
    if engine.spill is not None:
        window = format_bytes(engine.spill.window_bytes)
        what = f"{len(engine.spill.names)} weights are loaded for each reader"
        if engine.spill.stashing:
            what += f", the outputs of {len(engine.spill.stashing)} ops wait elsewhere for their backward"
        lines.append(f"{what}; at most {window} of copies at a time")
    return "\n".join([*lines, *(f"note: {note}" for note in engine.notes)])


def describe_prediction(placement: Placement | None) -> str:
    """A line for a predicted time that rests on measured costs; '' where it does not."""
    if placement is None or placement.plan is None or placement.score_s is None:
        return ""
    error = step_error(placement.problem, placement.plan)
    what = "a step" if placement.problem.objective == Objective.STEP else "a pass"
    return "" if error is None else f"predicted: {what} takes {format_error(placement.score_s, error)}"


def _describe_device(engine: GraphEngine, at: int) -> str:
    device = engine.devices[at]
    tensors = dict(engine.model.named_parameters()) | dict(engine.model.named_buffers())
    own = [tensors[name] for name, home in engine.homes.items() if home == at]
    placed = engine.graphs[0].device if engine.graphs else {}
    num_ops = sum(home == at and node.op == "call_function" for node, home in placed.items())
    words = [f"{num_ops} ops"] if engine.graphs else []
    words += [f"{len(own)} weights and buffers of {format_bytes(count_storage_bytes(own))}"]
    if engine.accounts is not None:
        peak, limit = format_apart(engine.accounts.peak_bytes[at], device.limit_bytes)
        words.append(f"at most {peak} of {limit} so far")
    return f"{device.name} ({device.where}): {', '.join(words)}"
