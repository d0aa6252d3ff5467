"""A pipeline over two processes, from an unmodified model, in your own script.

Run it as an ordinary script and it starts the processes. `torchrun --nproc-per-node 2` works as well.
"""

import tempfile

import torch

import loadmaster as lm


class Block(torch.nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """One block."""
        return rows + self.down(torch.nn.functional.gelu(self.up(self.norm(rows))))


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Block(64) for _ in range(6)])


def main() -> None:
    """Plan, train three steps, and compare the first loss with that of one process."""
    rows, targets = torch.randn(16, 64), torch.randn(16, 64)
    graph = lm.capture(build(), (rows[:4],), optimizer=torch.optim.SGD)  # one micro-batch of four rows
    placement = lm.plan(graph, "cpu#0-64MB, cpu#1-64MB", pipeline="1f1b:4", budget="20x")
    options = {"loss": torch.nn.functional.mse_loss, "optimizer": torch.optim.SGD}
    with lm.launch(placement, build(), **options) as run:
        losses = [run.step(rows, targets) for _ in range(3)]
        with tempfile.TemporaryDirectory() as folder:
            run.save(folder)
    pipeline = placement.plan.pipeline
    print(f"{pipeline.num_stages} stages, {pipeline.num_microbatches} micro-batches; losses", losses)
    assert abs(losses[0] - torch.nn.functional.mse_loss(build()(rows), targets).item()) < 1e-5


if __name__ == "__main__":
    main()
