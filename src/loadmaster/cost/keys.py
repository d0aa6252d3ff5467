"""Keys: what there is to measure in a graph, every distinct piece of work once.

A key is the text under which a measurement is kept: the op's signature, and what the signature does not say
but the time depends on:

    'aten.mm.default float32[8,16] float32[16,4]'             as autograd or inference runs it
    'aten.mm.default float32[8,16] float32[16,4] @grad'       in the forward pass of a training step
    'update adamw float32[768,768]'                           one weight's update by an optimizer
    'update adamw_fused float32[768,768]'                     ... by its one kernel for all (fused=True)
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from loadmaster.core.arrays import Bools, Ints, Longs
from loadmaster.core.graph import NO_SIGNATURE, Graph, Phase
from loadmaster.cost.memory import pair_weights_with_updates
from loadmaster.cost.signature import Signature, parse_signature

GRAD = " @grad"
UPDATE = "update "
TENSORFLOW = "tf."  # of an op that no autograd watches as it runs
# See `gaps`: what lies between ops of a CPU; calling an optimizer once; the same in mixed precision.
GAPS = (
    "gap forward",
    "gap backward",
    "gap update",
    "gap mixed forward",
    "gap each update",
    "gap mixed backward",
)
ISSUE_CALL = "issue call"  # see `issue`: calling an optimizer once, and whole passes of a reference's step
ISSUE_PASSES = ("forward", "backward", "update", "mixed forward", "mixed backward")
WHOLE_STEP = ("whole step", "whole step by ops")  # see `whole_step`
COPIES = {f"copy of {size} bytes": size for size in (2**12, 2**18, 2**24)}  # see `copies`
ISSUES = (ISSUE_CALL, *(f"issue {name}{by}" for name in ISSUE_PASSES for by in ("", " by ops")))
NO_KEY = -1
_STATES = ((0, "sgd"), (1, "momentum"), (2, "adamw"))  # bytes kept beside a weight, in weights
_STEP_BYTES = 16  # a step count beside them
_FUSED = "fused_"  # of the kind of an update op


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """M keys of N ops."""

    text: tuple[str, ...]  # [M]
    of_op: Ints  # [N] key, or NO_KEY: nothing is to be measured
    first: Ints  # [M] an op with that key
    count: Longs  # [M] ops with that key

    @property
    def measurable(self) -> Bools:
        """[N] ops with a key."""
        found: Bools = self.of_op != NO_KEY
        return found


def collect_keys(graph: Graph) -> Keys:
    """Every distinct piece of work of a graph."""
    trains = bool((graph.phase == Phase.BACKWARD).any())
    optimizer = _find_optimizers(graph)
    readable = [parse_signature(text) is not None for text in graph.signature_table]
    known: dict[str, int] = {}
    of_op = np.full(graph.num_ops, NO_KEY, dtype=np.int32)
    for op in np.flatnonzero((graph.signature != NO_SIGNATURE) & (graph.phase != Phase.PARAM)).tolist():
        text = graph.signature_table[graph.signature[op]]
        if graph.phase[op] == Phase.UPDATE and op in optimizer and text.startswith(UPDATE):
            text = f"{UPDATE}{optimizer[op]} {text.removeprefix(UPDATE)}"
        elif not readable[graph.signature[op]]:
            continue
        elif trains and graph.phase[op] == Phase.FORWARD and not text.startswith(TENSORFLOW):
            text += GRAD
        of_op[op] = known.setdefault(text, len(known))
    used = of_op[of_op != NO_KEY]
    first = np.full(len(known), graph.num_ops, dtype=np.int32)
    np.minimum.at(first, used, np.flatnonzero(of_op != NO_KEY).astype(np.int32))
    return Keys(tuple(known), of_op, first, np.bincount(used, minlength=len(known)).astype(np.int64))


def all_keys(keys: Keys) -> list[str]:
    """What the database is asked for: the keys of a graph, and what is measured once for all graphs."""
    return [*keys.text, *GAPS, *ISSUES, *COPIES, *WHOLE_STEP, step_key(keys)]


def issue_keys(name: str) -> tuple[str, str]:
    """Of a pass of ISSUE_PASSES: as a whole, and the sum of its ops."""
    return f"issue {name}", f"issue {name} by ops"


def step_key(keys: Keys) -> str:
    """Under which the whole step of a graph is kept (`whole_step`): all its work, however often each."""
    pairs = sorted(zip(keys.text, keys.count.tolist(), strict=True))
    text = "\n".join(f"{count} {key}" for key, count in pairs)
    return f"step {hashlib.sha256(text.encode()).hexdigest()[:24]}"


def split_key(text: str) -> tuple[Signature | None, bool]:
    """The signature behind a key, and whether it runs with gradients; None for an update."""
    return parse_signature(text.removesuffix(GRAD)), text.endswith(GRAD)


def _find_optimizers(graph: Graph) -> dict[int, str]:
    """The optimizer of each update op, by what it keeps beside its weights: a graph does not name it.

    Only where all weights agree: of what keeps less for some than for others, nothing is known.
    """
    weight, update = pair_weights_with_updates(graph)
    own = np.zeros(graph.num_ops, dtype=np.int64)
    base = graph.tensor_storage == np.arange(graph.num_tensors)
    np.maximum.at(own, graph.tensor_op[base], graph.tensor_bytes[base])
    found: dict[int, str] = {}
    for param, op in zip(weight.tolist(), update.tolist(), strict=True):
        size, held = int(own[param]), int(graph.resident_bytes[param])
        off, name = min((abs(held - size * (1 + times)), name) for times, name in _STATES)
        name += "_fused" * graph.op_kind[op].startswith(_FUSED)
        if size == 0 or off > _STEP_BYTES or name != found.get(op, name):
            return {}
        found[op] = name
    return found if len(set(found.values())) == 1 else {}
