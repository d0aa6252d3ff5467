"""Containers of torch.nn that a trace opens, so that each of their layers is a block: encoder, decoder, both.

    src, masks ──► what layers get ──► layer ──► layer ── ... ──► norm

What stands before the layers reads values: it makes masks of one kind, sees whether one is causal, and packs
padded rows in eval mode. It is one function here, and runs the class's own forward with a stand-in for the
layers, which are then called with what the stand-in got. What is known while tracing (no mask at all) is not
asked again.
"""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

KINDS = (nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)


def find_openable(model: nn.Module) -> tuple[nn.Module, ...]:
    """The containers in a model that do what their class does, in the mode the model is in."""
    return tuple(module for module in model.modules() if _is_plain(module, training=model.training))


def _is_plain(module: nn.Module, *, training: bool) -> bool:
    if type(module) not in KINDS or "forward" in vars(module) or has_hooks(module):
        return False
    if type(module).forward.__module__ != "torch.nn.modules.transformer":
        return False
    if isinstance(module, nn.Transformer):
        return isinstance(module.encoder, nn.Module) and isinstance(module.decoder, nn.Module)
    layers = module.layers
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return False
    known = hasattr(getattr(layers[0], "self_attn", None), "batch_first")
    return known and all(each.training == training for each in layers)


def as_chain(module: nn.Module) -> tuple[nn.Module, ...]:
    """The layers and the norm of an encoder that is given no mask; empty for any other module."""
    if type(module) is not nn.TransformerEncoder or not _is_plain(module, training=module.training):
        return ()
    found = [*module.layers] if module.norm is None else [*module.layers, module.norm]
    usual = all(type(each) is nn.TransformerEncoderLayer for each in module.layers)
    return tuple(found) if usual and len(set(found)) == len(found) else ()


def find_unopened(blocks: Iterable[Any]) -> nn.Module | None:
    """The first container that stands unopened in some blocks."""
    modules = (each for block in blocks if isinstance(block, nn.Module) for each in block.modules())
    return next((each for each in modules if isinstance(each, KINDS)), None)


def trace_container(tracer: fx.Tracer, module: Any, args: Any, kwargs: Any) -> Any:
    """Trace a container as the run of its layers."""
    runs: dict[Any, Callable[..., Any]] = dict(
        zip(KINDS, (_trace_encoder, _trace_decoder, _trace_transformer), strict=True)
    )
    return runs[type(module)](tracer, module, *args, **kwargs)


def _trace_encoder(
    tracer: fx.Tracer,
    module: Any,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: Any = None,
) -> Any:
    padding, out = src_key_padding_mask, src
    causal, found = _known_causal(mask, is_causal), None
    if mask is not None or padding is not None or causal is None:
        first = module.layers[0]
        nested = bool(getattr(module, "use_nested_tensor", False)) and not first.training
        check = bool(getattr(module, "mask_check", True))
        bare = tracer.create_proxy("call_method", "detach", (src,), {})
        given = (bare, mask, padding, is_causal, first.self_attn.batch_first, nested, check)
        found = tracer.create_proxy("call_function", find_layer_inputs, given, {})
        mask = None if mask is None else found[0]
        causal = found[1] if causal is None else causal
    if found is not None and padding is not None:
        padding = found[2]
        out = tracer.create_proxy("call_function", choose_packed, (src, found[3]), {})
    for layer in module.layers:
        rows = padding
        if padding is not None:
            rows = tracer.create_proxy("call_function", padding_for_layer, (out, padding), {})
        out = layer(out, src_mask=mask, is_causal=causal, src_key_padding_mask=rows)
    if padding is not None:
        out = tracer.create_proxy("call_function", unpack_rows, (out, padding), {})
    return out if module.norm is None else module.norm(out)


def _trace_decoder(
    tracer: fx.Tracer,
    module: Any,
    tgt: Any,
    memory: Any,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    tgt_is_causal: Any = None,
    memory_is_causal: Any = False,
) -> Any:
    causal = _known_causal(tgt_mask, tgt_is_causal)
    if causal is None:
        bare = tracer.create_proxy("call_method", "detach", (tgt,), {})
        given = (bare, tgt_mask, tgt_is_causal, module.layers[0].self_attn.batch_first)
        causal = tracer.create_proxy("call_function", decoder_is_causal, given, {})
    out = tgt
    for layer in module.layers:
        out = layer(
            out,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=causal,
            memory_is_causal=memory_is_causal,
        )
    return out if module.norm is None else module.norm(out)


def _trace_transformer(
    tracer: fx.Tracer,
    module: Any,
    src: Any,
    tgt: Any,
    src_mask: Any = None,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    src_key_padding_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    src_is_causal: Any = None,
    tgt_is_causal: Any = None,
    memory_is_causal: Any = False,
) -> Any:
    given = (src, tgt, module.batch_first, module.d_model)
    src = tracer.create_proxy("call_function", check_transformer_inputs, given, {})
    memory = module.encoder(
        src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal
    )
    return module.decoder(
        tgt,
        memory,
        tgt_mask=tgt_mask,
        memory_mask=memory_mask,
        tgt_key_padding_mask=tgt_key_padding_mask,
        memory_key_padding_mask=memory_key_padding_mask,
        tgt_is_causal=tgt_is_causal,
        memory_is_causal=memory_is_causal,
    )


def _known_causal(mask: Any, is_causal: Any) -> bool | None:
    """Whether layers are told that the mask is causal; None: its values decide."""
    if isinstance(is_causal, bool):
        return is_causal
    return False if mask is None and is_causal is None else None


def find_layer_inputs(
    src: Any, mask: Any, padding: Any, is_causal: Any, batch_first: bool, nested: bool, mask_check: bool
) -> tuple[Any, Any, Any, Any]:
    """What an encoder gives to its layers: mask, whether it is causal, padding; and rows that are packed."""
    layer = _RecordingLayer(batch_first, training=not nested, weight=src.new_empty(0).requires_grad_())
    stand_in = SimpleNamespace(layers=[layer], norm=None, use_nested_tensor=nested, mask_check=mask_check)
    forward = nn.TransformerEncoder.forward
    try:
        forward(stand_in, src, mask, padding, is_causal)
    except DataDependentOutputException:  # planning: a mask without values takes the most memory as a mask
        forward(stand_in, src, mask, padding, False)
    value, got = layer.args[0], layer.kwargs
    is_packed = value.is_nested and not src.is_nested
    rows = padding if is_packed else got["src_key_padding_mask"]
    return got["src_mask"], got["is_causal"], rows, value if is_packed else None


def choose_packed(src: Any, rows: Any) -> Any:
    """What the first layer gets: in eval mode rows without their padding, where the encoder packs them."""
    return src if rows is None else rows


def padding_for_layer(value: Any, padding: Any) -> Any:
    """The padding that a layer is told of: none of packed rows."""
    return None if value.is_nested else padding


def unpack_rows(value: Any, padding: Any) -> Any:
    """What the last layer gave, with its padding."""
    if padding is None or not value.is_nested:
        return value
    return value.to_padded_tensor(0.0, (*padding.shape, value.size(-1)))


def decoder_is_causal(tgt: Any, mask: Any, is_causal: Any, batch_first: bool) -> Any:
    """What a decoder tells its layers of its mask."""
    layer = _RecordingLayer(batch_first)
    stand_in = SimpleNamespace(layers=[layer], norm=None)
    forward = nn.TransformerDecoder.forward
    try:
        forward(stand_in, tgt, tgt, tgt_mask=mask, tgt_is_causal=is_causal)
    except DataDependentOutputException:  # as above
        return False
    return layer.kwargs["tgt_is_causal"]


def check_transformer_inputs(src: Any, tgt: Any, batch_first: bool, d_model: int) -> Any:
    """The source, if it goes with the target."""
    stand_in = SimpleNamespace(
        batch_first=batch_first,
        d_model=d_model,
        encoder=lambda src, **_: src,
        decoder=lambda _tgt, memory, **_: memory,
    )
    return nn.Transformer.forward(stand_in, src, tgt)


class _RecordingLayer:
    """Stands in for the first layer, and notes what it is given."""

    def __init__(
        self, batch_first: bool, *, training: bool = True, weight: torch.Tensor | None = None
    ) -> None:
        pair = SimpleNamespace(weight=weight, bias=weight)
        self.training, self.linear1, self.linear2, self.norm1, self.norm2 = training, pair, pair, pair, pair
        self.self_attn = SimpleNamespace(
            batch_first=batch_first, in_proj_weight=weight, in_proj_bias=weight, out_proj=pair
        )
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Give back what came in."""
        self.args, self.kwargs = args, kwargs
        return args[0]


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody is told when a module runs."""
    return any(getattr(module, name, None) for name in _HOOKS)
