"""The one-pass kernel gives the framework's fused bits."""

from typing import Any

import pytest
import torch

from loadmaster.train.host_kernels import adam_step, table_of


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("factors", [(), (0.37,), (0.5, 0.37)])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_equals_torch_fused_and_writes_the_rounded_copy(kind: Any, factors: Any, narrow: bool) -> None:
    size = 3 * 16384 + 4800
    slab = torch.zeros(size * 18, dtype=torch.uint8)
    wide = slab[: 16 * size].view(torch.float32).view(4, size)
    copy = slab[16 * size :].view(torch.bfloat16)
    grad = wide[3].view(torch.bfloat16)[:size] if narrow else wide[3]
    torch.manual_seed(0)
    plain = torch.nn.Parameter(torch.randn(size))
    wide[0].copy_(plain.detach())
    optimizer = kind([plain], lr=1e-3, weight_decay=0.01, fused=True)
    table = table_of(slab, [(0, wide[0], wide[1], wide[2], grad, copy)])
    for step in range(1, 6):
        grad.copy_(torch.randn(size))
        plain.grad = grad.float().clone()
        for factor in factors:
            plain.grad = plain.grad * factor
        optimizer.step()
        adam_step(
            slab,
            table,
            steps=[step],
            options=[optimizer.param_groups[0]],
            decoupled=[kind is torch.optim.AdamW],
            factors=factors,
            num_threads=1,
        )
    state = optimizer.state[plain]
    assert torch.equal(wide[0], plain.detach())
    assert torch.equal(wide[1], state["exp_avg"])
    assert torch.equal(wide[2], state["exp_avg_sq"])
    assert torch.equal(copy, plain.detach().bfloat16())
