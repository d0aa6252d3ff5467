"""Strategies to run: written by hand, and plain training of the whole batch to compare with."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import loadmaster as lm
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.errors import LoadmasterError
from loadmaster.core.graph import NO_MIRROR, Graph, Phase
from loadmaster.core.io import decode, encode
from loadmaster.core.strategy import Mode, OpGroup, Strategy, Sync
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.modules.loss import compute_loss
from loadmaster.runtime.distributed import checkpoints
from loadmaster.runtime.distributed.peers import Meeting, meet
from loadmaster.runtime.distributed.pipeline.rank import TrainOptions
from loadmaster.runtime.distributed.processes import WorkerGroup
from loadmaster.runtime.distributed.strategy.rank import StrategyOptions, StrategyRank
from loadmaster.runtime.distributed.transports import Waits
from loadmaster.zoo.example import Example


@dataclass(frozen=True)
class Part:
    """One group: a share of the forward ops in order, and how it runs. `sfb` names weights."""

    devices: tuple[int, ...]
    rows: tuple[int, ...]
    mode: Mode = Mode.REPLICATE
    sync: Sync = Sync.NONE
    server: int = -1
    sfb: tuple[str, ...] = ()
    microbatches: int = 1


def strategy_answer(
    example: Example, parts: Sequence[Part], *, batch: int, world: int = 2, devices: str | None = None
) -> StrategyAnswer:
    """An answer whose groups are equal runs of forward ops with their weights, backward ops and updates."""
    graph = lm.capture(example.model, example.args, example.kwargs, loss=example.loss)
    words = devices or ", ".join(f"cpu#{at}-2GB" for at in range(world))
    problem = lm.problem(graph, parse_cluster(words))
    of = groups_by_share(graph, len(parts))
    number = {name: op for op, name in enumerate(graph.op_name)}
    groups = []
    for g, part in enumerate(parts):
        groups.append(
            OpGroup(
                ops=np.flatnonzero(of == g),
                devices=part.devices,
                rows=part.rows,
                mode=part.mode,
                sync=part.sync,
                server=part.server,
                sfb=tuple(number[name] for name in part.sfb),
                microbatches=part.microbatches,
            )
        )
    schedule = "1f1b" if any(part.microbatches > 1 for part in parts) else ""
    strategy = Strategy(
        "by hand", graph.digest, problem.cluster.digest, batch, tuple(groups), schedule=schedule
    )
    return StrategyAnswer(
        problem=problem,
        strategy=strategy,
        algorithm="by hand",
        score_s=1.0,
        bound_s=0.0,
        bound_name="",
        peak_bytes=np.zeros(problem.cluster.num_devices, dtype=np.int64),
        wall_s=0.0,
    )


def groups_by_share(graph: Graph, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """[N] equal shares of the forward ops, in order, each with what belongs to it."""
    forward = graph.phase == Phase.FORWARD
    of = np.full(graph.num_ops, -1)
    of[forward] = np.minimum(np.cumsum(forward)[forward] * count // (forward.sum() + 1), count - 1)
    back = graph.mirror != NO_MIRROR
    of[back] = of[graph.mirror[back]]
    maker, user = graph.tensor_op[graph.use_tensor], graph.use_op
    for op in np.flatnonzero(graph.phase == Phase.PARAM):
        readers = [of[u] for m, u in zip(maker, user, strict=True) if m == op and of[u] >= 0]
        of[op] = min(readers, default=0)
    for m, u in zip(maker, user, strict=True):
        if graph.phase[m] == Phase.PARAM and graph.phase[u] == Phase.UPDATE:
            of[u] = of[m]
    left = np.flatnonzero(of < 0)
    of[left] = 0
    return of


@dataclass
class Plain:
    """What plain training of the whole batch gives."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    norm: float


def train_whole(
    model: nn.Module,
    batches: Sequence[Any],
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    loss: Any,
    clip: float | None = None,
) -> Plain:
    """One process, no Loadmaster: forward of all rows, backward, clip, step."""
    own = copy.deepcopy(model).train()
    optimizer, losses, norm = make(list(own.parameters())), [], 0.0
    for batch in batches:
        optimizer.zero_grad()
        out = own(**batch) if isinstance(batch, dict) else own(batch)
        found = compute_loss(out, loss)
        found.backward()
        if clip is not None:
            norm = float(nn.utils.clip_grad_norm_(own.parameters(), clip))
        optimizer.step()
        losses.append(float(found.detach()))
    return Plain(losses, {name: one.detach().clone() for name, one in own.state_dict().items()}, norm)


@dataclass
class Case:
    """A strategy to train by, as it travels to a process that has met the others already."""

    answer: bytes
    model: nn.Module
    options: Any
    extras: Any
    steps: Any  # (args, kwargs, target, update) of each


@dataclass
class Found:
    """What one rank has to tell of a case."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    norm: float | None
    sent: dict[str, int]
    notes: list[str]
    drift: Any


class CaseRunner:
    """In a worker: trains one case after the other, so that processes start once."""

    def __init__(self, meeting: Meeting) -> None:
        torch.set_num_threads(1)
        self.meeting = meeting
        meet(meeting)

    def __call__(self, command: str, case: Case) -> Any:
        waits = Waits(self.meeting.rank, self.meeting.timeout_s)
        answer = decode(case.answer)
        assert isinstance(answer, StrategyAnswer)
        rank = StrategyRank(
            answer,
            case.model,
            case.options,
            case.extras,
            self.meeting.rank,
            torch.device("cpu"),
            waits,
        )
        try:
            losses = [rank.step(args, kw, target, update=update) for args, kw, target, update in case.steps]
        except LoadmasterError as problem:
            return str(problem)
        state = checkpoints.own_state(rank)
        return Found(losses, state, rank.grad_norm, rank.sent, rank.notes, rank.drift.report)


class Processes:
    """Worker processes that run cases; every rank gets the same."""

    def __init__(self, world: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        specs = [Meeting(rank, world, "127.0.0.1", self.store.port, 60.0, "lo") for rank in range(world)]
        self.group = WorkerGroup(CaseRunner, specs)
        self.group.start()

    def run(
        self,
        answer: StrategyAnswer,
        model: nn.Module,
        batches: Sequence[Any],
        *,
        loss: Any,
        optimizer: Any,
        clip: float | None = None,
        update: Sequence[bool] | None = None,
        **extras: Any,
    ) -> list[Any]:
        """What each rank found; a message where it refused."""
        steps = []
        for at, batch in enumerate(batches):
            args, kwargs, target = batch if isinstance(batch, tuple) else ((batch,), {}, None)
            steps.append((args, kwargs, target, update is None or update[at]))
        options = TrainOptions(loss=loss, optimizer=optimizer, clip=clip)
        case = Case(encode(answer), copy.deepcopy(model), options, StrategyOptions(**extras), steps)
        return self.group.ask("case", case)

    def close(self) -> None:
        self.group.close()


def joined_state(found: Sequence[Found]) -> dict[str, torch.Tensor]:
    """The plain model's state of what all ranks would save."""
    return {name: tensor for one in found for name, tensor in one.state.items()}


def total_sent(found: Sequence[Found]) -> dict[str, int]:
    """Bytes of all ranks in the last step."""
    total: Counter[str] = Counter()
    for one in found:
        total.update(one.sent)
    return dict(total)
