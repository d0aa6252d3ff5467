"""The command line on captured models."""

import json
import re
from pathlib import Path

import pytest

from tests.integration.command_line import Say

pytest.importorskip("torch", reason="capture needs the extra [torch]")


def test_show_says_how_a_model_was_captured_and_what_share_was_attributed(say: Say) -> None:
    pytest.importorskip("transformers", reason="hf: models need the extra [hf]")
    Path("net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4, 4), (torch.zeros(2, 4),)\n"
    )
    code, out, _ = say("show", "net.py:build", columns=200)
    assert code == 0
    assert re.search(r"made +joint +\n +100.0 % of backward attributed", out)
    code, out, _ = say("show", "hf:vit-base", "--batch", "1", "--json")
    assert code == 0
    said = json.loads(out)
    assert any(
        isinstance(part, dict)
        and part.get("capture", "").startswith("joint; 100.0 % of backward attributed; from hf:vit-base")
        for part in (said, *said.values())
    )
