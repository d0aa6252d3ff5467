"""A measured machine as a TOML file that `parse` reads back."""

import json

from loadmaster.cluster.benchmark import HOST, KindRates, LinkRates, Machine
from loadmaster.core.units import format_bytes, format_percent, format_seconds

_NOT_DUPLEX = 1.5


def machine_toml(machine: Machine, name: str = "this machine") -> str:
    """The text of the file."""
    parts = [f"name = {_quote_string(name)}"]
    parts += [_format_kind(kind) for kind in machine.kinds]
    parts.append(f'[[host]]\nname = "{HOST}"')
    for device, reserve in zip(machine.devices, machine.reserve_bytes, strict=True):
        lines = [
            f"name = {_quote_string(device.name)}",
            f"kind = {_quote_string(device.chip)}",
            f'host = "{HOST}"',
        ]
        lines += [f"memory = {max(device.memory_bytes, 1)}"]
        lines += [f"reserve = {reserve}"] if 0 < reserve < device.memory_bytes else []
        parts.append("\n".join(["[[device]]", *lines]))
    parts += [_format_link(link) for link in machine.links]
    return "\n\n".join(parts) + "\n"


def _format_kind(kind: KindRates) -> str:
    rates = ", ".join(f"{dtype} = {_format_number(rate)}" for dtype, rate in kind.flops_per_s.items())
    return "\n".join(
        [
            f"[kind.{_quote_string(kind.name)}]  # achieved, not published",
            f"flops = {{ {rates} }}",
            f"memory = {max(kind.memory_bytes, 1)}",
            f"memory_rate = {int(kind.bytes_per_s)}",
            f'overhead = "{kind.overhead_s * 1e6:.4g}us"',
            f"host = {'true' if kind.on_host else 'false'}",
            *(['bus = "ram"'] if kind.on_host else []),
        ]
    )


def _format_link(link: LinkRates) -> str:
    """A link, or a comment where the cluster needs none: pageable memory, copies inside the host."""
    fit = link.fit
    words = [
        f"# {link.a} - {link.b}, {link.way}: {format_bytes(fit.bytes_per_s)}/s after"
        f" {format_seconds(fit.latency_s)}, off by {format_percent(fit.rel_error)} on average;"
        f" 1 KiB takes {format_seconds(fit.small_s)}",
        f"# there {format_bytes(link.there.bytes_per_s)}/s, back {format_bytes(link.back.bytes_per_s)}/s;"
        f" both at once {link.duplex:.2f} times as fast as in turn"
        + ("" if link.duplex >= _NOT_DUPLEX or link.way == "ram" else " (plan with --links half-duplex)"),
    ]
    if link.way in ("pinned", "peer"):
        words += [
            "[[link]]",
            f"between = [{_quote_string(link.a)}, {_quote_string(link.b)}]",
            f"rate = {int(fit.bytes_per_s)}",
            f'latency = "{fit.latency_s * 1e6:.4g}us"',
            f"name = {_quote_string(link.way)}",
        ]
    return "\n".join(words)


def _quote_string(text: str) -> str:
    """A TOML string; JSON's escapes are TOML's."""
    plain = "".join(c if c.isprintable() and ord(c) < 128 else "?" for c in text)
    return json.dumps(plain)


def _format_number(rate: float) -> str:
    return f"{rate:.5e}"
