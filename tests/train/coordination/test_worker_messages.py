"""Why a worker did not start is in the record: an import that failed, by name."""

import sys
from pathlib import Path
from typing import Any

import pytest

from loadmaster.core.errors import InputError
from loadmaster.train.study import Study
from loadmaster.train.workers.ray_workers import _import_ray, explain_ray_error
from tests.train.plain_engine import Plain
from tests.train.small_trials import trial


def test_an_import_that_fails_inside_of_ray_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/__init__.py").write_text("import no_such_package_of_ray")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        InputError, match=r"Ray is installed, but cannot be imported: .*no_such_package_of_ray"
    ):
        _import_ray()


def test_a_ray_error_is_told_with_the_exception_it_ends_in() -> None:
    text = (
        "The actor died because of an error raised in its creation task, \x1b[36mray::_WorkerActor\x1b[39m\n"
        "  File \"x.py\", line 3, in f\n    import mine\nModuleNotFoundError: No module named 'mine'\n"
    )
    assert explain_ray_error(Exception(text)).endswith("ModuleNotFoundError: No module named 'mine'")
    assert explain_ray_error(Exception("")) == "Exception"


@pytest.mark.slow
def test_an_import_that_fails_in_a_process_is_in_the_record(tmp_path: Path) -> None:
    class Unreadable:
        def __call__(self) -> Any:
            return trial("x").data()

        def __reduce__(self) -> Any:
            return __import__, ("no_such_package",)

    one = trial("a", data=Unreadable())
    result = Study([one], dir=tmp_path, engine=Plain(), devices=["cpu#0"], launcher="processes").fit()
    assert result["a"].error_kind == "worker"
    assert "ModuleNotFoundError: No module named 'no_such_package'" in result["a"].error
