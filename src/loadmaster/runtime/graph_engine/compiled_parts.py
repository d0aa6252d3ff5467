"""Parts: a placed graph cut into runs of ops on one device, each compiled by torch.compile.

Ops stand in the order in which they are issued; a part ends where the device changes, where something is
copied, and where a region (grad mode, autocast) changes. Copies and edges stay between the parts, so that
what autograd sends home is what it was. Compiled kernels round otherwise and draw other random numbers than
the model's own ops; on logical devices only what leaves a part is counted.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from loadmaster.core.errors import RunError
from loadmaster.modules.torch_state import silence_torch
from loadmaster.runtime.transport.byte_accounts import Accounts
from loadmaster.runtime.transport.copies import move_to_device

_FEWEST = 2  # ops that are worth compiling
_LONGEST = 300  # characters of torch's own message


@dataclass(frozen=True, slots=True)
class Parts:
    """A graph whose parts are compiled."""

    module: fx.GraphModule
    device: dict[str, int]  # of parts and copies, by the name of their module
    num_compiled: int

    def run(self, accounts: Accounts | None, *args: Any) -> Any:
        """Run it; with `accounts`, what leaves a part is counted on its device."""
        if accounts is None:
            return self.module(*args)
        return _PartInterpreter(self.module, accounts, self.device).run(*args, enable_io_processing=False)


def compile_parts(module: fx.GraphModule, *, backend: str) -> Parts:
    """The same graph with its parts compiled."""
    part_of, sizes, compiles, device = _cut_into_parts(module.graph)
    made = split_module(module, module, lambda node: part_of[node], keep_original_order=True)
    devices, count = {}, 0
    for name, part in list(made.named_children()):
        number = int(name.rpartition("_")[2]) if name.startswith("submod_") else -1
        if number in device:
            devices[name] = device[number]
        if sizes.get(number, 0) >= _FEWEST and number in compiles:
            setattr(made, name, Part(part, backend))
            count += 1
    return Parts(made, devices, count)


def _cut_into_parts(graph: fx.Graph) -> tuple[dict[fx.Node, int], dict[int, int], set[int], dict[int, int]]:
    """The part of every node; how many ops parts have, which are compiled, and where they are."""
    part_of: dict[fx.Node, int] = {}
    sizes: dict[int, int] = {}
    compiles: set[int] = set()
    device: dict[int, int] = {}
    last, number = -1, 0
    for node in graph.nodes:
        if node.op in ("call_function", "get_attr"):
            plain = "device" in node.meta and "role" not in node.meta and node.target is not move_to_device
            here = node.meta["device"] if plain else -1
            number += here < 0 or here != last
            last = here
            sizes[number] = sizes.get(number, 0) + 1
            compiles |= {number} if plain else set()
            if "device" in node.meta:
                device[number] = node.meta["device"]
        part_of[node] = number
    return part_of, sizes, compiles, device


class Part(torch.nn.Module):
    """Ops of one device, compiled when they first run."""

    def __init__(self, module: torch.nn.Module, backend: str) -> None:
        super().__init__()
        self.backend, self.compiled = backend, torch.compile(module, backend=backend)
        self.ran = False

    def forward(self, *args: Any) -> Any:
        """What the ops give."""
        try:
            with (
                contextlib.nullcontext() if self.ran else silence_torch()
            ):  # what compiling warns of is torch's own
                out = self.compiled(*args)
            self.ran = True
            return out
        except torch._dynamo.exc.TorchDynamoException as problem:
            text = " ".join(str(problem).split())[:_LONGEST]
            raise RunError(
                f"torch.compile by {self.backend!r} failed: {text}; leave compile out, or name a backend"
                " that needs no compiler, e.g. compile='aot_eager'"
            ) from problem


class _PartInterpreter(fx.Interpreter):
    """Runs a graph of parts; what leaves a part, or is copied, is counted on its device."""

    def __init__(self, module: fx.GraphModule, accounts: Accounts, devices: Mapping[str, int]) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors keep their own words
        self._accounts, self._devices = accounts, devices

    def run_node(self, n: fx.Node) -> Any:
        """One part, copy or op."""
        out = super().run_node(n)
        at = self._devices.get(str(n.target)) if n.op == "call_module" else None
        if at is not None:
            self._accounts.add(out, at, f"what leaves {n.target}")
        return out
