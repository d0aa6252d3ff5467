"""The state of a study: how far every trial is, according to the journal.

The state is a fold over the records: the same `apply` runs when a record is written and when it is replayed,
so that a study which goes on after a crash stands where the journal says, and nowhere else.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loadmaster.core.errors import InputError
from loadmaster.train.coordination.result import TrialStatus
from loadmaster.train.coordination.searchers import Decision
from loadmaster.train.disk.checkpoints import FENCES_OF_A_RUN, SavedCheckpoint
from loadmaster.train.disk.journal import Journal, JournalError, Record

# What a record of each kind holds; one that may be None may also be absent. Others are passed over.
_FIELDS: dict[str, dict[str, Any]] = {
    "study": {"run": int},
    "trial": {"trial": str, "facts": dict[str, Any], "num_steps": int},
    "turn": {
        "trial": str,
        "step": int,
        "loss": float | None,
        "seconds": float,
        "num_tokens": int,
        "verified": str | None,
    },
    "commit": {
        "trial": str,
        "generation": int,
        "fence": int,
        "step": int,
        "crc": int,
        "seconds": float | None,
        "num_tokens": int | None,
    },
    "uncommit": {"trial": str, "generation": int},
    "report": {
        "trial": str,
        "step": int,
        "metrics": dict[str, float | bool | None],
        "decision": Decision,
        "asked": bool,
    },
    "release": {"trial": str, "decision": Decision},
    "fail": {"trial": str, "error": str, "error_kind": str},
    "retry": {"trial": str},
    "done": {"trial": str, "status": TrialStatus, "step": int},
}
ENDED = (TrialStatus.DONE, TrialStatus.STOPPED, TrialStatus.FAILED)


@dataclass
class TrialEntry:
    """One trial, as recorded."""

    name: str
    facts: dict[str, Any]
    num_steps: int
    status: TrialStatus = TrialStatus.WAITING
    step: int = 0
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    num_tokens: int = 0
    error: str = ""
    error_kind: str = ""
    committed: list[SavedCheckpoint] = field(default_factory=list)
    reports: dict[int, tuple[dict[str, float], Decision]] = field(default_factory=dict)
    paused_at: int | None = None
    verified: str = ""  # what the comparison of its first step with the plain model said
    is_to_stop: bool = False  # decided, but its end is not recorded yet

    @property
    def durable_step(self) -> int:
        """Where it would go on after a crash."""
        return self.committed[-1].step if self.committed else 0


class StudyState:
    """All trials, and the journal that says so."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.entries: dict[str, TrialEntry] = {}
        self.reports: list[Record] = []  # in the order they came, for the searcher
        self.num_runs = 0
        self._at_commit: dict[str, tuple[float, int]] = {}
        for record in journal.replay.records:
            self._require_whole(record)
            self.apply(record)
        for entry in self.entries.values():
            self.rewind(entry.name)

    def _require_whole(self, record: Record) -> None:
        """Refuse a record that was not damaged, since its check sum is right, but that we do not write."""
        kind = record.get("kind")
        fields = _FIELDS.get(kind) if isinstance(kind, str) else None
        where = f"{self._journal.path}: record {record['seq']}"
        remedy = "it was written by another version or changed by hand; use another folder"
        if fields is None:
            if isinstance(kind, str) and "trial" not in record:
                return  # of the study as a whole: nothing is made of it
            raise JournalError(f"{where} is of kind {str(kind)[:40]!r}, which is not known; {remedy}")
        for name, wanted in fields.items():
            try:
                msgspec.convert(record.get(name), wanted)
            except msgspec.ValidationError as problem:
                raise JournalError(f"{where}, a {kind}, has a wrong {name!r}: {problem}; {remedy}") from None
        if kind not in ("study", "trial") and record["trial"] not in self.entries:
            raise JournalError(f"{where} is of trial {record['trial'][:80]!r}, which was not begun; {remedy}")

    def note(self, kind: str, **facts: Any) -> None:
        """Write a record, then let it count."""
        self.apply(self._journal.append(kind, **facts))

    def enter(self, name: str, facts: dict[str, Any], num_steps: int, *, retry: bool = False) -> TrialEntry:
        """Take a trial in, or find it; one that has changed is refused by the first fact that differs."""
        entry = self.entries.get(name)
        if entry is not None and entry.status == TrialStatus.FAILED and not entry.num_steps and not retry:
            return entry  # it could not even be planned, and is not to be tried again
        if entry is None or not entry.num_steps:
            self.note("trial", trial=name, facts=facts, num_steps=num_steps)
            return self.entries[name]
        for key, value in facts.items():
            if key in entry.facts and entry.facts[key] != value:
                raise InputError(
                    f"trial {name!r} was started with {key} = {entry.facts.get(key)!r} and now has {value!r};"
                    " give it another name, or the study another dir"
                )
        if entry.num_steps != num_steps:
            raise InputError(
                f"trial {name!r} was started with data for {entry.num_steps} steps and now has {num_steps};"
                " give it another name, the study another dir, or back the batches it had"
            )
        return entry

    def fail_unplanned(self, name: str, *, error_kind: str, error: str) -> None:
        """A trial that could not be planned this time has failed; how long it is may not be known."""
        if name not in self.entries:
            self.note("trial", trial=name, facts={}, num_steps=0)
        entry = self.entries[name]
        if entry.status not in ENDED:
            self.note("fail", trial=name, error_kind=error_kind, error=error, step=entry.step)

    def apply(self, record: Record) -> None:
        """Let a record count."""
        kind = record["kind"]
        if kind not in _FIELDS:
            return
        if kind == "trial":
            name = record["trial"]
            self.entries[name] = TrialEntry(name, record["facts"], record["num_steps"])
        elif kind == "study":
            self.num_runs = record["run"]
        else:
            entry = self.entries[record["trial"]]
            getattr(self, f"_{kind}")(entry, record)

    def _turn(self, entry: TrialEntry, record: Record) -> None:
        entry.status, entry.step, entry.loss = TrialStatus.RUNNING, record["step"], record.get("loss")
        entry.seconds += record["seconds"]
        entry.num_tokens += record["num_tokens"]
        entry.verified = record.get("verified") or entry.verified

    def _commit(self, entry: TrialEntry, record: Record) -> None:
        saved = SavedCheckpoint(
            entry.name, record["generation"], record["fence"], record["step"], record["crc"]
        )
        entry.committed.append(saved)
        seconds, num_tokens = record.get("seconds"), record.get("num_tokens")
        self._at_commit[entry.name] = (
            entry.seconds if seconds is None else seconds,
            entry.num_tokens if num_tokens is None else num_tokens,
        )

    def _uncommit(self, entry: TrialEntry, record: Record) -> None:
        entry.committed = [each for each in entry.committed if each.generation != record["generation"]]

    def _report(self, entry: TrialEntry, record: Record) -> None:
        decision = Decision(record["decision"])
        entry.is_to_stop = decision == Decision.STOP
        record = record | {"metrics": {k: math.nan if v is None else v for k, v in record["metrics"].items()}}
        entry.metrics = record["metrics"]  # JSON has no NaN
        entry.reports[record["step"]] = entry.metrics, decision
        self.reports.append(record)
        if decision == Decision.PAUSE:
            entry.paused_at = record["step"]

    def _release(self, entry: TrialEntry, record: Record) -> None:
        entry.paused_at = None
        entry.is_to_stop = record["decision"] == Decision.STOP
        self.reports.append(record)

    def _fail(self, entry: TrialEntry, record: Record) -> None:
        entry.status, entry.error, entry.error_kind = (
            TrialStatus.FAILED,
            record["error"],
            record["error_kind"],
        )
        self.reports.append(record)

    def _retry(self, entry: TrialEntry, record: Record) -> None:
        entry.status, entry.error, entry.error_kind = TrialStatus.WAITING, "", ""
        self.reports.append(record)

    def _done(self, entry: TrialEntry, record: Record) -> None:
        entry.status, entry.step, entry.paused_at = TrialStatus(record["status"]), record["step"], None

    def list_unfinished(self, names: Sequence[str]) -> list[TrialEntry]:
        """Trials that are not at an end."""
        return [self.entries[name] for name in names if self.entries[name].status not in ENDED]

    def fall_back(self, name: str, traceback: str) -> None:
        """The last checkpoint of a trial cannot be read: it goes on from the one before, and this is said."""
        why = traceback.rstrip().rpartition("\n")[2].partition(": ")[2]
        entry = self.entries[name]
        self.note("uncommit", trial=name, generation=entry.committed[-1].generation)
        self.rewind(name)
        where = f"continues from step {entry.step}" if entry.committed else "begins again"
        warnings.warn(f"trial {name!r} {where}: {why}", RuntimeWarning, stacklevel=2)

    def adopt(self, found: Sequence[SavedCheckpoint]) -> None:
        """Let checkpoints of a trial count that the journal does not list, and go on from the newest."""
        newest = found[-1]
        run = max(each.fence // FENCES_OF_A_RUN for each in found)
        if run > self.num_runs:
            self.note("study", run=run)
        for each in self.entries[newest.trial].committed:
            self.note("uncommit", trial=newest.trial, generation=each.generation)
        for each in found:
            facts = {"generation": each.generation, "fence": each.fence, "step": each.step, "crc": each.crc}
            self.note("commit", trial=each.trial, **facts)
        self.rewind(newest.trial)
        warnings.warn(
            f"trial {newest.trial!r} continues from its checkpoint of step {newest.step}, which the journal"
            " did not list",
            RuntimeWarning,
            stacklevel=2,
        )

    def rewind(self, name: str) -> None:
        """What was in memory is gone: a trial that is not at its end stands at its last checkpoint."""
        entry = self.entries[name]
        if entry.status not in ENDED:
            entry.status = TrialStatus.WAITING
            entry.step = entry.durable_step
            entry.seconds, entry.num_tokens = self._at_commit.get(name, (0.0, 0))
