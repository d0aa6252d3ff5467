"""One model as it is, larger than its cap, trained by one line: no blocks, its own forward, its own loss.

Run it twice: the second time nothing is left to train, and the weights are read from `runs/any-model`.
"""

import torch
from torch import nn

import loadmaster.train as lt

torch.set_num_threads(1)


class Layer(nn.Module):
    """Pre-norm feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """One layer."""
        return value + self.down(torch.relu(self.up(self.norm(value))))


class Model(nn.Module):
    """Embedding, layers and head, whose forward decides by what it sees: no chain of blocks."""

    def __init__(self, width: int = 64, vocab: int = 500) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(12))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss, as models of transformers give it."""
        value = self.embed(ids)
        for layer in self.layers:
            value = layer(value)
        if value.isnan().any():
            raise ValueError("the model has diverged")
        logits = self.head(value)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


torch.manual_seed(0)
rows = [torch.randint(0, 500, (4, 17)) for _ in range(8)]
data = [{"ids": each[:, :-1], "labels": each[:, 1:]} for each in rows]

model = Model()
size = 16 * sum(parameter.numel() for parameter in model.parameters())
result = lt.train(model, data, memory_cap=size // 3, name="any-model", lr=1e-3, epochs=2)

print(f"weights, gradients and optimizer state take {size / 1e6:.1f} MB; the cap was {size / 3e6:.1f} MB")
print(result.verified)
print(f"step {result.step}, loss {result.loss:.4f}")
