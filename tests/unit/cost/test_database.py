"""Measured costs on disk: nothing is lost, whoever writes and whatever happens to the file."""

import json
import sqlite3
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from loadmaster.core.errors import CostError, FileError, FormatError, SchemaError
from loadmaster.cost.database import (
    ENVIRONMENT,
    FILE_NAME,
    SCHEMA_VERSION,
    CostRow,
    default_path,
    open_database,
)
from loadmaster.cost.exchange import export_costs, import_costs
from tests.integration.command_line import Say, ask

ROW = CostRow("aten.mm.default float32[2,2] float32[2,2]", "chip", "2.11", "2026-01-02T00:00:00Z", 1e-3)
WRITER = """
import sys
from loadmaster.cost.database import CostRow, open_database
path, who = sys.argv[1:]
for number in range(60):
    with open_database(path, needed=True, busy_s=30) as database:
        own = CostRow(f"op {who} {number}", "chip", "2.11", "2026-01-02T00:00:00Z", 1e-3 * number)
        shared = CostRow("op shared", "chip", "2.11", f"2026-01-02T00:00:{number % 60:02d}Z", float(number))
        database.put([own, shared])
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "costs.sqlite"


def silence(_: str) -> None:
    raise AssertionError(_)


def test_a_row_is_read_back_as_it_was_put(path: Path) -> None:
    row = replace(ROW, spread=0.25, count=9, issue_s=5e-6)
    failed = replace(ROW, signature="aten.odd.default", seconds=None, reason="RuntimeError: no")
    with open_database(path, tell=silence) as database:
        assert database.put([row, failed]) == 2
    with open_database(path, tell=silence) as database:
        found = database.get([ROW.signature, "aten.odd.default", "unknown"], "chip", "2.11")
        assert found == {ROW.signature: row, "aten.odd.default": failed}
        assert database.devices() == ("chip",)
        assert database.count() == 2


def test_rows_differ_by_signature_device_and_torch_version(path: Path) -> None:
    others = [replace(ROW, device="other"), replace(ROW, torch="2.12"), replace(ROW, signature="s")]
    with open_database(path) as database:
        database.put([ROW, *others])
        assert database.count() == 4
        assert database.get([ROW.signature], "chip", "2.13") == {}
        assert database.count(device="other") == 1


def test_without_a_torch_version_the_latest_row_counts(path: Path) -> None:
    newer = replace(ROW, torch="2.12", date="2026-05-01T00:00:00Z", seconds=2.0)
    with open_database(path) as database:
        database.put([newer, ROW])
        assert database.get([ROW.signature], "chip", None) == {ROW.signature: newer}


def test_of_two_rows_with_one_key_the_later_stays(path: Path) -> None:
    later = replace(ROW, date="2026-02-01T00:00:00Z", seconds=7.0)
    with open_database(path) as database:
        assert database.put([later]) == 1
        assert database.put([ROW]) == 0
        assert database.rows() == [later]


def test_two_processes_at_once_lose_no_row(path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), who], stderr=subprocess.PIPE)
        for who in ("a", "b")
    ]
    for writer in writers:
        _, err = writer.communicate(timeout=120)
        assert writer.returncode == 0, err.decode()
    with open_database(path, tell=silence) as database:
        names = {row.signature for row in database.rows()}
        shared = database.get(["op shared"], "chip", "2.11")["op shared"]
    assert names == {"op shared", *(f"op {who} {number}" for who in "ab" for number in range(60))}
    assert shared.seconds == 59.0  # the latest date


def test_a_broken_file_is_moved_aside_and_said(path: Path) -> None:
    with open_database(path) as database:
        database.put([replace(ROW, signature=f"op {number}") for number in range(500)])
    content = bytearray(path.read_bytes())
    content[4096:12288] = b"\xff" * 8192  # pages of the table
    path.write_bytes(content)
    said: list[str] = []
    with open_database(path, tell=said.append) as database:
        assert database.count() == 0
        database.put([ROW])
    aside = [other for other in path.parent.iterdir() if ".broken-" in other.name]
    assert len(said) == 1
    assert str(aside[0]) in said[0]
    assert aside[0].read_bytes() == bytes(content)
    with open_database(path, tell=silence) as database:
        assert database.count() == 1


def test_a_file_of_a_newer_version_is_moved_aside_and_said(path: Path) -> None:
    with open_database(path) as database:
        database.put([ROW])
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    said: list[str] = []
    with open_database(path, tell=said.append) as database:
        assert database.count() == 0
    assert f"version {SCHEMA_VERSION + 1}" in said[0]
    (aside,) = (other for other in path.parent.iterdir() if f".newer-{SCHEMA_VERSION + 1}-" in other.name)
    with sqlite3.connect(aside) as connection:
        assert connection.execute("SELECT count(*) FROM cost").fetchone() == (1,)
    connection.close()


def test_two_files_moved_aside_in_one_second_both_stay(path: Path) -> None:
    for _ in range(2):
        path.write_bytes(b"SQLite format 3\0 and then nothing")
        with open_database(path, tell=lambda _: None):
            pass
    assert len([other for other in path.parent.iterdir() if ".broken-" in other.name]) == 2


def test_a_locked_file_is_left_alone_and_the_run_goes_on(path: Path) -> None:
    with open_database(path) as database:
        database.put([ROW])
    holder = sqlite3.connect(path)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    said: list[str] = []
    try:
        with pytest.raises(FileError, match="locked by another process"):
            open_database(path, needed=True, busy_s=0.1)
        with open_database(path, tell=said.append, busy_s=0.1) as database:
            assert not database.saves
            database.put([replace(ROW, signature="new")])
            assert database.count() == 1
    finally:
        holder.rollback()
        holder.close()
    assert len(said) == 1
    assert "continues without it" in said[0]
    with open_database(path, tell=silence) as database:
        assert [row.signature for row in database.rows()] == [ROW.signature]


def test_a_file_that_was_never_ours_is_refused_and_untouched(path: Path) -> None:
    path.write_text("my notes")
    with pytest.raises(FormatError, match="not a cost database"):
        open_database(path)
    assert path.read_text() == "my notes"
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    connection.close()
    with pytest.raises(FormatError, match="another program"):
        open_database(path)
    assert list(path.parent.iterdir()) == [path]


def test_a_default_file_that_cannot_be_made_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loadmaster").write_text("a file where the folder should be")
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    with open_database(tell=said.append) as database:
        assert not database.saves
    assert len(said) == 1
    with pytest.raises(FileError, match="cannot be used"):
        open_database(needed=True)
    with pytest.raises(FileError, match="is a folder"):
        open_database(tmp_path)


def test_the_place_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "loadmaster" / FILE_NAME
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "mine.sqlite"))
    assert default_path() == tmp_path / "mine.sqlite"


def test_a_message_without_a_listener_is_a_warning(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0 and then nothing")
    with pytest.warns(UserWarning, match="moved to"), open_database(path):
        pass


def test_exported_rows_are_imported_as_they_were(path: Path, tmp_path: Path) -> None:
    rows = [ROW, replace(ROW, device="other", seconds=None, reason="no")]
    with open_database(path) as database:
        database.put(rows)
        assert export_costs(database, tmp_path / "all.json") == 2
        assert export_costs(database, tmp_path / "one.json.gz", device="other") == 1
    with open_database(tmp_path / "second.sqlite") as database:
        assert import_costs(database, tmp_path / "all.json") == (2, 2)
        assert import_costs(database, tmp_path / "one.json.gz") == (1, 1)  # as late as its own
        assert sorted(database.rows(), key=lambda row: row.device) == rows


@pytest.mark.parametrize(
    ("content", "error", "match"),
    [
        ("{", FormatError, "holds no measured costs"),
        ("[" * 100_000, FormatError, "holds no measured costs"),
        ('{"loadmaster": "graph", "schema": 1, "rows": []}', SchemaError, "'graph'"),
        ('{"loadmaster": "measured costs", "schema": 9, "rows": []}', SchemaError, "version 9"),
        ('{"loadmaster": "measured costs", "schema": 1, "rows": [3]}', FormatError, "rows"),
        ({"seconds": -1.0}, CostError, "row 0: seconds is -1"),
        ({"seconds": 1e400}, FormatError, "no measured costs"),
        ({"count": -1}, CostError, "count is -1"),
        ({"signature": ""}, CostError, "are needed"),
        ({"signature": "x" * 5000}, CostError, "at most 4096"),
        ({"device": "a\0b"}, CostError, "NUL"),
        ({"seconds": "fast"}, FormatError, "seconds"),
    ],
)
def test_bad_documents_are_refused_whole(
    path: Path, tmp_path: Path, content: object, error: type[Exception], match: str
) -> None:
    if isinstance(content, dict):
        rows = [{**asdict(ROW), **content}]
        text = json.dumps({"loadmaster": "measured costs", "schema": 1, "rows": rows})
        content = text.replace("Infinity", "1e400")
    (tmp_path / "bad.json").write_text(str(content))
    with open_database(path) as database:
        with pytest.raises(error, match=match):
            import_costs(database, tmp_path / "bad.json")
        assert database.count() == 0


def test_the_command_line_lists_exports_and_imports(path: Path, say: Say) -> None:
    with open_database(path) as database:
        database.put([ROW])
    at = ["--database", str(path)]
    listed = ask(say, "costs", "ls", *at)
    assert listed["devices"] == {"chip": 1}
    assert listed["rows"] == [asdict(ROW)]
    assert "aten.mm.default" in say("costs", "ls", *at)[1]
    assert say("costs", "export", "c.json", *at)[0] == 0
    assert ask(say, "costs", "import", "c.json", "--database", "new.sqlite")["num_changed"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "--database", "."], "is a folder"),
        (["ls", "--limit", "-1"], "--limit is -1"),
        (["ls", "--device", "nothing"], "unknown device 'nothing'"),
        (["export", "nowhere/c.json"], "there is no folder"),
        (["import", "missing.json"], "cannot read missing.json"),
        ([], "Missing command"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    say: Say, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "own.sqlite")
    code, _, err = say("costs", *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
