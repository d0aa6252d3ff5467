"""Differential runs: families trained placed and unplaced, loss, gradients and outputs compared to the bit.

    python -m benchmarks.family_runs [FAMILY ...]      without names: every family; writes docs/families.md

Plans are random: every op anywhere, on two or three logical devices. Each family is run by the engine that
`lm.place` chooses, and by hooks.
"""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import loadmaster as lm
from benchmarks.families import FAMILIES, Family
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.plan import plan_of
from loadmaster.modules.tensor_trees import find_tensors
from loadmaster.runtime.placed import Options, build_placed_model

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
EQUAL = "equal to the bit"
_HEAD = """# Families of transformers, placed and unplaced

Tiny models of the `transformers` library, called as it builds them by default (`use_cache`, `labels`, a dict
of outputs; some with `output_hidden_states`), trained for three steps on random plans over two and three
devices and without a plan. Loss, every gradient and every output are compared. Made by
`python -m benchmarks.family_runs` with torch {torch} and transformers {transformers}.

| family | engine that `lm.place` chooses | result | hooks on modules | why not the graph engine |
|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class FamilyRun:
    """What came of one family."""

    family: str
    engine: str  # 'graph' or 'hooks'
    result: str  # EQUAL, or what differs
    by_hooks: str
    why: str  # the reason for hooks


def compare_family(
    name: str, *, plans: Sequence[tuple[int, int]] = ((2, 0), (3, 1)), steps: int = 3
) -> FamilyRun:
    """A family under random plans (number of devices, seed) against the plain model."""
    family, engine, why = FAMILIES[name], "", ""
    wanted = _train(family.build(), family, steps)
    graph = lm.capture(family.build(), (), family.call())
    results = {"auto": EQUAL, "hooks": EQUAL}
    for num_devices, seed in plans:
        for asked in results:
            model = _place_at_random(family.build(), graph, num_devices, seed, asked)
            found = _train(model, family, steps)
            difference = _find_difference(wanted, found)
            results[asked] = difference if difference and results[asked] == EQUAL else results[asked]
            if asked == "auto":
                engine = "hooks" if model._why_hooks else "graph"
                why = model._why_hooks
    return FamilyRun(name, engine, results["auto"], results["hooks"], why)


def _place_at_random(model: nn.Module, graph: lm.Graph, num_devices: int, seed: int, engine: str) -> Any:
    rng = np.random.default_rng(seed)
    where = rng.integers(0, num_devices, graph.num_ops).astype(np.int32)
    plan = plan_of(where, rng.permutation(graph.num_ops).astype(np.int32))
    cluster = parse_cluster(", ".join(f"cpu#{at}-64MB" for at in range(num_devices)))
    return build_placed_model(model, graph, plan, cluster, options=Options(engine=engine))


def _train(model: Any, family: Family, steps: int) -> list[dict[str, torch.Tensor]]:
    """[step] the outputs and the gradients, by name."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    call, history = family.call(), []
    torch.manual_seed(11)
    for _ in range(steps):
        out = model(**call)
        out["loss"].backward()
        found = {
            f"output {at}": one.detach().clone() for at, one in enumerate(find_tensors(tree_leaves(out)))
        }
        weights = model.named_parameters()
        found |= {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}
        history.append(found)
        optimizer.step()
        optimizer.zero_grad()
    return history


def _find_difference(wanted: list[dict[str, torch.Tensor]], found: list[dict[str, torch.Tensor]]) -> str:
    for step, (left, right) in enumerate(zip(wanted, found, strict=True)):
        if left.keys() != right.keys():
            return f"step {step}: {min(left.keys() ^ right.keys())!r} is on one side only"
        for name, value in left.items():
            if not torch.equal(value, right[name]):
                return f"step {step}: {name!r} differs"
    return ""


def write_page(runs: Sequence[FamilyRun]) -> None:
    """The table of docs/families.md."""
    import transformers

    lines = [
        f"| {run.family} | {run.engine} | {run.result} | {run.by_hooks} | {run.why.replace('|', '/')} |"
        for run in runs
    ]
    num_equal = sum(run.result == run.by_hooks == EQUAL for run in runs)
    num_graph = sum(run.engine == "graph" for run in runs)
    foot = f"\n{num_equal} of {len(runs)} are equal to the bit with either engine;"
    foot += f" {num_graph} are run by the graph engine.\n"
    head = _HEAD.format(torch=torch.__version__.split("+")[0], transformers=transformers.__version__)
    PAGE.write_text(head + "\n".join(lines) + "\n" + foot)


def main(names: Sequence[str]) -> int:
    """Run families; gives 1 where one differs."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    runs = []
    for name in names or FAMILIES:
        runs.append(compare_family(name))
        print(*(getattr(runs[-1], field) for field in FamilyRun.__slots__), sep=" | ", flush=True)
    if not names:
        write_page(runs)
    return int(any((run.result, run.by_hooks) != (EQUAL, EQUAL) for run in runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
