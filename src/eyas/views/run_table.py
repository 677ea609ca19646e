"""The table of `eyas runs list`: plain lines, laid out for the terminal's width. Ids stay whole, since they are what one copies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.markup import escape

from eyas.runs.run import RunView

#: Columns for all that is known of a run. In fewer, age stands for the time it began, a share for the counts, and the rate is left out.
WIDE = 110
COLOURS = {
    "running": "green",
    "failed": "red",
    "lost": "red",
    "killed": "red",
    "stalled": "yellow",
    "incomplete": "yellow",
}


def table(views: Sequence[RunView], columns: int) -> list[str]:
    """A head and one line for each run."""
    narrow = columns < WIDE
    ids, states = (max(map(len, texts)) for texts in ([v.id for v in views], ["state", *(v.state for v in views)]))
    lines = [f"{'run':<{ids}}  {'state':<{states}}  {'age' if narrow else 'started':<{4 if narrow else 11}}  progress"]
    for view in views:
        created = view.record.get("created_at", 0)
        began = (
            f"{_short(time.time() - created):>4}" if narrow else datetime.fromtimestamp(created).strftime("%m-%d %H:%M")
        )
        state = f"[{COLOURS.get(view.state, 'default')}]{view.state:<{states}}[/]"
        lines.append(f"{view.id:<{ids}}  {state}  {began}  {escape(_progress(view, narrow))}".rstrip())
    return lines


def rate(progress: dict[str, Any]) -> str:
    if progress.get("tokens_per_s"):
        return f"{progress['tokens_per_s']:,.0f} tok/s"
    return (
        f"{progress['samples_per_s']:,.1f} {progress.get('unit', 'samples')}/s" if progress.get("samples_per_s") else ""
    )


def how_far(progress: dict[str, Any]) -> str:
    if progress.get("total"):
        done = progress.get("samples", 0)
        return f"{progress.get('stage', '')} {done:,.0f}/{progress['total']:,.0f} ({done / progress['total']:.0%})"
    return (
        f"{progress.get('stage', '')} {progress['samples']:,.0f}"
        if progress.get("samples")
        else progress.get("stage", "")
    )


def _progress(view: RunView, narrow: bool) -> str:
    """How far a run is and, while it runs, how fast and how long yet."""
    going, eta = view.state in ("running", "stalled"), view.progress.get("eta_s")
    left = f"{_short(eta) if narrow else duration(eta)} to go" if going and eta is not None else ""
    if not narrow:
        return "  ".join(filter(None, [how_far(view.progress), rate(view.progress) if going else "", left]))
    stage, total = view.progress.get("stage", ""), view.progress.get("total")
    done = f"{view.progress.get('samples', 0) / total:.0%}" if total else how_far(view.progress).removeprefix(stage)
    return ", ".join(filter(None, [f"{stage} {done.strip()}".strip(), left]))


def _short(seconds: float) -> str:
    """`40s`, `12m`, `3h`, `5d`."""
    seconds = max(0, int(seconds))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
