"""Network spaces: the network namespace of a process, entered by name (`ip netns`)."""

import ctypes
import os

from loadmaster.core.errors import RunError

_CLONE_NEWNET = 0x40000000


def enter_space(name: str) -> None:
    """This process sees the network of a namespace from now on."""
    path = f"/run/netns/{name}"
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as problem:
        raise RunError(f"cannot enter the network namespace {name!r}: {problem.strerror}") from None
    try:
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise RunError(f"cannot enter the network namespace {name!r}: {os.strerror(code)}; it needs root")
    finally:
        os.close(handle)
