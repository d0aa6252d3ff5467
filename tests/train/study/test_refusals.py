"""What cannot be trained or resumed is said before the start, in words; what can be is."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training needs the extra [torch]")
from torch import nn  # noqa: E402

import loadmaster.train as lt  # noqa: E402
from loadmaster.core.errors import FileError, InputError  # noqa: E402
from tests.train.disk.test_kill import in_child  # noqa: E402
from tests.train.small_trials import digest, trial  # noqa: E402


def refused(words: str, folder: Path, **more: Any) -> None:
    with pytest.raises(InputError, match=words):
        lt.Study(trial("a", **more), dir=folder, devices="cpu").plan()


def test_a_schedule_that_wants_a_metric_is_refused(tmp_path: Path) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    refused("trial 'a': ReduceLROnPlateau needs a metric in each step", tmp_path, lr_schedule=plateau)


def test_a_schedule_that_is_none_is_refused(tmp_path: Path) -> None:
    refused("trial 'a': lr_schedule gave float", tmp_path, lr_schedule=lambda optimizer: 0.5)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_on_the_optimizers_step_are_refused(when: str, tmp_path: Path) -> None:
    def optim(parameters: Any) -> Any:
        made = torch.optim.AdamW(parameters, fused=True)
        getattr(made, f"register_step_{when}_hook")(lambda *_: None)
        return made

    refused("trial 'a': its AdamW has step hooks, which would run once for each shard", tmp_path, optim=optim)


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch.compile's own import
@pytest.mark.parametrize(
    ("wrap", "named"),
    [
        (lambda net: torch.compile(net), r"its model is wrapped in OptimizedModule.* before torch\.compile"),
        (lambda net: nn.DataParallel(net), r"its model is wrapped in DataParallel.*its \.module"),
        (lambda net: nn.Sequential(torch.compile(net)), "module '0' is wrapped in OptimizedModule"),
    ],
)
def test_a_wrapped_model_is_refused_by_what_it_wraps(wrap: Any, named: str, tmp_path: Path) -> None:
    refused(
        named, tmp_path, build=lambda: wrap(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))), blocks=None
    )


def test_quantised_weights_are_refused_with_what_to_load_instead(tmp_path: Path) -> None:
    def build() -> nn.Module:
        four_bit = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
        return nn.Sequential(nn.Linear(16, 16), four_bit(16, 16))

    refused(
        r"module '1' has quantised weights.*Linear4bit.*quantization_config",
        tmp_path,
        build=build,
        blocks=None,
    )


def test_sparse_gradients_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    words = nn.Sequential(nn.Embedding(4, 8, sparse=True), nn.Linear(8, 2))
    refused(r"module '0' \(Embedding\) gives sparse gradients.*sparse=False", tmp_path, build=lambda: words)


def test_a_module_with_a_state_of_its_own_kind_is_refused_by_its_name(tmp_path: Path) -> None:
    refused(
        r"trial 'a': module '1' \(Extra\) keeps a state of its own \(get_extra_state\)",
        tmp_path,
        build=lambda: nn.Sequential(nn.Linear(6, 16), Extra(16, 3)),
    )


class Chosen(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + x[x > 0].mean()


@pytest.mark.parametrize("layer", [Chosen, lambda: nn.BatchNorm1d(16, momentum=None)], ids=["nonzero", "bn"])
def test_a_block_that_looks_at_values_is_refused_in_words(layer: Any, tmp_path: Path) -> None:
    refused(
        r"trial 'a': its forward or loss looks at values of tensors \(aten\.",
        tmp_path,
        build=lambda: nn.Sequential(nn.Linear(6, 16), layer(), nn.Linear(16, 3)),
        blocks=list,
    )


def test_a_loss_of_one_element_is_one_number(tmp_path: Path) -> None:
    def loss(out: Any, target: Any) -> Any:
        return nn.functional.cross_entropy(out, target).view(1)

    given = {"loss": loss, "evaluate": None, "eval_every": None}
    study = lt.Study(
        trial("a", **given), dir=tmp_path, devices="cpu", memory_cap=20_000, optimizer_placement="device"
    )
    found = study.fit()["a"]
    assert found.error == ""
    plain = lt.reference(trial("a", **given))
    assert digest(found.state_dict()) == digest(plain.state_dict)


def test_options_of_the_optimizer_that_changed_in_the_same_folder_are_refused_by_the_first(
    tmp_path: Path,
) -> None:
    def study(**options: Any) -> lt.Study:
        given = {"lr": 1e-2, "weight_decay": 0.1} | options
        one = trial("a", optim=lambda ps: torch.optim.AdamW(ps, **given), max_steps=2)
        return lt.Study(one, dir=tmp_path, devices="cpu")

    study().fit()
    with pytest.raises(InputError, match=r"started with optim.weight_decay = 0.1 and now has 0.2"):
        study(weight_decay=0.2).fit()
    with pytest.raises(InputError, match=r"started with optim.lr = 0.01 and now has 0.02"):
        study(lr=0.02).fit()
    study().fit()


def _warmed(milestone: int, factor: float) -> Any:
    schedulers = torch.optim.lr_scheduler

    def made(optimizer: Any) -> Any:
        parts = [schedulers.ConstantLR(optimizer, factor, 2), schedulers.ExponentialLR(optimizer, 0.9)]
        return schedulers.SequentialLR(optimizer, parts, milestones=[milestone])

    return made


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (_warmed(4, 0.5), r"lr_schedule.milestones = \[5\] and now has \[4\]"),
        (_warmed(5, 0.25), r"lr_schedule\[0\].factor = 0.5 and now has 0.25"),
    ],
)
def test_another_part_of_a_schedule_in_the_same_folder_is_refused(
    other: Any, named: str, tmp_path: Path
) -> None:
    def study(schedule: Any) -> lt.Study:
        one = trial("a", optim=lambda ps: torch.optim.SGD(ps, lr=0.1), lr_schedule=schedule, max_steps=2)
        return lt.Study(one, dir=tmp_path, devices="cpu")

    study(_warmed(5, 0.5)).fit()
    study(_warmed(5, 0.5)).fit()
    with pytest.raises(InputError, match=named):
        study(other).fit()


def _parted(parameters: Any) -> torch.optim.Optimizer:
    some = list(parameters)
    return torch.optim.SGD([{"params": some[:1]}, {"params": some[1:]}], lr=0.1)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"optim": lambda ps: torch.optim.Adagrad(ps, lr=0.1)}, "optim = 'SGD' and now has 'Adagrad'"),
        ({"optim": _parted}, "optim.num_groups = 1 and now has 2"),
        ({"lr_schedule": None}, "lr_schedule = 'MultiStepLR' and now has None"),
        (
            {"lr_schedule": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 6])},
            r"lr_schedule.milestones = \[1, 5\] and now has \[1, 6\]",
        ),
    ],
    ids=["optimizer", "groups", "schedule", "milestones"],
)
def test_another_optimizer_or_schedule_in_the_same_folder_is_refused(
    changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    def study(**more: Any) -> lt.Study:
        given: dict[str, Any] = {
            "optim": lambda ps: torch.optim.SGD(ps, lr=0.1),
            "lr_schedule": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 5]),
            "max_steps": 2,
        }
        return lt.Study(trial("a", **(given | more)), dir=tmp_path, devices="cpu")

    study().fit()
    study().fit()
    with pytest.raises(InputError, match=named):
        study(**changed).fit()


class Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Takes its time, so that workers are in the middle of something."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, at: int) -> Any:
        time.sleep(0.02)
        return torch.full((6,), at / 400), at % 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_of_a_killed_study_do_not_hold_its_folder(tmp_path: Path) -> None:
    def loader() -> Any:
        return torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=2)

    def study(**more: Any) -> lt.Study:
        return lt.Study(trial("a", evaluate=None, eval_every=None, **more), dir=tmp_path, devices="cpu")

    child = in_child(lambda: study(data=loader).fit())
    journal, listed = tmp_path / "journal", Path(f"/proc/{child}/task/{child}/children")
    until = time.monotonic() + 60
    while time.monotonic() < until and (not journal.exists() or len(listed.read_text().split()) < 2):
        time.sleep(0.02)
    with pytest.raises(FileError, match="in use by another process"):
        study().fit()
    while time.monotonic() < until and len(listed.read_text().split()) < 2:  # between two epochs
        time.sleep(0.02)
    workers = listed.read_text().split()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert left, "the workers outlive it for a while"
    with pytest.raises(InputError, match="was started with"):  # it is let in, and seen to be another
        study(seed=2).fit()


def test_a_folder_is_still_for_one_at_a_time(tmp_path: Path) -> None:
    from loadmaster.train.disk.folder_lock import lock_folder

    with lock_folder(tmp_path):
        with pytest.raises(FileError, match="in use"), lock_folder(tmp_path):
            pass
        assert os.waitpid(in_child(lambda: None), 0)[1] == 0  # a child lets go of its own handle alone
        with pytest.raises(FileError, match="in use"), lock_folder(tmp_path):
            pass
    with lock_folder(tmp_path):
        pass
