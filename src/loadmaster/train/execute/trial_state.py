"""A trial's training state in host memory: weights, optimizer, buffers, generators, place in the data."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from loadmaster.modules import randomness
from loadmaster.modules.meta_build import reset_modules
from loadmaster.shards.model.blocks import Chain
from loadmaster.shards.model.built_model import BuiltModel
from loadmaster.shards.model.profile import Profile
from loadmaster.shards.plan.host_store import HostPiece, make_host_piece
from loadmaster.shards.plan.layout import Layout, lay_out
from loadmaster.shards.plan.sizes import Sizes, measure_sizes
from loadmaster.shards.spec.trial import COMPUTE_DTYPE, Trial


@dataclass(slots=True, eq=False)
class Scaler:
    """Loss scaling for fp16, with the framework's own constants."""

    scale: float = 65536.0
    good_steps: int = 0

    def update(self, *, overflow: bool) -> None:
        """Halve after an overflow, double after 2000 good steps."""
        if overflow:
            self.scale, self.good_steps = self.scale * 0.5, 0
        else:
            self.good_steps += 1
            if self.good_steps == 2000:
                self.scale, self.good_steps = self.scale * 2.0, 0


@dataclass(slots=True, eq=False)
class TrialState:
    """Everything that must survive for training to go on."""

    trial: Trial
    chain: Chain
    facts: Profile
    layout: Layout
    pieces: list[HostPiece]
    optimizer: torch.optim.Optimizer
    schedule: Any
    group_of: list[int]  # [parameter], -1 = not trained
    generators: randomness.Generators
    scaler: Scaler
    sizes: "Sizes"
    step: int = 0
    epoch: int = 0
    batch: int = 0  # batches taken of this epoch
    epoch_generators: randomness.Generators | None = None  # when this epoch's data was opened
    data_draws: dict[int, randomness.Generators] = field(default_factory=dict)  # see `micro_batches`
    data_left: randomness.Generators | None = None  # the generators as the last batch left them
    num_batches: int | None = None
    exhausted: bool = False
    source: Any = None  # this epoch's data, and its iterator
    position: Any = None  # what a loader with a state of its own said, until it is opened again
    iterator: Iterator[Any] | None = None
    checked: bool = False  # whether every parameter has been seen to get a gradient
    peeked: list[Any] = field(default_factory=list)  # batches of the next step, taken already
    verified: str = ""  # what the comparison of the first step with the plain model said

    def groups(self, piece: int) -> list[int]:
        """Optimizer group of each parameter of a piece."""
        return [self.group_of[number] for number in self.pieces[piece].piece.parameters]

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch, where the data says how long it is."""
        return None if self.num_batches is None else math.ceil(self.num_batches / self.trial.accumulate)

    @property
    def steps_left(self) -> int | None:
        """Optimizer steps still to do, None = the data does not say."""
        if self.exhausted:
            return 0
        per_epoch = self.steps_per_epoch
        total = None if per_epoch is None else per_epoch * self.trial.epochs
        if self.trial.max_steps is not None:
            total = self.trial.max_steps if total is None else min(total, self.trial.max_steps)
        return None if total is None else max(0, total - self.step)


def frozen_names(state: TrialState) -> frozenset[str]:
    """Names of the parameters that are never trained."""
    named = state.chain.model.named_parameters()
    return frozenset(name for name, parameter in named if not parameter.requires_grad)


def store_on_host(
    built: BuiltModel,
    cuts: Sequence[int],
    *,
    landing: Sequence[bool] | bool,
    layout: Layout | None = None,
    shared: Mapping[int, HostPiece] | None = None,
) -> TrialState:
    """Move a built model into the host store, shard by shard, and make the optimizer that trains it.

    Pieces in `shared` are held already, by another trial.
    """
    trial, chain = built.trial, built.chain
    if layout is None:
        layout = lay_out(
            chain, cuts, compute_dtype=COMPUTE_DTYPE[trial.precision], castable=built.facts.castable
        )
    if built.facts.calls is not None:
        layout = replace(layout, calls=built.facts.calls.order)
    trained = [parameter for parameter in chain.parameters if parameter.requires_grad]
    wide = trial.accumulate > 1
    grad_dtype = [
        parameter.dtype if wide else layout.compute_dtype[number]
        for number, parameter in enumerate(chain.parameters)
    ]
    pieces = []
    for piece in layout.pieces:
        lands = landing if isinstance(landing, bool) else landing[piece.index]
        host = (shared or {}).get(piece.index) or make_host_piece(
            piece,
            layout,
            chain.parameters,
            built.probe.states,
            grad_dtype=grad_dtype,
            landing=lands,
            for_gpu=built.device.type == "cuda",
        )
        for number, view in zip(piece.parameters, host.master, strict=True):
            chain.parameters[number].data = view
        pieces.append(host)
    generators = _draw_weights(built, pieces) if built.empty else built.generators
    optimizer = trial.optim(trained)
    for parameter in trained:  # made as it was, and never used: state lies beside its weights
        if parameter in optimizer.state:
            optimizer.state[parameter].clear()
    schedule = trial.lr_schedule(optimizer) if trial.lr_schedule is not None else None
    optimizer._opt_called = (
        True  # it is stepped a shard at a time, which a schedule does not see and warns about
    )
    state = TrialState(
        trial,
        chain,
        built.facts,
        layout,
        pieces,
        optimizer,
        schedule,
        list(built.probe.group_of),
        generators,
        Scaler(),
        measure_sizes(built),
    )
    state.num_batches = built.record.num_batches
    return state


def _draw_weights(built: BuiltModel, pieces: Sequence[HostPiece]) -> randomness.Generators:
    """Draw the numbers of a model built without memory, where it is held; the generators as they then are."""
    other = built.generators.device
    device = torch.device("cpu" if other is None else "cuda")
    with randomness.preserve_generators(device):
        randomness.seed_all(built.trial.seed, device)
        reset_modules(built.chain.model)
        now = randomness.capture_generators(device, others=False)
        generators = replace(now, others=built.generators.others)  # as the build left them
    for host in pieces:
        for copy, master in zip(host.compute, host.master, strict=True):
            if copy is not master:
                copy.copy_(master)
    return generators
