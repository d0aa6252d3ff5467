"""Recurrent models of our own, unrolled step by step: a language model and a translator like GNMT.

Wu et al., Google's neural machine translation system (2016): a bidirectional first layer, residual
connections from the third layer on, attention of the decoder's first layer fed to all others.
"""

from typing import Any

import torch
from torch import nn


class UnrolledLstm(nn.Module):
    """A language model of stacked LSTM cells; every step is ops of its own."""

    def __init__(self, *, vocab: int = 10000, width: int = 1024, num_layers: int = 4) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocab, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(num_layers))
        self.output = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token after every token."""
        x = self.embedding(tokens)
        for cell in self.cells:
            x = _unroll_cell(cell, x)
        return self.output(x)


def _unroll_cell(cell: Any, x: torch.Tensor) -> torch.Tensor:
    """The cell's outputs along the sequence."""
    hidden = state = x.new_zeros(x.shape[0], cell.hidden_size)
    outputs = []
    for step in range(x.shape[1]):
        hidden, state = cell(x[:, step], (hidden, state))
        outputs.append(hidden)
    return torch.stack(outputs, 1)


class Gnmt(nn.Module):
    """A translator: encoder, attention and decoder of LSTM cells."""

    def __init__(self, *, vocab: int = 32000, width: int = 1024, num_layers: int = 8) -> None:
        super().__init__()
        self.source = nn.Embedding(vocab, width)
        self.forwards = nn.LSTMCell(width, width)
        self.backwards = nn.LSTMCell(width, width)
        self.joined = nn.Linear(2 * width, width)
        self.encoder = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(num_layers - 1))
        self.target = nn.Embedding(vocab, width)
        self.first = nn.LSTMCell(2 * width, width)
        self.query = nn.Linear(width, width)
        self.decoder = nn.ModuleList(nn.LSTMCell(2 * width, width) for _ in range(num_layers - 1))
        self.output = nn.Linear(width, vocab)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Scores of the next target token after every target token."""
        memory = self._encode(self.source(source))
        return self.output(self._decode(self.target(target), memory))

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        back = _unroll_cell(self.backwards, x.flip(1)).flip(1)
        x = self.joined(torch.cat([_unroll_cell(self.forwards, x), back], 2))
        for at, cell in enumerate(self.encoder):
            y = _unroll_cell(cell, x)
            x = x + y if at else y
        return x

    def _decode(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """The first layer reads what was attended a step before; the others what is attended now."""
        zeros = x.new_zeros(x.shape[0], x.shape[2])
        hidden, state, context = zeros, zeros, zeros
        lower, contexts = [], []
        for step in range(x.shape[1]):
            hidden, state = self.first(torch.cat([x[:, step], context], 1), (hidden, state))
            scores = torch.bmm(memory, self.query(hidden).unsqueeze(2))
            context = (torch.softmax(scores, 1) * memory).sum(1)
            lower.append(hidden)
            contexts.append(context)
        y, attended = torch.stack(lower, 1), torch.stack(contexts, 1)
        for at, cell in enumerate(self.decoder):
            z = _unroll_cell(cell, torch.cat([y, attended], 2))
            y = y + z if at else z
        return y


class Lstm(nn.Module):
    """The language model with PyTorch's own stacked LSTM: a layer is one op."""

    def __init__(self, *, vocab: int = 10000, width: int = 1024, num_layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.LSTM(width, width, num_layers, batch_first=True)
        self.output = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token after every token."""
        x, _ = self.layers(self.embedding(tokens))
        return self.output(x)
