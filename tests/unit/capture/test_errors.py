"""What capture refuses, and in what words."""

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra [torch]")
from torch import nn  # noqa: E402

from loadmaster.core.errors import FileError, GraphError, InputError, UnknownNameError  # noqa: E402
from loadmaster.graph.capture import capture  # noqa: E402
from loadmaster.graph.models import CaptureOptions  # noqa: E402
from loadmaster.graph.source import read_source  # noqa: E402

INPUT = (torch.ones(3, 8),)


def net() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_a_model_that_cannot_run_shows_its_own_error_and_where() -> None:
    with pytest.raises(GraphError, match=r"\[3, 9\] X \[8, 16\].*after op .* in module '0'"):
        capture(net(), (torch.ones(3, 9),))


def test_an_error_of_the_users_own_code_is_shown_shortened() -> None:
    class Broken(nn.Module):
        def forward(self, x: Any) -> Any:
            raise KeyError("no such thing " + "x" * 5000)

    with pytest.raises(GraphError, match="Broken cannot run on the example inputs: KeyError") as told:
        capture(Broken(), INPUT)
    assert len(str(told.value)) < 600


@pytest.mark.parametrize("wrapper", ["DataParallel", "FullyShardedDataParallel", "DistributedDataParallel"])
def test_wrappers_that_spread_a_model_are_refused_by_name(wrapper: str) -> None:
    kind = type(wrapper, (nn.Module,), {"__module__": "torch.nn.parallel"})
    wrapped = kind()
    wrapped.module = net()
    with pytest.raises(GraphError, match=f"wrapped in {wrapper}"):
        capture(wrapped, INPUT)


def test_a_quantised_module_is_refused_by_name() -> None:
    kind = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    model = nn.Sequential(kind(8, 4))
    with pytest.raises(GraphError, match=r"module '0' is quantised \(Linear4bit\)"):
        capture(model, INPUT)


def test_a_model_on_two_devices_is_refused_with_both() -> None:
    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> Any:  # type: ignore[override]
            return torch.device("cuda:1")

    model = net()
    model.register_buffer("far", torch.ones(1).as_subclass(Elsewhere))
    with pytest.raises(GraphError, match=r"on cpu \('0.weight'\) and on cuda:1 \('far'\)"):
        capture(model, INPUT)


def test_a_weight_without_shape_is_refused() -> None:
    with pytest.raises(GraphError, match="no shape yet"):
        capture(nn.Sequential(nn.LazyLinear(4)), INPUT)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"path": "joined"}, UnknownNameError, "did you mean 'joint'"),
        ({"target": "tpu"}, UnknownNameError, "known: cpu, cuda"),
        ({"optimizer": "adamx"}, UnknownNameError, "did you mean 'adam"),
        ({"optimizer": 3}, InputError, "optimizer is 3; give a class"),
        ({"optimizer": torch.optim.LBFGS}, InputError, "LBFGS cannot step.*state is as large"),
        ({"loss": lambda out: out}, GraphError, r"loss gives \(3, 4\); it must give one number"),
    ],
)
def test_a_bad_option_is_answered_with_what_to_give(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        capture(net(), INPUT, **options)


def test_an_optimizer_of_another_model_is_refused() -> None:
    other = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"weight of shape \[3, 3\] that is none of the model's"):
        capture(net(), INPUT, optimizer=other)


def test_a_model_without_trained_weights_has_no_training_step() -> None:
    model = net()
    for weight in model.parameters():
        weight.requires_grad_(False)
    with pytest.raises(GraphError, match="train=False"):
        capture(model, INPUT)
    assert capture(model, INPUT, train=False).num_ops > 0


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"function is not a torch.nn.Module"):
        capture(lambda x: x, INPUT)


FILES = {
    "good": "import torch\ndef build(batch=2):\n    return torch.nn.Linear(8, 4), (torch.ones(batch, 8),)\n",
    "dictionary": (
        "import torch\ndef build():\n    return {'model': torch.nn.Linear(8, 4), 'args': (torch.ones(2, 8),),"
        " 'loss': lambda out: out.sum(), 'optimizer': 'sgd'}\n"
    ),
    "named": "import torch\ndef build():\n    return torch.nn.Linear(8, 4), {'input': torch.ones(2, 8)}\n",
    "twice": (
        "import torch\ndef build():\n    x = {'input': torch.ones(2, 8)}\n"
        "    return torch.nn.Linear(8, 4), x, {'x': 1}\n"
    ),
    "typo": "import torhc\n",
    "raises": "def build():\n    raise RuntimeError('out of luck')\n",
    "number": "def build():\n    return 3\n",
    "other": "def make():\n    return 3\n",
    "unknown": "def build():\n    return {'model': None, 'arg': ()}\n",
}


def written(folder: Path, name: str) -> str:
    (folder / f"{name}.py").write_text(FILES[name])
    return f"{folder / name}.py:build"


def test_a_users_own_file_is_captured(tmp_path: Path) -> None:
    graph = read_source(written(tmp_path, "good"), asked=CaptureOptions(batch=5)).graph
    assert "float32[5,8]" in graph.signature_table[graph.signature[graph.op_name.index("input")]]
    with_sgd = read_source(written(tmp_path, "dictionary")).graph
    assert with_sgd.resident_bytes.sum() == 4 * 36
    assert "sum" in with_sgd.op_kind
    assert (
        read_source(
            written(tmp_path, "dictionary"), asked=CaptureOptions(optimizer="momentum")
        ).graph.resident_bytes.sum()
        == 8 * 36
    )


def test_inputs_that_are_a_dict_are_arguments_by_name(tmp_path: Path) -> None:
    named, plain = (read_source(written(tmp_path, name)).graph for name in ("named", "good"))
    assert named.op_kind == plain.op_kind


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("twice", {}, InputError, "gives arguments by name twice, input and x"),
        ("good", {"seq": 3}, InputError, "takes no seq; leave --seq out"),
        ("good", {"batch": 0}, InputError, "batch is 0; give a whole number"),
        ("good", {"format": "msr"}, InputError, "is captured and has no format"),
        ("typo", {}, InputError, "cannot be imported: ModuleNotFoundError: No module named 'torhc'"),
        ("raises", {}, InputError, "raised RuntimeError: out of luck"),
        ("number", {}, InputError, r"gives int; it must give \(model, args\)"),
        ("other", {}, UnknownNameError, "unknown function of .*other.py 'build'.*make"),
        ("unknown", {}, InputError, "known are model, args"),
    ],
)
def test_a_bad_file_is_answered_with_what_is_wrong(
    tmp_path: Path, name: str, options: Any, error: Any, message: str
) -> None:
    sizes = {key: value for key, value in options.items() if key != "format"}
    with pytest.raises(error, match=message):
        read_source(written(tmp_path, name), format=options.get("format"), asked=CaptureOptions(**sizes))


def test_only_models_have_a_batch() -> None:
    with pytest.raises(InputError, match="is not a model, so it has no batch"):
        read_source("gen:chain:3", asked=CaptureOptions(batch=2))
    with pytest.raises(FileError, match="no such file"):
        read_source("nowhere.py:build")


def test_a_copy_of_the_model_is_captured_even_where_copying_fails() -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot copy a lock")

    with pytest.raises(TypeError):
        copy.deepcopy(Locked(8, 4))
    model = nn.Sequential(Locked(8, 4))
    weight = model[0].weight
    assert capture(model, INPUT).num_ops > 0
    assert model[0].weight is weight
