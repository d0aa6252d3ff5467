"""What the command line says while it works, where no terminal shows a spinner."""

import pytest

from loadmaster.cli.console import progress


def test_while_compiling_a_line_is_not_followed_by_another_at_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadmaster.cli.console._FIRST_LINE_S", 0.01)
    with progress("planning") as say:
        for done in range(30):
            say(f"compiling: {done + 1} of 30", done / 30)
    said = capfd.readouterr().err.splitlines()
    assert said == ["planning: compiling: 1 of 30 (0 s)"]
