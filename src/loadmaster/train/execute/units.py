"""The units of a step: F (forward of a shard), L (the last one, with loss and backward), B (backward).

F_i(x)  : keep x, the generators and the buffers the shard writes; y = shard(x) without gradients
L(x)    : y = shard(x); loss = criterion(y, targets) / micro-batches; backward; gradient of x
B_i(gy) : as F_i found it: generators, autocast, buffers, attributes; y = shard(x); backward(y, gy); put back
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from loadmaster.core.errors import RunError
from loadmaster.modules import python_state, randomness
from loadmaster.shards.model.blocks import Chain, call_block
from loadmaster.shards.spec.trial import COMPUTE_DTYPE, Trial, compute_loss


@dataclass(slots=True, eq=False)
class ForwardRecord:
    """What a forward unit leaves for its backward."""

    value: Any
    generators: randomness.Generators | None
    buffers: dict[int, torch.Tensor]
    attributes: list[python_state.Table] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Which micro-batch of which step."""

    step: int
    micro_batch: int
    num_micro_batches: int


class Units:
    """Runs units of one trial on one device; weights are bound by the caller."""

    def __init__(
        self, trial: Trial, chain: Chain, cuts: tuple[tuple[int, int], ...], device: torch.device
    ) -> None:
        self.trial, self.chain, self.cuts, self.device = trial, chain, cuts, device
        self.dtype = COMPUTE_DTYPE[trial.precision]
        self.buffers = [buffer.to(device, copy=True) for buffer in chain.buffers]
        self._written: dict[int, set[int]] = {}  # buffers a shard changes, known after its first forward
        self._careful: dict[int, bool] = {}  # whether a shard writes into its input
        self.watching = self.recording = False  # see `tape`: whether draws are looked for; nothing is seeded
        self._draws: set[int] = set()  # shards that drew random numbers while that was looked for
        self._others: dict[int, bool] = {}  # blocks that draw from Python or NumPy, as their first run told
        self._changing: dict[int, list[dict[str, Any]]] = {}  # attributes of modules that forward changes
        self._buffers_of = [
            sorted({slot.tensor for block in range(*cut) for slot in chain.buffer_slots[block]})
            for cut in cuts
        ]

    def bind(self, shard: int, leaves: Mapping[int, torch.Tensor]) -> None:
        """Let the shard's modules see these tensors as their parameters."""
        for block in range(*self.cuts[shard]):
            for slot in self.chain.parameter_slots[block]:
                slot.module._parameters[slot.attribute] = leaves[slot.tensor]

    def unbind(self, shard: int) -> None:
        """Put the host's parameters back."""
        for block in range(*self.cuts[shard]):
            for slot in self.chain.parameter_slots[block]:
                slot.module._parameters[slot.attribute] = self.chain.parameters[slot.tensor]

    @contextmanager
    def bind_buffers(self) -> Iterator[None]:
        """Let every block see the device's buffers."""
        self._bind_buffers(self.buffers)
        try:
            yield
        finally:
            self._bind_buffers(self.chain.buffers)

    def forward(self, shard: int, value: Any, moment: MicroBatch) -> tuple[Any, ForwardRecord]:
        """F: the shard's output, without a graph."""
        counted = self.trial.counted_rng
        generators = (
            None if counted else randomness.capture_generators(self.device, others=self.draws_others(shard))
        )
        careful = self._careful.get(shard, True)
        before, untouched = self._copy_buffers(shard), self._get_untouched_versions(shard)
        attributes = [(table, dict(table)) for table in self._get_attribute_tables(shard)]
        given = tree_map(_clone_tensor, value) if careful else value
        versions = [leaf._version for leaf in _list_tensors(given)]
        with torch.no_grad():
            out = self.run(shard, given, moment)
        if shard not in self._careful:
            changed = [leaf._version for leaf in _list_tensors(given)] != versions
            self._careful[shard] = changed
        self._check_untouched(untouched)
        if shard not in self._changing:
            self._changing[shard] = [table for table, was in attributes if python_state.differs(table, was)]
        changing = {id(table) for table in self._changing[shard]}
        attributes = [row for row in attributes if id(row[0]) in changing]
        return out, ForwardRecord(value, generators, self._copy_before_writes(shard, before), attributes)

    def last(self, value: Any, targets: Any, moment: MicroBatch, *, scale: float) -> tuple[torch.Tensor, Any]:
        """L: the loss of this micro-batch (before scaling) and the gradient of the shard's input."""
        shard = len(self.cuts) - 1
        given = make_leaves(value, wanted=shard > 0)
        with self._autocast():
            out = self.run(shard, self.prepare_input(shard, given), moment)
            self.sync_buffers(shard)
            loss = compute_loss(self.trial, out, targets)
        if isinstance(loss, FakeTensor):
            raise RunError(
                f"trial {self.trial.name!r}: its loss has no value: the model or the loss holds a tensor that"
                " was made while memory was planned (a table cached on first use); make it with the model"
            )
        loss = loss.reshape(())  # one number of another shape is one number
        share = loss / moment.num_micro_batches if moment.num_micro_batches > 1 else loss
        try:
            (share * scale if scale != 1.0 else share).backward()
        except RuntimeError as problem:
            if "meta tensor" not in str(problem):
                raise
            raise RunError(
                f"trial {self.trial.name!r}: its loss holds a parameter that has no values: the model was"
                " built without memory first; look parameters up in the model when they are used"
            ) from problem
        return loss.detach(), collect_gradients(given)

    def backward(self, shard: int, kept: ForwardRecord, gradient: Any, moment: MicroBatch) -> Any:
        """B: recompute the shard as its forward ran, then the gradient of its input."""
        given = make_leaves(kept.value, wanted=shard > 0)
        untouched = self._get_untouched_versions(shard)
        with self._restore_forward(kept):
            out = self.run(shard, self.prepare_input(shard, given), moment)
        self._check_untouched(untouched)
        pairs = [
            (leaf, slope)
            for leaf, slope in zip(_list_tensors(out), gradient, strict=True)
            if slope is not None and leaf.requires_grad
        ]
        if pairs:
            torch.autograd.backward([leaf for leaf, _ in pairs], [slope for _, slope in pairs])
        return collect_gradients(given)

    def draws_others(self, shard: int) -> bool:
        """Whether a shard's blocks draw from Python's generator or NumPy's, as far as is known."""
        return any(self._others.get(block, True) for block in range(*self.cuts[shard]))

    def evaluate(self, shard: int, value: Any) -> Any:
        """The shard's output in eval mode."""
        with torch.no_grad(), self._autocast():
            for block in range(*self.cuts[shard]):
                value = call_block(self.chain.blocks[block], value, first=block == 0)
        return value

    def run(self, shard: int, value: Any, moment: MicroBatch) -> Any:
        """The shard's blocks, one after the other."""
        with self._autocast():
            for block in range(*self.cuts[shard]):
                if self.trial.counted_rng and not self.recording:
                    seed = randomness.derive_seed(
                        self.trial.seed, step=moment.step, micro_batch=moment.micro_batch, block=block
                    )
                    randomness.seed_all(seed, self.device, others=self._others.get(block, True))
                before = randomness.fingerprint_generators(self.device) if self.watching else None
                others = randomness.capture_others() if block not in self._others else None
                value = call_block(self.chain.blocks[block], value, first=block == 0)
                if others is not None:
                    self._others[block] = not randomness.is_same_others(others, randomness.capture_others())
                if before is not None and randomness.fingerprint_generators(self.device) != before:
                    self._draws.add(shard)
        return value

    def is_same_each_time(self, shard: int) -> bool:
        """Whether a shard that was seen neither drew numbers nor wrote a buffer, its input or attributes."""
        seen = shard in self._careful and shard in self._written and shard in self._changing
        wrote = seen and (self._careful[shard] or self._written[shard] or self._changing[shard])
        return seen and not wrote and shard not in self._draws

    def prepare_input(self, shard: int, given: Any) -> Any:
        """A shard that writes into its input gets a copy: neither a leaf nor what is kept may change.

        Others get what is no leaf either: autocast casts a leaf once for all its readers, whose gradients
        would then be added before they are widened.
        """
        return tree_map(_clone_tensor if self._careful.get(shard, True) else _alias_leaf, given)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    @contextmanager
    def _restore_forward(self, kept: ForwardRecord) -> Iterator[None]:
        """Generators and buffers of the forward pass; afterwards what they had become since."""
        now = None
        if kept.generators is not None:
            now = randomness.capture_generators(self.device, others=kept.generators.others is not None)
            randomness.restore_generators(kept.generators, self.device)
        if kept.buffers:
            stand_ins = list(self.buffers)
            for number, copy in kept.buffers.items():
                stand_ins[number] = copy
            self._bind_buffers(stand_ins)
        try:
            with python_state.swap_attributes(kept.attributes):
                yield
        finally:
            if now is not None:
                randomness.restore_generators(now, self.device)
            if kept.buffers:
                self._bind_buffers(self.buffers)

    def _get_attribute_tables(self, shard: int) -> list[dict[str, Any]]:
        """Attributes of the shard's modules; of those that its first forward changed, once that is known."""
        if shard in self._changing:
            return self._changing[shard]
        blocks = [self.chain.blocks[block] for block in range(*self.cuts[shard])]
        modules = [each for block in blocks if isinstance(block, torch.nn.Module) for each in block.modules()]
        return [vars(module) for module in modules]

    def _bind_buffers(self, tensors: Any) -> None:
        for slots in self.chain.buffer_slots:
            for slot in slots:
                slot.module._buffers[slot.attribute] = tensors[slot.tensor]

    def _copy_buffers(self, shard: int) -> dict[int, tuple[int, torch.Tensor]]:
        """Copies of the buffers the shard may write, with their versions."""
        numbers = self._written.get(shard, set(self._buffers_of[shard]))
        return {n: (self.buffers[n]._version, self.buffers[n].clone()) for n in numbers}

    def _copy_before_writes(
        self, shard: int, before: dict[int, tuple[int, torch.Tensor]]
    ) -> dict[int, torch.Tensor]:
        self.sync_buffers(shard)
        if shard not in self._written:
            self._written[shard] = self._find_written_buffers(shard, before)
        return {number: copy for number, (_, copy) in before.items() if number in self._written[shard]}

    def _get_untouched_versions(self, shard: int) -> dict[int, int]:
        """Versions of the buffers that the shard did not write in its first forward."""
        if shard not in self._written:
            return {}
        return {n: self.buffers[n]._version for n in set(self._buffers_of[shard]) - self._written[shard]}

    def _check_untouched(self, versions: Mapping[int, int]) -> None:
        for number, version in versions.items():
            if self.buffers[number]._version != version:
                raise RunError(
                    f"trial {self.trial.name!r}: buffer {self.chain.buffer_name[number]!r} is first written"
                    " after the first step, so it was not kept for the second run of its shard; write it in"
                    " every step"
                )

    def _find_written_buffers(self, shard: int, before: dict[int, tuple[int, torch.Tensor]]) -> set[int]:
        """Buffers that changed, by version or value (batch norm gives no new version), and their likes."""
        changed = {
            number
            for number, (version, copy) in before.items()
            if self.buffers[number]._version != version or not torch.equal(self.buffers[number], copy)
        }
        slots = [slot for block in range(*self.cuts[shard]) for slot in self.chain.buffer_slots[block]]
        writers = {id(slot.module) for slot in slots if slot.tensor in changed}
        return changed | {slot.tensor for slot in slots if id(slot.module) in writers}

    def sync_buffers(self, shard: int) -> None:
        """A block may also put another tensor in a buffer's place; take its value over."""
        for block in range(*self.cuts[shard]):
            for slot in self.chain.buffer_slots[block]:
                now = slot.module._buffers[slot.attribute]
                if now is not self.buffers[slot.tensor] and now is not None:
                    if now.shape != self.buffers[slot.tensor].shape:
                        raise RunError(
                            f"buffer {self.chain.buffer_name[slot.tensor]} changes its shape in forward"
                        )
                    self.buffers[slot.tensor].copy_(now)
                    slot.module._buffers[slot.attribute] = self.buffers[slot.tensor]


def _list_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _clone_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _alias_leaf(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.Tensor) and value.requires_grad else value


def make_leaves(tree: Any, *, wanted: bool) -> Any:
    """The tree with floating tensors as leaves that want a gradient."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().requires_grad_(wanted and (value.is_floating_point() or value.is_complex()))

    return tree_map(leaf, tree)


def collect_gradients(tree: Any) -> list[torch.Tensor | None]:
    """The gradient of each tensor leaf, in order."""
    return [
        leaf.grad if leaf.requires_grad else None
        for leaf in tree_flatten(tree)[0]
        if isinstance(leaf, torch.Tensor)
    ]
