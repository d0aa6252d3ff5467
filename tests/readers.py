"""Every reader of files, each with valid samples and ways to damage them, and what counts as reading well."""

import json
import random
import resource
import signal
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loadmaster.cluster.parse import parse_cluster
from loadmaster.core import io
from loadmaster.core.errors import LoadmasterError
from loadmaster.graph.formats import msr, nodelink, onnx, openvino, own, pipedream, piper, pt2
from tests.mutations import (
    Mutation,
    change_journal,
    change_json,
    change_message,
    change_tensor_file,
    change_text,
    change_toml,
    change_xml,
    change_zip,
)
from tests.unit.core.noun_samples import NOUNS
from tests.unit.formats.format_samples import MSR, PIPEDREAM, PIPER

MOST_S = 5.0
MOST_BYTES = 2**30
_HERE = Path(__file__).parent
_CLUSTER = """
name = "lab"
inter = "10g"
kind.mychip = { flops = { float32 = "19.5T", bfloat16 = "312T" }, memory = "40GB", memory_rate = "1.5TB/s" }
kind.mycpu = { flops = 1e12, memory = 1000, memory_rate = "1GB/s", host = true, overhead = "7us" }
host = [{ name = "box0", devices = "2xmychip, mycpu-2kB", intra = "nvlink4" }]
device = [
  { name = "big", kind = "H100", host = "box1", memory = "70GB", reserve = "1GiB", engine = "chip0" },
  { name = "twin", kind = "V100-32GB", host = "box1", count = 2 },
]
switch = [{ name = "plx0" }]
link = [
  { between = ["big", "plx0"], preset = "pcie3" },
  { between = ["plx0", "box1"], rate = "16GB/s", latency = "5us", name = "uplink" },
]
"""
_NODELINK: dict[str, Any] = {
    "directed": True,
    "nodes": [
        {"id": 1, "name": "x", "kind": "matmul", "module": "a.b", "flops": 5, "bytes_moved": 7, "memory": 9.5,
         "workspace_bytes": 3, "dtype": "bfloat16", "group": 4, "signature": "mm f32",
         "outputs": [{"bytes": 8, "keep": True}, {"bytes": 2, "storage": 0}, {"bytes": 6, "storage": -1}]},
        {"id": "y", "time_us": 2, "phase": "backward", "mirror": 1, "colocation": 4, "signature": "mm f32"},
        {"id": [2, 3], "time_ms": 4, "resident_bytes": 5, "phase": "update", "signature": "add f32"},
    ],
    "links": [
        {"source": 1, "target": "y", "output": 1},
        {"source": 1, "target": "y", "bytes": 6},
        {"source": "y", "target": [2, 3], "weight": 3.5},
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """What reads a file's bytes, and ways to make such bytes."""

    name: str
    read: Callable[[bytes], object]
    mutations: tuple[Mutation, ...]
    share: float = 1.0  # of a run's inputs: less where reading is slow


def run_inputs(reader: Reader, first: int, last: int) -> tuple[int, list[str]]:
    """Give a reader the inputs of these seeds: how many it read, and what it did wrong."""
    read, wrong = 0, []
    for seed in range(first, last):
        said = _try_input(reader, seed)
        read += said == ""
        wrong += [f"{reader.name}, seed {seed}: {said}"] if said not in ("", "refused") else []
    return read, wrong


def make_input(reader: Reader, seed: int) -> bytes:
    """The bytes of a seed."""
    rng = random.Random(f"{reader.name} {seed}")
    return reader.mutations[rng.randrange(len(reader.mutations))](rng)


def _try_input(reader: Reader, seed: int) -> str:
    """'' = read, 'refused', or what went wrong."""
    data = make_input(reader, seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with _no_longer_than(MOST_S):
            reader.read(data)
        said = ""
    except LoadmasterError as problem:
        said = "refused" if str(problem).strip() else "refused without a word"
    except _TooLong:
        return f"still reading after {MOST_S} s"
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem)[:200]}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return f"took {grown} bytes" if grown > MOST_BYTES else said


class _TooLong(BaseException):
    """Not an Exception, so that no reader takes it for one of its own."""


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TooLong

    # of the processor: a busy machine is no hang
    old = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)


@cache
def all_readers() -> dict[str, Reader]:
    """The readers by name; those of packages that are not installed are left out."""
    found = [*_text_readers()]
    if find_spec("onnx"):
        found.append(_onnx_reader())
    if find_spec("torch"):
        found += [_pt2_reader(), *_tensor_readers()]
    return {reader.name: reader for reader in found}


def _scratch() -> Path:
    """A folder for readers that want a file."""
    folder = Path(_scratch_folder().name)
    folder.mkdir(exist_ok=True)
    return folder


@cache
def _scratch_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="readers-")


def _from_file(name: str, read: Callable[[Path], object], data: bytes) -> object:
    path = _scratch() / name
    path.write_bytes(data)
    return read(path)


def _named(module: Any) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        module.recognises(data)
        return module.read(data, "odd")

    return read


def _text_readers() -> Iterator[Reader]:
    nouns = [io.encode(noun) for noun in NOUNS.values()]
    undigested = [
        json.dumps({k: v for k, v in json.loads(n).items() if k != "digest"}).encode() for n in nouns
    ]
    yield Reader("nouns", io.decode, tuple(map(change_json, [*undigested, *undigested, *nouns])))
    for name, module, document in (
        ("msr", msr, MSR), ("piper", piper, PIPER), ("nodelink", nodelink, _NODELINK),
    ):  # fmt: skip
        yield Reader(name, _named(module), (change_json(json.dumps(document).encode()),))
    yield Reader("own", _named(own), tuple(map(change_json, undigested)))
    yield Reader("pipedream", _named(pipedream), (change_text(PIPEDREAM.encode()),))
    ir = (_HERE / "unit" / "formats" / "tiny_openvino_ir.xml").read_bytes()
    yield Reader("openvino", _named(openvino), (change_xml(ir),), share=0.4)
    toml = change_toml(tomllib.loads(_CLUSTER))
    yield Reader("toml", partial(_from_file, "cluster.toml", parse_cluster), (toml,), share=0.4)


def _onnx_reader() -> Reader:
    from tests.unit.formats.test_onnx import net

    return Reader("onnx", _named(onnx), (change_message(net()),), share=0.1)


def _pt2_reader() -> Reader:
    from tests.unit.formats.test_pt2 import MODEL_JSON, members

    change = change_zip(members(), MODEL_JSON)
    return Reader("pt2", _named(pt2), (change,), share=0.05)


def _tensor_readers() -> Iterator[Reader]:
    import torch

    from loadmaster.modules.checkpoint import Checkpoint
    from loadmaster.modules.tensor_files import read_tensors, write_tensors
    from loadmaster.train.coordination.study_state import StudyState
    from loadmaster.train.disk.checkpoints import Snapshot, read_model, read_snapshot, write_snapshot
    from loadmaster.train.disk.journal import Journal

    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.int64), "c": torch.zeros(0)}
    write_tensors(_scratch() / "sample.safetensors", tensors)
    sample = (_scratch() / "sample.safetensors").read_bytes()
    yield Reader(
        "safetensors", partial(_from_file, "x.safetensors", read_tensors), (change_tensor_file(sample),)
    )

    def read_checkpoint(path: Path) -> object:
        found = Checkpoint(path)
        return [found.read(name) for name in sorted(found.names)]

    yield Reader(
        "checkpoint", partial(_from_file, "y.safetensors", read_checkpoint), (change_tensor_file(sample),)
    )

    folder = _scratch() / "generation"
    folder.mkdir(exist_ok=True)
    snapshot = Snapshot(
        3, tensors, {"opt": tensors["a"] + 1, "same": tensors["a"]}, {"rng": [1, 2], "epoch": 0}
    )
    write_snapshot(folder, snapshot)
    facts = (folder / "facts.json").read_bytes()

    def read_generation(path: Path) -> object:
        return read_snapshot(path.parent), read_model(path.parent)

    yield Reader(
        "snapshot",
        partial(_from_file, "generation/facts.json", read_generation),
        (change_json(facts),),
        share=0.4,
    )
    index = json.dumps({"metadata": {}, "weight_map": {"a": "sample.safetensors"}}).encode()

    def read_index(path: Path) -> object:
        (path.parent / "sample.safetensors").write_bytes(sample)
        return Checkpoint(path.parent).names

    (_scratch() / "shards").mkdir(exist_ok=True)
    named = "shards/model.safetensors.index.json"
    yield Reader("index", partial(_from_file, named, read_index), (change_json(index),), share=0.2)

    def read_study(path: Path) -> object:
        journal = Journal(path)
        try:
            return StudyState(journal)
        finally:
            journal.close()

    yield Reader(
        "journal", partial(_from_file, "journal", read_study), (change_journal(_journal_lines()),), share=0.4
    )


def _journal_lines() -> list[bytes]:
    records: list[dict[str, Any]] = [
        {"kind": "study", "run": 1},
        {"kind": "trial", "trial": "a", "facts": {"lr": 0.1}, "num_steps": 9},
        {"kind": "turn", "trial": "a", "step": 3, "loss": 0.5, "seconds": 0.1, "num_tokens": 8},
        {"kind": "commit", "trial": "a", "generation": 1, "fence": 1, "step": 3, "crc": 7, "seconds": 0.2},
        {
            "kind": "report",
            "trial": "a",
            "step": 3,
            "metrics": {"loss": 1.0},
            "decision": "continue",
            "asked": True,
        },
        {"kind": "release", "trial": "a", "decision": "stop"},
        {"kind": "fail", "trial": "a", "error": "x", "error_kind": "y"},
        {"kind": "retry", "trial": "a"},
        {"kind": "done", "trial": "a", "status": "done", "step": 9},
    ]
    bodies = [json.dumps({"seq": at, **record}).encode() for at, record in enumerate(records)]
    return [b"%08x " % zlib.crc32(body) + body for body in bodies]
