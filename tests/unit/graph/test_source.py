"""Sources: every way to name a graph, and every way to get the name wrong."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from loadmaster.core import io
from loadmaster.core.errors import FileError, FormatError, GraphError, InputError, UnknownNameError
from loadmaster.core.problem import Links, Workload
from loadmaster.graph.formats import nodelink
from loadmaster.graph.source import FORMATS, read_source
from tests.unit.formats.format_samples import MSR, PIPEDREAM, msr_tiny, tiny_problem


def written(tmp_path: Path, name: str, data: bytes | str) -> Path:
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_a_graph_or_a_workload_passes_through() -> None:
    work = msr_tiny()
    assert read_source(work) is work
    assert read_source(work.graph).graph is work.graph
    assert read_source(work.graph).cluster is None


@pytest.mark.parametrize("family", ["chain", "fork_join", "rnn_grid", "layered", "many_source", "diamond"])
def test_a_generated_family_brings_its_cluster_and_its_seed_matters(family: str) -> None:
    work = read_source(f"gen:{family}:100")
    assert work.cluster is not None
    assert work.cluster.num_devices == 4
    assert work.graph.num_ops >= 96
    assert read_source(f"gen:{family}:100:0").graph.digest == work.graph.digest
    assert read_source(f"gen:{family}:100:1").graph.digest != work.graph.digest


def test_a_generated_graph_is_the_published_one() -> None:
    graph = read_source("gen:fork_join:1k").graph  # fingerprint of the published benchmark
    assert (graph.num_ops, graph.num_uses) == (1007, 1193)
    assert graph.flops.sum() / 1e6 == 582768  # microseconds at 1 TFLOP/s


def test_a_generated_transformer_brings_an_optimizer_and_the_reference_devices() -> None:
    work = read_source("gen:transformer:1500")
    assert work.cluster is not None
    assert (work.optimizer, work.cluster.device_name) == ("adamw", ("ref0", "ref1", "ref2", "ref3"))
    assert 1000 < work.graph.num_ops < 2000


def test_counts_may_be_short() -> None:
    assert read_source("gen:chain:10k").graph.num_ops == 10_000
    with pytest.raises(InputError, match="11000000 ops"):  # M is a million, and this many are refused
        read_source("gen:chain:11M")


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("gen:fork_jion:100", UnknownNameError, "did you mean 'fork_join'"),
        ("gen:chain", InputError, "gen:FAMILY:OPS.*for example gen:fork_join:10k"),
        ("gen:chain:1:2:3", InputError, "gen:FAMILY:OPS"),
        ("gen:", InputError, "gen:FAMILY:OPS"),
        ("gen:chain:", InputError, "OPS of 'gen:chain:' is ''.*for example"),
        ("gen:chain:many", InputError, "OPS .* is 'many'"),
        ("gen:chain:-5", InputError, "OPS .* is '-5'"),
        ("gen:chain:1.5k", InputError, "OPS"),
        ("gen:chain:10:x", InputError, "SEED .* is 'x'"),
        ("gen:chain:٣", InputError, "OPS"),
        ("gen:chain:0", InputError, "0 ops"),
        ("gen:transformer:0", InputError, "0"),
        ("gen:chain:999999999999", InputError, "999999999999"),
        ("gen:transformer:999999999M", InputError, "999999999000000"),
        ("models/net.py:build", FileError, "no such file 'models/net.py'; a model is"),
        ("a\0b.py:build", FileError, "no such file"),
        ("nowhere.json", FileError, "no such file 'nowhere.json'; a source is a file or gen:FAMILY:OPS"),
        ("", FileError, "no such file"),
        ("a\0b", FileError, "no such file"),
        ("x" * 5000, FileError, "no such file"),
        (3, InputError, "not int"),
        (None, InputError, "not NoneType"),
    ],
)
def test_a_bad_name_is_answered_with_what_to_write(
    source: Any, error: type[InputError], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_source(source)


def test_a_file_is_read_in_the_format_its_content_has(tmp_path: Path) -> None:
    graph = msr_tiny().graph
    files: dict[str, bytes | str] = {
        "a.json": io.encode(graph),
        "b.json": json.dumps(MSR, indent=1),
        "c.json": nodelink.write(graph),
        "d.json": io.encode(tiny_problem()),
        "e.json": b"\xef\xbb\xbf" + json.dumps(MSR).encode(),
        "f.json.gz": gzip.compress(json.dumps(MSR).encode()),
    }
    for name, data in files.items():
        work = read_source(written(tmp_path, name, data))
        assert work.graph.digest == graph.digest, name
        assert (work.links == Links.HOST) == (name[0] in "bdef"), name
    profile = read_source(str(written(tmp_path, "vgg.txt", PIPEDREAM)))
    assert (profile.graph.name, profile.optimizer) == ("vgg", "sgd")
    assert read_source(tmp_path / "f.json.gz").graph.name == "f"


def test_a_format_can_be_forced_and_must_be_known(tmp_path: Path) -> None:
    path = written(tmp_path, "graph", json.dumps(MSR))
    assert isinstance(read_source(path, format="msr"), Workload)
    for other in set(FORMATS) - {"msr"}:
        with pytest.raises(InputError, match="graph"):
            read_source(path, format=other)
    with pytest.raises(UnknownNameError, match="did you mean 'msr'"):
        read_source(path, format="msrr")
    with pytest.raises(InputError, match="has no format"):
        read_source("gen:chain:10", format="msr")


PIPER = b'{"maxDevices": 2, "nodes": [], "edges": []}'  # a public format that is not read


@pytest.mark.parametrize("data", [b"", b"hello", b"[]", b"{}", b"[" * 100_000, b"\x89PNG", PIPER])
def test_a_file_in_no_known_format_lists_the_formats(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(
        FormatError, match="none of the formats own, msr, piper, pipedream, nodelink"
    ) as caught:
        read_source(written(tmp_path, "x", data))
    assert "is empty" in str(caught.value) or repr(data[:32]) in str(caught.value)


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    nodes = [*MSR["nodes"], MSR["nodes"][0]]
    path = written(tmp_path, "double.json", json.dumps({**MSR, "nodes": nodes}))
    with pytest.raises(GraphError, match=r"double\.json: duplicate id 3"):
        read_source(path)


def test_a_folder_or_a_file_above_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot read"):
        read_source(tmp_path)
    with pytest.raises(FileError, match="limit"):
        read_source(written(tmp_path, "big.json", json.dumps(MSR)), max_bytes=100)
