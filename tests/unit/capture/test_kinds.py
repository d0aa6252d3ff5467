"""Kinds of models people bring: wrapped, sharded, quantised, with adapters, caches and checkpoints."""

import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra [torch]")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint, checkpoint_sequential  # noqa: E402

from loadmaster.core.errors import GraphError, InputError  # noqa: E402
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, Graph, Phase  # noqa: E402
from loadmaster.graph.capture import capture  # noqa: E402
from loadmaster.zoo.example import Example  # noqa: E402
from tests.allocations import counted_peak, profiled_peak  # noqa: E402
from tests.torch_models import example  # noqa: E402
from tests.unit.capture.test_memory import inference_peak, simulated_peak  # noqa: E402

INPUT = (torch.ones(4, 8),)


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    if not dist.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_model_in_ddp_is_refused_and_what_is_inside_is_not() -> None:
    wrapped = nn.parallel.DistributedDataParallel(net())
    with pytest.raises(GraphError, match=r"wrapped in DistributedDataParallel; capture model\.module"):
        capture(wrapped, INPUT)
    with pytest.raises(GraphError, match=r"wrapped in DistributedDataParallel at '1'"):
        capture(nn.Sequential(nn.Identity(), wrapped), INPUT)
    assert capture(wrapped.module, INPUT).digest == capture(net(), INPUT).digest


@pytest.mark.usefixtures("alone")
def test_a_model_in_either_fsdp_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(GraphError, match="wrapped in FSDPModule; capture the model before fully_shard"):
        capture(fully_shard(net(), mesh=mesh), INPUT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    with pytest.raises(GraphError, match="wrapped in FullyShardedDataParallel; capture the model before"):
        capture(old, INPUT)


@pytest.mark.usefixtures("alone")
def test_a_sharded_weight_is_refused_by_name() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    model, mesh = net(), init_device_mesh("cpu", (1,))
    model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.detach(), mesh, [Replicate()]))
    with pytest.raises(GraphError, match=r"weight '2\.weight' is a DTensor"):
        capture(model, INPUT)


@pytest.mark.filterwarnings("ignore")
def test_a_model_quantised_by_torch_is_refused_by_module() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this PyTorch cannot quantise")
    small = torch.ao.quantization.quantize_dynamic(net(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(GraphError, match=r"module '0' is quantised \(Linear\); capture the model before"):
        capture(small, INPUT, train=False)


def test_a_part_in_torchscript_is_refused_by_module() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = torch.jit.script(nn.Linear(8, 8))
    with pytest.raises(GraphError, match="module '0' is TorchScript"):
        capture(nn.Sequential(part, nn.ReLU()), INPUT)
    with pytest.raises(GraphError, match="the model is TorchScript"):
        capture(part, INPUT)


class Lora(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self, inner: Any, rank: int) -> None:
        super().__init__()
        self.base_layer = inner.requires_grad_(False)
        self.lora_a = nn.Linear(inner.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base_layer(x) + 2.0 * self.lora_b(self.lora_a(x))


def with_adapters() -> Any:
    model = nn.Sequential(*[layer for _ in range(3) for layer in (Lora(nn.Linear(64, 64), 2), nn.GELU())])
    return model


@pytest.mark.parametrize("path", [None, "traced", "estimated"])
def test_only_adapters_have_gradients_and_state(path: str | None) -> None:
    model, x = with_adapters(), torch.randn(32, 64)
    graph = capture(model, (x,), path=path)
    updates = {graph.op_name[op] for op in np.flatnonzero(graph.phase == Phase.UPDATE)}
    assert updates == {f"{name}.update" for name, w in model.named_parameters() if "lora" in name}
    frozen = graph.op_name.index("0.base_layer.weight")
    assert graph.resident_bytes[frozen] == 4 * 64 * 64
    assert simulated_peak(graph) == pytest.approx(counted_peak(Example(model, (x,))), rel=0.02)


def test_an_optimizer_on_the_adapters_alone_is_followed() -> None:
    model, x = with_adapters(), torch.randn(32, 64)
    for weight in model.parameters():
        weight.requires_grad_(True)
    own = [weight for name, weight in model.named_parameters() if "lora" in name]
    graph = capture(model, (x,), optimizer=torch.optim.AdamW(own))
    held = {
        name: graph.resident_bytes[graph.op_name.index(name)]
        for name in ("0.lora_a.weight", "0.base_layer.weight")
    }
    assert held == {"0.lora_a.weight": 3 * 4 * 2 * 64 + 4, "0.base_layer.weight": 4 * 64 * 64}


def cached(name: str) -> tuple[Any, Any, Any]:
    e = example(name)
    e.model.eval()
    with torch.no_grad():
        cache = e.model(input_ids=e.kwargs["input_ids"], use_cache=True).past_key_values
    return e, cache, {"input_ids": e.kwargs["input_ids"][:, :1], "past_key_values": cache, "use_cache": True}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_token_on_a_cache_is_captured_and_the_cache_is_not_touched(name: str) -> None:
    e, cache, inputs = cached(name)
    before = copy.deepcopy(cache)
    graph = capture(e.model, (), inputs, train=False)
    kept = [op for op in graph.op_name if op.startswith("past_key_values")]
    assert len(kept) == 4  # keys and values of two layers
    assert "cat" in graph.op_kind
    grown = [
        int(graph.tensor_bytes[t])
        for t in np.flatnonzero(graph.keep)
        if graph.op_kind[graph.tensor_op[t]] == "cat"
    ]
    each = before.layers[0].keys.nbytes
    assert grown == [each // 16 * 17] * 4
    assert cache.get_seq_length() == before.get_seq_length() == 16
    assert torch.equal(cache.layers[0].keys, before.layers[0].keys)
    assert type(cache.layers[0].keys) is torch.Tensor
    old = [tensor for layer in before.layers for tensor in (layer.keys, layer.values)]
    inputs["past_key_values"] = before
    real = inference_peak(e.model, Example(e.model, (), inputs), held=old)
    assert simulated_peak(graph) == pytest.approx(real, rel=0.02)


def test_a_first_run_that_fills_a_cache_holds_it() -> None:
    e, cache, _ = cached("gpt2")
    graph = capture(e.model, (), {"input_ids": e.kwargs["input_ids"], "use_cache": True}, train=False)
    without = capture(e.model, (), {"input_ids": e.kwargs["input_ids"], "use_cache": False}, train=False)
    kept = [
        int(one.tensor_bytes[one.keep & (one.tensor_storage == np.arange(one.num_tensors))].sum())
        for one in (graph, without)
    ]
    assert kept[0] - kept[1] >= 4 * cache.layers[0].keys.nbytes


def test_generate_is_refused_with_what_to_capture_instead() -> None:
    e = example("gpt2")
    with pytest.raises(
        InputError, match=r"generate\(\) runs the model once for every token.*past_key_values"
    ):
        capture(e.model.generate, (), {"input_ids": e.kwargs["input_ids"]})


class Deep(nn.Module):
    """Blocks that are computed again, one by one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        wide = [[nn.Linear(16, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 16)] for _ in range(4)]
        self.inlet = nn.Linear(16, 16)
        self.parts = nn.Sequential(*(nn.Sequential(*layers) for layers in wide))
        self.way = way

    def forward(self, x: Any) -> Any:
        x = self.inlet(x)
        if self.way == "sequential":
            return checkpoint_sequential(self.parts, 2, x, use_reentrant=False)
        for part in self.parts:
            x = part(x) if self.way == "plain" else checkpoint(part, x, use_reentrant=self.way == "reentrant")
        return x


@functools.cache
def captured_plainly() -> Graph:
    return capture(Deep("plain"), (torch.randn(256, 16),))


@pytest.mark.parametrize("path", [None, "estimated"])
@pytest.mark.parametrize("way", ["reentrant", "not", "sequential"])
def test_checkpointing_is_seen_as_computing_again(way: str, path: str | None) -> None:
    x = (torch.randn(256, 16),)
    plain, thrifty = captured_plainly(), capture(Deep(way), x, path=path)
    assert thrifty.capture.startswith(path or "traced")
    assert simulated_peak(thrifty) < 0.8 * simulated_peak(plain)
    near = 0.05 if path is None else 0.15
    assert simulated_peak(thrifty) == pytest.approx(counted_peak(Example(Deep(way), x)), rel=near)
    assert simulated_peak(thrifty) == pytest.approx(profiled_peak(Example(Deep(way), x)), rel=near)
    inlet = 3 * 2 * 256 * 16 * 16
    assert thrifty.flops.sum() >= (plain.flops.sum() - inlet) * 4 / 3 * 0.8
    again = [op for op in thrifty.op_name if ".recompute" in op]
    assert len(again) >= 4 * 3


@pytest.mark.parametrize("way", ["reentrant", "not"])
def test_what_runs_again_sits_with_the_op_it_repeats(way: str) -> None:
    graph = capture(Deep(way), (torch.randn(256, 16),))
    again = [at for at, op in enumerate(graph.op_name) if ".recompute" in op]
    for op in again:
        first = int(graph.mirror[op])
        assert first != NO_MIRROR
        assert graph.op_kind[op] == graph.op_kind[first]
        assert graph.module[op] == graph.module[first]
        assert graph.group[op] == graph.group[first] != NO_GROUP
    mirrored = graph.mirror[again]
    assert len(set(mirrored.tolist())) == len(again)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_checkpointing_of_transformers_is_seen(name: str, reentrant: bool) -> None:
    e = example(name)
    e.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    graph = capture(e.model, e.args, e.kwargs)
    assert graph.capture.startswith("traced; 100.0 %")
    assert any(".recompute" in op for op in graph.op_name)
    assert simulated_peak(graph) == pytest.approx(counted_peak(e), rel=0.05)
