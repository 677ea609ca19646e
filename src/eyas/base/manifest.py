"""`manifest.json`: every directory that a stage makes says of itself what it is, what made it, from what, with which settings.

Common fields: `kind` (`eyas.dataset`, `eyas.states`, `eyas.draft`), `format_version`, `created` (UTC, ISO 8601), `made_by`
(name, version, python, torch, transformers). The rest belongs to the kind; `docs/format.md` lists it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Collection
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eyas.base.errors import StoreError

MANIFEST = "manifest.json"


def package_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def made_by() -> dict[str, Any]:
    """What wrote a directory: eyas and the packages whose version can change a number in it."""
    return {
        "eyas": package_version("eyas") or "unknown",
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "transformers": package_version("transformers"),
    }


def now() -> str:
    """UTC time, ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def read_manifest(directory: Path, kind: str, format_version: int, needs: Collection[str] = ()) -> dict[str, Any]:
    """Read and check a directory's manifest.

    Args:
        needs: fields that it must have.

    Raises:
        StoreError: no manifest, unreadable JSON, another kind, a format version this eyas does not know, or a field that is missing.
    """
    path = directory / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not directory.exists():
            raise StoreError(f"{directory} does not exist", "check the path") from None
        raise StoreError(
            f"{directory} has no {MANIFEST}, so it is not of kind {kind}", "check the path, or make the directory anew"
        ) from None
    except NotADirectoryError:
        raise StoreError(f"{directory} is a file, expected a directory of kind {kind}", "check the path") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is not readable JSON: {error}", "the directory is damaged; make it anew") from None
    if not isinstance(data, dict) or data.get("kind") != kind:
        found = data.get("kind") if isinstance(data, dict) else type(data).__name__
        raise StoreError(
            f"{path} says it is {found!r}, expected {kind!r}", "this directory is the output of another stage"
        )
    if data.get("format_version") != format_version:
        raise StoreError(
            f"{path} has format version {data.get('format_version')!r}; this eyas reads {format_version}",
            "use the eyas that wrote it (see `made_by` in the manifest), or make the directory anew",
        )
    missing = sorted(name for name in needs if data.get(name) is None)
    if missing:
        raise StoreError(f"{path} lacks {', '.join(missing)}", "the directory is damaged; make it anew")
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
    return [f"{prefix}: the directory has {have!r}, this run wants {want!r}"]
