"""What `loadmaster demo` trains last: an unchanged model of transformers, larger than its cap."""

import tempfile
import warnings
from typing import Any

import torch

from loadmaster.core.errors import InputError
from loadmaster.train.one_model import train

LINES = (
    "model = GPT2LMHeadModel(config)",
    'data = [{"input_ids": ids, "labels": ids} for ids in batches]',
    'lt.train(model, data, memory_cap="40MB")',
)
CAP_BYTES = 40_000_000
_LAYERS, _WIDTH, _VOCAB, _STEPS = 12, 128, 8000, 4


def train_demo() -> dict[str, Any]:
    """What the model takes beside its activations, and what came of it under the cap."""
    try:
        import transformers
    except ImportError:
        raise InputError("this part needs transformers: pip install 'loadmaster[hf,train]'") from None
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=_LAYERS, n_embd=_WIDTH, n_head=4, vocab_size=_VOCAB, bos_token_id=0, eos_token_id=0
        )
        make: Any = transformers.GPT2LMHeadModel
        model = make(config)
        made = torch.Generator().manual_seed(0)
        batches = [torch.randint(0, _VOCAB, (2, 64), generator=made) for _ in range(_STEPS)]
        data = [{"input_ids": ids, "labels": ids} for ids in batches]
        result = train(
            model, data, memory_cap=CAP_BYTES, dir=folder, device="cpu", name="demo", progress=False
        )
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "need_bytes": 4 * weights,  # and gradients, and two moments
        "loss": result.loss,
        "verified": result.verified,
        "step": result.step,
    }
