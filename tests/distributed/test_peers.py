"""Meeting the other processes: what is said where they cannot be met."""

import socket
import threading

import pytest

from loadmaster.core.errors import RunError
from loadmaster.runtime.distributed.peers import Meeting, meet


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
