"""Forecast: what training a trial shard by shard takes on a device, from the trainer's own plan.

Nothing is trained and no weight is held, so a model may be asked about that this machine could not hold.
"""

from dataclasses import replace

import torch

from loadmaster.core.answers.shard_forecast import ShardForecast
from loadmaster.shards.model.built_model import build_trial
from loadmaster.shards.plan.partition import make_plan
from loadmaster.shards.plan.rates import Rates
from loadmaster.shards.plan.sizes import measure_sizes
from loadmaster.shards.spec.trial import Trial

_ON_GPU = torch.device("cuda")


def forecast_trial(trial: Trial, *, device: str, cap_bytes: int, rates: Rates) -> ShardForecast:
    """Shards, peak and step on a GPU with so much memory, which need not be here.

    Where there is none, activations are counted with the kernels of the CPU. Raises a `DeviceMemoryError`
    where no cut fits.
    """
    where = _ON_GPU if torch.cuda.is_available() else torch.device("cpu")
    built = replace(build_trial(trial, device=where), device=_ON_GPU)
    plan = make_plan(built, cap_bytes=cap_bytes, rates=rates)
    sizes = measure_sizes(built)
    host = sum(sizes.pinned_bytes) + sum(sizes.copy_bytes) + sum(sizes.grad_bytes)
    return ShardForecast(
        device=device,
        step_s=plan.step_s,
        peak_bytes=plan.peak_bytes,
        host_bytes=host,
        num_shards=plan.layout.num_shards,
        by_call=built.chain.by_call,
        bound_by=plan.limit.bound_by,
        up_bytes=int(plan.work.up_bytes),
        down_bytes=int(plan.work.down_bytes),
        command=f'lt.train(model, data, memory_cap="{cap_bytes // 2**20}MiB")',
    )
