"""Recorder: sees every op that runs below autograd, and writes it into a ledger.

Between `record_as` and its end all ops belong to one op of the ledger (a node of an exported graph). Outside,
each op that is not a view is an op of its own; a view is one in the forward pass only.

In the backward pass an op belongs to the forward op whose autograd node is being run: every node has the
sequence number autograd gave it when the forward op ran.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from loadmaster.core.graph import NO_MIRROR, Phase
from loadmaster.graph.torch_capture.record.data_dependent_reads import Answers, Place
from loadmaster.graph.torch_capture.record.gradient_sums import find_sum_target
from loadmaster.graph.torch_capture.record.ledger import NO_OP, Key, Ledger, Op
from loadmaster.graph.torch_capture.record.stand_ins import complete_result, make_stand_in
from loadmaster.graph.torch_capture.record.weight_products import WeightProducts
from loadmaster.modules.fake_model import fake_like
from loadmaster.modules.op_signature import compute_dtype, find_written, kind_of, signature_of, with_a_view
from loadmaster.modules.op_work import bytes_moved, count_flops, tensor_bytes
from loadmaster.modules.tensor_trees import list_tensors

_DEVICE = torch.ops.prim.device.default
_SILENT = {
    _DEVICE,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_async.msg,
}
_NO_NODE = -1
_LEAF = 2**64 - 1  # a leaf takes the gradient that the node before it made


class Recorder(TorchDispatchMode):
    """A dispatch mode; push it above the fake tensors' mode."""

    def __init__(
        self,
        ledger: Ledger,
        mode: FakeTensorMode,
        *,
        answers: Answers | None = None,
        target: str | None = None,
    ) -> None:
        """`answers` stand in for values that the model reads."""
        super().__init__()
        self.ledger = ledger
        self._mode = mode
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # real tensors the model brings along
        self.phase = Phase.FORWARD
        self.module = ""  # path of the module that runs
        self.prefix = ""  # of the names of ops
        self.line = ""  # of the model's code, where the stack does not tell it
        self.products = WeightProducts()
        self.num_backward = 0  # ops seen in the backward pass
        self.num_attributed = 0
        self.answers = answers if answers is not None else Answers()
        self._target = target
        self._numbers: dict[int, int] = {}  # storage address -> number
        self._refs: dict[int, dict[int, Any]] = {}  # number -> its storages, more than one when adopted
        self._next = 0
        self._num_constants = 0
        self._mirror_of: dict[int, int] = {}  # autograd sequence number -> forward op
        self.estimating = False  # the backward pass is not autograd's: all that runs in it runs again
        self.last_mirror = NO_MIRROR
        self.flops_at: dict[int, float] = {}  # autograd sequence number -> flops of the forward op
        self._originals: dict[tuple[str, str, str], deque[int]] = {}  # module, kind, signature -> ops
        self._made_by: dict[int, int] = {}  # storage -> sequence number of the backward node that made it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs as much as an op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and write it down."""
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func in _SILENT:
            return func(*args, **kwargs)
        before = list_tensors((args, kwargs))
        if not all(isinstance(tensor, FakeTensor) for tensor in before):
            args, kwargs = tree_map_only(torch.Tensor, self._twin, (args, kwargs))
            before = list_tensors((args, kwargs))
        if self.answers.wants(func, args):
            out = self.answers.answer_op(func, args, kwargs, self._place())
            if list_tensors(out):
                self._note(_Call(func, args, kwargs, out, list_tensors(args), list_tensors(out), []))
            return out
        for tensor in before:
            self._number(tensor)
        in_place = self._gathers_in_place(func, before)
        out = make_stand_in(func, args, kwargs)
        out = complete_result(func, args, func(*args, **kwargs), self._target) if out is None else out
        if in_place:
            self._adopt(out, self._number(before[0]))
        written = find_written(func, args, kwargs)
        self.answers.known.follow(func, args, kwargs, out, written)
        written = [out] if in_place else written
        self._note(_Call(func, args, kwargs, out, before, list_tensors(out), written, in_place))
        return out

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor for a real one, always the same."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._twins:
            self._twins[id(tensor)] = (tensor, fake_like(tensor, self._mode))
            if not tensor.requires_grad:
                self.answers.known.give(self._twins[id(tensor)][1], tensor)
        return self._twins[id(tensor)][1]

    def _place(self) -> Place:
        """Where the model reads a value."""
        current = self.ledger.current
        module = self.ledger.ops[current].module if current != NO_OP else self.module
        return Place(module, self.line, self._runs_again())

    @contextmanager
    def record_as(self, op: Op) -> Iterator[int]:
        """All that runs is part of one op."""
        first = torch.autograd._get_sequence_nr()
        op.has_grad = torch.is_grad_enabled()
        index = self.ledger.open(op)
        try:
            yield index
        finally:
            for number in range(first, torch.autograd._get_sequence_nr()):
                self._mirror_of.setdefault(number, index)
            if self.ledger.current == index:
                self.ledger.close()

    def key(self, tensor: torch.Tensor) -> Key:
        """What a tensor looks at."""
        number = self._number(tensor)
        return (number, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def give_out(self, tensors: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """The open op hands on tensors that it did not make: these are its own looks at them."""
        for tensor in tensors:
            key = self.key(tensor)
            if self.ledger.maker(key) == self.ledger.current:
                continue
            self._add_constant(tensor)
            of = next((self.key(source) for source in sources if self.key(source)[0] == key[0]), key)
            self.ledger.view(key, tensor_bytes(tensor), of)

    def begin_forward(self, suffix: str) -> None:
        """The model runs, maybe once more: its ops end in `suffix`."""
        self.phase, self.prefix, self.module = Phase.FORWARD, "", ""
        self.ledger.suffix = suffix
        self._originals.clear()
        self.answers.begin_run()

    def begin_backward(self, loss: torch.Tensor) -> None:
        """What runs from now on is autograd's."""
        self.phase = Phase.BACKWARD
        self.last_mirror = self.ledger.producer(self._number(loss))

    def keep(self, tensor: torch.Tensor) -> None:
        """A tensor that its owner holds to the end of the step."""
        self.ledger.keep(self._number(tensor))

    def keep_caches(self) -> None:
        """Storages that are alive although the step and its outputs are gone are caches of the model."""
        for storage in self._refs:
            self.ledger.keep_for_next_step(storage)

    def _number(self, tensor: torch.Tensor) -> int:
        """The storage's number; an unknown one gets the next."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is None:
            number = self._next
            self._next += 1
            self._adopt(tensor, number)
        return number

    def _adopt(self, tensor: torch.Tensor, number: int) -> None:
        """The tensor's storage is known under that number from now on."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        self._numbers[address] = number
        self._refs.setdefault(number, {})[address] = weakref.ref(
            storage, lambda _: self._forget_storage(address, number)
        )

    def _forget_storage(self, address: int, number: int) -> None:
        if self._numbers.get(address) == number:
            del self._numbers[address]
        self._refs[number].pop(address, None)
        if not self._refs[number]:
            del self._refs[number]
            self.ledger.free(number)

    def _note(self, call: "_Call") -> None:
        given = {self._number(tensor) for tensor in call.before}
        fresh = [tensor for tensor in call.after if self._number(tensor) not in given]
        is_view = bool(call.after) and not fresh and not call.written
        if not call.after and not call.written:
            return
        opened = self.ledger.current == NO_OP
        if is_view and not (opened and self.phase == Phase.FORWARD):
            self._absorb(call)
            return
        if opened:
            self._open(call)
        for tensor in call.before:
            self._add_constant(tensor)
        if is_view:
            for tensor in call.after:
                source = _find_view_source(self, tensor, call.before)
                self.ledger.view(self.key(tensor), tensor_bytes(tensor), source)
        else:
            self._record_work(call, fresh)
        if opened:
            self.ledger.close()

    def _absorb(self, call: "_Call") -> None:
        """A view inside of another op, or in the backward pass."""
        if self._runs_again():
            self._claim_next_node(self.last_mirror)
        elif self.phase == Phase.BACKWARD:
            self.find_mirror(self._sequence())
        last = self.ledger.ops[-1]
        if self.ledger.current == NO_OP and last.phase == Phase.BACKWARD:
            # it is no op, but takes the host's time
            last.signature = with_a_view(last.signature)
        for tensor in call.after:
            self._add_constant(tensor)
            self.ledger.absorb(self.key(tensor), _find_view_source(self, tensor, call.before))

    def _record_work(self, call: "_Call", fresh: list[torch.Tensor]) -> None:
        """The open op reads, writes and makes."""
        ledger = self.ledger
        for tensor in call.before:
            ledger.read(self.key(tensor), tensor_bytes(tensor))
        for tensor in call.written:
            ledger.write(self.key(tensor), tensor_bytes(tensor), tied=not call.gathers)
        for tensor in fresh:
            number, num_bytes = self._number(tensor), tensor_bytes(tensor)
            if ledger.knows(number):  # two outputs on one storage
                ledger.view(self.key(tensor), num_bytes, self.key(tensor))
            else:
                ledger.make(self.key(tensor), num_bytes, tensor.untyped_storage().nbytes())
                self._made_by[number] = self._sequence()
        op = ledger.ops[ledger.current]
        flops = count_flops(call.func, call.args, call.kwargs, call.out)
        op.flops += flops
        if self.phase == Phase.FORWARD and not ledger.suffix:
            self._note_products(call, flops)
        if flops and self.phase == Phase.FORWARD:  # autograd numbers its node before the op runs
            self.flops_at[torch.autograd._get_sequence_nr() - 1] = flops
        op.bytes_moved += bytes_moved(call.func, call.before, call.after)

    def _note_products(self, call: "_Call", flops: float) -> None:
        given = [(self._number(one), one, self.answers.known.has(one)) for one in call.before]
        made = [(self._number(one), one) for one in call.after]
        self.products.note(call.func, call.args, flops, given, made)

    def _open(self, call: "_Call") -> None:
        """An op of its own for what runs outside of every other."""
        kind, ledger = kind_of(call.func), self.ledger
        signature = signature_of(call.func, call.args, call.kwargs)
        mirror = self._mirror((kind, signature))
        mirror = self._home_of_sum(call, mirror)
        home = ledger.ops[mirror] if mirror != NO_MIRROR else None
        index = ledger.open(
            Op(
                f"{home.name}.{self._pass()}" if home else f"{self.prefix}{kind}",
                kind,
                home.module if home else self.module,
                self.phase,
                mirror=mirror,
                signature=signature,
                dtype=compute_dtype(call.after, call.before),
                has_grad=torch.is_grad_enabled(),
            )
        )
        if self.phase == Phase.FORWARD:
            self._originals.setdefault((self.module, kind, signature), deque()).append(index)
        self._claim_next_node(index if self.phase == Phase.FORWARD else mirror)

    def _home_of_sum(self, call: "_Call", mirror: int) -> int:
        """The op whose output's gradient autograd itself adds up here, else `mirror`."""
        if self.phase != Phase.BACKWARD or self._runs_again() or not call.before:
            return mirror
        if not self._is_older(call.before[0]):
            return mirror
        target = find_sum_target(call.func, call.before, torch._C._current_autograd_node())
        return mirror if target is None else self.maker(target, mirror)

    def maker(self, node: Any, otherwise: int) -> int:
        """The op that made what a node takes the gradient of; a leaf's is the weight itself."""
        if not hasattr(node, "variable"):
            return self._mirror_of.get(int(node._sequence_nr()), otherwise)
        number = self._numbers.get(node.variable.untyped_storage()._cdata)
        return otherwise if number is None else self.ledger.producer(number)

    def _is_older(self, tensor: torch.Tensor) -> bool:
        """Whether another node of the backward pass made a tensor than the one that runs."""
        running = self._sequence()
        return self._made_by.get(self._number(tensor), running) != running

    def _claim_next_node(self, owner: int) -> None:
        """Autograd's node of what is about to run belongs to an op; it is numbered already."""
        if owner != NO_MIRROR:
            self._mirror_of.setdefault(torch.autograd._get_sequence_nr() - 1, owner)

    def _pass(self) -> str:
        return "recompute" if self._runs_again() else "backward"

    def _runs_again(self) -> bool:
        """Autograd runs without gradients; a forward op that runs again for it does not."""
        if self.phase != Phase.BACKWARD or not torch.is_grad_enabled():
            return False
        return self.estimating or torch._C._current_autograd_node() is not None

    def _mirror(self, work: tuple[str, str]) -> int:
        """The forward op that the op about to run belongs to: the same, if it runs again."""
        if self.phase != Phase.BACKWARD:
            return NO_MIRROR
        self.num_backward += 1
        first = self._originals.get((self.module, *work)) if self._runs_again() else None
        if first:
            self.num_attributed += 1
            self.last_mirror = first.popleft()
            return self.last_mirror
        self.num_attributed += self._is_attributed(self._sequence())
        return self.find_mirror(self._sequence())

    def _is_attributed(self, sequence: int) -> bool:
        """Whether an op is known to be its mirror's: by number, as the loss's gradient, or as a leaf's."""
        return sequence in self._mirror_of or sequence in (_NO_NODE, _LEAF)

    def find_mirror(self, sequence: int) -> int:
        """The forward op of a sequence number; of one that no op has, that of the last."""
        mirror = self._mirror_of.get(sequence, NO_MIRROR)
        if mirror == NO_MIRROR:
            mirror = self.last_mirror  # a weight's gradient is handed over: it is the last node's
        self.last_mirror = mirror
        return mirror

    def _sequence(self) -> int:
        node = torch._C._current_autograd_node()
        return int(node._sequence_nr()) if node is not None else _NO_NODE

    def _gathers_in_place(self, func: Any, before: list[torch.Tensor]) -> bool:
        """Whether autograd adds two gradients here, which it does in place on real tensors.

        On fake ones it makes a new tensor. The first is then an older node's, held by nobody else.
        """
        if self.phase != Phase.BACKWARD or func is not torch.ops.aten.add.Tensor or len(before) != 2:
            return False
        if not self._is_older(before[0]) or self._number(before[0]) == self._number(before[1]):
            return False
        storage = before[0].untyped_storage()
        alone = torch._C._storage_Use_Count(storage._cdata) <= _ALONE
        return alone and before[0].shape == before[1].shape and storage.nbytes() == tensor_bytes(before[0])

    def _add_constant(self, tensor: torch.Tensor) -> None:
        """A tensor that nobody made is part of the model, resident like a buffer."""
        number = self._number(tensor)
        if self.ledger.knows(number):
            return
        num_bytes = tensor.untyped_storage().nbytes()
        self._num_constants += 1
        name = f"constant_{self._num_constants}"
        self.resident(tensor, Op(name, "constant", self.module, Phase.PARAM, resident_bytes=num_bytes))

    def resident(self, tensor: torch.Tensor, op: Op) -> int:
        """A weight, buffer or constant."""
        op.signature = signature_of(op.kind, [tensor], {})
        op.dtype = compute_dtype([tensor], [])
        if op.kind == "param":
            self.products.add_weight(self._number(tensor), op.name)
        return self.ledger.param(op, self.key(tensor), tensor.untyped_storage().nbytes())


@dataclass(frozen=True, slots=True)
class _Call:
    """An op as it ran."""

    func: Any
    args: Any
    kwargs: Any
    out: Any
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    written: list[torch.Tensor]
    gathers: bool = False  # two gradients, where they are needed: on the memory of the first, or of its copy


_ALONE = 2  # a tensor's own reference, and the one that asks


def _find_view_source(recorder: Recorder, tensor: torch.Tensor, before: list[torch.Tensor]) -> Key:
    """What a view looks at."""
    number = recorder.key(tensor)[0]
    return next(recorder.key(source) for source in before if recorder.key(source)[0] == number)
