"""Random plans, plain training loops and their comparison: what the tests of placed models share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

import loadmaster as lm
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.plan import Plan, plan_of
from loadmaster.runtime.placed import Options, Placed, build_placed_model
from loadmaster.zoo.example import Example
from tests.allocations import plain_loss


def devices(num: int, memory: str = "64MB") -> lm.Cluster:
    """Logical devices of one CPU."""
    return parse_cluster(", ".join(f"cpu#{at}-{memory}" for at in range(num)))


def random_plan(graph: lm.Graph, num: int, seed: int) -> Plan:
    """Every op anywhere, in any order: groups and memory are not asked."""
    rng = np.random.default_rng(seed)
    where = rng.integers(0, num, graph.num_ops).astype(np.int32)
    return plan_of(where, rng.permutation(graph.num_ops).astype(np.int32))


def plan_by(graph: lm.Graph, where: Callable[[str], int]) -> Plan:
    """Each op where a function of its name says."""
    return plan_of(np.array([where(name) for name in graph.op_name], dtype=np.int32))


_CAPTURED: WeakKeyDictionary[Any, dict[Any, lm.Graph]] = WeakKeyDictionary()


def captured(example: Example) -> lm.Graph:
    """What `capture` says of an example; asked twice, it is captured once."""
    model = example.model
    state = (model.training, *(weight.requires_grad for weight in model.parameters()))
    known = _CAPTURED.setdefault(model, {})
    if state not in known:
        known[state] = lm.capture(model, example.args, example.kwargs)
    return known[state]


def placed(example: Example, plan: Plan, *, num: int = 2, memory: str = "64MB", **options: Any) -> Placed:
    chosen = Options(**options)
    return build_placed_model(example.model, captured(example), plan, devices(num, memory), options=chosen)


@dataclass
class History:
    """Losses and gradients of every step, and the buffers at the end."""

    losses: list[Any]
    gradients: list[dict[str, Any]]
    buffers: dict[str, Any]


def trained(model: Any, example: Example, *, steps: int = 5, seed: int = 11) -> History:
    """A plain loop on one batch, dropout on."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = History([], [], {})
    for _ in range(steps):
        loss = (example.loss or plain_loss)(model(*example.args, **example.kwargs))
        loss.backward()
        history.losses.append(loss.detach().clone())
        history.gradients.append(
            {
                name: weight.grad.clone()
                for name, weight in model.named_parameters()
                if weight.grad is not None
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    history.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return history


def first_difference(one: History, other: History) -> str:
    """Where two histories part, to the bit; '' = nowhere."""
    pairs = zip(one.losses, other.losses, one.gradients, other.gradients, strict=True)
    for step, (loss, same_loss, grads, same_grads) in enumerate(pairs):
        if not torch.equal(loss, same_loss):
            return f"step {step}: loss {loss} and {same_loss}"
        if grads.keys() != same_grads.keys():
            return f"step {step}: gradients of {sorted(grads.keys() ^ same_grads.keys())[:3]} are missing"
        for name, grad in grads.items():
            if not torch.equal(grad, same_grads[name]):
                return f"step {step}: gradient of {name}, off by {(grad - same_grads[name]).abs().max()}"
    changed = [name for name, buffer in one.buffers.items() if not torch.equal(buffer, other.buffers[name])]
    return f"buffers {changed[:3]}" if changed else ""
