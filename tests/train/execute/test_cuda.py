"""Shards on a real GPU: the bits of a plain loop there, under the cap, however late copies are."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import loadmaster.train as lt
from loadmaster.shards.device.cuda_device import CudaDevice
from loadmaster.shards.model.blocks import build_chain
from loadmaster.shards.plan.layout import lay_out
from loadmaster.train.backbone.group import open_group, steps
from tests.train.execute.test_equality import CUTS, MODELS, OPTIMIZERS
from tests.train.lora_trials import NUM_LAYERS, build, lora
from tests.train.shards.test_profile import attentive

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch says so where the process's first matrix product runs in autograd's thread
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]
CAP_BYTES = 512 << 20
LATE = 4_000_000  # cycles: about 2 ms
MIXES = {"device": ["device"], "host": ["host"], "mixed": ["pinned", "host", "device"]}


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    made = CudaDevice(cap_bytes=CAP_BYTES)
    torch.cuda.reset_peak_memory_stats()
    yield made
    made.close()


def late(device: CudaDevice, kind: str) -> None:
    """Every copy of a kind begins late, on its own stream."""
    right = device._send

    def send(what: str, lanes: Any, lane: int, copies: Any, after: Any, label: str) -> Any:
        if what == kind:
            with torch.cuda.stream(lanes[lane]):
                torch.cuda._sleep(LATE)
        return right(what, lanes, lane, copies, after, label)

    device._send = send  # type: ignore[method-assign]


def trial_of(model: str, optimizer: str, **more: Any) -> lt.Trial:
    make, data = MODELS[model]
    optim = OPTIMIZERS[optimizer]
    return lt.Trial(name="t", build=make, loss=F.cross_entropy, data=data, optim=optim, epochs=3, **more)


def equals_plain(device: CudaDevice, trial: lt.Trial, cuts: list[int], kind: str) -> None:
    chain = build_chain(trial, trial.build())
    num_pieces = len(lay_out(chain, cuts, compute_dtype=None, castable=[False] * 99).pieces)
    placement: Any = list(itertools.islice(itertools.cycle(MIXES[kind]), num_pieces))
    given: dict[str, Any] = {"cuts": cuts, "placement": placement, "num_slots": 2, "depth": 1}
    runner = lt.open_runner(trial, device=device, num_threads=1, **given)
    losses = [done.loss for done in runner.steps(device, 99)]
    names = runner.state.chain.parameter_name
    on_host = [
        names[number]
        for host in runner.state.pieces
        if runner.config.placement[host.piece.index] == "host"
        for number in host.piece.parameters
    ]
    ours = {name: tensor.clone() for name, tensor in runner.state_dict().items()}
    runner.close()
    assert device.arena.used_bytes == 0
    assert 0 < torch.cuda.max_memory_reserved() <= CAP_BYTES
    plain = lt.reference(trial, device="cuda:0", host=on_host)
    assert losses == list(plain.losses)
    assert [n for n, tensor in plain.state_dict.items() if not torch.equal(tensor.cpu(), ours[n])] == []


@pytest.mark.parametrize("slow", ["up", "down", "none"])
@pytest.mark.parametrize("kind", list(MIXES))
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_shards_on_a_gpu_equal_the_plain_loop_there(
    device: CudaDevice, optimizer: str, kind: str, slow: str
) -> None:
    late(device, slow)
    equals_plain(device, trial_of("residual", optimizer), CUTS[5], kind)


@pytest.mark.parametrize("more", [{"accumulate": 3}, {"clip_norm": 0.5}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("model", ["skip", "tied"])
def test_ties_skips_accumulation_clipping_and_bf16_on_a_gpu_equal_the_plain_loop(
    device: CudaDevice, model: str, more: dict[str, Any]
) -> None:
    late(device, "up")
    equals_plain(device, trial_of(model, "adamw", **more), CUTS[5], "mixed")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_heads_that_share_keys_are_planned_and_train_as_in_the_plain_loop(
    device: CudaDevice, precision: Any
) -> None:
    equals_plain(device, attentive(precision=precision, epochs=3), [0, 1, 2], "mixed")


def plain_build() -> torch.nn.Module:
    """Without dropout: what draws is not recorded."""
    model = build()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("slow", ["up", "none"])
def test_replayed_units_give_the_bits_of_units_that_are_not(
    device: CudaDevice, precision: Any, slow: str
) -> None:
    late(device, slow)
    found = []
    for replay in (False, True):
        given: dict[str, Any] = {"replay": replay, "precision": precision, "build": plain_build, "epochs": 3}
        trials = [lora(f"t{n}", lr=1e-2 / (n + 1), seed=n, **given) for n in range(3)]
        group = open_group(trials, device=device, cuts=list(range(NUM_LAYERS + 2)), num_places=3)
        losses = [[each.loss for each in told if not each.over] for told in steps(group, 99)]
        tapes = [member.tape for member in group._members.values()]
        assert all((tape is not None) == replay for tape in tapes)
        assert all(tape.why_not == "" and tape.num_recorded >= 2 * NUM_LAYERS for tape in tapes if tape)
        for state in group.states:
            group.settle(state)
        models = [state.chain.model for state in group.states]
        found.append((losses, [{n: t.clone() for n, t in m.state_dict().items()} for m in models]))
        group.leave()
        assert device.arena.used_bytes == 0
    (losses, states), (replayed, others) = found
    assert len(losses) > 6
    assert losses == replayed
    assert [
        name
        for one, other in zip(states, others, strict=True)
        for name in one
        if not torch.equal(one[name], other[name])
    ] == []


def test_a_shard_that_draws_is_not_recorded_and_its_masks_stay(device: CudaDevice) -> None:
    found = []
    for replay in (False, True):
        group = open_group(
            [lora("t", replay=replay)], device=device, cuts=list(range(NUM_LAYERS + 2)), num_places=3
        )
        found.append([each.loss for told in steps(group, 99) for each in told if not each.over])
        tape = next(iter(group._members.values())).tape
        assert tape is None or tape.num_recorded <= 1, "the embedding alone"
        group.leave()
    assert found[0] == found[1]
