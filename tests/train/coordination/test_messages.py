"""What a stranger reads when something of their own is wrong: one sentence that says what, and where."""

import logging
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import nn

import loadmaster.train as lt
from loadmaster.core.errors import InputError
from loadmaster.train.coordination.result import TrialStatus
from tests.train.small_trials import trial


def broken(*_: Any) -> Any:
    raise ValueError("this is mine")


@pytest.mark.parametrize("field", ["build", "loss", "data", "optim"])
def test_an_exception_of_my_own_function_is_bad_input_and_says_the_line(field: str, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"trial 'a' raised ValueError \(test_messages.py, line \d+\): this is mine"
    ):
        lt.Study([trial("a", **{field: broken})], dir=tmp_path, devices="cpu").plan()


def test_a_loss_with_the_wrong_arguments_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="trial 'a' raised TypeError"):
        lt.Study([trial("a", loss=lambda out: out.sum())], dir=tmp_path, devices="cpu").plan()


def test_one_trial_needs_no_list_and_something_else_is_said(tmp_path: Path) -> None:
    assert lt.Study(trial("a"), dir=tmp_path).names == ["a"]
    with pytest.raises(InputError, match="a study takes trials, not int"):
        lt.Study([5], dir=tmp_path)


def test_nan_in_shards_is_recorded_as_nan_with_what_to_do(tmp_path: Path) -> None:
    wild = trial("wild", loss=lambda out, _: out.sum() * float("nan"))
    result = lt.Study([wild, trial("a", max_steps=2)], dir=tmp_path, devices="cpu").fit()
    assert result["wild"].error_kind == "nan"
    assert "lower the learning rate" in result["wild"].error
    assert result["a"].status == TrialStatus.DONE


def test_an_evaluation_that_gives_a_bare_number_is_said(tmp_path: Path) -> None:
    one = trial("a", evaluate=lambda predict: 0.5, max_steps=2)
    result = lt.Study([one], dir=tmp_path, devices="cpu").fit()
    assert "evaluate must give numbers by name" in result["a"].error


def test_tensorboard_gets_a_run_for_each_trial_or_its_package_is_named(tmp_path: Path) -> None:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match="pip install tensorboard"):
            lt.TensorBoardLogger(tmp_path / "logs")
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = lt.TensorBoardLogger(tmp_path / "logs")
    one = trial("a", max_steps=4, eval_every=2)
    lt.Study([one], dir=tmp_path / "run", devices="cpu", callbacks=[logger]).fit()
    (folder,) = (tmp_path / "logs").iterdir()
    seen = EventAccumulator(str(folder))
    seen.Reload()
    assert [each.step for each in seen.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [each.step for each in seen.Scalars("eval/loss")] == [2, 4]


@pytest.mark.skipif(sys.platform == "win32", reason="limits of files are those of POSIX")
def test_a_disk_that_really_takes_no_more_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    import os
    import resource
    import signal

    from loadmaster.train.disk.journal import DiskFullError
    from tests.train.disk.test_kill import in_child
    from tests.train.plain_engine import Plain
    from tests.train.small_trials import digest, plainly

    def study() -> lt.Study:
        return lt.Study([trial("a")], dir=tmp_path / "run", engine=Plain(), checkpoint_every=3)

    def short_of_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
        try:
            study().fit()
        except DiskFullError:
            os._exit(7)

    _, status = os.waitpid(in_child(short_of_room), 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert digest(study().fit()["a"].state_dict()) == plainly(trial("a"))


def test_blocks_whose_shapes_do_not_fit_are_named_and_torch_prints_nothing_before(tmp_path: Path) -> None:
    class Heard(logging.Handler):
        records: ClassVar[list[logging.LogRecord]] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.records.append(record)

    log, heard = logging.getLogger("torch._subclasses.fake_tensor"), Heard()
    log.addHandler(heard)
    try:
        wrong = trial("a", build=lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(5, 3)))
        with pytest.raises(
            InputError, match=r"trial 'a' raised .*\(in block '1', which was given \(4, 4\)\)"
        ):
            lt.Study(wrong, dir=tmp_path, devices="cpu").plan()
        assert heard.records == []
        log.error("of others")
        assert len(heard.records) == 1  # it is silent for as long as memory is planned, no longer
    finally:
        log.removeHandler(heard)
