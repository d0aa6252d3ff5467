"""Update: what an optimizer keeps beside each weight, and what its step moves, by running it on fake tensors.

The optimizer is made on the fake weights and steps twice: the first step makes its state, the second is
measured. What it touches belongs to the weight whose weight, gradient or state it is; lists (foreach) are
taken apart. Values it reads are answered as those of the model are: a step count is known, what depends on a
weight or a gradient is assumed.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loadmaster.core.errors import InputError
from loadmaster.graph.torch_capture.record.data_dependent_reads import Answers, Place
from loadmaster.modules.live_storages import LiveStorages, count_storage_bytes
from loadmaster.modules.named_optimizers import make_optimizer, optimizer_name
from loadmaster.modules.op_signature import find_written
from loadmaster.modules.op_work import tensor_bytes
from loadmaster.modules.optimizer_copies import copy_optimizer
from loadmaster.modules.tensor_trees import list_tensors

UPDATE, FUSED_UPDATE = "update", "fused_update"  # kinds of op: many kernels a weight, or one


@dataclass(slots=True)
class Update:
    """What one weight's update needs."""

    state_bytes: int = 0
    bytes_moved: int = 0
    live_bytes: int = 0
    workspace_bytes: int = 0
    lingers_bytes: int = 0  # still there when the next weight's update begins: Python holds it
    kind: str = UPDATE


class _Owned(NamedTuple):
    """Whose a storage is, and its bytes if the step that is measured made it."""

    weight: int
    fresh_bytes: int


def measure_updates(
    optimizer: Any, weights: list[Any], *, at_once: bool = False, answers: Answers | None = None
) -> list[Update]:
    """One for each weight, which all have a gradient; `at_once`: as torch's optimizers do on a GPU."""
    answers = answers if answers is not None else Answers()
    with _ValueFollower(answers):  # some make their state at once
        made = make_optimizer(optimizer, weights)
    for group in made.param_groups if at_once else ():
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    like = _find_representatives(made, weights)
    stood_for = {at for at, other in enumerate(like) if other != at}
    grads = [weight.grad for weight in weights]
    for at in stood_for:  # an optimizer leaves a weight without gradient alone
        weights[at].grad = None
    meter = _UpdateMeter(weights, answers)
    try:
        with meter, torch.no_grad():
            made.step()
            meter.adopt_state(made.state)
            meter.measuring = True
            made.step()
    except Exception as problem:
        text = " ".join(str(problem).split())[:200]
        raise InputError(
            f"optimizer {optimizer_name(optimizer)} cannot step on fake gradients: {type(problem).__name__}:"
            f" {text}; give one whose state is as large ('adamw', 'momentum', 'sgd'), or optimizer=None to"
            " capture the gradients alone"
        ) from None
    finally:
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
    for at, weight in enumerate(weights):
        if at not in stood_for:
            meter.updates[at].state_bytes = count_storage_bytes(made.state.get(weight, {}))
    fused = {id(one) for group in made.param_groups if group.get("fused") for one in group["params"]}
    kinds = [FUSED_UPDATE if id(weight) in fused else UPDATE for weight in weights]
    found = [replace(meter.updates[other], kind=kind) for other, kind in zip(like, kinds, strict=True)]
    return found if at_once else _with_lingering(found, _update_order(made, weights))


def _with_lingering(found: list[Update], order: list[int]) -> list[Update]:
    """What the update of the weight before left behind is there, too."""
    made, before = list(found), 0
    for at in order:
        made[at] = replace(found[at], workspace_bytes=found[at].workspace_bytes + before)
        before = found[at].lingers_bytes
    return made


def _update_order(made: Any, weights: list[Any]) -> list[int]:
    """The weights in the order in which an optimizer updates them."""
    at = {id(weight): place for place, weight in enumerate(weights)}
    return [at[id(weight)] for group in made.param_groups for weight in group["params"] if id(weight) in at]


def _find_representatives(made: Any, weights: list[Any]) -> list[int]:
    """[weights] the first weight that torch's own optimizers treat the same; others may mix weights."""
    if not type(made).__module__.startswith("torch.optim."):
        return list(range(len(weights)))
    group = {id(weight): at for at, one in enumerate(made.param_groups) for weight in one["params"]}
    first: dict[Any, int] = {}
    return [
        first.setdefault((group.get(id(weight)), weight.shape, weight.stride(), weight.dtype), at)
        for at, weight in enumerate(weights)
    ]


def rebind_optimizer(optimizer: Any, real: torch.nn.Module, fake: torch.nn.Module) -> Any:
    """A function of fake weights that makes an optimizer like the user's; what is a function stays itself."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    pairs = zip(real.named_parameters(), fake.named_parameters(), strict=True)
    twin = {id(weight): other for (_, weight), (_, other) in pairs}

    def make_on_fakes(weights: list[Any]) -> torch.optim.Optimizer:
        wanted, groups = {id(weight) for weight in weights}, []
        for group in optimizer.param_groups:
            foreign = [weight for weight in group["params"] if id(weight) not in twin]
            if foreign:
                raise InputError(
                    f"the optimizer has a weight of shape {list(foreign[0].shape)} that is none of the"
                    " model's; make it on model.parameters()"
                )
            own = [twin[id(weight)] for weight in group["params"]]
            groups.append({**group, "params": [weight for weight in own if id(weight) in wanted]})
        return _with_groups(optimizer, [group for group in groups if group["params"]])

    make_on_fakes.__name__ = type(optimizer).__name__
    return make_on_fakes


def _with_groups(optimizer: Any, groups: list[dict[str, Any]]) -> Any:
    """An optimizer like the user's on other weights, its state still to be made; the rest is shared."""
    try:
        return type(optimizer)(groups)
    except TypeError:  # it wants arguments that only its owner knows
        return copy_optimizer(optimizer, groups)


class _ValueFollower(TorchDispatchMode):
    """Knows the values of what is made."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and follow it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._answers.known.follow(func, args, kwargs, out, find_written(func, args, kwargs))
        return out


class _UpdateMeter(TorchDispatchMode):
    """Counts what a step touches, per weight."""

    def __init__(self, weights: list[Any], answers: Answers) -> None:
        super().__init__()
        self._answers = answers
        self.updates = [Update() for _ in weights]
        self.measuring = False
        self._storages = LiveStorages[_Owned](self._subtract)
        self._index = {id(weight): at for at, weight in enumerate(weights)}
        self._last = 0
        for at, weight in enumerate(weights):
            self._own(weight, at)
            if weight.grad is not None:
                self._own(weight.grad, at)

    def adopt_state(self, state: dict[Any, Any]) -> None:
        """What the optimizer keeps for a weight is that weight's."""
        for weight, kept in state.items():
            for tensor in list_tensors(kept):
                self._own(tensor, self._index.get(id(weight), 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count it."""
        kwargs = kwargs or {}
        if self._answers.wants(func, args):
            return self._answers.answer_op(func, args, kwargs, Place("optimizer"))
        out = func(*args, **kwargs)
        self._answers.known.follow(func, args, kwargs, out, find_written(func, args, kwargs))
        if self.measuring and func is not torch.ops.prim.device.default:
            self._count(func, list_tensors((args, kwargs)), list_tensors(out))
        return out

    def _count(self, func: Any, read: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        given = {tensor.untyped_storage()._cdata for tensor in read}
        owners = [owned.weight for owned in map(self._find, read) if owned is not None]
        first = owners[0] if owners else self._last
        if first != self._last:
            self.updates[self._last].lingers_bytes = self.updates[self._last].live_bytes
        self._last = first
        fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in given]
        for at, tensor in enumerate(fresh):  # the list of a foreach op comes first, weight by weight
            self._own(tensor, owners[at] if at < len(owners) and len(fresh) > 1 else first, fresh=True)
        if fresh or func._schema.is_mutable:
            for tensor in [*read, *(fresh or made or read[:1])]:
                owned = self._find(tensor)
                self.updates[owned.weight if owned else first].bytes_moved += tensor_bytes(tensor)

    def _find(self, tensor: torch.Tensor) -> _Owned | None:
        return self._storages.get(tensor.untyped_storage())

    def _own(self, tensor: torch.Tensor, weight: int, *, fresh: bool = False) -> None:
        storage, update = tensor.untyped_storage(), self.updates[weight]
        owned = _Owned(weight, storage.nbytes() if fresh else 0)
        self._storages.add(storage, owned)
        update.live_bytes += owned.fresh_bytes
        update.workspace_bytes = max(update.workspace_bytes, update.live_bytes)

    def _subtract(self, owned: _Owned) -> None:
        self.updates[owned.weight].live_bytes -= owned.fresh_bytes
