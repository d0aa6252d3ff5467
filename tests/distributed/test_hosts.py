"""Emulated hosts: namespaces whose links are as slow as they were asked to be."""

import subprocess
import sys
import textwrap

import pytest

from loadmaster.core.errors import InputError
from loadmaster.runtime.distributed.hosts import HostNetwork, why_not_here

_SEND = """
import socket, sys, time
if sys.argv[1] == "take":
    server = socket.create_server((sys.argv[2], 4242))
    print("ready", flush=True)
    connection, _ = server.accept()
    begun, got = time.monotonic(), 0
    while piece := connection.recv(65536):
        got += len(piece)
    print(got, time.monotonic() - begun, flush=True)
else:
    with socket.create_connection((sys.argv[2], 4242)) as connection:
        connection.sendall(bytes(int(sys.argv[3])))
"""


def _needs_root() -> None:
    why = why_not_here()
    if why:
        pytest.skip(f"needs root: {why}")


def test_a_link_is_as_slow_as_asked() -> None:
    _needs_root()
    size, rate = 2_000_000, 4e6
    program = textwrap.dedent(_SEND)
    with HostNetwork([rate, rate]) as network:
        words = (sys.executable, "-c", program)
        taking = subprocess.Popen(
            network.command(0, *words, "take", network.address_of(0)), stdout=subprocess.PIPE, text=True
        )
        assert taking.stdout is not None
        assert taking.stdout.readline() == "ready\n"
        subprocess.run(
            network.command(1, *words, "send", network.address_of(0), str(size)), check=True, timeout=60
        )
        got, seconds = taking.stdout.readline().split()
        taking.wait(10)
        taking.stdout.close()
    assert int(got) == size
    assert float(seconds) > 0.7 * size / rate  # a burst goes through at once
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert network.space(0) not in listed


def test_what_a_killed_run_left_is_taken_down_by_the_next_one() -> None:
    _needs_root()
    program = (
        "import os\n"
        "from loadmaster.runtime.distributed.hosts import HostNetwork\n"
        "network = HostNetwork([1e6])\nnetwork.open()\nprint(network.space(0), flush=True)\nos._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    left = done.stdout.strip()

    def listed() -> str:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    assert left in listed()
    with HostNetwork([1e6]) as network:
        assert left not in listed()
        assert network.space(0) in listed()


def test_each_host_has_the_speed_of_its_own_port() -> None:
    _needs_root()
    with HostNetwork([125e6, 12.5e6]) as network:
        shown = subprocess.run(
            ["tc", "-n", network.space(1), "qdisc", "show", "dev", "eth0"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    assert "rate 100Mbit" in shown


def test_hosts_that_cannot_be_emulated_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match="cannot be emulated here: the program 'ip' is missing"):
        HostNetwork([1e6]).open()
