"""Pipelines against plain training that accumulates the same micro-batches: every schedule, six tiny models.

    python -m benchmarks.pipeline_equality --processes 2 3 4 --out benchmarks/results/pipeline-equality.json

One group of processes for each number runs all cases: gradients of one step from equal weights, and weights
after 10 steps of SGD, as relative differences by norm. The wall clock is not judged.
"""

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.distributed.pipelines import whole_batch
from tests.torch_models import example

import loadmaster as lm
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.modules.loss import compute_loss
from loadmaster.runtime.distributed.peers import Meeting, meet
from loadmaster.runtime.distributed.pipeline.batches import split_batch
from loadmaster.runtime.distributed.pipeline.executor import micro_batch_seed
from loadmaster.runtime.distributed.pipeline.rank import PipelineRank, TrainOptions
from loadmaster.runtime.distributed.processes import WorkerGroup
from loadmaster.runtime.distributed.transports import HostTransport, Waits

MODELS = ("gpt2", "llama", "bert", "t5", "resnet", "vit")
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1))
MICRO_BATCHES, STEPS, SEED, LIMIT = 4, 10, 5, 1e-5


def sgd(weights: list[Any]) -> torch.optim.Optimizer:
    """A large step."""
    return torch.optim.SGD(weights, lr=0.05)


def _placement(built: Any, stages: int, ranks: int, schedule: str, *, recompute: bool) -> Any:
    graph = lm.capture(built.model, built.args, built.kwargs, loss=built.loss)
    forward = graph.phase == 0
    at = np.minimum(np.cumsum(forward) / forward.sum() * stages, stages - 1).astype(np.int32)
    pipeline = Pipeline(
        stage=at,
        replicas=np.ones(stages),
        num_microbatches=MICRO_BATCHES,
        schedule=schedule,
        in_flight=np.ones(stages),
        stage_s=np.zeros(stages),
        rank=tuple(s % ranks for s in range(stages)),
    )
    again = np.full(graph.num_ops, recompute) & forward
    plan = Plan((at % ranks).astype(np.int32), np.arange(graph.num_ops, dtype=np.int32), again, pipeline)
    return SimpleNamespace(plan=plan, problem=SimpleNamespace(graph=graph), digest="")


def enter(meeting: Meeting) -> Any:
    """A worker: answers cases."""
    torch.set_num_threads(1)
    meet(meeting)
    where, waits = torch.device("cpu"), Waits(meeting.rank, meeting.timeout_s)

    def handle(_: str, case: tuple[str, str, int, bool]) -> Any:
        name, schedule, per_rank, recompute = case
        built = example(name)
        stages = per_rank * meeting.world
        placement = _placement(built, stages, meeting.world, schedule, recompute=recompute)
        options = TrainOptions(loss=built.loss, optimizer=sgd, seed=SEED)
        rank = PipelineRank(
            placement, built.model, options, meeting.rank, where, HostTransport(where, waits), waits
        )
        args, kwargs = whole_batch(built, MICRO_BATCHES)
        grads: dict[str, Any] = {}
        for step in range(STEPS):
            rank.step(args, kwargs)
            if step == 0:
                own = rank.own_parameters().items()
                grads = {key: one.grad.numpy().copy() for key, one in own if one.grad is not None}
        weights = {key: one.detach().numpy().copy() for key, one in rank.own_parameters().items()}
        held = rank.held_names()
        buffers = {key: one.numpy().copy() for key, one in rank.model.named_buffers() if key in held}
        return grads, weights, buffers

    return handle


def _plain(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    built = example(name)
    optimizer = sgd(list(built.model.parameters()))
    given = whole_batch(built, MICRO_BATCHES)
    rows = [3] * MICRO_BATCHES
    grads = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for number, (args, kwargs) in enumerate(split_batch(given, rows)):
            torch.manual_seed(micro_batch_seed(SEED, step, number))
            (compute_loss(built.model(*args, **kwargs), built.loss) / MICRO_BATCHES).backward()
        if step == 0:
            named = built.model.named_parameters()
            grads = {key: one.grad.clone() for key, one in named if one.grad is not None}
        optimizer.step()
    return grads, dict(built.model.named_parameters()), dict(built.model.named_buffers())


def _worst(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative difference by norm; a tensor of nothing but rounding (the bias of keys, whose
    gradient is 0) is measured against a millionth of the largest tensor.
    """
    if not expected:
        return 0.0
    least = 1e-6 * max(float(one.detach().double().norm()) for one in expected.values())
    worst = 0.0
    for key, one in found.items():
        two = expected[key].detach().double()
        worst = max(
            worst, float((torch.as_tensor(one).double() - two).norm() / max(float(two.norm()), least))
        )
    return worst


def main() -> None:
    """Run all cases and write them down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--out", default="")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows, begun = [], time.time()
    plain = {name: _plain(name) for name in asked.models}
    for world in asked.processes:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        specs = [Meeting(rank, world, "127.0.0.1", store.port, 300.0, "lo") for rank in range(world)]
        group = WorkerGroup(enter, specs)
        group.start()
        for name in asked.models:
            for schedule, per_rank in SCHEDULES:
                for recompute in (False, True) if schedule == "1f1b" else (False,):
                    answers = group.ask("case", (name, schedule, per_rank, recompute))
                    grads, weights, buffers = plain[name]
                    seen = {key for answer in answers for key in answer[1]}
                    row = {
                        "model": name,
                        "schedule": schedule,
                        "processes": world,
                        "stages": per_rank * world,
                        "recompute": recompute,
                        "gradients": max(_worst(answer[0], grads) for answer in answers),
                        "weights": max(_worst(answer[1], weights) for answer in answers),
                        "buffers": max(_worst(answer[2], buffers) for answer in answers),
                        "missing": sorted(set(weights) - seen),
                    }
                    rows.append(row)
                    print(json.dumps(row), flush=True)
        group.close()
    bad = [row for row in rows if max(row["gradients"], row["weights"]) > LIMIT or row["missing"]]
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    head = {"date": str(date.today()), "machine": platform.machine(), **versions, "limit": LIMIT}
    print(f"{len(rows) - len(bad)} of {len(rows)} within {LIMIT}; {time.time() - begun:.0f} s")
    if asked.out:
        Path(asked.out).write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
