"""What a network proposes for a problem: a plan at once, then plans near to it while evaluations last."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.placers.learned._scene import Scene
from loadmaster.placers.learned._slicers import Sliced, Slicer, StepSlicer

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

    from loadmaster.placers.learned._order_network import tensors_of

    with torch.no_grad():
        key, score = network(tensors_of(scene if scene is not None else slicer.scene()))
    return Opinion(key.numpy().astype(np.float64), score.numpy().astype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A plan and the keys it was sliced from."""

    key: Floats  # [N]
    sliced: Sliced


def learned_plans(slicer: Slicer, opinion: Opinion, bound_s: float = 0.0) -> list[Proposal]:
    """The plans of the opinion as it is, the one that the slicer expects to be fastest first."""
    if isinstance(slicer, StepSlicer):
        found = [slicer.slice(opinion.key), slicer.slice(opinion.key, slicer.wish(opinion.score))]
    else:
        found = [slicer.slice(opinion.key, bound_s)]
    return _fastest_first([(opinion.key, one) for one in found])


def first_plans(slicer: Slicer, opinion: Opinion, bound_s: float = 0.0) -> list[Proposal]:
    """Those, and what nobody learned: the usual orders, and for a step everything on the fastest device.

    They are compared by what slicers compute anyway, so that the first needs no evaluation at all.
    """
    found = [(one.key, one.sliced) for one in learned_plans(slicer, opinion, bound_s)]
    if isinstance(slicer, StepSlicer):
        cargo = slicer.groups.cargo
        fastest = int(np.where(cargo.fits, cargo.seconds, np.inf).sum(axis=0).argmin())
        alone = np.full(cargo.num_units, fastest, dtype=np.int32)
        usual = -slicer.lists.compute_upward_rank(transfers=True)
        more = [(usual, slicer.slice(usual)), (opinion.key, slicer.slice(opinion.key, alone))]
    else:
        more = [(opinion.key, slicer.usual(bound_s))]
    return _fastest_first([*found, *more])


def _fastest_first(found: Iterable[tuple[Floats, Sliced | None]]) -> list[Proposal]:
    known = [Proposal(key, one) for key, one in found if one is not None]
    return sorted(known, key=lambda one: one.sliced.expected_s)
