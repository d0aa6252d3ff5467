"""Call site: the line of the model's code that is running, as far as Python's stack shows it."""

import re
import sys
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).resolve().parents[3])
_PACKAGES = ("site-packages", "dist-packages")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def find_call_site() -> str:
    """'modeling_opt.py:560', below the packages or the working folder; '' = no line of the model's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN) and frame.f_code.co_name == "capture_graph":
            return ""  # what comes above called `capture`
        if _is_of_model(file):
            return f"{shorten_path(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def parse_call_site(trace: str | None) -> str:
    """The innermost line of the model's code in a traceback that torch.export wrote down."""
    lines = [(file, line) for file, line in _LINE.findall(trace or "") if _is_of_model(file)]
    return f"{shorten_path(lines[-1][0])}:{lines[-1][1]}" if lines else ""


def _is_of_model(file: str) -> bool:
    if file.startswith(_OWN):
        return "/zoo/" in file[len(_OWN) :]
    return not file.startswith((_TORCH, "<")) and not file.endswith("contextlib.py")


def shorten_path(file: str) -> str:
    """A path below the installed packages or the working folder, else the file and its folder."""
    path = Path(file)
    for word in _PACKAGES:
        if word in path.parts:
            return str(Path(*path.parts[path.parts.index(word) + 1 :]))
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(Path(*path.parts[-2:])) if len(path.parts) > 2 else str(path)
