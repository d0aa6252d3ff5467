"""The command line on all sorts of terminals: names as data, alphabets, widths, pipes, signals."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import loadmaster as lm
from tests.integration.command_line import (
    COMMAND,
    Say,
    answer,
    ask,
    environment,
    finish,
    loadmaster,
    start,
    write_graph,
)

EVIL = "[bold]x[/bold]\n<script>\x1b[31m"
SHOWN = r"[bold]x[/bold]\n<script>\x1b[31m"
DEMO_DEVICES = "V100-16GB, T4, RTX2080, cpu-64GB"


# ---- names are data


def test_names_with_markup_and_newlines_are_shown_as_data_in_every_table(say: Say) -> None:
    ops = [{"id": name, "time_ms": 1, "memory": 9e9, "module": EVIL} for name in (EVIL, "b")]
    write_graph(Path("g.json"), *ops, links=[{"source": EVIL, "target": "b", "bytes": 8}], name=EVIL)
    evil = json.dumps(EVIL)
    Path("c.toml").write_text(
        f'[[device]]\nname = {evil}\nkind = "T4"\n[[device]]\nname = "d"\nkind = "T4"\n'
    )
    commands = [
        ("plan", "g.json", "-d", "c.toml", "--out", "p.json", "--trace", "t.json"),
        ("plan", "g.json", "-d", "c.toml", "--pin", f"{EVIL}=d"),
        ("plan", "g.json", "-d", "c.toml", "--reserve", "10GB"),
        ("compare", "g.json", "-d", "c.toml", "--budget", "9x"),
        ("compare", "g.json", "-d", "c.toml", "--reserve", "10GB"),
        ("simulate", "p.json"),
        ("show", "p.json"),
        ("show", "g.json", "--ops", "5"),
        ("show", "--devices", "c.toml"),
    ]
    for command in commands:
        _, out, err = say(*command, columns=200)
        assert SHOWN in out, command
        for raw in (EVIL, "\x1b", "<script>\n"):
            assert raw not in out + err, command
    assert ask(say, "show", "g.json", "--ops", "1")["graph"]["ops"][0]["name"] == EVIL
    assert any(event["name"] == EVIL for event in json.loads(Path("t.json").read_text())["traceEvents"])


def test_file_names_may_hold_anything(say: Say, tmp_path: Path) -> None:
    write_graph(tmp_path / "[red]g\n.json", {"id": "a", "time_ms": 1})
    code, out, _ = say("plan", "[red]g\n.json", "-d", "T4", "--out", "[bold]p\n.json")
    assert code == 0
    assert r"plan written to [bold]p\n.json" in out
    bytes_name = b"\xff.json"
    (tmp_path / "[red]g\n.json").rename(os.fsdecode(os.fsencode(tmp_path) + b"/" + bytes_name))
    said = answer("plan", bytes_name, "-d", "T4", "--out", b"\xfe.json", cwd=tmp_path)
    assert said["source"] == "\udcff.json"
    assert said["graph"] == "\N{REPLACEMENT CHARACTER}"
    assert isinstance(lm.load(os.fsdecode(b"\xfe.json")), lm.Placement)


# ---- terminals and signals


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_a_terminal_of_another_alphabet_is_served(encoding: str, tmp_path: Path) -> None:
    write_graph(tmp_path / "g.json", {"id": "日本語", "time_ms": 1}, {"id": "b", "time_ms": 1}, name="ü")
    env = {"PYTHONIOENCODING": encoding}
    command = ["show", "g.json", "--ops", "2"]
    plain, machine = (start(*command, *more, cwd=tmp_path, env=env) for more in ([], ["--json"]))
    out, _ = plain.communicate(timeout=60)
    document, _ = machine.communicate(timeout=60)
    assert plain.returncode == machine.returncode == 0
    text = out.decode(encoding)
    assert ("日本語" if encoding == "utf-16" else r"\u65e5\u672c\u8a9e") in text
    assert ("ü" in text) == (encoding != "ascii")
    assert json.loads(document.decode(encoding))["graph"]["ops"][0]["name"] == "日本語"


def test_bars_and_dots_have_stand_ins_where_they_cannot_be_shown(tmp_path: Path) -> None:
    env = {"PYTHONIOENCODING": "ascii"}
    done = loadmaster("plan", "gen:chain:10", "--budget", "20x", cwd=tmp_path, env=env)
    assert done.returncode == 0
    assert re.search(r"ref0 .*MiB  #+\.*", done.stdout)
    assert "\\u" not in done.stdout


def test_a_reader_that_went_away_ends_it_quietly(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        for more in ([], ["--json"]):
            done = loadmaster("show", "gen:chain:10", *more, cwd=tmp_path, stdout=writer)
            assert (done.returncode, done.stderr) == (141, "")
    finally:
        os.close(writer)


def test_piping_into_head_shows_the_first_line_and_no_traceback(tmp_path: Path) -> None:
    script = f"'{COMMAND[0]}' \"$@\" | head -1"
    done = subprocess.run(
        ["sh", "-c", script, "sh", *COMMAND[1:], "show", "--devices", "256xA100", "--json"],
        capture_output=True,
        env=environment(),
        cwd=tmp_path,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == (b"{\n", b"")


def test_ctrl_c_ends_a_long_search_with_130_and_one_word(tmp_path: Path) -> None:
    process = start("compare", "gen:chain:10", "-a", "brute_force", "--budget", "100s", cwd=tmp_path)
    assert process.stderr is not None
    seen = b""
    while b"brute force:" not in seen:  # the first progress line of the search itself
        line = process.stderr.readline()
        assert line, seen
        seen += line
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_it_loads_is_answered_in_one_word(tmp_path: Path) -> None:
    script = "import os, signal, sys; sys.modules['typer'] = None; from loadmaster.cli import app;"
    script += "app._run = lambda arguments: os.kill(os.getpid(), signal.SIGINT); app.main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"interrupted\n")


@pytest.mark.parametrize("verb", ["plan", "compare", "show"])
def test_sixty_columns_are_enough(verb: str, say: Say) -> None:
    budget = [] if verb == "show" else ["--budget", "50x"]
    _, out, _ = say(verb, "gen:transformer:300", "--devices", DEMO_DEVICES, *budget, columns=60)
    table = [line for line in out.splitlines() if not re.match(r"\w+: |plan written", line)]
    assert max(map(len, table)) <= 60
    if verb == "show":
        assert "bfloat16" in out
        return
    for name in ("single_device", "chain_balance", "fastest_device", "round_robin"):
        assert name in out
    assert "…" not in out


def test_on_a_terminal_there_is_colour_a_spinner_and_a_clean_end(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "plan", "gen:chain:10", "--budget", "20x"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        env=environment({"TERM": "xterm"}),
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # how a terminal says that nobody is left
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"planning" in seen
    assert b"\x1b[32mfeasible" in seen
    assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h")  # the cursor is shown again


def test_long_work_says_so_on_stderr_where_there_is_no_terminal(tmp_path: Path) -> None:
    command = ("plan", "gen:chain:10", "-a", "brute_force", "--budget", "4s", "--json")
    done = loadmaster(*command, cwd=tmp_path)
    assert done.returncode in (0, 1)  # a slow machine may find nothing that fits in time
    assert json.loads(done.stdout)["algorithm"] == "brute_force"
    assert re.search(r"^planning: brute force: \d+ plans \(\d+ s\)$", done.stderr, re.MULTILINE)
