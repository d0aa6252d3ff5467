"""Member: one process of a launched plan, started here or by torchrun; it executes commands.

prepare, step, evaluate, predict, save, load, state, spans, notes
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import InputError, LoadmasterError
from loadmaster.core.graph import Graph
from loadmaster.core.io import decode
from loadmaster.core.placement import Placement
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.graph.export import find_size
from loadmaster.graph.models import CaptureOptions, load_model_parts
from loadmaster.graph.origin import origin_of
from loadmaster.runtime.distributed import checkpoints
from loadmaster.runtime.distributed.clocks import clock_offset_s
from loadmaster.runtime.distributed.peers import (
    Meeting,
    describe_process,
    leave,
    meet,
    open_transport,
    require_agreement,
)
from loadmaster.runtime.distributed.pipeline.layout import PipelineLayout, layout_of
from loadmaster.runtime.distributed.pipeline.rank import PipelineRank, TrainOptions
from loadmaster.runtime.distributed.strategy.layout import StrategyLayout, layout_of_strategy
from loadmaster.runtime.distributed.strategy.rank import StrategyOptions, StrategyRank
from loadmaster.runtime.distributed.synthetic import SyntheticBatches
from loadmaster.runtime.distributed.transports import Waits
from loadmaster.runtime.placed import require_weights
from loadmaster.runtime.transport.devices import locate_device
from loadmaster.zoo.hf import restore_attention


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """What a process needs to know to take part."""

    answer: bytes  # a Placement or a StrategyAnswer, as a file has it
    meeting: Meeting
    options: TrainOptions
    model: nn.Module | None = None  # None: made again from the source that the plan names
    source: str | None = None  # instead of the plan's own
    threads: int | None = None
    strategy: StrategyOptions = field(default_factory=StrategyOptions)


class RankMember:
    """A process that takes part in a run."""

    def __init__(
        self,
        spec: MemberSpec,
        answer: Placement | StrategyAnswer | None = None,
        *,
        waits: Waits | None = None,
        store: Any = None,
    ) -> None:
        """Join the others and agree with them; nothing has been computed yet."""
        self.spec = spec
        found = decode(spec.answer) if answer is None else answer
        assert isinstance(found, Placement | StrategyAnswer), "checked before it was sent"
        self.answer = found
        cluster = found.problem.cluster
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self.waits = Waits(spec.meeting.rank, spec.meeting.timeout_s) if waits is None else waits
        layout = layout_of(found) if isinstance(found, Placement) else layout_of_strategy(found)
        rank = spec.meeting.rank
        self.where, problem = torch.device("cpu"), ""
        if rank < layout.world:
            try:
                self.where = locate_device(cluster, layout.device_of(rank))
            except LoadmasterError as failure:
                problem = str(failure)
        if self.where.type == "cuda" and not problem:
            _cap_memory(cluster, layout.device_of(rank), self.where)
        meet(spec.meeting, store)
        versions = {"loadmaster": version("loadmaster"), "plan": found.digest}
        facts = describe_process(rank, str(self.where), versions, problem)
        everyone = require_agreement(facts, layout.world, ("loadmaster", "plan", "torch"), self.waits)
        model, options = spec.model, spec.options
        self.batches: SyntheticBatches | None = None
        self._saved: tuple[tuple[Path, int], str] | None = None
        if model is None:
            parts = _build_parts(found.problem.graph, spec.source, options.seed)
            model = parts["model"]
            copies = _copies_of_example(layout, parts)
            self.batches = SyntheticBatches.of(parts, copies, options.seed)
            options = self.batches.complete(options)
        else:
            restore_attention(model)
        require_weights(model, found.problem.graph)
        self.rank: PipelineRank | StrategyRank
        if isinstance(found, Placement):
            transport = open_transport(self.where, everyone, self.waits)
            self.rank = PipelineRank(found, model, options, rank, self.where, transport, self.waits)
        else:
            self.rank = StrategyRank(found, model, options, spec.strategy, rank, self.where, self.waits)
        self.offset_s = clock_offset_s(self.waits) if layout.world > 1 else 0.0

    def __call__(self, command: str, given: Any) -> Any:
        """Answer a command."""
        rank = self.rank
        match command:
            case "step":
                args, kwargs, target, update = given
                return rank.step(args, kwargs, target, update=update), rank.grad_norm
            case "synthetic":
                assert self.batches is not None, "asked of models that were made from a source"
                args, kwargs = self.batches.next()
                return rank.step(args, kwargs), rank.grad_norm
            case "evaluate":
                return rank.evaluate(*given)
            case "predict":
                return rank.predict(*given)
            case "prepare":
                rank.prepare(*given)
                return None
            case "save":
                return self._save(Path(given))
            case "load":
                self._saved = None
                step = checkpoints.read_step(Path(given))
                if self.batches is not None:
                    self.batches.skip(step)
                rank.after_settling(lambda: checkpoints.load(rank, Path(given)))
                return step
            case "state":
                return checkpoints.own_state(rank)
            case "clocked":
                rank.clocked(bool(given))
                return None
            case "report":
                return self._report()
        raise InputError(f"unknown command {command!r}")

    def _save(self, folder: Path) -> str:
        """A checkpoint of this step; the one that this run has written, where it has."""
        key = folder, self.rank.steps_done
        if self._saved is not None and self._saved[0] == key:
            path = Path(self._saved[1])
            if all(self.waits.gather(path.is_dir(), "all ranks to look at the last checkpoint")):
                return str(path)
        self._saved = key, checkpoints.save(self.rank, folder, self.waits)
        return self._saved[1]

    def _report(self) -> Mapping[str, Any]:
        """What the last step took, on the common clock, and what this process holds."""
        rank = self.rank
        arrivals = rank.arrivals() if isinstance(rank, PipelineRank) else []
        weights = sum(one.numel() * one.element_size() for one in rank.own_parameters().values())
        peak = torch.cuda.max_memory_allocated(self.where) if self.where.type == "cuda" else 0
        return {
            "spans": self._on_common_clock(rank.spans()),
            "arrivals": self._on_common_clock(arrivals),
            "weight_bytes": weights,
            "peak_bytes": peak,
            "notes": list(rank.notes),
            "where": str(self.where),
            "sent": rank.sent_sizes(),
            "drift": rank.drift.report if isinstance(rank, StrategyRank) else None,
        }

    def _on_common_clock(self, rows: Sequence[tuple[str, int, int, float, float]]) -> list[Any]:
        return [(*row[:3], row[3] + self.offset_s, row[4] + self.offset_s) for row in rows]

    def close(self) -> None:
        """Leave the others."""
        leave()


def _copies_of_example(layout: PipelineLayout | StrategyLayout, parts: Mapping[str, Any]) -> int:
    """How often the example that was captured makes a whole batch: it is one micro-batch of a pipeline."""
    if isinstance(layout, StrategyLayout):
        return 1
    rows = find_size((parts.get("args", ()), parts.get("kwargs") or {}), "batch")
    return 1 if layout.rows and sum(layout.rows) == rows else sum(layout.micro_batches)


def enter(spec: MemberSpec) -> RankMember:
    """The entry of a worker process."""
    return RankMember(spec)


def _cap_memory(cluster: Cluster, device: int, where: torch.device) -> None:
    """A process that has a part of a GPU takes no more than that part."""
    torch.cuda.set_device(where)
    if "#" in cluster.device_name[device]:
        total = torch.cuda.get_device_properties(where).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, float(cluster.memory_bytes[device]) / total), where
        )


def _build_parts(graph: Graph, source: str | None, seed: int) -> dict[str, Any]:
    """The model again, with weights that a seed gives; every rank makes the same."""
    found = origin_of(graph)
    if found is None and source is None:
        raise InputError(
            f"the plan does not say what model graph {graph.name!r} was captured from; name it with --model"
            " (hf:NAME, zoo:NAME or file.py:function), or give lm.launch your own model"
        )
    own, fields = found if found is not None else ("", {})
    torch.manual_seed(seed)
    parts = load_model_parts(source or own, CaptureOptions(**fields), device="cpu")
    parts["model"].train()
    torch.manual_seed(seed)
    return parts
