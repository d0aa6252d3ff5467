"""From options to a Problem: what every planning verb does first."""

from typing import TYPE_CHECKING

from loadmaster.cli.console import progress
from loadmaster.core.errors import InputError
from loadmaster.core.units import parse_bytes

if TYPE_CHECKING:
    from loadmaster.core.problem import Problem


def ask(
    source: str,
    devices: str | None,
    *,
    objective: str | None,
    links: str | None,
    split: str | None,
    load: str,
    optimizer: str | None,
    precision: str,
    pin: list[str] | None,
    reserve: str,
    format: str | None,
    max_bytes: str,
) -> "Problem":
    """Read source and devices, with progress if that takes long."""
    pins = dict(_pair(text) for text in pin or [])
    with progress(f"reading {source}") as say:
        say("loading", 0.0)
        from loadmaster import api

        return api.problem(
            source,
            devices,
            objective,
            links=links,
            split=split,
            load=load,
            optimizer=optimizer,
            precision=precision,
            pin=pins,
            reserve_bytes=parse_bytes(reserve),
            format=format,
            max_bytes=parse_bytes(max_bytes),
        )


def _pair(text: str) -> tuple[str, str]:
    """'op=device'; an op's name may hold '=', a device's may not."""
    name, equals, device = text.rpartition("=")
    if not equals or not name or not device:
        raise InputError(f"--pin {text!r}: write OP_OR_MODULE=DEVICE, e.g. --pin lm_head=gpu0")
    return name, device
