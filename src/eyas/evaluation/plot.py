"""The plot of an acceptance report: length per prompt set beside vLLM's and the baselines', and the acceptance rate at each position."""

from __future__ import annotations

from html import escape
from typing import Any

WIDTH, LABELS, BARS, ROW, TOP = 760, 330, 340, 22, 34
OURS, THEIRS, BASELINES, INK = "#1f6feb", "#8250df", "#b0b8c1", "#24292f"


def plot(report: dict[str, Any]) -> str:
    """An SVG: acceptance length of each set with its 95 % interval, then the acceptance rate by position."""
    served = report.get("vllm", {})
    sets = {**report["sets"], **({"overall": report["overall"]} if len(report["sets"]) > 1 else {})}
    lengths: list[tuple[str, float | None, str, list[float | None]]] = []
    for name, found in sets.items():
        lengths.append((f"{name}: draft", found["acceptance_length"], OURS, found["interval_95"]))
        if name in served:
            lengths.append((f"{name}: draft in vLLM", served[name]["acceptance_length"], THEIRS, []))
        lengths += [(f"{name}: {baseline}", length, BASELINES, []) for baseline, length in found["baselines"].items()]
    places: list[tuple[str, float | None, str, list[float | None]]] = []
    for name, found in sets.items():
        intervals = found["by_position_interval_95"]
        places += [
            (f"{name}: position {place + 1}", rate, OURS, intervals[place])
            for place, rate in enumerate(found["by_position"])
        ]
    chain = report["settings"]["chain"]
    first, y = _bars(
        f"tokens per verification step, bonus included, {chain} draft tokens a step", lengths, TOP, "{:.2f}"
    )
    second, y = _bars(
        "share of verification steps that accept the draft token at each position", places, y + ROW, "{:.0%}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 10}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{first}{second}</svg>\n'
    )


def _bars(
    title: str, bars: list[tuple[str, float | None, str, list[float | None]]], top: int, form: str
) -> tuple[str, int]:
    """Bars from `top` on, as SVG, and where they end. Each: label, value (None: nothing measured), colour, interval or nothing."""
    widest = max([x for _, value, _, interval in bars for x in (value, *interval) if x is not None] + [1e-9])
    parts = [f'<text x="8" y="{top - 14}" font-weight="bold">{escape(title)}</text>']
    for i, (label, value, colour, interval) in enumerate(bars):
        y = top + ROW * i
        shown = label if len(label) <= 46 else f"{label[:22]}…{label[-23:]}"
        width, text = (0.0, "-") if value is None else (BARS * value / widest, form.format(value))
        end = width
        parts.append(f'<text x="8" y="{y + 12}"><title>{escape(label)}</title>{escape(shown)}</text>')
        parts.append(f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="16" fill="{colour}"/>')
        known = [x for x in interval if x is not None]
        if len(known) == 2:
            low, high = (BARS * x / widest for x in known)
            end = max(width, high)
            parts.append(
                f'<path d="M{LABELS + low:.1f} {y + 8}H{LABELS + high:.1f}M{LABELS + low:.1f} {y + 4}v8M{LABELS + high:.1f} {y + 4}v8" '
                f'stroke="{INK}" fill="none"/>'
            )
        parts.append(f'<text x="{LABELS + 6 + end:.1f}" y="{y + 12}">{text}</text>')
    return "".join(parts), top + ROW * len(bars) + 14
