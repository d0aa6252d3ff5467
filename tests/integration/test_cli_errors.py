"""Bad input through the command line: exit code 2, one line that says what to do, and nothing is lost.

Every case runs twice, with and without --json: both say the same line on stderr and nothing on stdout.
One of each kind (a graph, a cluster, a file, a word) runs in a process of its own; the others run the same
`main` inside this one, which is fifty times faster.
"""

import gzip
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from loadmaster.core import io
from loadmaster.graph.source import read_source
from tests.builders import plan_on, star_cluster
from tests.integration.command_line import Say, finish, loadmaster, start
from tests.unit.formats.format_samples import MSR, PIPEDREAM, changed

EVIL = "[bold]x[/bold]\n<script>"


def nodes(*ops: Any, links: Any = (), **more: Any) -> str:
    """A node-link file; an op is its id, or all its fields."""
    records = [op if isinstance(op, dict) else {"id": op, "time_ms": 1} for op in ops]
    return json.dumps({"directed": True, "nodes": records, "links": list(links), **more})


def link(source: Any, target: Any, **more: Any) -> dict[str, Any]:
    return {"source": source, "target": target, "bytes": 8, **more}


def saved(noun: Any, **changes: Any) -> str:
    """One of our own files with top-level keys changed and no digest."""
    return json.dumps({**json.loads(io.encode(noun)), "digest": "", **changes})


def cluster(**changes: Any) -> str:
    """A saved cluster of two devices with columns changed."""
    content = json.loads(io.encode(star_cluster(2)))["content"]
    return saved(star_cluster(2), content={**content, **changes})


GRAPH = read_source("gen:chain:3").graph
OWN = io.encode(GRAPH).decode()
NO_ROUTE = cluster(route=[[[-1, -1], [-1, -1]], [[1, 2], [-1, -1]]])
TWO_T4 = '[[device]]\nname = "a"\nkind = "T4"\n[[device]]\nname = "b"\nkind = "T4"\n'
UNREACHED = TWO_T4 + '[[switch]]\nname = "s"\n[[link]]\nbetween = ["a", "s"]\npreset = "pcie3"\n'
STRANGER = TWO_T4 + '[[link]]\nbetween = ["a", "nobody"]\npreset = "pcie3"\n'


@dataclass(frozen=True)
class Case:
    """A command line, the files it names, and the message it must give."""

    name: str
    command: str
    message: str
    files: dict[str, str | bytes] = field(default_factory=dict)


def case(name: str, command: str, message: str, **files: str | bytes) -> Case:
    """Files are given by their names, a double underscore for the dot."""
    return Case(name, command, message, {key.replace("__", "."): value for key, value in files.items()})


def graph_cases() -> list[Case]:
    """One per wrong graph, planned on two devices."""
    two = nodes("a", "b", links=[link("a", "b")])
    wrong = {
        "cycle": (nodes("a", "b", links=[link("a", "b"), link("b", "a")]), "cycle|circle"),
        "cycle of one": (nodes("a", links=[link("a", "a")]), "cycle|itself"),
        "cycle (msr)": (
            changed(MSR, "edges", to=[*MSR["edges"], {"sourceId": 41, "destId": 40, "cost": 0.1}]),
            "cycle|circle",
        ),
        "duplicate id": (nodes("a", "b", "a"), "duplicate id 'a'"),
        "duplicate id (msr)": (changed(MSR, "nodes", 1, "id", to=3), "duplicate id 3"),
        "edge to nowhere": (nodes("a", links=[link("a", "zz")]), "'zz', which does not exist"),
        "edge to nowhere (msr)": (changed(MSR, "edges", 0, "destId", to=77), "77, which does not exist"),
        "edge to nowhere (pipedream)": (PIPEDREAM + "\n\tnode4 -- node77", "77"),
        "negative cost": (nodes({"id": "a", "time_ms": -1}), "finite number >= 0"),
        "negative cost (msr)": (changed(MSR, "nodes", 0, "cpuLatency", to=-0.5), "-0.5; a time is a finite"),
        "NaN cost": (two.replace('"time_ms": 1', '"time_ms": NaN', 1), "NaN and Infinity are not JSON"),
        "infinite cost": (two.replace('"time_ms": 1', '"time_ms": Infinity', 1), "Infinity are not JSON"),
        "cost beyond all numbers": (two.replace('"time_ms": 1', '"time_ms": 1e999', 1), "out of range"),
        "infinite cost (msr)": (json.dumps(MSR).replace("2.5", "1e400"), "out of range"),
        "NaN cost (pipedream)": (PIPEDREAM.replace("time=2.0", "time=nan", 1), "nan"),
        "negative bytes": (nodes("a", "b", links=[link("a", "b", bytes=-8)]), "-8; bytes are"),
        "0 ops": (nodes(), "0 (ops|nodes)"),
        "0 ops (msr)": (changed({**MSR, "edges": []}, "nodes", to=[]), "0 nodes"),
        "0 ops (own)": (saved(GRAPH, content={**json.loads(OWN)["content"], "op_name": []}), "0 ops"),
        "wrong schema version": (saved(GRAPH, schema=7), "schema version 7, this is version 1; upgrade"),
        "truncated JSON": (OWN[: len(OWN) // 2], "not a Loadmaster JSON file: Input data was truncated"),
        "truncated JSON (msr)": (json.dumps(MSR)[:-20], "truncated"),
        "truncated JSON (node-link)": (two[:-3], "truncated"),
        "damaged": (OWN.replace("generated", "forged"), "is damaged: its digest says"),
        "not a graph": (io.encode(plan_on([0])), "holds a plan, not a graph"),
        "no known format": ("hello", "none of the formats own, msr, piper, pipedream, nodelink"),
        "empty file": ("", "is empty"),
        "broken bytes (pt2)": (b"PK\x03\x04", "not a whole .pt2 file"),
        "entities (OpenVINO IR)": ("<!DOCTYPE net []><net version='11'/>", "document type declaration"),
    }
    return [case(name, "plan g.json -d 2xT4", text, g__json=data) for name, (data, text) in wrong.items()]


def cluster_cases() -> list[Case]:
    """One per wrong cluster."""
    shown = "show --devices"
    no_devices = changed(MSR, "maxFPGAs", to=0).replace(b'"maxCPUs": 1', b'"maxCPUs": 0')
    return [
        case("zero devices", "plan gen:chain:3 -d 0xA100", "zero devices; give 1 to"),
        case("no devices", "plan gen:chain:3 --devices=", "the cluster is empty; write for example"),
        case("zero devices (toml)", f"{shown} c.toml", "zero devices", c__toml='name = "x"'),
        case("zero devices (msr)", "plan g.json", "one device at least", g__json=no_devices),
        case("link to an unknown device", f"{shown} c.toml", "'nobody'", c__toml=STRANGER),
        case("unreachable pair", f"{shown} c.toml", "no route from device 'a' to 'b'", c__toml=UNREACHED),
        case("unreachable pair (own)", f"{shown} c.json", "no route from device 'ref0' to", c__json=NO_ROUTE),
        case("memory 0", "plan gen:chain:3 -d A100-0GB", "memory is 0; give the device some"),
        case("memory 0 (toml)", f"{shown} c.toml", "memory is 0", c__toml='[[device]]\nkind="T4"\nmemory=0'),
        case("memory 0 (msr)", "plan g.json", "is 0", g__json=changed(MSR, "maxSizePerFPGA", to=0)),
        case("memory 0 (own)", f"{shown} c.json", "memory_bytes is 0", c__json=cluster(memory_bytes=[0, 5])),
        case(
            "memory beyond all numbers",
            f"{shown} c.toml",
            "not a size between",
            c__toml='[[device]]\nkind="T4"\nmemory=1' + "0" * 400,
        ),
        case("truncated toml", f"{shown} c.toml", "not a cluster in TOML", c__toml="[[device"),
        case("unknown kind", "plan gen:chain:3 -d 2xRTX309", "did you mean 'RTX3090'"),
        case("reserve of everything", "plan gen:chain:3 -d T4 --reserve 1TB", "reserve less"),
    ]


def file_cases() -> list[Case]:
    """Files that cannot be read or written."""
    small = nodes("a")
    bomb = gzip.compress(b" " * 3_000_000)
    return [
        case(
            "above --max-bytes",
            "plan g.json -d T4 --max-bytes 10",
            "the limit is 10 B; raise it with --max-bytes",
            g__json=small,
        ),
        case(
            "above --max-bytes (cluster)",
            "plan gen:chain:3 -d c.toml --max-bytes 1kB",
            "--max-bytes",
            c__toml=TWO_T4 + "#" * 2000,
        ),
        case(
            "above --max-bytes (plan)", "simulate p.json --max-bytes 1kB", "--max-bytes", p__json=" " * 2000
        ),
        case("gzip bomb", "plan g.json.gz -d T4 --max-bytes 1MB", "more than 976.6 KiB", g__json__gz=bomb),
        case(
            "truncated gzip",
            "plan g.json.gz -d T4",
            "not a whole gzip file",
            g__json__gz=gzip.compress(small.encode())[:-5],
        ),
        case(
            "no such source", "plan nowhere.json", "no such file 'nowhere.json'; a source is a file or gen:"
        ),
        case("no such plan", "simulate nowhere.json", "cannot read nowhere.json: No such file"),
        case("a folder as source", "plan .", "cannot read .: Is a directory"),
        case(
            "wrong schema version (plan)",
            "simulate p.json",
            "schema version 7",
            p__json=saved(GRAPH, schema=7),
        ),
        case("wrong noun", "simulate p.json", "holds a graph; simulate needs a placement", p__json=OWN),
        case(
            "a trace is no plan",
            "simulate p.json",
            "is not a Loadmaster JSON file",
            p__json='{"traceEvents": []}',
        ),
        case("no folder for the output", "plan gen:chain:3 --out nowhere/plan.json", "there is no folder"),
        case("a folder as output", "plan gen:chain:3 --trace .", "it is a folder; name a file"),
        case(
            "output over the input",
            "plan g.json -d T4 --out g.json",
            "would overwrite the input g.json",
            g__json=small,
        ),
        case("one file for two outputs", "plan gen:chain:3 --out a.json --trace a.json", "name two files"),
        case(
            "a file in place of the demo's folder",
            "demo --out-dir g.json",
            "cannot make folder g.json",
            g__json=small,
        ),
    ]


def word_cases() -> list[Case]:
    """Options that mean nothing."""
    plan = "plan gen:chain:3"
    return [
        case(
            "unknown algorithm", f"{plan} -a chain_balnce", r"did you mean 'chain_balance'\? \(loadmaster alg"
        ),
        case("unknown algorithm near to nothing", f"{plan} -a zzzz", "known: auto, "),
        case(
            "unknown algorithm (compare)", "compare gen:chain:3 --algorithms auto,rund_robin", "'round_robin'"
        ),
        case("no algorithm (compare)", "compare gen:chain:3 --algorithms ,", "names none"),
        case("budget of nonsense", f"{plan} --budget nonsense", "is not a budget; write seconds as '10s' or"),
        case("budget of nothing", f"{plan} --budget 0x", "not positive"),
        case(
            "budget with a strange letter", f"{plan} --budget 5\N{LATIN SMALL LETTER LONG S}", "not a budget"
        ),
        case("negative seed", f"{plan} --seed=-1", "seed is -1; give a whole number >= 0"),
        case("seed of nonsense", f"{plan} --seed x", "--seed.*see: loadmaster plan --help"),
        case(
            "unknown objective",
            f"{plan} --objective fast",
            "unknown objective 'fast'.*known: step, throughput",
        ),
        case("unknown links", f"{plan} --links sharde", "did you mean 'shared'"),
        case("unknown split", f"{plan} --split cahin", "did you mean 'chain'"),
        case("unknown load", f"{plan} --load sun", "did you mean 'sum'"),
        case("unknown optimizer", f"{plan} --optimizer adma", "did you mean 'adam"),
        case("unknown precision", f"{plan} --precision fp33", "did you mean 'fp32'"),
        case("precision of nothing", f"{plan} --precision mixed", "changes nothing without an optimizer"),
        case("unknown format", f"{plan} --format msrr", "did you mean 'msr'"),
        case(
            "wrong format", "plan g.json -d T4 --format msr", "g.json: not an msr graph", g__json=nodes("a")
        ),
        case("pin without a device", f"{plan} --pin conv.0", "write OP_OR_MODULE=DEVICE"),
        case(
            "pin to an unknown device",
            f"{plan} --pin conv.0=gpu0",
            "unknown device 'gpu0'; known: ref0, ref1",
        ),
        case("pin of an unknown op", f"{plan} --pin conv.9=ref0", "did you mean 'conv.*show SOURCE --ops"),
        case("pin to two devices", f"{plan} --pin conv.0=ref0 --pin conv.0=ref1", "pin it once"),
        case("reserve of nonsense", f"{plan} --reserve lots", "--reserve: 'lots' is not a size"),
        case("limit of nonsense", f"{plan} --max-bytes=-1", "--max-bytes: '-1' is not a size"),
        case("unknown family", "plan gen:fork_jion:10", "did you mean 'fork_join'"),
        case("family without a size", "plan gen:chain", "is not gen:FAMILY:OPS"),
        case("0 ops asked for", "plan gen:chain:0", "0 ops"),
        case(
            "a model that is not there",
            "plan nets/mine.py:build --devices H200",
            "no such file 'nets/mine.py'",
        ),
        case("nothing to show", "show", "nothing to show; name a source"),
        case("a negative number of ops", "show gen:chain:3 --ops=-1", "--ops"),
        case(
            "unknown option",
            f"{plan} --algoritm auto",
            "--algoritm.*--algorithm.*see: loadmaster plan --help",
        ),
        case("missing argument", "plan", "SOURCE.*see: loadmaster plan --help"),
        case("devices without their option", "plan gen:chain:4 2xT4", "extra argument.*with --devices"),
    ]


CASES = {c.name: c for c in (*graph_cases(), *cluster_cases(), *file_cases(), *word_cases())}
IN_PROCESSES = ("cycle", "unreachable pair", "truncated JSON", "no folder for the output", "unknown option")


def prepare(wrong: Case, folder: Path) -> list[str]:
    """Write the files of a case and give its arguments."""
    for name, data in wrong.files.items():
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return wrong.command.split(" ")


def check_refused(command: list[str], message: str, folder: Path, **options: Any) -> None:
    """Run a command with and without --json: both are refused, and leave no file behind."""
    before = contents(folder)
    runs = [start(*command, *more, cwd=folder, **options) for more in ([], ["--json"])]
    for done in map(finish, runs):
        check_said(done.returncode, done.stdout, done.stderr, message)
    assert contents(folder) == before


def check_refused_here(say: Say, command: list[str], message: str, folder: Path) -> None:
    """The same inside this process."""
    before = contents(folder)
    for more in ([], ["--json"]):
        check_said(*say(*command, *more), message)
    assert contents(folder) == before


def check_said(code: object, out: str, err: str, message: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that holds the message."""
    assert (code, out) == (2, ""), err
    lines = [line for line in err.splitlines() if not is_progress(line)]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert re.search(message, lines[0]), lines[0]
    assert len(lines[0]) < 2100


def is_progress(line: str) -> bool:
    """A slow machine says what it is doing."""
    return re.fullmatch(r"(reading|planning|simulating|comparing)\b.* \(\d+ s\)", line) is not None


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", IN_PROCESSES)
def test_bad_input_ends_a_process_with_one_line(name: str, tmp_path: Path) -> None:
    wrong = CASES[name]
    check_refused(prepare(wrong, tmp_path), wrong.message, tmp_path)


@pytest.mark.parametrize("name", [name for name in CASES if name not in IN_PROCESSES])
def test_bad_input_is_refused_in_one_line(name: str, say: Say, tmp_path: Path) -> None:
    wrong = CASES[name]
    check_refused_here(say, prepare(wrong, tmp_path), wrong.message, tmp_path)


def test_a_file_above_the_default_limit_is_refused_without_reading_it(say: Say, tmp_path: Path) -> None:
    with open(tmp_path / "sparse.json", "wb") as file:
        file.truncate(2**30 + 1)  # takes no room on the disk
    code, _, err = say("plan", "sparse.json")
    assert code == 2
    assert "has 1073741825 bytes, the limit is 1073741824 bytes; raise it with --max-bytes" in err


def test_an_unknown_verb_is_answered_with_the_nearest(tmp_path: Path) -> None:
    done = loadmaster("pln", "gen:chain:3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "error: No such command 'pln'. Did you mean 'plan', 'explain'? (see: loadmaster --help)\n"
    )


def test_an_output_that_cannot_be_completed_keeps_the_old_file(say: Say, tmp_path: Path) -> None:
    """The disk is full: no file may grow beyond a kilobyte, so that the scratch file fails halfway."""
    resource = pytest.importorskip("resource", reason="limits of files are set on Unix only")
    command = ["plan", "gen:chain:40", "--algorithm", "round_robin", "--out", "plan.json"]
    assert say(*command)[0] == 0
    check_refused(
        command,
        r"cannot write plan\.json: File too large; the old content, if any, is untouched",
        tmp_path,
        limits=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)),
    )


def test_an_output_that_cannot_be_written_is_refused_before_the_plan_is_searched(
    say: Say, tmp_path: Path
) -> None:
    """The search would take a minute."""
    command = ["plan", "gen:chain:10", "-a", "brute_force", "--budget", "60s", "--out", "nowhere/plan.json"]
    check_refused_here(say, command, "there is no folder", tmp_path)


def test_a_name_with_newlines_and_markup_stays_one_line(say: Say, tmp_path: Path) -> None:
    command = ["plan", "g.json", "-d", "T4"]
    (tmp_path / "g.json").write_text(nodes(EVIL, EVIL))
    check_refused_here(say, command, r"duplicate id '\[bold\]x\[/bold\]\\n<script>'", tmp_path)
    (tmp_path / "g.json").write_text(nodes("a" * 3000, "a" * 3000))
    check_refused_here(say, command, "duplicate id 'aaa.* … .*aaa.*; every|ids are", tmp_path)


def test_a_file_name_that_is_not_unicode_is_named_readably(tmp_path: Path) -> None:
    done = loadmaster("plan", b"\xff\n.json", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(r"error: no such file '\udcff\n.json'; a source is")


def test_an_answer_that_cannot_be_printed_is_an_error(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    for more in ([], ["--json"]):
        with open("/dev/full", "wb") as full:
            done = loadmaster("show", "gen:chain:3", *more, cwd=tmp_path, stdout=full)
        assert done.returncode == 2
        assert done.stderr == "error: cannot write the answer: No space left on device\n"
