"""How far an unfinished `prepare` came: `.progress.json` beside the files that are whole, so that a killed run resumes behind them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas.base.files import content_hash, write_json
from eyas.base.manifest import made_by
from eyas.data.dataset import PROGRESS, DatasetWriter
from eyas.data.sources import DataSource, files_of


def inputs_hash(sources: Sequence[DataSource]) -> str:
    """Hash of the names, sizes and times of all local files that are read, and of the eyas that reads them."""
    seen: list[Any] = [made_by()["eyas"]]
    for source in sources:
        path = Path(source.path)
        files = files_of(source)[0] or (sorted(path.rglob("*")) if path.is_dir() else [])
        stats = [(os.fsencode(file).hex(), file.stat() if file.exists() else None) for file in files]
        seen += [source.path, [(name, stat and stat.st_size, stat and stat.st_mtime_ns) for name, stat in stats]]
    return content_hash(json.dumps(seen).encode())


def save(folder: Path, made: dict[str, Any], state: dict[str, Any], writers: Sequence[DatasetWriter | None]) -> None:
    """Write what a run needs to go on from here; the writers' files are finished."""
    parts = [
        writer and {"files": writer.files, "tokens": writer.tokens, "supervised": writer.supervised}
        for writer in writers
    ]
    write_json(folder / PROGRESS, {"made": made, "state": state, "parts": parts})


def load(folder: Path, made: dict[str, Any]) -> dict[str, Any] | None:
    """What `save` wrote, if a run of the same making left it; None else."""
    try:
        found = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = isinstance(found, dict) and found.get("made") == json.loads(json.dumps(made))
    return found if same and all((folder / name).exists() for name in found["state"].get("needs", [])) else None


def restore(writer: DatasetWriter, part: dict[str, Any]) -> None:
    """Make a writer go on behind its finished files; any other file of the same kind goes."""
    import pyarrow.parquet as pq

    writer.files, writer.tokens, writer.supervised = part["files"], part["tokens"], part["supervised"]
    names = [entry["name"] for entry in writer.files]
    for file in [*writer.folder.glob("data-*.parquet"), *writer.folder.glob(".*.tmp"), writer.folder / "manifest.json"]:
        if file.name not in names:
            file.unlink(missing_ok=True)
    for name in names:
        writer.ids += pq.ParquetFile(writer.folder / name).read(columns=["sample_id"]).column(0).to_pylist()


def report_counts(report: Any) -> dict[str, Any]:
    """The report as plain JSON, without what differs between two equal runs (times, paths)."""
    values = asdict(report)
    for name in ("seconds", "workers", "output", "model", "resumed"):
        values.pop(name)
    return {**values, "notes": dict(report.notes), "reasons": dict(report.reasons)}


def take_counts(report: Any, counts: dict[str, Any]) -> None:
    """Set a report to what `report_counts` gave."""
    for name, value in counts.items():
        setattr(report, name, Counter(value) if name in ("notes", "reasons") else value)
