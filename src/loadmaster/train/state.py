"""A trial's training state in host memory: weights, optimizer, buffers, generators, place in the data."""

import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from loadmaster.core.errors import InputError
from loadmaster.train import randomness
from loadmaster.train.arena import aligned
from loadmaster.train.blocks import Chain, chain_of
from loadmaster.train.layout import Layout, lay_out
from loadmaster.train.loaders import LoaderError, has_state, saved_state
from loadmaster.train.meta import hollow, on_meta, reset
from loadmaster.train.profile import Profile, profile
from loadmaster.train.refusals import check_dense, check_extra_state, check_plain, check_schedule, valueless
from loadmaster.train.states import StateLayout, check_optimizer, discover, starts_at_zero
from loadmaster.train.store import HostPiece, host_piece
from loadmaster.train.ties import check_memory
from loadmaster.train.trial import COMPUTE_DTYPE, Trial


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


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A model with its blocks, looked at but not laid out yet."""

    trial: Trial
    chain: Chain
    facts: Profile
    generators: randomness.Generators
    num_batches: int | None
    device: torch.device
    empty: bool = False  # its numbers are drawn when it is held


def build(trial: Trial, *, device: torch.device) -> Built:
    """Build the model as a plain script would after seeding, and profile it on a batch of its own."""
    with randomness.kept(device):
        randomness.seed_all(trial.seed, device)
        empty = on_meta(trial.build)
        if empty is None:
            randomness.seed_all(trial.seed, device)
        model = trial.build() if empty is None else empty
        if not isinstance(model, nn.Module):
            raise InputError(
                f"trial {trial.name!r}: build gave {type(model).__name__}, not a torch.nn.Module"
            )
        check_plain(trial, model)
        check_dense(trial, model)
        generators = randomness.current(device)
        chain = chain_of(trial, model)
        check_memory(trial.name, chain)
        check_extra_state(trial, model)
        batch, num_batches = first_batch(trial)
        model.train()
        with valueless(trial):
            facts = profile(trial, chain, batch, device=device)
        if empty is not None:
            hollow(model)
            chain = chain_of(trial, model)
    return Built(trial, chain, facts, generators, num_batches, device, empty is not None)


def first_batch(trial: Trial) -> tuple[Any, int | None]:
    """A batch from an iterator of its own, and how many an epoch has."""
    data = trial.data()
    for batch in data:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise InputError(
                f"trial {trial.name!r}: data must give (inputs, targets), not {type(batch).__name__}"
            )
        if has_state(data):
            try:
                saved_state(data, trial=trial.name)  # refused now, not at the first checkpoint
            except LoaderError as problem:
                raise InputError(str(problem)) from None
        return tuple(batch), _length(data)
    raise InputError(f"trial {trial.name!r}: data is empty")


def _length(data: Any) -> int | None:
    """Batches of an epoch, where the source knows; a loader of a stream has a length that raises."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Bytes of each parameter, wherever they count."""

    numel: tuple[int, ...]
    trained: tuple[bool, ...]
    compute_bytes: tuple[int, ...]  # as units read it
    grad_bytes: tuple[int, ...]  # as it leaves the device
    pinned_bytes: tuple[int, ...]  # master and state
    copy_bytes: tuple[int, ...]  # a compute copy beside the master
    update_bytes: tuple[int, ...]  # master, state and copy, in a ring
    wide_bytes: tuple[int, ...]  # the gradient in the master's dtype, where it comes in another
    start_bytes: tuple[int, ...]  # state the optimizer makes for itself in its first step


def sizes_of(built: Built) -> Sizes:
    """What each parameter weighs; makes the optimizer once, to see what it keeps."""
    trial, chain = built.trial, built.chain
    dtype = COMPUTE_DTYPE[trial.precision]
    optimizer = trial.optim([parameter for parameter in chain.parameters if parameter.requires_grad])
    check_optimizer(optimizer, name=trial.name)
    states, _ = _states(optimizer, chain)
    check_schedule(trial, optimizer)
    rows = []
    for number, parameter in enumerate(chain.parameters):
        narrow = dtype is not None and built.facts.castable[number] and parameter.dtype == torch.float32
        count, width = parameter.numel(), parameter.element_size()
        compute = count * (2 if narrow else width)
        layout = states[number]
        kept = 0
        for key in layout.large if layout is not None else ():
            assert layout is not None
            kept += aligned(layout.large[key][1].itemsize * math.prod(layout.shape(key, parameter.shape)))
        grad = 0 if layout is None else (count * width if trial.accumulate > 1 else compute)
        copy = compute if narrow else 0
        master = aligned(count * width)
        wide = count * width if 0 < grad < count * width else 0
        start = 0 if starts_at_zero(optimizer) else kept
        update = master + kept + aligned(copy)
        rows.append((count, layout is not None, compute, grad, master + kept, copy, update, wide, start))
    columns = list(zip(*rows, strict=True))
    return Sizes(*columns)


def hold(
    built: Built,
    cuts: Sequence[int],
    *,
    landing: Sequence[bool] | bool,
    layout: Layout | None = None,
    shared: Mapping[int, HostPiece] | None = None,
) -> TrialState:
    """Move a built model into the host store, shard by shard, and make its optimizer.

    Pieces in `shared` are held already, by another trial.
    """
    trial, chain = built.trial, built.chain
    if layout is None:
        layout = lay_out(
            chain, cuts, compute_dtype=COMPUTE_DTYPE[trial.precision], castable=built.facts.castable
        )
    trained = [parameter for parameter in chain.parameters if parameter.requires_grad]
    probe = trial.optim(trained)
    check_optimizer(probe, name=trial.name)
    states, group_of = _states(probe, chain)
    wide = trial.accumulate > 1
    grad_dtype = [
        parameter.dtype if wide else layout.compute_dtype[number]
        for number, parameter in enumerate(chain.parameters)
    ]
    pieces = []
    for piece in layout.pieces:
        lands = landing if isinstance(landing, bool) else landing[piece.index]
        host = (shared or {}).get(piece.index) or host_piece(
            piece,
            layout,
            chain.parameters,
            states,
            grad_dtype=grad_dtype,
            landing=lands,
            for_gpu=built.device.type == "cuda",
        )
        for number, view in zip(piece.parameters, host.master, strict=True):
            chain.parameters[number].data = view
        pieces.append(host)
    generators = _filled(built, pieces) if built.empty else built.generators
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
        group_of,
        generators,
        Scaler(),
        sizes_of(built),
    )
    state.num_batches = built.num_batches
    return state


def _filled(built: Built, pieces: Sequence[HostPiece]) -> randomness.Generators:
    """Draw the numbers of a model built without memory, where it is held; the generators as they then are."""
    other = built.generators.device
    device = torch.device("cpu" if other is None else "cuda")
    with randomness.kept(device):
        randomness.seed_all(built.trial.seed, device)
        reset(built.chain.model)
        now = randomness.current(device, others=False)
        generators = replace(now, others=built.generators.others)  # as the build left them
    for host in pieces:
        for copy, master in zip(host.compute, host.master, strict=True):
            if copy is not master:
                copy.copy_(master)
    return generators


def _states(optimizer: torch.optim.Optimizer, chain: Chain) -> tuple[list[StateLayout | None], list[int]]:
    """State layout and group of each parameter."""
    group_of_id = {
        id(parameter): group
        for group, options in enumerate(optimizer.param_groups)
        for parameter in options["params"]
    }
    foreign = group_of_id.keys() - {id(parameter) for parameter in chain.parameters}
    if foreign:
        raise InputError(
            f"optim was given the model's parameters, but steps {len(foreign)} that are not among them (of"
            " the loss?); make them parameters of the model"
        )
    known: dict[tuple[int, torch.dtype, int], StateLayout] = {}
    states: list[StateLayout | None] = []
    groups = []
    for parameter in chain.parameters:
        group = group_of_id.get(id(parameter), -1) if parameter.requires_grad else -1
        groups.append(group)
        if group < 0:
            states.append(None)
            continue
        key = (group, parameter.dtype, parameter.ndim)
        if key not in known:
            found = discover(optimizer, [parameter.ndim], group, dtype=parameter.dtype, device="cpu")
            known[key] = found[parameter.ndim]
        states.append(known[key])
    return states, groups
