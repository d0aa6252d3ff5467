"""What people have: a model, batches as dicts, a DataLoader, a transformers Trainer; one line trains it."""

import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import loadmaster.train as lt
from loadmaster.core.errors import InputError
from tests.train.test_by_call import Net, batches, trial_of

pytestmark = pytest.mark.filterwarnings("ignore:.*loss_type.*")


class Rows(Dataset):  # type: ignore[type-arg]
    """Samples of different lengths."""

    def __init__(self, vocab: int = 120, count: int = 8) -> None:
        made = torch.Generator().manual_seed(2)
        self.rows = [torch.randint(3, vocab, (4 + at % 4,), generator=made) for at in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[at], "labels": self.rows[at].clone()}


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Dynamic padding, as collators of transformers do it."""
    most = max(len(each["input_ids"]) for each in samples)

    def filled(key: str, value: int) -> torch.Tensor:
        return torch.stack([nn.functional.pad(e[key], (0, most - len(e[key])), value=value) for e in samples])

    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", -100)}


def make_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=120, n_positions=16, bos_token_id=1, eos_token_id=1
        )
    )


def test_one_line_trains_a_model_where_it_stands(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    torch.manual_seed(4)
    optimizer = torch.optim.AdamW(other.parameters(), lr=5e-5)
    for batch in batches():
        other(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = other.state_dict()
    found = lt.train(model, batches(), memory_cap="64MiB", dir=tmp_path, device="cpu", seed=4)
    assert found.status == "done"
    assert found.step == 4
    first, verified, checkpoint = str(found).splitlines()
    assert first.startswith(f"{found.name}: done after 4 steps, loss {found.loss:.4g}, ")
    assert verified == found.verified
    assert checkpoint == f"checkpoint: {found.folder}"
    again = lt.train(Net(), batches(), memory_cap="64MiB", dir=tmp_path, device="cpu", seed=4)
    assert again.step == 4
    state = model.state_dict()
    assert all(torch.equal(each, state[name]) for name, each in wanted.items())
    assert all(torch.equal(each, state[name]) for name, each in again.state_dict().items())


def test_dataset_becomes_shuffled_batches(tmp_path: Path) -> None:
    class Even(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.rows = [each[:4] for each in self.rows]

    found = lt.train(make_gpt2(), Even(), batch_size=2, max_steps=3, dir=tmp_path, device="cpu")
    assert found.step == 3


def test_loader_with_dynamic_padding_is_planned_for_its_longest_batch(tmp_path: Path) -> None:
    loader = DataLoader(Rows(), batch_size=2, collate_fn=pad)
    study = lt.Study(
        lt.Trial(
            name="gpt", build=make_gpt2, data=lambda: loader, optim=lambda p: torch.optim.SGD(p, lr=0.1)
        ),
        dir=tmp_path, devices="cpu", memory_cap="64MiB",
    )  # fmt: skip
    assert "longest" in str(study.plan())
    assert study.fit()["gpt"].status == "done"


@pytest.mark.parametrize("data", [iter([1]), {"ids": 1}, 7])
def test_data_that_is_no_epoch_is_refused(data: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="data is"):
        lt.train(Net(), data, dir=tmp_path, device="cpu")


def test_trained_model_of_transformers_is_written_and_read_again(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    data = [pad([Rows()[0], Rows()[1]])] * 2
    found = lt.train(make_gpt2, data, name="gpt", dir=tmp_path / "run", device="cpu")
    found.save_pretrained(tmp_path / "saved", make_gpt2())
    back = GPT2LMHeadModel.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(each, back[name]) for name, each in found.state_dict().items())
    with pytest.raises(InputError, match="save_pretrained"):
        found.save_pretrained(tmp_path / "other", Net())


def test_configuration_of_a_trained_model_is_as_it_was_and_caches_are_said_to_be_off(tmp_path: Path) -> None:
    model = make_gpt2()
    model.gradient_checkpointing_enable()
    data = [pad([Rows()[0], Rows()[1]])]
    config = model.config
    trial = lt.Trial(name="gpt", build=lambda: model, data=lambda: data, optim=torch.optim.AdamW)
    assert "use_cache" in str(lt.Study(trial, dir=tmp_path / "planned", devices="cpu").plan())
    found = lt.train(model, data, name="gpt", dir=tmp_path / "run", device="cpu")
    found.save_pretrained(tmp_path / "saved", model)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["use_cache"] is True
    assert model.config is config
    assert config.use_cache
    assert model.is_gradient_checkpointing


def _trainer(tmp_path: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given = {
        "output_dir": str(tmp_path / "out"), "use_cpu": True, "per_device_train_batch_size": 2, "seed": 4,
        "learning_rate": 1e-3, "weight_decay": 0.1, "num_train_epochs": 2, "warmup_steps": 2,
        "report_to": [],
        "train_sampling_strategy": "sequential", "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 1,
    }  # fmt: skip
    torch.manual_seed(9)
    return Trainer(
        model=make_gpt2(), args=TrainingArguments(**(given | options)), train_dataset=Rows(),
        data_collator=pad, eval_dataset=Rows(count=4),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trainer_of_transformers_comes_along_with_its_arguments(tmp_path: Path) -> None:
    theirs = _trainer(tmp_path)
    theirs.train()
    wanted = [row["loss"] for row in theirs.state.log_history if "loss" in row]
    trial = lt.Trial.from_trainer(_trainer(tmp_path, eval_strategy="epoch"), name="gpt")
    seen = _Losses()
    result = lt.Study(trial, dir=tmp_path / "run", devices="cpu", memory_cap="64MiB", callbacks=[seen]).fit()
    assert result["gpt"].step == len(wanted) == 8
    assert seen.losses == pytest.approx(wanted, abs=2e-3)
    assert "loss" in result["gpt"].metrics
    assert trial.clip_norm == 1.0
    assert trial.seed == 4


@pytest.mark.parametrize(
    ("options", "named"),
    [({"label_smoothing_factor": 0.1}, "label_smoothing_factor"), ({"neftune_noise_alpha": 5.0}, "neftune"),
     ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "reduce_lr_on_plateau")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_trainer_argument_that_cannot_come_along_is_named(tmp_path: Path, options: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        lt.Trial.from_trainer(_trainer(tmp_path, **options))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("method", "field"),
    [("get_train_dataloader", "data"), ("create_optimizer", "optim"), ("compute_loss", "loss")],
)
def test_method_of_a_trainers_own_is_named_with_what_to_give(tmp_path: Path, method: str, field: str) -> None:
    trainer = _trainer(tmp_path)
    trainer.__class__ = type("Own", (type(trainer),), {method: lambda self, *args, **kwargs: None})
    with pytest.raises(InputError, match=rf"own {method} .*{field}=\.\.\."):
        lt.Trial.from_trainer(trainer)


@pytest.mark.filterwarnings("ignore")
def test_optimizer_given_to_a_trainer_comes_along_with_its_groups(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    first, *others = trainer.model.parameters()
    groups = [{"params": others, "lr": 3e-3, "momentum": 0.5}, {"params": [first], "lr": 1e-4}]
    trainer.optimizer = torch.optim.SGD(groups, lr=1.0, nesterov=False)
    made = lt.Trial.from_trainer(trainer).optim(list(trainer.model.parameters()))
    assert [(len(each["params"]), each["lr"], each["momentum"]) for each in made.param_groups] == [
        (len(others), 3e-3, 0.5),
        (1, 1e-4, 0.0),
    ]
    assert made.param_groups[1]["params"][0] is first
    first.grad = torch.zeros_like(first)
    trainer.optimizer.state[first]["momentum_buffer"] = torch.ones_like(first)
    with pytest.raises(InputError, match="has been stepped"):
        lt.Trial.from_trainer(trainer)


@pytest.mark.filterwarnings("ignore")
def test_schedule_given_to_a_trainer_is_named_and_may_be_given_anew(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
    with pytest.raises(InputError, match="own lr_scheduler"):
        lt.Trial.from_trainer(trainer)
    given = lt.Trial.from_trainer(trainer, lr_schedule=torch.optim.lr_scheduler.ConstantLR)
    assert given.lr_schedule is torch.optim.lr_scheduler.ConstantLR


def test_arguments_that_stay_behind_are_named_and_shares_of_steps_are_counted(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="eval_on_start"):
        trial = lt.Trial.from_trainer(
            _trainer(tmp_path, eval_strategy="steps", eval_steps=0.25, eval_on_start=True)
        )
    assert trial.eval_every == 2  # of eight steps


class _Losses:
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, trial: str, done: Any) -> None:
        self.losses.append(done.loss)


def test_patience_stops_a_trial_that_gets_no_better(tmp_path: Path) -> None:
    trial = trial_of(
        data=lambda: batches(12), optim=lambda p: torch.optim.SGD(p, lr=0.0),
        evaluate=lambda predict: {"loss": 1.0},
    )  # fmt: skip
    study = lt.Study(
        trial, dir=tmp_path, devices="cpu", memory_cap="64MiB", searcher=lt.Patience(every=2, patience=2)
    )
    found = study.fit()["net"]
    assert found.status == "stopped"
    assert found.step == 6
    with pytest.raises(InputError, match="patience is 0"):
        lt.Patience(every=2, patience=0)


def test_progress_says_lines_where_no_terminal_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    study = lt.Study(trial_of(), dir=tmp_path, devices="cpu", memory_cap="64MiB")
    study.fit(progress=True)
    assert "net: done" in told.getvalue()


def test_logger_of_a_service_that_fails_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("wandb")

    def init(**_: Any) -> Any:
        raise ConnectionError("no network")

    package.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", package)
    study = lt.Study(
        trial_of(), dir=tmp_path, devices="cpu", memory_cap="64MiB", callbacks=[lt.WandbLogger("project")]
    )
    with pytest.warns(RuntimeWarning, match="no network"):
        assert study.fit()["net"].status == "done"


@pytest.mark.parametrize("kind", ["WandbLogger", "MlflowLogger"])
def test_logger_without_its_package_says_what_to_install(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match="pip install"):
        getattr(lt, kind)("project")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_code_of_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "any-model.md"
    blocks = [part.split("```")[0] for part in page.read_text().split("```python\n")[1:]]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert len(blocks) == 3
    assert (tmp_path / "tuned" / "config.json").exists()
    assert {each.status for each in names["result"].trials} == {"done"}


def test_status_of_a_folder_is_read_while_it_runs_and_afterwards(tmp_path: Path) -> None:
    from loadmaster.train.coordination.study_status import read_status

    seen: list[bool] = []

    class Look:
        def on_step(self, trial: str, done: Any) -> None:
            seen.append(read_status(tmp_path).running)

    lt.Study(trial_of(), dir=tmp_path, devices="cpu", memory_cap="64MiB", callbacks=[Look()]).fit()
    found = read_status(tmp_path)
    assert seen == [True] * 4
    assert not found.running
    assert found.trials[0].step == found.num_steps["net"] == 4
    assert "net" in str(found)
    with pytest.raises(InputError, match="no journal"):
        read_status(tmp_path / "nowhere")


@pytest.mark.filterwarnings("ignore")
def test_lora_sweep_of_peft_trains_adapters_alone(tmp_path: Path) -> None:
    import peft

    def build() -> Any:
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        return peft.get_peft_model(make_gpt2(), config)

    data = [{"input_ids": ids, "labels": ids} for ids in torch.arange(3, 99).view(4, 2, 12)]
    trials = [
        lt.Trial(
            name=f"lr{lr:g}", build=build, data=lambda: data, seed=3,
            optim=lambda parameters, lr=lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
        )
        for lr in (1e-2, 1e-3)
    ]  # fmt: skip
    result = lt.Study(trials, dir=tmp_path / "run", devices="cpu", memory_cap="64MiB").fit()
    for trial, lr in zip(trials, (1e-2, 1e-3), strict=True):
        torch.manual_seed(3)
        model = build().train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, fused=True)
        for batch in data:
            model(**batch, use_cache=False).loss.backward()  # a cache may change the last bits
            optimizer.step()
            optimizer.zero_grad()
        found = result[trial.name].state_dict()
        assert all(torch.equal(each, found[name]) for name, each in model.state_dict().items())
    result["lr0.01"].save_pretrained(tmp_path / "adapter", build())
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
