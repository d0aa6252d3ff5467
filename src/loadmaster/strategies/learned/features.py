"""Features: a problem and a state of its search as arrays without units, so that what is learned transfers.

Times are divided by the norm of the groups' times, bandwidths by the largest, bytes by both. What the
simulator says of the best known state (busy and full devices) is an input, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.strategy import Mode, Sync
from loadmaster.strategies.scoring.evaluator import Evaluated, Evaluator
from loadmaster.strategies.scoring.group_facts import SHARES

MODES = 4  # place, replicate and sum, replicate with a server, duplicate
GROUP, DEVICE, LINK, PLACE = 10, 6, 2, 5  # widths
_STATE = 2 + MODES  # of a group: decided, being decided, its mode


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What does not change while a problem is searched."""

    group: Floats  # [G, GROUP]
    before: Floats  # [G, G] bytes from group to group, normalised
    device: Floats  # [D, DEVICE - 2]
    link: Floats  # [D, D, LINK]
    seconds: Floats  # [G, D, 4] at a whole, half, quarter and eighth of the batch
    mask: Floats  # [A, D] devices of each action
    mode: Floats  # [A, MODES]
    usable_bytes: Floats  # [D]
    whole_utilisation: bool = False  # a published defect


def mode_of(mode: Mode, sync: Sync) -> int:
    """Which of `MODES` an action is."""
    if mode == Mode.PLACE:
        return 0
    if mode == Mode.DUPLICATE:
        return 3
    return 2 if sync == Sync.PS else 1


def make_record(evaluator: Evaluator) -> Record:
    """The fixed part."""
    facts = evaluator.facts
    groups, devices = facts.num_groups, facts.num_devices
    table = np.zeros((groups, facts.seconds.shape[1], len(SHARES)))
    np.add.at(table, facts.segment_group, facts.seconds)
    kinds = table[:, facts.kind]  # [G, D, P]
    at = [int(np.searchsorted(SHARES, share)) for share in (1.0, 0.5, 0.25, 0.125)]
    scale = max(float(np.linalg.norm(kinds[:, :, -1].min(axis=1))), 1e-12)
    between = facts.bytes_per_s[~np.eye(devices, dtype=np.bool_)]
    fastest = float(between.max()) if len(between) else 1.0
    unit = scale * fastest
    seconds = kinds[:, :, at] / scale
    sizes = np.stack(
        [
            facts.resident_bytes,
            facts.group_gradient_bytes,
            facts.saved_part,
            facts.transient,
            facts.update_s.mean(axis=1) * fastest,
        ],
        axis=1,
    )
    group = np.concatenate(
        [seconds.mean(axis=1), np.log1p(sizes / unit), facts.splits[:, None].astype(np.float64)], axis=1
    )
    before = np.zeros((groups, groups))
    source, target = facts.segment_group[facts.edge_source], facts.segment_group[facts.edge_target]
    np.add.at(before, (source, target), (facts.edge_part + facts.edge_full) / unit)
    np.fill_diagonal(before, 0.0)
    if "zero_edges" in evaluator.compat:
        before[:] = 0.0
    whole = kinds[:, :, -1].sum(axis=0)
    total = float(facts.resident_bytes.sum() + facts.saved_part.sum())
    alike = (facts.host[:, None] == facts.host[None, :]).sum(axis=1)
    device = np.stack(
        [
            whole / max(float(whole.min()), 1e-30),
            np.log1p(np.minimum(facts.usable_bytes / max(total, 1.0), 100.0)),
            alike / devices,
            np.full(devices, 1.0 / devices),
        ],
        axis=1,
    )
    rate = np.where(np.isfinite(facts.bytes_per_s), facts.bytes_per_s, fastest) / fastest
    link = np.stack([rate, np.log1p(facts.latency_s / scale)], axis=2)
    mask = np.zeros((len(evaluator.actions), devices))
    mode = np.zeros((len(evaluator.actions), MODES))
    for a, action in enumerate(evaluator.actions):
        mask[a, list(action.devices)] = 1.0
        mode[a, mode_of(action.mode, action.sync)] = 1.0
    return Record(
        group,
        np.log1p(before),
        device,
        link,
        seconds,
        mask,
        mode,
        facts.usable_bytes,
        "whole_utilisation" in evaluator.compat,
    )


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What changes: B states of one record."""

    group: Floats  # [B, G, _STATE]
    device: Floats  # [B, D, 2]
    placed: Floats  # [B, G, D]
    turn: Floats  # [B] the group that is decided next


def make_states(record: Record, states: Sequence[Sequence[int]], best: Evaluated) -> State:
    """States as prefixes of choices, filled up with the best known one."""
    groups, devices = len(record.group), len(record.device)
    group = np.zeros((len(states), groups, _STATE))
    placed = np.zeros((len(states), groups, devices))
    turn = np.zeros(len(states))
    for b, state in enumerate(states):
        choice = [*state, *best.choice[len(state) :]]
        group[b, : len(state), 0] = 1.0
        turn[b] = min(len(state), groups - 1)
        group[b, int(turn[b]), 1] = 1.0
        group[b, :, 2:] = record.mode[choice]
        placed[b] = record.mask[choice]
    busy = best.busy_s / max(best.time_s, 1e-30)
    if record.whole_utilisation:
        busy = np.floor(busy + 1e-9)
    full = np.minimum(best.peak_bytes / record.usable_bytes, 2.0)
    device = np.repeat(np.stack([busy, full], axis=1)[None], len(states), axis=0)
    return State(group, device, placed, turn)


GROUP_INPUTS, DEVICE_INPUTS = GROUP + _STATE, DEVICE
