"""Models of `transformers` as the library builds them: which engine runs them, and with which numbers."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="placing needs the extra [torch]")
pytest.importorskip("transformers", minversion="5", reason="the models are of transformers 5")
from benchmarks.families import FAMILIES  # noqa: E402
from benchmarks.family_runs import EQUAL, compare_family  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.core.graph import units  # noqa: E402
from loadmaster.core.plan import plan_of  # noqa: E402
from loadmaster.graph.whole_modules import group_by_module  # noqa: E402
from loadmaster.runtime.placed import build_placed_model  # noqa: E402
from tests.placing import devices, random_plan  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
BY_HOOKS = {"mixtral", "qwen2_moe", "bloom", "detr", "wav2vec2"}
OFTEN = ("gpt2", "whisper", "bloom")
SELDOM = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize("name", SELDOM)
def test_a_family_as_built_by_default_trains_with_the_numbers_of_the_plain_model(name: str) -> None:
    run = compare_family(name, plans=((2, 0),), steps=2)
    assert (run.result, run.by_hooks) == (EQUAL, EQUAL)
    assert run.engine == ("hooks" if name in BY_HOOKS else "graph"), run.why
    assert bool(run.why) == (name in BY_HOOKS)


def place(name: str, call: dict[str, Any]) -> Any:
    model = FAMILIES[name].build()
    graph = lm.capture(model, (), call)
    return build_placed_model(model, graph, random_plan(graph, 2, 3), devices(2))


def test_a_placed_model_gives_its_cache_of_keys_and_values() -> None:
    call = FAMILIES["llama"].call()
    wanted, found = FAMILIES["llama"].build()(**call), place("llama", call)(**call)
    assert type(found) is type(wanted)
    assert type(found.past_key_values) is type(wanted.past_key_values)
    for ours, theirs in zip(found.past_key_values.layers, wanted.past_key_values.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        assert ours.keys.device == ours.device
    assert found.past_key_values.get_seq_length() == wanted.past_key_values.get_seq_length() == 8


def test_two_calls_do_not_share_a_cache() -> None:
    call = FAMILIES["llama"].call()
    placed = place("llama", call)
    first, second = placed(**call).past_key_values, placed(**call).past_key_values
    assert first is not second
    assert first.layers[0].keys.data_ptr() != second.layers[0].keys.data_ptr()


@pytest.mark.parametrize(
    "order", [("ones", "padded", "ones"), pytest.param(("padded", "ones"), marks=pytest.mark.slow)]
)
def test_a_mask_of_ones_takes_the_kernel_of_the_plain_model(order: tuple[str, ...]) -> None:
    call = FAMILIES["mistral"].call()
    padded = call["attention_mask"].clone()
    padded[0, :3] = 0
    masks = {"ones": call["attention_mask"], "padded": padded}
    plain, placed = FAMILIES["mistral"].build(), place("mistral", call)
    for which in order:
        given = call | {"attention_mask": masks[which]}
        wanted, found = plain(**given).loss, placed(**given).loss
        assert torch.equal(wanted, found), which
    assert "graph engine" in placed.explain()


def test_explain_says_why_hooks_run_a_model() -> None:
    call = FAMILIES["bloom"].call()
    placed = place("bloom", call)
    placed(**call)
    assert "hook engine" in placed.explain()
    assert "torch.autograd.Function" in placed.explain()


def test_explain_says_why_the_graph_engine_runs_a_model() -> None:
    call = FAMILIES["gpt2"].call()
    placed = place("gpt2", call)
    placed(**call)
    assert placed.explain().startswith("graph engine")
    assert "\nwhy: torch.export made a graph" in placed.explain()


@pytest.mark.parametrize(
    "name", ["qwen2", "bloom", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)]
)
def test_a_plan_for_hooks_holds_at_the_second_step(name: str) -> None:
    family = FAMILIES[name]
    call = family.call()
    graph = group_by_module(lm.capture(family.build(), (), call, path="traced"))
    unit, num_units = units(graph)
    for seed in range(3):
        where = np.random.default_rng(seed).integers(0, 2, num_units).astype(np.int32)[unit]
        placement = lm.plan(lm.problem(graph, devices(2)), algorithm=plan_of(where), order="captured")
        model = family.build()
        optimizer = torch.optim.AdamW(model.parameters())
        placed = lm.place(model, placement, engine="hooks", optimizer=optimizer)
        for _ in range(3):
            loss = placed(**call)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        predicted = dict(
            zip(placement.problem.cluster.device_name, placement.peak_bytes.tolist(), strict=True)
        )
        assert all(peak <= predicted[device] for device, peak in placed.peak_bytes.items()), (
            placed.peak_bytes,
            predicted,
        )


@pytest.mark.parametrize("grad_scaler", [False, True])
def test_a_frozen_weight_beside_a_trained_one_has_no_state_where_hooks_run_the_model(
    grad_scaler: bool,
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    net[0].weight.requires_grad_(False)
    autocast = torch.float16 if grad_scaler else None
    graph = lm.capture(
        net, (torch.ones(3, 8),), path="traced", target="cuda", autocast=autocast, grad_scaler=grad_scaler
    )
    sized = lm.problem(graph, "1xA100-80GB", optimizer="adam").graph
    held = dict(zip(sized.op_name, sized.resident_bytes.tolist(), strict=True))
    assert {name: held[name] for name, _ in net.named_parameters()} == {
        name: weight.nbytes * (3 if weight.requires_grad else 1) for name, weight in net.named_parameters()
    }


def test_a_model_that_hooks_will_run_is_planned_in_whole_modules() -> None:
    family = FAMILIES["bloom"]
    placed = lm.place(family.build(), family.call(), devices=devices(2), budget="20x")
    plan, graph = placed.placement.plan, placed.placement.problem.graph
    assert plan is not None
    found: dict[str, set[int]] = {}
    for module, device, phase in zip(graph.module, plan.device.tolist(), graph.phase.tolist(), strict=True):
        if phase == 0:
            found.setdefault(module, set()).add(device)
    assert placed._hooks.count_moved_ops() == 0
    assert max(map(len, found.values())) <= 2  # views are where their memory is


class Looking(torch.nn.Module):
    """More of its ops look at what its layers made than compute."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x).view(2, 4, 2, 4).transpose(1, 2)
        key = self.key(x).view(2, 4, 2, 4).transpose(1, 2)
        return torch.matmul(query, key.transpose(2, 3))


def on_second(graph: lm.Graph, module: str, kind: str) -> np.ndarray:
    """The group of a module's ops of a kind on the second device, all else on the first."""
    some = [m == module and k == kind for m, k in zip(graph.module, graph.op_kind, strict=True)]
    assert any(some)
    return np.isin(graph.group, graph.group[np.array(some)]).astype(np.int32)


def test_hooks_run_a_module_where_its_own_functions_are_planned_and_not_its_views() -> None:
    model, x = torch.nn.Sequential(Looking()), torch.ones(2, 4, 8)
    graph = group_by_module(lm.capture(model, (x,)))
    where = on_second(graph, "0", "matmul")
    placement = lm.plan(lm.problem(graph, devices(2)), algorithm=plan_of(where), order="captured")
    placed = lm.place(model, placement, engine="hooks")
    assert placed._hooks.places["0"] == 1
    assert placed._hooks.places["0.query"] == 0
    placed(x).sum().backward()
    predicted = placement.peak_bytes.tolist()
    assert all(peak <= most for peak, most in zip(placed.peak_bytes.values(), predicted, strict=True))


def test_a_gradient_on_its_way_home_is_counted_where_it_arrives() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 512), torch.nn.Linear(512, 2)), torch.ones(64, 4)
    graph = group_by_module(lm.capture(model, (x,)))
    where = on_second(graph, "1", "linear")
    placement = lm.plan(lm.problem(graph, devices(2)), algorithm=plan_of(where), order="captured")
    placed = lm.place(model, placement, engine="hooks")
    seen: dict[str, int] = {}
    accounts = placed._hooks.accounts
    assert accounts is not None
    counted = accounts.add

    def note(tree: object, device: int, what: str) -> None:
        if what == "the backward of a copy":
            seen[what] = device
        counted(tree, device, what)

    accounts.add = note
    placed(x).sum().backward()
    assert seen == {"the backward of a copy": 0}


class Summing(torch.nn.Module):
    """One op of its own, and two inputs that its layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.matmul(self.left(a), self.right(b))


def test_hooks_run_a_models_own_functions_where_they_are_planned_and_not_where_its_inputs_are() -> None:
    model, batch = Summing(), (torch.ones(8, 8), torch.ones(8, 8))
    graph = group_by_module(lm.capture(model, batch, path="traced"))
    placement = lm.plan(
        lm.problem(graph, devices(2)), algorithm=plan_of(on_second(graph, "", "mm")), order="captured"
    )
    placed = lm.place(model, placement, engine="hooks")
    assert placed._hooks.places == {"": 1, "left": 0, "right": 0}
    placed(*batch).sum().backward()
    predicted = placement.peak_bytes.tolist()
    assert all(peak <= most for peak, most in zip(placed.peak_bytes.values(), predicted, strict=True))


class Remembering(torch.nn.Module):
    """Python holds a mask to the end of its forward, and a copy of what it made to the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = torch.nn.Linear(256, 256), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        y = self.layer(x).relu()
        self.last = y.detach().clone()
        return (y * y).sum() + mask.any()


def test_what_pythons_variables_and_a_models_cache_hold_is_in_the_peak_that_hooks_are_planned_for() -> None:
    model, x = Remembering(), torch.randn(512, 256)
    placed = lm.place(model, x, devices="cpu#0-64MB", engine="hooks", optimizer="sgd", budget="20x")
    assert placed.placement.problem.graph.capture.startswith("traced")
    for _ in range(3):
        placed(x).backward()
        placed.zero_grad()
    (measured,), (predicted,) = placed.peak_bytes.values(), placed.placement.peak_bytes.tolist()
    assert measured <= predicted <= 1.3 * measured
