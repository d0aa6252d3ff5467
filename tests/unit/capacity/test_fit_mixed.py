"""`fit` over a GPU and a CPU: what is said of all devices agrees with what is said of each."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="capture needs the extra [torch]")
import loadmaster as lm

MODEL = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.made, self.out = nn.Linear(512, 1536), nn.Linear(512, 512)

    def forward(self, x):
        parts = self.made(x).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*parts.unbind(0), dropout_p=0.1, is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


def build():
    with torch.device("meta"):
        return nn.Sequential(*(Attention() for _ in range(6))), (torch.empty(192, 2048, 512),)
"""


def test_fit_does_not_say_that_a_cpu_holds_what_is_too_much_for_it(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    found = lm.fit(f"{tmp_path / 'model.py'}:build", "RTX4090, cpu-64GB", quick=True, budget="5x")
    cpu = found.devices[1]
    assert not cpu.fits
    assert cpu.needs_bytes > 3 * found.devices[0].needs_bytes  # its kernel writes attention out
    assert found.cluster is not None
    assert not (found.cluster.fits and found.cluster.peak_bytes[0] == 0)
