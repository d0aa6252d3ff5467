"""Which model families train without `blocks`, bit for bit as a plain loop: the table in docs/any-model.md.

    python benchmarks/any_model.py                     every family whose library is there
    python benchmarks/any_model.py gpt2 llama --json out.json
    python benchmarks/any_model.py --table out.json... > docs/any-model-table.md

Each family is a small configuration with its real vocabulary. Need is what a plain step takes: weights,
gradients, optimizer state and activations, as the plan of a device without a cap counts them. The cap is a
third of it, or what the largest part that cannot be divided needs, where that is more. Three steps of AdamW
(torch's fused kernel, which is also the one on the host); loss, weights and buffers by `torch.equal`.
"""

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 3


def lm(config: str, model: str, **options: Any) -> Callable[[], Any]:
    """A decoder of transformers, with labels."""

    def make() -> Any:
        import transformers

        given = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | options
        cfg = getattr(transformers, config)(**given)
        build = getattr(transformers, model)
        vocab = cfg.get_text_config().vocab_size
        return (lambda: build(cfg)), [_tokens(vocab, seed) for seed in range(STEPS)]

    return make


def _tokens(vocab: int, seed: int, rows: int = 2, length: int = 24) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows, length), generator=made)
    return {"input_ids": ids, "labels": ids.clone()}


def _add(batch: dict[str, torch.Tensor], **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**batch, **more}


def masked(config: str, model: str, **options: Any) -> Callable[[], Any]:
    """An encoder of transformers with a head over words."""

    def make() -> Any:
        build, data = lm(config, model, **options)()
        return build, [_add(each, attention_mask=torch.ones_like(each["input_ids"])) for each in data]

    return make


def image(config: str, model: str, size: int, **options: Any) -> Callable[[], Any]:
    """A vision model of transformers with a classifier."""

    def make() -> Any:
        import transformers

        cfg = getattr(transformers, config)(**options, num_labels=10)
        build = getattr(transformers, model)
        data = []
        for seed in range(STEPS):
            made = torch.Generator().manual_seed(seed)
            pixels = torch.randn(2, 3, size, size, generator=made)
            data.append({"pixel_values": pixels, "labels": torch.randint(0, 10, (2,), generator=made)})
        return (lambda: build(cfg)), data

    return make


def whisper() -> Any:
    import transformers

    cfg = transformers.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=50, max_target_positions=32,
        num_mel_bins=16,
    )  # fmt: skip
    data = []
    for seed in range(STEPS):
        made = torch.Generator().manual_seed(seed)
        labels = torch.randint(3, cfg.vocab_size, (2, 16), generator=made)
        data.append({"input_features": torch.randn(2, 16, 100, generator=made), "labels": labels})
    return (lambda: transformers.WhisperForConditionalGeneration(cfg)), data


def wav2vec2(config: str = "Wav2Vec2Config", model: str = "Wav2Vec2ForCTC") -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        cfg = getattr(transformers, config)(
            hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128,
            conv_dim=(32, 32, 32), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_feat_extract_layers=3,
            num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, vocab_size=32, mask_time_prob=0.0,
            layerdrop=0.0, ctc_loss_reduction="mean",
        )  # fmt: skip
        data = []
        for seed in range(STEPS):
            made = torch.Generator().manual_seed(seed)
            sound = torch.randn(2, 1600, generator=made)
            data.append({"input_values": sound, "labels": torch.randint(1, 32, (2, 6), generator=made)})
        return (lambda: getattr(transformers, model)(cfg)), data

    return make


def clip() -> Any:
    import transformers

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    cfg = transformers.CLIPConfig(
        text_config=small, vision_config=small | {"image_size": 32, "patch_size": 8}, projection_dim=32
    )
    data = []
    for seed in range(STEPS):
        made = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 49000, (3, 12), generator=made)
        ids[:, -1] = 49407
        data.append({"input_ids": ids, "pixel_values": torch.randn(3, 3, 32, 32, generator=made)})
    return (lambda: _Scored(transformers.CLIPModel(cfg))), data


class _Scored(nn.Module):
    """CLIP asked for its own loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch, return_loss=True)


def unet() -> Any:
    import diffusers

    def build() -> nn.Module:
        return diffusers.UNet2DConditionModel(
            sample_size=16, in_channels=4, out_channels=4, layers_per_block=2, block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32, attention_head_dim=8,
            norm_num_groups=8,
        )  # fmt: skip

    data = []
    for seed in range(STEPS):
        made = torch.Generator().manual_seed(seed)
        noisy = torch.randn(2, 4, 16, 16, generator=made)
        given = {"sample": noisy, "timestep": torch.tensor([3, 700]),
                 "encoder_hidden_states": torch.randn(2, 5, 32, generator=made)}  # fmt: skip
        data.append((given, torch.randn(2, 4, 16, 16, generator=made)))
    return build, data, lambda out, wanted: nn.functional.mse_loss(out.sample, wanted)


def timm_model(name: str, size: int = 64, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        _stub_torchvision()
        import timm

        data = []
        for seed in range(STEPS):
            made = torch.Generator().manual_seed(seed)
            data.append(
                (torch.randn(2, 3, size, size, generator=made), torch.randint(0, 10, (2,), generator=made))
            )
        return (lambda: timm.create_model(name, num_classes=10, **options)), data, nn.functional.cross_entropy

    return make


def _stub_torchvision() -> None:
    """A torchvision for another build of torch has no compiled ops; timm's models use none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.ops.torchvision.nms  # noqa: B018
        except AttributeError:
            global _KEPT
            _KEPT = torch.library.Library("torchvision", "DEF")
            _KEPT.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class Recurrent(nn.Module):
    """Layers of nn.LSTM between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30000, 64)
        self.layers = nn.ModuleList(nn.LSTM(64, 64, batch_first=True) for _ in range(3))
        self.head = nn.Linear(64, 30000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """As it is called."""
        value = self.embed(ids)
        for layer in self.layers:
            value = value + layer(value)[0]
        return self.head(value)


class Seq2Seq(nn.Module):
    """nn.Transformer with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20000, 64)
        self.core = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
        self.head = nn.Linear(64, 20000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """As it is called."""
        mask = self.core.generate_square_subsequent_mask(ids.shape[1])
        value = self.embed(ids)
        return self.head(self.core(value, value, tgt_mask=mask))


class Residual(nn.Module):
    """A residual network of convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
            for _ in range(6)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """As it is called."""
        value = self.stem(pixels)
        for block in self.blocks:
            value = value + block(value)
        return self.head(value.mean((2, 3)))


def own(kind: type[nn.Module], vocab: int = 0) -> Callable[[], Any]:
    def make() -> Any:
        data = []
        for seed in range(STEPS):
            made = torch.Generator().manual_seed(seed)
            if vocab:
                ids = torch.randint(0, vocab, (2, 16), generator=made)
                data.append((ids, ids))
            else:
                data.append(
                    (torch.randn(4, 3, 16, 16, generator=made), torch.randint(0, 10, (4,), generator=made))
                )

        def loss(out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(out.flatten(0, -2), wanted.flatten())

        return kind, data, loss

    return make


_LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
_GQA = _LLAMA | {"num_key_value_heads": 2}
_BERT = _LLAMA
_BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
}  # fmt: skip
_T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16}
_MOE = _GQA | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}

FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "gpt2": ("decoder", lm("GPT2Config", "GPT2LMHeadModel", n_embd=64, n_layer=4, n_head=4)),
    "gpt_neo": ("decoder", lm("GPTNeoConfig", "GPTNeoForCausalLM", hidden_size=64, num_layers=4, num_heads=4,
                              attention_types=[[["global", "local"], 2]])),
    "gpt_neox": ("decoder, rotary", lm("GPTNeoXConfig", "GPTNeoXForCausalLM", **_LLAMA)),
    "opt": ("decoder", lm("OPTConfig", "OPTForCausalLM", hidden_size=64, ffn_dim=128, num_hidden_layers=4,
                          num_attention_heads=4, word_embed_proj_dim=64)),
    "bloom": ("decoder, ALiBi", lm("BloomConfig", "BloomForCausalLM", hidden_size=64, n_layer=4, n_head=4)),
    "llama": ("decoder, rotary", lm("LlamaConfig", "LlamaForCausalLM", **_LLAMA)),
    "mistral": ("decoder, GQA", lm("MistralConfig", "MistralForCausalLM", **_GQA)),
    "qwen2": ("decoder, GQA", lm("Qwen2Config", "Qwen2ForCausalLM", **_GQA)),
    "qwen3": ("decoder, GQA", lm("Qwen3Config", "Qwen3ForCausalLM", **_GQA, head_dim=16)),
    "gemma": ("decoder, tied", lm("GemmaConfig", "GemmaForCausalLM", **_GQA, head_dim=16)),
    "phi": ("decoder, partial rotary", lm("PhiConfig", "PhiForCausalLM", **_LLAMA)),
    "falcon": ("decoder, multi-query", lm("FalconConfig", "FalconForCausalLM", hidden_size=64,
                                          num_hidden_layers=4, num_attention_heads=4)),
    "mixtral": ("MoE, router loss", lm("MixtralConfig", "MixtralForCausalLM", **_MOE)),
    "qwen2_moe": ("MoE, router loss", lm("Qwen2MoeConfig", "Qwen2MoeForCausalLM", **_GQA, num_experts=4,
                                         num_experts_per_tok=2, moe_intermediate_size=64,
                                         shared_expert_intermediate_size=64, output_router_logits=True)),
    "mamba": ("state space", lm("MambaConfig", "MambaForCausalLM", hidden_size=64, num_hidden_layers=4,
                                state_size=8)),
    "mamba2": ("state space", lm("Mamba2Config", "Mamba2ForCausalLM", hidden_size=64, num_hidden_layers=4,
                                 state_size=16, num_heads=8, head_dim=16, n_groups=2, chunk_size=8)),
    "bert": ("encoder", masked("BertConfig", "BertForMaskedLM", **_BERT)),
    "roberta": ("encoder", masked("RobertaConfig", "RobertaForMaskedLM", **_BERT)),
    "distilbert": ("encoder", masked("DistilBertConfig", "DistilBertForMaskedLM", dim=64, hidden_dim=128,
                                     n_layers=4, n_heads=4)),
    "electra": ("encoder", masked("ElectraConfig", "ElectraForMaskedLM", **_BERT, embedding_size=64)),
    "albert": ("encoder, shared layers", masked("AlbertConfig", "AlbertForMaskedLM", **_BERT,
                                                embedding_size=32)),
    "deberta_v2": ("encoder", masked("DebertaV2Config", "DebertaV2ForMaskedLM", **_BERT,
                                     relative_attention=True,
                                     pos_att_type=["p2c", "c2p"], position_buckets=16)),
    "modernbert": ("encoder", masked("ModernBertConfig", "ModernBertForMaskedLM", **_BERT)),
    "t5": ("encoder-decoder", lm("T5Config", "T5ForConditionalGeneration", **_T5, decoder_start_token_id=0)),
    "bart": ("encoder-decoder", lm("BartConfig", "BartForConditionalGeneration", **_BART)),
    "pegasus": ("encoder-decoder", lm("PegasusConfig", "PegasusForConditionalGeneration", **_BART,
                                      decoder_start_token_id=0)),
    "whisper": ("speech, encoder-decoder", whisper),
    "wav2vec2": ("speech", wav2vec2()),
    "hubert": ("speech", wav2vec2("HubertConfig", "HubertForCTC")),
    "vit": ("vision", image("ViTConfig", "ViTForImageClassification", 32, **_BERT, image_size=32,
                            patch_size=8)),
    "deit": ("vision", image("DeiTConfig", "DeiTForImageClassification", 32, **_BERT, image_size=32,
                             patch_size=8)),
    "swin": ("vision, stages", image("SwinConfig", "SwinForImageClassification", 32, image_size=32,
                                     patch_size=2,
                                     embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4)),
    "convnext": ("vision, stages", image("ConvNextConfig", "ConvNextForImageClassification", 32,
                                         hidden_sizes=[32, 64], depths=[2, 2], num_stages=2)),
    "resnet": ("vision, batch norm", image("ResNetConfig", "ResNetForImageClassification", 32,
                                           embedding_size=16,
                                           hidden_sizes=[32, 64], depths=[2, 2], layer_type="basic")),
    "clip": ("text and vision", clip),
    "diffusers UNet": ("diffusion", unet),
    "timm resnet18": ("vision, batch norm", timm_model("resnet18")),
    "timm efficientnet_b0": ("vision, batch norm", timm_model("efficientnet_b0")),
    "timm vit_tiny": ("vision", timm_model("vit_tiny_patch16_224", img_size=64)),
    "nn.LSTM stack": ("torch.nn", own(Recurrent, 30000)),
    "nn.Transformer": ("torch.nn", own(Seq2Seq, 20000)),
    "residual CNN": ("torch.nn, batch norm", own(Residual)),
}  # fmt: skip


def make_trial(name: str) -> Any:
    """The trial of a family, and what a plain loop makes of it is `train_plain`."""
    import loadmaster.train as lt

    build, data, *loss = FAMILIES[name][1]()
    return lt.Trial(
        name=name.replace(" ", "-"),
        build=build,
        data=lambda: data,
        loss=loss[0] if loss else None,
        optim=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
        seed=3,
    )


def train_plain(trial: Any, device: str = "cpu") -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop that anyone would write."""
    import random

    import numpy as np

    torch.manual_seed(trial.seed)
    random.seed(trial.seed)
    np.random.seed(trial.seed)
    model = trial.build().to(device).train()
    optimizer = trial.optim([each for each in model.parameters() if each.requires_grad])
    losses = []
    for batch in (_move(each, device) for each in trial.data()):
        if isinstance(batch, dict):
            loss = model(**batch).loss
        else:
            given, wanted = batch
            loss = trial.loss(model(**given) if isinstance(given, dict) else model(given), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: each.cpu() for name, each in model.state_dict().items()}


def _move(tree: Any, device: str) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)


def train_on_gpu(trial: Any) -> dict[str, Any]:
    """Every weight comes and goes, and every other shard that may runs again."""
    from dataclasses import replace

    from loadmaster.shards.device.cuda_device import CudaDevice
    from loadmaster.train.execute.runner import open_runner

    device = CudaDevice(cap_bytes=8 << 30)
    runner = open_runner(trial, device=device, placement="device", num_slots=2)
    try:
        calls = runner.state.facts.calls
        if calls is not None:
            again = tuple(may and shard % 2 == 0 for shard, may in enumerate(calls.may_recompute))
            runner.config = replace(runner.config, recompute=again)
        losses = [done.loss for done in runner.steps(device, STEPS)]
        return {
            "losses": losses,
            "state": {name: each.clone() for name, each in runner.state_dict().items()},
            "verified": runner.verified,
            "by": "call" if runner.state.chain.by_call else "chain",
            "shards": runner.state.layout.num_shards,
            "again": sum(runner.config.recompute),
            "need_bytes": 0, "cap_bytes": 0, "peak_bytes": 0,
        }  # fmt: skip
    finally:
        runner.close()
        device.close()


def train_by_shards(trial: Any) -> dict[str, Any]:
    """The same under a cap."""
    from loadmaster.core.errors import DeviceMemoryError
    from loadmaster.shards.device.cpu_device import CpuDevice
    from loadmaster.shards.model.built_model import build_trial
    from loadmaster.shards.plan.partition import make_plan
    from loadmaster.shards.plan.rates import SIMULATED
    from loadmaster.train.execute.runner import open_built_runner

    built = build_trial(trial, device=torch.device("cpu"))
    whole = make_plan(built, cap_bytes=1 << 40, rates=SIMULATED).peak_bytes
    cap = whole // 3
    try:
        make_plan(built, cap_bytes=cap, rates=SIMULATED)
    except DeviceMemoryError:
        low, high = cap, whole
        while high - low > max(whole // 100, 4096):  # the least that the largest part lets it be
            middle = (low + high) // 2
            try:
                make_plan(built, cap_bytes=middle, rates=SIMULATED)
                high = middle
            except DeviceMemoryError:
                low = middle
        cap = high
    device = CpuDevice(cap_bytes=cap)
    runner = open_built_runner(built, device=device)
    try:
        losses = [done.loss for done in runner.steps(device, STEPS)]
        layout = runner.plan.layout
        return {
            "losses": losses,
            "state": {name: each.clone() for name, each in runner.state_dict().items()},
            "verified": runner.verified,
            "by": "call" if runner.state.chain.by_call else "chain",
            "shards": layout.num_shards,
            "again": sum(layout.recompute),
            "need_bytes": whole,
            "cap_bytes": cap,
            "peak_bytes": device.arena.peak_bytes,
        }
    finally:
        runner.close()
        device.close()


def try_family(name: str, device: str = "cpu") -> dict[str, Any]:
    """One row."""
    began = time.process_time()
    row: dict[str, Any] = {"family": name, "kind": FAMILIES[name][0]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = make_trial(name)
            row["phase"] = "plain loop"
            losses, state = train_plain(trial, device)
            row["phase"] = "by shards"
            ours = train_by_shards(trial) if device == "cpu" else train_on_gpu(trial)
    except Exception as problem:
        where = traceback.format_exc().splitlines()[-24:] if device != "cpu" else []
        return row | {"error": f"{type(problem).__name__}: {problem}"[:400], "where": where}
    row.pop("phase")
    found = ours.pop("state")
    apart = [key for key, value in state.items() if not torch.equal(value, found[key])]
    row |= ours | {"equal": losses == ours["losses"] and not apart, "apart": apart[:3]}
    return row | {"cpu_s": round(time.process_time() - began, 1)}


def _try_in_a_process(name: str) -> dict[str, Any]:
    """An error of a GPU ends all that its process could still do there, so each family has one of its own."""
    import transformers  # noqa: F401 - once, before processes part

    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        with os.fdopen(write, "w") as out:
            json.dump(try_family(name, "cuda"), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        text = told.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"family": name, "kind": FAMILIES[name][0], "error": "died"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--json")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--table", nargs="*")
    given = parser.parse_args()
    if given.table:
        rows = {row["family"]: row for path in given.table for row in json.loads(Path(path).read_text())}
        print_table([rows[name] for name in FAMILIES if name in rows])
        return
    torch.set_num_threads(1)
    if given.device == "cuda":  # CUBLAS_WORKSPACE_CONFIG=:4096:8 must be set, too
        torch.use_deterministic_algorithms(True, warn_only=True)
    rows = []
    for name in given.families or FAMILIES:
        rows.append(try_family(name, "cpu") if given.device == "cpu" else _try_in_a_process(name))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if given.json:
            with open(given.json, "w") as out:
                json.dump(rows, out, indent=1)


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        "| family | kind | run by | shards | run again | need, MB | cap, MB | same bits as plain training |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        if "error" in row:
            print(
                f"| {row['family']} | {row['kind']} | - | - | - | - | - | not trained: {row['error'][:80]} |"
            )
            continue
        print(
            f"| {row['family']} | {row['kind']} | {row['by']} | {row['shards']} | {row['again']} |"
            f" {row['need_bytes'] / 1e6:.1f} | {row['cap_bytes'] / 1e6:.1f} |"
            f" {'yes' if row['equal'] else 'no'} |"
        )


if __name__ == "__main__":
    main()
