"""Slurm: reads `squeue --json` and `scontrol show nodes --json`, writes the `scontrol` line it would advise.

The recorded file has `jobs`, `nodes`, `now` (epoch seconds) and `curves` (seconds by number of GPUs, by
job name).
"""

import re
import shlex
from dataclasses import replace
from typing import Any

import numpy as np

from loadmaster.advisor.adapters.log import AdviceEntry
from loadmaster.advisor.adapters.requests import Pending, advise_pending, curve_of
from loadmaster.advisor.jobs.state import ClusterState, host_layout
from loadmaster.core.errors import FormatError

_GPUS = re.compile(r"gpu(?::([A-Za-z0-9_.-]+))?:(\d{1,4})")
_REQUESTED = re.compile(r"gres/gpu(?::[^=,]+)?=(\d{1,6})")
_DOWN = {"DOWN", "DRAIN", "DRAINED", "FAIL", "MAINT", "NOT_RESPONDING"}


def advise_slurm(document: dict[str, Any]) -> list[AdviceEntry]:
    """Advice on every pending job, in the order of the queue; each sees the cluster as it is now."""
    state = slurm_state(document)
    entries = []
    for job in _pending(document):
        answer, entry = advise_pending(job, state, curve_of(job.name, document.get("curves")), "slurm")
        if answer is not None and answer.admit:
            on_node = np.unique(state.layout.host[list(answer.devices)], return_counts=True)[1]
            even = on_node.min() == on_node.max()
            gpus = f"TresPerNode=gres/gpu:{on_node[0]}" if even else f"TresPerJob=gres/gpu:{on_node.sum()}"
            where = f"NumNodes={len(on_node)} {gpus}"
            line = f"scontrol update JobId={shlex.quote(job.id)} {where}"
            entry = replace(entry, action=line)
        entries.append(entry)
    return entries


def slurm_state(document: dict[str, Any]) -> ClusterState:
    """Nodes with GPUs; a used GPU comes free when the last job of its node ends."""
    nodes = [n for n in _rows(document, "nodes") if _gpus(n.get("gres"))[1] > 0]
    if not nodes:
        raise FormatError("no node of the recorded queue has GPUs (nodes[].gres such as 'gpu:a100:8')")
    now = _now(document)
    layout = host_layout([_gpus(n["gres"])[1] for n in nodes], [_gpus(n["gres"])[0] or "gpu" for n in nodes])
    free_at = np.zeros(layout.num_devices)
    for h, node in enumerate(nodes):
        members = np.flatnonzero(layout.host == h)
        if _DOWN & {str(s).upper() for s in _as_list(node.get("state"))}:
            free_at[members] = np.inf
            continue
        used = min(_gpus(node.get("gres_used"))[1], len(members))
        ends = [
            _epoch(j.get("end_time")) - now
            for j in _rows(document, "jobs")
            if "RUNNING" in _states(j) and node.get("name") in str(j.get("nodes", "")).split(",")
        ]
        free_at[members[:used]] = max([1.0, *ends]) if ends else np.inf
    names = tuple(f"{nodes[int(h)].get('name')}/gpu{i}" for i, h in enumerate(layout.host))
    return ClusterState(replace(layout, name=names), free_at)


def _pending(document: dict[str, Any]) -> list[Pending]:
    now = _now(document)
    found = []
    for job in _rows(document, "jobs"):
        if "PENDING" not in _states(job):
            continue
        match = _REQUESTED.search(str(job.get("tres_req_str", "")))
        deadline = _epoch(job.get("deadline"))
        if match:
            due = max(0.0, deadline - now) if deadline > 0 else None
            found.append(Pending(str(job.get("job_id")), str(job.get("name")), int(match[1]), due, job))
    return found


def _rows(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    rows = document.get(name)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise FormatError(f"the recorded queue has no list {name!r}")
    return rows


def _states(job: dict[str, Any]) -> set[str]:
    return {str(state).upper() for state in _as_list(job.get("job_state"))}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _gpus(text: Any) -> tuple[str, int]:
    found = _GPUS.findall(str(text or ""))
    return (found[0][0], sum(int(count) for _, count in found)) if found else ("", 0)


def _now(document: dict[str, Any]) -> float:
    """When the queue was recorded; without it, deadlines would lie decades ahead."""
    now = document.get("now")
    if isinstance(now, bool) or not isinstance(now, int | float | dict):
        raise FormatError(
            f"the recorded queue says now: {str(now)[:40]!r}; give the seconds since 1970 (date +%s)"
            " at which it was recorded"
        )
    return _epoch(now)


def _epoch(value: Any) -> float:
    """Slurm writes a number, or {"set": true, "number": 17}."""
    if isinstance(value, dict):
        value = value.get("number", 0) if value.get("set", True) else 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value)
