"""Damaged files: every reader reads one or refuses it in our own words, soon, and in little memory."""

import gzip
import json
import zlib
from pathlib import Path

import pytest

from loadmaster.core import io
from loadmaster.core.errors import FileError, FormatError, InputError
from loadmaster.graph.formats import openvino
from tests.mutations import BILLION_LAUGHS
from tests.readers import all_readers, run_inputs
from tests.unit.core.noun_samples import PLAN

_NAMES = (
    "nouns", "own", "msr", "piper", "nodelink", "pipedream", "openvino", "toml", "onnx", "pt2", "safetensors",
    "checkpoint", "snapshot", "index", "journal",
)  # fmt: skip
_EACH = 900  # times a reader's share; ten thousand in all


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _NAMES)
def test_a_damaged_file_is_read_or_refused_and_nothing_else(name: str) -> None:
    if name not in all_readers():
        pytest.skip(f"the reader of {name} needs a package that is not installed")
    reader = all_readers()[name]
    read, wrong = run_inputs(reader, 10**6, 10**6 + int(_EACH * reader.share))
    assert wrong == []
    assert 0 < read < _EACH * reader.share  # some are harmless, and some are not


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _NAMES)
def test_thousands_of_damaged_files_are_read_or_refused(name: str) -> None:
    if name in all_readers():
        assert run_inputs(all_readers()[name], 2 * 10**6, 2 * 10**6 + 5000)[1] == []


def test_entities_of_an_xml_file_are_not_expanded() -> None:
    with pytest.raises(FormatError, match="document type declaration"):
        openvino.read(BILLION_LAUGHS + b'<net name="&i;" version="11"></net>', "bomb")


def test_a_gzip_file_that_unpacks_a_thousandfold_is_refused_early(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b" " * 2**27, 6))
    with pytest.raises(FileError, match="times its size"):
        io.load(bomb)
    bomb.write_bytes(gzip.compress(io.encode(PLAN) + b" " * 2**20))
    assert io.load(bomb).digest == PLAN.digest  # a little more is no bomb


def test_a_column_nested_forty_deep_is_refused() -> None:
    document = json.loads(io.encode(PLAN))
    del document["digest"]
    deep: object = "x"
    for _ in range(40):
        deep = [deep]
    document["content"]["recompute"] = deep
    with pytest.raises(InputError):
        io.decode(json.dumps(document).encode())


def _tensor_file(folder: Path, header: object, data: bytes) -> Path:
    path = folder / "x.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": ("F32", [2], [0, 8]), "b": ("F32", [2], [4, 12])}, "overlaps another tensor"),
        ({"a": ("F32", [3], [0, 12]), "b": ("F32", [3], [0, 12])}, "overlaps another tensor"),
        ({"a": ("F32", [1], [0, 4]), "b": ("F32", [1], [8, 12])}, "bytes that belong to no tensor"),
        ({"a": ("F32", [2], [0, 8])}, "4 bytes after the last tensor"),
        ({"a": ("F32", [3], [0, 12]), "b": ("F32", [0, 2**70], [12, 12])}, "a shape that no tensor has"),
        ({"a": ("F32", [3, *[1] * 70], [0, 12])}, "a shape that no tensor has"),
        ({"a": ("F32", [4], [0, 16])}, "does not lie in bytes"),
    ],
)
def test_a_tensor_file_whose_header_lies_is_refused(header: object, message: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="tensor files hold tensors of torch")
    from loadmaster.modules.tensor_files import read_entries, read_tensors

    assert isinstance(header, dict)
    entries = {n: {"dtype": d, "shape": s, "data_offsets": o} for n, (d, s, o) in header.items()}
    path = _tensor_file(tmp_path, entries, b"\0" * 12)
    for read in (read_entries, read_tensors):
        with pytest.raises(FormatError, match=message):
            read(path)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("../x.safetensors", "outside"),
        ("/x.safetensors", "outside"),
        ("a" * 3000, "lacks"),
        (3, "not an index"),
    ],
)
def test_an_index_that_names_no_shard_beside_it_is_refused(
    shard: object, message: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="checkpoints hold tensors of torch")
    from loadmaster.modules.checkpoint import Checkpoint

    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(FileError, match=message):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "turn", "trial": "a", "step": "3", "loss": 0.5, "seconds": 0.1, "num_tokens": 8},
        {"kind": "commit", "trial": "a", "generation": 1},
        {"kind": "report", "trial": "a", "step": 3, "metrics": [], "decision": "continue", "asked": True},
        {"kind": "done", "trial": "b", "status": "done", "step": 3},
        {"kind": "frozen", "trial": "a"},
        {"trial": "a"},
    ],
)
def test_a_journal_with_a_record_that_is_whole_but_wrong_is_refused(record: object, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="studies train with torch")
    from loadmaster.train.coordination.study_state import StudyState
    from loadmaster.train.disk.journal import Journal, JournalError

    assert isinstance(record, dict)
    begun = {"kind": "trial", "trial": "a", "facts": {}, "num_steps": 9}
    bodies = [json.dumps({"seq": at, **each}).encode() for at, each in enumerate((begun, record))]
    path = tmp_path / "journal"
    path.write_bytes(b"".join(b"%08x %s\n" % (zlib.crc32(body), body) for body in bodies))
    journal = Journal(path)
    with pytest.raises(JournalError, match="record 1"):
        StudyState(journal)
    journal.close()
    assert path.read_bytes().count(b"\n") == 2  # nothing was cut
