"""Adoption: modules and weights that came into a model after it was placed get a device, too.

Adapters, parametrizations and modules that are wrapped or exchanged change the tree under the engines. A
weight that was there before stays where it is, whatever it is called now; a new one goes to the device of its
module, and a new module to that of the module around it.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from loadmaster.runtime.graph_engine.python_attributes import list_modules

Move = Callable[[str, torch.Tensor, int], None]  # a weight's name, the weight, and its device


@dataclass(slots=True)
class Residents:
    """The modules and weights of a placed model that have a device."""

    root: nn.Module
    homes: dict[str, int]  # of every weight and buffer: kept as it is for those who hold it
    places: dict[str, int]  # of modules
    move: Move
    _structure: list[Any] = field(default_factory=list)  # held, so that no other has its identity
    _home_of: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """All that is there now is known."""
        self._remember(self._list_structure())

    def adopt_new(self) -> list[str] | None:
        """Give a device to what has come since; gives its names, None where all is as it was.

        A module or weight in the place of another has its name, and is not named.
        """
        now = self._list_structure()
        if len(now) == len(self._structure) and all(map(operator.is_, now, self._structure)):
            return None
        places: dict[str, int] = {}
        new: list[str] = []
        for path, _ in self.root.named_modules():
            places[path] = self.places.get(path, places.get(path.rpartition(".")[0], 0))
            new += [path] * (path not in self.places)
        homes: dict[str, int] = {}
        for name, tensor in [*self.root.named_parameters(), *self.root.named_buffers()]:
            known = self._home_of.get(id(tensor))
            homes[name] = self.homes.get(name, places[name.rpartition(".")[0]]) if known is None else known
            if known is None:
                self.move(name, tensor, homes[name])
                new += [name] * (name not in self.homes)
        for table, found in ((self.places, places), (self.homes, homes)):
            table.clear()
            table.update(found)
        self._remember(now)
        return new

    def _remember(self, structure: list[Any]) -> None:
        self._structure = structure
        tensors = [*self.root.named_parameters(), *self.root.named_buffers()]
        self._home_of = {id(tensor): self.homes[name] for name, tensor in tensors}

    def _list_structure(self) -> list[Any]:
        found: list[Any] = []
        for module in list_modules(self.root):
            for table in (module._modules, module._parameters, module._buffers):
                if table:
                    found.extend(table)
                    found.extend(table.values())
        return found
