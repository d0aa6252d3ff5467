"""Families: tiny models of `transformers` from configs alone, called as the library builds them by default.

Every model keeps `use_cache`, its dict of outputs and its own loss as the library has them; only its sizes
are small. Nothing is downloaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_VOCABULARY = 64
_BATCH, _SEQ = 2, 8
_DECODER = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
_GROUPED = _DECODER | {"num_key_value_heads": 2}
_MOE = {"num_experts_per_tok": 2, "output_router_logits": True}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A config class, a model class, the sizes, and what the model is called with."""

    config: str
    model: str
    sizes: Mapping[str, Any]
    inputs: Callable[[], dict[str, Any]]
    keep: Mapping[str, Any] = field(
        default_factory=dict
    )  # arguments of the call that stand beside the inputs

    def build(self, seed: int = 0) -> nn.Module:
        """The model in training mode, with weights from a seed."""
        import transformers

        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**self.sizes)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.train()

    def call(self, seed: int = 1) -> dict[str, Any]:
        """What the model is called with, by name."""
        torch.manual_seed(seed)
        return {**self.inputs(), **self.keep}


def _random_tokens(length: int = _SEQ) -> torch.Tensor:
    return torch.randint(3, _VOCABULARY, (_BATCH, length))


def _text() -> dict[str, Any]:
    tokens = _random_tokens()
    return {"input_ids": tokens, "labels": tokens}


def _masked_text() -> dict[str, Any]:
    tokens = _random_tokens()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def _pairs() -> dict[str, Any]:
    return {"input_ids": _random_tokens(), "labels": _random_tokens()}


def _image(size: int = 16, num_labels: int = 4) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(_BATCH, 3, size, size),
        "labels": torch.randint(0, num_labels, (_BATCH,)),
    }


def _large_image() -> dict[str, Any]:
    return _image(size=32)


def _speech() -> dict[str, Any]:
    return {"input_features": torch.randn(_BATCH, 8, 32), "labels": _random_tokens()}


def _wave() -> dict[str, Any]:
    return {"input_values": torch.randn(_BATCH, 400), "labels": torch.randint(3, 16, (_BATCH, 3))}


def _image_and_text() -> dict[str, Any]:
    return {
        "input_ids": _random_tokens(),
        "pixel_values": torch.randn(_BATCH, 3, 16, 16),
        "return_loss": True,
    }


def _boxes() -> dict[str, Any]:
    one = {"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4) / 2 + 0.2}
    return {"pixel_values": torch.randn(_BATCH, 3, 64, 64), "labels": [one, one]}


def _describe_clip() -> dict[str, Any]:
    return {"text_config": dict(_DECODER) | _TOKENS, "vision_config": dict(_VISION), "projection_dim": 8}


def _describe_detr() -> dict[str, Any]:
    from transformers import ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    return {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": backbone,
        "num_queries": 5,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "num_labels": 4,
    }


class _Described(Mapping[str, Any]):
    """Sizes that need the library: asked for when the model is built."""

    def __init__(self, describe: Callable[[], dict[str, Any]]) -> None:
        self._describe = describe

    def __getitem__(self, name: str) -> Any:
        return self._describe()[name]

    def __iter__(self) -> Any:
        return iter(self._describe())

    def __len__(self) -> int:
        return len(self._describe())


_GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": _VOCABULARY, "n_positions": 32}
_BERT = dict(_DECODER)
_SEQ2SEQ = {
    "vocab_size": _VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_WAVE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 16,
    "mask_time_prob": 0.0,
}
_STATES = {"output_hidden_states": True}

FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT2Config", "GPT2LMHeadModel", _GPT2, _text),
    "llama": Family("LlamaConfig", "LlamaForCausalLM", _GROUPED, _text),
    "mistral": Family("MistralConfig", "MistralForCausalLM", _GROUPED, _masked_text),
    "mixtral": Family(
        "MixtralConfig", "MixtralForCausalLM", _GROUPED | _MOE | {"num_local_experts": 4}, _text
    ),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", _GROUPED, _text, _STATES),
    "qwen2_moe": Family(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        _GROUPED
        | _MOE
        | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        _text,
    ),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", _GROUPED | {"head_dim": 4}, _text),
    "gemma": Family("GemmaConfig", "GemmaForCausalLM", _GROUPED | {"head_dim": 4}, _text),
    "gemma2": Family(
        "Gemma2Config", "Gemma2ForCausalLM", _GROUPED | {"head_dim": 4, "sliding_window": 4}, _text
    ),
    "phi": Family("PhiConfig", "PhiForCausalLM", _DECODER | _TOKENS, _text),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM", _GROUPED | _TOKENS, _text),
    "gpt_neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", _DECODER | _TOKENS, _text, _STATES),
    "gptj": Family(
        "GPTJConfig",
        "GPTJForCausalLM",
        _GPT2 | {"rotary_dim": 4} | _TOKENS,
        _text,
    ),
    "opt": Family(
        "OPTConfig",
        "OPTForCausalLM",
        _DECODER | {"ffn_dim": 32, "word_embed_proj_dim": 16},
        _masked_text,
    ),
    "bloom": Family(
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": _VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 4},
        _text,
    ),
    "falcon": Family("FalconConfig", "FalconForCausalLM", _DECODER, _text),
    "bart": Family("BartConfig", "BartForConditionalGeneration", _SEQ2SEQ, _pairs),
    "t5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": _VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        _pairs,
    ),
    "whisper": Family(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        _SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        _speech,
    ),
    "bert": Family("BertConfig", "BertForMaskedLM", _BERT, _masked_text),
    "roberta": Family("RobertaConfig", "RobertaForMaskedLM", _BERT, _masked_text, _STATES),
    "distilbert": Family(
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": _VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
        _masked_text,
    ),
    "albert": Family("AlbertConfig", "AlbertForMaskedLM", _BERT | {"embedding_size": 8}, _text),
    "deberta_v2": Family(
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        _BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8},
        _masked_text,
    ),
    "electra": Family("ElectraConfig", "ElectraForMaskedLM", _BERT | {"embedding_size": 8}, _masked_text),
    "vit": Family("ViTConfig", "ViTForImageClassification", _VISION | {"num_labels": 4}, _image),
    "swin": Family(
        "SwinConfig",
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": 4,
        },
        _large_image,
    ),
    "convnext": Family(
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 4, "drop_path_rate": 0.1},
        _large_image,
    ),
    "resnet": Family(
        "ResNetConfig",
        "ResNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "layer_type": "basic",
            "num_labels": 4,
        },
        _large_image,
    ),
    "detr": Family("DetrConfig", "DetrForObjectDetection", _Described(_describe_detr), _boxes),
    "clip": Family("CLIPConfig", "CLIPModel", _Described(_describe_clip), _image_and_text),
    "mamba": Family(
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": _VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        _text,
    ),
    "wav2vec2": Family("Wav2Vec2Config", "Wav2Vec2ForCTC", _WAVE, _wave),
}
