"""CostDatabase: measured seconds of ops, kept between runs in one SQLite file.

A row is keyed by what was measured: signature (op + shapes + dtypes), device (the chip's own name, for a CPU
with its threads) and torch version. It holds the seconds and spread of `count` timings, the host's time to
launch the op, the day, and whether the machine was calm or busy with other work then; or the reason why the
op could not be run on its own, so that it is not tried again. A row of a busy moment never replaces one of a
calm moment; of two busy ones the quicker stays, since other work only ever adds. Rows of databases that did
not watch the machine say nothing of their moment; they count as less than calm ones and more than busy ones.
Several processes may read and write at once: SQLite's write-ahead log and its locks see to that.

What cannot be read is never deleted: a broken file, or one of a newer Loadmaster, is renamed and said so; one
that stays locked is left alone and this run goes on without it. A file that was never ours is refused.
"""

import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from loadmaster.core.errors import FileError, FormatError
from loadmaster.cost.busy_machine import BUSY, CALM, UNKNOWN

SCHEMA_VERSION = 2  # 2: `moment`
FILE_NAME = "costs.sqlite"
ENVIRONMENT = "LOADMASTER_COSTS"  # names another file than the default one
IN_MEMORY = ":memory:"
BUSY_S = 5.0
_APPLICATION = 0x4C4D4353  # 'LMCS' in the header of our files
_HEADER = b"SQLite format 3\0"
_FILES = ("", "-wal", "-shm")
_CREATE = """CREATE TABLE IF NOT EXISTS cost (
    signature TEXT NOT NULL, device TEXT NOT NULL, torch TEXT NOT NULL, date TEXT NOT NULL,
    seconds REAL, spread REAL NOT NULL, count INTEGER NOT NULL, issue_s REAL NOT NULL, reason TEXT NOT NULL,
    moment TEXT NOT NULL DEFAULT '', PRIMARY KEY (signature, device, torch)) WITHOUT ROWID"""
_RANK = f"CASE {{row}}.moment WHEN '{CALM}' THEN 2 WHEN '{UNKNOWN}' THEN 1 ELSE 0 END"
_REPLACES = f"""{_RANK.format(row="excluded")} > {_RANK.format(row="cost")}
    OR {_RANK.format(row="excluded")} = {_RANK.format(row="cost")} AND excluded.date >= cost.date
    AND (excluded.moment != '{BUSY}' OR cost.seconds IS NULL OR excluded.seconds <= cost.seconds)"""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CostRow:
    """One op on one device, as it was measured."""

    signature: str
    device: str  # 'NVIDIA H200', 'AMD EPYC 7313, 16 threads'
    torch: str  # version
    date: str  # '2026-11-15T12:30:00Z'
    seconds: float | None  # lower quartile; None: it could not be run on its own
    spread: float = 0.0  # half the distance between the quartiles (or repeats), relative to the seconds
    count: int = 0  # timings behind them
    issue_s: float = 0.0  # host time to launch it, 0 where the host runs it
    reason: str = ""  # why seconds is None
    moment: str = CALM  # or BUSY: other work disturbed it; UNKNOWN: nobody watched


COLUMNS = tuple(field.name for field in fields(CostRow))


def default_path() -> Path:
    """`$LOADMASTER_COSTS`, else a file in the user's cache folder."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "loadmaster" / FILE_NAME


def today() -> str:
    """Now, as rows write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


class CostDatabase:
    """An open database; use it in a `with`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, *, saves: bool = True) -> None:
        self.path = path
        self.saves = saves  # False: what is put is gone with the process
        self._connection = connection

    def __enter__(self) -> "CostDatabase":
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closed, whatever happened."""
        self._connection.close()

    def get(self, signatures: Iterable[str], device: str, torch: str | None) -> dict[str, CostRow]:
        """The rows of these signatures on a device; without a torch version, the latest of any."""
        query = f"SELECT {', '.join(COLUMNS)} FROM cost WHERE signature = ? AND device = ?"
        query += " AND torch = ?" if torch is not None else " ORDER BY date"
        found: dict[str, CostRow] = {}
        for signature in signatures:
            given = (signature, device) if torch is None else (signature, device, torch)
            for values in self._execute(query, given):
                found[signature] = CostRow(*values)
        return found

    def devices(self) -> tuple[str, ...]:
        """The names of all devices that were measured."""
        return tuple(name for (name,) in self._execute("SELECT DISTINCT device FROM cost ORDER BY device"))

    def rows(self, *, device: str | None = None, limit: int = -1) -> list[CostRow]:
        """All rows, or those of one device, in the order of their keys."""
        query = f"SELECT {', '.join(COLUMNS)} FROM cost {'WHERE device = ?' if device is not None else ''}"
        query += f" ORDER BY device, signature, torch LIMIT {int(limit)}"
        return [CostRow(*values) for values in self._execute(query, () if device is None else (device,))]

    def count(self, *, device: str | None = None) -> int:
        """How many rows there are."""
        where, given = ("", ()) if device is None else (" WHERE device = ?", (device,))
        return int(self._execute(f"SELECT count(*) FROM cost{where}", given)[0][0])

    def put(self, rows: Iterable[CostRow]) -> int:
        """Add or renew rows, all or none; gives how many changed.

        Of two with one key that of the calmer moment stays, else the later one.
        """
        names, marks = ", ".join(COLUMNS), ", ".join("?" * len(COLUMNS))
        renewed = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS[3:])
        query = (
            f"INSERT INTO cost ({names}) VALUES ({marks}) ON CONFLICT (signature, device, torch)"
            f" DO UPDATE SET {renewed} WHERE {_REPLACES}"
        )
        before = self._connection.total_changes
        try:
            with self._connection:  # one transaction
                self._connection.executemany(query, [astuple(row) for row in rows])
        except (sqlite3.Error, OverflowError) as problem:
            raise self._trouble(problem) from None
        return self._connection.total_changes - before

    def _execute(self, query: str, given: Sequence[str] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, given).fetchall()
        except sqlite3.Error as problem:
            raise self._trouble(problem) from None

    def _trouble(self, problem: Exception) -> FileError:
        return FileError(f"cost database {self.path}: {problem}; try again, or name another with --database")


def open_database(
    path: str | os.PathLike[str] | None = None,
    *,
    tell: Tell = _warn,
    needed: bool = False,
    busy_s: float = BUSY_S,
) -> CostDatabase:
    """The database at a path, made if it is not there; None is the default place.

    `needed`: raise where the file cannot be used. Otherwise the default file is only a cache: what stands in
    its way is told, and this run keeps its measurements in memory.
    """
    place = Path(path) if path is not None else default_path()
    try:
        return _open_or_replace(place, tell, named=path is not None, busy_s=busy_s)
    except FileError as problem:
        if needed or (path is not None and not isinstance(problem, _Locked)):
            raise
        tell(f"{problem}; this run continues without it and saves no measured costs")
        return CostDatabase(place, _create_table(sqlite3.connect(IN_MEMORY)), saves=False)


class _Locked(FileError):  # noqa: N818
    """Another process holds the file."""


def _open_or_replace(place: Path, tell: Tell, *, named: bool, busy_s: float) -> CostDatabase:
    for last in (False, True):
        try:
            _require_ours(place, named=named)
            place.parent.mkdir(parents=True, exist_ok=True)
            return CostDatabase(place, _connect(place, busy_s))
        except _NewerSchema as problem:
            _move_aside(place, f"newer-{problem.version}", str(problem), tell)
        except sqlite3.DatabaseError as problem:
            _raise_if_not_broken(place, problem, busy_s=busy_s)
            if last:
                raise FileError(f"cost database {place} cannot be created: {problem}") from None
            _move_aside(place, "broken", f"cost database {place} is broken ({problem})", tell)
        except (OSError, ValueError) as problem:  # ValueError: a NUL in the name
            if isinstance(problem, FileError):
                raise
            raise FileError(
                f"cost database {place} cannot be used: {getattr(problem, 'strerror', None) or problem}"
            ) from None
    raise FileError(f"cost database {place} is newer than this Loadmaster even after it was moved aside")


class _NewerSchema(Exception):  # noqa: N818
    def __init__(self, place: Path, version: int) -> None:
        super().__init__(
            f"cost database {place} has version {version}, this Loadmaster knows up to {SCHEMA_VERSION}"
        )
        self.version = version


def _require_ours(place: Path, *, named: bool) -> None:
    """A file that somebody named and that is no SQLite file is not ours to move."""
    if place.is_dir():
        raise FileError(f"cost database {place} is a folder; name a file")
    if named and place.exists() and place.stat().st_size:
        with place.open("rb") as file:
            begin = file.read(len(_HEADER))
        if begin != _HEADER:
            raise FormatError(
                f"{place} begins with {begin!r}, so it is not a cost database; name another file"
            )


def _connect(place: Path, busy_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(place, timeout=busy_s)
    try:
        version, application = (
            int(connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("user_version", "application_id")
        )
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master")]
        if tables and application != _APPLICATION:
            raise FormatError(f"{place} is the database of another program; name another file")
        if version > SCHEMA_VERSION:
            raise _NewerSchema(place, version)
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        return _create_table(connection)
    except BaseException:
        connection.close()
        raise


def _create_table(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Our table, in a file that many may read while one writes."""
    with suppress(sqlite3.OperationalError):  # some file systems have no shared memory: the old journal does
        connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    if int(connection.execute("PRAGMA application_id").fetchone()[0]) != _APPLICATION:
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_CREATE)
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    _add_moment(connection)
    connection.execute("SELECT signature, moment FROM cost LIMIT 1")
    return connection


def _add_moment(connection: sqlite3.Connection) -> None:
    """What version 1 lacks; another process may be doing the same."""
    if int(connection.execute("PRAGMA user_version").fetchone()[0]) >= SCHEMA_VERSION:
        return
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        if "moment" not in [name for _, name, *_ in connection.execute("PRAGMA table_info(cost)")]:
            connection.execute("ALTER TABLE cost ADD COLUMN moment TEXT NOT NULL DEFAULT ''")
            connection.execute(f"UPDATE cost SET moment = '{CALM}' WHERE seconds IS NULL")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _raise_if_not_broken(place: Path, problem: sqlite3.DatabaseError, *, busy_s: float) -> None:
    """Locked and unwritable files are whole; nothing is to be moved."""
    text = str(problem)
    if "locked" in text or "busy" in text:
        raise _Locked(f"cost database {place} has been locked by another process for {busy_s:g} s") from None
    if isinstance(problem, sqlite3.OperationalError) and "no such" not in text:
        raise FileError(f"cost database {place} cannot be used: {text}") from None


def _move_aside(place: Path, word: str, message: str, tell: Tell) -> None:
    """Rename the file and its journals, under a name that is free."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    number = 0
    while os.path.lexists(aside := f"{place}.{word}-{stamp}{f'-{number}' if number else ''}"):
        number += 1
    try:
        for ending in _FILES:
            if os.path.lexists(f"{place}{ending}"):
                os.replace(f"{place}{ending}", f"{aside}{ending}")
    except OSError as problem:
        raise FileError(
            f"{message} and cannot be moved aside: {problem.strerror}; name another with --database"
        ) from None
    tell(f"{message}; moved to {aside}; a new database is used")
