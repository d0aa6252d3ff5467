"""Question: what a user asks, as plain values: a source on devices, and every option of the answer.

The command line, `api` and `capacity` share this noun; `questions.problem.build_problem` makes a Problem
of it. Values are kept as the user wrote them ('step', '1GiB'): whoever answers the question checks them. None
is the source's own, or else the default. A new option is one field here and its declaration in
`cli/options.py`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from loadmaster.core.cluster import Cluster
from loadmaster.core.files import MAX_BYTES
from loadmaster.core.graph import Graph
from loadmaster.core.problem import Links, Load, Objective, Split, Workload
from loadmaster.core.run import Budget

Source = str | os.PathLike[str] | Graph | Workload
Devices = str | os.PathLike[str] | Cluster
MEASURE_S = 30.0  # how long to measure costs, where nobody says


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A source on devices, and what is asked."""

    source: Source
    devices: Devices | None = None
    objective: Objective | str | None = None
    links: Links | str | None = None
    split: Split | str | None = None
    load: Load | str | None = None
    pipeline: str | None = None  # stages with room for micro-batches in flight, e.g. '1f1b:8'; '' = none
    pin: Mapping[str, str] | None = None  # op or module -> device
    reserve_bytes: int | str = 0  # kept free on every device
    # of files
    format: str | None = None
    max_bytes: int = MAX_BYTES
    # of the step; most of it is for models that are captured (docs/capture.md)
    batch: int | None = None
    seq: int | None = None
    optimizer: str | None = None
    precision: str = "fp32"
    target: str | None = None  # kind of device whose kernels are meant: 'cpu' or 'cuda'
    capture_path: str | None = None
    assume: float | None = None
    accumulation: int | None = None
    ranges: Mapping[str, tuple[int, int]] | None = None
    recompute: bool = False  # activations; only `fit` asks for it
    # of the times of ops (docs/costs.md)
    costs: str = "roofline"  # or 'measured', or 'auto': measured where all devices are on this machine
    measure_budget: Budget | float | str = MEASURE_S
    database: str | os.PathLike[str] | None = None
