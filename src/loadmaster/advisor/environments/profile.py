"""Job graphs of the published environment, read from PipeDream's profile files (section 2.1 of PAC-ML's
rules).

Forward op i has a backward twin 2N+1-i; each forward edge (u, v) adds (v', u'); one edge joins the two
halves. The
memory of an op is its activation and its parameters, for both twins. Times stay in the file's milliseconds.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadmaster.core.errors import FileError, FormatError

TRAINING_STEPS = 50
MODELS = ("alexnet", "gnmt", "resnet18", "squeezenet1_0", "vgg16")
_MAX_BYTES = 16 * 2**20
_NODE = re.compile(
    r"node(\d+) -- (.*) -- forward_compute_time=([0-9.eE+-]+), backward_compute_time=([0-9.eE+-]+),"
    r" activation_size=(\[[^\]]*\]|[0-9.eE+-]+), parameter_size=([0-9.eE+-]+)"
)
_EDGE = re.compile(r"\tnode(\d+) -- node(\d+)")


@dataclass(frozen=True, slots=True, eq=False)
class JobGraph:
    """Ops 0..N-1 forward, N..2N-1 backward (twin of i is 2N-1-i), and the edges between them."""

    name: str
    compute_ms: NDArray[np.float64]  # [2N]
    activation_bytes: NDArray[np.float64]  # [2N]
    memory_bytes: NDArray[np.float64]  # [2N] activation and parameters
    edge: NDArray[np.int64]  # [E, 2] source and destination
    split_order: NDArray[np.int64]  # [2N] in which turn an op is split
    file_order: NDArray[np.int64]  # [N] forward ops as the file lists them

    @property
    def num_forward(self) -> int:
        """Ops of the forward half."""
        return len(self.compute_ms) // 2

    @property
    def sequential_ms(self) -> float:
        """Time of all training steps on one device."""
        return float(TRAINING_STEPS * self.compute_ms.sum())

    def kahn_order(self) -> list[int]:
        """Forward ops in topological order: a queue, sources and successors as the file lists them."""
        n = self.num_forward
        inside = self.edge[(self.edge < n).all(axis=1)]
        missing = np.bincount(inside[:, 1], minlength=n)
        queue = [int(op) for op in self.file_order if missing[op] == 0]
        for op in queue:
            for after in inside[inside[:, 0] == op, 1]:
                missing[after] -= 1
                if missing[after] == 0:
                    queue.append(int(after))
        return queue


def read_profile(path: str | Path) -> JobGraph:
    """Read one profile; a line that is neither an op nor an edge is refused with its number."""
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise FormatError(f"{path} has {path.stat().st_size} bytes; a profile has at most {_MAX_BYTES}")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as trouble:
        raise FileError(f"cannot read the profile {path}: {trouble}") from None
    ops: dict[int, tuple[float, float, float, float]] = {}
    edges: list[tuple[int, int]] = []
    for number, line in enumerate(lines, 1):
        if node := _NODE.fullmatch(line.rstrip()):
            activation = sum(float(part) for part in node[5].strip("[]").split(";"))
            ops[int(node[1])] = (float(node[3]), float(node[4]), activation, float(node[6]))
        elif edge := _EDGE.fullmatch(line.rstrip()):
            edges.append((int(edge[1]) - 1, int(edge[2]) - 1))
        elif line.strip():
            raise FormatError(f"{path}, line {number}: neither an op nor an edge: {line[:80]!r}")
    return _build_graph(path.name.removesuffix(".txt"), ops, edges, where=str(path))


def _build_graph(
    name: str, ops: dict[int, tuple[float, float, float, float]], edges: list[tuple[int, int]], *, where: str
) -> JobGraph:
    n = len(ops)
    if n == 0 or sorted(ops) != list(range(1, n + 1)):
        raise FormatError(f"{where}: ops must be numbered 1 to {n} without gaps")
    if any(not 0 <= end < n for edge in edges for end in edge):
        raise FormatError(f"{where}: an edge names an op that is not there")
    if any(value < 0 for op in ops.values() for value in op):
        raise FormatError(f"{where}: times and sizes must not be negative")
    values = np.array([ops[i + 1] for i in range(n)], dtype=np.float64)
    file_order = np.array([i - 1 for i in ops], dtype=np.int64)
    order = np.empty(2 * n, dtype=np.int64)
    order[file_order] = 2 * np.arange(n)
    order[2 * n - 1 - file_order] = 2 * np.arange(n) + 1
    backward = [(2 * n - 1 - v, 2 * n - 1 - u) for u, v in edges]
    both = np.concatenate([values[:, 2], values[::-1, 2]])
    return JobGraph(
        name=name,
        compute_ms=np.concatenate([values[:, 0], values[::-1, 1]]),
        activation_bytes=both,
        memory_bytes=both + np.concatenate([values[:, 3], values[::-1, 3]]),
        edge=np.array([*edges, (n - 1, n), *backward], dtype=np.int64).reshape(-1, 2),
        split_order=order,
        file_order=file_order,
    )


def read_profiles(folder: str | Path) -> tuple[JobGraph, ...]:
    """The five published job graphs from a folder."""
    return tuple(read_profile(Path(folder) / f"{name}.txt") for name in MODELS)
