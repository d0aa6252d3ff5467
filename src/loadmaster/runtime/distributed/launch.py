"""Launch: a plan over processes, from a user's script.

    with lm.launch(plan, model, optimizer=torch.optim.AdamW) as run:
        for batch in data:
            loss = run.step(batch)

In an ordinary script the processes are started here, one for each device of the plan, and this one stays the
parent: batches go out, losses come back, and a failure is raised with the worker's own traceback. In a script
that torchrun started, every process calls `lm.launch` and takes the part of its rank.
"""

import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from loadmaster.core.errors import InputError, PlanError
from loadmaster.core.io import encode
from loadmaster.core.placement import Placement
from loadmaster.core.reasons import why_none_fits_in_short
from loadmaster.core.timeline import Timeline
from loadmaster.core.units import format_bytes
from loadmaster.runtime.distributed import checkpoints
from loadmaster.runtime.distributed.hosts import HostNetwork
from loadmaster.runtime.distributed.member import Member, MemberSpec, enter, local_threads
from loadmaster.runtime.distributed.peers import Meeting, meeting_from_environment
from loadmaster.runtime.distributed.pipeline.layout import PipelineLayout, layout_of
from loadmaster.runtime.distributed.pipeline.rank import TrainOptions
from loadmaster.runtime.distributed.processes import WorkerGroup
from loadmaster.runtime.distributed.timelines import StageTimes, merge_spans, stage_times
from loadmaster.runtime.distributed.watch import PeerWatch
from loadmaster.runtime.verify.verification import parse_batch

DEFAULT_TIMEOUT_S = 120.0


@dataclass(slots=True)
class PipelineRun:
    """A pipeline that is running; leave it with `with`, or `close`."""

    placement: Placement
    layout: PipelineLayout
    steps_done: int = 0
    grad_norm: float | None = None  # of the last step, before it was clipped
    _group: WorkerGroup | None = None  # this process is the parent
    _member: Member | None = None  # this process is a rank
    _watch: PeerWatch | None = None
    _network: HostNetwork | None = None
    _model: nn.Module | None = None
    _folder: Path | None = None
    _store: Any = None  # where the workers meet; it lives as long as the run
    _name: str = ""  # of the run, in what it has begun to write

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, _: TracebackType | None
    ) -> None:
        """End all processes; after an error at once."""
        self.close(at_once=problem is not None)

    @property
    def rank(self) -> int:
        """This process's rank; 0 in the parent of a run."""
        return self._member.rank.rank if self._member is not None else 0

    @property
    def optimizer(self) -> Any:
        """The optimizer of this rank's weights; only where torchrun started this process."""
        return self._require_member("optimizer").rank.optimizer

    def parameters(self) -> list[nn.Parameter]:
        """The weights of this rank's stages, once a batch has been seen; only under torchrun."""
        return list(self._require_member("parameters").rank.own_parameters().values())

    def prepare(self, batch: Any) -> None:
        """Cut the model for a batch like this one; the first step does it otherwise."""
        self._all("prepare", parse_batch(batch))

    def step(self, batch: Any, target: Any = None, *, update: bool = True) -> float:
        """One training step; gives the mean loss over the rows of the batch.

        `batch` is a tensor, a tuple of arguments or a dict of named ones; `loss(output, target)` compares.
        With `update=False` gradients are only added up.
        """
        args, kwargs = parse_batch(batch)
        answers = self._all("step", (args, kwargs, target, update))
        return self._stepped(answers)

    def synthetic_step(self) -> float:
        """One step on a batch made up by the workers; for models that were made from a plan's source."""
        return self._stepped(self._all("synthetic", None))

    def _stepped(self, answers: Sequence[Any]) -> float:
        self.steps_done += 1
        loss, self.grad_norm = answers[0]
        return float(loss)

    def evaluate(self, batch: Any, target: Any = None) -> float:
        """The loss of a batch in eval mode, without gradients."""
        return float(self._all("evaluate", (*parse_batch(batch), target))[0])

    def predict(self, batch: Any) -> Any:
        """What the model gives for a batch in eval mode, on the CPU."""
        answers = self._all("predict", parse_batch(batch))
        if self._member is not None and self.layout.world > 1:
            found: list[Any] = [None] * self.layout.world
            dist.all_gather_object(found, answers[0])
            answers = found
        parts = sorted((part for each in answers if each for part in each), key=lambda part: part[0])
        return _join_outputs([part for _, part in parts])

    def save(self, folder: str | os.PathLike[str]) -> str:
        """Write a checkpoint below a folder; gives its path."""
        self._folder = Path(folder)
        return str(self._all("save", str(folder))[0])

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint: of this plan or another one."""
        path = Path(folder)
        if not (path / checkpoints.FACTS).is_file() and checkpoints.find_latest(path) is None:
            raise InputError(f"{path} holds no checkpoint of a run")
        self.steps_done = int(self._all("load", str(folder))[0])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The plain model's state_dict on the CPU; under torchrun on rank 0, elsewhere empty."""
        answers = self._all("state", None)
        if self._member is not None and self.layout.world > 1:
            found: list[Any] | None = [None] * self.layout.world if self.rank == 0 else None
            dist.gather_object(answers[0], found)
            answers = found or []
        merged = {name: tensor for part in answers for name, tensor in part.items()}
        names = list(self._model.state_dict()) if self._model is not None else sorted(merged)
        return {name: merged[name] for name in names if name in merged}

    def clocked(self, on: bool) -> None:
        """Whether GPUs are waited for after every action, so that spans are true; steps are slower."""
        self._all("clocked", on)

    def reports(self) -> list[Mapping[str, Any]]:
        """What each rank measured in the last step."""
        answers = self._all("report", None)
        if self._member is not None and self.layout.world > 1:
            found: list[Any] = [None] * self.layout.world
            dist.all_gather_object(found, answers[0])
            return found
        return answers

    def timeline(self) -> Timeline:
        """The last step as all ranks measured it, on one clock."""
        devices = [self.layout.device_of(rank) for rank in range(self.layout.world)]
        return merge_spans(self.placement, devices, self.reports())

    def stage_times(self) -> tuple[StageTimes, ...]:
        """The last step by stages: forward, backward, bubble."""
        names = self.placement.problem.cluster.device_name
        devices = [names[self.layout.device_of(rank)] for rank in range(self.layout.world)]
        return stage_times(self.reports(), devices)

    def close(self, *, at_once: bool = False) -> None:
        """End all processes and take down what was set up for them."""
        if self._watch is not None:
            self._watch.stop()
        if self._member is not None:
            self._member.close()
        if self._group is not None:
            self._group.kill() if at_once else self._group.close()
            if at_once and self._folder is not None:
                checkpoints.remove_partial(self._folder, self._name)
        if self._network is not None:
            self._network.close()
        self._watch = self._group = self._member = self._network = self._store = None

    def _all(self, command: str, given: Any) -> list[Any]:
        if self._member is not None:
            return [self._member(command, given)]
        if self._group is None:
            raise InputError("this run has ended; start another with lm.launch")
        try:
            return self._group.ask(command, given)
        except BaseException:
            self.close(at_once=True)
            raise

    def _require_member(self, what: str) -> Member:
        if self._member is None:
            raise InputError(
                f"{what} are in the worker processes; pass optimizer=, scheduler= and clip="
                " to lm.launch, or start"
                " the script with torchrun, where each process has its own"
            )
        return self._member


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How processes are started and what they wait for."""

    train: TrainOptions = field(default_factory=TrainOptions)
    timeout_s: float = DEFAULT_TIMEOUT_S
    threads: int | None = None  # of each process on a CPU
    source: str | None = None  # of the model, instead of the plan's own
    environments: Sequence[
        Mapping[str, str]
    ] = ()  # of each worker process, e.g. its share of a GPU under MPS
    emulate: bool = False  # hosts of the plan as network namespaces, links as the plan has them


def launch(placement: Placement, model: nn.Module | None, options: LaunchOptions) -> PipelineRun:
    """Start the processes of a plan, or, under torchrun, take the part of this one."""
    if options.timeout_s <= 0:
        raise InputError(f"timeout is {options.timeout_s}; give seconds > 0")
    layout = layout_of_runnable(placement)
    layout.actions(0)  # refuses an order that would hang
    meeting = meeting_from_environment(options.timeout_s)
    if meeting is not None:
        return _join(placement, layout, model, options, meeting)
    return _start(placement, layout, model, options)


def layout_of_runnable(placement: Placement) -> PipelineLayout:
    """The layout of a plan whose stages fit."""
    if placement.plan is None:
        raise PlanError(f"{why_none_fits_in_short(placement)}; lm.fit says which change is the cheapest")
    layout = layout_of(placement)
    cluster = placement.problem.cluster
    for row in layout.device:
        for stage, device in enumerate(row):
            needs, has = int(placement.peak_bytes[device]), int(cluster.usable_bytes[device])
            if needs > has:
                raise PlanError(
                    f"stage {stage} does not fit on {cluster.device_name[device]}: it needs"
                    f" {format_bytes(needs)},"
                    f" {format_bytes(has)} are there; plan more stages, fewer micro-batches or recomputation"
                )
    return layout


def _join(
    placement: Placement,
    layout: PipelineLayout,
    model: nn.Module | None,
    options: LaunchOptions,
    meeting: Meeting,
) -> PipelineRun:
    if meeting.world != layout.world:
        raise InputError(
            f"the plan needs {layout.world} processes, {meeting.world} were started; start"
            f" {layout.world}, e.g."
            f" with torchrun --nproc-per-node {layout.world}, or plan for {meeting.world}"
        )
    spec = MemberSpec(b"", meeting, options.train, model, options.source, options.threads)
    member = Member(spec, placement)
    watch = PeerWatch(meeting.rank, meeting.world, member.waits)
    watch.start()
    return PipelineRun(placement, layout, _member=member, _watch=watch, _model=member.rank.model)


def _start(
    placement: Placement, layout: PipelineLayout, model: nn.Module | None, options: LaunchOptions
) -> PipelineRun:
    _require_one_host(placement, options)
    network = HostNetwork.of(placement.problem.cluster) if options.emulate else None
    name = uuid.uuid4().hex[:8]
    environments = [
        {**(options.environments[rank] if options.environments else {}), checkpoints.RUN_NAME: name}
        for rank in range(layout.world)
    ]
    try:
        hosts = [int(placement.problem.cluster.host[layout.device_of(rank)]) for rank in range(layout.world)]
        spaces = [network.space(host) for host in hosts] if network is not None else [None] * layout.world
        address = network.address if network is not None else "127.0.0.1"
        store = dist.TCPStore(
            "0.0.0.0" if network is not None else "127.0.0.1",  # the bridge of our own namespaces
            0,
            layout.world,
            is_master=True,
            wait_for_workers=False,
        )
        threads = options.threads if options.threads is not None else local_threads(layout.world)
        data = encode(placement)
        specs = [
            MemberSpec(
                data,
                Meeting(
                    rank,
                    layout.world,
                    address,
                    store.port,
                    options.timeout_s,
                    "lo" if network is None else "eth0",
                ),
                options.train,
                model,
                options.source,
                threads,
            )
            for rank in range(layout.world)
        ]
        group = WorkerGroup(enter, specs, spaces, environments)
        group.start()
    except BaseException:
        if network is not None:
            network.close()
        raise
    return PipelineRun(
        placement, layout, _group=group, _network=network, _model=model, _store=store, _name=name
    )


def _require_one_host(placement: Placement, options: LaunchOptions) -> None:
    cluster = placement.problem.cluster
    hosts = sorted(set(cluster.host.tolist()))
    if len(hosts) > 1 and not options.emulate:
        raise PlanError(
            f"the plan is for {len(hosts)} hosts and would all run on this one"
            f" ({socket.gethostname()}); start it"
            " with torchrun on each host, or emulate the hosts here (--emulate, emulate=True)"
        )


def _join_outputs(parts: list[Any]) -> Any:
    """Outputs of micro-batches as one: rows one after the other, single numbers as their mean."""
    if not parts:
        return None
    flat = [tree_flatten(part) for part in parts]
    joined: list[Any] = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(leaves[0], torch.Tensor):
            joined.append(leaves[0])
        elif leaves[0].dim() == 0:
            joined.append(torch.stack([one.float() for one in leaves]).mean())
        else:
            joined.append(torch.cat(list(leaves)))
    return tree_unflatten(joined, flat[0][1])


Loss = Callable[..., torch.Tensor]
