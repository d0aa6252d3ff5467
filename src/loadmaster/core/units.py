"""Numbers with units, in and out: '80GB', '25Gbit', '5us', '312T' and back.

GB is 10**9 bytes and GiB is 2**30 bytes, everywhere; a network's 'Gbit' is 10**9 / 8 bytes.
"""

import math
import re

from loadmaster.core.errors import InputError

_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40, "pi": 2.0**50, "ei": 2.0**60}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_MICRO = str.maketrans({"\N{MICRO SIGN}": "u", "\N{GREEK SMALL LETTER MU}": "u"})
_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*"
_FLAGS = re.IGNORECASE | re.ASCII  # without ASCII, 's' also matches a long s
_BYTES = re.compile(_NUMBER + r"([kmgtpe]i?)?(b|byte|bytes|bit)?(?:/s)?\s*", _FLAGS)
_TIME = re.compile(_NUMBER + r"(s|ms|us|ns|min|h)\s*", _FLAGS)
_RATE = re.compile(_NUMBER + r"([kmgtpe])?\s*(?:flop/?s?)?(?:/s)?\s*", _FLAGS)
_MOST_DIGITS = 3  # of bytes that are close together; then all of them
_LONG_S = 1e9  # some thirty years: beyond it, days say no more than a power of ten


def parse_bytes(text: str | int | float) -> int:
    """Bytes (or bytes per second) from '80GB', '1.5 GiB', '25Gbit', '100' or a number."""
    if isinstance(text, int | float):
        return _to_whole(_to_float(text), repr(text))
    match = _BYTES.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not a size; write for example '80GB', '512MiB' or '25Gbit'")
    number, prefix, unit = match.groups()
    scale = _BINARY.get((prefix or "").lower()) or _DECIMAL[(prefix or "").lower()[:1]]
    return _to_whole(float(number) * scale / (8.0 if (unit or "").lower() == "bit" else 1.0), text)


def parse_seconds(text: str | int | float) -> float:
    """Seconds from '5us', '1.5ms', '10s' or a number of seconds."""
    if isinstance(text, int | float):
        return _to_float(text)
    match = _TIME.fullmatch(text.translate(_MICRO))
    if match is None:
        raise InputError(f"{text!r} is not a time; write for example '5us', '1.5ms' or '10s'")
    return float(match[1]) * _SECONDS[match[2].lower()]


def parse_flops_per_s(text: str | int | float) -> float:
    """Operations per second from '312T', '19.5 TFLOP/s' or a number."""
    if isinstance(text, int | float):
        return _to_float(text)
    match = _RATE.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not a rate; write for example '312T' or '19.5 TFLOP/s'")
    return float(match[1]) * _DECIMAL[(match[2] or "").lower()]


def format_bytes(count: float, *, digits: int = 1) -> str:
    """'9.3 GiB', '512 B', '-1.0 MiB'; with so many digits behind the point."""
    if not math.isfinite(count):
        return "unlimited" if count > 0 else "-"
    size = abs(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    sign = "-" if count < 0 else ""
    return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.{digits}f} {unit}"


def format_apart(first: float, second: float) -> tuple[str, str]:
    """Two counts of bytes with as many digits as it takes to tell them apart: '1.64 MiB' of '1.60 MiB'."""
    for digits in range(1, _MOST_DIGITS + 1):
        texts = format_bytes(first, digits=digits), format_bytes(second, digits=digits)
        if texts[0] != texts[1] or first == second:
            return texts
    return f"{first:.0f} B", f"{second:.0f} B"


def format_seconds(seconds: float) -> str:
    """'12.3 ms', '4 s', '2 min 5 s', '3 h 20 min', '5.8 days'."""
    if not math.isfinite(seconds):
        return "-"
    if seconds == 0:
        return "0 s"
    size = abs(seconds)
    if size >= _LONG_S:
        return f"{seconds:.3g} s"
    sign = "-" if seconds < 0 else ""
    if size >= 2 * 86400:
        return f"{sign}{size / 86400:.1f} days"
    if size >= 7200:
        return f"{sign}{int(size // 3600)} h {int(size % 3600 // 60)} min"
    if size >= 120:
        return f"{sign}{int(size // 60)} min {int(size % 60)} s"
    return _format_scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def format_flops(flops: float) -> str:
    """'1.2 TFLOP'."""
    units = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP"))
    return _format_scaled(flops, units)


def format_percent(ratio: float) -> str:
    """'12.3 %' of 0.123."""
    return "-" if not math.isfinite(ratio) else f"{100 * ratio:.1f} %"


def _format_scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Three digits in the largest unit that keeps a digit before the point; never '1e+03 ms'."""
    rounded = float(f"{value:.3g}")
    scale, unit = next((u for u in units if abs(rounded) >= u[0] * (1 - 1e-9)), units[-1])
    return f"{float(f'{rounded / scale:.3g}'):g} {unit}"


def _to_float(number: int | float) -> float:
    """The number as a float; a whole number beyond all floats is infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _to_whole(value: float, text: str) -> int:
    if not math.isfinite(value) or value < 0 or value >= 2**63:
        raise InputError(f"{text[:40]!r} is not a size between 0 and 8 EiB")
    return int(value)
