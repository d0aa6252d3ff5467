"""Nothing on disk is deleted but what this program wrote and the journal supersedes."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadmaster.core.errors import FileError, InputError
from loadmaster.train.coordination.searchers import SuccessiveHalving
from loadmaster.train.disk.journal import Journal, read_journal
from loadmaster.train.study import Study
from tests.train.plain_engine import Plain
from tests.train.small_trials import digest, plainly, trial
from tests.train.study.test_study import Stop


def study(folder: Path, **options: Any) -> Study:
    given = {"engine": Plain(), "launcher": "inline", "checkpoint_every": 3}
    return Study([trial("a"), trial("b", lr=0.1)], dir=folder, **(given | options))


def interrupted(folder: Path, after: int = 23) -> None:
    with pytest.raises(KeyboardInterrupt):
        study(folder, callbacks=[Stop(after, "interrupt")]).fit()


def files(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*")}


WANTED = [plainly(one) for one in (trial("a"), trial("b", lr=0.1))]


def weights(result: Any) -> list[str]:
    return [digest(each.state_dict()) for each in result.trials]


def test_files_of_others_in_the_folder_of_a_trial_stay(tmp_path: Path) -> None:
    interrupted(tmp_path)
    root = tmp_path / "checkpoints"
    newest = max(each for each in (root / "a").iterdir())
    mine = [root / "a/notes.txt", root / "a/best/model.bin", root / "a/00000001-copy/x", newest / "eval.json"]
    for each in mine:
        each.parent.mkdir(exist_ok=True)
        each.write_text("mine")
    (root / ".backbones").mkdir()
    (root / ".backbones/README").write_text("mine")
    assert weights(study(tmp_path).fit()) == WANTED
    assert all(each.read_text() == "mine" for each in [*mine, root / ".backbones/README"])


@pytest.mark.parametrize("how", ["deleted", "emptied"])
def test_a_lost_journal_is_refused_and_nothing_is_deleted(how: str, tmp_path: Path) -> None:
    interrupted(tmp_path)
    journal = tmp_path / "journal"
    journal.unlink() if how == "deleted" else journal.write_bytes(b"")
    before = files(tmp_path / "checkpoints")
    for _ in range(2):
        with pytest.raises(FileError, match=r"checkpoint of step \d+ of trial 'a' .*adopt_checkpoints=True"):
            study(tmp_path).fit()
    assert files(tmp_path / "checkpoints") == before


def test_checkpoints_without_a_journal_are_adopted_and_end_in_the_same_weights(tmp_path: Path) -> None:
    interrupted(tmp_path)
    (tmp_path / "journal").unlink()
    engine = Plain()
    with pytest.warns(RuntimeWarning, match="continues from its checkpoint of step"):
        result = study(tmp_path, engine=engine).fit(adopt_checkpoints=True)
    assert weights(result) == WANTED
    trained = [r["step"] for r in read_journal(tmp_path / "journal").records if r["kind"] == "commit"]
    assert min(trained) > 3  # nobody began again
    assert weights(study(tmp_path).fit()) == WANTED


def test_a_journal_put_back_from_an_older_copy_deletes_nothing(tmp_path: Path) -> None:
    interrupted(tmp_path, after=5)
    old = (tmp_path / "journal").read_bytes()
    interrupted(tmp_path, after=18)
    (tmp_path / "journal").write_bytes(old)
    before = files(tmp_path / "checkpoints")
    with pytest.raises(FileError, match="does not list"):
        study(tmp_path).fit()
    assert files(tmp_path / "checkpoints") == before
    with pytest.warns(RuntimeWarning, match="did not list"):
        assert weights(study(tmp_path).fit(adopt_checkpoints=True)) == WANTED


def test_a_journal_cut_before_its_commits_deletes_nothing(tmp_path: Path) -> None:
    study(tmp_path).fit()
    lines = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    kinds = [record["kind"] for record in read_journal(tmp_path / "journal").records]
    (tmp_path / "journal").write_bytes(b"".join(lines[: kinds.index("commit") + 1]))
    with pytest.raises(FileError, match="does not list"):
        study(tmp_path).fit()


def test_what_a_crash_left_unfinished_is_still_deleted(tmp_path: Path) -> None:
    interrupted(tmp_path)
    root = tmp_path / "checkpoints/a"
    newest = max(root.iterdir())
    generation, fence = (int(part) for part in newest.name.split("-"))
    left = root / f"{generation + 1:08d}-{fence + 1}"
    shutil.copytree(newest, left)
    assert weights(study(tmp_path).fit()) == WANTED
    assert not left.exists()


def test_checkpoints_are_not_adopted_under_a_searcher_whose_reports_are_lost(tmp_path: Path) -> None:
    interrupted(tmp_path)
    (tmp_path / "journal").unlink()
    with pytest.raises(InputError, match="SuccessiveHalving were lost with the journal"):
        study(tmp_path, searcher=SuccessiveHalving()).fit(adopt_checkpoints=True)


@pytest.mark.slow
def test_the_command_line_adopts_checkpoints(tmp_path: Path) -> None:
    interrupted(tmp_path / "run")
    (tmp_path / "run/journal").unlink()
    source = tmp_path / "mine.py"
    source.write_text(
        "from pathlib import Path\nfrom tests.train.disk.test_lost_journal import study as make\n"
        f"study = lambda: make(Path({str(tmp_path / 'run')!r}))\n"
    )
    command = [sys.executable, "-m", "loadmaster", "train", f"{source}:study", "--json"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert "--adopt-checkpoints" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = subprocess.run([*command, "--adopt-checkpoints"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_an_empty_journal_beside_no_checkpoints_is_a_new_study(tmp_path: Path) -> None:
    Journal(tmp_path / "journal").close()
    (tmp_path / "checkpoints/a").mkdir(parents=True)
    assert weights(study(tmp_path).fit()) == WANTED
