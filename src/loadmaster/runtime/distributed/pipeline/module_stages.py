"""Module stages: one stage of a model that was cut at module boundaries (`module_cut`).

A stage runs the model's own forward. Units of earlier stages are not run: they give what was received. Units
of its own run, and the first one of a later stage ends the pass. What goes on is everything that units have
given so far, with the state of the generators after each unit that drew random numbers, so that glue draws
on every stage what it drew on the first.

    stage 0   a ── glue ── b ──┊                         sends a, b
    stage 1   a'── glue ── b'──┊ glue ── c ──┊           sends a, b, c
    stage 2   a'── glue ── b'────glue ── c'──┊ glue ── d ── loss

Gradients come back in the same way: of every output that a later stage used, summed over those stages.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten, treespec_dumps, treespec_loads

from loadmaster.core.errors import RunError
from loadmaster.modules.randomness import Generators, capture_generators, restore_generators
from loadmaster.runtime.distributed.pipeline.module_cut import ModuleCut, calls_replaced

_PLAIN = (bool, int, float, str, type(None))


class _Call(msgspec.Struct, frozen=True, array_like=True):
    """One call of a unit, as it goes to later stages."""

    unit: int
    leaves: tuple[bool | int | float | str | None, ...]  # None where a tensor or None stands
    tensors: tuple[bool, ...]  # [leaf] whether it is a tensor
    drew: int  # states of generators that follow
    spec: str = ""  # how the output is made up, where the rehearsal did not see it


class _Reached(BaseException):
    """The first unit of a later stage; no error, so that no model catches it."""


class ModuleStage(nn.Module):
    """One stage; its weights are the model's own objects under their own names."""

    num_received = sys.maxsize  # all that comes is tensors of units

    def __init__(
        self, index: int, cut: ModuleCut, model: nn.Module, in_spec: Any, where: torch.device
    ) -> None:
        super().__init__()
        self.index, self.cut, self.where = index, cut, where
        self.__dict__["model"] = model  # no child: most of it is on other stages
        self.__dict__["in_spec"] = in_spec

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that this stage reads."""
        yield from (one for one in self.__dict__["model"].named_parameters() if self._reads(one[0]))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that this stage reads."""
        yield from (one for one in self.__dict__["model"].named_buffers() if self._reads(one[0]))

    @property
    def written(self) -> frozenset[str]:
        """Names of buffers that its forward changes, and may read."""
        return frozenset(name for name in self.cut.changed if self._reads(name))

    @property
    def holder(self) -> nn.Module:
        """What has the buffers that the forward reads."""
        model: nn.Module = self.__dict__["model"]
        return model

    def _reads(self, name: str) -> bool:
        return self.index in self.cut.readers.get(name, ())

    def forward(self, *received: torch.Tensor, leaves: Sequence[Any] = ()) -> tuple[Any, ...]:
        """What units have given so far; of the last stage what the model gives, as it is."""
        moved = [one.to(self.where) if isinstance(one, torch.Tensor) else one for one in leaves]
        args, kwargs = tree_unflatten(moved, self.__dict__["in_spec"])
        model: nn.Module = self.__dict__["model"]
        replay = _Replay(self.index, self.cut, model, self.where, list(received))
        try:
            with calls_replaced(model, self.cut.stage, replay.call):
                out = model(*args, **kwargs)
        except _Reached:
            return replay.given()
        return (out,) if self.index == self.cut.num_stages - 1 else replay.given()


@dataclass(slots=True)
class _Replay:
    """One forward pass as one stage takes part in it."""

    index: int
    cut: ModuleCut
    model: nn.Module
    where: torch.device
    received: list[torch.Tensor]
    position: int = 0
    _inside: bool = False
    _calls: list[_Call] = field(default_factory=list)
    _tensors: list[torch.Tensor] = field(default_factory=list)
    _coming: list[_Call] = field(default_factory=list)
    _at: int = 1  # in what was received, behind the list of calls
    _count: dict[str, int] = field(default_factory=dict)
    _number: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read which calls come."""
        self._number = {path: at for at, path in enumerate(self.cut.stage)}
        if self.received:
            self._coming = msgspec.json.decode(bytes(self.received[0].cpu().numpy()), type=list[_Call])

    def call(self, path: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit: given as it came, run, or the end of this stage."""
        if self._inside:
            return run(*args, **kwargs)
        if len(self._calls) < len(self._coming):  # it ran on an earlier stage
            return self._take(path)
        at = max(self.position, self.cut.stage[path])
        if at > self.index:
            raise _Reached
        self.position = max(at, self.index)
        return self._run(path, run, args, kwargs)

    def _take(self, path: str) -> Any:
        call = self._coming[len(self._calls)]
        units = self.cut.units
        if units[call.unit] != path:
            raise RunError(
                f"stage {self.index} came to module {path!r} where the stage before it had run"
                f" {units[call.unit]!r}; which way a model takes may depend on values it computes, not on"
                " anything that differs between processes"
            )
        leaves: list[Any] = []
        for leaf, is_tensor in zip(call.leaves, call.tensors, strict=True):
            leaves.append(self._pop() if is_tensor else leaf)
        if call.drew:
            states = [self._pop().cpu().clone() for _ in range(call.drew)]
            restore_generators(Generators(states[0], states[1] if call.drew > 1 else None), self.where)
        self._calls.append(call)
        return self._give(path, tree_unflatten(leaves, self._spec(path, call)))

    def _pop(self) -> torch.Tensor:
        tensor = self.received[self._at]
        self._at += 1
        self._tensors.append(tensor)
        return tensor

    def _spec(self, path: str, call: _Call) -> Any:
        """How the output of a call is made up: as was sent, else as in the rehearsal."""
        if call.spec:
            return treespec_loads(call.spec)
        number = self._count.get(path, 0)
        self._count[path] = number + 1
        return self.cut.made[path][min(number, len(self.cut.made[path]) - 1)]

    def _run(self, path: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lacking = next((one for one in self.model.get_submodule(path).parameters() if one.is_meta), None)
        if lacking is not None:
            raise RunError(
                f"module {path!r} is called on stage {self.index} now, and its weights are on another stage:"
                " the model took another way than with its first batch; plan it on one stage"
            )
        before = capture_generators(self.where, others=False)
        self._inside = True
        try:
            out = run(*args, **kwargs)
        finally:
            self._inside = False
        leaves, spec = tree_flatten(out)
        wrong = [one for one in leaves if not isinstance(one, (torch.Tensor, *_PLAIN))]
        if wrong and self.index < self.cut.num_stages - 1:
            raise RunError(
                f"module {path!r} gives a {type(wrong[0]).__name__}, and only tensors and plain values"
                " go from stage to stage (for models of transformers set use_cache=False)"
            )
        states = self._states_since(before)
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        plain = tuple(None if isinstance(one, torch.Tensor) else one for one in leaves) if not wrong else ()
        kinds = tuple(isinstance(one, torch.Tensor) for one in leaves)
        new = "" if path in self.cut.made else treespec_dumps(spec)
        self._calls.append(_Call(self._number[path], plain, kinds, len(states), new))
        self._tensors += [*tensors, *states]
        return self._give(path, out)

    def _states_since(self, before: Generators) -> list[torch.Tensor]:
        """The generators' states, where they have changed."""
        now = capture_generators(self.where, others=False)
        pairs = [(before.host, now.host), (before.device, now.device)]
        states = [(old, new) for old, new in pairs if old is not None and new is not None]
        changed = any(not torch.equal(old, new) for old, new in states)
        return [new for _, new in states] if changed else []

    def _give(self, path: str, out: Any) -> Any:
        """The output, or a copy where glue writes into it: what is sent stays as it was made."""
        return tree_map_only(torch.Tensor, torch.clone, out) if path in self.cut.written else out

    def given(self) -> tuple[torch.Tensor, ...]:
        """What goes to the next stage."""
        text = bytearray(msgspec.json.encode(self._calls))
        return (torch.frombuffer(text, dtype=torch.uint8), *self._tensors)
