"""`manifest.json`: every folder that a stage makes says of itself what it is, what made it, from what, with which settings.

Common fields: `kind` (`eyas.dataset`, `eyas.states`, `eyas.draft`), `format_version`, `created` (UTC, ISO 8601), `made_by`
(name, version, python, torch, transformers). The rest belongs to the kind; `docs/format.md` lists it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eyas.base.errors import DiskFullError, FolderConflictError, InputError, StoreError, is_disk_full

MANIFEST = "manifest.json"


def package_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def made_by() -> dict[str, Any]:
    """What wrote a folder: eyas and the packages whose version can change a number in it."""
    return {
        "eyas": package_version("eyas") or "unknown",
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "transformers": package_version("transformers"),
    }


def now() -> str:
    """UTC time, ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def content_hash(data: bytes) -> str:
    """BLAKE2b-128 in hex: the hash of every content in eyas's manifests (checksums of tensors are xxh3-128)."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn what the operating system says of a folder that cannot be written into DiskFullError or InputError."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(
                f"no space left in {folder}",
                "free some space and run the same command again: what was finished is kept",
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise InputError(
                f"{folder} cannot be written: {error.strerror}", "check the path and its rights, or name another folder"
            ) from error
        raise


def write_json(path: Path, data: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of one, also after a power cut.

    Raises DiskFullError, or InputError for a folder that cannot be written; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing_to(path.parent):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=2, ensure_ascii=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path, kind: str, format_version: int) -> dict[str, Any]:
    """Read and check a folder's manifest.

    Raises:
        StoreError: no manifest, unreadable JSON, another kind, or a format version this eyas does not know.
    """
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not folder.exists():
            raise StoreError(f"{folder} does not exist", "check the path") from None
        raise StoreError(
            f"{folder} has no {MANIFEST}, so it is no {kind} folder", "check the path, or make the folder anew"
        ) from None
    except NotADirectoryError:
        raise StoreError(f"{folder} is a file, expected a folder of kind {kind}", "check the path") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is not readable JSON: {error}", "the folder is damaged; make it anew") from None
    if not isinstance(data, dict) or data.get("kind") != kind:
        found = data.get("kind") if isinstance(data, dict) else type(data).__name__
        raise StoreError(
            f"{path} says it is {found!r}, expected {kind!r}", "this folder is the output of another stage"
        )
    if data.get("format_version") != format_version:
        raise StoreError(
            f"{path} has format version {data.get('format_version')!r}; this eyas reads {format_version}",
            "use the eyas that wrote it (see `made_by` in the manifest), or make the folder anew",
        )
    return data


def differing_fields(have: Any, want: Any, prefix: str = "") -> list[str]:
    """`field: have -> want` for every leaf where two nested dicts differ, for messages that name what does not fit."""
    if isinstance(have, dict) and isinstance(want, dict):
        lines: list[str] = []
        for key in sorted({*have, *want}):
            lines += differing_fields(have.get(key), want.get(key), f"{prefix}.{key}" if prefix else key)
        return lines
    if have == want or (have in (None, {}) and want in (None, {})):  # a field that came later, with nothing in it
        return []
    return [f"{prefix}: the folder has {have!r}, this run wants {want!r}"]


def refuse_foreign_folder(folder: Path, what_fits: set[str]) -> None:
    """Refuse an output folder that holds files no eyas stage put there.

    Args:
        folder: may be missing or empty.
        what_fits: file names (or shell patterns) that the stage itself writes.

    Raises:
        FolderConflictError: naming the first foreign files.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FolderConflictError(f"{folder} is a file, expected a folder", "name another --output-dir")
    foreign = sorted(p.name for p in folder.iterdir() if not any(Path(p.name).match(pattern) for pattern in what_fits))
    if foreign:
        shown = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
        raise FolderConflictError(
            f"{folder} holds something else: {shown}",
            "name an empty or new --output-dir; eyas mixes nothing in and deletes nothing",
        )
