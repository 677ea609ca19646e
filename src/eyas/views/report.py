"""`eyas report RUN`: one HTML page of a run that needs no network, for the person who was not there.

What ran, where, how it went over time, what came out (norms per layer, parity, the ledger's reasons), what was warned of. Everything
comes from the run folder and the manifest of what the run made, so a report can be made any time later, also of a run that died.
Drawings are SVG made here: a page that loads a plotting library from elsewhere is a page that will not open in five years.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from eyas.base.manifest import MANIFEST, now
from eyas.runs.loglines import Wanted, first_causes, read_lines
from eyas.runs.processes import recorded_processes
from eyas.runs.run import RunView
from eyas.target.model_files import human_bytes

#: Drawn in this box (SVG user units); the page scales it to the screen's width.
WIDTH, HEIGHT = 640, 200
LEFT, RIGHT, TOP, BOTTOM = 84, 12, 16, 32


def write_report(view: RunView, path: Path) -> Path:
    """Write the page; returns its path.

    Raises:
        OSError: it cannot be written there.
    """
    path.write_text(render(view), encoding="utf-8")
    return path


def render(view: RunView) -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("eyas", "views"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(**contents(view))


def contents(view: RunView) -> dict[str, Any]:
    """What the template shows; every figure is taken from a file of the run or of its output."""
    record, progress = view.record, view.progress
    manifest = _json(Path(record["output_dir"]) / MANIFEST) if record.get("output_dir") else {}
    history = _json_lines(view.folder / "history.jsonl")
    lines = list(read_lines(view.folder, Wanted(level="warning")))
    told = [line for line in lines if line.stream == "log" and line.role != "keeper"]
    printed = [line for line in lines if line.stream in ("stdout", "stderr")]
    causes = first_causes(view.folder) if view.state not in ("finished", "running") else []
    return {
        "run": view,
        "record": record,
        "made": now(),
        "command": " ".join(["eyas", *record.get("argv", [])]),
        "figures": _figures(view, manifest),
        "charts": charts(history),
        "layers": layer_rows(manifest),
        "parity": parity_rows(manifest.get("parity")),
        "ledger": ledger_reasons(Path(record["output_dir"])) if record.get("output_dir") else [],
        "manifest": manifest,
        "preflight": record.get("preflight", []),
        "results": record.get("results", []),
        "processes": _processes(view.folder),
        "causes": [
            {"who": c.who, "pid": c.pid, "time": _clock(c.time), "text": c.text.rstrip(), "head": c.headline}
            for c in causes[:6]
        ],
        "warnings": _grouped([(line.who, line.text.split("\n")[0]) for line in told]),
        "printed": _grouped([(line.who, line.text) for line in printed]),
        "versions": {k: v for k, v in record.get("versions", {}).items() if v},
        "environment": record.get("environment", {}),
        "stalled": _clock(view.watchdog["stalled_since"]) if view.watchdog.get("stalled_since") else "",
        "stage": progress.get("stage", ""),
    }


def _figures(view: RunView, manifest: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The headline numbers: (value, unit, what it is)."""
    progress, record = view.progress, view.record
    out: list[tuple[str, str, str]] = []
    unit = str(progress.get("unit", "samples"))
    if progress.get("samples"):
        total = progress.get("total")
        out.append((f"{progress['samples']:,.0f}", unit, f"of {total:,.0f}" if total else "done"))
    if progress.get("tokens"):
        out.append((f"{progress['tokens']:,.0f}", "tokens", "in this run"))
    mean = mean_rate(_json_lines(view.folder / "history.jsonl"))
    if mean:
        out.append((f"{mean:,.0f}", "tokens/s", "mean while it computed"))
    last = manifest.get("last_run") or {}
    if not mean and last.get("seconds") and last.get("tokens"):
        out.append((f"{last['tokens'] / last['seconds']:,.0f}", "tokens/s", "mean while it computed"))
    totals = manifest.get("totals") or {}
    if totals.get("bytes"):
        value, size = human_bytes(totals["bytes"]).split()
        out.append((value, size, "in the output"))
    if "started_at" in record:
        end = progress.get("beat", record["started_at"])
        out.append((_duration(end - record["started_at"]), "", "from start to end" if view.ended else "so far"))
    return out


def mean_rate(history: list[dict[str, Any]]) -> float | None:
    """Tokens per second over the longest stretch of one stage in which tokens grew; None without two such points."""
    points = [p for p in history if p.get("tokens")]
    if len(points) < 2:
        return None
    stage = Counter(p.get("stage") for p in points).most_common(1)[0][0]
    points = [p for p in points if p.get("stage") == stage]
    span = points[-1]["beat"] - points[0]["beat"]
    return (points[-1]["tokens"] - points[0]["tokens"]) / span if span > 0 and len(points) > 1 else None


@dataclass(frozen=True)
class Chart:
    """One curve over time. `svg` is made by `line_svg` from numbers alone, so it needs no escaping."""

    title: str
    svg: str
    note: str


def charts(history: list[dict[str, Any]]) -> list[Chart]:
    """Rate, bytes and loss over time, as far as the run has them."""
    if len(history) < 2:
        return []
    start = history[0]["beat"]
    found = []
    for field, title, form in (
        ("tokens", "tokens per second", _plain),
        ("bytes", "bytes written per second", human_bytes),
    ):
        points = rate_points(history, field, start)
        peak = max((value for _, value in points), default=0.0)
        if len(points) > 1 and peak > 0:
            found.append(Chart(title, line_svg(points, form), f"highest {form(peak)}"))
    losses = [(p["beat"] - start, float(p["loss"])) for p in history if isinstance(p.get("loss"), int | float)]
    if len(losses) > 1:
        found.append(
            Chart("loss", line_svg(losses, lambda v: f"{v:.3g}", from_zero=False), f"last {losses[-1][1]:.4g}")
        )
    return found


def rate_points(history: list[dict[str, Any]], field: str, start: float) -> list[tuple[float, float]]:
    """(seconds since the start, growth per second) between neighbouring heartbeats of one stage."""
    points = []
    for one, two in pairwise(history):
        span = two["beat"] - one["beat"]
        if span > 0.2 and one.get("stage") == two.get("stage") and field in two:
            points.append((two["beat"] - start, max(0.0, two[field] - one.get(field, 0)) / span))
    return points


def line_svg(points: list[tuple[float, float]], form: Any = None, from_zero: bool = True) -> str:
    """An SVG line chart of (seconds, value) with three labelled grid lines and the time below."""
    form = form or _plain
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low = 0.0 if from_zero else min(ys)
    high = max(ys)
    high = high if high > low else low + 1.0
    first, last = min(xs), max(max(xs), min(xs) + 1e-6)

    def at(x: float, y: float) -> str:
        across = LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        up = HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{up:.1f}"

    line = " ".join(at(x, y) for x, y in points)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" preserveAspectRatio="xMidYMid meet">']
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        up = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up:.1f}" y2="{up:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{up + 4:.1f}" text-anchor="end">{form(value)}</text>')
    for share in (0.0, 0.5, 1.0):
        across = LEFT + share * (WIDTH - LEFT - RIGHT)
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[share]
        when = _duration(first + share * (last - first))
        parts.append(f'<text class="tick" x="{across:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{when}</text>')
    base = HEIGHT - BOTTOM
    parts.append(f'<polygon class="area" points="{LEFT},{base} {line} {at(last, low)}"/>')
    parts.append(f'<polyline class="line" points="{line}"/></svg>')
    return "".join(parts)


def layer_rows(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Norms per layer over all shards: token-weighted mean, least, greatest, and the bar's place on a logarithmic scale (0..100)."""
    layers = manifest.get("layer_ids") or []
    shards = [s for s in manifest.get("shards") or [] if s.get("norms")]
    rows = []
    for layer in layers:
        entries = [(s["tokens"], s["norms"][str(layer)]) for s in shards if str(layer) in s["norms"]]
        tokens = sum(count for count, _ in entries)
        if tokens:
            rows.append(
                {
                    "id": layer,
                    "mean": sum(count * n["mean"] for count, n in entries) / tokens,
                    "min": min(n["min"] for _, n in entries),
                    "max": max(n["max"] for _, n in entries),
                }
            )
    if not rows:
        return []
    floor = math.log10(max(min(r["min"] for r in rows), 1e-12))
    ceiling = math.log10(max(max(r["max"] for r in rows), 1e-12))
    span = max(ceiling - floor, 1e-9)
    number = manifest.get("model", {}).get("num_layers")
    for row in rows:
        place = {k: 100 * (math.log10(max(row[k], 1e-12)) - floor) / span for k in ("min", "mean", "max")}
        row.update(left=place["min"], width=max(place["max"] - place["min"], 0.5), dot=place["mean"])
        row["name"] = f"{row['id']} (target state)" if row["id"] == number else str(row["id"])
        for key in ("mean", "min", "max"):
            row[key] = _value(row[key])
    return rows


def parity_rows(parity: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The parity report, flattened: name and value."""
    if not parity:
        return []
    rows: list[tuple[str, str]] = []
    for name, value in parity.items():
        if value is None:
            continue
        if isinstance(value, dict):
            rows += [
                (f"{name.replace('_', ' ')}, {'layer ' if str(k).isdigit() else ''}{k}", _value(v))
                for k, v in value.items()
            ]
        else:
            rows.append((name.replace("_", " "), _value(value)))
    return rows


def ledger_reasons(output: Path) -> list[tuple[str, int]]:
    """Reasons in the ledger with how often each occurs; numbers are taken out so that like reasons fall together."""
    import re

    reasons: Counter[str] = Counter()
    for entry in _json_lines(output / "ledger.jsonl"):
        reasons[re.sub(r"\d+", "…", str(entry.get("reason", "no reason")))] += 1
    return reasons.most_common()


def _processes(folder: Path) -> list[dict[str, Any]]:
    last: dict[tuple[str, int], dict[str, Any]] = {}
    for record in recorded_processes(folder):
        last[record["host"], record["pid"]] = record
    return sorted(last.values(), key=lambda r: (r["time"], r["pid"]))


def _grouped(pairs: list[tuple[str, str]], most: int = 40) -> list[dict[str, Any]]:
    """Equal lines of one process once, with their number; the most frequent last lines are kept."""
    counts = Counter(pairs)
    return [{"who": who, "text": text[:500], "count": count} for (who, text), count in counts.most_common(most)]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _plain(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    if value >= 1e4:
        return f"{value / 1e3:.0f}k"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}"


def _clock(moment: float) -> str:
    return datetime.fromtimestamp(moment).strftime("%H:%M:%S")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # a run that made nothing has a report too
    return data if isinstance(data, dict) else {}


def _json_lines(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in raw:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # the torn last line of a run that was killed
    return found
