"""Pipelines to run: plans cut by hand, plain training that accumulates, and their comparison."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

import loadmaster as lm
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.placement import Placement
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.modules.loss import compute_loss
from loadmaster.runtime.distributed.pipeline.batches import split_batch
from loadmaster.runtime.distributed.pipeline.executor import micro_batch_seed
from loadmaster.zoo.example import Example


def pipeline_placement(
    example: Example,
    stages: int,
    micro_batches: int,
    schedule: str = "1f1b",
    *,
    per_rank: int = 1,
    replicas: int = 1,
    recompute: bool = False,
    devices: str | None = None,
) -> Placement:
    """A plan whose stages have equally many forward ops, one after the other."""
    graph = lm.capture(example.model, example.args, example.kwargs, loss=example.loss)
    ranks = stages // per_rank
    words = devices or ", ".join(f"cpu#{at}-2GB" for at in range(ranks * replicas))
    problem = lm.problem(graph, parse_cluster(words), costs="roofline")
    forward = graph.phase == 0
    at = np.minimum(np.cumsum(forward) / max(1, forward.sum()) * stages, stages - 1).astype(np.int32)
    for backward in np.flatnonzero(graph.mirror >= 0):
        at[backward] = at[graph.mirror[backward]]
    whole: dict[str, Any] = {}
    if per_rank > 1 or replicas > 1:
        whole["rank"] = tuple(s % ranks for s in range(stages))
        whole["replica_device"] = tuple(
            tuple(r * ranks + s % ranks for s in range(stages)) for r in range(replicas)
        )
        whole["replica_microbatches"] = tuple(
            micro_batches // replicas + (r < micro_batches % replicas) for r in range(replicas)
        )
    pipeline = Pipeline(
        stage=at,
        replicas=np.full(stages, replicas),
        num_microbatches=micro_batches,
        schedule=schedule,
        in_flight=np.full(stages, 1),
        stage_s=np.zeros(stages),
        **whole,
    )
    plan = Plan(
        device=(at % ranks).astype(np.int32),
        priority=np.arange(graph.num_ops, dtype=np.int32),
        recompute=np.full(graph.num_ops, recompute) & forward,
        pipeline=pipeline,
    )
    scored = lm.plan(problem, algorithm="single_device")
    return replace(scored, plan=plan)


def whole_batch(example: Example, micro_batches: int, seed: int = 1) -> Any:
    """As many rows as all micro-batches have: arguments and named arguments."""
    chance = torch.Generator().manual_seed(seed)

    def more(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        many = torch.cat([leaf] * micro_batches)
        if many.is_floating_point():
            return torch.randn(many.shape, generator=chance)
        return many.flatten()[torch.randperm(many.numel(), generator=chance)].reshape(many.shape)

    return tree_map(more, (example.args, example.kwargs))


def as_batch(given: Any) -> Any:
    """A batch as `run.step` takes it."""
    args, kwargs = given
    assert not (args and kwargs)
    return kwargs or args


@dataclass
class Trained:
    """What came of some steps."""

    losses: list[float]
    state: dict[str, torch.Tensor]


def train_plainly(
    example: Example,
    given: Any,
    rows: list[int],
    make: Any,
    *,
    steps: int,
    seed: int = 0,
    clip: float | None = None,
) -> Trained:
    """One process that runs the micro-batches one after the other, each with its own random numbers."""
    optimizer, losses = make(list(example.model.parameters())), []
    example.model.train()
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for number, (args, kwargs) in enumerate(split_batch(given, rows)):
            torch.manual_seed(micro_batch_seed(seed, step, number))
            loss = compute_loss(example.model(*args, **kwargs), example.loss) * (rows[number] / sum(rows))
            loss.backward()
            total += loss.item()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(example.model.parameters(), clip)
        optimizer.step()
        losses.append(total)
    return Trained(losses, {name: one.detach().clone() for name, one in example.model.state_dict().items()})


def largest_difference(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a tensor, by norms."""
    assert state.keys() == other.keys(), sorted(state.keys() ^ other.keys())
    worst = 0.0
    for name, one in state.items():
        two = other[name].double()
        worst = max(worst, float((one.double() - two).norm() / (two.norm() + 1e-12)))
    return worst
