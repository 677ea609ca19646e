"""A full disk, which torch, safetensors and Python each report in words of their own, as one error that says what to do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from eyas.base.errors import DiskFullError, is_disk_full

REMEDY = "free some space and run the same command again: what was finished is kept"


@contextmanager
def disk_full_named(folder: Path, need: int | None = None, partial: Path | None = None) -> Iterator[None]:
    """Raise DiskFullError in place of any error that a full disk causes while `folder` is written to.

    Args:
        need: bytes being written in the block; with it an error of torch's or safetensors' own counts when fewer are free.
        partial: the half-written file or folder, removed when the block fails.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        full = is_disk_full(error) or (need is not None and folder.exists() and shutil.disk_usage(folder).free < need)
        if partial is not None and partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        elif partial is not None:
            partial.unlink(missing_ok=True)
        if full:
            raise DiskFullError(f"no space left in {folder}", REMEDY) from error
        raise
