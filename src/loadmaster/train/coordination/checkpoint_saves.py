"""The coordinator's side of checkpoints: which are being written, and which count.

A checkpoint counts when the journal says so, and only under the fence of the turn that began it. Workers
write beside the training, from a copy, where host memory has room for one; pools whose workers share no disk
with the coordinator send it the state, and it writes beside its own loop.
"""

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadmaster.core.errors import FileError
from loadmaster.shards.spec.engine import TrialPlan
from loadmaster.train.coordination.callbacks import CallbackList
from loadmaster.train.coordination.kept_checkpoints import Keeping
from loadmaster.train.coordination.pace import Pace
from loadmaster.train.coordination.study_state import StudyState
from loadmaster.train.disk import checkpoints
from loadmaster.train.disk.backbone_files import Backbone
from loadmaster.train.disk.background_writer import Writer
from loadmaster.train.disk.checkpoints import SavedCheckpoint
from loadmaster.train.workers.host_memory import TrialLocations
from loadmaster.train.workers.messages import CheckpointWritten, TurnEnded


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint on its way to the disk, and how the trial stood."""

    generation: int
    device: int | None  # None: the coordinator writes it
    save_s: float
    seconds: float
    num_tokens: int


@dataclass
class CheckpointTracker:
    """Checkpoints of all trials."""

    root: Path
    state: StudyState
    pace: Pace
    audience: CallbackList
    locations: TrialLocations
    plans: Mapping[str, TrialPlan]
    keeping: Keeping = field(default_factory=Keeping)
    pending: dict[tuple[str, int], _Pending] = field(default_factory=dict)  # by trial and fence
    _given: dict[str, int] = field(default_factory=dict)  # the generation that the last turn was to write
    _known: dict[str, Backbone] = field(default_factory=dict)  # frozen weights on disk
    _writer: Writer = field(default_factory=Writer)
    _done: "queue.SimpleQueue[CheckpointWritten]" = field(default_factory=queue.SimpleQueue)

    def sweep(self, names: Sequence[str]) -> None:
        """Delete what an earlier run left that does not count; nobody is writing yet."""
        for name in names:
            entry = self.state.entries[name]
            best = self.keeping.find_best(entry, self.root)
            checkpoints.sweep(self.root, name, entry.committed, best=best)
        checkpoints.sweep_shared(self.root)

    def is_save_due(self, name: str, step: int, *, reports: bool = False) -> bool:
        """Whether a turn that ends at this step ends with a checkpoint; by time, one at a time."""
        if self.keeping.wants_save(self.state.entries[name], step, reports=reports):
            return True
        return self.pace.is_save_due(name, step) and (self.pace.by_count or not self.writes(name))

    def writes(self, name: str) -> bool:
        """Whether a checkpoint of a trial is being written."""
        return any(trial == name for trial, _ in self.pending)

    def number(self, name: str) -> int:
        """The generation of the next checkpoint; no two of a trial have the same."""
        known = [each.generation for each in self.state.entries[name].committed]
        known += [each.generation for (trial, _), each in self.pending.items() if trial == name]
        last = max(known, default=0)
        self._given[name] = last + 1
        return last + 1

    def has_room(self, name: str) -> bool:
        """Whether host memory has room for a copy of a trial's state."""
        held = sum(self.plans[other].state_bytes for other, _ in self.pending)
        return self.locations.taken_bytes + held + self.plans[name].state_bytes <= self.locations.cap_bytes

    def register_pending(self, event: TurnEnded, device: int) -> None:
        """A turn ended with a checkpoint that is being written, or is to be."""
        entry = self.state.entries[event.trial]
        sent = event.snapshot is not None
        number = self.number(event.trial) if sent else self._given[event.trial]
        self.pending[event.trial, event.fence] = _Pending(
            number, None if sent else device, event.save_s, entry.seconds, entry.num_tokens
        )
        if sent:
            self._writer.begin(lambda: self._write(event, number))

    def _write(self, event: TurnEnded, number: int) -> None:
        try:
            saved = checkpoints.save(
                self.root,
                event.snapshot,
                trial=event.trial,
                generation=number,
                fence=event.fence,
                known=self._known,
            )
            self._done.put(CheckpointWritten(event.trial, event.fence, saved))
        except Exception as problem:
            self._done.put(CheckpointWritten(event.trial, event.fence, None, problem))

    def take_written(self, timeout_s: float) -> CheckpointWritten | None:
        """What this process has written since; waits so long where something is being written."""
        waits = timeout_s > 0 and self._writer.busy
        try:
            return self._done.get(timeout=timeout_s) if waits else self._done.get_nowait()
        except queue.Empty:
            return None

    def take(self, event: CheckpointWritten) -> Exception | None:
        """Let a checkpoint count; or why it was not written. One under an old fence is nothing."""
        pending = self.pending.pop((event.trial, event.fence), None)
        if pending is None:
            return None
        if event.saved is None:
            return event.problem or FileError(f"the checkpoint of trial {event.trial!r} was not written")
        self.commit(event.saved, pending.save_s, pending.seconds, pending.num_tokens)
        return None

    def commit(self, saved: SavedCheckpoint, save_s: float, seconds: float, num_tokens: int) -> None:
        """Journal it, then delete older ones."""
        entry = self.state.entries[saved.trial]
        facts = {"generation": saved.generation, "fence": saved.fence, "step": saved.step, "crc": saved.crc}
        self.state.note("commit", trial=saved.trial, **facts, seconds=seconds, num_tokens=num_tokens)
        best = self.keeping.find_best(entry, self.root)
        checkpoints.sweep(self.root, saved.trial, entry.committed, best=best, writing=True)
        self.pace.note_save(saved.trial, save_s)
        self.audience.tell("on_checkpoint", saved.trial, saved.step)

    def forget_worker(self, device: int) -> None:
        """A worker is gone: what it was writing does not count."""
        gone = [key for key, each in self.pending.items() if each.device == device]
        for key in gone:
            del self.pending[key]

    def close(self, timeout_s: float) -> None:
        """Do not leave a thread behind that writes."""
        self._writer.wait(timeout_s)
