"""One run at a time writes into an output folder: the lock, and who holds it."""

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
from eyas.base.manifest import now, refuse_foreign_folder, writing_to
from eyas.extraction.batches import replica_name


def lock_name(replica: tuple[int, int]) -> str:
    """`.lock`, or `.lock-s003` for a part: parts write side by side, each into shards of its own name."""
    name = replica_name(replica)
    return f".lock-{name}" if name else ".lock"


@contextmanager
def lock_folder(folder: Path, replica: tuple[int, int] = (0, 1)) -> Iterator[None]:
    """Hold an output folder for one run; the lock goes with the process, however it ends.

    Beside a part (`--shard i/n`) only other parts of the same n may write: any other run would make samples of it a second time.

    Raises FolderConflictError naming the run, process and host that hold it; InputError or DiskFullError when nothing can be written there.
    """
    own = folder / lock_name(replica)
    with ExitStack() as held:
        with closing_time(folder):
            for other in [*sorted(folder.glob(".lock-s[0-9]*")), folder / ".lock"]:
                if other != own and other.exists():
                    _refuse_other_split(folder, other, replica[1])
            with writing_to(folder):
                file = held.enter_context(open(own, "a+", encoding="utf-8"))
            if not _take(file):
                raise _is_held(folder, file)
            with writing_to(folder):
                file.truncate(0)
                json.dump(
                    {
                        "run": os.environ.get("EYAS_RUN_ID"),
                        "pid": os.getpid(),
                        "host": socket.gethostname(),
                        "since": now(),
                        "parts": replica[1],
                        "command": " ".join(sys.argv),
                    },
                    file,
                )
                file.flush()
        # The file stays: removing it would let a third process lock a new one while a second holds the old.
        yield


@contextmanager
def only_writer(folder: Path, what_fits: set[str]) -> Iterator[None]:
    """Make an output folder if need be and hold it. `what_fits`: as in `refuse_foreign_folder`; the lock's own files fit too.

    Raises FolderConflictError for a folder of something else or one that another run writes; InputError or DiskFullError as `lock_folder`.
    """
    refuse_foreign_folder(folder, {*what_fits, ".lock*"})
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder):
        yield


def _take(file: TextIO) -> bool:
    """Lock a file, or say that another run holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_held(folder: Path, file: TextIO) -> FolderConflictError:
    file.seek(0)
    return FolderConflictError(
        f"{folder} is being written by another run: {file.read().strip() or 'an unknown run'}",
        "wait for it, stop it, or name another --output-dir",
    )


def _refuse_other_split(folder: Path, path: Path, parts: int) -> None:
    """Raise FolderConflictError if a run holds `path` that is no part of a split into as many."""
    with open(path, "r+", encoding="utf-8") as file:
        if _take(file):
            return
        try:
            theirs = json.load(file).get("parts", 1)
        except ValueError:
            theirs = 1
        if theirs != parts or parts == 1:
            raise _is_held(folder, file)


@contextmanager
def closing_time(folder: Path) -> Iterator[None]:
    """One run at a time looks at a store and writes what it found: parts (`--shard i/n`) may begin or end in the same second.

    Raises InputError or DiskFullError when nothing can be written there.
    """
    with writing_to(folder):
        held = open(folder / ".lock-summary", "w", encoding="utf-8")  # noqa: SIM115 - closed below
    with held as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
