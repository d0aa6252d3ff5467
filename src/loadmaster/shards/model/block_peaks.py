"""Device memory the units of each block take, on fake tensors: every tensor an op makes, until it dies.

What an op takes for itself while it runs (a workspace of a library) is not seen; plans keep a reserve for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from loadmaster.modules.live_storages import LiveBytes
from loadmaster.shards.model.blocks import Chain, call_block
from loadmaster.shards.spec.trial import COMPUTE_DTYPE, Trial, compute_loss


@dataclass(frozen=True, slots=True)
class BlockPeaks:
    """Bytes beside weights and the block's input."""

    forward: tuple[int, ...]  # [block] at most, without gradients
    kept: tuple[int, ...]  # [block] after a forward with gradients: what backward needs, and the output
    backward: tuple[int, ...]  # [block] at most over forward and backward, gradients of weights included


def measure_block_peaks(
    trial: Trial, chain: Chain, inputs: Any, targets: Any, parameters: Sequence[torch.Tensor]
) -> BlockPeaks:
    """Run every block forward, and forward and backward; the last one with the loss."""
    dtype, device = COMPUTE_DTYPE[trial.precision], parameters[0].device.type
    rows: list[tuple[int, int, int]] = []
    value = inputs
    last = len(chain.blocks) - 1
    known: dict[object, tuple[tuple[int, int, int], Any]] = {}
    for index, block in enumerate(chain.blocks):
        kind = None if index in (0, last) else (block_signature(block), tree_signature(value))
        if kind in known:  # each type of block once
            row, value = known[kind]
            rows.append(row)
            continue
        autocast = torch.autocast(device, dtype=dtype, enabled=dtype is not None)
        given = tree_map(_copy_tensor, value)
        with torch.no_grad(), autocast, LiveBytes() as live:
            out = call_block(block, given, first=index == 0)
        forward = live.peak_bytes
        del out, given
        given = tree_map(_make_leaf, value)
        live = LiveBytes()
        with autocast, live:
            out = call_block(block, given, first=index == 0)
            loss = compute_loss(trial, out, targets) if index == last else None
        kept = live.now_bytes
        value = tree_map(_detach_tensor, out)
        with live:
            if loss is not None:
                loss.backward()
            else:
                _run_backward(out)
        rows.append((forward, kept, live.peak_bytes))
        known[kind or index] = rows[-1], value
        for parameter in parameters:
            parameter.grad = None
        del out, loss, given
    return BlockPeaks(*zip(*rows, strict=True))


def block_signature(block: torch.nn.Module) -> object:
    """Equal for blocks that compute the same of tensors alike: modules, shapes, plain attributes."""
    plain = (int, float, bool, str, bytes, tuple, type(None), torch.dtype)
    return repr(block), tuple(
        (
            type(module),
            tuple((n, v if isinstance(v, plain) else id(v)) for n, v in vars(module).items() if n[0] != "_"),
            tuple((n, t.shape, t.dtype, t.requires_grad) for n, t in module.named_parameters(recurse=False)),
            tuple((n, t.shape, t.dtype) for n, t in module.named_buffers(recurse=False)),
        )
        for module in block.modules()
    )


def tree_signature(tree: Any) -> object:
    """Equal for trees of tensors alike."""
    leaves, spec = tree_flatten(tree)
    return str(spec), tuple(
        (leaf.shape, leaf.dtype, leaf.stride()) if isinstance(leaf, torch.Tensor) else id(leaf)
        for leaf in leaves
    )


def _run_backward(out: Any) -> None:
    wanted = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(tensor) for tensor in wanted])


def _copy_tensor(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _detach_tensor(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _make_leaf(value: Any) -> Any:
    """A tensor that wants a gradient and may be written into."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_().clone()
    return value
