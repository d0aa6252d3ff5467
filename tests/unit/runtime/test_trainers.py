"""A placed model in other people's loops: transformers' Trainer, Lightning, and torch.compile."""

import shutil
import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster as lm  # noqa: E402
from loadmaster.core.errors import RunError, UnknownNameError  # noqa: E402
from loadmaster.core.graph import units  # noqa: E402
from loadmaster.core.plan import plan_of  # noqa: E402
from loadmaster.zoo.example import Example  # noqa: E402
from tests.placing import captured, placed, random_plan, trained  # noqa: E402
from tests.torch_models import example  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
    """Token rows, each its own labels."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> dict[str, Any]:
        chance = torch.Generator().manual_seed(at)
        row = torch.randint(0, 101, (16,), generator=chance)
        return {"input_ids": row, "labels": row.clone(), "unwanted": row}


def by_trainer(model: Any, folder: Any, **more: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses of every step and the weights at the end, by the real Trainer."""
    transformers = pytest.importorskip("transformers", reason="needs the extra [hf]")
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=3,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        seed=3,
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows())
        trainer.train()
    assert trainer.model is model, "neither wrapped nor copied"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "more", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, {"bf16": True}]
)
def test_transformers_trainer_trains_a_placed_model_to_the_same_weights(tmp_path: Any, more: Any) -> None:
    plain, built = example("gpt2"), example("gpt2")
    model = placed(built, random_plan(captured(built), 2, 3))
    wanted, weights = by_trainer(plain.model, tmp_path / "plain", **more)
    found, placed_weights = by_trainer(model, tmp_path / "placed", **more)
    assert found == wanted
    assert all(torch.equal(value, placed_weights[name]) for name, value in weights.items())
    assert sum(model.peak_bytes.values()) > 0, "it ran on the plan's devices"


def test_trainer_saves_what_the_model_itself_loads(tmp_path: Any) -> None:
    built, plain = example("gpt2"), example("gpt2")
    model = placed(built, random_plan(captured(built), 2, 3))
    trained(model, built, steps=1)
    model.save_pretrained(tmp_path)
    again = type(plain.model).from_pretrained(tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    assert again.config.architectures == ["GPT2LMHeadModel"]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        return self.last(self.drop(self.first(x).relu())).square().mean()


def small() -> Example:
    torch.manual_seed(2)
    return Example(Small(), (torch.randn(6, 8),))


class Outer(nn.Module):
    """A module around the model, as Lightning's is."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner


def as_lightning_does(model: Any) -> list[float]:
    """The loop of Lightning's Trainer: the module around the model is moved, then closures are stepped."""
    outer, losses = Outer(model), list[float]()
    outer.to("cpu")
    outer.train()
    optimizer = torch.optim.AdamW(outer.parameters(), lr=0.01)
    torch.manual_seed(4)
    for _ in range(4):

        def closure() -> Any:
            optimizer.zero_grad()
            loss = outer.inner(torch.ones(6, 8))
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
    return losses


def test_a_loop_as_lightning_writes_it_gives_the_same_losses() -> None:
    built = small()
    model = placed(built, random_plan(captured(built), 2, 1))
    assert as_lightning_does(model) == as_lightning_does(small().model)
    assert any("stayed" in note for note in model.notes)


def by_lightning(model: Any) -> list[float]:
    """Losses by the real Lightning Trainer."""
    pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    losses = []

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def training_step(self, batch: Any, at: int) -> Any:
            loss = self.inner(batch)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(4)
    rows = torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(Module(), rows)
    return losses


def test_lightning_trains_a_placed_model_with_the_same_losses() -> None:
    built = small()
    model = placed(built, random_plan(captured(built), 2, 1))
    wanted = by_lightning(small().model)
    assert by_lightning(model) == wanted


def test_a_cast_of_a_module_around_is_refused() -> None:
    built = small()
    outer = Outer(placed(built, random_plan(captured(built), 2, 1)))
    with pytest.raises(RunError, match="stays where its plan put it"):
        outer.half()


def without_chance(name: str) -> Example:
    built = example(name)
    for module in built.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return built


def halves(built: Example) -> Any:
    """The first half of the ops that belong together on one device, the second on another."""
    graph = captured(built)
    unit, num_units = units(graph)
    return plan_of((2 * unit >= num_units).astype(np.int32), np.arange(graph.num_ops, dtype=np.int32))


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
@pytest.mark.slow
def test_compiled_parts_train_as_the_model_does(name: str) -> None:
    built, plain = without_chance(name), without_chance(name)
    model = placed(built, halves(built), compile="aot_eager")
    wanted, found = trained(plain.model, plain, steps=3), trained(model, built, steps=3)
    for one, other in zip(wanted.losses, found.losses, strict=True):
        assert torch.allclose(one, other, rtol=1e-5)
    assert any("compiled by aot_eager" in note for note in model.notes)
    (graph,) = model._engine.graphs
    assert graph.parts is not None
    assert {0, 1} == set(graph.parts.device.values())
    assert graph.parts.num_compiled >= 2
    assert sum(model.peak_bytes.values()) > 0, "what leaves a part is counted"


@pytest.mark.slow
def test_inductor_compiles_the_parts_where_there_is_a_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    built, plain = without_chance("gpt2"), without_chance("gpt2")
    model = placed(built, halves(built), compile="inductor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its compiler
        found = trained(model, built, steps=2)
    for one, other in zip(trained(plain.model, plain, steps=2).losses, found.losses, strict=True):
        assert torch.allclose(one, other, rtol=1e-4)


def test_an_unknown_backend_is_refused_by_name() -> None:
    built = small()
    with pytest.raises(UnknownNameError, match="inductor"):
        lm.place(built.model, built.args, devices="cpu#0-1MB", compile="indctor")
