"""Text from elsewhere made safe to print: one line, no control characters, any terminal's alphabet.

Names of ops, devices and files are data and may hold anything. Nothing heavy is imported here.
"""

import codecs
import sys
from typing import TextIO

_MOST_CHARACTERS = 2000
_HANDLER = "loadmaster_stand_in"
_STAND_INS = {"█": "#", "░": ".", "…": "~", "×": "x"}


def escape_control_characters(text: str) -> str:
    """The text with control characters, newlines included, shown instead of obeyed."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shorten_text(text: str, limit: int = _MOST_CHARACTERS) -> str:
    """The text, or its two ends where it is longer than a person would read."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} … {text[-half:]}"


def escape_unencodable_output() -> None:
    """Make stdout and stderr show what they cannot encode, instead of failing on it."""
    codecs.register_error(_HANDLER, _replace_unencodable)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # closed or replaced streams have nothing to set
            stream.reconfigure(errors=_HANDLER)


def discard_stream(stream: TextIO | None) -> None:
    """Point a stream whose reader is gone at nothing, so that the interpreter does not complain at exit."""
    import os

    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _replace_unencodable(problem: UnicodeError) -> tuple[str, int]:
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    lost = problem.object[problem.start : problem.end]
    shown = (_STAND_INS.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lost)
    return "".join(shown), problem.end


def escape_for_xml(text: str) -> str:
    """The text as character data or as the value of an attribute, without characters that XML forbids."""
    shown = escape_control_characters(text).encode("utf-8", "backslashreplace").decode()
    for plain, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&#39;")):
        shown = shown.replace(plain, safe)
    return shown
