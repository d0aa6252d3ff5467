"""How hot loops are compiled: numba, with a cache on disk that is never stale and always writable.

numba is imported here and by files of kernels only, so that it loads only when a kernel is needed. Two of
its habits need care. It checks a cached function against its own source file only, although kernels call
kernels in other files: so the folder's name carries a digest of every file that has kernels. And it gives up
where the folder is read-only: so the first writable one of several is taken.
"""

import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, overload

import numba

F = TypeVar("F", bound=Callable[..., Any])
_PACKAGE = Path(__file__).resolve().parents[1]


@overload
def kernel(function: F) -> F: ...


@overload
def kernel(*, parallel: bool = False, nogil: bool = False) -> Callable[[F], F]: ...


def kernel(function: F | None = None, *, parallel: bool = False, nogil: bool = False) -> F | Callable[[F], F]:
    """Compile a function with numba when it is first called, and keep the result on disk."""
    if function is None:
        return lambda given: _compile_on_call(given, parallel=parallel, nogil=nogil)
    return _compile_on_call(function)


def _compile_on_call(function: F, **options: bool) -> F:
    before = numba.config.CACHE_DIR  # read by numba at decoration only; put back for other users of numba
    numba.config.CACHE_DIR = str(cache_folder())
    try:
        compiled: F = numba.njit(cache=True, error_model="numpy", **options)(function)
    finally:
        numba.config.CACHE_DIR = before
    return compiled


def kernel_part(function: F) -> F:
    """A piece of a kernel under a name of its own: written into whoever calls it, so that no call is left."""
    made: F = numba.njit(inline="always", error_model="numpy")(function)
    return made


@cache
def cache_folder() -> Path:
    """Where compiled kernels are kept: the first of these that can be written."""
    label = f"kernels-{_sources_digest()}"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    own = os.environ.get("NUMBA_CACHE_DIR")
    choices = [
        *([Path(own)] if own else []),
        _PACKAGE / "__pycache__",
        Path(home) / "loadmaster",
        Path(tempfile.gettempdir()) / f"loadmaster-{os.getuid()}",
    ]
    for folder in choices:
        if _is_writable(folder / label):
            return folder / label
    return Path(tempfile.mkdtemp(prefix="loadmaster-")) / label


def is_warm(part: str) -> bool:
    """Whether the kernels of a part ('simulator', 'placers') were compiled on this machine before."""
    return _marker_path(part).exists()


def mark_warm(part: str) -> None:
    """Remember that the kernels of a part are compiled; failing to remember only costs time."""
    try:
        _marker_path(part).touch()
    except OSError:
        return


def _marker_path(part: str) -> Path:
    maker = f"{_PACKAGE} {sys.version} {numba.__version__} {platform.processor()} {numba.config.CPU_NAME}"
    return cache_folder() / f"{part}-warm-{hashlib.sha256(maker.encode()).hexdigest()[:16]}"


def _sources_digest() -> str:
    sha = hashlib.sha256()
    for source in sorted(_PACKAGE.rglob("*.py")):
        content = source.read_bytes()
        if b"\n@kernel" in content:
            sha.update(f"{source.relative_to(_PACKAGE)}\0{len(content)}\0".encode())
            sha.update(content)
    return sha.hexdigest()[:16]


def _is_writable(folder: Path) -> bool:
    """Whether a file can be made in `folder` (made if need be); a stranger's folder is not trusted."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid != os.getuid():
            return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
