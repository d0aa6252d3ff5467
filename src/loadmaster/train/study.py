"""A study: trials that share devices, a folder that remembers them, and a searcher.

    study = lt.Study(trials, dir="runs/gpt", devices="auto", memory_cap="8GiB")
    print(study.plan())        # trains nothing
    result = study.fit()       # the same call again goes on where it was

The folder holds the journal, the checkpoints and a lock; a second process is refused.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadmaster.core.errors import InputError
from loadmaster.core.units import parse_bytes, parse_seconds
from loadmaster.shards.model.loaders import with_timeout
from loadmaster.shards.spec.engine import Engine, TrialPlan
from loadmaster.shards.spec.trial import Trial, wrap_user_errors
from loadmaster.train.coordination.callbacks import CallbackList
from loadmaster.train.coordination.coordinator import Coordinator
from loadmaster.train.coordination.device_worker import Worker
from loadmaster.train.coordination.host_memory import TrialLocations
from loadmaster.train.coordination.pace import Pace
from loadmaster.train.coordination.result import Result, TrialResult
from loadmaster.train.coordination.search_decisions import SearchDecisions
from loadmaster.train.coordination.searchers import RunAll, Searcher
from loadmaster.train.coordination.study_plan import StudyPlan, make_study_plan
from loadmaster.train.coordination.study_state import StudyState, TrialEntry
from loadmaster.train.coordination.worker_pool import InlineWorkerPool, WorkerPool
from loadmaster.train.disk.folder_lock import lock_folder
from loadmaster.train.disk.journal import Journal, read_journal

_FACTS = ("epochs", "max_steps", "accumulate", "clip_norm", "precision", "seed", "rng", "eval_every")
_LAUNCHERS = ("auto", "inline", "processes", "ray")

_MOST_AT_ONCE = 4  # trials of a device that stand there together; more hide nothing more


class Study:
    """Trials on devices; see the module's text."""

    def __init__(
        self,
        trials: Trial | Sequence[Any],
        *,
        dir: str | os.PathLike[str],
        devices: str | Sequence[str] = "auto",
        memory_cap: str | int | None = None,
        host_cap: str | int | None = None,
        optimizer_placement: str = "auto",
        searcher: Searcher | None = None,
        metric: str | None = None,
        mode: str | None = None,
        callbacks: Sequence[Any] = (),
        checkpoint_every: int | str = "auto",
        loader_timeout: str | float | None = None,
        launcher: str = "auto",
        engine: Engine | None = None,
    ) -> None:
        trials = [trials] if isinstance(trials, Trial) else list(trials)
        odd = next((each for each in trials if not hasattr(each, "name")), None)
        if odd is not None:
            raise InputError(f"a study takes trials, not {type(odd).__name__}; make them with lt.Trial(...)")
        names = [trial.name for trial in trials]
        if not names:
            raise InputError("a study needs at least one trial")
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"two trials are named {twice!r}; names must differ, they name folders")
        if mode not in (None, "min", "max"):
            raise InputError(f"mode is {mode!r}; give 'min' or 'max'")
        if launcher not in _LAUNCHERS:
            raise InputError(f"launcher is {launcher!r}; give one of {', '.join(_LAUNCHERS)}")
        self.dir = Path(dir)
        self.metric: str | None = getattr(searcher, "metric", None) if metric is None else metric
        self.mode: str = mode or getattr(searcher, "mode", None) or "min"
        self.callbacks = list(callbacks)
        self.launcher = launcher
        self._devices = devices
        self._memory_cap = None if memory_cap is None else parse_bytes(memory_cap)
        self._host_cap = None if host_cap is None else parse_bytes(host_cap)
        self._searcher, self._every = searcher, checkpoint_every
        self._timeout_s = None if loader_timeout is None else parse_seconds(loader_timeout)
        self._trials = {trial.name: trial for trial in trials}
        self._placement = optimizer_placement
        self._engine = engine
        self._plan: StudyPlan | None = None

    @property
    def names(self) -> list[str]:
        """The trials, in the order they were given."""
        return list(self._trials)

    @property
    def evaluated(self) -> frozenset[str]:
        """The trials with an evaluation of their own; the others report the loss of a step."""
        return frozenset(name for name, trial in self._trials.items() if trial.evaluate is not None)

    def engine(self) -> Engine:
        """What trains."""
        if self._engine is None:
            from loadmaster.train.shard_engine import ShardEngine

            self._engine = ShardEngine(
                memory_cap_bytes=self._memory_cap,
                host_cap_bytes=self._host_cap,
                optimizer_placement=self._placement,
            )
            if self.launcher != "ray":
                devices = len(self._engine.device_names(self._devices))
                self._engine.share = min(_MOST_AT_ONCE, -(-len(self._trials) // devices))
        return self._engine

    def plan(self) -> StudyPlan:
        """Shards, peaks, bytes moved, times, memory and disk; trains nothing."""
        if self._plan is None:
            engine = self.engine()
            devices = self._device_names(engine)
            plans = [self._make_plan(engine, trial, devices) for trial in self._trials.values()]
            if hasattr(engine, "together"):
                plans = engine.together(plans, devices)
            self._plan = make_study_plan(
                plans,
                devices,
                folder=self.dir,
                memory_cap_bytes=self._memory_cap,
                host_cap_bytes=self._host_cap,
                ended=self._find_ended_trials(),
            )
        return self._plan

    def _find_ended_trials(self) -> set[str]:
        """Trials that an earlier call brought to an end."""
        records = read_journal(self.dir / "journal").records
        return {str(record.get("trial")) for record in records if record.get("kind") == "done"}

    def _make_plan(self, engine: Engine, trial: Any, devices: Sequence[str]) -> TrialPlan:
        with wrap_user_errors(trial.name):
            return engine.planned(trial, devices)

    def _device_names(self, engine: Engine) -> list[str]:
        if self.launcher == "ray" and self._devices == "auto":
            from loadmaster.train.coordination.ray_workers import ray_device_names

            return ray_device_names()
        return engine.device_names(self._devices)

    def fit(self, *, retry_failed: bool = False) -> Result:
        """Train all trials to their ends, from wherever an earlier call was left.

        Ctrl-C stops at the next step boundary, saves, and raises KeyboardInterrupt.
        """
        with self._release_models():
            return self._train(self._plan_to_train(), retry_failed=retry_failed)

    def _train(self, plan: StudyPlan, *, retry_failed: bool) -> Result:
        plan.require_feasible()
        began = time.perf_counter()
        with lock_folder(self.dir):
            journal = Journal(self.dir / "journal")
            try:
                coordinator = self._coordinator(journal, plan, retry_failed=retry_failed)
                try:
                    coordinator.audience.tell("on_start", self.names)
                    with _handle_interrupts(coordinator):
                        coordinator.run()
                finally:
                    coordinator.pool.close()
                    journal.sync()
                    coordinator.audience.tell("on_close")
                result = self._make_result(coordinator.state, time.perf_counter() - began, coordinator)
                coordinator.audience.tell("on_end", result)
            finally:
                journal.close()
        return result

    def _plan_to_train(self) -> StudyPlan:
        """The plan, made now if it was not made before.

        In that case the model of a lone trial that trains in this process is not built again, though it
        has weights: it trains at once, so they stay no longer than they would.
        """
        engine: Any = self.engine()
        if self._plan is not None or not hasattr(engine, "keeps_weights"):
            return self.plan()
        devices = self._device_names(engine)
        engine.keeps_weights = len(self._trials) == 1 and self._choose_launcher(devices) == "inline"
        try:
            return self.plan()
        finally:
            engine.keeps_weights = False

    @contextmanager
    def _release_models(self) -> Iterator[None]:
        """Models that were built for planning and not trained after all are not held any longer."""
        try:
            yield
        finally:
            engine: Any = self._engine  # None where it could not be made
            if hasattr(engine, "forget_built"):
                engine.forget_built()

    def _coordinator(self, journal: Journal, plan: StudyPlan, *, retry_failed: bool) -> Coordinator:
        state = StudyState(journal)
        plans = {each.trial: each for each in plan.trials}
        for name, trial in self._trials.items():
            facts = _collect_facts(trial) | dict(plans[name].options)
            entry = state.enter(name, facts, plans[name].num_steps)
            if retry_failed and entry.error_kind:
                state.note("retry", trial=name)
                state.rewind(name)
        audience = CallbackList(self.callbacks)
        root = self.dir / "checkpoints"
        root.mkdir(exist_ok=True)
        # It is told everything anew from the journal, so each call starts from the one that was given.
        searcher = deepcopy(self._searcher) if self._searcher is not None else RunAll()
        if hasattr(searcher, "compare_by"):
            searcher.compare_by(self.metric, self.mode)
        return Coordinator(
            names=self.names,
            device_names=plan.devices,
            state=state,
            pool=self._make_pool(plan, root),
            decisions=SearchDecisions(state, searcher, self._trials, audience=audience),
            plans=plans,
            locations=TrialLocations(
                {each.trial: each.host_bytes for each in plan.trials}, plan.host_cap_bytes
            ),
            pace=Pace({each.trial: each.step_s for each in plan.trials}, self._every),
            audience=audience,
            root=root,
        )

    def _make_pool(self, plan: StudyPlan, root: Path) -> WorkerPool:
        trials = self._add_data_timeouts()
        plans = {each.trial: each for each in plan.trials}
        launcher = self._choose_launcher(plan.devices)
        if launcher == "processes":
            from loadmaster.train.coordination.process_workers import ProcessWorkerPool

            return ProcessWorkerPool(self.engine(), trials, plans, plan.devices, root)
        if launcher == "ray":
            from loadmaster.train.coordination.ray_workers import RayWorkerPool

            return RayWorkerPool(self.engine(), trials, plans, plan.devices)
        return InlineWorkerPool(
            lambda at, **ears: Worker(self.engine(), trials, plans, plan.devices[at], root, **ears),
            len(plan.devices),
        )

    def _choose_launcher(self, devices: Sequence[str]) -> str:
        if self.launcher != "auto":
            return self.launcher
        return "inline" if len(devices) == 1 else "processes"

    def _add_data_timeouts(self) -> dict[str, Any]:
        """The trials, with a limit on how long their data may take."""
        if self._timeout_s is None:
            return dict(self._trials)
        limit_s = self._timeout_s
        return {
            name: replace(trial, data=with_timeout(trial.data, limit_s, trial=name))
            for name, trial in self._trials.items()
        }

    def _make_result(self, state: StudyState, wall_s: float, coordinator: Coordinator) -> Result:
        root = self.dir / "checkpoints"
        rows = tuple(
            replace(_make_trial_result(state.entries[name], root), is_evaluated=name in self.evaluated)
            for name in self.names
        )
        return Result(rows, self.metric, self.mode, wall_s, tuple(coordinator.spans))


def _collect_facts(trial: Any) -> dict[str, Any]:
    """What may not change between two calls."""
    return {name: getattr(trial, name, None) for name in _FACTS}


def _make_trial_result(entry: TrialEntry, root: Path) -> TrialResult:
    return TrialResult(
        name=entry.name,
        status=entry.status,
        step=entry.step,
        loss=entry.loss,
        metrics=dict(entry.metrics),
        seconds=entry.seconds,
        num_tokens=entry.num_tokens,
        error=entry.error,
        error_kind=entry.error_kind,
        durable_step=entry.durable_step,
        folder=root / entry.committed[-1].folder if entry.committed else None,
        verified=entry.verified,
    )


@contextmanager
def _handle_interrupts(coordinator: Coordinator) -> Iterator[None]:
    """The first Ctrl-C asks for a clean stop, the second one does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_interrupt(_number: int, _frame: object) -> None:
        if coordinator.halt_asked:
            raise KeyboardInterrupt
        coordinator.halt_asked = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
