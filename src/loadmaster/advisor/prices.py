"""What a device second is worth: the dual of the fluid programme, in which jobs arrive like a liquid.

    most value of accepted jobs   with   device time of the accepted  <=  device time there is

Each job takes the count with least device time among those in time. The best value accepts jobs by value
for each device second until the time is used up, and the price is that of the job on the border (0 where all
fit). It is a price of now: ask again as the mix of jobs changes.
"""

import numpy as np
from numpy.typing import NDArray

from loadmaster.advisor.environments.blocks import DEGREES, NUM_SERVERS
from loadmaster.advisor.environments.engine import Kind, Rule, replay_many
from loadmaster.advisor.environments.streams import Stream
from loadmaster.advisor.environments.world import World
from loadmaster.core.errors import InputError


def fluid_price(device_s: NDArray[np.float64], value: NDArray[np.float64], capacity_device_s: float) -> float:
    """Value of one more device second; `device_s` has inf for jobs that cannot be in time."""
    if len(device_s) != len(value):
        raise InputError(f"{len(device_s)} device times for {len(value)} values; give one for each job")
    if (device_s <= 0).any() or np.isnan(device_s).any() or not capacity_device_s >= 0:
        raise InputError("device times must be above 0, and the capacity at least 0")
    usable = np.isfinite(device_s) & (value > 0)
    worth = value[usable] / device_s[usable]
    order = np.argsort(-worth, kind="stable")
    used = np.cumsum(device_s[usable][order])
    border = int(np.searchsorted(used, capacity_device_s, side="right"))
    return float(worth[order][border]) if border < len(used) else 0.0


def stream_price(world: World, stream: Stream) -> float:
    """The price on the published cluster: servers are held until the next arrival."""
    n = stream.num_decided
    time = world.nominal[stream.model[:n]]
    limit = (stream.beta[:n] * world.sequential[stream.model[:n]])[:, None]
    held = np.ceil(time / stream.period) * stream.period if stream.period > 0 else time
    area = np.where(time <= limit * (1 + 1e-9), held * np.array(DEGREES), np.inf).min(axis=1)
    span = float(stream.arrival[-1] - stream.arrival[0])
    return fluid_price(area, np.ones(n), NUM_SERVERS * span)


def fit_prices(world: World, streams: list[Stream]) -> Rule:
    """The shadow-price rule of a world: a factor times the fluid price, and a price of free blocks.

    The factors are those with least blocking on the given (selection) streams.
    """
    price = float(np.mean([stream_price(world, stream) for stream in streams]))
    rules = [
        Rule(
            Kind.PRICED, device_price=factor * price, block_price=(0.0, 0.0, block, 0.0, 2 * block, 4 * block)
        )
        for factor in (0.5, 0.75, 0.9, 1.0)
        for block in (0.0, 0.003, 0.01, 0.03)
    ]
    counts = replay_many(world, streams, rules)
    blocked = counts[:, :, 1:5].sum(axis=(0, 2))
    return rules[int(np.argmin(blocked))]
