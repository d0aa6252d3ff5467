"""Compares the first step by shards with that of the plain model. A trial that differs fails.

The first real micro-batch runs twice, without an update: unit by unit as it will be trained, then through the
model itself with all weights in place. Loss and gradients must agree. Afterwards generators, buffers, weights
and what modules keep in Python are as they were, so the numbers that follow are those without the check.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from loadmaster.core.errors import DeviceMemoryError, RunError, VerifyError
from loadmaster.core.units import format_bytes
from loadmaster.modules import python_state, randomness
from loadmaster.modules.rounding import TOLERANCE, find_distant
from loadmaster.shards.device.host_bytes import free_host_bytes
from loadmaster.shards.device.streams import Device
from loadmaster.shards.model.blocks import Chain, call_block
from loadmaster.shards.spec.trial import COMPUTE_DTYPE, Trial, compute_loss
from loadmaster.train.execute.micro_batches import move_to_device, next_batches
from loadmaster.train.execute.trial_state import TrialState

_OF_FREE = 0.25  # of the host's free memory, or of the cap that a device has left: 0.8
_OF_CAP = 0.8
_MOST_HOST_FLOPS = 1e12  # of a plain step on the host of a GPU: seconds
_OF_A_LOSS = 2e-6  # losses are told in float32
_ON_GPU = 10  # sums in no fixed order
_ELSEWHERE = 1000  # a GPU against the host: other kernels, TF32
_LARGEST = 0.05
Grads = dict[int, torch.Tensor]  # by parameter, on the host
ByShards = Callable[[list[Any], Callable[[int, Mapping[int, torch.Tensor]], None]], float]


@dataclass(frozen=True, slots=True, eq=False)
class _StepNumbers:
    loss: float
    grads: Grads
    written: tuple[str, ...] = ()  # parameters that forward, loss or backward wrote
    drew: bool = False
    of: str = "the model itself"


def is_due(state: TrialState) -> bool:
    """Whether a trial is before its first step and asks for the check."""
    return bool(state.trial.verify) and not state.checked and not state.verified


def compare(state: TrialState, device: Device, units: Any, by_shards: ByShards) -> None:
    """Check the step that comes next; raises `VerifyError`, or notes what was found in the state."""
    peek_batches(state, device.torch_device)
    if not state.peeked:
        return
    where, why = _choose_device(state, device)
    if where is None:
        state.verified = f"not checked: {why}"
        return
    with use_single_batch(state, units):
        try:
            found = _run_by_shards(state, by_shards)
        except (torch.OutOfMemoryError, DeviceMemoryError):  # a step alone may fit: it keeps no gradients
            state.verified = f"not checked: keeping all gradients ran out of memory on {device.name}"
            return
        state.verified = judge_step(state, found, device, where)


def judge_step(state: TrialState, found: _StepNumbers, device: Device, where: torch.device) -> str:
    """What the comparison with a plain step says; raises where they differ."""
    if not math.isfinite(found.loss):
        return f"not checked: its first loss is {found.loss}"
    try:
        plain = _run_plain_step(state, device, where)
    except (torch.OutOfMemoryError, DeviceMemoryError):
        plain = None
    if where.type == "cuda":
        device.release()
    if plain is None:
        return f"not checked: a plain step ran out of memory on {device.name}"
    elsewhere = where.type != device.torch_device.type
    if elsewhere and plain.drew:
        return "not checked: it draws random numbers, and its plain step fits on the host only"
    factor = _ELSEWHERE if elsewhere else _ON_GPU if where.type == "cuda" else 1
    _require_same(state, found, plain, factor)
    return f"first step equal to that of {plain.of} (loss and {len(plain.grads)} gradients)"


def peek_batches(state: TrialState, where: torch.device) -> None:
    """Take the batches of the next step; it will find them, and the generators as they are then."""
    with randomness.preserve_generators(where):
        randomness.restore_generators(state.generators, where)
        state.peeked = next_batches(state, where)
        state.generators = randomness.capture_generators(where)


@contextmanager
def use_single_batch(state: TrialState, units: Any) -> Iterator[None]:
    """One micro-batch with one stream of random numbers: then a plain run draws the same."""
    trial = state.trial
    state.trial = units.trial = replace(trial, rng="stream", accumulate=1)
    try:
        yield
    finally:
        state.trial = units.trial = trial


def copy_first_batch(state: TrialState) -> Any:
    """A copy of the first micro-batch: a model may write into it."""
    return tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tuple(state.peeked[0])
    )


def _run_by_shards(state: TrialState, by_shards: ByShards) -> _StepNumbers:
    grads: Grads = {}

    def take(piece: int, found: Mapping[int, torch.Tensor]) -> None:
        numbers = state.pieces[piece].piece.parameters
        grads.update({numbers[position]: grad.detach().cpu() for position, grad in found.items()})

    with leave_no_trace(state.chain):
        loss = by_shards([copy_first_batch(state)], take)
    return _StepNumbers(loss, grads)


@contextmanager
def leave_no_trace(chain: Chain) -> Iterator[None]:
    """Nothing of a run stays: not in Python, not as gradients of the host's parameters."""
    with python_state.preserve_state(_list_modules(chain)):
        try:
            yield
        finally:
            for parameter in chain.parameters:
                parameter.grad = None


def _choose_device(state: TrialState, device: Device) -> tuple[torch.device | None, str]:
    """Where a plain step runs; or None, and why nowhere."""
    facts, own = state.facts, device.torch_device
    weights = sum(parameter.nbytes for parameter in state.chain.parameters)
    passing = int(1.25 * sum(facts.saved_bytes)) + 4 * max(facts.output_bytes)
    host = int(_OF_FREE * free_host_bytes())
    needed = 4 * weights + passing  # weights, their gradients, those of the shards, and what compares them
    if own.type == "cpu":
        if needed <= host:
            return own, ""
        return None, f"a plain step takes {format_bytes(needed)} of {format_bytes(host)} of host memory"
    room = int(_OF_CAP * (device.arena.cap_bytes - device.arena.used_bytes))
    if 2 * weights + passing <= room:
        return own, ""
    slow = 3 * sum(facts.flops) > _MOST_HOST_FLOPS or state.trial.precision != "fp32"
    if not slow and needed <= host:
        return torch.device("cpu"), ""
    return None, (
        f"a plain step takes {format_bytes(2 * weights + passing)} of {format_bytes(room)} that"
        f" {device.name} has left, and the host is too slow or too small for it"
    )


def _run_plain_step(state: TrialState, device: Device, where: torch.device) -> _StepNumbers:
    """A plain step; where the model's own forward cannot be used, its blocks in a row, weights in place."""
    try:
        return _run_model_step(state, device, where, whole=True)
    except (torch.OutOfMemoryError, DeviceMemoryError):
        raise
    except Exception:  # a Sequential takes no second input, a container has no forward at all
        return _run_model_step(state, device, where, whole=False)


def _run_model_step(state: TrialState, device: Device, where: torch.device, *, whole: bool) -> _StepNumbers:
    trial, chain = state.trial, state.chain
    dtype = COMPUTE_DTYPE[trial.precision]
    scale = state.scaler.scale if trial.precision == "fp16" else 1.0
    inputs, targets = (move_to_device(each, where) for each in copy_first_batch(state))
    size = 2 * sum(parameter.nbytes for parameter in chain.parameters) if where.type == "cuda" else 0
    with (
        randomness.preserve_generators(where),
        device.computing() if where.type == "cuda" else nullcontext(),
        device.arena.hold(f"{trial.name} first step", size),
        leave_no_trace(chain),
        _use_weight_copies(chain, where) as list_written,
    ):
        randomness.restore_generators(state.generators, where)
        with torch.autocast(where.type, dtype=dtype, enabled=dtype is not None):
            loss = _compute_loss(trial, chain, inputs, targets, whole=whole)
        (loss * scale if scale != 1.0 else loss).backward()
        now, before = randomness.capture_generators(where, others=False), state.generators
        drew = not torch.equal(now.host, before.host)
        everyone = trial.clip_norm is not None  # whom the optimizer does not have still counts in the norm
        stepped = [
            p if group >= 0 or everyone else None
            for p, group in zip(chain.parameters, state.group_of, strict=True)
        ]
        grads = {n: p.grad.cpu() for n, p in enumerate(stepped) if p is not None and p.grad is not None}
        of = "the model itself" if whole else "its blocks in a row (its own forward cannot be used)"
        return _StepNumbers(float(loss.detach()), grads, tuple(list_written()), drew, of)


def _compute_loss(trial: Trial, chain: Chain, inputs: Any, targets: Any, *, whole: bool) -> torch.Tensor:
    if not whole:
        value = inputs
        for index, block in enumerate(chain.blocks):
            value = call_block(block, value, first=index == 0)
        return compute_loss(trial, value, targets)
    out = chain.call_model(inputs)
    try:
        return _require_scalar(compute_loss(trial, out, targets))
    except Exception:
        if trial.blocks is None or not hasattr(out, "logits"):
            raise
        return _require_scalar(
            compute_loss(trial, out.logits, targets)
        )  # of transformers: the blocks give logits


def _require_scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise RunError("the loss of the model's own output is no number with a gradient")
    return loss


@contextmanager
def _use_weight_copies(chain: Chain, where: torch.device) -> Iterator[Callable[[], list[str]]]:
    """Every parameter and buffer with a copy of its value, on the device; gives which parameters changed."""
    held = [parameter.data for parameter in chain.parameters]
    copies = {id(buffer): buffer.to(where, copy=True) for buffer in chain.buffers}

    def list_written() -> list[str]:
        rows = zip(chain.parameter_name, chain.parameters, held, strict=True)
        return [name for name, now, before in rows if not torch.equal(now.detach(), before.to(where))]

    try:
        for parameter, before in zip(chain.parameters, held, strict=True):
            parameter.data = before.to(where, copy=True)
        for module in _list_modules(chain):
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in copies:
                    module._buffers[name] = copies[id(buffer)]
        yield list_written
    finally:  # the tables of buffers are put back with all else that modules keep
        for parameter, before in zip(chain.parameters, held, strict=True):
            parameter.grad = None
            parameter.data = before


def _list_modules(chain: Chain) -> list[nn.Module]:
    """Those of the model and of its blocks, each once."""
    roots = [chain.model, *(block for block in chain.blocks if isinstance(block, nn.Module))]
    return list({id(each): each for root in roots for each in root.modules()}.values())


def _require_same(state: TrialState, ours: _StepNumbers, plain: _StepNumbers, factor: float) -> None:
    """Raise by the first thing that differs: the loss, a weight that was written, a gradient."""
    dtype = COMPUTE_DTYPE[state.trial.precision]
    widest = torch.float64 if any(p.dtype == torch.float64 for p in state.chain.parameters) else torch.float32
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in state.chain.parameters)
    tolerance = min(_LARGEST, factor * TOLERANCE[dtype or (torch.bfloat16 if narrow else widest)])
    told = max(tolerance, _OF_A_LOSS)
    if abs(ours.loss - plain.loss) > told * max(abs(plain.loss), 1e-6):
        _raise_difference(state, f"the loss is {ours.loss:.7g} by shards and {plain.loss:.7g} by {plain.of}")
    if plain.written:
        more = f" and {len(plain.written) - 1} more" if len(plain.written) > 1 else ""
        _raise_difference(state, f"parameter {plain.written[0]!r}{more} is written outside of the optimizer")
    odd = find_distant(plain.grads, ours.grads, tolerance)
    if odd:
        first = odd[0]
        more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
        _raise_difference(
            state,
            f"the gradient of {state.chain.parameter_name[first.key]!r}{more} has the norm {first.given:.7g}"
            f" by shards and {first.wanted:.7g} by {plain.of}, and they are {first.apart:.3g} apart",
        )


def _raise_difference(state: TrialState, what: str) -> None:
    given, instead = "its blocks do what forward does, in that order", ""
    if state.chain.traced:
        given = "forward decides nothing in Python that changes (it was traced once)"
    if state.trial.blocks is None:
        instead = ", or give Trial(blocks=...)"
    raise VerifyError(
        f"trial {state.trial.name!r}: its first step by shards is not that of the plain model: {what}; see"
        f" that {given}, and that neither forward nor loss depends on what a shard does not see"
        f" (docs/train.md){instead}; Trial(verify=False) trains without this check"
    )
