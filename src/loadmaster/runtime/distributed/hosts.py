"""Hosts: several emulated on this machine, as network namespaces with links of a given speed.

        host 0 [ns] ── eth0 ── veth ──┐
        host 1 [ns] ── eth0 ── veth ──┼── bridge (10.X.Y.1), where this process listens
        host 2 [ns] ── eth0 ── veth ──┘

Each host's way out is shaped by a token bucket (`tc tbf`), so every link of a host together is as fast as its
port. A delay needs `netem`, which not every kernel has: then it is said, and links have the right
speed but no delay. It needs root (or CAP_NET_ADMIN) and the programs `ip` and `tc`.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import InputError, RunError

_BURST_BYTES = 65536
_QUEUE_S = 0.4
_OURS = re.compile(r"lm([0-9]+)(?:h[0-9]+|v[0-9]+|b)")  # see HostNetwork._make


@dataclass(slots=True)
class HostNetwork:
    """Emulated hosts; `close` takes them down."""

    bytes_per_s: Sequence[float]  # of each host's port
    delay_s: Sequence[float] = ()
    notes: list[str] = field(default_factory=list)
    _tag: str = ""
    _made: list[tuple[str, ...]] = field(default_factory=list)  # how to undo, in order

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """The hosts of a cluster, each port as fast as the slowest link that leaves the host."""
        hosts = cluster.host.tolist()
        rate = [float("inf")] * (max(hosts) + 1)
        delay = [0.0] * (max(hosts) + 1)
        for one in range(cluster.num_devices):
            for other in range(cluster.num_devices):
                if hosts[one] == hosts[other]:
                    continue
                links = [int(link) for link in cluster.route[one, other] if link >= 0]
                if links:
                    slowest = min(float(cluster.link_bytes_per_s[link]) for link in links)
                    rate[hosts[one]] = min(rate[hosts[one]], slowest)
                    most = sum(float(cluster.link_latency_s[link]) for link in links)
                    delay[hosts[one]] = max(delay[hosts[one]], most)
        network = cls(rate, delay)
        network.open()
        return network

    def __enter__(self) -> Self:
        """Set up, unless it is."""
        if not self._made:
            self.open()
        return self

    def __exit__(self, *_: object) -> None:
        """Take down."""
        self.close()

    def open(self) -> None:
        """Make bridge, namespaces and links; nothing stays where that fails."""
        why = why_not_here()
        if why:
            raise InputError(f"hosts cannot be emulated here: {why}")
        remove_leftovers()
        self._tag = f"lm{os.getpid()}"
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        bridge = f"{self._tag}b"
        self._run("ip", "link", "add", bridge, "type", "bridge")
        self._made.append(("ip", "link", "del", bridge))
        self._run("ip", "addr", "add", f"{self.address}/24", "dev", bridge)
        self._run("ip", "link", "set", bridge, "up")
        for host in range(len(self.bytes_per_s)):
            space, veth = self.space(host), f"{self._tag}v{host}"
            self._run("ip", "netns", "add", space)
            self._made.append(("ip", "netns", "del", space))
            self._run("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._made.append(("ip", "link", "del", veth))  # a namespace lets go of its links only later
            self._run("ip", "link", "set", veth, "master", bridge, "up")
            self._run("ip", "-n", space, "addr", "add", f"{self.address_of(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._run("ip", "-n", space, "link", "set", device, "up")
            self._shape(space, host)

    def _shape(self, space: str, host: int) -> None:
        rate = self.bytes_per_s[host]
        if rate != float("inf"):
            bits, burst = f"{round(rate * 8)}bit", f"{max(_BURST_BYTES, round(rate / 1000))}b"
            limit = f"{max(10 * _BURST_BYTES, round(rate * _QUEUE_S))}b"
            words = ("root", "handle", "1:", "tbf", "rate", bits, "burst", burst, "limit", limit)
            self._run("tc", "-n", space, "qdisc", "add", "dev", "eth0", *words)
        delay = self.delay_s[host] if self.delay_s else 0.0
        if delay < 1e-3:  # what the machine itself takes is of this order
            return
        where = ("parent", "1:1") if rate != float("inf") else ("root",)
        words = (*where, "netem", "delay", f"{round(delay * 1e6)}us")
        try:
            self._run("tc", "-n", space, "qdisc", "add", "dev", "eth0", *words)
        except RunError:
            note = f"this kernel has no netem, so the delay of {delay * 1e3:g} ms is not emulated"
            if note not in self.notes:
                self.notes.append(note)

    @property
    def address(self) -> str:
        """Of this process on the bridge."""
        return f"10.{193 + os.getpid() // 256 % 32}.{os.getpid() % 256}.1"

    def address_of(self, host: int) -> str:
        """Of an emulated host."""
        return f"{self.address.rpartition('.')[0]}.{host + 2}"

    def space(self, host: int) -> str:
        """The namespace of a host."""
        return f"{self._tag}h{host}"

    def command(self, host: int, *words: str) -> list[str]:
        """A command line that runs on an emulated host."""
        return ["ip", "netns", "exec", self.space(host), *words]

    def close(self) -> None:
        """Take down what was made, last first."""
        while self._made:
            subprocess.run(self._made.pop(), capture_output=True, check=False)

    def _run(self, *words: str) -> None:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"`{' '.join(words)}` failed: {(done.stderr or done.stdout).strip()[:300]}")


def remove_leftovers() -> None:
    """Take down what processes left that were killed: namespaces, links and bridges with their number."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    spaces = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    try:
        devices = os.listdir("/sys/class/net")
    except OSError:
        devices = []
    for names, word in ((spaces, "netns"), (devices, "link")):
        for name in names:
            found = _OURS.fullmatch(name)
            if found is not None and not os.path.exists(f"/proc/{found[1]}"):
                subprocess.run(["ip", word, "del", name], capture_output=True, check=False)


def why_not_here() -> str:
    """Why no hosts can be emulated on this machine; '' where they can."""
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if lacking:
        return f"the program {lacking[0]!r} is missing (package iproute2)"
    probe = f"lmprobe{os.getpid() % 100000}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no right to make network namespaces ({made.stderr.strip()[:100]}); run it as root"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return ""
