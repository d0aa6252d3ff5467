"""Capture: an unmodified `nn.Module` and example inputs become the Graph of its whole training step.

    graph = capture(model, (tokens,), optimizer=torch.optim.AdamW)

Nothing is computed and no weight is allocated: the model is copied onto fake tensors, and what it would run
is written down, in three ways, of which the first that works is taken:

    joint      torch.export gives the forward pass; it is run node by node under autograd, so that every op
               of the backward pass is known to belong to the node whose gradient it computes. The forward
               ops are the nodes of the exported graph, with their names and in their order
    traced     the model is run as it stands, op by op, and autograd after it; values it reads come from one
               real run of the example where it has weights, else from an assumption, and are counted
    estimated  the forward pass as above, the backward pass from rules about each op

`Graph.capture` says which it was. Needs the extra `[torch]`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.graph import Graph

if TYPE_CHECKING:
    import torch
    from torch import nn

PATHS = ("joint", "traced", "estimated")
DEFAULT_OPTIMIZER = "adamw"


def capture(
    model: "nn.Module",
    args: "tuple[Any, ...] | torch.Tensor" = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: Any = DEFAULT_OPTIMIZER,
    loss: "Callable[[Any], torch.Tensor] | None" = None,
    train: bool = True,
    target: str | None = None,
    path: str | None = None,
    autocast: "torch.dtype | None" = None,
    accumulation: int = 1,
    grad_scaler: bool = False,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    assume: float = 1.0,
    name: str = "",
) -> Graph:
    """Record the training step of a model as a Graph. With `train=False`, record its inference.

    - `optimizer`: a class, a name, a function of the weights, an optimizer, or None.
    - `loss`: makes one number of the model's output. Default: the model's own loss if it returns one,
      otherwise the mean of its outputs.
    - `target`: the device kind whose kernels are recorded, 'cpu' or 'cuda'.
    - `autocast`: the dtype of mixed precision; `grad_scaler`: whether its loss is scaled.
    - `accumulation`: forward and backward passes before each update.
    - `ranges`: sizes such as {"batch": (1, 64), "seq": (2, 1024)}; the model must run the same ops at both
      ends.
    - `assume`: the value to assume for values that the model reads and that capture cannot know.
    """
    if path is not None and path not in PATHS:
        raise UnknownNameError("path", str(path), PATHS)
    torch = _import_torch()
    from loadmaster.graph.torch_capture.paths.request import CaptureRequest
    from loadmaster.graph.torch_capture.paths.size_ranges import check_ranges
    from loadmaster.modules.randomness import preserve_rng
    from loadmaster.modules.torch_state import force_eager, silence_torch

    inputs = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    title = name or type(model).__name__
    request = CaptureRequest(
        model=model,
        args=inputs,
        kwargs=dict(kwargs or {}),
        optimizer=optimizer,
        loss=loss,
        train=train,
        target=target,
        autocast=autocast,
        assume=assume,
        name=title,
        accumulation=accumulation,
        grad_scaler=grad_scaler,
        ranges=check_ranges(ranges, (inputs, dict(kwargs or {}))),
    )
    own_draws = torch.random.fork_rng(devices=[])
    with silence_torch(), force_eager(torch), preserve_rng(), own_draws:
        request.check()
        return request.capture_graph(path)


def _import_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise InputError("capture needs PyTorch; install it with: pip install 'loadmaster[torch]'") from None
    return torch
