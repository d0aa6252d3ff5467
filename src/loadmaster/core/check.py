"""check_plan: everything about a plan that can be judged without simulating it."""

from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Ints
from loadmaster.core.errors import InputError
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, Graph, Phase, edges, held_bytes, units
from loadmaster.core.pipelines.in_flight import find_mirrored_ops, settled_bytes, standing_bytes
from loadmaster.core.pipelines.order import ZERO_BUBBLE, in_flight_of, make_order
from loadmaster.core.pipelines.schedule import AUTO, Schedule
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.core.problem import FREE, Objective, Problem, Split
from loadmaster.core.units import format_apart


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule a plan breaks."""

    rule: str  # length device pinned group support pipeline recompute order memory chain convex
    message: str


def check_plan(problem: Problem, plan: Plan) -> list[Violation]:
    """The rules `plan` breaks, worst first; an empty list means it may be simulated and run.

    Memory is judged by what is held at the end of the step, in a pipeline with what its micro-batches in
    flight keep; the simulator judges the peak.
    """
    graph, cluster = problem.graph, problem.cluster
    if len(plan.device) != graph.num_ops:
        text = f"the plan has {len(plan.device)} ops, the graph {graph.num_ops}"
        return [Violation("length", text)]
    if plan.device.max() >= cluster.num_devices:
        op = int(plan.device.argmax())
        text = (
            f"op {graph.op_name[op]!r} is on device {plan.device[op]}, the cluster has {cluster.num_devices}"
        )
        return [Violation("device", text)]
    found = [*_check_pipeline(problem, plan), *_check_placement(problem, plan)]
    cycle = describe_order_cycle(problem, plan)
    if cycle:
        found.append(Violation("order", cycle))
    if problem.objective == Objective.THROUGHPUT and problem.split != Split.FREE:
        found.extend(_check_split(problem, plan))
    return found


def why_not_runnable(problem: Problem, plan: Plan) -> list[str]:
    """What keeps a valid plan from being run as autograd runs a step; such a plan can only be simulated.

    A backward op sits with the op it mirrors, an update with its parameter, and the backward ops of a
    device run in the reverse order of the forward ops they mirror, but for what the graph itself has in
    another order: ops that run again for a backward pass, or a second backward pass.
    """
    graph, device, found = problem.graph, plan.device, []
    back = np.flatnonzero(graph.mirror != NO_MIRROR)
    apart = back[device[back] != device[graph.mirror[back]]]
    if len(apart):
        found.append(f"backward op {graph.op_name[apart[0]]!r} is not on the device of its forward op")
    maker, user = graph.tensor_op[graph.use_tensor], graph.use_op
    owns = (graph.phase[maker] == Phase.PARAM) & (graph.phase[user] == Phase.UPDATE)
    torn = np.flatnonzero(owns & (device[maker] != device[user]))
    if len(torn):
        found.append(f"update {graph.op_name[user[torn[0]]]!r} is not on the device of its parameter")
    order = back[np.lexsort((back, plan.priority[back], device[back]))]
    same = device[order[1:]] == device[order[:-1]]
    turned = (graph.mirror[order[1:]] > graph.mirror[order[:-1]]) & (order[1:] < order[:-1])
    if (same & turned).any():
        found.append("backward ops do not run in the reverse order of their forward ops")
    return found


def _check_pipeline(problem: Problem, plan: Plan) -> list[Violation]:
    """The pipeline is the one asked for, its stages are devices in a row, recomputed whole or not at all."""
    graph, pipeline, schedule = problem.graph, plan.pipeline, problem.schedule
    if pipeline is None or schedule is None:
        if (pipeline is None) != (schedule is None):
            asked, given = problem.pipeline or "no pipeline", "a" if pipeline is not None else "no"
            return [Violation("pipeline", f"the problem asks for {asked}, the plan has {given} pipeline")]
        if plan.recompute.any():
            name = graph.op_name[int(plan.recompute.argmax())]
            text = f"op {name!r} is marked for recomputation, which only pipeline stages support"
            return [Violation("recompute", text)]
        return []
    if problem.is_stepped:
        broken = _check_step(problem, plan, pipeline, schedule) or _check_ranks(problem, plan, pipeline)
        found = [Violation("pipeline", broken)] if broken else []
        return found + _check_recompute(graph, plan, pipeline)
    broken = _check_stages(problem, plan, pipeline)
    given = f"{pipeline.schedule}:{pipeline.num_microbatches}"
    needs = schedule.in_flight(len(pipeline.replicas))
    if given != problem.pipeline:
        broken = f"the problem asks for {problem.pipeline}, the plan is {given}"
    elif not broken and (pipeline.in_flight != needs).any():
        holds = f"stages hold {pipeline.in_flight.tolist()} micro-batches"
        broken = f"{holds}, under {given} they hold {needs.tolist()}"
    found = [Violation("pipeline", broken)] if broken else []
    return found + _check_recompute(graph, plan, pipeline)


def _check_recompute(graph: Graph, plan: Plan, pipeline: Pipeline) -> list[Violation]:
    stages, again = len(pipeline.replicas), find_mirrored_ops(graph)
    asked = np.bincount(pipeline.stage[plan.recompute], minlength=stages)
    legal = np.bincount(pipeline.stage[plan.recompute & again], minlength=stages)
    whole = np.bincount(pipeline.stage[again], minlength=stages)
    for s in np.flatnonzero((asked > 0) & ((legal != asked) | (legal != whole))):
        text = f"of stage {s} {asked[s]} ops are recomputed, {whole[s]} have a backward op that mirrors them"
        return [Violation("recompute", f"{text}; a stage is recomputed whole or not at all")]
    return []


def _check_step(problem: Problem, plan: Plan, pipeline: Pipeline, schedule: Schedule) -> str:
    """How a plan is not the step of micro-batches that is asked for, '' if it is."""
    given = Schedule(pipeline.schedule, pipeline.num_microbatches, pipeline.stages_per_rank)
    if pipeline.num_microbatches != schedule.num_microbatches or schedule.name not in (AUTO, given.name):
        return f"the problem asks for {problem.pipeline}, the plan is {given}"
    if schedule.name != AUTO and schedule.stages_per_rank != given.stages_per_rank:
        return f"the problem asks for {problem.pipeline}, the plan is {given}"
    try:
        orders = [
            make_order(given.name, pipeline.num_stages, count, given.stages_per_rank)
            for count in set(pipeline.microbatches)
        ]
    except InputError as problem_found:
        return str(problem_found)
    needs = np.max([in_flight_of(order, pipeline.num_stages) for order in orders], axis=0)
    if (pipeline.in_flight != needs).any():
        holds = f"stages hold {pipeline.in_flight.tolist()} micro-batches"
        return f"{holds}, under {given} they hold {needs.tolist()}"
    if given.name == ZERO_BUBBLE and plan.recompute.any():
        return "a stage is recomputed under zb-h1, which splits its backward pass; use 1f1b"
    return ""


def _check_ranks(problem: Problem, plan: Plan, pipeline: Pipeline) -> str:
    """What is wrong with the devices of stages and replicas, '' if nothing."""
    devices = pipeline.devices_of(plan.device)
    if devices.max() >= problem.cluster.num_devices:
        return f"a stage is on device {devices.max()}, the cluster has {problem.cluster.num_devices}"
    num = pipeline.num_ranks
    if (devices != devices[:, np.arange(pipeline.num_stages) % num]).any():
        return "the stages of a rank are on different devices"
    used = devices[:, :num].reshape(-1)
    if len(np.unique(used)) != len(used):
        return f"{len(used)} ranks on {len(np.unique(used))} devices; every rank needs its own device"
    apart = np.flatnonzero(plan.device != devices[0, pipeline.stage])
    if len(apart):
        op = problem.graph.op_name[apart[0]]
        return f"op {op!r} is not on the device of its stage"
    if len(np.unique(pipeline.stage)) != pipeline.num_stages:
        return f"{pipeline.num_stages} stages, of which {len(np.unique(pipeline.stage))} have ops"
    kinds = problem.cluster.kind[devices]
    for row in kinds[1:]:
        stuck = ~np.isfinite(problem.costs.compute_s[np.arange(len(plan.device)), row[pipeline.stage]])
        if stuck.any():
            return f"op {problem.graph.op_name[int(stuck.argmax())]!r} cannot run on every replica"
    return _check_stage_order(problem.graph, pipeline.stage)


def _check_stages(problem: Problem, plan: Plan, pipeline: Pipeline) -> str:
    """What is wrong with the stages of a plan, '' if nothing."""
    graph, device, stage = problem.graph, plan.device, pipeline.stage
    num = len(pipeline.replicas)
    if (pipeline.replicas != 1).any():
        s = int((pipeline.replicas != 1).argmax())
        return f"stage {s} has {pipeline.replicas[s]} replicas; only single devices are planned so far"
    pairs, used = len(np.unique(device.astype(np.int64) * num + stage)), len(np.unique(device))
    if not pairs == used == len(np.unique(stage)) == num:
        return (
            f"{num} stages on {used} devices; every stage has a device of its own, and every device a stage"
        )
    return _check_stage_order(graph, stage)


def _check_stage_order(graph: Graph, stage: Ints) -> str:
    """An op that stands in a later stage than one that needs it, '' if none does."""
    source, target = stage_order(graph)
    back = np.flatnonzero(stage[source] > stage[target])
    if len(back):
        one, other = source[back[0]], target[back[0]]
        names = f"op {graph.op_name[one]!r} of stage {stage[one]} comes before {graph.op_name[other]!r}"
        return f"{names} of stage {stage[other]}; stages must follow the order of the forward pass"
    return ""


def _check_placement(problem: Problem, plan: Plan) -> list[Violation]:
    graph, cluster, device = problem.graph, problem.cluster, plan.device
    found = []
    moved = np.flatnonzero((problem.pinned != FREE) & (problem.pinned != device))
    if len(moved):
        op = int(moved[0])
        names = cluster.device_name[problem.pinned[op]], cluster.device_name[device[op]]
        found.append(
            Violation("pinned", f"op {graph.op_name[op]!r} is pinned to {names[0]} but is on {names[1]}")
        )
    torn = _find_torn_group(graph.group, device)
    if torn is not None:
        a, b = torn
        text = f"ops {graph.op_name[a]!r} and {graph.op_name[b]!r} belong together but are on"
        found.append(
            Violation(
                "group", f"{text} {cluster.device_name[device[a]]} and {cluster.device_name[device[b]]}"
            )
        )
    stuck = np.flatnonzero(
        ~np.isfinite(problem.costs.compute_s[np.arange(len(device)), cluster.kind[device]])
    )
    if len(stuck):
        op = int(stuck[0])
        text = f"op {graph.op_name[op]!r} cannot run on {cluster.device_name[device[op]]}"
        found.append(Violation("support", text))
    held = np.bincount(device, held_bytes(graph).astype(np.float64), minlength=cluster.num_devices)
    if problem.is_stepped:  # what is in flight is the simulator's to count
        held = np.bincount(device, settled_bytes(graph).astype(np.float64), minlength=cluster.num_devices)
    elif plan.pipeline is not None:
        held = standing_bytes(graph, plan, cluster.num_devices).astype(np.float64)
    for d in np.flatnonzero(held > cluster.usable_bytes):
        there, have = format_apart(held[d], cluster.usable_bytes[d])
        text = f"{cluster.device_name[d]} holds {there} of {have}"
        found.append(Violation("memory", text))
    return found


def _find_torn_group(group: Ints, device: Ints) -> tuple[int, int] | None:
    """Two ops of one group on two devices, if any."""
    ops = np.flatnonzero(group != NO_GROUP)
    if len(ops) == 0:
        return None
    _, first, inverse = np.unique(group[ops], return_index=True, return_inverse=True)
    torn = np.flatnonzero(device[ops] != device[ops[first]][inverse])
    return (int(ops[first][inverse[torn[0]]]), int(ops[torn[0]])) if len(torn) else None


def describe_order_cycle(problem: Problem, plan: Plan) -> str:
    """Why the plan's order cannot be run in order ('' = it can).

    Engine order and data dependencies together must have no cycle. Where ops are issued by one thread, it
    must come to a producer before it comes to its consumer.
    """
    graph = problem.graph
    sequence = np.lexsort((np.arange(graph.num_ops), plan.priority))
    position = np.empty(graph.num_ops, dtype=np.int64)
    position[sequence] = np.arange(graph.num_ops)
    source, target = edges(graph)
    late = np.flatnonzero(position[source] > position[target])
    if len(late) == 0:
        return ""
    if problem.costs.issue_s.any():
        maker, user = (graph.op_name[side[late[0]]] for side in (source, target))
        return f"the order deadlocks: op {user!r} is issued before op {maker!r}, whose tensor it uses"
    engine = problem.cluster.engine[plan.device[sequence]]
    by_engine = sequence[np.argsort(engine, kind="stable")]
    same = np.sort(engine, kind="stable")
    chained = np.flatnonzero(same[1:] == same[:-1])
    source = np.concatenate([source, by_engine[chained]])
    target = np.concatenate([target, by_engine[chained + 1]])
    left = find_unreached(graph.num_ops, source, target)
    if not left.any():
        return ""
    op = int(np.flatnonzero(left)[np.argmin(position[left])])
    return f"the order deadlocks: op {graph.op_name[op]!r} waits for an op that is ordered after it"


def find_unreached(num: int, source: Ints, target: Ints) -> Bools:
    """[num] nodes on or behind a cycle (Kahn's algorithm)."""
    order = np.argsort(source, kind="stable")
    heads = target[order].tolist()
    pointer = np.concatenate([[0], np.cumsum(np.bincount(source, minlength=num))]).tolist()
    waiting = np.bincount(target, minlength=num).tolist()
    ready = [node for node in range(num) if waiting[node] == 0]
    while ready:
        node = ready.pop()
        for at in range(pointer[node], pointer[node + 1]):
            waiting[heads[at]] -= 1
            if waiting[heads[at]] == 0:
                ready.append(heads[at])
    return np.asarray(waiting) > 0


def stage_order(graph: Graph) -> tuple[Ints, Ints]:
    """Pairs of ops (u, v) of which v may not stand in an earlier stage of a chain than u.

    Forward edges. A backward op rides with its class, except where a class has no forward op: the backward
    pass goes through the stages from last to first, so such a class is ordered by its backward edges, turned.
    """
    source, target = edges(graph)
    forward = (graph.phase[source] == Phase.FORWARD) & (graph.phase[target] == Phase.FORWARD)
    backward = (graph.phase[source] == Phase.BACKWARD) & (graph.phase[target] == Phase.BACKWARD)
    if not backward.any():
        return source[forward], target[forward]
    unit, num = units(graph)
    follows = np.zeros(num, dtype=np.bool_)
    follows[unit[graph.phase == Phase.FORWARD]] = True
    turned = backward & ~(follows[unit[source]] & follows[unit[target]])
    return (
        np.concatenate([source[forward], target[turned]]),
        np.concatenate([target[forward], source[turned]]),
    )


def _check_split(problem: Problem, plan: Plan) -> list[Violation]:
    """Chain, or convex (on forward edges only)."""
    graph, names, device = problem.graph, problem.cluster.device_name, plan.device
    if problem.split == Split.CHAIN:
        num = problem.cluster.num_devices
        source, target = stage_order(graph)
        crossing = device[source] != device[target]
        pair = np.unique(device[source][crossing].astype(np.int64) * num + device[target][crossing])
        looped = np.flatnonzero(find_unreached(num, pair // num, pair % num))
        if len(looped):
            text = ", ".join(names[d] for d in looped)
            return [
                Violation("chain", f"devices {text} feed each other in a cycle, which a chain does not allow")
            ]
        return []
    source, target = edges(graph)
    forward = (graph.phase[source] == Phase.FORWARD) & (graph.phase[target] == Phase.FORWARD)
    source, target = source[forward], target[forward]
    for d in range(problem.cluster.num_devices):
        op = _find_returning_op(graph.num_ops, source, target, device == d)
        if op >= 0:
            text = f"a path leaves {names[d]} and returns at op {graph.op_name[op]!r}"
            return [Violation("convex", text)]
    return []


def _find_returning_op(num: int, source: Ints, target: Ints, inside: Bools) -> int:
    """An op of the set that a path from the set reaches through the outside, or -1."""
    left = np.zeros(num, dtype=np.bool_)
    for u, v in zip(source.tolist(), target.tolist(), strict=True):  # sorted by source: topological
        if left[u] or inside[u]:
            if inside[v]:
                if left[u]:
                    return int(v)
            else:
                left[v] = True
    return -1
