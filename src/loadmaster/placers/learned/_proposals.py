"""What a network proposes for a problem: a plan at once, then plans near to it while evaluations last."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.placers.learned._scene import Scene
from loadmaster.placers.learned._slicers import LoadSlicer, Sliced, Slicer

if TYPE_CHECKING:
    from loadmaster.placers.learned._order_network import OrderNetwork


@dataclass(frozen=True, slots=True, eq=False)
class Opinion:
    """What a network thinks of a scene."""

    key: Floats  # [N] lower first
    score: Floats  # [N, D] higher is better


def look_at(network: "OrderNetwork", slicer: Slicer, scene: Scene | None = None) -> Opinion:
    """Ask the network once."""
    import torch

    from loadmaster.modules.threads import one_thread
    from loadmaster.placers.learned._order_network import tensors_of

    with torch.no_grad(), one_thread():
        key, score = network(tensors_of(scene if scene is not None else slicer.scene()))
    return Opinion(key.numpy().astype(np.float64), score.numpy().astype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A plan and the keys it was sliced from."""

    key: Floats  # [N]
    sliced: Sliced


def learned_plans(
    slicer: Slicer, opinion: Opinion, bound_s: float = 0.0, *, orders: int = 0, noise: float = 0.0
) -> list[Proposal]:
    """The plans of the opinion, for a step of `orders` near to it too; fastest by its own reckoning first."""
    if isinstance(slicer, LoadSlicer):
        return _fastest_first([(opinion.key, slicer.slice(opinion.key, bound_s))])
    found = [
        (opinion.key, slicer.slice(opinion.key)),
        (opinion.key, slicer.slice(opinion.key, slicer.wish(opinion.score))),
    ]
    if max(one.fullness for _, one in found if one is not None) > slicer.roomy:
        found.append((opinion.key, slicer.slice(opinion.key, room=slicer.roomy)))
    rng = np.random.default_rng(0)  # the first plan is the same for every seed
    for at in range(orders):
        spread = noise * 2.0 ** (-3.0 * at / max(orders - 1, 1))
        key = opinion.key + spread * rng.normal(size=len(opinion.key))
        found.append((key, slicer.slice(key)))
    return _fastest_first(found)


def first_plans(
    slicer: Slicer, opinion: Opinion, bound_s: float = 0.0, *, orders: int = 0, noise: float = 0.0
) -> list[Proposal]:
    """Those, and what nobody learned: the usual orders, and for a step everything on the fastest device.

    They are compared by what slicers compute anyway, so that the first needs no evaluation at all. Of a step
    the best of each kind come first, then the others that give ops other devices.
    """
    learned = learned_plans(slicer, opinion, bound_s, orders=orders, noise=noise)
    if isinstance(slicer, LoadSlicer):
        usual = slicer.usual(bound_s)
        found = [(one.key, one.sliced) for one in learned]
        return _fastest_first([*found, (opinion.key, usual)])
    listed, *ungrouped = slicer.op_by_op()
    alone = _fastest_first([(slicer.no_key, slicer.alone(slicer.no_key))])
    kinds = [learned, _fastest_first(slicer.usual()), [Proposal(opinion.key, listed)], alone]
    ahead = _fastest_first([(kind[0].key, kind[0].sliced) for kind in kinds if kind])
    others = list(kinds[1][1:])
    others += [Proposal(*one) for view in slicer.views[1:] for one in slicer.usual(view)]
    others += [Proposal(opinion.key, one) for one in ungrouped]
    others += learned[1:]
    return _without_twins([*ahead, *others])


def _without_twins(proposals: list[Proposal]) -> list[Proposal]:
    """Only the first of those that give every op the same device."""
    kept: dict[bytes, Proposal] = {}
    for one in proposals:
        kept.setdefault(one.sliced.plan.device.tobytes(), one)
    return list(kept.values())


def _fastest_first(found: Iterable[tuple[Floats, Sliced | None]]) -> list[Proposal]:
    known = [Proposal(key, one) for key, one in found if one is not None]
    return sorted(known, key=lambda one: one.sliced.rank)
