"""Running: what a user holds of a launched run, as the parent of its processes or as one of its ranks."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from loadmaster.core.errors import InputError
from loadmaster.runtime.distributed import checkpoints
from loadmaster.runtime.distributed.hosts import HostNetwork
from loadmaster.runtime.distributed.member import RankMember
from loadmaster.runtime.distributed.processes import WorkerGroup
from loadmaster.runtime.distributed.watch import PeerWatch
from loadmaster.runtime.verify.verification import parse_batch


class Layout(Protocol):
    """Which processes there are."""

    @property
    def world(self) -> int:
        """Processes."""
        ...

    def device_of(self, rank: int) -> int:
        """The device of a process."""
        ...


@dataclass(slots=True, kw_only=True)
class LaunchedRun:
    """Processes that train; leave them with `with`, or `close`."""

    layout: Layout
    steps_done: int = 0
    grad_norm: float | None = None  # of the last step, before it was clipped
    _group: WorkerGroup | None = None  # this process is the parent
    _member: RankMember | None = None  # this process is a rank
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
        self.close(problem)

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
        self._all("prepare", self._parse(batch))

    def step(self, batch: Any, target: Any = None, *, update: bool = True) -> float:
        """One training step; gives the mean loss over the rows of the batch.

        `batch` is a tensor, a tuple of arguments or a dict of named ones; `loss(output, target)` compares.
        With `update=False` gradients are only added up.
        """
        answers = self._all("step", (*self._parse(batch), target, update))
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
        return float(self._all("evaluate", (*self._parse(batch), target))[0])

    def predict(self, batch: Any) -> Any:
        """What the model gives for a batch in eval mode, on the CPU."""
        answers = self._all("predict", self._parse(batch))
        if self._member is not None:
            answers = self._member.waits.gather(answers[0], "all ranks to give what they predict")
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
            with self._member.waits.told("all ranks to give their weights"):
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
        if self._member is not None:
            return self._member.waits.gather(answers[0], "all ranks to say what they measured")
        return answers

    def close(self, problem: BaseException | None = None) -> None:
        """End all processes and take down what was set up for them; after a problem at once."""
        at_once = problem is not None
        if self._watch is not None:
            self._watch.stop(problem)
        if self._member is not None:
            self._member.close()
        if self._group is not None:
            self._group.kill() if at_once else self._group.close()
            if at_once and self._folder is not None:
                checkpoints.remove_partial(self._folder, self._name)
        if self._network is not None:
            self._network.close()
        self._watch = self._group = self._member = self._network = self._store = None

    def _parse(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a batch; one that cannot be run is refused here, and the run goes on."""
        args, kwargs = parse_batch(batch)
        self._require_rows((args, kwargs))
        return args, kwargs

    def _require_rows(self, inputs: Any) -> None:
        """Refuse a batch that has too few rows."""

    def _all(self, command: str, given: Any) -> list[Any]:
        if self._member is not None:
            return [self._member(command, given)]
        if self._group is None:
            raise InputError("this run has ended; start another with lm.launch")
        try:
            return self._group.ask(command, given)
        except BaseException as problem:
            self.close(problem)
            raise

    def _require_member(self, what: str) -> RankMember:
        if self._member is None:
            raise InputError(
                f"{what} are in the worker processes; pass optimizer=, scheduler= and clip="
                " to lm.launch, or start"
                " the script with torchrun, where each process has its own"
            )
        return self._member


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
