"""From options to a Question, and what can be refused before any work: every planning verb begins here."""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from loadmaster.cli.console import progress, stderr
from loadmaster.cli.options import MEASURE
from loadmaster.core.errors import FileError, InputError
from loadmaster.core.files import require_writable
from loadmaster.core.question import Question
from loadmaster.core.units import parse_bytes
from loadmaster.report.plain_text import escape_control_characters

if TYPE_CHECKING:
    from loadmaster.core.problem import Problem


def build_question(options: Mapping[str, Any]) -> Question:
    """The question that the options of a verb ask; options that are not part of a question are left out.

    A verb gives its `locals()`, taken before anything else. An option with the name of a field of Question is
    that field; the others are parsed here.
    """
    measure, costs = options.get("measure"), options.get("costs")
    if measure is not None and costs not in (None, "measured"):
        raise InputError(f"--measure and --costs {costs} contradict each other; leave one of them out")
    if options.get("database") is not None and measure is None and costs in (None, "roofline"):
        raise InputError("--database names measured costs, which only --measure uses; add --measure")
    names = {field.name for field in fields(Question)}
    same = {name: value for name, value in options.items() if name in names}
    parsed = {
        "pin": parse_pins(options.get("pin")),
        "reserve_bytes": parse_size("--reserve", options.get("reserve", "0")),
        "max_bytes": parse_size("--max-bytes", options["max_bytes"]),
        "ranges": parse_ranges(options.get("range")),
        "capture_path": options.get("capture"),
        "costs": costs or options.get("usual_costs", "roofline") if measure is None else "measured",
        "measure_budget": measure or MEASURE,
    }
    return Question(**same | parsed)


def read_problem(question: Question) -> "Problem":
    """Read source and devices, measure what is asked for, with progress if that takes long."""
    notes = list[str]()
    with progress(f"reading {question.source}") as say:
        from loadmaster.questions.problem import build_problem

        problem = build_problem(question, tell=notes.append, progress=say)
    for note in notes:
        stderr().print(escape_control_characters(note), style="dim", soft_wrap=True)
    return problem


def parse_size(option: str, text: str) -> int:
    """The bytes an option gives, its name in the error."""
    try:
        return parse_bytes(text)
    except InputError as problem:
        raise InputError(f"{option}: {problem}") from None


def check_outputs(outputs: dict[str, str | None], *, inputs: list[str | None]) -> None:
    """Refuse what cannot be written, or would overwrite an input or another output."""
    taken: dict[str, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        require_writable(path)
        if os.path.exists(path) and not os.path.isfile(path):
            continue  # /dev/null may take everything
        for given in filter(None, inputs):
            if os.path.exists(given) and os.path.exists(path) and os.path.samefile(path, given):
                raise FileError(f"{option} {path} would overwrite the input {given}; name another file")
        first = taken.setdefault(os.path.realpath(path), option)
        if first != option:
            raise FileError(f"{first} and {option} both name {path}; name two files")


def parse_pins(texts: list[str] | None) -> dict[str, str]:
    """Device of each name pinned by `--pin`."""
    found: dict[str, str] = {}
    for text in texts or []:
        name, device = _parse_pin(text)
        if found.setdefault(name, device) != device:
            raise InputError(f"--pin puts {name!r} on {found[name]!r} and on {device!r}; pin it once")
    return found


def parse_ranges(texts: list[str] | None) -> dict[str, tuple[int, int]] | None:
    """Low and high of each name given by `--range`."""
    found: dict[str, tuple[int, int]] = {}
    for text in texts or []:
        name, equals, span = text.partition("=")
        low, colon, high = span.partition(":")
        if not (equals and colon and low.isdecimal() and high.isdecimal() and len(span) < 20):
            raise InputError(f"--range {text!r}: write NAME=LOW:HIGH, e.g. --range batch=2:64")
        found[name] = (int(low), int(high))
    return found or None


def _parse_pin(text: str) -> tuple[str, str]:
    """'op=device'; an op's name may hold '=', a device's may not."""
    name, equals, device = text.rpartition("=")
    if not equals or not name or not device:
        raise InputError(f"--pin {text!r}: write OP_OR_MODULE=DEVICE, e.g. --pin lm_head=gpu0")
    return name, device
