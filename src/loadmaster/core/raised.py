"""Raised: an exception in one line, and where in the user's own code it came from."""

import re
import sys
import sysconfig
import traceback
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LONGEST_MESSAGE = 300
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal: Keras writes its messages bold


def where_raised(problem: BaseException) -> str:
    """' (net.py, line 12)': the innermost frame that is no library's and not ours; '' where there is none."""
    paths = sysconfig.get_paths()
    foreign = [_PACKAGE, *(paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))]
    foreign += [str(Path(sys.base_prefix) / "lib")]
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        path = str(Path(frame.filename).resolve())
        if frame.filename.startswith("<") or any(Path(path).is_relative_to(folder) for folder in foreign):
            continue
        if "site-packages" in path or "dist-packages" in path:
            continue
        return f" ({Path(path).name}, line {frame.lineno})"
    return ""


def shorten_error(problem: BaseException) -> str:
    """The first lines of an error, in one, and where in the user's own code it was raised."""
    text = " ".join(_COLOURS.sub("", str(problem)).split())
    return f"{type(problem).__name__}: {text[:_LONGEST_MESSAGE]}{where_raised(problem)}"
