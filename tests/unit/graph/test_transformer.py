"""The transformer's training step: published sizes, hand formulas, and the rules of a training graph."""

from collections import Counter

import numpy as np
import pytest

from loadmaster.core.arrays import Bools
from loadmaster.core.errors import GraphError, InputError
from loadmaster.core.graph import NO_GROUP, NO_MIRROR, Dtype, Graph, Phase, edges, held_bytes
from loadmaster.graph import transformer as module
from loadmaster.graph.build import GraphBuilder
from loadmaster.graph.repeat import repeat_layers
from loadmaster.graph.transformer import transformer, transformer_with_ops

GPT2_SMALL_PARAMETERS = 124_439_808
VIEWS = {"reshape", "slice", "transpose"}
LAYERS, WIDTH, HEADS, SEQ, BATCH, VOCAB = 12, 768, 12, 1024, 8, 50257


@pytest.fixture(scope="module")
def gpt2() -> Graph:
    return transformer()


def _small(num_layers: int, dtype: Dtype = Dtype.FLOAT32) -> Graph:
    return transformer(num_layers=num_layers, width=64, num_heads=4, seq=16, batch=2, vocab=101, dtype=dtype)


def _named(graph: Graph, name: str) -> int:
    return graph.op_name.index(name)


def _inputs(graph: Graph, name: str) -> set[str]:
    tensors = graph.use_tensor[graph.use_op == _named(graph, name)]
    return {graph.op_name[op] for op in graph.tensor_op[tensors]}


def _users(graph: Graph, name: str) -> set[str]:
    made = graph.tensor_op[graph.use_tensor] == _named(graph, name)
    return {graph.op_name[op] for op in graph.use_op[made]}


def _tensors(graph: Graph, op: int) -> list[int]:
    return [int(tensor) for tensor in np.flatnonzero(graph.tensor_op == op)]


def _of_kind(graph: Graph, *kinds: str) -> Bools:
    return np.isin(np.array(graph.op_kind), kinds)


def test_defaults_have_the_parameters_of_gpt2_small(gpt2: Graph) -> None:
    weight = gpt2.phase[gpt2.tensor_op] == Phase.PARAM
    assert gpt2.tensor_bytes[weight].sum() == 4 * GPT2_SMALL_PARAMETERS
    assert held_bytes(gpt2)[gpt2.phase == Phase.PARAM].sum() == 4 * GPT2_SMALL_PARAMETERS


def test_gpt2_small_is_about_1500_ops_and_what_1500_ops_give(gpt2: Graph) -> None:
    assert 1300 <= gpt2.num_ops <= 1700
    assert transformer_with_ops(1500).digest == gpt2.digest


def test_forward_matmul_flops_are_the_hand_formula(gpt2: Graph) -> None:
    rows = BATCH * SEQ
    # per layer: qkv 3w^2, projection w^2, mlp 8w^2 a row; attention twice seq x width a row; then the head
    layer = 2 * rows * 12 * WIDTH**2 + 2 * 2 * rows * SEQ * WIDTH
    head = 2 * rows * WIDTH * VOCAB
    matmul = _of_kind(gpt2, "matmul", "matmul_t")
    assert matmul.sum() == 6 * LAYERS + 1
    assert gpt2.flops[matmul].sum() == LAYERS * layer + head


def test_backward_of_the_matmuls_is_twice_the_forward(gpt2: Graph) -> None:
    forward = gpt2.flops[_of_kind(gpt2, "matmul", "matmul_t")].sum()
    backward = gpt2.flops[_of_kind(gpt2, "matmul_backward", "matmul_t_backward")].sum()
    assert backward == 2 * forward
    # a training step is about 6 flops per parameter and token, plus attention
    assert gpt2.flops.sum() > 6 * GPT2_SMALL_PARAMETERS * BATCH * SEQ


def test_matmul_moves_its_operands_and_its_result(gpt2: Graph) -> None:
    op = _named(gpt2, "h.3.attn.c_attn.matmul")
    rows = BATCH * SEQ
    assert gpt2.bytes_moved[op] == 4 * (rows * WIDTH + WIDTH * 3 * WIDTH + rows * 3 * WIDTH)
    assert gpt2.signature_table[gpt2.signature[op]] == "matmul float32[8192,768] float32[768,2304]"
    assert gpt2.module[op] == "h.3.attn.c_attn"


def test_every_parameter_has_exactly_one_update_in_its_group(gpt2: Graph) -> None:
    params = np.flatnonzero(gpt2.phase == Phase.PARAM)
    updates = np.flatnonzero(gpt2.phase == Phase.UPDATE)
    assert sorted(gpt2.group[params]) == sorted(gpt2.group[updates])
    assert len(set(gpt2.group[params].tolist())) == len(params)
    update_of = {gpt2.group[op]: op for op in updates}
    for param in params:
        name, update = gpt2.op_name[param], update_of[gpt2.group[param]]
        assert gpt2.op_name[update] == f"{name}.update"
        assert name in _inputs(gpt2, f"{name}.update")
        assert len(_inputs(gpt2, f"{name}.update")) == 2  # the weight and one gradient
        weight = gpt2.tensor_bytes[gpt2.tensor_op == param].tolist()
        read = gpt2.tensor_bytes[gpt2.use_tensor[gpt2.use_op == update]].tolist()
        assert read == weight * 2
        assert gpt2.flops[update] == 12 * weight[0] / 4


def test_parameter_says_its_shape_and_is_not_grouped_with_its_consumers(gpt2: Graph) -> None:
    op = _named(gpt2, "h.11.mlp.c_fc.weight")
    assert gpt2.signature_table[gpt2.signature[op]] == "param float32[768,3072]"
    assert gpt2.flops[op] == 0
    assert gpt2.resident_bytes[op] == 4 * WIDTH * 4 * WIDTH
    phases = gpt2.phase[gpt2.group == gpt2.group[op]].tolist()
    assert phases == [Phase.PARAM, Phase.UPDATE]


def test_every_forward_op_but_inputs_has_one_backward_op_in_its_group(gpt2: Graph) -> None:
    forward = np.flatnonzero((gpt2.phase == Phase.FORWARD) & ~_of_kind(gpt2, "input"))
    backward = np.flatnonzero(gpt2.mirror != NO_MIRROR)
    assert Counter(gpt2.mirror[backward].tolist()) == Counter(forward.tolist())
    assert gpt2.group[backward].tolist() == gpt2.group[gpt2.mirror[backward]].tolist()
    assert len(set(gpt2.group[forward].tolist())) == len(forward)
    assert gpt2.group[_of_kind(gpt2, "input")].tolist() == [NO_GROUP] * 4


def test_backward_ops_stand_in_reverse_forward_order(gpt2: Graph) -> None:
    mirror = gpt2.mirror[gpt2.mirror != NO_MIRROR]
    assert (np.diff(mirror) < 0).all()


def test_tied_weight_serves_embedding_and_head_with_one_gradient_sum(gpt2: Graph) -> None:
    used = {"wte.embedding", "lm_head.matmul", "lm_head.matmul.backward", "wte.weight.update"}
    assert _users(gpt2, "wte.weight") == used
    assert _inputs(gpt2, "wte.weight.grad_sum") == {"lm_head.matmul.backward", "wte.embedding.backward"}
    assert _inputs(gpt2, "wte.weight.update") == {"wte.weight.grad_sum", "wte.weight"}
    assert _of_kind(gpt2, "grad_sum").sum() == 1
    assert gpt2.group[_named(gpt2, "wte.weight.grad_sum")] == gpt2.group[_named(gpt2, "wte.weight")]


def test_views_take_no_time_and_no_memory(gpt2: Graph) -> None:
    views = np.flatnonzero(_of_kind(gpt2, *VIEWS))
    made = np.isin(gpt2.tensor_op, views)
    assert made.sum() == len(views) == (8 + 12 + 6) * LAYERS + 1  # linears, heads, attention; head
    assert (gpt2.tensor_storage[made] != np.flatnonzero(made)).all()
    assert not gpt2.flops[views].any()
    assert not gpt2.bytes_moved[views].any()
    base = gpt2.tensor_op[gpt2.tensor_storage[gpt2.tensor_op == _named(gpt2, "h.5.attn.k.turned")]]
    assert [gpt2.op_name[op] for op in base] == ["h.5.attn.c_attn.add_bias"]


def test_gradient_passes_through_views_and_additions_without_memory(gpt2: Graph) -> None:
    through = {"reshape", "slice", "transpose", "contiguous"}
    views = np.flatnonzero(_of_kind(gpt2, *(f"{kind}_backward" for kind in through)))
    own = [op for op in views if (gpt2.tensor_storage[gpt2.tensor_op == op] == _tensors(gpt2, op)).any()]
    joined = [f"h.{layer}.attn.c_attn.unflat.backward" for layer in range(LAYERS)]  # of q, k and v
    assert sorted(gpt2.op_name[op] for op in own) == sorted(joined)
    passed, bias = _tensors(gpt2, _named(gpt2, "h.4.mlp.c_fc.add_bias.backward"))
    source = _tensors(gpt2, _named(gpt2, "h.4.mlp.act.gelu.backward"))
    assert [gpt2.tensor_storage[passed]] == source
    assert gpt2.tensor_storage[bias] == bias


@pytest.mark.parametrize(
    ("backward", "reads"),
    [
        (
            "h.1.mlp.c_fc.matmul",
            {"h.1.mlp.c_fc.flat", "h.1.mlp.c_fc.weight", "h.1.mlp.c_fc.add_bias.backward"},
        ),
        ("h.1.ln_2.layernorm", {"h.1.attn.residual", "h.1.ln_2.weight", "h.1.mlp.c_fc.flat.backward"}),
        ("h.1.attn.softmax", {"h.1.attn.softmax", "h.1.attn.attn_dropout.dropout.backward"}),
        ("h.1.mlp.act.gelu", {"h.1.mlp.c_fc.unflat", "h.1.mlp.c_proj.flat.backward"}),
        ("h.1.attn.residual", {"h.1.mlp.residual.backward", "h.1.ln_2.layernorm.backward"}),
        ("h.1.mlp.residual", {"h.2.attn.residual.backward", "h.2.ln_1.layernorm.backward"}),
        ("h.1.mlp.dropout.dropout", {"h.1.mlp.dropout.dropout", "h.1.mlp.residual.backward"}),
        ("h.1.attn.c_attn.unflat", {f"h.1.attn.{part}.backward" for part in "qkv"}),
        ("loss.nll_loss", {"loss.nll_loss", "labels"}),
    ],
)
def test_backward_op_reads_gradients_and_what_it_saved(gpt2: Graph, backward: str, reads: set[str]) -> None:
    assert _inputs(gpt2, f"{backward}.backward") == reads


def test_dropout_saves_its_mask_and_not_its_output(gpt2: Graph) -> None:
    op, back = (_named(gpt2, f"h.1.mlp.dropout.dropout{end}") for end in ("", ".backward"))
    output, mask = np.flatnonzero(gpt2.tensor_op == op)
    assert gpt2.tensor_bytes[[output, mask]].tolist() == [4 * BATCH * SEQ * WIDTH, BATCH * SEQ * WIDTH]
    used = gpt2.use_tensor[gpt2.use_op == back]
    assert mask in used
    assert output not in used


def test_nothing_of_the_backward_pass_can_start_before_the_loss(gpt2: Graph) -> None:
    reached = np.zeros(gpt2.num_ops, dtype=np.bool_)
    reached[_named(gpt2, "loss.nll_loss")] = True
    for source, target in zip(*(side.tolist() for side in edges(gpt2)), strict=True):
        reached[target] |= reached[source]
    assert reached[gpt2.phase == Phase.BACKWARD].all()
    assert reached[gpt2.phase == Phase.UPDATE].all()


def test_every_gradient_is_read(gpt2: Graph) -> None:
    made = np.flatnonzero(gpt2.phase[gpt2.tensor_op] == Phase.BACKWARD)
    assert set(made.tolist()) <= set(gpt2.use_tensor.tolist())


@pytest.mark.parametrize("num_layers", [4, 5, 9])
def test_repeated_layers_equal_layers_made_one_by_one(num_layers: int) -> None:
    shape = module._Shape(64, 4, 16, 2, 101, Dtype.FLOAT32)
    assert _small(num_layers).digest == module._training_step("by hand", num_layers, shape).digest


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_a_layer_adds_the_same_ops_at_any_depth(num_layers: int) -> None:
    assert _small(num_layers + 1).num_ops - _small(num_layers).num_ops == 120


def test_half_precision_halves_weights_and_keeps_masks() -> None:
    single, half = _small(2), _small(2, Dtype.BFLOAT16)
    weight = single.phase[single.tensor_op] == Phase.PARAM
    assert (single.tensor_bytes[weight] == 2 * half.tensor_bytes[weight]).all()
    mask = single.tensor_bytes == half.tensor_bytes
    assert mask.sum() == 4 + 1 + 3 * 2  # inputs, and one mask per dropout
    assert "param bfloat16[64,192]" in half.signature_table


def test_a_hundred_thousand_ops_can_be_made() -> None:
    graph = transformer_with_ops(100_000)
    assert abs(graph.num_ops - 100_000) <= 60
    assert (graph.tensor_op[graph.use_tensor] < graph.use_op).all()
    assert (graph.phase == Phase.UPDATE).sum() == (graph.phase == Phase.PARAM).sum()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 0}, "num_layers = 0"),
        ({"vocab": -1}, "vocab = -1"),
        ({"width": 100, "num_heads": 12}, "100 does not split into 12 heads"),
        ({"dtype": Dtype.INT8}, "int8"),
        ({"num_layers": 10**9}, "1000000000 layers"),
        ({"width": 12 * 10**12}, "Graph"),
    ],
)
def test_impossible_shapes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        transformer(**sizes)  # type: ignore[arg-type]


def test_only_neighbouring_layers_can_be_repeated() -> None:
    builder = GraphBuilder("skipping")
    ops = [builder.op(f"h.{layer}.op") for layer in range(3)]
    builder.use(builder.tensor(ops[0], 4), ops[2])
    with pytest.raises(GraphError, match="not its neighbour"):
        repeat_layers(builder.build(), 5, prefix="h.")
    with pytest.raises(GraphError, match="2; ask for 3"):
        repeat_layers(builder.build(), 2, prefix="h.")
