"""The public msr graphs beside the repository, with the values their authors' programs give.

The files are not ours and are never copied here; a test that needs one skips without it. The numbers are
those of the re-runs listed with the files, to the digits printed there.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from loadmaster.core.graph import Graph
from loadmaster.core.problem import FREE, Load, Problem, Split, Workload
from loadmaster.graph.formats import msr

GRAPHS = Path(__file__).resolve().parents[2].parent / "shared" / "graphs" / "msr"


class Published(NamedTuple):
    """Max-loads of one throughput input: l = 1, k accelerators, cost variant `sum`."""

    chain: float  # optimum over chains
    one_accelerator: str  # as printed
    work_bound: str  # as printed
    expert: str = ""  # as printed, '' = none


THROUGHPUT = {
    "LayerGraphs/bert24_inference": Published(17.78990625, "92.406", "15.1485", "20.084"),
    "LayerGraphs/bert24_training": Published(41.7458125, "217.813", "35.7070", "49.4049"),
    "LayerGraphs/gnmt_inference": Published(32.9106582031, "182.563", "29.9284", "46.2085"),
    "LayerGraphs/inceptionv3_inference": Published(51.5518635864, "310.969", "50.9785", "102.482"),
    "LayerGraphs/resnet50_inference": Published(33.7746660156, "201.450", "33.0246", "43.9183"),
    "LayerGraphs/resnet50_training": Published(78.6318125, "462.381", "75.8002", "112.108"),
    "OperatorGraphs/bert_l-3_inference": Published(27.9185676799, "49.3526", "16.2158"),
    "OperatorGraphs/bert_l-3_training": Published(65.3031491221, "122.987", "40.4101"),
    "OperatorGraphs/bert_l-6_inference": Published(29.5795058065, "77.4615", "25.4516"),
    "OperatorGraphs/bert_l-6_training": Published(72.8649663224, "192.917", "63.3869"),
    "OperatorGraphs/resnet50_inference": Published(124.3488497740, "325.132", "53.7988"),
    "OperatorGraphs/resnet50_training": Published(255.1944164522, "684.891", "113.3272"),
}


def shared(*parts: str) -> bytes:
    """A public file, or skip."""
    path = GRAPHS.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{'/'.join(parts)} is not there; the public graphs lie beside the repository")
    return path.read_bytes()


def throughput_input(name: str) -> Workload:
    """One of `THROUGHPUT`."""
    return msr.read(shared("throughput-inputs", f"{name}.json"), name)


def problem_from(work: Workload, *, split: Split = Split.CHAIN) -> Problem:
    """The question its file asks."""
    graph: Graph = work.graph
    assert work.cluster is not None
    assert work.costs is not None
    pinned = np.full(graph.num_ops, FREE, dtype=np.int32)
    return Problem(graph, work.cluster, work.costs, work.objective, work.links, split, Load.SUM, pinned)


def printed_as(value: float, text: str) -> bool:
    """Whether a value, printed with the digits of `text`, is `text`."""
    return f"{value:.{len(text.partition('.')[2])}f}" == text
