"""A strategy over four devices on two hosts: who takes how many rows, and how gradients meet. Then it is run.

The plan is for four unequal GPUs. What is run here is the same kind of strategy on two parts of the CPU.
"""

import tempfile
from pathlib import Path

import torch

import loadmaster as lm
from loadmaster.core.run import Budget
from loadmaster.strategies.ask import StrategyRequest, find_strategy

NET = """
import torch


def build():
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(4)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 10)), (torch.randn(24, 256),)
"""


def find(source: str, devices: str) -> object:
    """Ask for a strategy, and say what it is."""
    problem = lm.problem(source, devices)
    answer = find_strategy(problem, StrategyRequest(batch=24, budget=Budget(count=40)))
    print(
        f"{devices}: {answer.score_s * 1e3:.2f} ms a step, no strategy is below {answer.bound_s * 1e3:.2f} ms"
    )
    for group in answer.strategy.groups:
        print(f"  {group.mode} on devices {group.devices}, rows {group.rows}, gradients by {group.sync}")
    return answer


def main() -> None:
    """Find two strategies, and train three steps by the second."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "net.py"
        source.write_text(NET, encoding="utf-8")
        find(f"{source}:build", "2xV100-16GB | 2xGTX1080Ti ; inter=25gbit")
        answer = find(f"{source}:build", "cpu#0-64MB, cpu#1-64MB")
        names: dict[str, object] = {}
        exec(NET, names)
        model, (rows,) = names["build"]()  # type: ignore[operator]
        targets = torch.arange(24) % 10
        with lm.launch(
            answer, model, loss=torch.nn.functional.cross_entropy, optimizer=torch.optim.AdamW
        ) as run:
            losses = [run.step(rows, targets) for _ in range(3)]
            print("bytes sent in the last step:", run.sent_bytes())
    print("losses", [round(float(loss), 4) for loss in losses])


if __name__ == "__main__":
    main()
