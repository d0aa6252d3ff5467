"""GraphBuilder: how readers, generators and tests put a Graph together op by op.

Ops may be added in any order; `build` sorts them topologically (Kahn's algorithm, the earliest
added op first), so that a graph whose ops were added in order keeps that order.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from loadmaster.core.errors import GraphError
from loadmaster.core.graph import (
    NO_GROUP,
    NO_MIRROR,
    NO_SIGNATURE,
    NO_STORAGE,
    Dtype,
    Graph,
    Phase,
)

OWN_STORAGE = -2  # a tensor that is no view


class GraphBuilder:
    """Collects ops, tensors and uses by index."""

    def __init__(self, name: str, *, capture: str = "built") -> None:
        """`capture` says how the graph was made."""
        self.name = name
        self.capture = capture
        self._ops: list[tuple[str, str, str, int, int, int, int, int, float, int, int, int]] = []
        self._tensors: list[tuple[int, int, int, bool]] = []
        self._uses: dict[tuple[int, int], None] = {}
        self._signatures: dict[str, int] = {}

    def op(
        self,
        name: str,
        *,
        kind: str = "op",
        module: str = "",
        phase: Phase = Phase.FORWARD,
        mirror: int = NO_MIRROR,
        group: int = NO_GROUP,
        signature: str = "",
        dtype: Dtype = Dtype.FLOAT32,
        flops: float = 0.0,
        bytes_moved: int = 0,
        resident_bytes: int = 0,
        workspace_bytes: int = 0,
    ) -> int:
        """Add an op and return its index (`mirror` is such an index)."""
        row = NO_SIGNATURE
        if signature:
            row = self._signatures.setdefault(signature, len(self._signatures))
        self._ops.append(
            (
                name,
                kind,
                module,
                int(phase),
                mirror,
                group,
                row,
                int(dtype),
                flops,
                bytes_moved,
                resident_bytes,
                workspace_bytes,
            )
        )
        return len(self._ops) - 1

    def tensor(self, op: int, num_bytes: int, *, storage: int = OWN_STORAGE, keep: bool = False) -> int:
        """Add an output of `op` and return its index; `storage` is a base tensor or NO_STORAGE."""
        self._require(op, self._ops, "op")
        index = len(self._tensors)
        self._tensors.append((op, num_bytes, index if storage == OWN_STORAGE else storage, keep))
        return index

    def use(self, tensor: int, *ops: int) -> None:
        """Let `ops` read `tensor`; saying it twice is saying it once."""
        self._require(tensor, self._tensors, "tensor")
        for op in ops:
            self._require(op, self._ops, "op")
            self._uses[(tensor, op)] = None

    def _require(self, index: int, known: Sequence[object], what: str) -> None:
        if not 0 <= index < len(known):
            raise GraphError(f"graph {self.name!r} has no {what} {index}; it has {len(known)} so far")

    def build(self) -> Graph:
        """The graph, its ops in topological order; a cycle is an error that names it."""
        for op in self._ops:
            if op[4] != NO_MIRROR:  # may name an op added later
                self._require(op[4], self._ops, "op")
        order = self._sort_ops()
        place = np.empty(len(order) + 1, dtype=np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        place[-1] = NO_MIRROR  # index -1 stays -1
        ops = list(zip(*(self._ops[i] for i in order), strict=True)) if order else [()] * 12
        tensors = list(zip(*self._tensors, strict=True)) if self._tensors else [()] * 4
        uses = np.array(list(self._uses), dtype=np.int32).reshape(-1, 2)
        return Graph(
            name=self.name,
            op_name=ops[0],
            op_kind=ops[1],
            module=ops[2],
            phase=np.array(ops[3], dtype=np.int8),
            mirror=place[np.array(ops[4], dtype=np.int32)],
            group=np.array(ops[5], dtype=np.int32),
            signature=np.array(ops[6], dtype=np.int32),
            signature_table=tuple(self._signatures),
            dtype=np.array(ops[7], dtype=np.int8),
            flops=np.array(ops[8], dtype=np.float64),
            bytes_moved=np.array(ops[9]),
            resident_bytes=np.array(ops[10]),
            workspace_bytes=np.array(ops[11]),
            tensor_op=place[np.array(tensors[0], dtype=np.int32)],
            tensor_bytes=np.array(tensors[1]),
            tensor_storage=np.array(tensors[2], dtype=np.int32),
            keep=np.array(tensors[3], dtype=np.bool_),
            use_tensor=uses[:, 0],
            use_op=place[uses[:, 1]],
            capture=self.capture,
        )

    def _sort_ops(self) -> list[int]:
        """Op indices in topological order, the earliest added first."""
        num_ops = len(self._ops)
        consumers: list[list[int]] = [[] for _ in range(num_ops)]
        waiting = [0] * num_ops
        for tensor, op in self._uses:
            consumers[self._tensors[tensor][0]].append(op)
            waiting[op] += 1
        ready = [op for op in range(num_ops) if waiting[op] == 0]
        order: list[int] = []
        while ready:
            op = heapq.heappop(ready)
            order.append(op)
            for consumer in consumers[op]:
                waiting[consumer] -= 1
                if waiting[consumer] == 0:
                    heapq.heappush(ready, consumer)
        if len(order) != num_ops:
            raise GraphError(f"graph {self.name!r} has a cycle: {self._describe_cycle(waiting)}; break it")
        return order

    def _describe_cycle(self, waiting: list[int]) -> str:
        """One cycle in words, found by walking producers that also wait."""
        producer: dict[int, int] = {}
        for tensor, op in self._uses:
            if waiting[op] and waiting[self._tensors[tensor][0]]:
                producer.setdefault(op, self._tensors[tensor][0])
        op = next(iter(producer))
        seen: dict[int, int] = {}  # op -> position on the walk
        while op not in seen:
            seen[op] = len(seen)
            op = producer[op]
        loop = [*list(seen)[seen[op] :], op][::-1]
        shown = [repr(self._ops[i][0]) for i in loop]
        return " -> ".join(shown if len(shown) <= 8 else [*shown[:6], "...", shown[-1]])


__all__ = ["NO_STORAGE", "OWN_STORAGE", "GraphBuilder"]
