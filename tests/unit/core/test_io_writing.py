"""Files are written whole or not at all; devices, pipes and links stay what they are."""

import os
from pathlib import Path

import pytest

from loadmaster.core import files, io
from loadmaster.core.errors import FileError
from loadmaster.core.plan import Plan
from tests.builders import plan_on

AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def unchanged(folder: Path, path: Path, old: bytes) -> bool:
    """Whether the old file is as it was and nothing else lies beside it."""
    return path.read_bytes() == old and list(folder.iterdir()) == [path]


def test_a_write_that_fails_halfway_keeps_the_old_file(tmp_path: Path) -> None:
    """The disk is full: a file may not grow beyond 4 KiB, so that writing the scratch file fails."""
    import resource

    path = tmp_path / "plan.json"
    io.save(plan_on([0]), path)
    old = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(FileError, match=r"cannot write .*plan\.json: File too large; the old"):
            io.save(plan_on([0] * 100_000), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert unchanged(tmp_path, path, old)


def test_a_full_device_is_a_file_error_and_stays_a_device() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with pytest.raises(FileError, match="cannot write /dev/full: No space left on device"):
        io.save(plan_on([0]), "/dev/full")
    assert not os.path.isfile("/dev/full")


def test_a_device_is_written_to_and_never_replaced() -> None:
    io.save(plan_on([0]), os.devnull)
    assert not os.path.isfile(os.devnull)


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    from threading import Thread

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=io.save, args=(plan_on([0]), pipe))
    writer.start()
    assert pipe.read_bytes() == io.encode(plan_on([0]))
    writer.join()


def test_of_a_link_the_file_it_points_at_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    io.save(plan_on([0]), link)
    assert link.is_symlink()
    assert isinstance(io.load(target), Plan)


def test_an_old_file_keeps_its_mode_and_a_new_one_follows_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    before = os.umask(0o027)
    try:
        io.save(plan_on([0]), path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o604)
    io.save(plan_on([1]), path)
    assert path.stat().st_mode & 0o777 == 0o604


@pytest.mark.parametrize("name", ["missing/plan.json", "", ".", "a\0b", "x" * 5000, "file/plan.json"])
def test_what_cannot_be_written_is_refused_before_and_after_the_work(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    for attempt in (files.require_writable, lambda path: io.save(plan_on([0]), path)):
        with pytest.raises(FileError, match="cannot write"):
            attempt(f"{tmp_path}/{name}")
    assert unchanged(tmp_path, tmp_path / "file", b"old")


@pytest.mark.skipif(AS_ROOT, reason="root may write everywhere")
def test_a_read_only_file_or_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")
    path.chmod(0o400)
    with pytest.raises(FileError, match="the file is read-only"):
        files.require_writable(path)
    path.chmod(0o600)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(FileError, match="Permission denied"):
            io.save(plan_on([0]), path)
    finally:
        tmp_path.chmod(0o700)
    assert unchanged(tmp_path, path, b"old")


def test_asking_whether_a_file_can_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    files.require_writable(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []
