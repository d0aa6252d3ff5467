"""The journal of a study: what happened, in order, in a file that survives being killed at any byte.

    8 hex digits of CRC-32, a space, JSON {"seq": 17, "kind": "step", ...}, a newline

Records are appended. Those that must hold before they take effect (a report with its decision, a commit of
a checkpoint, a failure, an end) are followed by fsync; steps are not. A file that ends in the middle of a
record, or in damaged ones, is cut back to the last good record when it is opened. Damage with good records
after it is not a torn tail: it is said, and nothing is cut.
"""

import errno
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loadmaster.core.errors import FileError, FormatError

DURABLE = frozenset({"study", "trial", "report", "release", "commit", "fail", "done", "change"})
Record = dict[str, Any]  # "seq", "kind" and what belongs to the kind
_CRC_DIGITS = 8


class JournalError(FormatError):
    """A journal is damaged before its end, or is not a journal."""


class DiskFullError(FileError):
    """Nothing more can be written; what was written before is whole."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The good records of a file, and where they end."""

    records: tuple[Record, ...]
    num_good_bytes: int
    num_cut_bytes: int  # torn or damaged at the end


def read_journal(path: Path) -> Replay:
    """Every good record; a torn or damaged tail is left out, damage before good records is an error."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Replay((), 0, 0)
    except OSError as problem:
        raise FileError(f"cannot read {path}: {problem.strerror or problem}") from None
    records: list[Record] = []
    good = 0
    while good < len(data):
        end = data.find(b"\n", good)
        record = _parse_record(data[good:end]) if end >= 0 else None
        if record is None or record["seq"] != len(records):
            break
        records.append(record)
        good = end + 1
    follow = sum(_parse_record(line) is not None for line in data[good:].split(b"\n")[1:])
    if follow:
        raise JournalError(
            f"{path} is damaged at byte {good}: record {len(records)} is bad but {follow} good ones follow;"
            " this is not an interrupted write: restore the file from a copy, or use another folder"
        )
    return Replay(tuple(records), good, len(data) - good)


def _parse_record(line: bytes) -> Record | None:
    """The record of a line, or None where it is not what was written."""
    head, body = line[:_CRC_DIGITS], line[_CRC_DIGITS + 1 :]
    if line[_CRC_DIGITS : _CRC_DIGITS + 1] != b" " or head != _crc(body):
        return None
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) and type(found.get("seq")) is int else None


def _crc(body: bytes) -> bytes:
    return f"{zlib.crc32(body):08x}".encode()


class Journal:
    """Appends to the journal of a folder; opening it cuts a torn tail."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replay = read_journal(path)
        self._seq = len(self.replay.records)
        self._good = self.replay.num_good_bytes
        try:
            fresh = not path.exists()
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if self.replay.num_cut_bytes:
                os.ftruncate(self._file, self._good)
                os.fsync(self._file)
            os.lseek(self._file, self._good, os.SEEK_SET)
            if fresh:
                sync_folder(path.parent)
        except OSError as problem:
            raise FileError(f"cannot write {path}: {problem.strerror or problem}") from None

    def append(self, kind: str, **facts: Any) -> Record:
        """Write a record; one of a durable kind is on disk when this returns."""
        record: Record = {"seq": self._seq, "kind": kind, **facts}
        body = msgspec.json.encode(record)
        line = _crc(body) + b" " + body + b"\n"
        try:
            self._write(line)
            if kind in DURABLE:
                os.fsync(self._file)
        except OSError as problem:
            self._cut_partial_write()
            raise make_write_error(self.path, problem) from None
        self._seq += 1
        self._good += len(line)
        return record

    def _write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._file, line) :]

    def _cut_partial_write(self) -> None:
        """Cut what was half written, so that the file ends in a whole record even without a restart."""
        os.ftruncate(self._file, self._good)
        os.lseek(self._file, self._good, os.SEEK_SET)

    def sync(self) -> None:
        """Put everything appended so far on disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def make_write_error(path: Path, problem: OSError) -> FileError:
    """The error of a write that failed: the disk is full, or something else is wrong."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFullError(
            f"cannot write {path}: {problem.strerror}; what was saved before is whole:"
            " free some space and run the study again; it continues from there"
        )
    return FileError(f"cannot write {path}: {problem.strerror or problem}; what was saved before is whole")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
