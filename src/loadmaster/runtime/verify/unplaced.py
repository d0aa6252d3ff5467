"""Unplaced: the model itself on one batch, on copies of its weights on the CPU; what verify compares with."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from loadmaster.core.errors import InputError
from loadmaster.core.raised import shorten_error
from loadmaster.modules.loss import compute_loss
from loadmaster.modules.randomness import preserve_rng, seed_rng
from loadmaster.modules.torch_state import force_eager
from loadmaster.runtime.graph_engine.engine import GraphEngine, describe_inputs
from loadmaster.runtime.hook_engine.engine import HookEngine

Loss = Callable[[Any], torch.Tensor]
Runs = GraphEngine | HookEngine


class BatchError(InputError):
    """The model itself cannot run a batch; its own error is the cause."""


def run_unplaced(
    engine: Runs, args: Any, kwargs: Mapping[str, Any], loss: Loss | None, seed: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss and gradients of the model itself, on copies of its weights on the CPU."""
    weights, tensors = copy_weights(engine)
    given = tree_map_only(torch.Tensor, to_cpu, (args, dict(kwargs)))
    with seed_and_restore(engine, seed), torch.enable_grad():
        found = compute_loss(call_model(engine, tensors, given), loss)
        grads = torch.autograd.grad(found, list(weights.values()), allow_unused=True)
    return found, dict(zip(weights, grads, strict=True))


def call_model(engine: Runs, tensors: dict[str, torch.Tensor], given: tuple[Any, Any]) -> Any:
    """What the model itself gives on other weights, in the placed model's mode."""
    before, engine.model.training = engine.model.training, engine.root.training
    try:
        with force_eager(torch):  # as a graph has it: which of several numbers is the loss depends on it
            return torch.func.functional_call(engine.model, tensors, given[0], given[1])
    except Exception as problem:  # the user's model may raise anything
        raise BatchError(
            f"the model itself, unplaced, fails on {describe_inputs(tree_leaves(given))}:"
            f" {shorten_error(problem)}; verify with a batch that it can run"
        ) from problem
    finally:
        engine.model.training = before


def copy_weights(engine: Runs) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights to be trained, and all weights and buffers, as copies on the CPU."""
    weights = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in engine.model.named_parameters():
        tensors[name] = weight.detach().to("cpu", copy=True).requires_grad_(weight.requires_grad)
        if weight.requires_grad:
            weights[name] = tensors[name]
    for name, buffer in engine.model.named_buffers():
        tensors[name] = buffer.detach().to("cpu", copy=True)
    return weights, tensors


def to_cpu(value: Any) -> Any:
    """A tensor on the CPU; anything else is itself."""
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return value
    return value.detach().to("cpu").requires_grad_(value.requires_grad)


@contextmanager
def seed_and_restore(engine: Runs, seed: int) -> Iterator[None]:
    """Random numbers from a seed; afterwards they and the buffers are what they were."""
    kept = [(buffer, buffer.detach().clone()) for buffer in engine.model.buffers()]
    devices = sorted({d.where.index or 0 for d in engine.devices if d.where.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices), preserve_rng():
            torch.manual_seed(seed)
            seed_rng(seed)
            yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
