"""`hf:NAME`: models of the `transformers` library from their sizes alone. Nothing is downloaded.

The config class is given the published numbers and the model is built on the `meta` device with random
weights that are never allocated. Attention is PyTorch's own, without a mask: one that the library writes
out for tracers only is not what a training loop runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.zoo.example import Example, random_tokens

_ATTENTION = "loadmaster_sdpa"


@dataclass(frozen=True, slots=True)
class Size:
    """A config class, a model class and the numbers that differ from the config's defaults."""

    config: str
    model: str
    inputs: str  # 'text' or 'image'
    numbers: Mapping[str, Any] = field(default_factory=dict)
    longest: int = 0  # tokens, 0 = any


def _gpt2_size(layers: int, width: int, heads: int) -> Size:
    numbers = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": 50257, "n_positions": 1024}
    return Size("GPT2Config", "GPT2LMHeadModel", "text", numbers, longest=1024)


def _bert_size(layers: int, width: int, heads: int) -> Size:
    numbers = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    }
    return Size("BertConfig", "BertForMaskedLM", "text", numbers, longest=512)


def _llama_numbers(
    layers: int, width: int, heads: int, kv_heads: int, inner: int, **more: Any
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        **more,
    }


SIZES: dict[str, Size] = {
    "gpt2": _gpt2_size(12, 768, 12),
    "gpt2-xl": _gpt2_size(48, 1600, 25),
    "bert-base": _bert_size(12, 768, 12),
    "bert-large": _bert_size(24, 1024, 16),
    "llama-7b": Size("LlamaConfig", "LlamaForCausalLM", "text", _llama_numbers(32, 4096, 32, 32, 11008)),
    "llama-70b": Size("LlamaConfig", "LlamaForCausalLM", "text", _llama_numbers(80, 8192, 64, 8, 28672)),
    "mixtral-8x7b": Size(
        "MixtralConfig",
        "MixtralForCausalLM",
        "text",
        _llama_numbers(32, 4096, 32, 8, 14336, num_local_experts=8, num_experts_per_tok=2),
    ),
    "t5-base": Size(
        "T5Config",
        "T5ForConditionalGeneration",
        "text",
        {
            "d_model": 768,
            "d_kv": 64,
            "d_ff": 3072,
            "num_layers": 12,
            "num_heads": 12,
            "vocab_size": 32128,
            "decoder_start_token_id": 0,
        },
    ),
    "vit-base": Size(
        "ViTConfig",
        "ViTForImageClassification",
        "image",
        {
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "image_size": 224,
            "patch_size": 16,
            "num_labels": 1000,
        },
    ),
}


def hf_example(name: str, *, batch: int, seq: int, device: str = "meta") -> Example:
    """A named model with a batch of inputs and labels."""
    if name not in SIZES:
        raise UnknownNameError("model", name, SIZES, see="hf:NAME")
    return build_example(SIZES[name], batch=batch, seq=seq, device=device)


def build_example(size: Size, *, batch: int, seq: int, device: str = "meta") -> Example:
    """The model of a size with a batch of inputs and labels."""
    transformers = _import_transformers()
    if size.longest and seq > size.longest:
        raise InputError(f"{size.model} takes at most {size.longest} tokens, not {seq}; give a smaller --seq")
    numbers = dict(size.numbers)
    if size.inputs == "text":
        numbers.update(bos_token_id=1, eos_token_id=1, pad_token_id=0)
    config = getattr(transformers, size.config)(**numbers)
    config.use_cache = False
    with torch.device(device):
        model: nn.Module = getattr(transformers, size.model)._from_config(
            config, attn_implementation=_register_attention(transformers, config)
        )
    model.train()
    if size.inputs == "image":
        side, labels = numbers["image_size"], torch.zeros(batch, dtype=torch.int64, device=device)
        image = torch.zeros(batch, 3, side, side, device=device)
        return Example(model, (), {"pixel_values": image, "labels": labels})
    given = random_tokens(batch, seq, numbers["vocab_size"], device=device)
    labels = random_tokens(batch, seq, numbers["vocab_size"], device=device, seed=1)
    return Example(model, (), {"input_ids": given, "labels": labels})


def restore_attention(model: nn.Module) -> None:
    """Register our attention in this process, for a model that another process built with it."""
    names = {getattr(getattr(one, "config", None), "_attn_implementation", None) for one in model.modules()}
    if _ATTENTION in names:
        _register_attention(_import_transformers(), None)


def _register_attention(transformers: Any, config: Any) -> str:
    """PyTorch's attention under a name for which the library writes out no mask."""
    try:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError:
        return "sdpa"
    interface: Callable[[str, Any], None] = transformers.AttentionInterface.register
    interface(_ATTENTION, sdpa_attention_forward)
    return _ATTENTION


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise InputError(
            "hf: models need transformers; install it with: pip install 'loadmaster[hf]'"
        ) from None
    return transformers
