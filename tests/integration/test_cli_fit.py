"""loadmaster fit: its answers, its tables, its exit codes."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from tests.integration.command_line import Say, ask

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "fit.schema.json"


def valid(document: object) -> None:
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))


def test_that_it_does_not_fit_is_an_answer_with_exit_code_0(say: Say) -> None:
    said = ask(say, "fit", "gen:transformer:1500", "--devices", "RTX2080")
    valid(said)
    assert (said["loadmaster"], said["schema"], said["fits"]) == ("fit", 1, False)
    assert said["parts"]["total_bytes"] == sum(
        size for name, size in said["parts"].items() if name != "total_bytes"
    )
    for part, peak in zip(said["cluster"]["parts"], said["cluster"]["peak_bytes"], strict=True):
        assert part["total_bytes"] == peak
    assert said["cheapest"] in {change["name"] for change in said["changes"] if change["fits"]}


def test_the_tables_say_what_is_held_and_what_would_help(say: Say) -> None:
    code, out, _ = say("fit", "gen:transformer:1500", "--devices", "RTX2080, T4")
    assert code == 0
    for word in (
        "each device alone",
        "all devices, by a plan",
        "weights",
        "optimizer",
        "whole model",
        "gpu1",
    ):
        assert word in out
    assert re.search(r"needs +\d+\.\d GiB on one device", out)
    assert re.search(r"0 \(12 alike\)", out)


def test_without_devices_the_presets_are_listed(say: Say, tmp_path: Path) -> None:
    import loadmaster as lm

    lm.save(lm.problem("gen:transformer:200", "H200").graph, tmp_path / "graph.json")
    said = ask(say, "fit", "graph.json")
    valid(said)
    assert said["fits"] is None
    assert {"H200", "T4", "cpu64"} <= {row["kind"] for row in said["presets"]}
    code, out, _ = say("fit", "graph.json")
    assert code == 0
    assert "every preset alone" in out


def test_quick_asks_for_neither_batch_nor_change(say: Say) -> None:
    said = ask(say, "fit", "gen:transformer:1500", "-d", "RTX2080", "--quick")
    valid(said)
    assert said["changes"] == []
    assert said["devices"][0]["largest"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "nowhere.json"], "no such file"),
        (["fit", "gen:chain:10", "-d", "NoSuch"], "unknown device kind"),
        (["fit", "gen:chain:10", "--batch", "4"], "has no batch"),
        (["fit", "gen:chain:10", "--reserve", "much"], "--reserve"),
        (["fit", "gen:chain:10", "--budget", "soon"], "not a budget"),
        (["fit", "gen:transformer:200", "-d", "T4", "--optimizer", "magic"], "unknown optimizer"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_line(say: Say, arguments: list[str], message: str) -> None:
    code, out, err = say(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_model_without_devices_gets_a_table_with_its_largest_batches(say: Say, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="capture needs the extra [torch]")
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "def build(batch=4):\n"
        "    with torch.device('meta'):\n"
        "        return torch.nn.Linear(64, 4096), (torch.empty(batch, 64),)\n"
    )
    said = ask(say, "fit", "net.py:build", "--batch", "4", "--precision", "bf16")
    valid(said)
    batches = {row["kind"]: row["largest"]["batch"] for row in said["presets"]}
    assert batches["H200"] > batches["V100"] > batches["RTX2080"] > 4
    assert not any(row["largest"]["confirmed"] for row in said["presets"])
