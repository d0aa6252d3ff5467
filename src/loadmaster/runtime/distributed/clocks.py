"""Clocks: how far a process's clock is from that of rank 0.

Processes of one host share `time.monotonic`. Over hosts, each asks rank 0 for its time again and again and
believes the quickest answer, whose error is at most half of what it took (Cristian, "Probabilistic clock
synchronization", 1989).
"""

import socket
import time

import torch
import torch.distributed as dist

from loadmaster.runtime.distributed.transports import Waits

_ROUNDS = 10


def clock_offset_s(waits: Waits) -> float:
    """Seconds to add to this process's clock to have that of rank 0; all ranks ask together."""
    hosts = waits.gather(_host_clock(), "all ranks to make their models and compare clocks")
    rank, best = dist.get_rank(), (float("inf"), 0.0)
    if all(host == hosts[0] for host in hosts):
        return 0.0
    for other in range(1, len(hosts)):
        for _ in range(_ROUNDS):
            word = torch.zeros(1, dtype=torch.float64)
            if rank == 0:
                waits.wait(dist.irecv(word, other), f"rank {other} to compare clocks")
                word[0] = time.monotonic()
                waits.wait(dist.isend(word, other), f"rank {other} to compare clocks")
            elif rank == other:
                asked = time.monotonic()
                waits.wait(dist.isend(word, 0), "rank 0 to compare clocks")
                waits.wait(dist.irecv(word, 0), "rank 0 to compare clocks")
                took = time.monotonic() - asked
                best = min(best, (took, float(word) - asked - took / 2))
    return 0.0 if rank == 0 or hosts[rank] == hosts[0] else best[1]


def _host_clock() -> str:
    """What processes with one clock have in common: the start of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
