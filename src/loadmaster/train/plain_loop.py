"""The oracle: a plain PyTorch loop with the same seeds, used by every equality test.

It shares with the executor the seeding alone: the model is whole, autograd and the optimizer are the
framework's, and nothing moves. Parameters named in `host` are stepped on the CPU by its fused kernel.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from loadmaster.modules import randomness
from loadmaster.shards.model.blocks import Chain, build_chain, call_block
from loadmaster.shards.spec.trial import COMPUTE_DTYPE, Trial, compute_loss, split_batch
from loadmaster.train.execute.micro_batches import move_to_device


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What a plain loop ends with."""

    losses: tuple[float, ...]  # of each optimizer step
    state_dict: dict[str, torch.Tensor]
    optimizer_state: dict[str, dict[str, Any]]  # by parameter name
    num_batches: int


def reference(trial: Trial, *, device: str = "cpu", host: Collection[str] = ()) -> Reference:
    """Train a trial in a plain PyTorch loop on one device. A study must give the same numbers."""
    where = torch.device(device)
    with randomness.preserve_generators(where):
        randomness.seed_all(trial.seed, where)
        model = trial.build()
        chain = build_chain(trial, model)
        model.to(where).train()
        return _Loop(trial, chain, where, frozenset(host)).run()


class _Loop:
    def __init__(self, trial: Trial, chain: Chain, device: torch.device, host: frozenset[str]) -> None:
        self.trial, self.chain, self.device = trial, chain, device
        named = [(name, p) for name, p in chain.model.named_parameters() if p.requires_grad]
        self.on_device = [p for name, p in named if name not in host]
        self.of_host = [p for name, p in named if name in host]
        self.twins = [torch.nn.Parameter(p.detach().cpu().clone()) for p in self.of_host]
        self.optimizers = [trial.optim(ps) for ps in (self.on_device, self.twins) if ps]
        if self.twins:
            for group in self.optimizers[-1].param_groups:
                if group.get("fused", 0) is None and group.get("foreach", 0) is None:
                    group["fused"] = True
        make = trial.lr_schedule
        self.schedules = [make(optimizer) for optimizer in self.optimizers] if make is not None else []
        self.scaler = torch.amp.GradScaler(device.type, enabled=trial.precision == "fp16")
        self.losses: list[float] = []
        self.num_batches = 0

    def run(self) -> Reference:
        for _ in range(self.trial.epochs):
            waiting: list[Any] = []
            for batch in self.trial.data():
                waiting.append(batch)
                self.num_batches += 1
                if len(waiting) == self.trial.accumulate and self._step(waiting):
                    return self._make_result()
                if len(waiting) == self.trial.accumulate:
                    waiting = []
            if waiting and self._step(waiting):
                break
        return self._make_result()

    def _step(self, batches: list[Any]) -> bool:
        total = 0.0
        for number, batch in enumerate(batches):
            inputs, targets = split_batch(batch) or batch
            loss = self._forward(
                move_to_device(inputs, self.device), move_to_device(targets, self.device), number
            )
            total += float(loss.detach()) / len(batches)
            self.scaler.scale(loss / len(batches) if len(batches) > 1 else loss).backward()
        self._update()
        self.losses.append(total)
        for schedule in self.schedules:
            schedule.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for parameter in self.of_host:
            parameter.grad = None
        return self.trial.max_steps is not None and len(self.losses) >= self.trial.max_steps

    def _forward(self, value: Any, targets: Any, micro_batch: int) -> torch.Tensor:
        if self.trial.counted_rng:  # the data's own draws go on as if no block had drawn
            with randomness.preserve_generators(self.device):
                return self._loss(value, targets, micro_batch)
        return self._loss(value, targets, micro_batch)

    def _loss(self, value: Any, targets: Any, micro_batch: int) -> torch.Tensor:
        dtype = COMPUTE_DTYPE[self.trial.precision]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            if self.chain.is_whole and not self.trial.counted_rng:  # the model itself, not what was cut of it
                return compute_loss(self.trial, self.chain.call_model(value), targets)
            for index, block in enumerate(self.chain.blocks):
                if self.trial.counted_rng:
                    seed = randomness.derive_seed(
                        self.trial.seed, step=len(self.losses), micro_batch=micro_batch, block=index
                    )
                    randomness.seed_all(seed, self.device)
                value = call_block(block, value, first=index == 0)
            return compute_loss(self.trial, value, targets)

    def _update(self) -> None:
        everything = [p for p in self.chain.model.parameters() if p.grad is not None]
        if self.scaler.is_enabled():
            for parameter in everything:
                parameter.grad.div_(self.scaler.get_scale())  # a power of two: exact
            overflow = any(not bool(torch.isfinite(p.grad).all()) for p in everything)
        else:
            overflow = False
        if self.trial.clip_norm is not None and not overflow:
            torch.nn.utils.clip_grad_norm_(everything, self.trial.clip_norm)
        for parameter, twin in zip(self.of_host, self.twins, strict=True):
            twin.grad = None if parameter.grad is None else parameter.grad.cpu()
        if not overflow:
            for optimizer in self.optimizers:
                optimizer.step()
        if self.scaler.is_enabled():
            self._rescale(overflow)
        for parameter, twin in zip(self.of_host, self.twins, strict=True):
            parameter.data.copy_(twin.data)

    def _rescale(self, overflow: bool) -> None:
        if overflow:
            self.scaler.update(self.scaler.get_scale() * 0.5)

    def _make_result(self) -> Reference:
        by_parameter: dict[torch.Tensor, dict[str, Any]] = {}
        for optimizer in self.optimizers:
            by_parameter |= dict(optimizer.state)
        twin_of = {id(p): twin for p, twin in zip(self.of_host, self.twins, strict=True)}
        return Reference(
            tuple(self.losses),
            {name: tensor.detach().cpu().clone() for name, tensor in self.chain.model.state_dict().items()},
            {
                name: dict(by_parameter.get(twin_of.get(id(p), p), {}))
                for name, p in self.chain.model.named_parameters()
            },
            self.num_batches,
        )
