"""Ops rebuilt as a step runs them: mixed precision, views beside them, backward ops after their forward."""

import pytest

torch = pytest.importorskip("torch", reason="measuring needs the extra [torch]")
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.core.graph import Phase  # noqa: E402
from loadmaster.cost.signature import Signature, parse_signature  # noqa: E402
from loadmaster.cost.timed.after_forward import CannotRebuild  # noqa: E402
from loadmaster.cost.timed.rebuild import autocast_context, rebuild_call  # noqa: E402

CPU = torch.device("cpu")
FLASH = (
    "aten._scaled_dot_product_flash_attention_backward.default {0} {0} {0} {0} {0} float32[2,4,8] None None"
    " 8 8 0.0 True uint64[2] uint64[] scale=0.5"
)


class Log(TorchDispatchMode):
    """What runs below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def signature(text: str) -> Signature:
    found = parse_signature(text)
    assert found is not None
    return found


def ops_of(text: str) -> list[str]:
    """What one call of a rebuilt op runs."""
    call = rebuild_call(signature(text), CPU, grad=False)
    with autocast_context(signature(text), CPU), Log() as log:
        call()
    return log.names


def test_the_last_words_say_how_an_op_ran() -> None:
    plain, cast = (signature(f"aten.relu.default float32[2]{end}") for end in ("", " @autocast=bfloat16"))
    assert (plain.autocast, plain.num_views) == ("", 0)
    assert (cast.autocast, cast.num_views) == ("bfloat16", 0)
    assert signature("aten.relu.default float32[2] @views=3").num_views == 3
    assert plain.args == cast.args
    assert parse_signature("aten.relu.default float32[2] @views=many") is None


def test_views_beside_an_op_are_made_with_it() -> None:
    assert ops_of("aten.relu.default float32[2] @views=2") == ["relu", "alias", "alias"]


def test_an_op_under_autocast_casts_what_it_is_given() -> None:
    names = ops_of("aten.linear.default float32[2,8] float32[4,8] @autocast=bfloat16")
    assert names.count("_to_copy") == 2
    assert "_to_copy" not in ops_of("aten.linear.default float32[2,8] float32[4,8]")


def test_an_unknown_dtype_of_autocast_is_refused() -> None:
    with pytest.raises(CannotRebuild, match="no dtype float99"):
        autocast_context(signature("aten.relu.default float32[2] @autocast=float99"), CPU)


def test_the_backward_of_attention_is_the_one_this_device_runs() -> None:
    names = ops_of(FLASH.format("float32[2,4,8,16]"))
    assert names == ["_scaled_dot_product_flash_attention_for_cpu_backward"]


def test_attention_that_this_device_writes_out_has_no_backward_of_its_own() -> None:
    dropped = FLASH.replace(" 0.0 True", " 0.5 True").format("float32[2,4,8,16]")
    with pytest.raises(CannotRebuild, match="no kernel like"):
        rebuild_call(signature(dropped), CPU, grad=False)


def test_the_backward_of_batch_norm_runs_after_its_forward() -> None:
    text = "aten.native_batch_norm_backward.default {0} {0} {1} {1} {1} {1} {1} True 1e-05 (True,True,True)"
    assert ops_of(text.format("float32[2,3,4,4]", "float32[3]")) == ["native_batch_norm_backward"]


def test_a_state_that_only_a_forward_makes_is_never_made_up() -> None:
    text = "aten._cudnn_rnn_backward.default float32[2,3] reserve=uint8[8]"
    with pytest.raises(CannotRebuild, match="not run on its own"):
        rebuild_call(signature(text), CPU, grad=False)
    text = "aten._flash_attention_backward.default {0} {0} {0} {0} {0} float32[2,4,8] int32[2] int32[2]"
    text = text.format("float32[2,4,8,16]") + " 8 8 0.0 True uint64[2] uint64[]"
    with pytest.raises(CannotRebuild, match="which only its forward makes"):
        rebuild_call(signature(text), CPU, grad=False)


def test_capture_counts_the_views_of_the_backward_pass_where_autograd_makes_them() -> None:
    model = nn.Linear(8, 4)
    graph = lm.capture(model, (torch.zeros(2, 3, 8),), optimizer=None)
    texts = [graph.signature_table[row] for row in graph.signature[graph.phase == Phase.BACKWARD]]
    counted = sum(signature(text).num_views for text in texts)
    given = torch.zeros(2, 3, 8)
    loss = model(given).mean()
    with Log() as log:
        loss.backward()
    real = [
        name for name in log.names if name in ("t", "view", "expand", "detach", "transpose", "_unsafe_view")
    ]
    assert counted == pytest.approx(len(real), abs=2)
    assert counted >= 3


def test_the_kernels_of_a_gpu_run_in_float32_what_its_autocast_does() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 4))
    for path in ("joint", "traced"):
        graphs = [
            lm.capture(model, (torch.zeros(2, 8),), target=target, autocast=torch.bfloat16, path=path)
            for target in ("cpu", "cuda")
        ]
        softmax = [
            next(t for t in graph.signature_table if "softmax" in t and "backward" not in t)
            for graph in graphs
        ]
        assert [text.split()[1] for text in softmax] == ["bfloat16[2,8]", "float32[2,8]"]


def test_a_gpu_keeps_the_statistics_of_batch_norm_in_float32() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    graph = lm.capture(model, (torch.zeros(2, 3, 8, 8),), target="cuda", autocast=torch.bfloat16)
    text = next(text for text in graph.signature_table if "native_batch_norm_backward" in text)
    assert text.split()[6:8] == ["float32[4]", "float32[4]"]
