"""Building on nothing: a model made on 'meta' comes to life weight by weight, each on its planned device."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.core.errors import DeviceMemoryError, FileError, FormatError, InputError  # noqa: E402
from loadmaster.core.plan import plan_of  # noqa: E402
from loadmaster.modules.checkpoint import Checkpoint  # noqa: E402
from loadmaster.runtime.placed import Placed, build_placed_model  # noqa: E402
from tests.allocations import StorageCounter  # noqa: E402
from tests.placing import devices  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, NUM_LAYERS = 64, 8


def net() -> nn.Module:
    """Layers of several kinds, in the order in which they are built; one weight has two names."""
    layers: list[nn.Module] = [nn.Embedding(32, WIDTH)]
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)]
    head = nn.Linear(WIDTH, 32)
    head.weight = layers[0].weight
    return nn.Sequential(*layers, head)


TOKENS = torch.arange(16) % 32


def on_meta(build: Callable[[], nn.Module] = net) -> nn.Module:
    with torch.device("meta"):
        return build()


def halves(model: nn.Module, **asked: Any) -> Placed:
    """Half of the ops on each of two devices."""
    graph = lm.capture(model, (TOKENS,), loss=torch.sum)
    where = (np.arange(graph.num_ops) >= graph.num_ops // 3).astype(np.int32)
    memory = asked.pop("memory", "64MB")
    return build_placed_model(model, graph, plan_of(where), devices(2, memory), **asked)


def test_values_are_those_of_the_model_built_plainly_under_the_same_seed() -> None:
    torch.manual_seed(5)
    plain = net()
    model = on_meta()
    weights = dict(model.named_parameters())
    torch.manual_seed(5)
    placed = halves(model)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(placed.state_dict()[name], tensor), name
    assert all(weights[name] is weight for name, weight in placed.named_parameters()), "same objects"
    assert placed[-1].weight is placed[0].weight, "tied as before"
    placed(TOKENS).sum().backward()
    assert all(weight.grad is not None for weight in placed.parameters())


def test_every_weight_is_made_once_and_nothing_else() -> None:
    whole = sum(tensor.nbytes for tensor in {id(t): t for t in net().state_dict().values()}.values())
    model = on_meta()
    graph = lm.capture(model, (TOKENS,), loss=torch.sum)
    where = np.zeros(graph.num_ops, dtype=np.int32)
    with StorageCounter() as counter:
        build_placed_model(model, graph, plan_of(where), devices(2))
    assert counter.peak_bytes <= 1.05 * whole


def test_a_device_holds_its_own_weights_only() -> None:
    placed = halves(on_meta())
    homes = placed._engine.homes
    names = dict(placed.named_parameters()) | dict(placed.named_buffers())
    for at, peak in enumerate(placed.peak_bytes.values()):
        assert 0 < peak == sum(names[name].nbytes for name, home in homes.items() if home == at)


def test_a_device_that_is_too_small_stops_before_the_rest_is_made() -> None:
    with pytest.raises(DeviceMemoryError, match="weight"):
        halves(on_meta(), memory="40KB")


def saved(model: nn.Module, folder: Path, shards: int) -> Path:
    """A checkpoint written by hand: the format is a header and bytes."""
    names, index = list(model.state_dict()), {}
    for shard in range(shards):
        some = names[shard::shards]
        file = folder / f"model-{shard}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        data = b""
        for name in some:
            tensor = model.state_dict()[name]
            raw = tensor.contiguous().numpy().tobytes()
            dtype = {torch.float32: "F32", torch.int64: "I64"}[tensor.dtype]
            header[name] = {
                "dtype": dtype,
                "shape": list(tensor.shape),
                "data_offsets": [len(data), len(data) + len(raw)],
            }
            data += raw
            index[name] = file.name
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        return folder
    return file


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("meta", [True, False])
def test_values_come_from_a_checkpoint(tmp_path: Path, shards: int, meta: bool) -> None:
    torch.manual_seed(8)
    wanted = net()
    source = saved(wanted, tmp_path, shards)
    placed = halves(on_meta() if meta else net(), weights=Checkpoint(source))
    assert all(torch.equal(placed.state_dict()[name], tensor) for name, tensor in wanted.state_dict().items())


def test_the_library_writes_what_is_read_here(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="the witness reads files with safetensors")
    tensors = {"a": torch.randn(3, 4, dtype=torch.bfloat16), "b": torch.arange(5), "c": torch.zeros(0, 2)}
    library.save_file(tensors, tmp_path / "x.safetensors")
    read = Checkpoint(tmp_path / "x.safetensors")
    assert read.names == set(tensors)
    assert all(torch.equal(read.read(name), tensor) for name, tensor in tensors.items())


def test_a_transformers_model_is_initialised_by_its_own_rule() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra [hf]")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    config.use_cache = False
    model = on_meta(lambda: transformers.GPT2LMHeadModel(config))
    graph = lm.capture(model, (), {"input_ids": TOKENS[None], "labels": TOKENS[None]})
    placed = build_placed_model(model, graph, plan_of(np.zeros(graph.num_ops, dtype=np.int32)), devices(1))
    weight = placed.transformer.h[0].mlp.c_fc.weight
    assert weight.std().item() == pytest.approx(config.initializer_range, rel=0.1)
    assert torch.equal(placed.transformer.ln_f.weight, torch.ones(32))
    assert placed(input_ids=TOKENS[None], labels=TOKENS[None]).loss.isfinite()


def test_a_weight_that_nobody_gives_values_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            return x * self.scale

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), Bare())

    model = on_meta(build)
    graph = lm.capture(model, (torch.randn(3, 4),), loss=torch.sum)
    where = plan_of(np.zeros(graph.num_ops, dtype=np.int32))
    with pytest.raises(InputError, match=r"weight '1\.scale' is on 'meta', and Bare has no reset_parameters"):
        build_placed_model(model, graph, where, devices(1))


def test_what_has_values_already_keeps_them() -> None:
    class Resets(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.other = inner, nn.Linear(4, 4, device="meta")

        def reset_parameters(self) -> None:
            for layer in (self.inner, self.other):
                layer.reset_parameters()

        def forward(self, x: Any) -> Any:
            return self.other(self.inner(x))

    inner = nn.Linear(4, 4)
    before = inner.weight.detach().clone()
    model = Resets(inner)
    graph = lm.capture(model, (torch.randn(3, 4),), loss=torch.sum)
    build_placed_model(model, graph, plan_of(np.zeros(graph.num_ops, dtype=np.int32)), devices(1))
    assert torch.equal(inner.weight, before)
    assert not model.other.weight.is_meta


def test_wrong_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file or folder"):
        Checkpoint(tmp_path / "none")
    with pytest.raises(FileError, match=r"holds no \.safetensors file"):
        Checkpoint(tmp_path)
    bad = tmp_path / "bad.safetensors"
    for content in (
        b"",
        b"\xff" * 64,
        (5).to_bytes(8, "little") + b"[1,2]",
        (2).to_bytes(8, "little") + b"{",
    ):
        bad.write_bytes(content)
        with pytest.raises(FormatError, match="not a safetensors file"):
            Checkpoint(bad)
    text = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99]}}).encode()
    bad.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(FormatError, match="does not lie in bytes 0 to 99"):
        Checkpoint(bad)
    small = saved(nn.Linear(2, 2), tmp_path, 1)
    with pytest.raises(InputError, match="lacks weight"):
        halves(on_meta(), weights=Checkpoint(small))
    other = saved(nn.Sequential(nn.Linear(3, 3)), tmp_path, 1)
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4)))
    graph = lm.capture(model, (torch.randn(3, 4),), loss=torch.sum)
    with pytest.raises(InputError, match=r"is \[4, 4\] in the model, \[3, 3\] in"):
        build_placed_model(
            model,
            graph,
            plan_of(np.zeros(graph.num_ops, dtype=np.int32)),
            devices(1),
            weights=Checkpoint(other),
        )


def test_what_a_checkpoint_lacks_is_counted_only_beyond_the_first(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileError, match=r"lacks one\.safetensors, a shard of its index"):
        Checkpoint(tmp_path)
    index["weight_map"]["b"] = "two.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileError, match=r"lacks one\.safetensors and 1 more shards of its index"):
        Checkpoint(tmp_path)
    folder = tmp_path / "without_bias"
    folder.mkdir()
    weights = Checkpoint(saved(nn.Linear(4, 4, bias=False), folder, 1))
    model = on_meta(lambda: nn.Linear(4, 4))
    graph = lm.capture(model, (torch.randn(3, 4),), loss=torch.sum)
    with pytest.raises(InputError, match="lacks weight 'bias' of the model's 2"):
        build_placed_model(
            model, graph, plan_of(np.zeros(graph.num_ops, dtype=np.int32)), devices(1), weights=weights
        )
