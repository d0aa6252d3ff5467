"""Which of the published environment's defects a world has (section 4 of PAC-ML's rules), one switch each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """Switches; True is the published behaviour. `COMPAT` has all of them, `FIXED` only those that are
    flags."""

    ms_read_as_s: bool = True  # U1: op times in ms are taken as s, transfers are in true s
    bandwidth_divided_twice: bool = True  # U2: collectives get a fourth of the bandwidth of a group
    no_rack_contention: bool = True  # U3: servers of one rack never share their uplink
    free_within_rack: bool = True  # U4: a collective between servers of one rack costs nothing
    parameters_on_edges: bool = True  # U5: edges carry parameters, and which depends on the order of the file
    leak: bool = True  # L1: ops that are split less leave the block
    shape_mask: bool = True  # G1: the mask tests that a shape exists, not that a block is free
    jct_without_block: bool = True  # J1: the completion time is cached under (model, degree)
    horizon_blocks: bool = True  # H1: a job that runs at the horizon counts as blocked
    tick_overshoot: bool = True  # F1: ResNet-18 on one server ends 1 ulp after a deadline of exactly its time


COMPAT = Rules()
FIXED = Rules(
    ms_read_as_s=False,
    leak=False,
    shape_mask=False,
    jct_without_block=False,
    horizon_blocks=False,
    tick_overshoot=False,
)
