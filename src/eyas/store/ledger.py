"""`ledger.jsonl`: the samples of a dataset that are not in the store, each with the reason. No such samples, no file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from eyas.base.errors import StoreError
from eyas.base.files import write_text
from eyas.base.manifest import now
from eyas.store.format import LEDGER


def read_ledger(directory: Path) -> dict[str, str]:
    """Sample id -> reason, of the ledger as it stands; {} without one. Raises StoreError for a damaged one."""
    path = directory / LEDGER
    if not path.exists():
        return {}
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {row["sample_id"]: row["reason"] for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} is damaged: {error}", "delete this one file and rerun the same `eyas extract`: it is written anew"
        ) from None


def write_ledger(directory: Path, reasons: Mapping[str, str]) -> None:
    """One line per sample, by id. Raises as `write_text`; the old ledger stays then."""
    path = directory / LEDGER
    if not reasons:
        path.unlink(missing_ok=True)
        return
    rows = ({"sample_id": one, "reason": why, "time": now()} for one, why in sorted(reasons.items()))
    write_text(path, (json.dumps(row) + "\n" for row in rows))
