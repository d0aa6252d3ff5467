"""The journal: every record whole or cut, damage found wherever it is, a full disk said."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from loadmaster.train.disk.journal import DURABLE, DiskFullError, Journal, JournalError, read_journal


def written(path: Path, num: int = 6) -> bytes:
    journal = Journal(path)
    for at in range(num):
        journal.append("step", trial="a/ä", at=at, loss=0.25 * at)
    journal.close()
    return path.read_bytes()


def test_records_come_back_in_order_with_their_numbers(tmp_path: Path) -> None:
    written(tmp_path / "j")
    records = read_journal(tmp_path / "j").records
    assert [r["seq"] for r in records] == list(range(6))
    assert records[3] == {"seq": 3, "kind": "step", "trial": "a/ä", "at": 3, "loss": 0.75}


def test_a_file_cut_at_any_byte_replays_exactly_the_whole_records_before(tmp_path: Path) -> None:
    data = written(tmp_path / "j")
    for length in range(len(data)):
        (tmp_path / "cut").write_bytes(data[:length])
        whole = data[:length].count(b"\n")
        journal = Journal(tmp_path / "cut")
        assert len(journal.replay.records) == whole
        journal.append("step", at=99)  # goes on after the last whole one
        journal.close()
        again = read_journal(tmp_path / "cut")
        assert [r["at"] for r in again.records] == [*range(whole), 99]
        assert again.num_cut_bytes == 0


def test_every_flipped_bit_of_the_last_record_is_found_and_cut(tmp_path: Path) -> None:
    data = written(tmp_path / "j", 3)
    start = data.rstrip(b"\n").rindex(b"\n") + 1
    for at in range(start, len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            (tmp_path / "bad").write_bytes(bad)
            assert len(read_journal(tmp_path / "bad").records) == 2


def test_a_flipped_bit_before_good_records_is_an_error_and_nothing_is_cut(tmp_path: Path) -> None:
    data = written(tmp_path / "j")
    last = data.rstrip(b"\n").rindex(b"\n") + 1
    for at in range(0, last - 1, 7):
        bad = bytearray(data)
        bad[at] ^= 4
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(JournalError, match="damaged"):
            Journal(tmp_path / "bad")
        assert (tmp_path / "bad").read_bytes() == bytes(bad)


def test_a_tail_of_zeros_as_a_crashed_file_system_leaves_it_is_cut(tmp_path: Path) -> None:
    data = written(tmp_path / "j")
    (tmp_path / "j").write_bytes(data + bytes(4096))
    assert len(read_journal(tmp_path / "j").records) == 6


def test_a_record_out_of_sequence_is_not_taken(tmp_path: Path) -> None:
    lines = written(tmp_path / "j").splitlines(keepends=True)
    (tmp_path / "j").write_bytes(b"".join(lines[:3] + lines[4:5]))
    assert len(read_journal(tmp_path / "j").records) == 3


@pytest.mark.parametrize("kind", ["step", "commit", "report", "done"])
def test_what_must_hold_is_on_disk_before_append_returns(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j")
    calls: list[str] = []
    write, sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda *a: (calls.append("write"), write(*a))[1])
    monkeypatch.setattr(os, "fsync", lambda *a: (calls.append("fsync"), sync(*a))[1])
    journal.append(kind, trial="a")
    assert calls == (["write", "fsync"] if kind in DURABLE else ["write"])


def test_a_full_disk_is_said_and_leaves_whole_records_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j")
    journal.append("step", at=0)
    write = os.write

    def half(handle: int, data: Any) -> int:
        if len(data) > 60:
            return write(handle, data[:60])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(DiskFullError, match="free some space"):
        journal.append("commit", at=1, more="x" * 100)
    monkeypatch.undo()
    assert read_journal(tmp_path / "j").num_cut_bytes == 0
    journal.append("commit", at=2)  # there is room again
    assert [r["at"] for r in read_journal(tmp_path / "j").records] == [0, 2]
