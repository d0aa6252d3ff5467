"""What `lm.place` and `lm.verify` are given wrongly is refused at once, with both values and what to do."""

import contextlib
import copy
import functools
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.core.errors import FormatError, InputError, PlanError, ProblemError, RunError  # noqa: E402
from loadmaster.core.placement import Status  # noqa: E402
from loadmaster.runtime.placed import Placed  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = "cpu#0-1MB, cpu#1-1MB"
ROWS = torch.zeros(4, 8)


class Wide(nn.Module):
    """Two weights that no small device holds with their gradients and states."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(8, 400), nn.Linear(400, 400), nn.Linear(400, 400)

    def forward(self, x: Any) -> Any:
        return self.last(self.wide(self.first(x).relu()).relu())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@functools.cache
def graph() -> lm.Graph:
    return lm.capture(net(), (ROWS,))


def planned(
    model: nn.Module | None = None, devices: str = DEVICES, algorithm: str = "round_robin"
) -> lm.Placement:
    of = graph() if model is None else lm.capture(model, (ROWS,))
    return lm.plan(lm.problem(of, devices), algorithm=algorithm)


def test_a_plan_that_cannot_be_is_refused_with_its_proof() -> None:
    with pytest.raises(PlanError, match="proven that no plan fits") as told:
        lm.place(Wide(), (ROWS,), devices="cpu#0-600kB, cpu#1-600kB", budget="5x")
    text = str(told.value)
    assert "wide.weight" in text
    assert "MiB short): use a smaller batch or a larger device" in text
    assert "infeasible" not in text
    assert "lacks" not in text, "that is of the plan that came nearest, not of what is needed"
    need = re.search(r"need ([\d.]+) MiB on one device, the largest allowed has 585.9 KiB", text)
    assert need is not None
    assert float(need[1]) >= 4 * 400 * 400 * 4 / 2**20, "a weight, its gradient and two moments"


def test_a_plan_that_was_not_found_names_what_may_help() -> None:
    placement = planned(Wide(), "cpu#0-5MB, cpu#1-5MB", algorithm="single_device")
    assert placement.status == Status.NOT_FOUND
    text = r"nor a proof .* nearest one cpu#\d needs .* a longer budget"
    with pytest.raises(PlanError, match=text) as told:
        lm.place(Wide(), placement)
    assert "not_found" not in str(told.value)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("gpt2", "the text 'gpt2' is not a model"),
        (nn.Linear, r"Linear is a class; pass an instance, Linear\(...\)"),
        (lambda x: x, "a function is not a model; pass an nn.Module"),
        (None, "a NoneType is not a model"),
    ],
)
def test_what_is_no_model_is_named(model: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        lm.place(model, (ROWS,), devices=DEVICES)
    with pytest.raises(InputError, match=text):
        lm.verify(model, planned(), (ROWS,))


@pytest.mark.parametrize("where", ["cpux", "cuda:99", "meta", 1.5])
def test_an_output_device_that_is_not_there_is_refused_at_once(where: Any) -> None:
    model = net()
    with pytest.raises(InputError, match=r"output_device is .*, this machine has cpu"):
        lm.place(model, planned(), output_device=where)
    assert lm.place(model, planned(), output_device="cpu")(ROWS).device.type == "cpu"


def test_weights_of_another_dtype_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r"'0.weight' is float32\[16,8\] there, float64\[16,8\] here; plan this"
    ):
        lm.place(net().double(), planned())
    with pytest.raises(PlanError, match=r"is float32\[16,8\] there, float32\[12,8\] here"):
        lm.place(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), planned())


def test_weights_with_strides_of_their_own_are_the_plans() -> None:
    model = net()
    model[0].weight = nn.Parameter(torch.randn(8, 16).t())
    assert isinstance(lm.place(model, planned(model)), Placed)


@pytest.mark.parametrize(
    ("wish", "name"),
    [
        ({"optimizer": torch.optim.SGD}, "optimizer"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"budget": "60s"}, "budget"),
        ({"kwargs": {"x": ROWS}}, "kwargs"),
        ({"devices": "cpu#0-1MB"}, "devices"),
        ({"spill": "host"}, "spill"),
    ],
)
def test_what_a_given_plan_cannot_heed_is_refused(wish: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=f"the plan .*leave {name} out, or pass inputs to plan again"):
        lm.place(net(), planned(), **wish)


def test_an_optimizer_made_before_is_adopted_with_a_plan() -> None:
    model = net()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    placed = lm.place(model, planned(), optimizer=made)
    placed(ROWS).square().mean().backward()
    made.step()


def test_a_placed_model_gives_its_placement(tmp_path: Path) -> None:
    model = net()
    placed = lm.place(model, (ROWS,), devices=DEVICES, budget="5x")
    lm.save(placed.placement, tmp_path / "p.json")
    assert lm.verify(net(), placed.placement, (ROWS,)).ok
    assert lm.verify(net(), tmp_path / "p.json", (ROWS,)).ok
    mine = planned()
    assert lm.place(net(), mine).placement is mine


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_not_read_and_said_to_be_one(tmp_path: Path, zipped: bool) -> None:
    model = net()
    torch.save(model.state_dict(), tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(FormatError, match=r"w.pt is a pickle .* save the weights with safetensors"):
        lm.place(model, planned(), weights=tmp_path / "w.pt")


def test_the_two_lines_of_the_readme_train_what_neither_device_holds() -> None:
    text = (Path(__file__).resolve().parents[3] / "README.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "lm.place" in block)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(code, names)
    assert "2 devices" in said.getvalue()
    assert all(peak > 0 for peak in names["model"].peak_bytes.values()), "both are needed"
    alone = lm.plan(names["model"].placement.problem, algorithm="single_device")
    assert alone.plan is None


def test_a_plan_on_a_device_that_its_cluster_lacks_is_refused() -> None:
    good = planned()
    assert good.plan is not None
    wrong = replace(good, plan=replace(good.plan, device=good.plan.device + 6))
    for act in (lambda: lm.place(net(), wrong), lambda: lm.verify(net(), wrong, (ROWS,))):
        with pytest.raises(PlanError, match=r"on device [67], but only 2 devices"):
            act()


def test_a_forward_that_was_put_over_the_models_own_is_refused() -> None:
    model = net()
    model.forward = lambda x: 2 * type(model).forward(model, x)
    with pytest.raises(InputError, match=r"Sequential has a forward that replaces.*place the model first"):
        lm.place(model, (ROWS,), devices=DEVICES, budget="5x")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_a_compiled_model_is_refused_by_what_it_is() -> None:
    with pytest.raises(InputError, match=r"wrapped by torch\.compile; place the module before"):
        lm.place(torch.compile(net()), (ROWS,), devices=DEVICES, budget="5x")


def test_what_is_put_around_a_placed_models_forward_runs_around_its_plan() -> None:
    model = net()
    wanted = model(ROWS)
    placed = lm.place(model, (ROWS,), kwargs=None, devices=DEVICES, budget="5x")
    inner = placed.forward
    placed.forward = lambda x: 2 * inner(x)  # type: ignore[method-assign]
    assert torch.equal(placed(ROWS), 2 * wanted)
    assert "graph engine" in placed.explain()


def test_a_placed_model_that_its_own_model_calls_is_said_not_waited_for() -> None:
    from loadmaster.core.errors import RunError
    from loadmaster.runtime.graph_engine.non_reentrant_lock import NonReentrantLock

    lock = NonReentrantLock()
    with lock, pytest.raises(RunError, match="called again while its graph was made"), lock:
        pass
    with lock:
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own import
def test_torch_compile_of_a_placed_model_names_compile() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    placed = lm.place(model, (x,), devices="cpu#0-64MB, cpu#1-64MB", budget="5x")
    for act in (lambda: torch.compile(placed), lambda: torch.compile(placed.forward), placed.compile):
        with pytest.raises(RunError, match=r"lm.place\(..., compile=True\)"):
            act()
    assert placed(x).shape == (4, 8)


class Loud(nn.Module):
    """Says when it is run."""

    def forward(self, x: Any) -> Any:
        raise AssertionError("it was captured")


def test_a_placed_model_placed_again_is_said_before_it_is_captured() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    placed = lm.place(model, (x,), devices="cpu#0-64MB, cpu#1-64MB", budget="5x")
    placed.append(Loud())
    with pytest.raises(InputError, match="the model is placed already"):
        lm.place(placed, (x,))


def test_missing_devices_are_said_before_a_model_is_built(tmp_path: Any) -> None:
    source = tmp_path / "model.py"
    source.write_text("def build():\n    raise AssertionError('it was built')\n")
    with pytest.raises(ProblemError, match="brings no devices; name some"):
        lm.plan(f"{source}:build")


def test_an_optimizer_step_of_several_passes_can_be_planned_by_place() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    asked: Any = {"devices": "cpu#0-64MB, cpu#1-64MB", "budget": "5x"}
    placed = lm.place(model, (x,), accumulate=3, **asked)
    names = placed.placement.problem.graph.op_name
    passes = {name.rpartition("@")[2].partition(".")[0] for name in names if "@" in name}
    assert passes == {"2", "3"}
    for _ in range(3):
        placed(x).sum().backward()
        plain(x).sum().backward()
    assert all(
        torch.equal(one.grad, two.grad)
        for one, two in zip(placed.parameters(), plain.parameters(), strict=True)
    )
    assert not placed.notes
    for wrong in (0, True, 1.5):
        with pytest.raises(InputError, match="accumulate is"):
            lm.place(plain, (x,), accumulate=wrong, **asked)
    with pytest.raises(InputError, match="leave accumulate out"):
        lm.place(plain, placed.placement, accumulate=3)
    with pytest.raises(InputError, match="in eval mode"):
        lm.place(plain.eval(), (x,), accumulate=3, **asked)
