"""Shares: a line cut by shares of its work, at the border near each share over which least is sent."""

import numpy as np

from loadmaster.core.arrays import Floats
from loadmaster.core.errors import InputError
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Problem
from loadmaster.core.run import Run
from loadmaster.placers.answer import Tally
from loadmaster.placers.pipelined._candidates import Candidate, device_speeds, make_plan, schedules_asked
from loadmaster.placers.pipelined._line import Line, make_line

_NEAR = 0.02  # of the work: how far a border may be from its share


def answer_by_share(problem: Problem, run: Run, *, by_speed: bool, algorithm: str) -> Placement:
    """One plan of all accelerators, else of all devices, in the order in which they were named."""
    line, tally = make_line(problem), Tally(problem, run)
    speed = device_speeds(line)
    on_host = problem.cluster.on_host[problem.cluster.kind]
    usable = [d for d in range(len(speed)) if line.refused[-1, d] == 0]
    usable = [d for d in usable if not on_host[d]] or usable or list(range(len(speed)))
    schedule, each = schedules_asked(problem)[0]
    count = problem.schedule.num_microbatches if problem.schedule is not None else 1
    while len(usable) * each > line.num and len(usable) > 1:
        usable.pop()
    share = np.tile(speed[usable] if by_speed else np.ones(len(usable)), each)
    border = cut_by_share(line, share / share.sum(), kind=int(problem.cluster.kind[usable[0]]))
    recompute = (False,) * len(share)
    tally.offer(
        make_plan(line, Candidate((tuple(usable),), (count,), schedule, each, border, recompute)),
        in_order=True,
    )
    return tally.answer(algorithm=algorithm)


def cut_by_share(line: Line, share: Floats, *, kind: int) -> tuple[int, ...]:
    """Borders so that each stage has its share of the work, none empty."""
    num = len(share)
    if num > line.num:
        raise InputError(
            f"graph {line.problem.graph.name!r} cannot be cut into {num} stages, only into {line.num};"
            " use fewer devices"
        )
    done = line.forward_s[:, kind] + line.backward_s[:, kind]
    done = done / max(float(done[-1]), 1e-300)
    sent = line.forward_bytes + line.backward_bytes
    border = [0]
    for s in range(1, num):
        low, high = border[-1] + 1, line.num - (num - s)
        choice = np.arange(low, high + 1)
        away = np.abs(done[choice] - float(share[:s].sum()))
        near = choice[away <= max(_NEAR, float(away.min()))]
        border.append(int(near[np.argmin(sent[near])]))
    return (*border, line.num)
