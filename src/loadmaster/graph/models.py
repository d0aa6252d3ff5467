"""Models as sources: `hf:NAME`, `zoo:NAME` and `path/to/file.py:build`, captured into a Graph.

`build` is the user's function and runs as the user's code. It gives the model and its inputs,

    return model, (tokens,)                       or  model, args, kwargs
    return {"model": model, "args": (tokens,), "loss": my_loss, "optimizer": torch.optim.SGD}

and may take `batch` and `seq`. Build under `torch.device("meta")` to allocate nothing.
"""

import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadmaster.core.errors import FileError, InputError, UnknownNameError
from loadmaster.core.graph import Graph
from loadmaster.graph.capture import DEFAULT_OPTIMIZER, capture

if TYPE_CHECKING:
    from loadmaster.zoo.example import Example

MODEL = re.compile(r"(hf|zoo):(.*)|(.+\.py):(\w+)", re.DOTALL)
DEFAULT_BATCH = 8
DEFAULT_SEQ = 512
_FIELDS = ("model", "args", "kwargs", "loss", "optimizer", "train")
_MOST = 2**20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a step to capture; None is the default."""

    batch: int | None = None
    seq: int | None = None

    def __post_init__(self) -> None:
        """Whole numbers from 1 on."""
        for name in ("batch", "seq"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(f"{name} is {value!r}; give a whole number >= 1")
            if value is not None and value > _MOST:
                raise InputError(f"{name} is {value}; give at most {_MOST}")


def names_model(source: str) -> bool:
    """Whether a source is a model rather than a file with a graph."""
    return MODEL.fullmatch(source) is not None


def model_graph(source: str, *, sizes: Sizes, optimizer: str | None = None) -> Graph:
    """The training step of the model that a source names."""
    match = MODEL.fullmatch(source)
    if match is None:
        raise InputError(f"{source!r} names no model; write hf:NAME, zoo:NAME or file.py:function")
    family, name, path, function = match.groups()
    if family is None:
        return _own(path, function, sizes=sizes, optimizer=optimizer)
    example = _named(family, name, sizes)
    return capture(
        example.model,
        example.args,
        example.kwargs,
        loss=example.loss,
        optimizer=optimizer or DEFAULT_OPTIMIZER,
        name=_titled(name, sizes),
    )


def _named(family: str, name: str, sizes: Sizes) -> "Example":
    try:
        import torch  # noqa: F401
    except ImportError:
        raise InputError(
            f"{family}:{name} needs PyTorch; install it with: pip install 'loadmaster[hf]'"
        ) from None
    batch, seq = sizes.batch or DEFAULT_BATCH, sizes.seq or DEFAULT_SEQ
    if family == "hf":
        from loadmaster.zoo.hf import hf_example

        return hf_example(name, batch=batch, seq=seq)
    from loadmaster.zoo.named import zoo_example

    return zoo_example(name, batch=batch, seq=seq)


def _titled(name: str, sizes: Sizes) -> str:
    return f"{name}, batch {sizes.batch or DEFAULT_BATCH}, seq {sizes.seq or DEFAULT_SEQ}"


def _own(path: str, function: str, *, sizes: Sizes, optimizer: str | None) -> Graph:
    """The user's own model, from a function of the user's own file."""
    given = _called(path, function, sizes)
    if isinstance(given, Mapping):
        unknown = sorted(set(map(str, given)) - set(_FIELDS))
        if unknown or "model" not in given:
            raise InputError(
                f"{path}:{function} gives {unknown or 'no model'}; known are {', '.join(_FIELDS)}"
            )
        parts = dict(given)
    elif isinstance(given, tuple) and 1 <= len(given) <= 3:
        parts = dict(zip(_FIELDS, given, strict=False))
    else:
        raise InputError(
            f"{path}:{function} gives {type(given).__name__}; it must give (model, args),"
            " (model, args, kwargs) or a dict with 'model' and 'args'"
        )
    if optimizer is not None:
        parts["optimizer"] = optimizer
    return capture(parts.pop("model"), parts.pop("args", ()), parts.pop("kwargs", None), **parts)


def _called(path: str, function: str, sizes: Sizes) -> Any:
    """What the function gives, batch and seq handed to it where it takes them."""
    build = _function(path, function)
    takes = inspect.signature(build).parameters
    asked = {name: value for name in ("batch", "seq") if (value := getattr(sizes, name)) is not None}
    refused = [name for name in asked if name not in takes]
    if refused:
        raise InputError(
            f"{path}:{function} takes no {refused[0]}; leave --{refused[0]} out or add the argument"
        )
    try:
        return build(**asked)
    except Exception as problem:
        raise InputError(f"{path}:{function} raised {_shortened(problem)}") from problem


def _function(path: str, function: str) -> Any:
    if not Path(path).is_file():
        raise FileError(f"no such file {path!r}; a model is hf:NAME, zoo:NAME or file.py:function")
    spec = importlib.util.spec_from_file_location(f"loadmaster_user_{Path(path).stem}", path)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)  # it may import its neighbours, as when it is run
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise InputError(f"{path} cannot be imported: {_shortened(problem)}") from problem
    finally:
        sys.path.remove(folder)
    found = getattr(module, function, None)
    if not callable(found):
        known = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise UnknownNameError(f"function of {path}", function, known)
    return found


def _shortened(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
