"""The parameters of a model whose weights come and go while its own forward runs.

    away    no weight is there: a stand-in of not-a-number has the shape; who reads it gets the weight brought
    lent    a copy on the device: what is written into it past autograd (`.data`) would be lost: it is refused
    stays   a copy that was brought for a reader outside of the parameter's calls, until the pass is over

Which of these a parameter is, its class tells: one that looks like `nn.Parameter` and has no other memory, so
nothing is asked of ops that read lent weights. A parameter of another class than `nn.Parameter` keeps it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from loadmaster.core.errors import RunError
from loadmaster.modules.rounding import fingerprint
from loadmaster.shards.model.blocks import Chain
from loadmaster.shards.model.refusals import refuse_writes
from loadmaster.shards.spec.trial import Trial

_DATA = torch.Tensor.data
_SAYS = (  # what a parameter says of itself without its numbers
    *(
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "grad",
        "is_leaf",
        "layout",
        "ndim",
        "_version",
        "is_cuda",
    ),
    *("is_meta", "grad_fn", "itemsize", "nbytes", "_backward_hooks", "is_sparse", "is_quantized"),
    *("is_mkldnn", "is_nested", "output_nr"),
)
_TAKES = ("requires_grad", "grad", "_backward_hooks")
_DOES = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__", "__len__"),
    *("is_inference", "get_device"),
)
_NO_READS = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _SAYS]
    + [getattr(torch.Tensor, name).__set__ for name in _TAKES]
    + [getattr(torch.Tensor, name) for name in _DOES]
)


class LentParameters:
    """The parameters of a trial by call, on a device."""

    def __init__(
        self,
        trial: Trial,
        chain: Chain,
        standins: list[torch.Tensor],
        bring: Callable[[int], torch.Tensor],
    ) -> None:
        """`bring` gives a weight in memory of its own, or raises: it is no longer that of the step."""
        self._trial, self._chain, self._standins = trial, chain, standins
        self._bring = bring
        self._parameters = chain.parameters
        self._number = {id(each): number for number, each in enumerate(self._parameters)}
        self._plain = [type(each) is nn.Parameter for each in self._parameters]
        self._seen_by_torch = {
            self._number[id(each)] for each in _iter_first_layers(chain.model) if id(each) in self._number
        }
        self._masters: list[torch.Tensor] = []  # while the device's tensors are in their place
        self._versions: list[int] = []
        self._bound: dict[int, torch.Tensor] = {}  # what each lent parameter holds
        self._prints: dict[int, int] = {}  # of weights whose `.data` was asked for
        self._whole: dict[int, torch.Tensor] = {}  # what stands on the device itself
        self._is_open = False  # a pass runs
        self.brought: dict[int, torch.Tensor] = {}  # weights that stay for this pass, because they were read
        self._away, self._lent = _make_classes(self._read, self._note_data)

    def take_place(self) -> bool:
        """Have the model's parameters hold stand-ins; False: they do already."""
        if self._masters:
            return False
        self._masters = [parameter.data for parameter in self._parameters]
        for number in range(len(self._parameters)):
            self._send_away(number)
        return True

    def put_back(self) -> None:
        """The model holds the host's tensors again."""
        for parameter, master, plain in zip(self._parameters, self._masters, self._plain, strict=False):
            if plain:
                parameter.__class__ = nn.Parameter
            _DATA.__set__(parameter, master)
        self._masters = []
        self._bound, self._whole, self._prints = {}, {}, {}

    def bind(self, views: Mapping[int, torch.Tensor]) -> None:
        """Weights in the place of their parameters."""
        for number, view in views.items():
            self._lend(number, view)

    def bind_whole(self, views: Mapping[int, torch.Tensor]) -> None:
        """Weights that stay on the device themselves: whatever is written into them is kept."""
        self._whole |= views
        for number, view in views.items():
            parameter = self._parameters[number]
            if self._plain[number]:
                parameter.__class__ = nn.Parameter
            _DATA.__set__(parameter, view)

    def unbind(self, numbers: Iterable[int]) -> None:
        """They go; refuses what was written into them."""
        for number in numbers:
            self._require_unwritten(number)
        for number in numbers:
            stays = self.brought.get(number)
            if stays is None:
                self._send_away(number)
            else:
                self._lend(number, stays)

    @contextmanager
    def open_pass(self, rest: Mapping[int, torch.Tensor]) -> Any:
        """For one or several micro-batches; nothing was written meanwhile, or it is refused."""
        for number in self._seen_by_torch.difference(self._bound, rest):
            self._send_away(number)  # the model's mode may have changed
        self.bind(rest)
        self._versions = [parameter._version for parameter in self._parameters]
        self._is_open = True
        try:
            yield
            for number in (*rest, *self.brought):
                self._require_unwritten(number)
            self._require_same_parameters()
        finally:
            self._is_open = False
            self.drop_brought()
            for number in rest:
                self._send_away(number)
            self._prints.clear()

    def drop_brought(self) -> None:
        """A micro-batch is over: weights that were brought for it leave."""
        brought, self.brought = self.brought, {}
        for number in brought:
            if self._bound.get(number) is brought[number]:
                self._send_away(number)

    def keep(self, number: int) -> None:
        """Bring a weight for the rest of the pass."""
        if number not in self.brought:
            with _plain_tensors():
                self.brought[number] = self._bring(number)
            if self._bound.get(number) is None:
                self._lend(number, self.brought[number])

    def _lend(self, number: int, view: torch.Tensor) -> None:
        parameter = self._parameters[number]
        if self._plain[number]:
            parameter.__class__ = self._lent
        _DATA.__set__(parameter, view)
        self._bound[number] = view

    def _send_away(self, number: int) -> None:
        parameter = self._parameters[number]
        self._bound.pop(number, None)
        self._prints.pop(number, None)
        if self._plain[number]:
            parameter.__class__ = self._lent  # one that is away may be asked for nothing
        _DATA.__set__(parameter, self._standins[number])
        if self._plain[number] and (number not in self._seen_by_torch or self._chain.model.training):
            parameter.__class__ = self._away

    def _read(self, parameter: Any) -> None:
        """Somebody reads a weight that is away."""
        number = self._number.get(id(parameter))
        if number is None:
            return
        if not self._is_open:
            raise RunError(
                f"parameter {self._chain.parameter_name[number]!r} of trial {self._trial.name!r} was read"
                " between two steps, while weights are on their way; read it in evaluate (predict), or from a"
                " checkpoint"
            )
        self.keep(number)

    def _note_data(self, parameter: Any) -> None:
        """Somebody may write past autograd."""
        number = self._number.get(id(parameter))
        if number is not None and number in self._bound and number not in self._prints:
            self._prints[number] = _fingerprint(self._bound[number])

    def _require_unwritten(self, number: int) -> None:
        parameter, view = self._parameters[number], self._bound.get(number)
        if view is None:
            return
        written = parameter.data_ptr() != view.data_ptr()
        known = self._prints.get(number)
        if written or (known is not None and known != _fingerprint(view)):
            refuse_writes(self._trial, [self._chain.parameter_name[number]])

    def _require_same_parameters(self) -> None:
        """No parameter was exchanged for another, and none that is away was written."""
        for number, (parameter, version) in enumerate(zip(self._parameters, self._versions, strict=True)):
            whole = self._whole.get(number)
            if parameter._version != version or (
                whole is not None and parameter.data_ptr() != whole.data_ptr()
            ):
                refuse_writes(self._trial, [self._chain.parameter_name[number]])
        for slots in self._chain.parameter_slots:
            for slot in slots:
                if slot.module._parameters.get(slot.attribute) is not self._parameters[slot.tensor]:
                    refuse_writes(self._trial, [self._chain.parameter_name[slot.tensor]])


def _iter_first_layers(model: nn.Module) -> Iterator[nn.Parameter]:
    """In eval mode an encoder of torch takes its fast path by the classes of its first layer's parameters."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and len(module.layers):
            yield from module.layers[0].parameters()


def _make_classes(read: Callable[[Any], None], note_data: Callable[[Any], None]) -> tuple[Any, Any]:
    """Classes of parameters that are away and that are lent; those of one trial."""

    class Lent(nn.Parameter):
        """A copy on the device."""

        @property
        def data(self) -> torch.Tensor:
            note_data(self)
            return _DATA.__get__(self)

        @data.setter
        def data(self, value: torch.Tensor) -> None:
            _DATA.__set__(self, value)

        def __deepcopy__(self, memo: Any) -> Any:
            return _copy_parameter(self, memo)

    class Away(nn.Parameter):
        """No weight is there."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in _NO_READS:
                for each in _iter_tensors((args, kwargs)):
                    if type(each) is Away:
                        read(each)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

        def __deepcopy__(self, memo: Any) -> Any:
            read(self)
            return _copy_parameter(self, memo)

    for kind in (Lent, Away):
        kind.__name__ = kind.__qualname__ = "Parameter"
    return Away, Lent


def _copy_parameter(parameter: Any, memo: dict[int, Any]) -> nn.Parameter:
    """A copy that belongs to nobody."""
    if id(parameter) not in memo:
        value = _DATA.__get__(parameter).clone(memory_format=torch.preserve_format)
        memo[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
    copied: nn.Parameter = memo[id(parameter)]
    return copied


def _iter_tensors(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _iter_tensors(each)
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _iter_tensors(each)


def _fingerprint(tensor: torch.Tensor) -> int:
    with _plain_tensors():
        return int(fingerprint(tensor))


def _plain_tensors() -> AbstractContextManager[Any]:
    """Whatever the model has switched on: tensors made here are those of ordinary code without gradients."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
    if torch._C._functorch.peek_interpreter_stack() is not None:
        stack.enter_context(temporarily_clear_interpreter_stack())
    return stack
