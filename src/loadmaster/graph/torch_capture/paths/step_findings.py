"""Step findings: weights of which a captured step makes less than a model means it to.

    unread        no op of the forward pass reads a weight that is trained
    no_gradient   a weight is read, and wants a gradient, but none comes back
    few_flops     products with a weight were recorded with less than half of the flops that the shapes of
                  their operands imply, or a layer's weight is read and never multiplied

Each of them is harmless in some model, and each is also what a wrong branch looks like.
"""

import torch
from torch import nn

from loadmaster.core.findings import Finding, group_names
from loadmaster.core.graph import Graph, Phase
from loadmaster.graph.torch_capture.record.weight_products import WeightProducts
from loadmaster.modules.fake_model import FakeModel

_LEAST_SHARE = 0.5
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


def find_findings(
    fake: FakeModel, graph: Graph, products: WeightProducts, *, train: bool
) -> tuple[Finding, ...]:
    """What to warn of in a captured step."""
    weights = {name: weight for name, weight in fake.weights().items() if weight.requires_grad}
    read = _find_read(graph)
    # in inference a vector that only training uses (the embedding of a mask) may well be left out
    unread = [name for name, weight in weights.items() if name not in read and (train or weight.dim() > 1)]
    ungiven = [name for name, weight in weights.items() if train and name in read and weight.grad is None]
    few = [
        name for name, implied in products.implied.items() if products.recorded[name] < _LEAST_SHARE * implied
    ]
    few += [name for name in _find_layers(fake, weights) if name in read and name not in products.implied]
    texts = {
        "unread": (unread, "no op of the forward pass reads {}: are these layers skipped?"),
        "no_gradient": (ungiven, "no gradient reaches {}: is something detached?"),
        "few_flops": (
            few,
            "products with {} were recorded with less than half of the flops that their shapes imply, so"
            " the step time is too short",
        ),
    }
    return tuple(
        Finding(kind, text.format(_count_names(tuple(names))), tuple(names))
        for kind, (names, text) in texts.items()
        if names
    )


def _count_names(names: tuple[str, ...]) -> str:
    what = "1 trained weight" if len(names) == 1 else f"{len(names)} trained weights"
    return f"{what} ({group_names(names)})"


def _find_read(graph: Graph) -> set[str]:
    """Names of the weights that a forward op reads, or that share their memory with one."""
    forward = graph.phase[graph.use_op] == Phase.FORWARD
    makers = set(graph.tensor_op[graph.use_tensor[forward]].tolist())
    return {graph.op_name[op] for op in makers if graph.phase[op] == Phase.PARAM}


def _find_layers(fake: FakeModel, weights: dict[str, torch.Tensor]) -> list[str]:
    """Names of the weights of plain linear and convolution layers, which only a product uses."""
    own = {id(module._parameters.get("weight")) for module in fake.model.modules() if _is_layer(module)}
    return [name for name, weight in weights.items() if id(weight) in own]


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, _LAYERS)
