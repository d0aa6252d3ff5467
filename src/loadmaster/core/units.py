"""Numbers with units, in and out: '80GB', '25Gbit', '5us', '312T' and back.

GB is 10**9 bytes and GiB is 2**30 bytes, everywhere; a network's 'Gbit' is 10**9 / 8 bytes.
"""

import math
import re

from loadmaster.core.errors import InputError

_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40, "pi": 2.0**50}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*"
_BYTES = re.compile(_NUMBER + r"([kmgtpe]i?)?(b|byte|bytes|bit)?(?:/s)?\s*", re.IGNORECASE)
_TIME = re.compile(_NUMBER + r"(s|ms|us|µs|ns|min|h)\s*", re.IGNORECASE)
_RATE = re.compile(_NUMBER + r"([kmgtpe])?\s*(?:flop/?s?)?(?:/s)?\s*", re.IGNORECASE)


def parse_bytes(text: str | int | float) -> int:
    """Bytes (or bytes per second) from '80GB', '1.5 GiB', '25Gbit', '100' or a number."""
    if isinstance(text, int | float):
        return _whole(float(text), repr(text))
    match = _BYTES.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not a size; write for example '80GB', '512MiB' or '25Gbit'")
    number, prefix, unit = match.groups()
    scale = _BINARY.get((prefix or "").lower()) or _DECIMAL[(prefix or "").lower()[:1]]
    return _whole(float(number) * scale / (8.0 if (unit or "").lower() == "bit" else 1.0), text)


def parse_seconds(text: str | int | float) -> float:
    """Seconds from '5us', '1.5ms', '10s' or a number of seconds."""
    if isinstance(text, int | float):
        return float(text)
    match = _TIME.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not a time; write for example '5us', '1.5ms' or '10s'")
    return float(match[1]) * _SECONDS[match[2].lower()]


def parse_flops_per_s(text: str | int | float) -> float:
    """Operations per second from '312T', '19.5 TFLOP/s' or a number."""
    if isinstance(text, int | float):
        return float(text)
    match = _RATE.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not a rate; write for example '312T' or '19.5 TFLOP/s'")
    return float(match[1]) * _DECIMAL[(match[2] or "").lower()]


def format_bytes(count: float) -> str:
    """'9.3 GiB', '512 B', '-1.0 MiB'."""
    if not math.isfinite(count):
        return "unlimited" if count > 0 else "-"
    size = abs(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    sign = "-" if count < 0 else ""
    return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """'12.3 ms', '4.00 s', '2 min 5 s'."""
    if not math.isfinite(seconds):
        return "-"
    if seconds == 0:
        return "0 s"
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    scale, unit = next((u for u in units if abs(seconds) >= u[0]), (1e-9, "ns"))
    if seconds >= 120:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds / scale:.3g} {unit}" if abs(seconds) < 1000 else f"{seconds:.0f} s"


def format_flops(flops: float) -> str:
    """'1.2 TFLOP'."""
    for scale, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(flops) >= scale:
            return f"{flops / scale:.3g} {unit}FLOP"
    return f"{flops:.3g} FLOP"


def format_percent(ratio: float) -> str:
    """'12.3 %' of 0.123."""
    return "-" if not math.isfinite(ratio) else f"{100 * ratio:.1f} %"


def _whole(value: float, text: str) -> int:
    if not math.isfinite(value) or value < 0 or value >= 2**63:
        raise InputError(f"{text!r} is not a size between 0 and 8 EiB")
    return int(value)
