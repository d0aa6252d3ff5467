"""State that passes through a ring: few copies, every byte where it belongs, nothing else touched."""

from typing import Any

import torch
from torch import nn

import loadmaster.train as lt
from loadmaster.shards.model.built_model import build_trial
from loadmaster.shards.plan.ring_chunks import chunk_places, divide_positions, make_chunks, ring_size
from loadmaster.train.execute.trial_state import store_on_host


def _pieces() -> list[Any]:
    trial = lt.Trial(
        name="t",
        build=lambda: nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 24)),
        loss=nn.functional.mse_loss,
        data=lambda: [(torch.ones(4, 24), torch.zeros(4, 24))] * 4,
        optim=lambda ps: torch.optim.AdamW(ps, lr=0.01),
        precision="bf16",
    )
    return store_on_host(build_trial(trial, device=torch.device("cpu")), [0], landing=True).pieces


def _filled(host: Any) -> dict[tuple[int, str], torch.Tensor]:
    """Every tensor of a piece with numbers of its own."""
    found = {}
    for position in range(len(host.master)):
        host.started[position] = True
        tensors = {"": host.master[position], **host.state[position]}
        if host.separate[position]:
            tensors["="] = host.compute[position]
        for key, tensor in tensors.items():
            tensor.copy_(torch.randn(tensor.shape))
            found[position, key] = tensor
    return found


def test_what_is_brought_lies_in_the_ring_as_on_the_host() -> None:
    (host,) = _pieces()
    tensors = _filled(host)
    positions = list(range(len(host.master)))
    limit = chunk_places(host, positions)[1]
    (chunk,) = make_chunks(host, positions, limit)
    ring = torch.zeros(limit, dtype=torch.uint8)
    for copy in chunk.brought(ring):
        copy.target.copy_(copy.source)
    for position, places in zip(chunk.positions, chunk.places, strict=True):
        for key, place in places.items():
            if key != "=":
                assert torch.equal(place.view(ring), tensors[position, key])
    assert chunk.up_bytes == 12 * sum(master.numel() for master in host.master)
    assert len(chunk.brought(ring)) < sum(len(places) for places in chunk.places) / 2


def test_what_is_sent_changes_its_own_tensors_and_no_others() -> None:
    (host,) = _pieces()
    tensors = _filled(host)
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    grads = [None if grad is None else grad.fill_(7.0) for grad in host.grads]
    chosen = [0, 2, 3]  # not neighbours all
    limit = chunk_places(host, chosen)[1]
    (chunk,) = make_chunks(host, chosen, limit)
    ring = torch.zeros(limit, dtype=torch.uint8)
    for places in chunk.places:
        for place in places.values():
            place.view(ring).fill_(3.0)
    for copy in chunk.list_copies_home(ring):
        copy.target.copy_(copy.source)
    for (position, key), tensor in tensors.items():
        expected = torch.full_like(tensor, 3.0) if position in chosen else before[position, key]
        assert torch.equal(tensor, expected), (position, key)
    assert all(grad is None or bool((grad == 7.0).all()) for grad in grads)


def test_before_the_first_step_only_the_master_is_brought() -> None:
    (host,) = _pieces()
    (chunk,) = make_chunks(host, [0], chunk_places(host, [0])[1])
    assert chunk.up_bytes == 4 * host.master[0].numel()


def test_small_parameters_ride_with_the_large_one_before_them() -> None:
    sizes = [143_360_000, 67_200, 22_400]
    assert ring_size(sizes) == sum(sizes)
    assert ring_size([1000, 900, 10]) == 1000  # none is small enough to be worth the room
    assert ring_size([]) == 0
    (host,) = _pieces()
    largest = max(chunk_places(host, [at])[1] for at in range(len(host.master)))
    runs = divide_positions(host, range(len(host.master)), largest)
    assert sorted(at for run in runs for at in run) == list(range(len(host.master)))
    assert all(chunk_places(host, run)[1] <= largest for run in runs)
