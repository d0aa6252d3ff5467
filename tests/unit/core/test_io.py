"""Nouns as files: what is saved comes back, damage is said, and the schemas are true."""

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from loadmaster.cli import schemas
from loadmaster.core import files, io
from loadmaster.core.errors import FileError, FormatError, SchemaError
from loadmaster.core.placement import Member, Placement, Status
from loadmaster.core.plan import Pipeline, Plan
from loadmaster.core.problem import Problem
from loadmaster.core.run import Budget
from loadmaster.core.timeline import Timeline, TimelineOrigin
from tests.builders import cluster_of, diamond, graph_of, plan_on, problem_of
from tests.unit.core.noun_samples import GROUP, STRATEGY, STRATEGY_ANSWER
from tests.unit.formats.format_samples import tiny_problem

SCHEMAS = Path(__file__).resolve().parents[3] / "docs" / "schemas"
EVIL = '[bold]x[/bold]\n<script>"quote"\\\x1b[31m\u202e😀'


def evil_problem() -> Problem:
    """Names that hold anything, and a time that is infinite."""
    graph = dataclasses.replace(diamond(), name=EVIL, op_name=(EVIL, "", " ", "\x00"), module=(EVIL,) * 4)
    times = [[1.0, np.inf], [2.5e-7, 3.0], [1e300, 1.0], [0.0, 0.0]]
    cluster = cluster_of({(0, 1): [0], (1, 0): [1]}, kind=[0, 1], on_host=(False, True))
    cluster = dataclasses.replace(cluster, name=EVIL, device_name=(EVIL, "d"), kind_name=("a", EVIL))
    return problem_of(graph, cluster, np.array(times))


def pipeline() -> Pipeline:
    return Pipeline(
        stage=np.array([0, 0, 1, 1]),
        replicas=np.array([1, 2]),
        num_microbatches=4,
        schedule="1f1b",
        in_flight=np.array([2, 1]),
        stage_s=np.array([0.5, 0.25]),
    )


def placement(problem: Problem, *, fits: bool) -> Placement:
    plan = dataclasses.replace(plan_on([1, 1, 0, 1], [0, 1, 2, 3]), pipeline=pipeline())
    return Placement(
        problem=problem,
        plan=plan if fits else None,
        algorithm="by hand",
        status=Status.FEASIBLE if fits else Status.NOT_FOUND,
        score_s=2.0 if fits else None,
        bound_s=1.0,
        bound_name="critical path",
        proof="",
        shortfall_bytes=np.array([0, 0 if fits else 7]),
        peak_bytes=np.array([3, 2**40]),
        least_overflow_plan=None if fits else plan,
        members=(Member("a", None, None, 0.0, EVIL), Member("b", Status.OPTIMAL, 0.5, 1.5, "best")),
        wall_s=0.125,
    )


def timeline() -> Timeline:
    return Timeline(
        origin=TimelineOrigin.MEASURED,
        device_name=("d0", EVIL),
        kind=np.array([0, 1, 2]),
        resource=np.array([1, 2, 3]),
        item=np.array([0, 1, 2]),
        microbatch=np.array([0, 0, 1]),
        start_s=np.array([0.0, 0.1, 0.1 + 0.2]),
        end_s=np.array([0.1, 0.3, 1.0]),
        peak_bytes=np.array([0, 2**62]),
    )


NOUNS: dict[str, Callable[[], Any]] = {
    "graph": lambda: evil_problem().graph,
    "cluster": lambda: evil_problem().cluster,
    "costs": lambda: evil_problem().costs,
    "problem": evil_problem,
    "plan": lambda: plan_on([0, 2, 1], [2, 0, 1]),
    "pipeline": pipeline,
    "placement": lambda: placement(evil_problem(), fits=True),
    "placement that does not fit": lambda: placement(evil_problem(), fits=False),
    "timeline": timeline,
    "group of a strategy": lambda: GROUP,
    "strategy": lambda: STRATEGY,
    "answered strategy": lambda: STRATEGY_ANSWER,
    "budget of seconds": lambda: Budget(seconds=0.1),
    "budget of a count": lambda: Budget(count=2000),
}


def assert_equal(left: Any, right: Any, path: str = "") -> None:
    """Two nouns field by field: types, shapes and every bit."""
    assert type(left) is type(right), path
    if dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            assert_equal(getattr(left, field.name), getattr(right, field.name), f"{path}.{field.name}")
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), path
        assert left.tobytes() == right.tobytes(), path
    elif isinstance(left, tuple):
        assert len(left) == len(right), path
        for at, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_equal(a, b, f"{path}[{at}]")
    else:
        assert left == right, path


def document(noun: Any, **changes: Any) -> bytes:
    """A saved noun with top-level keys replaced; a value of None drops the key."""
    saved = {**json.loads(io.encode(noun)), **changes}
    return json.dumps({key: value for key, value in saved.items() if value is not None}).encode()


@pytest.mark.parametrize("name", NOUNS)
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_every_noun_comes_back_bit_for_bit(name: str, suffix: str, tmp_path: Path) -> None:
    noun = NOUNS[name]()
    path = tmp_path / f"noun{suffix}"
    io.save(noun, path)
    loaded = io.load(path)
    assert_equal(noun, loaded)
    assert loaded.digest == noun.digest
    assert path.read_bytes().startswith(b"\x1f\x8b" if suffix.endswith(".gz") else b'{"loadmaster":"')


def test_every_known_noun_is_tried_above() -> None:
    assert {type(make()) for make in NOUNS.values()} == set(io.NOUNS.values())


def test_digests_tell_contents_apart_and_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    digests = {make().digest for make in NOUNS.values()}
    assert len(digests) == len(NOUNS)
    assert all(len(digest) == 64 for digest in digests)
    assert io.encode(evil_problem()) == io.encode(evil_problem())
    for name in ("a.json.gz", "b.json.gz"):
        io.save(timeline(), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_a_file_with_a_byte_order_mark_or_white_space_is_read() -> None:
    data = json.dumps(json.loads(io.encode(timeline())), indent=3).encode()
    assert_equal(io.decode(b"\xef\xbb\xbf" + data + b"\n\n"), timeline())


# ---- damage


def test_a_changed_value_is_found_by_the_digest_and_forgiven_without_one(tmp_path: Path) -> None:
    saved = json.loads(io.encode(timeline()))
    saved["content"]["end_s"][2] = 2.0
    with pytest.raises(FormatError, match=r"t\.json is damaged: its digest says .*; if you edited it"):
        io.decode(json.dumps(saved).encode(), where="t.json")
    del saved["digest"]
    loaded = io.decode(json.dumps(saved).encode())
    assert isinstance(loaded, Timeline)
    assert loaded.step_s == 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loadmaster": "elephant"}, "holds a 'elephant'; known: graph, cluster"),
        ({"schema": 2}, "has schema version 2, this is version 1; upgrade loadmaster"),
        ({"schema": 0}, "has schema version 0, this is version 1; write it again"),
    ],
)
def test_another_noun_or_schema_version_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        io.decode(document(plan_on([0]), **changes), where="x.json")


@pytest.mark.parametrize("part", [0, 1, 30, 0.5, 0.99])
def test_truncated_json_is_said(part: float) -> None:
    data = io.encode(evil_problem())
    cut = data[: int(part * len(data)) if part < 1 else int(part)]
    with pytest.raises(FormatError, match="is not a Loadmaster JSON file"):
        io.decode(cut, where="x.json")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"loadmaster": 3}',
        b'{"loadmaster": "plan", "schema": "1", "content": {}}',
        b'{"loadmaster": "plan", "schema": 1}',
        b'{"loadmaster": "plan", "schema": 1, "content": []}',
        b'{"loadmaster": "plan", "schema": 1, "content": ' + b"[" * 100_000,
        b"[" * 100_000,
    ],
)
def test_anything_else_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        io.decode(data)


@pytest.mark.parametrize(
    "value",
    [None, True, "text", {}, 3, ["1"], ["nan"], [None], [[0], [0, 1]], [10**400], [0.5], [2**63], [-1], []],
)
@pytest.mark.parametrize("field", ["device", "priority"])
def test_a_column_of_something_else_is_a_format_error(field: str, value: Any) -> None:
    saved = json.loads(io.encode(plan_on([0, 1])))
    saved["content"][field] = value
    del saved["digest"]
    with pytest.raises(FormatError, match="bad plan"):
        io.decode(json.dumps(saved).encode())


@pytest.mark.parametrize("value", [["1", "2"], [10**400, 1], ["nan", None], [[1], [2]], [-1.0, 1.0], None])
def test_a_column_of_seconds_holds_numbers_and_nulls_only(value: Any) -> None:
    saved = json.loads(io.encode(tiny_problem().costs))
    saved["content"]["issue_s"] = value
    del saved["digest"]
    with pytest.raises(FormatError, match="bad costs"):
        io.decode(json.dumps(saved).encode())


def test_a_name_that_is_not_unicode_cannot_be_saved_and_says_so() -> None:
    graph = dataclasses.replace(diamond(), op_name=("\udcff", "b", "c", "d"))
    with pytest.raises(FormatError, match="name in this graph is not Unicode"):
        io.encode(graph)


def test_what_is_no_noun_cannot_be_saved() -> None:
    with pytest.raises(FormatError, match="a dict cannot be saved; give one of graph, cluster"):
        io.encode({"a": 1})  # type: ignore[arg-type]


# ---- reading under a limit


def test_a_file_above_the_limit_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    io.save(plan_on([0] * 4000), path)
    with pytest.raises(FileError, match=r"has .* KiB, the limit is 1\.0 KiB; raise it with --max-bytes"):
        io.load(path, max_bytes=1024)
    size = path.stat().st_size
    with pytest.raises(FileError, match=f"has {size} bytes, the limit is {size - 1} bytes"):
        io.load(path, max_bytes=size - 1)
    assert isinstance(io.load(path, max_bytes=size), Plan)


def test_the_default_limit_is_one_gibibyte(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse.json"
    with open(sparse, "wb") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(FileError, match="has 1073741825 bytes, the limit is 1073741824 bytes"):
        io.load(sparse)


def test_a_small_gzip_file_that_unpacks_to_more_than_the_limit_is_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b" " * 10_000_000))
    assert bomb.stat().st_size < 20_000
    with pytest.raises(FileError, match=r"has more than 1\.0 MiB, the limit is 1\.0 MiB"):
        files.read_bytes(bomb, max_bytes=2**20)


def test_a_limit_beyond_all_memory_takes_only_what_the_file_has(tmp_path: Path) -> None:
    for name in ("plan.json", "plan.json.gz"):
        io.save(plan_on([0]), tmp_path / name)
        assert isinstance(io.load(tmp_path / name, max_bytes=2**62), Plan)


def test_what_is_no_gzip_or_only_half_of_one_is_said(tmp_path: Path) -> None:
    path = tmp_path / "plan.json.gz"
    path.write_bytes(b"{}")
    with pytest.raises(FileError, match="cannot read"):
        io.load(path)
    io.save(plan_on([0] * 1000), path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FormatError, match="is not a whole gzip file"):
        io.load(path)


@pytest.mark.parametrize("name", ["nowhere.json", "a\0b", "x" * 5000, "."])
def test_what_cannot_be_read_is_a_file_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot read"):
        io.load(f"{tmp_path}/{name}")


# ---- the published schemas


def test_the_published_schemas_are_up_to_date() -> None:
    published = {path.name: path.read_bytes() for path in SCHEMAS.iterdir()}
    assert published == schemas.list_schemas(), "renew them with: make schemas"


@pytest.mark.parametrize("name", NOUNS)
def test_a_saved_file_is_valid_under_its_published_schema(name: str) -> None:
    saved = json.loads(io.encode(NOUNS[name]()))
    kind = saved["loadmaster"]
    schema = json.loads((SCHEMAS / f"{kind}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(saved)
    field = next(iter(saved["content"]))
    for broken in (
        {**saved, "schema": 99},
        {**saved, "loadmaster": "elephant"},
        {key: value for key, value in saved.items() if key != "content"},
        {**saved, "content": {**saved["content"], field: {"not": "this"}}},
    ):
        assert not validator.is_valid(broken)


def test_a_graph_made_by_hand_survives_views_keeps_and_groups(tmp_path: Path) -> None:
    graph = graph_of(
        {"makes": [8], "group": 3, "resident_bytes": 5},
        {"uses": [0], "makes": [{"num_bytes": 4, "keep": True}], "group": 3, "workspace_bytes": 9},
    )
    io.save(graph, tmp_path / "g.json")
    assert_equal(io.load(tmp_path / "g.json"), graph)
