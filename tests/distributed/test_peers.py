"""Meeting the other processes: what is said where they cannot be met."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from loadmaster.core.errors import RunError
from loadmaster.runtime.distributed.peers import Meeting, meet, meeting_from_environment, store_of_attempt


@pytest.fixture
def stranger() -> int:  # type: ignore[misc]
    """The port of another program, which hangs up on everyone."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def hang_up() -> None:
            try:
                while True:
                    server.accept()[0].close()
            except OSError:
                pass

        threading.Thread(target=hang_up, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_a_port_that_another_program_listens_at_is_said_with_what_to_do(stranger: int) -> None:
    with pytest.raises(RunError, match=rf"rank 1 could not meet .*:{stranger}.* give another port"):
        meet(Meeting(1, 2, "127.0.0.1", stranger, 2.0, "lo"))


def test_a_host_that_does_not_answer_is_said_with_the_time_that_was_waited() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RunError, match=r"within 1 s .*is that host up, is its port open"):
        meet(Meeting(1, 2, "127.0.0.1", port, 1.0, "lo"))


def test_a_process_that_torchrun_starts_again_does_not_find_what_earlier_ones_wrote() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    store_of_attempt(store, "0", 0).set("address", "of one that died")
    again = store_of_attempt(store, "0", 1)
    assert not again.check(["address"])
    again.set("address", "of the one that lives")
    assert (
        store_of_attempt(store, "1", 0).get("address") == b"of one that died"
    )  # another host's first attempt


def test_hosts_that_restarted_differently_often_meet_in_a_new_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    store_of_attempt(store, "0", 2).set("word", "here")
    assert store_of_attempt(store, "1", 0).get("word") == b"here"


@pytest.mark.parametrize(
    ("given", "server", "restarts"),
    [
        ({}, True, None),  # started by hand
        ({"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}, False, 1),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}, True, 0),
    ],
)
def test_rank_0_serves_the_store_where_torchrun_does_not(
    given: dict[str, str], server: bool, restarts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **given}
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in whole.items():
        monkeypatch.setenv(name, value)
    found = meeting_from_environment(5.0)
    assert found is not None
    assert (found.is_server, found.restarts) == (server, restarts)


@pytest.mark.slow
def test_torchrun_goes_on_from_the_last_checkpoint_after_a_rank_has_died(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", port]
    program = ["-m", "tests.distributed.run_elastic", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, *program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "from step 2 to 4" in done.stdout
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-0000000{n}" for n in (1, 2, 3, 4)]
    assert not list(tmp_path.glob(".partial*"))
