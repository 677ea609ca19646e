"""Writing into a directory so that a reader sees the old content or the new, and saying why it cannot be written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eyas.base.errors import DiskFullError, FolderConflictError, InputError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)


def content_hash(data: bytes) -> str:
    """BLAKE2b-128 in hex: the hash of every content in eyas's manifests (checksums of tensors are xxh3-128)."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@contextmanager
def translate_disk_full(directory: Path, need: int | None = None, partial: Path | None = None) -> Iterator[None]:
    """Raise DiskFullError or InputError in place of what a full disk, or one that may not be written, makes of the block.

    Args:
        need: bytes being written; with it any error, such as torch's own, counts as a full disk when fewer are free.
        partial: the half-written file or directory, removed when the block fails.
    """
    try:
        yield
    except Exception as error:
        # Asked before the partial file is gone: it is what fills the disk.
        full = (isinstance(error, OSError) and error.errno in _FULL) or (
            need is not None and directory.exists() and shutil.disk_usage(directory).free < need
        )
        if partial is not None and partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        elif partial is not None:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        if full:
            raise DiskFullError(
                f"no space left in {directory}", "free some space and rerun the same command: what was finished is kept"
            ) from error
        if isinstance(error, OSError) and error.errno in _NOT_ALLOWED and _is_within(error, directory):
            raise InputError(
                f"{directory} cannot be written: {error.strerror}",
                "check the path and its rights, or name another directory",
            ) from error
        raise


def _is_within(error: OSError, directory: Path) -> bool:
    """Whether the error is about a path in (or on the way to) the directory, as far as it says."""
    if not isinstance(error.filename, (str, os.PathLike)):
        return True
    path, root = Path(error.filename).absolute(), directory.absolute()
    return path.is_relative_to(root) or root.is_relative_to(path)


def write_text(path: Path, lines: Iterable[str]) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of one, also after a power cut.

    Raises DiskFullError, or InputError for a directory that cannot be written; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with translate_disk_full(path.parent, partial=temporary):
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_directory(path.parent)


def write_json(path: Path, data: Any) -> None:
    """Write JSON as `write_text` does."""
    write_text(path, [json.dumps(data, indent=2, ensure_ascii=False), "\n"])


def fsync_directory(directory: Path) -> None:
    """Make a rename in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def validate_output_directory(directory: Path, what_fits: set[str]) -> None:
    """Raise FolderConflictError for an output directory with files that no eyas stage put there; it may be missing or empty.

    Args:
        what_fits: file names (or shell patterns) that the stage itself writes.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise FolderConflictError(f"{directory} is a file, expected a directory", "name another --output-dir")
    names = (path.name for path in directory.iterdir())
    foreign = sorted(name for name in names if not any(Path(name).match(pattern) for pattern in what_fits))
    if foreign:
        shown = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
        raise FolderConflictError(
            f"{directory} holds something else: {shown}",
            "name an empty or new --output-dir; eyas mixes nothing in and deletes nothing",
        )
