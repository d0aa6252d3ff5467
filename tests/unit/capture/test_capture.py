"""What a captured graph says, against PyTorch itself and against hand counts."""

import collections
import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra [torch]")
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from loadmaster.core.graph import NO_GROUP, NO_MIRROR, Graph, Phase, home_bytes  # noqa: E402
from loadmaster.graph.capture import capture  # noqa: E402
from tests.allocations import plain_loss  # noqa: E402
from tests.torch_models import NAMES, example, hf_tiny  # noqa: E402
from tests.unit.capture.test_memory import captured  # noqa: E402


def ops_of(graph: Graph, phase: Phase) -> list[int]:
    return np.flatnonzero(graph.phase == phase).tolist()


def reads(graph: Graph, op: str | int) -> set[str]:
    """Names of the ops whose tensors an op reads."""
    index = graph.op_name.index(op) if isinstance(op, str) else op
    return {graph.op_name[graph.tensor_op[t]] for t in graph.use_tensor[graph.use_op == index]}


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


INPUT = (torch.ones(3, 8),)


@pytest.mark.parametrize("name", NAMES)
def test_every_trained_weight_has_one_update_on_its_device(name: str) -> None:
    graph, model = captured(name, None), example(name).model
    updates = collections.Counter(graph.op_name[op] for op in ops_of(graph, Phase.UPDATE))
    assert max(updates.values()) == 1
    for weight, op in ((w, graph.op_name.index(w)) for w, _ in model.named_parameters()):
        if f"{weight}.update" in updates:
            update = graph.op_name.index(f"{weight}.update")
            assert graph.group[update] == graph.group[op] != NO_GROUP
            assert weight in reads(graph, update)
    if name != "branching":  # one of its ways is not taken
        assert len(updates) == len(list(model.parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_resident_to_the_byte(name: str) -> None:
    graph, model = captured(name, None), example(name).model
    own = {w: tensor.numel() * tensor.element_size() for w, tensor in model.named_parameters()}
    found = {graph.op_name[op]: op for op in ops_of(graph, Phase.PARAM) if graph.op_kind[op] == "param"}
    assert set(found) == set(own)
    for weight, op in found.items():
        assert graph.tensor_bytes[graph.tensor_op == op][0] == own[weight]
        trained = f"{weight}.update" in graph.op_name
        assert graph.resident_bytes[op] == own[weight] + trained * (
            2 * own[weight] + 4
        )  # two moments, a count


@pytest.mark.parametrize("name", NAMES)
def test_backward_ops_sit_with_their_forward_op_and_run_in_reverse(name: str) -> None:
    graph = captured(name, None)
    every = np.array(ops_of(graph, Phase.BACKWARD))
    back = every[graph.mirror[every] != NO_MIRROR]
    assert len(back) >= 0.92 * len(every)
    for op in every[graph.mirror[every] == NO_MIRROR]:  # a sum of a tied weight's gradients
        together = np.flatnonzero(graph.group == graph.group[op])
        assert graph.op_kind[op] == "add"
        assert (graph.phase[together] == Phase.PARAM).sum() == 1
    mirror = graph.mirror[back]
    assert (graph.phase[mirror] == Phase.FORWARD).all()
    assert (graph.group[back] == graph.group[mirror]).all()
    sums = np.array(
        [graph.op_kind[op] == "add" for op in back]
    )  # stand where the last of their parts is made
    assert (np.diff(mirror[~sums]) <= 0).all()
    assert (np.diff(graph.phase[[*ops_of(graph, Phase.FORWARD), *every]]) >= 0).all()


def test_a_sum_of_gradients_sits_with_the_maker_of_the_tensor_whose_gradient_it_is() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Any) -> Any:
            y = self.first(x).tanh()
            return self.left(y).exp() + self.right(y).sin()

    graph = capture(Fork(), (torch.randn(4, 8),))
    (add,) = [op for op in ops_of(graph, Phase.BACKWARD) if graph.op_kind[op] == "add"]
    assert graph.op_name[graph.mirror[add]] == "tanh"
    assert graph.group[add] == graph.group[graph.op_name.index("tanh")]
    makers = {
        graph.op_kind[graph.tensor_op[t]]
        for t, op in zip(graph.use_tensor, graph.use_op, strict=True)
        if op == add
    }
    assert makers == {"mm"}


def test_the_sum_of_a_tied_weights_gradients_sits_with_the_weight() -> None:
    graph = captured("gpt2", None)
    add = graph.op_name.index("transformer.wte.weight.backward")
    assert graph.op_kind[add] == "add"
    assert graph.group[add] == graph.group[graph.op_name.index("transformer.wte.weight")]
    assert graph.group[add] != graph.group[graph.op_name.index("embedding")]


def test_a_weight_is_held_to_the_end_of_the_formula_that_reads_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    graph = capture(model, (torch.randn(4, 8),))
    last = max(
        (name for name in graph.op_name if name.startswith("linear_1.backward")), key=graph.op_name.index
    )
    assert last == "linear_1.backward.3", "the gradient of the bias, which needs no weight"
    assert "2.weight" in reads(graph, last)


def test_seven_of_nine_are_captured_from_the_exported_graph() -> None:
    how = {name: captured(name, None).capture.split(";")[0] for name in NAMES}
    assert sorted(how.values()) == ["joint"] * 7 + ["traced"] * 2
    assert how["branching"] == how["mixtral"] == "traced"


def test_a_tied_weight_is_one_op_that_both_ends_read() -> None:
    graph = captured("gpt2", None)
    assert "transformer.wte.weight" in graph.op_name
    assert "lm_head.weight" not in graph.op_name
    weight = graph.op_name.index("transformer.wte.weight")
    tensor = graph.tensor_op == weight
    readers = {graph.op_kind[op] for op in graph.use_op[np.isin(graph.use_tensor, np.flatnonzero(tensor))]}
    assert {"embedding", "linear", "update"} <= readers


def test_what_is_saved_is_read_by_the_backward_op_of_the_op_that_saved_it() -> None:
    graph = capture(mlp(), INPUT)
    assert reads(graph, "linear_1.backward") == {"loss.mean.backward.2", "2.weight"}  # gradient of its input
    assert reads(graph, "linear_1.backward.2") == {"loss.mean.backward.2", "relu"}  # gradient of its weight
    assert reads(graph, "relu.backward") == {"linear_1.backward", "relu"}
    assert reads(graph, "linear.backward") == {"relu.backward", "input"}
    assert reads(graph, "0.weight.update") == {"linear.backward", "0.weight"}


def test_what_is_not_saved_dies_in_the_forward_pass() -> None:
    graph = capture(mlp(), INPUT)
    made = np.flatnonzero(graph.tensor_op == graph.op_name.index("linear"))
    last = graph.use_op[np.isin(graph.use_tensor, made)].max()
    assert graph.op_name[last] == "relu"  # which keeps its own output


def test_views_take_no_memory_and_name_their_base() -> None:
    graph = captured("gpt2", None)
    kinds = {"view", "transpose", "unsqueeze", "permute", "getitem", "slice"}
    views = [op for op in ops_of(graph, Phase.FORWARD) if graph.op_kind[op] in kinds]
    assert len(views) > 10
    assert home_bytes(graph)[np.isin(graph.tensor_op, views)].sum() == 0
    assert graph.bytes_moved[views].sum() == 0


def test_an_op_in_place_comes_before_all_that_reads_the_memory_afterwards() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            y = self.linear(x)
            other = y.view(-1)
            y += 1.0
            return other.sum()

    graph = capture(InPlace(), (torch.ones(2, 4),))
    assert "add_" in reads(graph, "sum_1")
    adds, base = graph.op_name.index("add_"), graph.op_name.index("linear")
    assert graph.group[adds] == graph.group[base] != NO_GROUP
    assert home_bytes(graph)[graph.tensor_op == adds].sum() == 0


def test_batch_norm_keeps_its_statistics_as_buffers_and_writes_them_in_place() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    graph = capture(model, (torch.ones(2, 3, 8, 8),))
    norm, mean = graph.op_name.index("batch_norm"), graph.op_name.index("1.running_mean")
    assert (graph.phase[mean], graph.resident_bytes[mean]) == (Phase.PARAM, 16)
    assert graph.group[norm] == graph.group[mean]
    assert "1.running_mean.update" not in graph.op_name


class Oddly(torch.optim.Optimizer):
    """Keeps one value per row of every weight, and none for vectors."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight.dim() == 2:
                    rows = self.state[weight].setdefault("rows", torch.zeros(weight.shape[0]))
                    rows += weight.grad.sum(1)
                    weight.sub_(weight.grad)


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [
        (torch.optim.AdamW, 2 * 512 + 4),
        ("sgd", 0),
        ("momentum", 512),
        (lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.5), 512),
        (Oddly, 16 * 4),
    ],
)
def test_resident_state_is_the_optimizers_own(optimizer: Any, state_bytes: int) -> None:
    graph = capture(mlp(), INPUT, optimizer=optimizer)
    weight = graph.op_name.index("0.weight")  # 16 x 8 floats
    assert graph.resident_bytes[weight] == 512 + state_bytes


def test_an_optimizer_that_exists_keeps_its_groups() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    groups = [
        {"params": list(model[0].parameters()), "momentum": 0.9},
        {"params": list(model[2].parameters())},
    ]
    graph = capture(model, INPUT, optimizer=torch.optim.SGD(groups, lr=0.1))
    held = {name: graph.resident_bytes[graph.op_name.index(name)] for name in ("0.weight", "2.weight")}
    assert held == {"0.weight": 2 * 512, "2.weight": 256}


class Heavy(torch.optim.SGD):
    """Wants an argument that only its owner knows."""

    def __init__(self, weights: Any, mass: float) -> None:
        super().__init__(weights, lr=0.1, momentum=mass)


def test_an_optimizer_that_has_a_schedule_is_measured_on_a_copy() -> None:
    model = mlp()
    optimizer = Heavy(model.parameters(), 0.9)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # it wraps optimizer.step
    graph = capture(model, INPUT, optimizer=optimizer)
    assert graph.resident_bytes[graph.op_name.index("0.weight")] == 2 * 512


def test_without_optimizer_gradients_stay_and_nothing_is_updated() -> None:
    graph = capture(mlp(), INPUT, optimizer=None)
    assert ops_of(graph, Phase.UPDATE) == []
    assert graph.keep[graph.tensor_op == graph.op_name.index("linear.backward")].all()


def test_inference_has_neither_backward_nor_updates_and_drops_nothing_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 2))
    graph = capture(model, INPUT, train=False)
    assert set(graph.phase.tolist()) == {Phase.PARAM, Phase.FORWARD}
    assert graph.resident_bytes.sum() == sum(4 * weight.numel() for weight in model.parameters())
    assert model.training


def test_a_frozen_weight_has_no_update_and_no_state() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    graph = capture(model, INPUT)
    assert "0.weight.update" not in graph.op_name
    assert graph.resident_bytes[graph.op_name.index("0.weight")] == 512


def test_several_outputs_and_named_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, x: Any, *, y: Any) -> Any:
            return {"first": self.a(x), "second": [self.b(x + y)]}

    inputs = torch.ones(2, 4)
    graph = capture(Two(), (inputs,), {"y": inputs.clone()}, loss=lambda out: out["second"][0].sum())
    assert "a.weight.update" not in graph.op_name  # the loss does not depend on it
    assert "b.weight.update" in graph.op_name
    kept = {graph.op_name[op] for op in graph.tensor_op[graph.keep]}
    assert {"linear", "linear_1", "x", "y"} <= kept


@pytest.mark.parametrize("path", ["joint", "traced", "estimated"])
def test_weights_on_meta_give_the_same_graph_as_real_ones(path: str) -> None:
    e = example("bert")
    real = capture(e.model, e.args, e.kwargs, path=path)
    nowhere = hf_tiny("bert", "meta")
    assert nowhere.model.get_input_embeddings().weight.is_meta
    assert capture(nowhere.model, nowhere.args, nowhere.kwargs, path=path).digest == real.digest


def test_the_model_is_left_as_it_was() -> None:
    e = example("resnet")
    before = {name: tensor.clone() for name, tensor in e.model.state_dict().items()}
    rng = torch.get_rng_state()
    for path in ("joint", "traced", "estimated"):
        capture(e.model, e.args, path=path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in e.model.state_dict().items())
    assert all(weight.grad is None for weight in e.model.parameters())
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_branch_on_values_follows_a_real_run_of_the_example() -> None:
    e = example("branching")
    with torch.no_grad():
        e.model.first.weight.zero_()
        e.model.first.bias.fill_(1.0)
        taken = capture(e.model, e.args)
        e.model.first.bias.fill_(-1.0)
        other = capture(e.model, e.args)
    assert "relu" in taken.op_kind
    assert "tanh" in other.op_kind
    assert taken.capture.startswith(
        "traced; 100.0 % of backward attributed; 1 value read in a real run; not exported: "
    )


@pytest.mark.parametrize(("assume", "kind"), [(1.0, "relu"), (0.0, "tanh")])
def test_a_branch_on_values_that_are_not_there_is_assumed_and_counted(assume: float, kind: str) -> None:
    with torch.device("meta"):
        e = example("branching")
    graph = capture(e.model, (torch.empty(64, 16, device="meta"),), assume=assume)
    assert kind in graph.op_kind
    assert "; 1 branch assumed; not exported: " in graph.capture


def test_the_targets_kernels_are_those_of_the_target() -> None:
    e = example("gpt2")
    graph = capture(e.model, e.args, e.kwargs, target="cuda")
    assert "native_dropout_backward" in graph.op_kind
    assert "_scaled_dot_product_efficient_attention_backward" in graph.op_kind
    half = capture(copy.deepcopy(e.model).bfloat16(), e.args, e.kwargs, target="cuda")
    assert "_scaled_dot_product_flash_attention_backward" in half.op_kind


def test_module_paths_and_signatures_say_where_and_what() -> None:
    graph = captured("gpt2", None)
    op = next(i for i, m in enumerate(graph.module) if m == "transformer.h.1.mlp.c_fc" and graph.flops[i])
    row = graph.signature_table[graph.signature[op]]
    assert row.startswith("aten.addmm.default float32[128] float32[48,32] float32[32,128]")
    back = graph.mirror == op
    assert {graph.module[i] for i in np.flatnonzero(back)} == {"transformer.h.1.mlp.c_fc"}


def test_the_same_model_gives_the_same_graph() -> None:
    e = example("t5")
    one, two = (capture(e.model, e.args, e.kwargs).digest for _ in range(2))
    assert one == two


def test_inputs_may_come_in_any_order_and_be_no_tensors() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Any, scale: int, mask: Any = None, extra: Any = None) -> Any:
            y = self.linear(x) * scale
            return y + extra[0] * extra[1] if mask is None else y * mask

    pair = [torch.ones(2), torch.ones(3, 2)]
    for path in ("joint", "traced", "estimated"):
        graph = capture(
            Mixed(), (), {"extra": pair, "mask": None, "scale": 3, "x": torch.ones(3, 4)}, path=path
        )
        assert {"x", "extra_0", "extra_1"} <= set(graph.op_name)
        assert "linear.weight.update" in graph.op_name


def test_autocast_computes_in_the_smaller_type_and_says_so() -> None:
    plain, mixed = (capture(mlp(), INPUT, autocast=dtype) for dtype in (None, torch.bfloat16))
    products = [op for op in ops_of(mixed, Phase.FORWARD) if mixed.flops[op]]
    assert len(products) == 2
    assert "autocast bfloat16" in mixed.capture
    assert mixed.flops.sum() == plain.flops.sum()
    made = [np.flatnonzero(graph.tensor_op == graph.op_name.index("relu"))[0] for graph in (plain, mixed)]
    assert plain.tensor_bytes[made[0]] == 2 * mixed.tensor_bytes[made[1]]


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow), "vit"])
def test_the_work_is_that_of_torchs_joint_graph(name: str) -> None:
    aot = pytest.importorskip(
        "torch._functorch.aot_autograd", reason="the witness is a private part of torch"
    )
    if not hasattr(aot, "aot_export_joint_with_descriptors"):
        pytest.skip("this version of PyTorch has no such graph")
    e = example(name)
    import contextlib

    with contextlib.ExitStack() as stack, sdpa_kernel(SDPBackend.MATH):
        graph = capture(e.model, e.args, e.kwargs, path="traced")
        program = torch.export.export(e.model, e.args, e.kwargs, strict=False).module()

        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = program

            def forward(self, *args: Any) -> Any:
                return (plain_loss(self.inner(**dict(zip(e.kwargs, args, strict=True)))),)

        joint = aot.aot_export_joint_with_descriptors(stack, Loss(), tuple(e.kwargs.values()))
    heavy = {"mm", "bmm", "addmm", "convolution", "convolution_backward", "native_layer_norm_backward"}
    heavy |= {"embedding_dense_backward", "_log_softmax_backward_data", "_softmax_backward_data"}
    wanted = collections.Counter(
        node.target.overloadpacket.__name__
        for node in joint.graph_module.graph.nodes
        if node.op == "call_function" and hasattr(node.target, "overloadpacket")
    )
    found = collections.Counter(graph.op_kind)
    assert {kind: found[kind] for kind in heavy} == {kind: wanted[kind] for kind in heavy}
    assert found["mm"] > 4


class Halving(nn.Module):
    """A loop that waits for a value, then rows chosen by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        while y.abs().max() > 1e-2:
            y = y * 0.5
        return y[x.sum(1) > 0]


def test_a_loop_on_values_and_a_mask_follow_the_real_run() -> None:
    torch.manual_seed(3)
    model, x = Halving(), torch.randn(6, 8)
    biggest, halvings = float(model.linear(x).detach().abs().max()), 0
    while biggest > 1e-2:
        biggest, halvings = biggest / 2, halvings + 1
    graph = capture(model, (x,))
    muls = [op for op in ops_of(graph, Phase.FORWARD) if graph.op_kind[op] == "mul"]
    assert len(muls) == halvings
    chosen = graph.tensor_bytes[np.flatnonzero(graph.tensor_op == graph.op_name.index("index"))[0]]
    assert chosen == 4 * 8 * int((x.sum(1) > 0).sum())


def test_a_loop_on_values_that_are_not_there_ends() -> None:
    with torch.device("meta"):
        graph = capture(Halving(), (torch.empty(6, 8),))
    assert " branches assumed; not exported: " in graph.capture
    muls = [op for op in ops_of(graph, Phase.FORWARD) if graph.op_kind[op] == "mul"]
    assert 1 < len(muls) < 100


def test_a_region_without_gradients_has_no_backward() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                y = torch.relu(self.below(x))
            return self.above(y)

    for path in ("joint", "traced", "estimated"):
        graph = capture(Half(), (torch.ones(2, 8),), path=path)
        assert "below.weight.update" not in graph.op_name
        assert "above.weight.update" in graph.op_name


@pytest.mark.parametrize(("path", "made_by"), [("joint", "linear"), ("traced", "addmm")])
def test_outputs_in_an_object_of_the_users_own_are_held(path: str, made_by: str) -> None:
    class Answer:
        def __init__(self, scores: Any) -> None:
            self.scores, self.loss = scores, scores.sum()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            return Answer(self.linear(x))

    assert capture(Wrapped(), (torch.ones(2, 8),)).capture.startswith("joint")
    graph = capture(Wrapped(), (torch.ones(2, 8),), path=path)
    assert graph.keep[graph.tensor_op == graph.op_name.index(made_by)].any()
