"""What capture does with values that a model reads: known ones are computed, the others are said aloud."""

import json
import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.core.io import decode, encode  # noqa: E402
from loadmaster.core.placement import Status  # noqa: E402
from loadmaster.graph.capture import capture  # noqa: E402

TOKENS = torch.arange(16).reshape(2, 8) % 7 + 3


def _speech_or_text(name: str, drop: float) -> tuple[nn.Module, dict[str, Any]]:
    """Tiny models of transformers that skip layers by `rand < layerdrop`; attention is plain products."""
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 32, "dropout": 0.0, "attention_dropout": 0.0, "attn_implementation": "eager"}
    sizes = {
        f"{part}_{what}": value
        for part in ("encoder", "decoder")
        for what, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32), ("layerdrop", drop))
    }
    words = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    if name == "opt":
        config = transformers.OPTConfig(
            hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, num_hidden_layers=3, num_attention_heads=2,
            max_position_embeddings=32, layerdrop=drop, **common,
        )  # fmt: skip
        return transformers.OPTForCausalLM(config), {"input_ids": TOKENS, "labels": TOKENS}
    if name == "bart":
        config = transformers.BartConfig(d_model=16, max_position_embeddings=32, **sizes, **words, **common)
        return transformers.BartForConditionalGeneration(config), {"input_ids": TOKENS, "labels": TOKENS}
    config = transformers.WhisperConfig(
        d_model=16,
        num_mel_bins=4,
        max_source_positions=8,
        max_target_positions=16,
        **sizes,
        **words,
        **common,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": torch.zeros(2, 4, 16), "labels": TOKENS}


def _really_counted(model: nn.Module, inputs: dict[str, Any], *, train: bool) -> int:
    with torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
        torch.manual_seed(0)
        out = model(**inputs)
        if train:
            out.loss.backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", ["whisper", "opt", "bart"])
def test_layers_that_are_skipped_by_a_layerdrop_of_zero_do_not_vanish(name: str, train: bool) -> None:
    model, inputs = _speech_or_text(name, 0.0)
    inputs["use_cache"] = False
    want = _really_counted(model.train(train), inputs, train=train)
    for device in ("cpu", "meta"):
        with torch.device(device):
            model, given = _speech_or_text(name, 0.0)
        given = {key: value.to(device) for key, value in given.items()} | {"use_cache": False}
        graph = capture(model, (), given, train=train)
        assert graph.flops.sum() == want
        assert (graph.assumptions, graph.warnings, graph.notes) == ((), (), ())


def test_a_layerdrop_that_needs_a_draw_is_a_note_and_leaves_the_users_generators_alone() -> None:
    model, inputs = _speech_or_text("opt", 0.5)
    want = _really_counted(model.train(), inputs | {"use_cache": False}, train=True)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    graphs = [capture(model, (), inputs | {"use_cache": False}) for _ in range(2)]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()
    assert graphs[0].digest == graphs[1].digest
    assert graphs[0].flops.sum() == want
    assert graphs[0].assumptions == ()
    assert "random number" in graphs[0].notes[0]
    assert "modeling_opt.py" in graphs[0].notes[0]


class Reads(nn.Module):
    """Runs `relu` where a function of its input holds, else `tanh`."""

    def __init__(self, holds: Any, **buffers: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.holds = holds
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Any, ids: Any = None) -> Any:
        y = self.layer(x)
        return y.relu() if self.holds(self, x, ids) else y.tanh()


def _written_in_place(model: Any, x: Any, ids: Any) -> bool:
    mask = torch.zeros(3)
    mask[1:] += 2
    return bool((mask.view(-1)[2] == 2).any().item())


KNOWN = {
    "rand < 0": (lambda m, x, i: not torch.rand([]) < 0.0, True),
    "rand >= 0": (lambda m, x, i: torch.rand(3).ge(0).all(), True),
    "1 - rand > 1": (lambda m, x, i: (1 - torch.rand(2) > 1.0).any().item(), False),
    "randint": (lambda m, x, i: bool((torch.randint(2, 5, (4,)) < 5).all()), True),
    "arange": (lambda m, x, i: torch.arange(x.shape[0]).sum().item() == 1, True),
    "tensor": (lambda m, x, i: int(torch.tensor([1, 2]).max()) == 2, True),
    "full": (lambda m, x, i: torch.equal(torch.full((2,), 3), torch.tensor([3, 3])), True),
    "new_zeros": (lambda m, x, i: x.new_zeros(2).any(), False),
    "in place": (_written_in_place, True),
    "buffer": (lambda m, x, i: float(m.limit) > 1, True),
    "whole numbers": (lambda m, x, i: i.max() == 5, True),
    "tolist": (lambda m, x, i: 5 in i.tolist(), True),
    "numpy": (lambda m, x, i: i.numpy().max() == 5, True),
    "nonzero": (lambda m, x, i: len(i.nonzero()) == 1, True),
    "unique": (lambda m, x, i: len(torch.unique(i)) == 2, True),
    "masked rows": (lambda m, x, i: len(x[i > 0]) == 1, True),
    "masked_select": (lambda m, x, i: len(torch.masked_select(x[:, 0], i > 0)) == 1, True),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_branch_on_a_constant_or_on_whole_numbers_is_the_real_one_without_weights(name: str) -> None:
    holds, taken = KNOWN[name]
    model = Reads(holds, limit=torch.tensor(2.0))
    model.layer.to("meta")
    graph = capture(model, (torch.empty(2, 4, device="meta"), torch.tensor([0, 5])), path="traced")
    assert ("relu" in graph.op_kind, "tanh" in graph.op_kind) == (taken, not taken)
    assert (graph.assumptions, graph.notes) == ((), ())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("last", [2, 5])
def test_expanded_positions_are_known_as_others_are(rows: int, last: int) -> None:
    positions = torch.arange(last + 1).expand(rows, -1)
    graph = capture(Reads(lambda m, x, i: i[-1].max() == 5), (torch.zeros(2, 4), positions))
    assert ("relu" in graph.op_kind, "tanh" in graph.op_kind) == (last == 5, last != 5)
    assert graph.assumptions == ()


def test_a_value_that_weights_were_written_into_is_assumed_and_said_with_its_line() -> None:
    def mixed(model: Any, x: Any, ids: Any) -> bool:
        flag = torch.zeros(2)
        flag[0] = model.layer.weight[0, 0]
        return bool(flag.sum() > 0)

    model = Reads(mixed).to("meta")
    graph = capture(model, (torch.empty(2, 4, device="meta"),))
    (assumed,) = graph.assumptions
    assert assumed.where.startswith("tests/unit/capture/test_branches.py:")
    assert (assumed.read, assumed.assumed, assumed.count) == ("a condition", "True", 1)


def _assuming() -> Any:
    model = Reads(lambda m, x, i: x.sum() > 0).to("meta")
    return capture(model, (torch.empty(2, 4, device="meta"),))


def test_a_plan_for_an_assumed_branch_is_not_called_optimal_and_its_file_says_why() -> None:
    placement = lm.plan(lm.problem(_assuming(), "A100-40GB"), budget="5x")
    assert placement.status == Status.FEASIBLE
    assert placement.proof.startswith("optimal for this branch")
    again: Any = decode(encode(placement))
    assert again.problem.graph.assumptions == placement.problem.graph.assumptions
    assert again.digest == placement.digest


def test_a_plan_file_from_before_assumptions_still_loads() -> None:
    placement = lm.plan(lm.problem("gen:chain:5", "2xA100-40GB"), budget="5x")
    document = json.loads(encode(placement))
    for field in ("assumptions", "warnings", "notes"):
        assert document["content"]["problem"]["graph"].pop(field) == []
    assert decode(json.dumps(document).encode()).digest == placement.digest


def test_fit_says_what_was_assumed() -> None:
    assert lm.fit(_assuming(), "A100-40GB", quick=True).assumptions


class Forgetful(nn.Module):
    """One layer is never run, one gives no gradient, one is read and never multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.skipped, self.detached, self.summed = (nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x: Any) -> Any:
        return self.used(x) + self.detached(x).detach() + self.summed.weight.sum()


@pytest.mark.parametrize("path", ["joint", "traced", "estimated"])
def test_weights_that_a_step_leaves_out_are_named(path: str) -> None:
    found = {one.kind: one.names for one in capture(Forgetful(), (torch.zeros(2, 4),), path=path).warnings}
    assert found == {
        "unread": ("skipped.weight",),
        "no_gradient": ("detached.weight",),
        "few_flops": ("summed.weight",),
    }


class Ordinary(nn.Module):
    """Weights that are tied, normalised, cast, convolved, routed and shared."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.conv = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose1d(4, 4, 3, padding=1)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.experts = nn.Parameter(torch.zeros(3, 4, 4))

    def forward(self, ids: Any) -> Any:
        y = self.normed(self.embed(ids))
        y = self.up(self.conv(y.transpose(1, 2))).transpose(1, 2)
        y = self.attend(y, y, y, need_weights=False)[0]
        return self.head(torch.bmm(y.reshape(3, -1, 4), self.experts))


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_an_ordinary_model_is_not_warned_of(cast: Any) -> None:
    graph = capture(Ordinary(), (torch.zeros(3, 4, dtype=torch.int64),), autocast=cast)
    assert graph.warnings == ()


def test_an_optimizer_that_looks_at_its_gradients_is_said_to() -> None:
    class Careful(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["params"][0].grad.sum() > 0:
                super().step(closure)

    graph = capture(nn.Linear(4, 4), (torch.zeros(2, 4),), optimizer=lambda w: Careful(w, lr=0.1))
    assert [one.module for one in graph.assumptions] == ["optimizer"]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", torch.optim.Adagrad, torch.optim.NAdam])
def test_the_step_count_of_an_optimizer_is_known_on_a_gpu_too(optimizer: Any) -> None:
    """All weights of a GPU are updated at once, by ops that give nothing back."""
    graph = lm.capture(nn.Linear(4, 4), (torch.zeros(2, 4),), target="cuda", optimizer=optimizer)
    assert graph.assumptions == ()
    assert graph.capture.startswith("joint")


def test_attention_in_mixed_precision_runs_in_16_bits_whatever_it_is_given() -> None:
    """Rotary embeddings make float32 of queries and keys: such kernels were planned, and timed."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(16, 48)

        def forward(self, x: Any) -> Any:
            query, key, value = self.mix(x).view(2, 8, 2, 24).transpose(1, 2).chunk(3, dim=-1)
            turn = torch.ones(8, 8, dtype=torch.float32)
            return nn.functional.scaled_dot_product_attention(query * turn, key * turn, value).mean()

    graph = lm.capture(Rotary(), (torch.zeros(2, 8, 16),), target="cuda", autocast=torch.bfloat16)
    backward = [text for text in graph.signature_table if "attention_backward" in text]
    assert backward
    assert all("flash" in text and "float32[2,2,8,8]" not in text for text in backward)
