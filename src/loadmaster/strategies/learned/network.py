"""The network: attention over groups, devices and links between them, then a score for each action. [torch]

Five relations as in TAG: a group's users and producers, devices by their links, and groups with devices
both ways. Layer norm instead of batch norm, as each record is a batch of its own. An action is scored
from the devices it takes, one action at a time, so that any number of devices and actions works; a
second head guesses the value.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from loadmaster.core.errors import FormatError, InputError
from loadmaster.strategies.learned.features import DEVICE_INPUTS, GROUP_INPUTS, LINK, MODES, PLACE

VERSION = 1
MOST_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Spec:
    """Sizes."""

    width: int = 48
    layers: int = 3


class Attention(nn.Module):
    """From one kind of node to another; edges have features, and edges of zeros alone may be left out."""

    def __init__(self, width: int, edge: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.edge, self.mixed = nn.Linear(edge, 1), nn.Linear(edge, width, bias=False)

    def forward(self, target: Tensor, source: Tensor, edges: Tensor, present: Tensor) -> Tensor:
        """[B, T, W] from [B, S, W] over [B, T, S, E]."""
        score = self.query(target) @ self.key(source).transpose(1, 2) / math.sqrt(target.shape[-1])
        score = (score + self.edge(edges).squeeze(-1)).masked_fill(~present, -1e9)
        weight = score.softmax(-1) * present.any(-1, keepdim=True)
        along: Tensor = weight @ self.value(source) + self.mixed((weight.unsqueeze(-1) * edges).sum(2))
        return along


class Layer(nn.Module):
    """One round over all relations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.users, self.producers = Attention(width, 1), Attention(width, 1)
        self.links = Attention(width, LINK)
        self.place, self.serve = Attention(width, PLACE), Attention(width, PLACE)
        self.group, self.device = nn.Linear(3 * width, width), nn.Linear(2 * width, width)
        self.group_norm, self.device_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(
        self, g: Tensor, d: Tensor, before: Tensor, link: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Groups and devices after the round."""
        down, up = before.transpose(1, 2).unsqueeze(-1), before.unsqueeze(-1)
        every = torch.ones(1, dtype=torch.bool, device=g.device)
        told = [
            self.producers(g, g, down, down.squeeze(-1) > 0),
            self.users(g, g, up, up.squeeze(-1) > 0),
            self.serve(g, d, place, every.expand(place.shape[:3])),
        ]
        seen = [
            self.links(d, d, link, every.expand(link.shape[:3])),
            self.place(d, g, place.transpose(1, 2), every.expand(place.transpose(1, 2).shape[:3])),
        ]
        g = self.group_norm(g + torch.tanh(self.group(torch.cat(told, -1))))
        d = self.device_norm(d + torch.tanh(self.device(torch.cat(seen, -1))))
        return g, d


class Network(nn.Module):
    """Prior over actions of the group whose turn it is, and the value of the state."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, w = spec, spec.width
        self.group, self.device = nn.Linear(GROUP_INPUTS, w), nn.Linear(DEVICE_INPUTS, w)
        self.layers = nn.ModuleList(Layer(w) for _ in range(spec.layers))
        self.taken = nn.Sequential(nn.Linear(w + PLACE, w), nn.Tanh(), nn.Linear(w, w))
        self.decide = nn.Sequential(nn.Linear(2 * w + MODES + 1, w), nn.Tanh(), nn.Linear(w, 1, bias=False))
        self.value = nn.Sequential(nn.Linear(2 * w, w), nn.Tanh(), nn.Linear(w, 1))

    def forward(self, inputs: "Inputs") -> tuple[Tensor, Tensor]:
        """[B, A] logits and [B] values."""
        g = torch.tanh(self.group(inputs.group))
        d = torch.tanh(self.device(inputs.device))
        for layer in self.layers:
            g, d = layer(g, d, inputs.before, inputs.link, inputs.place)
        rows = torch.arange(len(g))
        mine, at = g[rows, inputs.turn], inputs.place[rows, inputs.turn]  # [B, W], [B, D, PLACE]
        each = self.taken(torch.cat([d, at], -1))  # [B, D, W]
        count = inputs.mask.sum(-1, keepdim=True)
        joined = inputs.mask @ each / count  # [B, A, W]
        shared = mine.unsqueeze(1).expand(-1, joined.shape[1], -1)
        mode = inputs.mode.expand(len(g), -1, -1)
        size = (count / inputs.mask.shape[-1]).expand(len(g), -1, -1)
        logits = self.decide(torch.cat([joined, shared, mode, size], -1)).squeeze(-1)
        value = self.value(torch.cat([g.mean(1), d.mean(1)], -1)).squeeze(-1)
        return logits, value


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of B states of one record."""

    group: Tensor  # [B, G, GROUP_INPUTS]
    device: Tensor  # [B, D, DEVICE_INPUTS]
    before: Tensor  # [B, G, G]
    link: Tensor  # [B, D, D, LINK]
    place: Tensor  # [B, G, D, PLACE]
    turn: Tensor  # [B]
    mask: Tensor  # [1, A, D]
    mode: Tensor  # [1, A, MODES]


def save_network(network: Network, path: Path, notes: dict[str, str]) -> None:
    """Weights with their version and sizes, as safetensors."""
    from safetensors.torch import save

    sizes = {name: str(size) for name, size in asdict(network.spec).items()}
    told = ", ".join(f"{k}={v}" for k, v in sorted({**notes, **sizes, "version": str(VERSION)}.items()))
    path.write_bytes(
        save(dict(network.state_dict()), {"about": told})
    )  # one entry: several come in any order


def load_network(path: Path) -> Network:
    """The network of a file; weights of another version or size are refused by name."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InputError(f"there are no weights at {path}; name a .safetensors file, or use 'shipped'")
    if path.stat().st_size > MOST_BYTES:
        raise FormatError(
            f"{path} has {path.stat().st_size} bytes; weights of a guide have at most {MOST_BYTES}"
        )
    try:
        with safe_open(path, "pt") as file:
            about = dict(
                part.split("=", 1)
                for part in (file.metadata() or {}).get("about", "").split(", ")
                if "=" in part
            )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as trouble:
        raise FormatError(f"{path} is not a safetensors file: {trouble}") from None
    if about.get("version") != str(VERSION):
        raise FormatError(
            f"{path} has weights of network version {about.get('version', 'unknown')}, not {VERSION};"
            " train them again, or use 'shipped'"
        )
    try:
        network = Network(Spec(int(about["width"]), int(about["layers"])))
        network.load_state_dict(tensors)
    except (KeyError, ValueError, RuntimeError) as trouble:
        raise FormatError(f"{path} has other weights than its network: {str(trouble)[:200]}") from None
    return network.eval()
