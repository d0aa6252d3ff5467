"""Encoders and decoders of torch.nn are opened: a block for each layer, and the bits of a plain loop."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import loadmaster.train as lt
from loadmaster.core.errors import DeviceMemoryError
from loadmaster.shards.device.cpu_device import CpuDevice
from loadmaster.shards.model import built_model
from loadmaster.shards.model.blocks import build_chain
from loadmaster.shards.plan.partition import make_plan
from loadmaster.shards.plan.rates import default_rates

_LAYERS, _WIDTH, _LENGTH = 3, 16, 6
_CAUSAL = nn.Transformer.generate_square_subsequent_mask(_LENGTH)
_PADDED = torch.arange(_LENGTH) >= torch.tensor([[6], [4], [3]])
_HOLES = torch.tensor([[0, 1, 0, 0, 0, 1]] * 3).bool()


def _encoder(*, norm: bool = True, cls: Any = nn.TransformerEncoder, **more: Any) -> nn.Module:
    given: dict[str, Any] = {"dropout": 0.1, "batch_first": True} | more
    layer = nn.TransformerEncoderLayer(_WIDTH, 2, 32, **given)
    return cls(layer, _LAYERS, nn.LayerNorm(_WIDTH) if norm else None, enable_nested_tensor=_nested(given))


def _nested(given: dict[str, Any]) -> bool:
    return bool(given["batch_first"]) and not given.get("norm_first")


def _decoder(*, norm: bool = True, **more: Any) -> nn.Module:
    given: dict[str, Any] = {"dropout": 0.1, "batch_first": True} | more
    layer = nn.TransformerDecoderLayer(_WIDTH, 2, 32, **given)
    return nn.TransformerDecoder(layer, _LAYERS, nn.LayerNorm(_WIDTH) if norm else None)


class Encoding(nn.Module):
    """An encoder between two linear layers; masks come with the batch, or are a buffer."""

    def __init__(self, inner: nn.Module, buffer: torch.Tensor | None = None, **given: Any) -> None:
        super().__init__()
        self.start, self.inner, self.end = nn.Linear(8, _WIDTH), inner, nn.Linear(_WIDTH, 3)
        self.register_buffer("kept", buffer)
        self.given = given

    def forward(self, x: torch.Tensor, mask: Any = None, padding: Any = None) -> torch.Tensor:
        if self.kept is not None:
            mask = self.kept
        out = self.inner(self.start(x), mask=mask, src_key_padding_mask=padding, **self.given)
        return self.end(out)


class Bare(Encoding):
    """Nothing but the rows is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.inner(self.start(x)))


class Decoding(Encoding):
    """A decoder, whose memory is made of the same rows."""

    def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        memory = torch.tanh(self.start(x))
        return self.end(self.inner(self.start(x), memory, tgt_mask=mask, **self.given))


class Both(Encoding):
    """An nn.Transformer."""

    def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        src = self.start(x)
        return self.end(self.inner(src, torch.sin(src), tgt_mask=mask, **self.given))


class Own(nn.TransformerEncoder):
    """A subclass with a forward of its own."""

    def forward(self, src: torch.Tensor, **_: Any) -> torch.Tensor:
        out: torch.Tensor = super().forward(src * 2)
        return out


class Rows(Encoding):
    """The layers in a loop of the model's own; their mask is a float one."""

    def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        out = self.start(x)
        for layer in self.inner.layers:
            out = layer(out, src_mask=mask)
        return self.end(out)


def _transformer(**more: Any) -> nn.Module:
    given: dict[str, Any] = {"dropout": 0.1, "batch_first": True} | more
    return nn.Transformer(_WIDTH, 2, 3, 2, 32, **given)


def _trial(
    build: Callable[[], nn.Module], *more: Any, turned: bool = False, width: int = 8, **given: Any
) -> lt.Trial:
    made = torch.Generator().manual_seed(2)
    data = []
    for _ in range(3):
        x, y = torch.randn(3, _LENGTH, width, generator=made), torch.randint(3, (3, _LENGTH), generator=made)
        x, y = (x.transpose(0, 1), y.t()) if turned else (x, y)
        data.append(((x, *more) if more else x, y))
    return lt.Trial(
        name="t",
        build=build,
        data=lambda: data,
        loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        optim=lambda ps: torch.optim.AdamW(ps, lr=1e-2),
        epochs=2,
        seed=4,
        **given,
    )


CASES: dict[str, Callable[[], lt.Trial]] = {
    "bare": lambda: _trial(lambda: Bare(_encoder())),
    "no norm": lambda: _trial(lambda: Bare(_encoder(norm=False))),
    "norm first": lambda: _trial(lambda: Bare(_encoder(norm_first=True, dropout=0.0))),
    "sequence first": lambda: _trial(lambda: Bare(_encoder(batch_first=False)), turned=True),
    "no mask in the batch": lambda: _trial(lambda: Encoding(_encoder())),
    "causal": lambda: _trial(lambda: Encoding(_encoder(), is_causal=True), _CAUSAL),
    "masked": lambda: _trial(lambda: Encoding(_encoder(), is_causal=False), _CAUSAL),
    "masked, no dropout": lambda: _trial(lambda: Encoding(_encoder(dropout=0.0), is_causal=False), _CAUSAL),
    "found causal": lambda: _trial(lambda: Encoding(_encoder(dropout=0.0)), _CAUSAL),
    "found not causal": lambda: _trial(lambda: Encoding(_encoder(dropout=0.0)), _CAUSAL.t().contiguous()),
    "causal buffer": lambda: _trial(lambda: Encoding(_encoder(norm_first=True), _CAUSAL.clone())),
    "bool mask": lambda: _trial(lambda: Encoding(_encoder(dropout=0.0)), _CAUSAL < 0),
    "padding": lambda: _trial(lambda: Encoding(_encoder(dropout=0.0)), None, _PADDED),
    "padding with holes": lambda: _trial(lambda: Encoding(_encoder()), None, _HOLES),
    "mask and padding": lambda: _trial(lambda: Encoding(_encoder(norm_first=True)), _CAUSAL < 0, _PADDED),
    "decoder": lambda: _trial(lambda: Decoding(_decoder())),
    "decoder, causal": lambda: _trial(lambda: Decoding(_decoder(norm=False), tgt_is_causal=True), _CAUSAL),
    "decoder, found causal": lambda: _trial(lambda: Decoding(_decoder(dropout=0.0)), _CAUSAL),
    "decoder, norm first": lambda: _trial(
        lambda: Decoding(_decoder(norm_first=True, dropout=0.0), tgt_is_causal=False), _CAUSAL
    ),
    "transformer": lambda: _trial(lambda: Both(_transformer())),
    "transformer, found causal": lambda: _trial(lambda: Both(_transformer(dropout=0.0)), _CAUSAL),
    "transformer, norm first": lambda: _trial(lambda: Both(_transformer(norm_first=True)), _CAUSAL),
    "a loop of its own": lambda: _trial(
        lambda: Rows(_encoder(norm=False, dropout=0.0)), _CAUSAL.t().contiguous()
    ),
    "the model itself": lambda: _trial(_encoder, _CAUSAL < 0, _PADDED, width=_WIDTH),
    "a row": lambda: _trial(lambda: nn.Sequential(nn.Linear(8, _WIDTH), _encoder(), nn.Linear(_WIDTH, 3))),
}

VARIANTS = (  # of what another case has, too
    "sequence first",
    "found not causal",
    "bool mask",
    "decoder, causal",
    "decoder, norm first",
    "transformer, found causal",
    "transformer, norm first",
)


def _called(model: nn.Module, inputs: Any) -> torch.Tensor:
    out: torch.Tensor = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return out


def _plain(trial: lt.Trial) -> tuple[list[float], nn.Module]:
    """The loop everybody writes."""
    torch.manual_seed(trial.seed)
    model = trial.build()
    optimizer = trial.optim(model.parameters())
    losses = []
    for _ in range(trial.epochs):
        for inputs, targets in trial.data():
            optimizer.zero_grad()
            loss = trial.loss(_called(model, inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


def _least_cap(trial: lt.Trial) -> int:
    built, rates = (
        built_model.build_trial(trial, device=torch.device("cpu")),
        default_rates(torch.device("cpu")),
    )
    for cap_bytes in range(64 << 10, 1 << 20, 4 << 10):
        try:
            make_plan(built, cap_bytes=cap_bytes, rates=rates, optimizer_placement="device")
        except DeviceMemoryError:
            continue
        return cap_bytes
    raise AssertionError("no cap is enough")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[pytest.mark.slow] * (one in VARIANTS)) for one in CASES]
)
def test_each_layer_of_a_container_is_a_shard_and_it_trains_and_evaluates_to_the_bits_of_the_plain_model(
    case: str,
) -> None:
    trial = CASES[case]()
    inputs = trial.data()[0][0]
    seen: list[torch.Tensor] = []

    def score(predict: Any) -> dict[str, float]:
        seen.append(predict(inputs))
        return {"sum": seen[-1].double().sum().item()}

    trial = replace(trial, evaluate=score)
    device = CpuDevice(cap_bytes=_least_cap(trial), jitter_s=1e-4)
    runner = lt.open_runner(trial, device=device, optimizer_placement="device")
    assert runner.state.layout.num_shards >= _LAYERS
    losses = [done.loss for done in runner.steps(device, 99)]
    assert "model itself" in runner.verified
    reference = lt.reference(trial)
    witness, model = _plain(trial)
    assert losses == list(reference.losses) == witness
    ours = runner.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, ours[name]), name
        assert torch.equal(tensor, reference.state_dict[name]), name
    runner.evaluate(device)
    with torch.no_grad():
        assert torch.equal(seen[0], _called(model.eval(), inputs))
    runner.close()
    device.close()


def _hooked() -> nn.Module:
    encoder = _encoder()
    encoder.register_forward_hook(lambda *_: None)
    return encoder


def _patched() -> nn.Module:
    encoder = _encoder()
    encoder.forward = lambda src: nn.TransformerEncoder.forward(encoder, src * 2)
    return encoder


@pytest.mark.parametrize("inner", [lambda: _encoder(cls=Own), _hooked, _patched])
def test_a_container_that_does_something_of_its_own_stays_whole_and_a_refusal_names_it(inner: Any) -> None:
    trial = _trial(lambda: Bare(inner()))
    assert len(build_chain(trial, trial.build()).blocks) <= 3
    device = CpuDevice(cap_bytes=1 << 24)
    runner = lt.open_runner(trial, device=device, optimizer_placement="device")
    assert [done.loss for done in runner.steps(device, 99)] == list(lt.reference(trial).losses)
    runner.close()
    device.close()
    said = r"blocks: inner \((Own|TransformerEncoder)\) is not cut, give its layers as Trial\(blocks"
    with pytest.raises(DeviceMemoryError, match=said):
        lt.open_runner(trial, device=CpuDevice(cap_bytes=120 << 10))


def test_a_container_that_is_opened_fits_where_the_whole_one_did_not() -> None:
    device = CpuDevice(cap_bytes=120 << 10)
    runner = lt.open_runner(_trial(lambda: Bare(_encoder())), device=device)
    assert runner.state.layout.num_shards >= _LAYERS
    runner.close()
    device.close()
