"""Studies in one process: equal to plain training, resumed, isolated, stopped cleanly."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from loadmaster.core.errors import FileError, InputError, LoadmasterError, RunError
from loadmaster.train.coordination.callbacks import CsvLogger, JsonlLogger
from loadmaster.train.coordination.result import TrialStatus
from loadmaster.train.disk.folder_lock import lock_folder
from loadmaster.train.disk.journal import DiskFullError, read_journal
from loadmaster.train.study import Study
from tests.train.plain_engine import Plain
from tests.train.small_trials import Rows, build, digest, plainly, trial


def study(tmp_path: Path, trials: list[Any], **options: Any) -> Study:
    given = {"engine": Plain(), "launcher": "inline", "checkpoint_every": 3}
    return Study(trials, dir=tmp_path / "run", **(given | options))


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_every_trial_ends_with_the_weights_of_the_plain_loop(num_devices: int, tmp_path: Path) -> None:
    trials = [trial(f"lr{lr}", lr=lr, num_batches=n) for lr, n in ((0.1, 10), (0.01, 7), (0.001, 4))]
    engine = Plain(num_devices)
    result = study(tmp_path, trials, engine=engine).fit()
    for one in trials:
        assert result[one.name].status == TrialStatus.DONE
        assert digest(result[one.name].state_dict()) == plainly(one)
    assert all(runner.closed for runner in engine.opened)


def test_the_weights_load_into_the_plain_model_and_by_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="the witness reads files with safetensors")
    result = study(tmp_path, [trial("a")]).fit()
    model = build()
    model.load_state_dict(result.best.state_dict())
    assert result.best.folder is not None
    model.load_state_dict(safetensors.load_file(str(result.best.folder / "model.safetensors")))


def test_a_finished_study_run_again_trains_nothing_and_answers_the_same(tmp_path: Path) -> None:
    first = study(tmp_path, [trial("a"), trial("b", lr=0.1)]).fit()
    engine = Plain()
    again = study(tmp_path, [trial("a"), trial("b", lr=0.1)], engine=engine).fit()
    assert engine.opened == []
    assert again.rows() == first.rows()
    assert digest(again["a"].state_dict()) == digest(first["a"].state_dict())


class Stop:
    """Raises or interrupts after so many steps."""

    def __init__(self, after: int, how: str) -> None:
        self.left, self.how = after, how

    def on_step(self, name: str, done: Any) -> None:
        self.left -= 1
        if self.left == 0 and self.how == "raise":
            raise ValueError("enough")
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("after", range(1, 38, 5))
def test_ctrl_c_saves_where_it_stands_and_the_next_call_goes_on_to_the_same_weights(
    after: int, tmp_path: Path
) -> None:
    trials = [trial("a"), trial("b", lr=0.1)]
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, trials, callbacks=[Stop(after, "interrupt")], checkpoint_every="1h").fit()
    done = [r for r in read_journal(tmp_path / "run/journal").records if r["kind"] == "commit"]
    assert done
    seen: list[int] = []

    class Count:
        def on_step(self, name: str, done: Any) -> None:
            seen.append(done.step)

    result = study(tmp_path, trials, callbacks=[Count()]).fit()
    assert len(seen) == 40 - after  # nothing is trained twice
    for one in trials:
        assert digest(result[one.name].state_dict()) == plainly(one)


def test_a_callback_that_raises_ends_the_study_cleanly(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"Stop.on_step raised ValueError: enough"):
        study(tmp_path, [trial("a")], callbacks=[Stop(4, "raise")]).fit()
    result = study(tmp_path, [trial("a")]).fit()
    assert digest(result["a"].state_dict()) == plainly(trial("a"))


class Bomb(torch.nn.Module):
    """Fails in its own way at a forward pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.passes = build(), how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.passes == 7 and self.training and self.how != "never":
            if self.how == "exception":
                raise RuntimeError("user code broke")
            if self.how == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.inner(x) * float("nan")
        return self.inner(x)


class BadRows(Rows):
    def __iter__(self) -> Any:
        for at, batch in enumerate(super().__iter__()):
            if at == 6:
                raise OSError("disk gone")
            yield batch


@pytest.mark.parametrize(
    ("how", "kind"),
    [("exception", "exception"), ("memory", "memory"), ("nan", "nan"), ("loader", "loader")],
)
def test_a_trial_that_fails_leaves_the_others_as_if_it_had_not_been(
    how: str, kind: str, tmp_path: Path
) -> None:
    bad = trial("bad", build=lambda: Bomb(how)) if how != "loader" else trial("bad", data=lambda: BadRows())
    engine = Plain(2)
    result = study(tmp_path, [trial("a"), bad, trial("b", lr=0.1)], engine=engine).fit()
    assert result["bad"].status == TrialStatus.FAILED
    assert result["bad"].error_kind == kind
    assert result["bad"].durable_step == 6
    assert "Traceback" in result["bad"].error
    for name, lr in (("a", 0.01), ("b", 0.1)):
        assert digest(result[name].state_dict()) == plainly(trial(name, lr=lr))
    assert all(runner.closed for runner in engine.opened)


def test_nan_may_be_ignored(tmp_path: Path) -> None:
    result = study(tmp_path, [trial("bad", build=lambda: Bomb("nan"), on_nan="ignore")]).fit()
    assert result["bad"].status == TrialStatus.DONE


def test_a_failed_trial_stays_failed_until_it_is_asked_for_again(tmp_path: Path) -> None:
    bad = trial("a", build=lambda: Bomb("exception"))
    study(tmp_path, [bad]).fit()
    assert study(tmp_path, [trial("a")]).fit()["a"].status == TrialStatus.FAILED
    good = trial("a", build=lambda: Bomb("never"))
    result = study(tmp_path, [good]).fit(retry_failed=True)
    assert result["a"].status == TrialStatus.DONE


def test_data_that_hangs_fails_by_its_timeout(tmp_path: Path) -> None:
    import threading

    never = threading.Event()

    class Hang(Rows):
        def __iter__(self) -> Any:
            yield from list(super().__iter__())[:2]
            never.wait(20)

    result = study(
        tmp_path, [trial("bad", data=lambda: Hang(), max_steps=8), trial("a")], loader_timeout="200ms"
    ).fit()
    never.set()
    assert result["bad"].error_kind == "loader"
    assert "gave no batch within 0.2 s" in result["bad"].error
    assert digest(result["a"].state_dict()) == plainly(trial("a"))


def test_a_damaged_checkpoint_falls_back_on_the_one_before(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, [trial("a")], callbacks=[Stop(14, "interrupt")]).fit()
    folders = sorted((tmp_path / "run/checkpoints/a").iterdir())
    assert len(folders) == 2
    path = folders[-1] / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match=r"trial 'a' continues from step \d+: .*damaged"):
        result = study(tmp_path, [trial("a")]).fit()
    assert digest(result["a"].state_dict()) == plainly(trial("a"))


@pytest.mark.parametrize("how", ["flipped", "short", "no facts", "bad facts"])
def test_weights_of_a_damaged_checkpoint_are_an_error_and_not_other_numbers(how: str, tmp_path: Path) -> None:
    result = study(tmp_path, [trial("a")]).fit()
    folder = result["a"].folder
    assert folder is not None
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[-9] ^= 1
    path.write_bytes(data[:-4] if how == "short" else data)
    if how == "no facts":
        (folder / "facts.json").unlink()
    if how == "bad facts":
        (folder / "facts.json").write_text("{}")
    with pytest.raises(FileError, match=r"damaged|cannot read|not what was"):
        result["a"].state_dict()


def test_with_every_checkpoint_damaged_a_trial_begins_again(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, [trial("a")], callbacks=[Stop(14, "interrupt")]).fit()
    for folder in (tmp_path / "run/checkpoints/a").iterdir():
        (folder / "facts.json").unlink()
    with pytest.warns(
        RuntimeWarning, match=r"trial 'a' (continues from step \d+|begins again): .*facts\.json"
    ):
        result = study(tmp_path, [trial("a")]).fit()
    assert digest(result["a"].state_dict()) == plainly(trial("a"))


def test_a_full_disk_is_said_and_the_next_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from loadmaster.train.disk import checkpoints

    write, calls = checkpoints.write_tensors, [0]

    def full(path: Path, tensors: Any) -> tuple[int, int]:
        calls[0] += 1
        if calls[0] == 8:
            path.write_bytes(b"half")
            raise checkpoints.make_write_error(path, OSError(errno.ENOSPC, "No space left on device"))
        return write(path, tensors)

    monkeypatch.setattr(checkpoints, "write_tensors", full)
    with pytest.raises(DiskFullError, match="free some space"):
        study(tmp_path, [trial("a"), trial("b")]).fit()
    monkeypatch.undo()
    result = study(tmp_path, [trial("a"), trial("b")]).fit()
    assert digest(result["a"].state_dict()) == plainly(trial("a"))


def test_too_little_disk_memory_or_host_memory_is_said_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    small = study(tmp_path, [trial("a")], host_cap="999B")
    assert "needs 1000 B of host memory of 999 B" in small.plan().problems[0]
    with pytest.raises(InputError, match="raise host_cap"):
        small.fit()
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="of 1 B free on disk"):
        study(tmp_path, [trial("a")]).fit()


def test_trials_that_do_not_fit_together_wait_for_room(tmp_path: Path) -> None:
    trials = [trial(name) for name in "abc"]
    engine = Plain(2, sizes=dict.fromkeys("abc", 600))
    peak: list[int] = []

    class Watch:
        def on_step(self, name: str, done: Any) -> None:
            peak.append(sum(not runner.closed for runner in engine.opened))

    result = study(tmp_path, trials, engine=engine, host_cap=1300, callbacks=[Watch()]).fit()
    assert max(peak) == 2
    assert {each.status for each in result.trials} == {TrialStatus.DONE}


def test_two_processes_cannot_use_one_folder(tmp_path: Path) -> None:
    other = study(tmp_path, [trial("a")])
    with lock_folder(tmp_path / "run"), pytest.raises(FileError, match="in use by another process"):
        other.fit()


def test_a_trial_that_changed_is_refused_by_name(tmp_path: Path) -> None:
    study(tmp_path, [trial("a")]).fit()
    with pytest.raises(InputError, match=r"trial 'a' was started with seed = 1 and now has 2"):
        study(tmp_path, [trial("a", seed=2)]).fit()


@pytest.mark.parametrize("num_batches", [8, 12])
def test_data_of_another_length_is_refused_and_not_trained_on_from_the_middle(
    num_batches: int, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, [trial("a")], callbacks=[Stop(7, "interrupt")]).fit()
    with pytest.raises(InputError, match=rf"data for 20 steps and now has {2 * num_batches}"):
        study(tmp_path, [trial("a", num_batches=num_batches)]).fit()
    assert digest(study(tmp_path, [trial("a")]).fit()["a"].state_dict()) == plainly(trial("a"))


def test_a_new_trial_may_join_later(tmp_path: Path) -> None:
    study(tmp_path, [trial("a")]).fit()
    result = study(tmp_path, [trial("a"), trial("b", lr=0.1)]).fit()
    assert digest(result["b"].state_dict()) == plainly(trial("b", lr=0.1))


def test_learning_rate_schedules_resume_where_they_were(tmp_path: Path) -> None:
    one = trial("a", lr_schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, [one], callbacks=[Stop(8, "interrupt")]).fit()
    assert digest(study(tmp_path, [one]).fit()["a"].state_dict()) == plainly(one)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"trials": []}, "at least one trial"),
        ({"trials": [trial("a"), trial("a")]}, "two trials are named 'a'"),
        ({"mode": "best"}, "'min' or 'max'"),
        ({"launcher": "slurm"}, "give one of"),
        ({"checkpoint_every": 0}, "steps from 1 on"),
        ({"memory_cap": "lots"}, "is not a size"),
        ({"callbacks": [object()]}, "has none of the methods"),
    ],
)
def test_bad_studies_are_refused(bad: dict[str, Any], says: str, tmp_path: Path) -> None:
    given = {"trials": [trial("a")], "engine": Plain(), "dir": tmp_path / "run"} | bad
    with pytest.raises(LoadmasterError, match=says):
        Study(given.pop("trials"), **given).fit()


def test_one_iterator_for_ever_is_refused_before_the_start(tmp_path: Path) -> None:
    batches = iter(list(Rows()))
    with pytest.raises(InputError, match="same list_iterator every time"):
        study(tmp_path, [trial("a", data=lambda: batches)]).fit()


def test_result_table_json_and_trace(tmp_path: Path) -> None:
    result = study(tmp_path, [trial("a"), trial("b", lr=0.3)], engine=Plain(2)).fit()
    assert result.best.name == min(result.trials, key=lambda each: each.metrics["loss"]).name
    heads, first, *_ = result.table().splitlines()
    assert heads.split() == ["trial", "status", "step", "loss", "eval", "loss", "tokens/s", "time", "checked"]
    assert first.split()[-2] in ("s", "ms", "us"), "a time has its unit, and no error has no column"
    assert json.loads(json.dumps(result.to_json()))["trials"][0]["step"] == 20
    result.trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 40
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"cpu#0", "cpu#1"}
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in spans)
    with pytest.raises(InputError, match="unknown trial 'c'"):
        result["c"]


def test_loggers_write_a_line_for_every_step_and_go_on_in_the_same_file(tmp_path: Path) -> None:
    loggers = lambda: [JsonlLogger(tmp_path / "l.jsonl"), CsvLogger(tmp_path / "l.csv")]  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, [trial("a")], callbacks=[*loggers(), Stop(8, "interrupt")]).fit()
    study(tmp_path, [trial("a")], callbacks=loggers()).fit()
    rows = [json.loads(line) for line in (tmp_path / "l.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(1, 21))
    assert [row["step"] for row in rows if row["kind"] == "report"] == [5, 10, 15, 20]
    assert len((tmp_path / "l.csv").read_text().splitlines()) == 21


def test_the_plan_prints_and_trains_nothing(tmp_path: Path) -> None:
    engine = Plain()
    plan = study(tmp_path, [trial("a")], engine=engine).plan()
    assert engine.opened == []
    assert "host memory: 1000 B" in str(plan)
    assert dataclasses.is_dataclass(plan)
    assert plan.makespan_s >= plan.bound_s > 0
    assert not (tmp_path / "run").exists()


def test_without_an_evaluation_no_column_repeats_the_loss(tmp_path: Path) -> None:
    from rich.console import Console

    from loadmaster.report.study_table import LiveTable

    mixed = [trial("plain", evaluate=None, eval_every=None), trial("scored")]
    for name, given in (("one", mixed[:1]), ("two", mixed)):
        console = Console(width=200)
        own = study(tmp_path / name, given)
        live = LiveTable(console, own.names, own.evaluated)
        own.callbacks.append(live)
        result = own.fit()
        with console.capture() as seen:
            console.print(live.trials_table())
        line = next(text for text in seen.get().splitlines() if "plain" in text)
        assert "loss" not in line
        assert "eval loss" not in result.rows()[0]
        assert ("eval loss" in result.table()) == (name == "two")
        assert result["plain"].metrics["loss"] == result["plain"].loss


def test_a_study_that_is_done_is_read_again_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = [trial("a")]
    study(tmp_path, one).fit()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    assert study(tmp_path, one).fit()["a"].status == TrialStatus.DONE
    with pytest.raises(InputError, match=r"checkpoints need .* of 100 B free"):
        study(tmp_path, [*one, trial("b", lr=0.1)]).fit()
