"""Four learning rates on one small device: a model larger than its cap, halved by successive halving.

Run it twice: the second time everything is read from the folder. `loadmaster train train_a_study.py:study`
does the same with a live table.
"""

import torch
from torch import nn

import loadmaster.train as lt

torch.set_num_threads(1)


class Rows:
    """An epoch of random sequences, the same every time."""

    def __len__(self) -> int:
        """Batches."""
        return 8

    def __iter__(self):
        """Inputs and targets, one token apart."""
        made = torch.Generator().manual_seed(0)
        for _ in range(len(self)):
            tokens = torch.randint(0, 100, (4, 17), generator=made)
            yield tokens[:, :-1], tokens[:, 1:]


class Layer(nn.Module):
    """A block with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What came, and a little more."""
        return x + self.net(self.norm(x))


def build() -> nn.Module:
    """An embedding, six blocks and a head: 225,000 parameters, with AdamW 3.6 MB of state."""
    return nn.Sequential(nn.Embedding(100, 64), *(Layer() for _ in range(6)), nn.Linear(64, 100))


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trial(lr: float) -> lt.Trial:
    """One learning rate."""
    return lt.Trial(
        name=f"lr{lr:g}",
        build=build,
        loss=loss,
        data=Rows,
        optim=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        epochs=2,
        seed=0,
    )


study = lt.Study(
    [trial(lr) for lr in (3e-2, 3e-3, 3e-4, 3e-5)],
    dir="runs/example",
    devices="cpu",
    memory_cap="2MiB",
    searcher=lt.SuccessiveHalving(eta=2, min_steps=4),
)

if __name__ == "__main__":
    print(study.plan())
    result = study.fit()
    print(result.table())
    print("best:", result.best.name)
    model = build()
    model.load_state_dict(result.best.state_dict())  # the plain model
    result.trace("trace.json")
