"""Bytes as files: read under a size limit, written whole or not at all.

A name that ends in `.gz` is compressed. A file is replaced only when the new one is complete. A device such
as /dev/null is written to, never replaced, and of a symbolic link the file it points at.
"""

import gzip
import os
import tempfile
import zlib
from pathlib import Path
from typing import IO

from loadmaster.core.errors import FileError, FormatError, InputError
from loadmaster.core.units import format_bytes

MAX_BYTES = 2**30
_CHUNK_BYTES = 2**20
_MOST_UNPACKED = 200  # times the size of a .gz file, where that is much: columns take a tenth
_LEAST_BOMB_BYTES = 2**26


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a file, decompressed if its name ends in .gz, refused above `max_bytes`."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise _too_large_error(path, size, max_bytes)
            if str(path).endswith(".gz"):
                most = min(max_bytes, max(_LEAST_BOMB_BYTES, _MOST_UNPACKED * size))
                with gzip.GzipFile(fileobj=file) as unzipped:
                    data = _read_at_most(unzipped, most + 1, _CHUNK_BYTES)
                if most < len(data) and most < max_bytes:
                    raise FileError(
                        f"{path} unpacks to more than {_MOST_UNPACKED} times its size,"
                        f" {format_bytes(size)}, which no Loadmaster file does; unpack it"
                        " yourself if you trust it"
                    )
            else:
                data = _read_at_most(file, max_bytes + 1, max(size + 1, _CHUNK_BYTES))
    except (OSError, ValueError) as problem:  # ValueError: a name with a NUL in it
        if isinstance(problem, InputError):
            raise
        raise FileError(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None
    except (EOFError, zlib.error) as problem:
        raise FormatError(f"{path} is not a whole gzip file: {problem}") from None
    if len(data) > max_bytes:
        raise _too_large_error(path, None, max_bytes)
    return data


def _read_at_most(stream: IO[bytes] | gzip.GzipFile, limit: int, chunk_bytes: int) -> bytes:
    """Up to `limit` bytes; memory is taken as they come, not as they are allowed."""
    parts: list[bytes] = []
    left = limit
    while left > 0 and (part := stream.read(min(left, chunk_bytes))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def write_bytes(data: bytes, path: str | os.PathLike[str]) -> None:
    """Write a file whole or not at all: an old file stays until the new one is complete."""
    require_writable(path)
    target = _resolve_target(path)
    content = gzip.compress(data, 6, mtime=0) if target.name.endswith(".gz") else data
    scratch: str | None = None
    try:
        if _is_special(target):
            target.write_bytes(content)
            return
        handle, scratch = tempfile.mkstemp(prefix=".loadmaster-", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_current_umask())
        os.replace(scratch, target)
    except OSError as problem:
        raise _unwritable_error(path, problem.strerror or str(problem)) from None
    finally:
        if scratch is not None and os.path.exists(scratch):
            os.unlink(scratch)


def require_writable(path: str | os.PathLike[str]) -> None:
    """Refuse before any work is done what `write_bytes` would refuse after it."""
    try:
        target = _resolve_target(path)
        if target.is_dir():
            raise FileError(f"cannot write {path}: it is a folder; name a file")
        if target.exists() and not os.access(target, os.W_OK):
            raise _unwritable_error(path, "the file is read-only")
        if not target.parent.is_dir():
            raise _unwritable_error(path, f"there is no folder {target.parent}")
        if not _is_special(target):
            with tempfile.TemporaryFile(dir=target.parent):
                return
    except (OSError, ValueError) as problem:  # ValueError: a name with a NUL in it
        if isinstance(problem, InputError):
            raise
        raise _unwritable_error(path, getattr(problem, "strerror", None) or str(problem)) from None


def _resolve_target(path: str | os.PathLike[str]) -> Path:
    """What is to be written: a device or pipe as it is named, else the file that a link points at."""
    return Path(path) if _is_special(Path(path)) else Path(os.path.realpath(path))


def _is_special(target: Path) -> bool:
    """Whether this is a device or a pipe: something to write to, which must not be replaced."""
    return target.exists() and not target.is_file()


def _unwritable_error(path: str | os.PathLike[str], reason: str) -> FileError:
    return FileError(f"cannot write {path}: {reason}; the old content, if any, is untouched")


def _current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _too_large_error(path: str | os.PathLike[str], size: int | None, max_bytes: int) -> FileError:
    """`size` is None where reading stopped at the limit."""
    limit = format_bytes(max_bytes)
    have = f"more than {limit}" if size is None else format_bytes(size)
    if have == limit:  # the difference is lost in rounding
        have, limit = f"{size} bytes", f"{max_bytes} bytes"
    return FileError(f"{path} has {have}, the limit is {limit}; raise it with --max-bytes")
