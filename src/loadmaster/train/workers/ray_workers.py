"""Workers as Ray actors, on one machine or many. Needs the extra `ray`.

Each device is an actor. Ray starts them, finds out when one dies, and carries all data: turns are actor
calls, events come through a queue, states of trials travel through the object store. The coordinator writes
all checkpoints, so the machines need no file system in common.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from loadmaster.cluster.local import format_local_device, parse_local_devices
from loadmaster.core.errors import InputError
from loadmaster.shards.spec.engine import Engine, Runner, TrialPlan
from loadmaster.train.workers.device_worker import Worker, take_snapshot
from loadmaster.train.workers.messages import (
    Event,
    Halt,
    Message,
    Parcel,
    Quit,
    Release,
    Task,
    TurnEnded,
    WorkerLost,
)

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b:?")


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as problem:
        if find_spec("ray") is None:
            raise InputError("launcher='ray' needs Ray; install it: pip install 'loadmaster[ray]'") from None
        raise InputError(
            f"Ray is installed, but cannot be imported: {type(problem).__name__}: {problem}; repair it: pip"
            " install --upgrade 'loadmaster[ray]'"
        ) from problem
    return ray


def explain_ray_error(problem: Exception) -> str:
    """Ray's first line, and the exception that its text ends in: an import that failed, for example."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    causes = [line for line in lines[1:] if _EXCEPTION.match(line)]
    head = lines[0] if lines else type(problem).__name__
    return f"{head} {causes[-1]}" if causes else head


def ray_device_names() -> list[str]:
    """The GPUs of the Ray cluster, or one CPU device for each CPU where it has none."""
    ray = _import_ray()
    _connect(ray)
    resources = ray.cluster_resources()
    num_gpus = int(resources.get("GPU", 0))
    if num_gpus:
        return [f"cuda:{at}" for at in range(num_gpus)]
    return [f"cpu#{at}" for at in range(max(1, int(resources.get("CPU", 1))))]


def _connect(ray: Any) -> None:
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)


class RayWorker(Worker):
    """A worker whose neighbours may be on other machines."""

    def pack(self, runner: Runner) -> Parcel:
        """Put the state into the object store and let go of it here."""
        parcel = Parcel(_import_ray().put(take_snapshot(runner)))
        runner.close()
        return parcel

    def unpack(self, runner: Runner, parcel: Parcel) -> None:
        """Fetch it."""
        content = parcel.content
        snapshot = content if hasattr(content, "tensors") else _import_ray().get(content)
        # What comes out of the object store is shared and read-only.
        runner.restore({name: each.clone() for name, each in snapshot.tensors.items()}, snapshot.facts)


class _WorkerActor:
    """What lives in an actor: a worker, and a way out for its events."""

    def __init__(
        self,
        engine: Engine,
        trials: Mapping[str, Any],
        plans: Mapping[str, TrialPlan],
        device: str,
        at: int,
        events: Any,
        num_threads: int,
    ) -> None:
        import threading

        torch.set_num_threads(num_threads)  # Ray's own choice depends on what was imported when

        self._halted = False
        self._at, self._events = at, events
        self._turn = threading.Lock()  # halting must not wait for a turn; everything else must
        if device.startswith("cuda"):  # Ray shows an actor its own GPU only
            (word,) = parse_local_devices([device])
            device = format_local_device(replace(word, kind="cuda:0", number=""))
        self._worker = RayWorker(engine, trials, plans, device, None, halted=lambda: self._halted)

    def handle(self, message: Message) -> None:
        """Do what the coordinator asks; events go into the queue."""
        with self._turn:
            if isinstance(message, Task):
                self._halted = False
                for event in self._worker.work(message):
                    self._tell(event)
            elif isinstance(message, Release):
                released = self._worker.release(message)
                if released is not None:
                    self._tell(released)

    def _tell(self, event: Event) -> None:
        if isinstance(event, TurnEnded) and event.snapshot is not None:
            event = replace(event, snapshot=_import_ray().put(event.snapshot))
        self._events.put((self._at, event))

    def halt(self) -> None:
        """End the turn at the next step boundary."""
        self._halted = True


class RayWorkerPool:
    """Workers as actors; Ray restarts nobody, the coordinator asks for new ones."""

    writes_checkpoints = False

    def __init__(
        self,
        engine: Engine,
        trials: Mapping[str, Any],
        plans: Mapping[str, TrialPlan],
        devices: Sequence[str],
    ) -> None:
        self._ray = _import_ray()
        _connect(self._ray)
        from ray.util.queue import Queue

        self._events = Queue()
        self._given = engine, dict(trials), dict(plans), list(devices)
        self._calls: list[list[Any]] = [[] for _ in devices]
        self._actors = [self._start_actor(at) for at in range(len(devices))]

    def _start_actor(self, at: int) -> Any:
        engine, trials, plans, devices = self._given
        num_gpus = 1 if devices[at].startswith("cuda") else 0
        host = self._ray.remote(num_cpus=1, num_gpus=num_gpus, max_concurrency=2, max_restarts=0)(
            _WorkerActor
        )
        return host.remote(engine, trials, plans, devices[at], at, self._events, torch.get_num_threads())

    def send(self, device: int, message: Message) -> None:
        """An actor call; its end, or its actor's, is seen in `receive`."""
        actor = self._actors[device]
        if isinstance(message, Halt):
            actor.halt.remote()
        elif not isinstance(message, Quit):
            self._calls[device].append(actor.handle.remote(message))

    def receive(self, timeout_s: float) -> tuple[int, Event] | None:
        """The next event of any actor."""
        from ray.util.queue import Empty

        try:
            device, event = self._events.get(timeout=timeout_s)
        except Empty:
            return self._dead()
        if isinstance(event, TurnEnded) and event.snapshot is not None:
            try:
                event = replace(event, snapshot=self._ray.get(event.snapshot))
            except self._ray.exceptions.RayError as problem:
                return device, WorkerLost(
                    f"the state of trial {event.trial!r} was lost with its worker: {problem}"
                )
        return device, event

    def _dead(self) -> tuple[int, Event] | None:
        """A worker whose call ended in the death of its actor."""
        for device, calls in enumerate(self._calls):
            ended, self._calls[device] = (
                self._ray.wait(calls, num_returns=len(calls), timeout=0) if calls else ([], [])
            )
            for call in ended:
                try:
                    self._ray.get(call)
                except self._ray.exceptions.RayError as problem:
                    return device, WorkerLost(explain_ray_error(problem))
        return None

    @property
    def actors(self) -> list[Any]:
        """The actors, in the order of the devices."""
        return list(self._actors)

    def restart(self, device: int) -> None:
        """A new actor in place of one that is gone."""
        self._ray.kill(self._actors[device])
        self._calls[device] = []
        self._actors[device] = self._start_actor(device)

    def close(self) -> None:
        """End all actors and the queue."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._events.shutdown(force=True)
