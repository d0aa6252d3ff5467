"""Shadow mode: advice on a scheduler's queue, logged and never acted on."""

from pathlib import Path

from loadmaster.advisor.adapters.kubernetes import advise_kubernetes
from loadmaster.advisor.adapters.log import AdviceEntry, append_entry
from loadmaster.advisor.adapters.requests import read_recorded
from loadmaster.advisor.adapters.slurm import advise_slurm
from loadmaster.core.errors import InputError, UnknownNameError

SCHEDULERS = {"slurm": advise_slurm, "kubernetes": advise_kubernetes, "kueue": advise_kubernetes}


def advise_queue(scheduler: str, queue: str | Path | None, log: str | Path) -> list[AdviceEntry]:
    """Advise on every pending job of a recorded queue and append it to the log."""
    if scheduler == "ray":
        raise InputError(
            "Ray has no queue to read: call loadmaster.advisor.adapters.ray_cluster.advise_ray in the driver"
        )
    if scheduler not in SCHEDULERS:
        raise UnknownNameError("scheduler", scheduler, [*SCHEDULERS, "ray"])
    if queue is None:
        raise InputError(f"{scheduler} needs its recorded queue: --queue FILE")
    entries = SCHEDULERS[scheduler](read_recorded(queue))
    for entry in entries:
        append_entry(log, entry)
    return entries
