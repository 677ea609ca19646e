"""One run at a time writes into an output directory: the lock, and who holds it.

A lock is `flock` on a file that says who took it; it goes with the process, however that ends. The file stays: removing it would let
a third process lock a new one while a second holds the old.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from eyas.base.errors import FolderConflictError
from eyas.base.files import translate_disk_full, validate_output_directory
from eyas.base.manifest import now
from eyas.base.part import WHOLE, Part


def lock_name(part: Part) -> str:
    """`.lock`, or `.lock-s003` for a part: parts write side by side, each into shards of its own name."""
    return f".lock-{part.name}" if part.name else ".lock"


@contextmanager
def lock_directory(directory: Path, part: Part = WHOLE) -> Iterator[None]:
    """Hold an output directory for one run.

    Beside a part only other parts of the same n may write: any other run would make samples of it a second time.

    Raises FolderConflictError naming the run, process and host that hold it; InputError or DiskFullError when nothing can be written there.
    """
    own = directory / lock_name(part)
    with ExitStack() as held:
        with manifest_lock(directory):
            for other in _lock_files(directory):
                holder = _holder(other) if other != own else None
                if holder is not None and (holder.get("parts", 1) != part.of or part.of == 1):
                    raise _is_held(directory, holder)
            with translate_disk_full(directory):
                file = held.enter_context(open(own, "a+", encoding="utf-8"))
                if not _take(file):
                    raise _is_held(directory, _holder(own) or {})
                file.truncate(0)
                who = {"run": os.environ.get("EYAS_RUN_ID"), "pid": os.getpid(), "host": socket.gethostname()}
                json.dump({**who, "since": now(), "parts": part.of, "command": " ".join(sys.argv)}, file)
                file.flush()
        yield


def abandoned(directory: Path, pattern: str) -> list[Path]:
    """Files of writers (`shard-<part>r000...`, `fault-<part>r000...`) that fit a shell pattern and that no run is writing any more.

    A part that is being written keeps its own, a run without parts keeps all.
    """
    files = sorted(directory.glob(pattern))
    if not files or not _lock_files(directory):
        return files
    with manifest_lock(directory):  # a run that begins must not find its lock taken by this look
        held = [path.name for path in _lock_files(directory) if _holder(path) is not None]
    if lock_name(WHOLE) in held:
        return []
    live = [f"-{name.removeprefix('.lock-')}r" for name in held]
    return [path for path in files if not any(part in path.name for part in live)]


@contextmanager
def only_writer(directory: Path, what_fits: set[str]) -> Iterator[None]:
    """Make an output directory if need be and hold it. `what_fits`: as in `validate_output_directory`; the lock's own files fit too.

    Raises FolderConflictError for a directory of something else or one that another run writes; InputError or DiskFullError as
    `lock_directory`.
    """
    validate_output_directory(directory, {*what_fits, ".lock*"})
    with translate_disk_full(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with lock_directory(directory):
        yield


@contextmanager
def manifest_lock(directory: Path) -> Iterator[None]:
    """One run at a time looks at a store and writes what it found: parts may begin or end in the same second.

    Raises InputError or DiskFullError when nothing can be written there.
    """
    with translate_disk_full(directory):
        file = open(directory / ".lock-summary", "w", encoding="utf-8")  # noqa: SIM115 - closed below
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_files(directory: Path) -> list[Path]:
    return [path for pattern in (".lock-s[0-9]*", ".lock") for path in sorted(directory.glob(pattern))]


def _take(file: TextIO) -> bool:
    """Lock a file, or say that another run holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> dict[str, object] | None:
    """What the run that holds this lock says of itself; None when nobody holds it."""
    with open(path, "r+", encoding="utf-8") as file:  # network file systems lock only what may be written
        if _take(file):
            return None
        try:
            return dict(json.load(file))
        except (ValueError, TypeError):
            return {}


def _is_held(directory: Path, holder: dict[str, object]) -> FolderConflictError:
    return FolderConflictError(
        f"{directory} is being written by another run: {json.dumps(holder) if holder else 'an unknown run'}",
        "wait for it, stop it, or name another --output-dir",
    )
