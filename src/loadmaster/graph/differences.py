"""Differences: what changed between two graphs of what may be one model, in words."""

from loadmaster.core.graph import NO_SIGNATURE, Graph

_MOST = 5


def list_differences(old: Graph, new: Graph) -> list[str]:
    """What `new` has otherwise than `old`; none: the same ops, tensors and sizes."""
    found = []
    here, there = dict.fromkeys(new.op_name), dict.fromkeys(old.op_name)
    for names, other, word in ((here, there, "new"), (there, here, "gone")):
        missing = [name for name in names if name not in other]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            found.append(f"op {missing[0]!r}{more} {'are' if more else 'is'} {word}")
    at = {name: op for op, name in enumerate(old.op_name)}
    changed = [
        f"op {name!r} was {_describe_op(old, at[name])}, is {_describe_op(new, op)}"
        for op, name in enumerate(new.op_name)
        if name in at and _describe_op(old, at[name]) != _describe_op(new, op)
    ]
    if len(changed) > _MOST:
        changed = [*changed[:_MOST], f"{len(changed) - _MOST} more ops have other sizes or kinds"]
    return found + changed


def _describe_op(graph: Graph, op: int) -> str:
    """What an op is: its signature, or its kind where it has none."""
    row = int(graph.signature[op])
    text = graph.signature_table[row] if row != NO_SIGNATURE else graph.op_kind[op]
    resident = int(graph.resident_bytes[op])
    return f"{text} ({resident} bytes resident)" if resident else text
