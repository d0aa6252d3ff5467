"""Tables of `loadmaster fit` where there is little room."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from loadmaster import api
from loadmaster.core.answers.fit_answer import Fit, ModuleParts, Parts
from loadmaster.report.answer_text import print_answer

_EACH = Parts(287 << 10, 256 << 10, 570 << 10, 33 << 10, 512 << 10, 140 << 10, 1798 << 10)


@pytest.fixture(scope="module")
def answer() -> Fit:
    """An answer that has something of every part."""
    found = api.fit("gen:transformer:12", "T4, T4", budget="5x", quick=True)
    names = ("", "batch_normalization", "batch_normalization.moments")
    modules = tuple(ModuleParts(name, depth, _EACH) for depth, name in enumerate(names))
    assert found.cluster is not None
    return replace(found, modules=modules, cluster=replace(found.cluster, parts=(_EACH, _EACH)))


def _lines(answer: Fit, width: int) -> list[str]:
    file = io.StringIO()
    print_answer(answer, Console(file=file, width=width, markup=False, highlight=False, emoji=False))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_names_and_sizes_stand_in_one_line_at_any_width(answer: Fit, width: int) -> None:
    lines = _lines(answer, width)
    for name in ("whole model", " batch_normalization", "  moments"):
        assert any(line.startswith(f"{name} ") and "1.8 MiB" in line for line in lines)
    for name in ("gpu0", "gpu1"):
        assert any(line.startswith(name) and "570.0 KiB" in line and "1.8 MiB" in line for line in lines)
    assert any("other" in line for line in lines) == (width < 140)


def test_other_parts_are_what_is_not_shown(answer: Fit) -> None:
    line = next(line for line in _lines(answer, 80) if line.startswith("whole model"))
    head = next(line for line in _lines(answer, 80) if line.startswith("module"))
    assert head.split() == ["module", "optimizer", "workspace", "other", "all"]
    assert line.split()[-4:-2] == ["716.0", "KiB"]  # of 1.8 MiB


def test_a_part_of_next_to_nothing_is_no_column(answer: Fit) -> None:
    few = Parts(287 << 20, 4, 570 << 20, 33 << 20, 0, 0, (890 << 20) + 4)  # the gradient of the loss alone
    rows = tuple(replace(row, parts=few) for row in answer.modules)
    head = next(line for line in _lines(replace(answer, modules=rows), 140) if line.startswith("module"))
    assert "gradients" not in head
    assert "optimizer" in head
