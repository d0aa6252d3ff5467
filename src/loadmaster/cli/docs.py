"""python -m loadmaster.cli.docs: write the generated pages of a checkout.

The table of algorithms comes from the registry, the reference of commands from the same declarations as
`--help`, the reference of Python names from their signatures and docstrings. A test compares the pages with
what this module would write.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from loadmaster.core.errors import FormatError
from loadmaster.core.files import write_bytes
from loadmaster.placers.registry import list_algorithms

BEGIN = "<!-- algorithms: written by `python -m loadmaster.cli.docs` -->"
END = "<!-- end of algorithms -->"
_WRITTEN = "<!-- Written by `python -m loadmaster.cli.docs`; edit the source, not this page. -->"
_PACKAGES = (
    ("loadmaster", "lm", "Planning, running and looking at plans."),
    ("loadmaster.train", "lt", "Training models that are larger than the device, one or many."),
)


def with_table(text: str) -> str:
    """A page with the table between its two marks renewed."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise FormatError(f"the page has no {BEGIN!r} ... {END!r}; add the two lines")
    rows = [f"| `{e.name}` | {e.family} | {e.summary} |" for e in list_algorithms().values()]
    table = "\n".join(["| algorithm | family | what it does |", "|---|---|---|", *rows])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def describe_commands() -> str:
    """The page of the command line: every verb with its arguments and options."""
    import typer

    from loadmaster.cli.commands import app

    command: Any = typer.main.get_command(app)
    parts = [
        "# Commands",
        _WRITTEN,
        "Every command takes `--help`. Exit codes: 0 (done), 1 (no plan fits), 2 (bad input),"
        " 130 (interrupted), 141 (the reader of the output has gone).",
    ]
    for path, each in _walk_commands("loadmaster", command):
        parts += _describe_command(path, each)
    return "\n\n".join(parts) + "\n"


def _walk_commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    for name, each in getattr(command, "commands", {}).items():
        if not each.hidden:
            yield f"{path} {name}", each
            yield from _walk_commands(f"{path} {name}", each)


def _describe_command(path: str, command: Any) -> list[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    names = [each.name.upper() if each.required else f"[{each.name.upper()}]" for each in arguments]
    usage = " ".join([path, *names, *(["[OPTIONS]"] if options else [])])
    parts = [
        f"## `{path}`",
        inspect.cleandoc(command.help or "").replace("\b\n", ""),
        f"```text\n{usage}\n```",
    ]
    rows = [f"| `{each.name.upper()}` | {_in_one_cell(each.help or '')} |" for each in arguments]
    rows += [
        f"| {_spell_option(each)} | {_in_one_cell(each.help or '')}{_tell_default(each)} |"
        for each in options
    ]
    return [*parts, "\n".join(["| word | meaning |", "|---|---|", *rows])] if rows else parts


def _spell_option(option: Any) -> str:
    takes = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    return (
        ", ".join(f"`{each}`" for each in option.opts[:-1])
        + (", " if len(option.opts) > 1 else "")
        + (f"`{option.opts[-1]}{takes}`".replace("|", "\\|"))
    )


def _tell_default(option: Any) -> str:
    default = getattr(option, "show_default", None)
    value = option.default
    if option.is_flag or value in (None, "", ()) or default is False or callable(value):
        return ""
    return f" Default: `{value}`."


def _in_one_cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def describe_names() -> str:
    """The page of public Python names: signature and docstring of each."""
    parts = ["# Python names", _WRITTEN]
    for package, short, about in _PACKAGES:
        module = import_module(package)
        parts += [f"## `import {package} as {short}`", about]
        for name in sorted((each for each in module.__all__ if each != "__version__"), key=str.lower):
            parts += _describe_name(f"{short}.{name}", getattr(module, name))
    return "\n\n".join(parts) + "\n"


def _describe_name(name: str, value: Any) -> list[str]:
    if not callable(value):
        return [f"### `{name}`", inspect.cleandoc(type(value).__doc__ or "")]
    parts = [f"### `{name}`", f"```python\n{_spell_signature(name, value)}\n```", _clean_docstring(value)]
    if inspect.isclass(value):
        rows = [
            f"| `{key}` | {_in_one_cell(_first_sentence(each))} |"
            for key, each in sorted(vars(value).items())
            if not key.startswith("_")
            and (callable(each) or isinstance(each, property | classmethod | staticmethod))
        ]
        parts += ["\n".join(["| member | what it is |", "|---|---|", *rows])] if rows else []
    return parts


def _spell_signature(name: str, value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except ValueError:
        return name
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    words = [_spell_parameter(each) for each in plain if each.name != "self"]
    one_line = f"{name}({', '.join(words)})"
    return (
        one_line if len(one_line) <= 100 else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + ")"
    )


def _spell_parameter(parameter: inspect.Parameter) -> str:
    """A parameter with its default; what prints an address of this run stands as '...'."""
    default = parameter.default
    if default is inspect.Parameter.empty:
        return str(parameter)
    shown = re.sub(r"'([^'\"\\]*)'", r'"\1"', repr(default))  # as the formatter quotes
    return f"{parameter.name}={'...' if '<' in shown else shown}"


def _clean_docstring(value: Any) -> str:
    text = inspect.cleandoc(value.__doc__ or "")
    return "" if text.startswith(f"{getattr(value, '__name__', '')}(") else text  # a dataclass's own


def _first_sentence(member: Any) -> str:
    text = inspect.cleandoc(getattr(member, "__doc__", None) or "")
    return text.split("\n\n")[0]


def write_pages() -> dict[str, str]:
    """The text of every page that is generated as a whole, by its path in the repository."""
    return {"docs/reference/commands.md": describe_commands(), "docs/reference/python.md": describe_names()}


def main() -> None:
    """Renew the generated pages of the checkout that is named (this folder)."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    table = root / "docs" / "algorithms.md"
    write_bytes(with_table(table.read_text(encoding="utf-8")).encode(), table)
    for name, text in write_pages().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(text.encode(), root / name)


if __name__ == "__main__":
    main()
