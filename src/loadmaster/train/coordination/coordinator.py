"""The loop of a study: one thread, one queue of events, no shared lists.

device free   -> choose a trial (scheduler), send its worker a turn
turn over     -> journal it; report to the searcher, journal what it decides
written       -> a checkpoint counts; a trial that only waited for its last one is at its end
trial failed  -> journal it; the others go on
worker lost   -> a new one; what it held goes back to its last checkpoint
callback, searcher raises, Ctrl-C or SIGTERM
              -> turns end at the next step boundary, everything is saved, then it stops
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadmaster.core.errors import LoadmasterError, RunError
from loadmaster.shards.spec.engine import StepDone, TrialPlan
from loadmaster.train.coordination.callbacks import CallbackList
from loadmaster.train.coordination.checkpoint_saves import CheckpointTracker
from loadmaster.train.coordination.kept_checkpoints import Keeping
from loadmaster.train.coordination.pace import Pace
from loadmaster.train.coordination.result import Span, TrialStatus
from loadmaster.train.coordination.running_turn import RunningTurn, convert_spans
from loadmaster.train.coordination.scheduler import TrialStanding, Turn, choose_turn
from loadmaster.train.coordination.search_decisions import SearchDecisions
from loadmaster.train.coordination.study_state import ENDED, StudyState, TrialEntry
from loadmaster.train.disk import checkpoints
from loadmaster.train.workers.host_memory import TrialLocations
from loadmaster.train.workers.messages import (
    CheckpointWritten,
    Event,
    Halt,
    Parcel,
    Release,
    SaveFailed,
    StepEnded,
    Task,
    TrialFailed,
    TrialReleased,
    TurnEnded,
    WorkerLost,
)
from loadmaster.train.workers.worker_pool import WorkerPool

_WAIT_S = 0.5
_MOST_SPANS = 500_000
_PATIENCE_S = 10.0
_MOST_DEATHS = 3  # of workers under one trial, before it is thought to be the reason


@dataclass
class Coordinator:
    """Runs all trials of a study to their ends."""

    names: Sequence[str]
    device_names: Sequence[str]
    state: StudyState
    pool: WorkerPool
    decisions: SearchDecisions
    plans: Mapping[str, TrialPlan]
    locations: TrialLocations
    pace: Pace
    audience: CallbackList
    root: Path  # of checkpoints
    keeping: Keeping = field(default_factory=Keeping)
    spans: list[Span] = field(default_factory=list)
    halt_asked: bool = False
    _running: dict[str, RunningTurn] = field(default_factory=dict)
    _moving: dict[str, tuple[int, Turn]] = field(default_factory=dict)  # to which device, to do what
    # Stopped by the searcher, but the checkpoint at this step, which was due before, is not on disk yet.
    _stopping: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _ending: dict[str, TurnEnded] = field(
        default_factory=dict
    )  # no step left, the last state is being written
    _passed: dict[str, int] = field(default_factory=dict)
    _deaths: dict[str, int] = field(default_factory=dict)
    _trouble: Exception | None = None
    _can_save: bool = True  # until a checkpoint could not be written
    _fence: int = 0
    _began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        """Fencing numbers of this run stand above those of every run before, committed or not."""
        self.state.note("study", run=self.state.num_runs + 1)
        self._fence = self.state.num_runs * checkpoints.FENCES_OF_A_RUN
        self._saves = CheckpointTracker(
            self.root, self.state, self.pace, self.audience, self.locations, self.plans, self.keeping
        )
        self._saves.sweep(self.names)

    def run(self) -> None:
        """Until every trial is at its end, or the study is stopped; then everything is on disk."""
        try:
            self._run_loop()
        except Exception as problem:  # of a searcher's own code, too: what was trained is saved first
            self._trouble = self._trouble or problem
        if self._is_ending():
            self._wind_down()
        self._saves.close(_PATIENCE_S)
        if self._trouble is not None:
            raise self._trouble
        self.audience.raise_problem()
        if self.halt_asked:
            raise KeyboardInterrupt

    def _is_ending(self) -> bool:
        """Whether nothing more is to be trained, though there may be more to do."""
        return self.halt_asked or self._trouble is not None or self.audience.problem is not None

    def _run_loop(self) -> None:
        self._apply(self.decisions.list_pending_stops())
        while not self._is_ending():
            self._dispatch()
            if not self._running and not self._moving and not self._saves.pending:
                if not self._unstick():
                    return
                continue
            self._receive()

    def _receive(self) -> None:
        """One event, of a worker or of what this process writes."""
        written = self._saves.take_written(_WAIT_S if not self._running and not self._moving else 0.0)
        found = self.pool.receive(_WAIT_S) if written is None else (-1, written)
        if found is not None:
            self._handle(*found)

    def _dispatch(self) -> None:
        """A turn for every free device that has one."""
        for device in range(len(self.device_names)):
            if device in self._busy_devices():
                continue
            turn = choose_turn(self._collect_standings(), device, num_devices=len(self.device_names))
            if turn is None:
                return
            self._give(device, turn)

    def _busy_devices(self) -> set[int]:
        return {each.device for each in self._running.values()} | {to for to, _ in self._moving.values()}

    def _collect_standings(self) -> list[TrialStanding]:
        """Every trial that may run, as the scheduler sees it."""
        found = []
        for at, name in enumerate(self.names):
            entry = self.state.entries[name]
            limit = self.decisions.limit(entry)
            if entry.status in ENDED or limit is None or name in self._ending:
                continue
            if name in self._stopping and entry.step >= self._stopping[name]:
                continue
            running = name in self._running or name in self._moving
            if not running and not self.locations.admits(name):
                continue
            place = self.locations.where.get(name)
            found.append(
                TrialStanding(
                    trial=at,
                    num_left=max(1, limit - entry.step),
                    step_s=self.pace.step_s(name),
                    load_s=self.plans[name].load_s,
                    device=place if isinstance(place, int) else None,
                    running=running,
                    num_passed=self._passed.get(name, 0),
                )
            )
        return found

    def _give(self, device: int, turn: Turn) -> None:
        name = self.names[turn.trial]
        for other in self.names:
            self._passed[other] = self._passed.get(other, 0) + 1 if other != name else 0
        place = self.locations.where.get(name)
        if isinstance(place, int) and place != device:
            self._moving[name] = device, turn
            self._fence += 1
            self.pool.send(place, Release(name, self._fence))
            return
        self._start(device, turn)

    def _start(self, device: int, turn: Turn) -> None:
        name = self.names[turn.trial]
        entry = self.state.entries[name]
        stop = self.decisions.next_stop(entry)
        limit = self.pace.next_save(name, entry.step)
        goal = stop if limit is None else min(stop, limit)
        num_steps = min(turn.num_steps, max(0, goal - entry.step))
        pending = self.decisions.owes_report(entry)
        if pending:
            num_steps = 0
        elif entry.step >= entry.num_steps:
            num_steps = 1  # the runner says whether there is one
        then = self.names[turn.then] if turn.then is not None else None
        evaluate = pending or self.decisions.wants_report(entry, entry.step + num_steps)
        due = self._saves.is_save_due(name, entry.step + num_steps, reports=evaluate)
        beside = self._saves.has_room(name)
        self._send(device, name, num_steps=num_steps, evaluate=evaluate, save=due, beside=beside, then=then)

    def _send(self, device: int, name: str, **told: Any) -> None:
        """Give a trial's turn to a worker, with its state where the worker has it not."""
        entry = self.state.entries[name]
        place = self.locations.where.get(name)
        self._fence += 1
        source: dict[str, Any] = {}
        if isinstance(place, Parcel):
            source = {"parcel": place}
        elif place is None and not entry.committed:
            source = {"fresh": True}
        elif place is None and self.pool.writes_checkpoints:
            source = {"restore": entry.committed[-1]}
        elif place is None:
            source = {"parcel": Parcel(checkpoints.load(self.root, entry.committed[-1]))}
        number = self._saves.number(name) if self.pool.writes_checkpoints else 0
        self.locations.where[name] = device
        self._running[name] = RunningTurn(device, self._fence)
        self.pool.send(device, Task(trial=name, fence=self._fence, generation=number, **source, **told))

    def _handle(self, device: int, event: Event) -> None:
        match event:
            case WorkerLost():
                self._handle_lost_worker(device, event.reason)
            case TrialReleased():
                self._handle_release(event)
            case CheckpointWritten():
                self._note_written(event)
            case _:
                running = self._running.get(event.trial)
                if running is None or running.fence != event.fence:
                    return  # of a worker that was thought dead
                self._handle_turn_event(event, running)

    def _handle_turn_event(
        self, event: StepEnded | TurnEnded | TrialFailed | SaveFailed, running: RunningTurn
    ) -> None:
        if isinstance(event, StepEnded):
            return self._handle_step(event, running)
        del self._running[event.trial]
        match event:
            case TurnEnded():
                self._end_turn(event, running)
            case SaveFailed():
                self._trouble, self._can_save = event.problem, False
            case TrialFailed():
                self._handle_failure(event, running.device)

    def _handle_step(self, event: StepEnded, running: RunningTurn) -> None:
        done: StepDone = event.done
        running.add(done)
        self.pace.note_step(event.trial, done.seconds)
        device = self.device_names[running.device]
        if len(self.spans) < _MOST_SPANS:
            self.spans.extend(convert_spans(done, device=device, trial=event.trial, began=self._began))
        self.audience.tell("on_step", event.trial, done)
        self.audience.tell("on_device", device, event.trial, done)

    def _describe_turn(self, running: RunningTurn) -> dict[str, Any]:
        """Where and when a turn was, for `loadmaster report`; nothing in a study depends on it."""
        return {
            "device": self.device_names[running.device],
            "ended_at": time.time(),
            "took_s": time.monotonic() - running.began,
            "bytes_up": running.bytes_up,
            "bytes_down": running.bytes_down,
        }

    def _end_turn(self, event: TurnEnded, running: RunningTurn) -> None:
        name = event.trial
        entry = self.state.entries[name]
        if event.step != entry.step:
            loss = running.loss if running.loss is not None else entry.loss
            facts = {"seconds": running.seconds, "num_tokens": running.num_tokens, "verified": event.verified}
            self.state.note(
                "turn", trial=name, step=event.step, loss=loss, **facts, **self._describe_turn(running)
            )
        if event.saved is not None:
            self._saves.commit(event.saved, event.save_s, entry.seconds, entry.num_tokens)
            self._end_if_saved(name)
        elif event.saving or event.snapshot is not None:
            self._saves.register_pending(event, running.device)
            if event.finished:
                self._ending[name] = event
            if running.written is not None:
                self._note_written(running.written)
        if event.finished:
            if event.saved is not None:
                self._finish_trial(event)
        elif self.decisions.wants_report(entry, event.step):
            self._apply(self.decisions.record_report(entry, event.metrics))

    def _finish_trial(self, event: TurnEnded) -> None:
        """Its last state is on disk."""
        self._apply(self.decisions.finish_trial(self.state.entries[event.trial], event.metrics))
        self._end(event.trial, TrialStatus.DONE)

    def _note_written(self, event: CheckpointWritten) -> None:
        running = self._running.get(event.trial)
        if running is not None and running.fence == event.fence:
            running.written = event
            return
        problem = self._saves.take(event)
        if problem is not None:
            self._trouble, self._can_save = self._trouble or problem, False
        ending = self._ending.get(event.trial)
        if ending is not None and ending.fence == event.fence:
            del self._ending[event.trial]
            if event.saved is not None:
                self._finish_trial(ending)
        self._end_if_saved(event.trial)

    def _apply(self, stopped: Sequence[str]) -> None:
        """Let go of the trials that the searcher stopped, once what was due before is on disk.

        Else the weights that are left of a stopped trial would depend on when the study was killed. One that
        was killed before its checkpoint counted trains up to it again.
        """
        for name in stopped:
            entry = self.state.entries[name]
            last = max([entry.step, *entry.reports])
            self._stopping[name] = last if self.keeping.stopped else self.pace.find_last_save(last)
            self._end_if_saved(name)

    def _end_if_saved(self, name: str) -> None:
        """End a trial that is stopping and has its last checkpoint."""
        entry = self.state.entries[name]
        if (
            name in self._stopping
            and entry.status not in ENDED
            and entry.durable_step >= self._stopping[name]
        ):
            del self._stopping[name]
            self._end(name, TrialStatus.STOPPED)

    def _end(self, name: str, status: TrialStatus) -> None:
        entry = self.state.entries[name]
        step = max([entry.step, *entry.reports])  # it had been there before a crash
        self.state.note("done", trial=name, status=str(status), step=step)
        self._close(name)
        self.audience.tell("on_trial_end", name, str(status), "")

    def _close(self, name: str) -> None:
        """Give a trial's memory back."""
        place = self.locations.where.get(name)
        self.locations.free(name)
        if isinstance(place, int):
            self._fence += 1
            self.pool.send(place, Release(name, self._fence, drop=True))
        elif isinstance(place, Parcel):
            _close_parcel(place)

    def _handle_failure(self, event: TrialFailed, device: int) -> None:
        name = event.trial
        self.locations.free(name)
        if event.kind == "checkpoint":
            self.state.fall_back(name, event.text)
            return
        if event.device_broken:
            self._handle_lost_worker(device, event.text)
        self._fail(name, event.kind, event.text)

    def _fail(self, name: str, kind: str, text: str) -> None:
        entry = self.state.entries[name]
        self.state.note("fail", trial=name, error_kind=kind, error=text, step=entry.step)
        self.audience.tell("on_trial_end", name, str(TrialStatus.FAILED), text)
        self._apply(self.decisions.withdraw_trial(name))

    def _handle_release(self, event: TrialReleased) -> None:
        waiting = self._moving.pop(event.trial, None)
        if waiting is None or self.locations.where.get(event.trial) is None:
            _close_parcel(event.parcel)  # it ended meanwhile
            return
        self.locations.where[event.trial] = event.parcel
        device, turn = waiting
        if not self._is_ending():
            self._start(device, turn)

    def _handle_lost_worker(self, device: int, reason: str) -> None:
        """A worker is gone: what it held goes back to its last checkpoint, and its device gets a new one."""
        self._saves.forget_worker(device)
        held = [name for name, place in self.locations.where.items() if place == device]
        for name in held:
            ran = self._running.get(name)
            here = ran is not None and ran.device == device
            if here:
                del self._running[name]
            self._moving.pop(name, None)
            self._ending.pop(name, None)
            self.locations.free(name)
            self.state.rewind(name)
            if here:
                self._deaths[name] = self._deaths.get(name, 0) + 1
                if self._deaths[name] >= _MOST_DEATHS:
                    self._fail(name, "worker", f"its worker died {_MOST_DEATHS} times: {reason}")
        self.pool.restart(device)

    def _unstick(self) -> bool:
        """Nothing runs: make room in memory, or ask the searcher about those who wait. False: all is done."""
        open_now = [name for name in self.names if self.locations.where.get(name) is not None]
        waiting = [e for e in self.state.list_unfinished(self.names) if self.decisions.limit(e) is not None]
        if waiting:
            if not open_now:
                raise RunError(
                    f"trial {waiting[0].name!r} cannot be opened; its memory does not fit host_cap"
                )
            self._park(max(open_now, key=lambda name: self.plans[name].host_bytes))
            return True
        paused: list[TrialEntry] = self.state.list_unfinished(self.names)
        if not paused:
            return False
        self._apply(self.decisions.exhausted(paused))
        return True

    def _park(self, name: str) -> None:
        """Write a waiting trial to disk and free its memory."""
        self._save_now(name)
        self._close(name)

    def _save_now(self, name: str) -> None:
        self._await_write(name)
        entry, place = self.state.entries[name], self.locations.where.get(name)
        if entry.step > entry.durable_step:
            self._send(place if isinstance(place, int) else 0, name, num_steps=0, save=True)
            while name in self._running and self._can_save:
                self._receive()
            self._await_write(name)

    def _await_write(self, name: str) -> None:
        while self._saves.writes(name) and self._can_save:
            self._receive()

    def _wind_down(self) -> None:
        """Stop at step boundaries, then save what is not on disk."""
        for device in sorted(self._busy_devices()):
            self.pool.send(device, Halt())
        first = self._trouble
        try:
            while self._running or self._moving or self._saves.pending:
                self._receive()
            for name in self.names:
                if self.locations.where.get(name) is not None and self._can_save:
                    self._save_now(name)
        except LoadmasterError as problem:
            self._trouble = first or problem


def _close_parcel(parcel: Parcel) -> None:
    close = getattr(parcel.content, "close", None)
    if close is not None:
        close()
