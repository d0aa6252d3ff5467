"""Clock: when each op of a placed model's step began and ended, on the device that ran it.

The graph runs node by node, a mark before and after each: of the host's clock where the CPU runs the op, of
events on the stream where a GPU does. Autograd's nodes get hooks that push a dispatch mode, so that every op
of the backward pass is seen; the optimizer and the loss run under the same mode. A mark costs about a
microsecond; what lies between ops is not part of any span.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from loadmaster.modules.op_signature import kind_of
from loadmaster.runtime.graph_engine.rewrite import COPY, EDGE
from loadmaster.runtime.transport.devices import RunDevice

Mark = Any  # seconds of the host; of a GPU an event, and the host's seconds when it was recorded
LOSS = "loss"


@dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """Something that ran: what, where, from when to when."""

    what: str  # 'forward', 'backward', 'transfer' or 'update'
    name: str  # of the op; backward: of the op whose gradient it is; update: of the weight
    kind: str  # of a backward op
    device: int  # backward of a loss and updates: -1, the plan knows
    source: int  # of a transfer: where it came from
    start_s: float
    end_s: float
    issue_s: float = 0.0  # the host's time to launch it, where a GPU ran it
    share: float = 1.0  # of an update of several weights at once


class Clock:
    """Marks of one step; `seen` is what they say."""

    def __init__(self, devices: Sequence[RunDevice]) -> None:
        self.suffix = ""  # of the names of ops, where a step has several passes
        self.known: set[Any] = set()  # autograd's nodes that are hooked
        self._where = [device.where for device in devices]
        self._spans: list[tuple[str, str, str, int, int, torch.device, Mark, Mark, float]] = []
        self._zero: dict[torch.device, tuple[float, Any]] = {}
        for where in {one for one in self._where if one.type == "cuda"}:
            torch.cuda.synchronize(where)
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(where))
            self._zero[where] = (time.perf_counter(), event)

    def mark(self, where: torch.device) -> Mark:
        """Now, on a device."""
        if where.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(where))
        return event, time.perf_counter()

    def note(
        self,
        what: str,
        name: str,
        begin: Mark,
        *,
        at: int,
        kind: str = "",
        source: int = -1,
        where: torch.device | None = None,
        share: float = 1.0,
        end: Mark = None,
    ) -> None:
        """Something ran from a mark until now (or until `end`)."""
        place = where if where is not None else self._where[at]
        done = self.mark(place) if end is None else end
        self._spans.append((what, name, kind, at, source, place, begin, done, share))

    def list_spans(self) -> list[MeasuredSpan]:
        """All that ran, in seconds of the host's clock."""
        for where in self._zero:
            torch.cuda.synchronize(where)
        found = []
        for what, name, kind, at, source, where, begin, end, share in self._spans:
            first, last = self._seconds(begin, where), self._seconds(end, where)
            issue_s = 0.0 if isinstance(begin, float) else end[1] - begin[1]
            found.append(MeasuredSpan(what, name, kind, at, source, first, max(first, last), issue_s, share))
        return found

    def _seconds(self, mark: Mark, where: torch.device) -> float:
        if isinstance(mark, float):
            return mark
        began, zero = self._zero[where]
        return began + 1e-3 * float(zero.elapsed_time(mark[0]))

    def place(self, at: int) -> torch.device:
        """Where a device is."""
        return self._where[at]

    @contextmanager
    def loss(self) -> Iterator[None]:
        """What runs is the loss."""
        with _OpTimer(self, "forward", LOSS, -1, None):
            yield

    def watch_backward(self, tree: Any, at: int, name: str, *, far: int = -1) -> None:
        """What autograd's new nodes behind these outputs run is seen; `far`: a gradient comes from there."""
        waiting = [leaf.grad_fn for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        while waiting:
            node = waiting.pop()
            if node is None or node in self.known:
                continue
            self.known.add(node)
            waiting += [behind for behind, _ in node.next_functions]
            if node.name() == "torch::autograd::AccumulateGrad":
                continue
            if far >= 0:
                self._hook_transfer(node, name, far, at)
            else:
                self._hook(node, name, at)

    def _hook(self, node: Any, name: str, at: int) -> None:
        ops = _OpTimer(self, "backward", name, at, self._where[at] if at >= 0 else None)

        def before(grads: Any) -> None:
            _push_mode(ops)

        def after(made: Any, given: Any) -> None:
            _pop_mode()

        node.register_prehook(before)
        node.register_hook(after)

    def _hook_transfer(self, node: Any, name: str, source: int, home: int) -> None:
        began: list[Mark] = []

        def before(grads: Any) -> None:
            began.append(self.mark(self._where[home]))

        def after(made: Any, given: Any) -> None:
            if began:
                self.note("transfer", name, began.pop(), at=home, source=source)

        node.register_prehook(before)
        node.register_hook(after)


class _OpTimer(TorchDispatchMode):
    """Notes every op but views, one by one."""

    def __init__(self, clock: Clock, what: str, name: str, at: int, where: torch.device | None) -> None:
        """Without `where`, ops run where their first tensor is."""
        super().__init__()
        self._clock, self._what, self._name, self._at, self._where = clock, what, name, at, where

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op between two marks."""
        where = self._where if self._where is not None else _first_device(args)
        begin = self._clock.mark(where)
        out = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            kind = kind_of(func)
            self._clock.note(self._what, self._name, begin, at=self._at, kind=kind, where=where)
        return out


def _first_device(args: Any) -> torch.device:
    tensors = (leaf.device for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
    return next(tensors, torch.device("cpu"))


class UpdateTimer(TorchDispatchMode):
    """Notes what an optimizer does, weight by weight; lists of weights share the time of one op."""

    def __init__(self, clock: Clock, model: torch.nn.Module, optimizer: Any) -> None:
        super().__init__()
        self._clock = clock
        self._owner: dict[int, str] = {}
        self._bytes: dict[str, int] = {}
        self._where: dict[str, torch.device] = {}
        self._now: tuple[tuple[str, ...], Mark, Mark] | None = None
        for name, weight in model.named_parameters():
            self._bytes[name], self._where[name] = max(1, weight.nbytes), weight.device
            for tensor in tree_leaves((weight, weight.grad, dict(optimizer.state.get(weight, {})))):
                if isinstance(tensor, torch.Tensor):
                    self._owner[tensor.untyped_storage()._cdata] = name

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; what belongs to the weights of the op before goes on with them."""
        names = self._names(args[0]) if args else ()
        where = self._where[names[0]] if names else torch.device("cpu")
        begin = self._clock.mark(where)
        out = func(*args, **(kwargs or {}))
        if names and (self._now is None or names != self._now[0]):
            self.close()
            self._now = (names, begin, self._clock.mark(where))
        elif self._now is not None:
            where = self._where[self._now[0][0]]
            self._now = (self._now[0], self._now[1], self._clock.mark(where))
        return out

    def close(self) -> None:
        """The last weights are done."""
        if self._now is None:
            return
        names, begin, end = self._now
        total = sum(self._bytes[name] for name in names)
        for name in names:
            share = self._bytes[name] / total
            where = self._where[name]
            self._clock.note("update", name, begin, at=-1, where=where, share=share, end=end)
        self._now = None

    def _names(self, first: Any) -> tuple[str, ...]:
        tensors = first if isinstance(first, list | tuple) else [first]
        found = [self._owner.get(t.untyped_storage()._cdata) for t in tensors if isinstance(t, torch.Tensor)]
        return tuple(dict.fromkeys(name for name in found if name is not None))


class TimedInterpreter(fx.Interpreter):
    """Runs a placed graph node by node under a clock; bytes are not counted meanwhile."""

    def __init__(self, module: fx.GraphModule, clock: Clock, device: Mapping[fx.Node, int]) -> None:
        """`device` is where the program's own nodes are."""
        super().__init__(module)
        self.extra_traceback = False  # errors keep their own words
        self._clock, self._device = clock, device

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        if n.op != "call_function" or "device" not in n.meta:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        clock, at, name = self._clock, n.meta["device"], n.meta["op"] + self._clock.suffix
        begin = clock.mark(clock.place(at))
        out = n.target(*args, **kwargs)
        role = n.meta.get("role")
        if role == COPY:
            clock.note("transfer", name, begin, at=at, source=self._device[n.meta["source"]])
        elif role is None:
            clock.note("forward", name, begin, at=at)
        far = at if role == EDGE else -1
        clock.watch_backward(out, n.meta["back"], name, far=far)
        return out
