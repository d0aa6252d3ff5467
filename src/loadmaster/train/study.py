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
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadmaster.core.errors import FileError, InputError, LoadmasterError
from loadmaster.core.units import format_seconds, parse_bytes, parse_seconds
from loadmaster.shards.model.loaders import UnreadableDataError, confine_worker_deaths, with_timeout
from loadmaster.shards.spec.engine import Engine, TrialPlan
from loadmaster.shards.spec.trial import Trial, wrap_user_errors
from loadmaster.train.coordination.callbacks import CallbackList, SecondInterrupt
from loadmaster.train.coordination.coordinator import Coordinator
from loadmaster.train.coordination.kept_checkpoints import Keeping
from loadmaster.train.coordination.pace import Pace
from loadmaster.train.coordination.progress import show_progress
from loadmaster.train.coordination.result import Result, TrialResult, TrialStatus
from loadmaster.train.coordination.search_decisions import SearchDecisions
from loadmaster.train.coordination.searchers import RunAll, Searcher
from loadmaster.train.coordination.study_plan import StudyPlan, make_study_plan
from loadmaster.train.coordination.study_state import StudyState, TrialEntry
from loadmaster.train.coordination.study_status import make_trial_result
from loadmaster.train.disk import checkpoints
from loadmaster.train.disk.folder_lock import lock_folder
from loadmaster.train.disk.journal import Journal, read_journal
from loadmaster.train.workers.device_worker import Worker
from loadmaster.train.workers.host_memory import TrialLocations
from loadmaster.train.workers.worker_pool import InlineWorkerPool, WorkerPool

_FACTS = ("epochs", "max_steps", "accumulate", "clip_norm", "precision", "seed", "rng", "eval_every")
_LAUNCHERS = ("auto", "inline", "processes", "ray")

_MOST_AT_ONCE = 4  # trials of a device that stand there together; more hide nothing more


class Study:
    """Trials that share devices, in a folder that remembers them. `fit` trains, and continues after a stop.

    - `dir`: the folder for journal and checkpoints. One process may use it at a time.
    - `devices`: 'auto' (every GPU, else the CPU), or devices such as 'cuda:0-8GB, cpu#1'.
    - `memory_cap`, `host_cap`: bytes on each device, and in host memory for all open trials. Default: what is
      free.
    - `optimizer_placement`: 'auto', 'device' or 'host'.
    - `searcher`: decides which trials continue. Default: all of them do.
    - `metric`, `mode`: the value to compare trials by ('min' or 'max').
    - `checkpoint_every`: steps, a time such as '10min', or 'auto' (at most 3 % of the time).
    - `keep_best`, `keep_stopped`: also keep the checkpoint of the best report, or of a stopped trial.
    - `loader_timeout`: how long a batch may take before its trial fails.
    - `grace_s`: how long saving may take after a SIGTERM.
    - `launcher`: 'auto', 'inline', 'processes' or 'ray'.
    - `callbacks`: objects with methods of `lt.Callback`.
    """

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
        keep_best: bool = False,
        keep_stopped: bool = False,
        loader_timeout: str | float | None = None,
        grace_s: str | float = 25.0,
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
        self._keeping = Keeping(keep_best, keep_stopped, self.metric, self.mode)
        self._timeout_s = None if loader_timeout is None else parse_seconds(loader_timeout)
        self.set_grace(grace_s)
        self._trials = {trial.name: trial for trial in trials}
        self._placement = optimizer_placement
        self._engine = engine
        self._plan: StudyPlan | None = None
        self._made: dict[str, TrialPlan] = {}  # plans of single trials
        self._ended: dict[str, TrialPlan] | None = None  # what the journal says, once it is read
        self._retries = False
        self._unreadable: dict[str, str] = {}  # trials whose data raised while they were planned, and what
        # Trials that ended in an earlier call are planned again, to refuse what has changed under a name;
        # a search that made them itself (`optimize`) knows that they have not.
        self.trusts_ended = False
        self._watchers: list[Any] = []
        self._as_begun: dict[str, Any] = {}  # trials that go on by the rules they were begun under

    def set_grace(self, grace_s: str | float) -> None:
        """Set how long the running step and its checkpoint may take after a SIGTERM."""
        self._grace_s = parse_seconds(grace_s)
        if not self._grace_s > 0:
            raise InputError(f"grace_s is {grace_s!r}; give a time above 0, such as '25s'")

    @property
    def names(self) -> list[str]:
        """The names of the trials, in the order they were given."""
        return list(self._trials)

    @property
    def evaluated(self) -> frozenset[str]:
        """The trials that have their own evaluation. The others report the training loss."""
        return frozenset(name for name, trial in self._trials.items() if trial.evaluate is not None)

    def engine(self) -> Engine:
        """The engine that trains the trials."""
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
        """Plan all trials: shards, peaks, bytes moved, times, memory and disk. Trains nothing."""
        if self._plan is None:
            engine = self.engine()
            self._unreadable = {}
            self._plan = self._assemble(engine, [self._plan_or_blame(engine, name) for name in self.names])
        return self._plan

    def find_unplannable(self) -> dict[str, str]:
        """Trials that cannot be planned or can never fit here, with the reason. The others are planned."""
        engine, found = self.engine(), {}
        for name in self.names:
            try:
                plan = self._plan_trial(engine, name)
            except LoadmasterError as problem:
                found[name] = str(problem)
                continue
            problems = self._assemble(engine, [plan], together=False).problems_of(plan)
            if problems:
                found[name] = "; ".join(problems)
        return found

    def leave_out(self, names: Collection[str]) -> None:
        """Continue without some trials."""
        self._trials = {name: trial for name, trial in self._trials.items() if name not in names}
        self._plan = None

    def _plan_or_blame(self, engine: Engine, name: str) -> TrialPlan:
        """The plan of a trial; one whose data cannot be read fails by itself, unless all do."""
        try:
            return self._plan_trial(engine, name)
        except UnreadableDataError as problem:
            self._unreadable[name] = str(problem)
            if len(self._unreadable) == len(self._trials):
                raise
            return replace(_make_ended_plan(name, 0, str(TrialStatus.FAILED)), note=str(problem))

    def _plan_trial(self, engine: Engine, name: str) -> TrialPlan:
        """The plan of a trial, made once."""
        known = self._read_ended_trials().get(name)
        if known is not None and self.trusts_ended:
            return known
        if name not in self._made:
            made = self._make_plan(engine, self._trials[name], self._device_names(engine))
            done = known is not None and known.ended != TrialStatus.FAILED
            self._made[name] = replace(made, ended=known.ended) if known is not None and done else made
        return self._made[name]

    def _assemble(self, engine: Any, plans: list[TrialPlan], *, together: bool = True) -> StudyPlan:
        devices = self._device_names(engine)
        if together and hasattr(engine, "plan_groups"):
            made = [each for each in plans if each.trial in self._made]
            left = engine.plan_groups(made, devices)
            plans = [next((p for p in left if p.trial == each.trial), each) for each in plans]
        return make_study_plan(
            plans,
            devices,
            folder=self.dir,
            memory_cap_bytes=self._memory_cap,
            host_cap_bytes=self._host_cap,
        )

    def _read_ended_trials(self) -> dict[str, TrialPlan]:
        """Trials that an earlier call brought to an end; of those that failed, the ones not tried again."""
        if self._ended is None:
            steps: dict[str, int] = {}
            ended: dict[str, str] = {}
            for record in read_journal(self.dir / "journal").records:
                name = record.get("trial", "")
                kind = record.get("kind")
                if kind == "trial":
                    steps[name] = record["num_steps"]
                elif kind == "done":
                    ended[name] = record["status"]
                elif kind == "fail" and not self._retries:
                    ended[name] = str(TrialStatus.FAILED)
                elif kind == "retry":
                    ended.pop(name, None)
            self._ended = {
                name: _make_ended_plan(name, steps[name], how) for name, how in ended.items() if name in steps
            }
        return self._ended

    def _make_plan(self, engine: Engine, trial: Any, devices: Sequence[str]) -> TrialPlan:
        with wrap_user_errors(trial.name), confine_worker_deaths():
            return engine.plan_trial(trial, devices)

    def _device_names(self, engine: Engine) -> list[str]:
        if self.launcher == "ray" and self._devices == "auto":
            from loadmaster.train.workers.ray_workers import ray_device_names

            return ray_device_names()
        return engine.device_names(self._devices)

    def fit(
        self,
        *,
        retry_failed: bool = False,
        adopt_checkpoints: bool = False,
        progress: bool | str = "auto",
        note: str = "",
    ) -> Result:
        """Train all trials to the end. The same call continues where an earlier one stopped.

        A terminal or a notebook shows a table of progress; `progress=False` shows nothing. `retry_failed`
        tries failed trials again.

        Ctrl-C stops at the next step, saves, and raises KeyboardInterrupt. SIGTERM does the same and exits
        with code 143. If the step and the saving take longer than `grace_s`, the process ends without them,
        and the checkpoints before remain valid. Checkpoints that the journal does not list (because it was
        lost, or is an older copy) are refused; with `adopt_checkpoints` training continues from them.
        """
        with self._release_models(), confine_worker_deaths():
            self._forget_ended(retries=retry_failed)
            plan = self._plan_to_train()
            num_steps = {each.trial: each.num_steps for each in plan.trials}
            shown = show_progress(
                progress, self.names, num_steps=num_steps, evaluated=self.evaluated, note=note
            )
            with shown as watchers:
                self._watchers = watchers
                return self._train(plan, retry_failed=retry_failed, adopt_checkpoints=adopt_checkpoints)

    def _train(self, plan: StudyPlan, *, retry_failed: bool, adopt_checkpoints: bool) -> Result:
        plan.require_feasible()
        began = time.perf_counter()
        with lock_folder(self.dir):
            journal = Journal(self.dir / "journal")
            try:
                coordinator = self._coordinator(
                    journal, plan, retry_failed=retry_failed, adopt_checkpoints=adopt_checkpoints
                )
                if isinstance(coordinator.pool, InlineWorkerPool):
                    coordinator.pool.is_ending = lambda: coordinator.halt_asked
                try:
                    coordinator.audience.tell("on_start", self.names)
                    for name, why in self._unreadable.items():
                        coordinator.audience.tell("on_trial_end", name, str(TrialStatus.FAILED), why)
                    with _handle_signals(coordinator, self._grace_s):
                        coordinator.run()
                finally:
                    coordinator.pool.close()
                    journal.sync()
                    coordinator.audience.tell("on_close")
                result = self._make_result(coordinator.state, time.perf_counter() - began, coordinator)
                coordinator.audience.tell("on_end", result)
                coordinator.audience.raise_problem()
            finally:
                journal.close()
        return result

    def _forget_ended(self, *, retries: bool) -> None:
        """A failed trial that is tried again needs a plan."""
        if retries and not self._retries:
            self._retries, self._ended = True, None
            failed = str(TrialStatus.FAILED)
            if self._plan is not None and any(each.ended == failed for each in self._plan.trials):
                self._plan = None

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

    def _settle_unlisted_checkpoints(self, state: StudyState, root: Path, *, adopt: bool) -> None:
        """Refuse checkpoints that the journal does not list, or let them count."""
        found = {
            name: rows
            for name in self.names
            if (
                rows := checkpoints.find_unlisted(
                    root,
                    name,
                    state.entries[name].committed if name in state.entries else (),
                    num_runs=state.num_runs,
                )
            )
        }
        if not found:
            return
        name, rows = next(iter(found.items()))
        if not adopt:
            raise FileError(
                f"{root / checkpoints.folder_name(name)} holds a checkpoint of step {rows[-1].step} of trial"
                f" {name!r} that {self.dir / 'journal'} does not list: the journal was lost, or is an older"
                " copy; put it back, continue from the checkpoints with fit(adopt_checkpoints=True) or"
                " --adopt-checkpoints, or give another dir"
            )
        if self._searcher is not None:
            raise InputError(
                f"the reports of trial {name!r} to its {type(self._searcher).__name__} were lost with the"
                " journal; adopt the checkpoints without a searcher, or give another dir"
            )
        for rows in found.values():
            state.adopt(rows)

    def _coordinator(
        self, journal: Journal, plan: StudyPlan, *, retry_failed: bool, adopt_checkpoints: bool
    ) -> Coordinator:
        state = StudyState(journal)
        root = self.dir / "checkpoints"
        if not adopt_checkpoints:
            self._settle_unlisted_checkpoints(state, root, adopt=False)
        plans = {each.trial: each for each in plan.trials}
        for name, trial in self._trials.items():
            if name in self._unreadable:
                state.fail_unplanned(name, error_kind="loader", error=self._unreadable[name])
                continue
            facts = _collect_facts(trial) | dict(plans[name].options)
            entry = state.enter(name, facts, plans[name].num_steps, retry=retry_failed)
            self._as_begun[name] = _keep_older_draws(trial, entry)
            if retry_failed and entry.error_kind:
                state.note("retry", trial=name)
                state.rewind(name)
        if adopt_checkpoints:
            self._settle_unlisted_checkpoints(state, root, adopt=True)
        audience = CallbackList([*self.callbacks, *self._watchers])
        root.mkdir(exist_ok=True)
        # It is told everything again from the journal, so each call starts from the one that was given.
        searcher = deepcopy(self._searcher) if self._searcher is not None else RunAll()
        if hasattr(searcher, "compare_by"):
            searcher.compare_by(self.metric, self.mode)
        decisions = SearchDecisions(state, searcher, self._trials, audience=audience)
        pace = Pace({each.trial: each.step_s for each in plan.trials}, self._every)
        host_bytes = {each.trial: each.host_bytes for each in plan.trials}
        pool = self._make_pool(plan, root)
        try:
            return Coordinator(
                names=self.names,
                device_names=plan.devices,
                state=state,
                pool=pool,
                decisions=decisions,
                plans=plans,
                locations=TrialLocations(host_bytes, plan.host_cap_bytes),
                pace=pace,
                audience=audience,
                root=root,
                keeping=self._keeping,
            )
        except BaseException:
            pool.close()
            raise

    def _make_pool(self, plan: StudyPlan, root: Path) -> WorkerPool:
        trials = self._add_data_timeouts()
        plans = {each.trial: each for each in plan.trials}
        launcher = self._choose_launcher(plan.devices)
        if launcher == "processes":
            from loadmaster.train.workers.process_workers import ProcessWorkerPool

            return ProcessWorkerPool(self.engine(), trials, plans, plan.devices, root)
        if launcher == "ray":
            from loadmaster.train.workers.ray_workers import RayWorkerPool

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
        trials = {name: self._as_begun.get(name, trial) for name, trial in self._trials.items()}
        if self._timeout_s is None:
            return trials
        limit_s = self._timeout_s
        return {
            name: replace(trial, data=with_timeout(trial.data, limit_s, trial=name))
            for name, trial in trials.items()
        }

    def _make_result(self, state: StudyState, wall_s: float, coordinator: Coordinator) -> Result:
        root = self.dir / "checkpoints"
        rows = tuple(
            replace(
                _make_result_with_best(state.entries[name], root, self._keeping),
                is_evaluated=name in self.evaluated,
            )
            for name in self.names
        )
        return Result(rows, self.metric, self.mode, wall_s, tuple(coordinator.spans))


def _make_ended_plan(name: str, num_steps: int, how: str) -> TrialPlan:
    """Nothing more is planned for it."""
    return TrialPlan(
        trial=name, num_steps=num_steps, step_s=0.0, host_bytes=0, state_bytes=0, num_shards=0, ended=how
    )


def _collect_facts(trial: Any) -> dict[str, Any]:
    """What may not change between two calls."""
    drawn = "counter" if getattr(trial, "counted_rng", False) else "stream"
    return {name: getattr(trial, name, None) for name in _FACTS} | {"drawn": drawn}


def _keep_older_draws(trial: Any, entry: TrialEntry | None) -> Any:
    """A trial that was begun when accumulated steps were seeded goes on so, to the same weights."""
    if entry is None or "drawn" in entry.facts or trial.accumulate == 1 or trial.rng is not None:
        return trial
    return replace(trial, rng="counter")


def _make_result_with_best(entry: TrialEntry, root: Path, keeping: Keeping) -> TrialResult:
    found, best = make_trial_result(entry, root), keeping.find_best(entry, root)
    if best is None:
        return found
    metrics = dict(entry.reports[best.step][0])
    return replace(found, best_step=best.step, best_metrics=metrics, best_folder=root / best.folder)


@contextmanager
def _handle_signals(coordinator: Coordinator, grace_s: float) -> Iterator[None]:
    """Ctrl-C asks for a clean stop, the second one does not wait; SIGTERM asks for the same, and then ends.

    A second SIGTERM changes nothing: batch systems send it to a process and again to its group.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_interrupt(_number: int, _frame: object) -> None:
        if coordinator.halt_asked:
            raise SecondInterrupt
        coordinator.halt_asked = True

    def on_terminate(_number: int, _frame: object) -> None:
        coordinator.halt_asked = True
        if not terminated[0]:
            terminated[0] = True
            limit.start()

    terminated = [False]
    limit = threading.Timer(grace_s, _end_at_once, (grace_s,))
    limit.daemon = True
    handlers = {signal.SIGINT: on_interrupt, signal.SIGTERM: on_terminate}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    except KeyboardInterrupt:
        if not terminated[0]:
            raise
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        limit.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_at_once(grace_s: float) -> None:
    """After a SIGTERM, before SIGKILL comes: what is on disk is whole, as after any end."""
    text = (
        f"loadmaster: SIGTERM came {format_seconds(grace_s)} ago (grace_s), and the running step and its"
        " checkpoint are not done; ended without them: the checkpoints before are whole, and the same command"
        " goes on from them\n"
    )
    with suppress(OSError):
        os.write(2, text.encode())
    os._exit(128 + signal.SIGTERM)
