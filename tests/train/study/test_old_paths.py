"""Paths that earlier versions documented still work, with a warning that names the new ones."""

import importlib

import pytest

import loadmaster.train as lt
from loadmaster.train.backbone.group import open_group, steps


def test_a_group_is_opened_by_public_names() -> None:
    assert {"open_group", "group_steps"} <= set(lt.__all__)
    assert lt.open_group is open_group
    assert lt.group_steps is steps


@pytest.mark.parametrize(
    ("old", "home", "names"),
    [
        ("loadmaster.train.group", "loadmaster.train.backbone.group", ["open_group", "steps", "Group"]),
        ("loadmaster.train.cuda_device", "loadmaster.shards.device.cuda_device", ["CudaDevice"]),
    ],
)
def test_old_paths_still_work_and_warn(old: str, home: str, names: list[str]) -> None:
    module = importlib.import_module(old)  # without a warning, which would be an error here
    for name in names:
        with pytest.warns(DeprecationWarning, match=f"{old} is an old path; import") as told:
            assert getattr(module, name) is getattr(importlib.import_module(home), name)
        assert told[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_importing_a_name_from_an_old_path_warns_where_it_stands() -> None:
    with pytest.warns(DeprecationWarning, match="import open_group and group_steps") as told:
        from loadmaster.train.group import open_group as old
    assert old is open_group
    assert told[0].filename == __file__
