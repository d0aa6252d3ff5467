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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from loadmaster.cluster.probe import threads_of_each
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import InputError, PlanError
from loadmaster.core.io import encode, load
from loadmaster.core.placement import Placement
from loadmaster.core.reasons import why_none_fits_in_short
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.core.units import format_bytes
from loadmaster.runtime.distributed import checkpoints
from loadmaster.runtime.distributed.hosts import HostNetwork
from loadmaster.runtime.distributed.member import MemberSpec, RankMember, enter
from loadmaster.runtime.distributed.peers import (
    Meeting,
    leave,
    meeting_from_environment,
    open_meeting,
    open_store,
)
from loadmaster.runtime.distributed.pipeline.layout import PipelineLayout, layout_of
from loadmaster.runtime.distributed.pipeline.rank import TrainOptions
from loadmaster.runtime.distributed.pipeline_run import PipelineRun
from loadmaster.runtime.distributed.processes import WorkerGroup
from loadmaster.runtime.distributed.strategy.as_pipeline import is_pipeline, plan_as_pipeline
from loadmaster.runtime.distributed.strategy.layout import StrategyLayout, layout_of_strategy
from loadmaster.runtime.distributed.strategy.rank import StrategyOptions
from loadmaster.runtime.distributed.strategy_run import StrategyRun
from loadmaster.runtime.distributed.transports import Waits
from loadmaster.runtime.distributed.watch import PeerWatch, end_process
from loadmaster.runtime.placed import require_weights

DEFAULT_TIMEOUT_S = 120.0


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
    strategy: StrategyOptions = field(default_factory=StrategyOptions)
    emulate: bool = False  # hosts of the plan as network namespaces, links as the plan has them


def load_launchable(given: Any) -> Placement | StrategyAnswer:
    """The plan or strategy that is given, or lies in the file that is named."""
    found = load(given) if isinstance(given, str | os.PathLike) else given
    if isinstance(found, Placement | StrategyAnswer):
        return found
    raise InputError(
        f"{type(found).__name__} cannot be launched; give what lm.plan or a search of strategies answered,"
        " or its file"
    )


def strategy_options(answer: Placement | StrategyAnswer, given: Mapping[str, Any]) -> StrategyOptions:
    """What only strategies take, by name."""
    known = {one.name for one in fields(StrategyOptions)}
    strange = sorted(set(given) - known)
    if strange:
        raise InputError(
            f"lm.launch takes no {strange[0]!r}; of strategies it takes {', '.join(sorted(known))}"
        )
    if given and isinstance(answer, Placement):
        raise InputError(f"{sorted(given)[0]!r} is for strategies, and this is a plan with a pipeline")
    options = StrategyOptions(**given)
    if options.compare_every < 0 or options.bucket_bytes < 1:
        raise InputError(
            f"compare_every is {options.compare_every} and bucket_bytes {options.bucket_bytes}; give steps"
            " >= 0 and bytes > 0"
        )
    return options


def launch(
    answer: Placement | StrategyAnswer, model: nn.Module | None, options: LaunchOptions
) -> PipelineRun | StrategyRun:
    """Start the processes of a plan, or, under torchrun, take the part of this one."""
    _require_options(options)
    if model is not None:
        require_weights(model, answer.problem.graph)
    if isinstance(answer, StrategyAnswer) and is_pipeline(answer.strategy):
        answer = plan_as_pipeline(answer)
    layout: PipelineLayout | StrategyLayout
    if isinstance(answer, StrategyAnswer):
        layout = layout_of_strategy(answer)
    else:
        layout = layout_of_runnable(answer)
        layout.actions(0)  # refuses an order that would hang
    meeting = meeting_from_environment(options.timeout_s)
    parts = (
        _start(answer, layout, model, options)
        if meeting is None
        else _join(answer, layout, model, options, meeting)
    )
    if isinstance(answer, StrategyAnswer):
        assert isinstance(layout, StrategyLayout), "made above"
        return StrategyRun(answer=answer, layout=layout, **parts)
    assert isinstance(layout, PipelineLayout), "made above"
    return PipelineRun(placement=answer, layout=layout, **parts)


def _require_options(options: LaunchOptions) -> None:
    """Refuse what would fail in a worker, or train wrongly."""
    train = options.train
    if not options.timeout_s > 0:
        raise InputError(f"timeout is {options.timeout_s}; give seconds > 0")
    if options.threads is not None and options.threads < 1:
        raise InputError(f"threads is {options.threads}; give a whole number >= 1, or leave it out")
    if train.clip is not None and not train.clip > 0:
        raise InputError(
            f"clip is {train.clip}; give the largest norm of all gradients, > 0, or leave it out"
        )
    if train.autocast is not None and train.autocast not in (torch.bfloat16, torch.float16):
        raise InputError(f"autocast is {train.autocast!r}; give torch.bfloat16 or torch.float16")
    if train.scheduler is not None and not callable(train.scheduler):
        raise InputError(
            f"scheduler is {train.scheduler!r}; give a function that makes one of the optimizer, such as"
            " lambda optimizer: StepLR(optimizer, 10)"
        )
    if train.scheduler is not None and train.optimizer is None:
        raise InputError("a scheduler was given, but no optimizer; pass optimizer= to lm.launch")


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
    answer: Placement | StrategyAnswer,
    layout: PipelineLayout | StrategyLayout,
    model: nn.Module | None,
    options: LaunchOptions,
    meeting: Meeting,
) -> dict[str, Any]:
    if meeting.world != layout.world:
        raise InputError(
            f"the plan needs {layout.world} processes, {meeting.world} were started; start"
            f" {layout.world}, e.g."
            f" with torchrun --nproc-per-node {layout.world}, or plan for {meeting.world}"
        )
    spec = MemberSpec(b"", meeting, options.train, model, options.source, options.threads, options.strategy)
    store, waits = open_meeting(meeting), Waits(meeting.rank, meeting.timeout_s)
    watch = PeerWatch(meeting.rank, meeting.world, waits, store, end_process)
    watch.start()
    try:
        member = RankMember(spec, answer, waits=waits, store=store)
    except BaseException as problem:
        watch.stop(problem)
        leave()
        raise
    return {"_member": member, "_watch": watch, "_model": member.rank.model}


def _start(
    answer: Placement | StrategyAnswer,
    layout: PipelineLayout | StrategyLayout,
    model: nn.Module | None,
    options: LaunchOptions,
) -> dict[str, Any]:
    cluster = answer.problem.cluster
    _require_one_host(cluster, options)
    network = HostNetwork.of(cluster) if options.emulate else None
    name = uuid.uuid4().hex[:8]
    environments = [
        {**(options.environments[rank] if options.environments else {}), checkpoints.RUN_NAME: name}
        for rank in range(layout.world)
    ]
    try:
        hosts = [int(cluster.host[layout.device_of(rank)]) for rank in range(layout.world)]
        spaces = [network.space(host) for host in hosts] if network is not None else [None] * layout.world
        address = network.address if network is not None else "127.0.0.1"
        store = open_store(address, layout.world)
        threads = options.threads if options.threads is not None else threads_of_each(layout.world)
        data = encode(answer)
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
                options.strategy,
            )
            for rank in range(layout.world)
        ]
        group = WorkerGroup(enter, specs, spaces, environments)
        group.start()
    except BaseException:
        if network is not None:
            network.close()
        raise
    return {"_group": group, "_network": network, "_model": model, "_store": store, "_name": name}


def _require_one_host(cluster: Cluster, options: LaunchOptions) -> None:
    hosts = sorted(set(cluster.host.tolist()))
    if len(hosts) > 1 and not options.emulate:
        raise PlanError(
            f"the plan is for {len(hosts)} hosts and would all run on this one"
            f" ({socket.gethostname()}); start it"
            " with torchrun on each host, or emulate the hosts here (--emulate, emulate=True)"
        )
