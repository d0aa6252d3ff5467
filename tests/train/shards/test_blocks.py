"""Blocks found by themselves: in the module tree, or cut out of the graph, skips and all."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import loadmaster.train as lt
from loadmaster.shards.device.cpu_device import CpuDevice
from loadmaster.shards.model.blocks import build_chain


class UNet(nn.Module):
    """Down twice, up twice, with skips over the middle; batch norm, dropout, an in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.down1(x))
        second = F.relu(self.norm(self.down2(F.max_pool2d(first, 2))), inplace=True)
        low = F.dropout(self.middle(F.max_pool2d(second, 2)), 0.1, training=self.training)
        up = self.up2(torch.cat([F.interpolate(low, scale_factor=2), second], dim=1))
        return self.up1(torch.cat([F.interpolate(up, scale_factor=2), first], dim=1))


class OddTransformer(nn.Module):
    """Two inputs, tied output, a parameter of its own, layers run in an order of its own, a late skip."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8), nn.Parameter(torch.randn(1, 6, 8))
        make = lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)  # noqa: E731
        self.layers = nn.ModuleList([make() for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, tokens: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        x = start = self.embed(tokens) + self.place[:, : tokens.shape[1]] * weight
        for layer in reversed(self.layers):
            x = layer(x) + x
        x = (x + start) * self.scale
        return {"logits": F.linear(x, self.embed.weight)}


def _images() -> list[Any]:
    made = torch.Generator().manual_seed(2)
    return [
        (torch.randn(n, 1, 8, 8, generator=made), torch.randint(2, (n, 8, 8), generator=made))
        for n in (3, 3, 2)
    ]


def _texts() -> list[Any]:
    made = torch.Generator().manual_seed(2)
    return [
        (
            (torch.randint(11, (n, 6), generator=made), torch.rand(1, generator=made)),
            torch.randint(11, (n, 6)),
        )
        for n in (3, 2)
    ]


_DRAWN = _texts()
TRIALS: dict[str, dict[str, Any]] = {
    "unet": {"build": UNet, "data": _images, "loss": F.cross_entropy},
    "odd": {
        "build": OddTransformer,
        "data": lambda: _DRAWN,
        "loss": lambda out, targets: F.cross_entropy(out["logits"].transpose(1, 2), targets),
    },
}


def _trial(kind: str, **more: Any) -> lt.Trial:
    optim = lambda ps: torch.optim.AdamW(ps, lr=1e-2)  # noqa: E731
    return lt.Trial(name=kind, optim=optim, epochs=3, seed=4, **(TRIALS[kind] | more))


def _plain(trial: lt.Trial) -> dict[str, torch.Tensor]:
    """The loop everybody writes."""
    torch.manual_seed(trial.seed)
    model = trial.build()
    optimizer = trial.optim(model.parameters())
    for _ in range(trial.epochs):
        for inputs, targets in trial.data():
            optimizer.zero_grad()
            out = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
            trial.loss(out, targets).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("shards", ["each", "two"])
@pytest.mark.parametrize("kind", list(TRIALS))
def test_a_model_that_is_no_chain_is_cut_and_trains_to_the_bits_of_a_plain_loop(
    kind: str, shards: str
) -> None:
    trial = _trial(kind)
    num_blocks = len(build_chain(trial, trial.build()).blocks)
    assert num_blocks >= 4
    cuts = list(range(num_blocks)) if shards == "each" else [0, num_blocks // 2]
    device = CpuDevice(cap_bytes=1 << 24, jitter_s=1e-4)
    runner = lt.open_runner(trial, device=device, cuts=cuts, optimizer_placement="device", num_slots=99)
    losses = [done.loss for done in runner.steps(device, 99)]
    ours, witness, plain = runner.state_dict(), _plain(trial), lt.reference(trial)
    assert losses == list(plain.losses)
    for name, tensor in witness.items():
        assert torch.equal(tensor, ours[name]), name
        assert torch.equal(tensor, plain.state_dict[name]), name
    runner.close()
    device.close()


def test_a_skip_across_a_cut_is_one_more_leaf() -> None:
    trial = _trial("unet")
    chain = build_chain(trial, trial.build().train())
    value: Any = torch.randn(2, 1, 8, 8)
    widths = []
    for index, block in enumerate(chain.blocks):
        value = block(value)
        widths.append(len(value) if isinstance(value, tuple) and index + 1 < len(chain.blocks) else 1)
    assert sum(width > 1 for width in widths) >= 2
    assert widths[-1] == 1


def test_evaluation_runs_the_model_as_eval_mode_has_it() -> None:
    batch = _images()[0][0]
    trial = _trial("unet", evaluate=lambda predict: {"sum": predict(batch).double().sum().item()})
    device = CpuDevice(cap_bytes=1 << 24)
    runner = lt.open_runner(trial, device=device)
    found = runner.evaluate(device)
    torch.manual_seed(trial.seed)
    with torch.no_grad():
        assert found["sum"] == trial.build().eval()(batch).double().sum().item()
    runner.close()


def test_a_forward_that_looks_at_values_is_trained_as_it_is() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if x.sum() > 0 else -self.linear(x)

    trial = _trial("unet", build=Looking)
    chain = build_chain(trial, Looking())
    assert chain.by_call
    assert not chain.traced


def _own_init() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    nn.init.normal_(model[1].weight, std=0.02)
    return model


def _scaled() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    return model


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].weight = model[0].weight
    return model


def _usual() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4)
    )


@pytest.mark.parametrize(
    ("build", "empty"), [(_usual, True), (_own_init, False), (_scaled, False), (_tied, False)]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_build_without_memory_gives_the_numbers_of_a_plain_one_or_is_not_taken(
    build: Any, empty: bool, precision: Any
) -> None:
    from loadmaster.shards.model import built_model
    from loadmaster.train.execute import trial_state

    made = torch.Generator().manual_seed(1)
    data = [(torch.randn(6, 8, generator=made), torch.randint(4, (6,), generator=made))] * 3
    trial = _trial("unet", build=build, data=lambda: data, precision=precision)
    before = torch.get_rng_state()
    built = built_model.build_trial(trial, device=torch.device("cpu"))
    assert built.empty is empty
    if empty:
        assert all(p.untyped_storage().nbytes() <= 4 for p in built.chain.parameters)
    held = trial_state.store_on_host(built, [0, 1], landing=False)
    torch.manual_seed(trial.seed)
    witness = build()
    assert torch.equal(held.generators.host, torch.get_rng_state())
    for name, tensor in witness.state_dict().items():
        assert torch.equal(tensor, built.chain.model.state_dict()[name]), name
    torch.set_rng_state(before)
    device = CpuDevice(cap_bytes=1 << 20)
    runner = lt.open_runner(trial, device=device, optimizer_placement="device")
    assert [done.loss for done in runner.steps(device, 99)] == list(lt.reference(trial).losses)
    runner.close()


def test_the_blocks_that_the_documentation_writes_for_a_transformer_train_to_the_bits_of_a_plain_loop() -> (
    None
):
    import re
    from pathlib import Path

    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    text = (Path(__file__).resolve().parents[3] / "docs/train.md").read_text(encoding="utf-8")
    (recipe,) = [
        each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Embed" in each
    ]
    names: dict[str, Any] = {"nn": nn, "torch": torch, "lt": lt}
    defined, _, trained = recipe.rstrip().rpartition("\n")
    assert trained.startswith("print(lt.Study(trial,")  # another test runs all of it
    exec(defined, names)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0
    )

    def data() -> list[Any]:
        made = torch.Generator().manual_seed(0)
        ids = torch.randint(11, (3, 2, 8), generator=made)
        return [({"input_ids": each, "attention_mask": torch.ones_like(each)}, each) for each in ids]

    def loss(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    trial = lt.Trial(
        name="gpt",
        build=lambda: transformers.GPT2LMHeadModel(config),
        blocks=names["trial"].blocks,
        loss=loss,
        data=data,
        optim=lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    )
    device = CpuDevice(cap_bytes=1 << 20)
    runner = lt.open_runner(trial, device=device, optimizer_placement="device", cuts=[0, 1, 3])
    losses = [done.loss for done in runner.steps(device, 9)]
    plain = lt.reference(trial)
    assert losses == list(plain.losses)
    ours = runner.state_dict()
    assert [name for name, tensor in plain.state_dict.items() if not torch.equal(tensor, ours[name])] == []
    assert "model itself" in runner.verified  # its logits are those of the transformer
    trial.build().load_state_dict(ours)
    runner.close()
