"""Masks of `transformers`: exported, a model attends as it does unplaced, kernel for kernel."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="placing needs the extra [torch]")
transformers = pytest.importorskip("transformers", reason="the models are of transformers")
from loadmaster.cluster.parse import parse_cluster  # noqa: E402
from loadmaster.graph.capture import capture  # noqa: E402
from loadmaster.graph.torch_capture.paths.known_positions import PositionTracker, is_one_sequence  # noqa: E402
from loadmaster.runtime.placed import build_placed_model  # noqa: E402
from tests.placing import random_plan  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(
        pytest.importorskip("transformers.masking_utils", reason="of transformers 5"),
        "find_packed_sequence_indices",
    ),
    reason="masks of transformers before 5 are made elsewhere",
)
LENGTH = 384  # where a mask that is written out rounds otherwise


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    rest = {"num_hidden_layers": 2, "max_position_embeddings": 512, "use_cache": False}
    config = transformers.LlamaConfig(vocab_size=64, **sizes, **rest | more)
    return transformers.LlamaForCausalLM(config)


class Packs(torch.nn.Module):
    """Gives positions that it has made itself."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way = llama(), way

    def forward(self, ids: Any) -> Any:
        positions = torch.arange(ids.shape[1])
        half = ids.shape[1] // 2
        if self.way == "remainder":
            positions = positions % half
        elif self.way == "in place":
            positions[half:] -= half
        elif self.way == "joined":
            positions = torch.cat([torch.arange(half), torch.arange(half)])
        elif self.way == "looked at":
            positions = torch.stack([positions, positions.flip(0)])[0] + 3
        return self.inner(input_ids=ids, position_ids=positions.unsqueeze(0)).logits


def gradients(model: Any, autocast: bool, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = model(*args, **kwargs)
        loss = out.loss if hasattr(out, "loss") else out.float().pow(2).mean()
    loss.backward()
    return loss.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


def placed(model: Any, num_devices: int, *args: Any, **kwargs: Any) -> Any:
    graph = capture(model, args, kwargs)
    devices = ", ".join(f"cpu#{at}-1GB" for at in range(num_devices))
    return build_placed_model(model, graph, random_plan(graph, num_devices, 1), parse_cluster(devices))


@pytest.mark.parametrize(
    ("num_devices", "autocast"),
    [
        (1, False),
        (2, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
    ],
)
def test_causal_attention_without_a_mask_stays_without_one(num_devices: int, autocast: bool) -> None:
    ids = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    wanted = gradients(llama(), autocast, input_ids=ids, labels=ids)
    model = placed(llama(), num_devices, input_ids=ids, labels=ids)
    found = gradients(model, autocast, input_ids=ids, labels=ids)
    assert torch.equal(wanted[0], found[0])
    assert [name for name in wanted[1] if not torch.equal(wanted[1][name], found[1][name])] == []
    assert "graph engine" in model.explain()


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("remainder", marks=pytest.mark.slow),
        "in place",
        pytest.param("joined", marks=pytest.mark.slow),
        "looked at",
    ],
)
def test_sequences_that_are_packed_into_one_do_not_see_each_other(way: str) -> None:
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    wanted, whole = gradients(Packs(way), False, ids), gradients(Packs("counted"), False, ids)
    found = gradients(placed(Packs(way), 2, ids), False, ids)
    assert torch.allclose(wanted[0], found[0], rtol=1e-6)
    assert all(torch.allclose(wanted[1][name], found[1][name], atol=1e-7) for name in wanted[1])
    assert torch.allclose(wanted[0], whole[0], rtol=1e-6) == (way == "looked at"), "the packing counts"


@pytest.mark.parametrize("kind", ["positions", "mask"])
@pytest.mark.slow
def test_positions_and_masks_that_are_given_are_kept(kind: str) -> None:
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    plain = {"position_ids": torch.arange(16).expand(2, -1), "attention_mask": torch.ones(2, 16).long()}
    given = {
        "positions": {"position_ids": (torch.arange(16) % 8).expand(2, -1)},
        "mask": {"attention_mask": torch.tensor([[0] * 5 + [1] * 11, [1] * 16])},
    }[kind]
    model = placed(llama(), 2, input_ids=ids, labels=ids, **{name: plain[name] for name in given})
    wanted = gradients(llama(), False, input_ids=ids, labels=ids, **given)
    found = gradients(model, False, input_ids=ids, labels=ids, **given)
    assert torch.allclose(wanted[0], found[0], rtol=1e-6)
    assert all(torch.allclose(wanted[1][name], found[1][name], atol=1e-7) for name in wanted[1])


@pytest.mark.slow
def test_a_model_that_gives_its_cache_has_graphs_for_any_size_and_for_full_masks_of_their_own() -> None:
    wanted, model = (llama(num_hidden_layers=1, use_cache=True) for _ in range(2))
    full = {name: torch.ones(2, 16).long() for name in ("input_ids", "labels", "attention_mask")}
    model = placed(model, 2, **full)
    for rows, length, masked in ((2, 16, 0), (4, 24, 0), (4, 24, 3), (3, 31, 0)):
        ids = torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(length))
        mask = (torch.arange(length) >= masked).long().repeat(rows, 1)
        call = {"input_ids": ids, "labels": ids, "attention_mask": mask}
        one, other = wanted(**call), model(**call)
        assert torch.equal(one.logits, other.logits)
        assert other.past_key_values.get_seq_length() == length
        for here, there in zip(one.past_key_values.layers, other.past_key_values.layers, strict=True):
            assert torch.equal(here.keys, there.keys)
            assert torch.equal(here.values, there.values)
    assert "graph engine" in model.explain()
    assert (
        "a graph for any batch and sequence was made when a batch of 4 and a sequence of 24 came"
        in model.notes
    )


@pytest.mark.slow
def test_a_forward_whose_arguments_have_changed_places_still_has_graphs_for_full_masks(
    monkeypatch: Any,
) -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama(num_hidden_layers=1)

        def forward(self, ids: Any, mask: Any) -> Any:
            return self.inner(input_ids=ids, attention_mask=mask).logits

    def turned(self: Any, mask: Any, ids: Any) -> Any:
        return self.inner(input_ids=ids, attention_mask=mask).logits

    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    padded = torch.tensor([[0] * 5 + [1] * 11, [1] * 16])
    plain, model = Outer(), placed(Outer(), 2, ids, torch.ones_like(ids))
    assert torch.equal(plain(ids, torch.ones_like(ids)), model(ids, torch.ones_like(ids)))
    monkeypatch.setattr(Outer, "forward", turned)
    for mask in (torch.ones_like(ids), padded):
        assert torch.allclose(plain(mask, ids), model(mask, ids), rtol=1e-6)


def test_what_is_counted_off_is_known_until_something_is_written() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), PositionTracker() as positions:
        counted = (torch.arange(2, 7) + 1)[None].expand(3, -1)[:, 1:].long()
        value = positions.value_of(counted)
        assert value is not None
        assert is_one_sequence(value)
        assert positions.value_of(counted * 2) is None
        assert positions.value_of(torch.zeros(3).long() + counted[0, 0]) is None
        other = torch.arange(4)
        other[2:] = 0
        assert positions.value_of(other) is None
        assert positions.value_of(counted) is None
    assert value.tolist() == [[4, 5, 6, 7]] * 3
    assert not is_one_sequence(torch.tensor([[0, 1, 0, 1]]))
    assert is_one_sequence(torch.tensor([[5]]))


def test_numbers_that_are_written_by_whatever_way_are_not_known() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def replaced(tensor: Any) -> None:
        tensor.data = tensor.data % 4

    writes = [
        torch.nn.ReLU(inplace=True),
        lambda tensor: torch.nn.functional.hardtanh(tensor, 0, 3, inplace=True),
        lambda tensor: torch.ops.aten.remainder_.Scalar(tensor, 4),
        lambda tensor: torch.ops.aten.remainder_(tensor, 4),
        lambda tensor: torch.remainder(tensor, 4, out=tensor),
        lambda tensor: tensor.view(2, 4).sub_(4),
        replaced,
    ]
    with FakeTensorMode(), PositionTracker() as positions:
        for write in writes:
            counted = torch.arange(8) - 4
            assert positions.value_of(counted) is not None
            write(counted)
            assert positions.value_of(counted) is None, write
