"""`lm.advise`: from what a user has (a source or a job, devices or a state) to a `Job` and a
`ClusterState`."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from loadmaster.advisor.advice import Advice
from loadmaster.advisor.advise import advise as advise_job
from loadmaster.advisor.jobs.curve import measured_curve
from loadmaster.advisor.jobs.job import Job
from loadmaster.advisor.jobs.state import ClusterState, Layout, idle
from loadmaster.advisor.planned_curve import COUNTS, planned_curve
from loadmaster.advisor.policies.registry import Policy, Run
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import InputError
from loadmaster.core.question import Source
from loadmaster.core.run import ignore_progress
from loadmaster.core.units import parse_seconds


def advise(
    job: "Job | str | os.PathLike[str] | Mapping[int, float] | object",
    state: "ClusterState | Cluster | str",
    *,
    deadline_s: float | str | None = None,
    by: str | Policy = "smallest",
    steps: float = 1.0,
    batch: int | None = None,
    seq: int | None = None,
    objective: str = "throughput",
    budget: str = "60x",
    residuals: Sequence[float] = (),
    coming: Sequence[Job] = (),
    mean_gap_s: float = 0.0,
    progress: Callable[[str, float], None] = ignore_progress,
) -> Advice:
    """Say how many devices a job should get, which ones, and when it will be done; or why not.

    - `job`: a Job, the seconds of one step by number of devices, or a source such as 'hf:gpt2'. The last two
      take `steps` steps.
    - `state`: a ClusterState, or devices such as '8xA100-80GB', all of them free.
    - `deadline_s`: from now on; seconds, or text such as '6h'.
    - `by`: the policy (`loadmaster advise policies` lists them).
    - `residuals`: measured times divided by predicted ones, from earlier jobs. With 20 or more of them they
      give the error bar.
    - `coming`: jobs that may arrive, one every `mean_gap_s` seconds on average. The policy 'rollout' looks
      ahead to them.
    """
    if isinstance(deadline_s, str):
        deadline_s = parse_seconds(deadline_s)
    if deadline_s is not None and not (deadline_s >= 0):
        raise InputError(f"the deadline is {deadline_s!r} s; give a time >= 0")
    if not (0 <= mean_gap_s < math.inf) or (coming and not mean_gap_s):
        raise InputError(f"mean_gap_s is {mean_gap_s!r}; give the seconds between jobs that may come")
    where = state if isinstance(state, ClusterState) else idle(layout_of(state))
    if isinstance(job, Job):
        asked = job
    elif isinstance(job, Mapping):
        if not (0 < steps < math.inf):
            raise InputError(f"steps is {steps!r}. Pass a number above 0.")
        of_a_step = measured_curve(job).seconds
        asked = Job("job", measured_curve({n: steps * seconds for (_, n, _), seconds in of_a_step.items()}))
    else:
        most = max(1, int(np.isfinite(where.free_at_s).sum()))
        counts = [n for n in COUNTS if n <= most] or [most]
        kinds = where.layout.kinds
        curve = planned_curve(
            cast(Source, job),
            kinds,
            steps=steps,
            counts=counts,
            objective=objective,
            budget=budget,
            batch=batch,
            seq=seq,
            progress=progress,
        )
        asked = Job(str(job)[:80] if isinstance(job, str) else type(job).__name__, curve)
    limit = math.inf if deadline_s is None and asked is not job else deadline_s
    run = Run(future=tuple(coming), mean_gap_s=mean_gap_s)
    return advise_job(asked, where, deadline_s=limit, by=by, residuals=residuals, run=run)


def layout_of(devices: "Cluster | str") -> Layout:
    """The accelerators of a cluster, or all its devices where there are none."""
    cluster = devices if isinstance(devices, Cluster) else parse_cluster(devices)
    chosen = np.flatnonzero(~cluster.on_host[cluster.kind])
    if not len(chosen):
        chosen = np.arange(len(cluster.device_name))
    kinds = tuple(dict.fromkeys(cluster.kind_name[cluster.kind[d]] for d in chosen))
    return Layout(
        name=tuple(cluster.device_name[d] for d in chosen),
        host=np.asarray(cluster.host)[chosen].astype(np.int64),
        kind=np.array([kinds.index(cluster.kind_name[cluster.kind[d]]) for d in chosen], np.int64),
        kinds=kinds,
    )
