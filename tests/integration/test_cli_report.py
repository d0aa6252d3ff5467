"""report, explain, diff, whatif, export and import from the command line; their tables at 80 and at 140
columns."""

import json
from pathlib import Path

import pytest

from loadmaster import api
from loadmaster.core.timeline import Timeline
from tests.browser.pages import hostile, measured_of, two_devices
from tests.integration.command_line import Say, ask

SNAPSHOTS = Path(__file__).resolve().parents[1] / "golden" / "tables"
RENEW = "if this is meant: LOADMASTER_RENEW=1 pytest tests/integration/test_cli_report.py"


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning takes no time; budgets that count plans do not look at it."""
    monkeypatch.setattr("time.perf_counter", lambda: 100.0)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A plan, the same ops elsewhere, a measured timeline."""
    from tests.builders import plan_on

    one = two_devices()
    api.save(one, tmp_path / "a.json")
    api.save(api.plan(one.problem, algorithm=plan_on([0, 0, 1, 1, 1, 1])), tmp_path / "b.json")
    api.save(measured_of(one), tmp_path / "measured.json")
    return tmp_path


def expect(name: str, shown: str) -> None:
    import os

    path = SNAPSHOTS / name
    if os.environ.get("LOADMASTER_RENEW"):
        SNAPSHOTS.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8"), RENEW


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("explain", ["explain", "a.json", "--budget", "20x"]),
        ("explain_op", ["explain", "a.json", "net.part1", "--budget", "20x"]),
        ("diff", ["diff", "a.json", "b.json"]),
        ("whatif", ["whatif", "a.json", "--set", "ref0-ref1.rate=2x", "--remove", "ref1", "--budget", "20x"]),
        ("sweep", ["whatif", "a.json", "--sweep", "ref0.memory=2MB..8MB", "--budget", "5x"]),
    ],
)
def test_tables_are_as_they_were(say: Say, files: Path, name: str, words: list[str], columns: int) -> None:
    code, out, _ = say(*words, columns=columns)
    assert code == 0
    assert max(len(line) for line in out.splitlines() if "  " in line) <= columns
    expect(f"{name}-{columns}.txt", out)


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plan", ["plan", "gen:transformer:60", "--devices", "V100-4GB, T4-5GB", "-a", "heft", "-b", "20x"]),
        (
            "plan_pipeline",
            [
                "plan",
                "gen:transformer:60",
                "--devices",
                "V100, T4",
                "--pipeline",
                "1f1b:4",
                "-a",
                "linear_dp",
            ],
        ),
        ("plan_nothing_fits", ["plan", "gen:transformer:60", "--devices", "T4-2GB, T4-2GB", "-a", "m_etf"]),
        ("compare", ["compare", "gen:transformer:60", "--devices", "V100, T4", "-a", "heft,m_etf,m_topo"]),
        ("fit", ["fit", "gen:transformer:60", "--devices", "V100-4GB, T4-8GB"]),
        ("simulate", ["simulate", "a.json"]),
        ("show", ["show", "gen:transformer:60", "--devices", "V100, T4 ; intra=pcie4"]),
        ("show_plan", ["show", "a.json"]),
        ("policies", ["advise", "policies"]),
    ],
)
def test_tables_of_plans_and_questions_are_as_they_were(
    stopped_clock: None, say: Say, files: Path, name: str, words: list[str], columns: int
) -> None:
    budget = ["-b", "20x"] if words[0] in ("plan", "compare", "fit") and "-b" not in words else []
    code, out, err = say(*words, *budget, columns=columns)
    assert code == (1 if "nothing" in name else 0), err
    assert max(len(line.rstrip()) for line in out.splitlines() if "  " in line) <= columns
    expect(f"{name}-{columns}.txt", out)


def test_a_page_is_written_with_what_was_measured_and_others_beside_it(say: Say, files: Path) -> None:
    found = ask(
        say, "report", "a.json", "--measured", "measured.json", "--compare", "b.json", "--out", "page.html"
    )
    page = (files / "page.html").read_text(encoding="utf-8")
    assert found["num_bytes"] == (files / "page.html").stat().st_size
    assert "Predicted above measured" in page
    assert "algorithms" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_an_answer_to_another_question_is_not_compared(say: Say, files: Path) -> None:
    api.save(hostile(), files / "c.json")
    code, _, err = say("report", "a.json", "--compare", "c.json")
    assert code == 2
    assert "another question" in err


def test_a_plan_that_does_not_fit_is_drawn_with_the_reason(say: Say, tmp_path: Path) -> None:
    answer = api.plan("gen:transformer:300", "T4-1GB, T4-1GB", budget="20x")
    assert not answer.fits
    api.save(answer, tmp_path / "x.json")
    code, _, _ = say("report", "x.json", "--out", "x.html")
    assert code == 0
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "does not fit" in page
    code, out, _ = say("explain", "x.json", "--budget", "10x")
    assert code == 0
    assert "plan fits" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "measured.json"], "holds a timeline"),
        (["report", "nothing.json"], "cannot read"),
        (["report", "a.json", "--out", "a.json"], "would overwrite"),
        (["report", "."], "it has no journal"),
        (["explain", "a.json", "op9"], "unknown op or module 'op9'"),
        (["whatif", "a.json"], "nothing is changed"),
        (["whatif", "a.json", "--sweep", "batch"], "write for example"),
        (["export", "a.json", "--to", "word"], "unknown format 'word'"),
        (["import", "a.json", "--plan", "a.json", "--out", "o.json"], "a file of Loadmaster already"),
        (["report", "a.json", "--measured", "b.json"], "a measured timeline is needed"),
    ],
)
def test_wrong_input_is_one_line(say: Say, files: Path, words: list[str], said: str) -> None:
    code, _, err = say(*words)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_an_export_goes_to_stdout_and_its_losses_to_stderr(say: Say, files: Path) -> None:
    code, out, err = say("export", "a.json", "--to", "nodelink")
    assert code == 0
    assert len(json.loads(out)["nodes"]) == 6
    assert "not in nodelink" in err


def test_an_own_trace_becomes_a_measured_timeline(say: Say, files: Path) -> None:
    assert say("export", "a.json", "--to", "chrome", "--out", "t.json")[0] == 0
    found = ask(say, "import", "t.json", "--plan", "a.json", "--out", "seen.json")
    assert found["step_s"] == 8.0
    assert isinstance(api.load(files / "seen.json"), Timeline)


def test_what_whatif_saves_is_the_plan_of_its_last_row(say: Say, files: Path) -> None:
    found = ask(
        say,
        "whatif",
        "a.json",
        "--set",
        "ref1.speed=2x",
        "--out",
        "w.json",
        "--report",
        "w.html",
        "--budget",
        "20x",
    )
    saved = api.load(files / "w.json")
    assert saved.score_s == found["rows"][-1]["time_s"]  # type: ignore[union-attr]
    assert "What if" in (files / "w.html").read_text(encoding="utf-8")
