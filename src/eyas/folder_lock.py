"""One run at a time writes into a store: the lock, and who holds it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eyas.batches import replica_name
from eyas.errors import FolderConflictError
from eyas.manifest import now


def lock_name(replica: tuple[int, int]) -> str:
    """`.lock`, or `.lock-s003` for a part: parts write side by side, each into shards of its own name."""
    name = replica_name(replica)
    return f".lock-{name}" if name else ".lock"


@contextmanager
def lock_folder(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Hold an output folder for one run; the lock goes with the process, however it ends.

    Raises FolderConflictError naming the run, process and host that hold it.
    """
    path = folder / name
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "an unknown run"
            raise FolderConflictError(
                f"{folder} is being written by another run: {holder}",
                "wait for it, stop it, or name another --output-dir",
            ) from None
        file.truncate(0)
        json.dump(
            {
                "run": os.environ.get("EYAS_RUN_ID"),
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": now(),
                "command": " ".join(sys.argv),
            },
            file,
        )
        file.flush()
        # The file stays: removing it would let a third process lock a new one while a second holds the old.
        yield


@contextmanager
def closing_time(folder: Path) -> Iterator[None]:
    """One run at a time sums up a store: parts (`--shard i/n`) may end in the same second."""
    with open(folder / ".lock-summary", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
