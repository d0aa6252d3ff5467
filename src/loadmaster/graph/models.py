"""Models as sources: `hf:NAME`, `zoo:NAME`, `keras:NAME`, a SavedModel folder and `path/to/file.py:build`.

`build` is the user's function and runs as the user's code. It gives the model and its inputs,

    return model, (tokens,)                       or  model, {"input_ids": tokens}  or  model, args, kwargs
    return {"model": model, "args": (tokens,), "loss": my_loss, "optimizer": torch.optim.SGD}

and may take `batch` and `seq`. A Keras model or a `tf.function` goes to `tf_capture`, an `nn.Module` to
`torch_capture`. Build the latter under `torch.device("meta")` to allocate nothing.
"""

import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadmaster.core.errors import FileError, InputError, UnknownNameError
from loadmaster.core.graph import Graph
from loadmaster.core.question import Question
from loadmaster.core.raised import shorten_error
from loadmaster.graph.capture import DEFAULT_OPTIMIZER, capture
from loadmaster.graph.framework import is_tensorflow_model
from loadmaster.graph.origin import DEFAULT_BATCH, add_origin

if TYPE_CHECKING:
    from loadmaster.zoo.example import Example

MODEL = re.compile(r"(hf|zoo|keras):(.*)|(.+\.py):(\w+)", re.DOTALL)
PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16")
DEFAULT_SEQ = 512
_FIELDS = ("model", "args", "kwargs", "loss", "optimizer", "train", "accumulation", "autocast", "grad_scaler")
_MOST = 2**20


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What step of a model to capture; None is the default.

    Under a mixed precision weights and their states are float32 and ops run as autocast has it; under bf16
    everything is 16 bits.
    """

    batch: int | None = None
    seq: int | None = None
    optimizer: str | None = None
    precision: str = PRECISIONS[0]
    target: str | None = None  # kind of device: 'cpu' or 'cuda'
    path: str | None = None
    assume: float | None = None
    accumulation: int | None = None  # passes in a step
    ranges: Mapping[str, tuple[int, int]] | None = None  # of batch and seq over which the ops are the same
    recompute: bool = False  # blocks that are alike keep their inputs only and run again

    @classmethod
    def of(cls, question: Question) -> "CaptureOptions":
        """The part of a question that a capture answers."""
        shared = {field.name: getattr(question, field.name) for field in fields(cls) if field.name != "path"}
        return cls(path=question.capture_path, **shared)

    def __post_init__(self) -> None:
        """Whole numbers from 1 on, a known precision."""
        if self.precision not in PRECISIONS:
            raise UnknownNameError("precision", str(self.precision), PRECISIONS)
        for name in ("batch", "seq"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(f"{name} is {value!r}; give a whole number >= 1")
            if value is not None and value > _MOST:
                raise InputError(f"{name} is {value}; give at most {_MOST}")

    @property
    def options(self) -> dict[str, Any]:
        """What `capture` is told."""
        import torch

        casts = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
        found: dict[str, Any] = {"target": self.target, "path": self.path}
        if self.precision in casts:
            found |= {"autocast": casts[self.precision], "grad_scaler": self.precision == "fp16-mixed"}
        more = {"assume": self.assume, "accumulation": self.accumulation, "ranges": self.ranges}
        return found | {name: value for name, value in more.items() if value is not None}


def names_model(source: str) -> bool:
    """Whether a source is a model rather than a file with a graph."""
    return MODEL.fullmatch(source) is not None or is_saved_model(source)


def is_saved_model(source: str) -> bool:
    """Whether a source is the folder of a TensorFlow SavedModel."""
    return "\0" not in source and os.path.isfile(os.path.join(source, "saved_model.pb"))


def capture_model(source: str, asked: CaptureOptions) -> Graph:
    """The training step of the model that a source names."""
    graph: Graph | None
    if is_tensorflow_source(source):
        graph = _tensorflow_capture(source).capture_source(source, asked)
    else:
        parts = load_model_parts(source, asked)
        graph = _capture_tensorflow(parts, asked, source) if is_tensorflow_model(parts["model"]) else None
        graph = graph or _capture_parts(parts, asked)
    return replace(graph, capture=add_origin(graph.capture, source, asked))


def is_tensorflow_source(source: str) -> bool:
    """Whether a source is TensorFlow's by its name alone."""
    return source.startswith("keras:") or is_saved_model(source)


def load_tensorflow_step(source: str, asked: CaptureOptions) -> Any:
    """The step of a TensorFlow source, to be run."""
    room = _tensorflow_capture(source)
    if is_tensorflow_source(source):
        return room.load_step(source, asked)
    return room.step_of_parts(load_model_parts(source, asked), asked, source)


def _capture_tensorflow(parts: Mapping[str, Any], asked: CaptureOptions, source: str) -> Graph:
    room = _tensorflow_capture(source)
    graph: Graph = room.capture_step(room.step_of_parts(parts, asked, source)).graph
    return graph


def _tensorflow_capture(source: str) -> Any:
    if importlib.util.find_spec("tensorflow") is None:
        raise InputError(f"{source} needs TensorFlow; install it with: pip install 'loadmaster[tensorflow]'")
    from loadmaster.graph.tf_capture import request

    return request


def load_model_parts(source: str, asked: CaptureOptions, *, device: str = "meta") -> dict[str, Any]:
    """The model that a source names, its inputs, and what belongs to it; a named one is made on a device."""
    match = MODEL.fullmatch(source)
    if match is None:
        raise InputError(f"{source!r} names no model; write hf:NAME, zoo:NAME or file.py:function")
    family, name, path, function = match.groups()
    if family is None:
        parts = load_own_parts(path, function, asked)
    else:
        example = _load_example(family, name, asked, device)
        parts = {"model": example.model, "args": example.args, "kwargs": example.kwargs}
        parts |= {"loss": example.loss, "optimizer": DEFAULT_OPTIMIZER, "name": _graph_title(name, asked)}
    if is_tensorflow_model(parts["model"]):
        return parts  # whose optimizer and precision are its own
    if asked.optimizer is not None:
        parts["optimizer"] = asked.optimizer
    return parts | _cast_to_bfloat16(parts) if asked.precision == "bf16" else parts


def _capture_parts(parts: dict[str, Any], asked: CaptureOptions) -> Graph:
    rest = dict(parts)
    model, args, kwargs = rest.pop("model"), rest.pop("args", ()), rest.pop("kwargs", None)
    if not asked.recompute:
        return capture(model, args, kwargs, **(rest | asked.options))
    from loadmaster.graph.torch_capture.paths.recompute import checkpoint_blocks

    with checkpoint_blocks(model, target=asked.target):  # other paths see nothing twice
        return capture(model, args, kwargs, **(rest | asked.options | {"path": "traced"}))


def _cast_to_bfloat16(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The model was built for this, so that it may be cast."""
    import torch
    from torch.utils._pytree import tree_map_only

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor

    given = {key: parts[key] for key in ("args", "kwargs") if key in parts}
    model = parts["model"]
    model = model.to(torch.bfloat16) if isinstance(model, torch.nn.Module) else model  # else refused by name
    return {"model": model, **tree_map_only(torch.Tensor, cast, given)}


def _load_example(family: str, name: str, asked: CaptureOptions, device: str) -> "Example":
    try:
        import torch  # noqa: F401
    except ImportError:
        raise InputError(
            f"{family}:{name} needs PyTorch; install it with: pip install 'loadmaster[hf]'"
        ) from None
    batch, seq = asked.batch or DEFAULT_BATCH, asked.seq or DEFAULT_SEQ
    if family == "hf":
        from loadmaster.zoo.hf import hf_example

        return hf_example(name, batch=batch, seq=seq, device=device)
    from loadmaster.zoo.named import zoo_example

    return zoo_example(name, batch=batch, seq=seq, device=device)


def _graph_title(name: str, asked: CaptureOptions) -> str:
    return f"{name}, batch {asked.batch or DEFAULT_BATCH}, seq {asked.seq or DEFAULT_SEQ}"


def load_own_parts(path: str, function: str, asked: CaptureOptions) -> dict[str, Any]:
    """The user's own model and what belongs to it, from a function of the user's own file."""
    given = _call_build(path, function, asked)
    if isinstance(given, Mapping):
        unknown = sorted(set(map(str, given)) - set(_FIELDS))
        if unknown or "model" not in given:
            raise InputError(
                f"{path}:{function} gives {unknown or 'no model'}; known are {', '.join(_FIELDS)}"
            )
        return _name_arguments(dict(given), f"{path}:{function}")
    if isinstance(given, tuple) and 1 <= len(given) <= 3:
        return _name_arguments(dict(zip(_FIELDS, given, strict=False)), f"{path}:{function}")
    raise InputError(
        f"{path}:{function} gives {type(given).__name__}; it must give (model, args),"
        " (model, args, kwargs) or a dict with 'model' and 'args'"
    )


def _name_arguments(parts: dict[str, Any], where: str) -> dict[str, Any]:
    """Inputs that are a dict are arguments by name, as in `model(**inputs)`; Keras has its own dicts."""
    if not isinstance(parts.get("args"), Mapping) or is_tensorflow_model(parts["model"]):
        return parts
    if parts.get("kwargs"):
        raise InputError(
            f"{where} gives arguments by name twice, {', '.join(map(str, parts['args']))} and"
            f" {', '.join(map(str, parts['kwargs']))}; give (model, args, kwargs) with args a tuple"
        )
    return parts | {"args": (), "kwargs": dict(parts["args"])}


def _call_build(path: str, function: str, asked: CaptureOptions) -> Any:
    """What the function gives, batch and seq handed to it where it takes them."""
    build = _import_function(path, function)
    takes = inspect.signature(build).parameters
    sizes = {name: value for name in ("batch", "seq") if (value := getattr(asked, name)) is not None}
    refused = [name for name in sizes if name not in takes]
    if refused:
        raise InputError(
            f"{path}:{function} takes no {refused[0]}; leave --{refused[0]} out or add the argument"
        )
    try:
        return build(**sizes)
    except (Exception, SystemExit) as problem:
        raise InputError(f"{path}:{function} raised {shorten_error(problem)}") from problem


def _import_function(path: str, function: str) -> Any:
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
        raise InputError(f"{path} cannot be imported: {shorten_error(problem)}") from problem
    finally:
        sys.path.remove(folder)
    found = getattr(module, function, None)
    if not callable(found):
        known = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise UnknownNameError(f"function of {path}", function, known)
    return found
