"""Compat: defects of the published code that can be played for ablations; none is on by itself."""

COMPAT = {
    "divide_gradients": "bytes of a sum are divided by the replicas, which flatters data parallelism",
    "one_channel": "all sums wait for one another, and for no link",
    "broadcast_per_consumer": "a factor is paid for by each op that reads it",
    "full_batch_time": "all of an op's time is taken for what factors cost, not what exceeds its own rows",
    "drop_rows": "equal shares leave out the rows that do not divide",
    "zero_edges": "the network sees no bytes between groups",
    "whole_utilisation": "the network sees a device as busy or idle, nothing between",
}
