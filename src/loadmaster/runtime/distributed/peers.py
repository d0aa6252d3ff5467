"""Peers: the processes of a run find each other, and make sure that they are about to do the same.

Checked before any step: as many processes as the plan needs, the same plan and versions everywhere, on every
host the devices that were planned.
"""

import datetime
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from loadmaster.core.errors import InputError, LoadmasterError, RunError
from loadmaster.runtime.distributed.transports import (
    GLOO,
    NCCL,
    HostTransport,
    NcclTransport,
    Transport,
    Waits,
    choose_backend,
)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the processes of a run meet."""

    rank: int
    world: int
    address: str
    port: int
    timeout_s: float = 120.0
    interface: str = ""  # '' = torch's own choice
    is_server: bool = False
    host: str = "0"  # number of this host among those of torchrun
    restarts: int | None = None  # how often torchrun has started this process again; None: torchrun did not


@dataclass(frozen=True, slots=True)
class Facts:
    """What one process says of itself."""

    rank: int
    host: str
    device: str
    versions: Mapping[str, str]  # of the program and of the plan, by name
    problem: str = ""


def meeting_from_environment(timeout_s: float) -> Meeting | None:
    """What torchrun told this process; None: it was not started by torchrun."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ.get(name) for name in names}
    if given["RANK"] is None or given["WORLD_SIZE"] is None:
        return None
    lacking = [name for name, value in given.items() if value is None]
    if lacking:
        raise InputError(f"RANK is set, but not {', '.join(lacking)}; start the processes with torchrun")
    try:
        rank, world, port = (int(str(given[name])) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError:
        raise InputError(f"RANK, WORLD_SIZE and MASTER_PORT must be whole numbers, not {given}") from None
    place = Meeting(rank, world, str(given["MASTER_ADDR"]), port, timeout_s)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if not restarts.isdigit():  # started by hand: nobody else serves the store
        return replace(place, is_server=rank == 0)
    server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return replace(place, is_server=server, host=os.environ.get("GROUP_RANK", "0"), restarts=int(restarts))


def store_of_attempt(store: Any, host: str, restarts: int) -> Any:
    """The part of a store that belongs to this attempt of torchrun's.

    Torchrun starts processes again beside a store that may be as old as the run, with addresses of those that
    died. Attempts are counted by each host from its first one that this store has seen: where every attempt
    has a store of its own, hosts may have restarted differently often.
    """
    first = int(store.compare_set(f"loadmaster/first attempt of host {host}", "", str(restarts)))
    return dist.PrefixStore(f"loadmaster/attempt {restarts - first}", store)


def open_meeting(meeting: Meeting) -> dist.Store:
    """Where the processes of a run leave word for one another; each run of a script has a part of its own."""
    limit = datetime.timedelta(seconds=meeting.timeout_s)
    try:
        store: dist.Store = dist.TCPStore(
            meeting.address,
            meeting.port,
            meeting.world,
            is_master=meeting.is_server,
            timeout=limit,
            wait_for_workers=False,
        )
        if meeting.restarts is not None:
            store = store_of_attempt(store, meeting.host, meeting.restarts)
        number = store.add(f"loadmaster/runs of rank {meeting.rank}", 1)
        return dist.PrefixStore(f"loadmaster/run {number}", store)
    except (RuntimeError, ValueError) as problem:  # torch's DistError is a RuntimeError
        raise RunError(_describe_meeting(meeting, str(problem))) from problem


def meet(meeting: Meeting, store: dist.Store | None = None) -> None:
    """Join the process group; every wait in it has the time-out."""
    if dist.is_initialized():
        return
    if meeting.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = meeting.interface
    limit = datetime.timedelta(seconds=meeting.timeout_s)
    store = open_meeting(meeting) if store is None else store
    try:
        dist.init_process_group(GLOO, store=store, rank=meeting.rank, world_size=meeting.world, timeout=limit)
    except (RuntimeError, ValueError) as problem:
        raise RunError(_describe_meeting(meeting, str(problem))) from problem


def open_store(address: str, world: int) -> dist.TCPStore:
    """Where processes meet, on one address of this machine; torch's own store listens on all of them."""
    listener = socket.create_server((address, 0), backlog=max(2 * world, 16))
    store = dist.TCPStore(
        address,
        listener.getsockname()[1],
        world,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.fileno(),
    )
    listener.detach()  # the store closes it
    return store


def _describe_meeting(meeting: Meeting, problem: str) -> str:
    where, first = f"{meeting.address}:{meeting.port}", problem.splitlines()[0][:200] if problem else ""
    lower = problem.lower()
    if "in use" in lower or "eaddrinuse" in lower:
        return f"port {meeting.port} of {meeting.address} is in use; give another one (--master-port)"
    if "timed out" in lower or "timeout" in lower or "unreachable" in lower or "no route" in lower:
        return (
            f"rank {meeting.rank} could not meet the others at {where} within"
            f" {meeting.timeout_s:g} s ({first});"
            " is that host up, is its port open, and were all processes started?"
        )
    return (
        f"rank {meeting.rank} could not meet the others at {where} ({first}); if another program answers"
        " there, give another port (--master-port)"
    )


def require_agreement(facts: Facts, world_needed: int, names: Sequence[str], waits: Waits) -> list[Facts]:
    """What all processes say; refuses runs whose processes would do different things."""
    world = dist.get_world_size()
    if world != world_needed:
        raise InputError(
            f"the plan needs {world_needed} processes, {world} were started; start {world_needed}, e.g. with"
            f" torchrun --nproc-per-node {world_needed}, or plan for {world}"
        )
    everyone: list[Facts] = waits.gather(facts, "all ranks to say what they are about to run")
    for name in names:
        said = {one.rank: one.versions.get(name, "") for one in everyone}
        other = next((rank for rank, value in said.items() if value != said[0]), None)
        if other is not None:
            raise InputError(
                f"rank 0 on {everyone[0].host} has {name} {said[0][:16]}, rank {other} on"
                f" {everyone[other].host} has"
                f" {said[other][:16]}; give every process the same"
            )
    wrong = [one for one in everyone if one.problem]
    if wrong:
        raise InputError(f"rank {wrong[0].rank} on {wrong[0].host}: {wrong[0].problem}")
    return everyone


def describe_process(rank: int, device: str, versions: Mapping[str, str], problem: str = "") -> Facts:
    """This process's facts."""
    shared = {"torch": str(torch.__version__), **versions}
    return Facts(rank, socket.gethostname() or platform.node(), device, shared, problem)


def open_transport(where: torch.device, everyone: Sequence[Facts], waits: Waits) -> Transport:
    """NCCL where every process has a GPU of its own, else the host's memory."""
    devices = [torch.device(one.device) for one in everyone]
    if choose_backend(devices, [one.host for one in everyone]) == NCCL:
        torch.cuda.set_device(where)
        up, down = dist.new_group(backend=NCCL), dist.new_group(backend=NCCL)
        return NcclTransport(where, waits, up, down)
    return HostTransport(where, waits)


def leave() -> None:
    """End the process group, if there is one."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except (RuntimeError, LoadmasterError):
        pass
