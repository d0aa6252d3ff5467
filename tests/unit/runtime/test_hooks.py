"""The hook engine: models that cannot be exported run their plan module by module, with the same numbers."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.core.errors import GraphError, PlanError, RunError  # noqa: E402
from loadmaster.runtime.placed import Options, build_placed_model  # noqa: E402
from loadmaster.zoo.example import Example  # noqa: E402
from tests.placing import captured, devices, first_difference, placed, random_plan, trained  # noqa: E402
from tests.torch_models import NAMES, Branching, example  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def differences(name: str, num_plans: int) -> list[str]:
    original = example(name)
    graph = lm.capture(original.model, original.args, original.kwargs, path="traced")
    wanted, found = trained(original.model, original), []
    for seed in range(num_plans):
        again, num = example(name), 2 + seed % 3
        model = build_placed_model(again.model, graph, random_plan(graph, num, seed), devices(num))
        found.append(first_difference(wanted, trained(model, again)))
        assert "hook engine" in model.explain()
    return found


@pytest.mark.parametrize("name", ["branching", "resnet", "mixtral"])
def test_random_plans_keep_the_numbers(name: str) -> None:
    assert differences(name, 2) == [""] * 2


class CrossAttention(nn.Module):
    """Keys and values are one tensor: torch then multiplies them at once, which rounds otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.memory = nn.Linear(16, 32), nn.Linear(16, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True, dropout=0.1)

    def forward(self, rows: Any) -> Any:
        query, memory = self.query(rows), self.memory(rows)
        return self.attention(query, memory, memory)[0] + self.attention(query, query, query)[0]


def test_attention_sees_that_keys_and_values_are_one_tensor() -> None:
    def build() -> Example:
        torch.manual_seed(0)
        return Example(CrossAttention(), (torch.randn(4, 12, 16),))

    original = build()
    graph = lm.capture(original.model, original.args, path="traced")
    wanted = trained(original.model, original)
    for seed in range(4):
        again = build()
        model = build_placed_model(again.model, graph, random_plan(graph, 3, seed), devices(3))
        assert first_difference(wanted, trained(model, again)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ten_random_plans_keep_the_numbers(name: str) -> None:
    assert differences(name, 10) == [""] * 10


def test_a_model_that_cannot_be_exported_runs_by_hooks_and_says_so() -> None:
    class Sometimes(nn.Module):
        """Exported in training; in eval mode it reads a value."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            y = self.inner(x)
            if not self.training and y.sum() > 0:
                return y * 2
            return y

    torch.manual_seed(0)
    built = Example(Sometimes(), (torch.randn(8, 16),))
    model = placed(built, random_plan(captured(built), 2, 0))
    model(*built.args).sum().backward()
    assert not model.notes
    model.eval()
    built.model.eval()
    assert torch.equal(model(*built.args), built.model(*built.args))
    assert any("run by hooks on modules" in note for note in model.notes)


class Masked(nn.Module):
    """Rows that are chosen by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, rows: Any) -> Any:
        chosen, out = rows.sum(1) > 0, rows.clone()
        out[chosen] = self.inner(rows[chosen])
        return out


def test_a_model_that_chooses_rows_by_a_mask_is_placed_and_run() -> None:
    torch.manual_seed(0)
    model, rows = Masked(), torch.randn(6, 8)
    wanted = model(rows)
    placed_model = lm.place(model, (rows,), devices="cpu#0-1MB, cpu#1-1MB", costs="roofline", budget="5x")
    assert torch.equal(placed_model(rows), wanted)
    assert "hook engine" in placed_model.explain()


class Mapped(Masked):
    def forward(self, rows: Any) -> Any:
        return torch.vmap(self.inner)(rows)


class Sparse(Masked):
    def forward(self, rows: Any) -> Any:
        return torch.sparse.mm(torch.eye(6).to_sparse(), self.inner(rows))


@pytest.mark.parametrize(("kind", "words"), [(Mapped, "torch.func"), (Sparse, "make it dense")])
def test_what_has_no_memory_of_its_own_is_refused_in_words(kind: Any, words: str) -> None:
    rows = torch.randn(6, 8)
    graph = lm.capture(Masked(), (rows,))
    model = build_placed_model(kind(), graph, random_plan(graph, 2, 0), devices(2), options=Options("hooks"))
    with pytest.raises(RunError, match=words):
        model(rows)


def test_engines_can_be_forced() -> None:
    built = example("branching")
    graph = lm.capture(built.model, built.args)
    assert graph.capture.startswith("traced")
    plan = random_plan(graph, 2, 0)
    with pytest.raises(PlanError, match="no graph to run: when it was planned"):
        build_placed_model(built.model, graph, plan, devices(2), options=Options(engine="graph"))
    again, plain = example("resnet"), example("resnet")
    model = placed(again, random_plan(captured(again), 2, 0), engine="hooks")
    assert first_difference(trained(plain.model, plain), trained(model, again)) == ""
    assert not model._engine.graphs


def test_a_forced_graph_that_cannot_be_made_is_an_error() -> None:
    built = Example(nn.Sequential(nn.Linear(16, 16)), (torch.randn(4, 16),))
    model = placed(built, random_plan(captured(built), 2, 0), engine="graph")
    with pytest.raises(GraphError, match=r"dim|shape"):
        model(torch.randn(4, 15))


def test_the_users_own_error_comes_from_the_users_own_code() -> None:
    class Broken(Branching):
        def forward(self, x: Any) -> Any:
            if x.shape[0] == 5:
                raise KeyError("five is right out")
            return super().forward(x)

    model = build_placed_model(Broken(), *_traced(Broken()))
    with pytest.raises(KeyError, match="five is right out"):
        model(torch.randn(5, 16))
    assert model(torch.randn(6, 16)).shape == (6, 4)


def _traced(model: nn.Module) -> tuple[Any, Any, Any]:
    graph = lm.capture(model, (torch.randn(64, 16),))
    return graph, random_plan(graph, 2, 1), devices(2)


def test_verify_names_the_module() -> None:
    built = example("branching")
    model = build_placed_model(built.model, *_traced(built.model))
    assert model.verify(*built.args).ok
    own = model.first.weight

    def wrong(module: Any, args: Any, out: Any) -> Any:
        return out * 1.01 if module.weight is own else out  # unplaced, it runs on copies

    handle = model.first.register_forward_hook(wrong)
    found = model.verify(*built.args)
    handle.remove()
    assert found.finding.startswith("module 'first' on cpu#")


def test_nothing_is_left_on_the_modules() -> None:
    built = example("branching")
    model = build_placed_model(built.model, *_traced(built.model))
    model(*built.args)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Encoder(nn.Module):
    """Torch's own encoder, which packs a padded batch where no gradient is taken."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16))

    def forward(self, x: Any, padding: Any) -> Any:
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("engine", ["auto", "hooks"])
def test_padding_comes_out_of_torchs_encoder_as_it_does_unplaced(engine: str) -> None:
    def build() -> Example:
        torch.manual_seed(0)
        padding = torch.arange(5) >= torch.tensor([[5], [3], [4]])
        return Example(Encoder(), (torch.randn(3, 5, 16), padding))

    plain, again = build(), build()
    model = placed(again, random_plan(captured(again), 2, 0), engine=engine)
    for padding in (plain.args[1], plain.args[1].flip(1)):  # the second one is not packed
        with torch.no_grad():
            found, wanted = (one.eval()(plain.args[0], padding) for one in (model, plain.model))
        torch.testing.assert_close(found, wanted)  # other kernels: to rounding
    assert first_difference(trained(plain.model, plain, steps=1), trained(model, again, steps=1)) == ""
