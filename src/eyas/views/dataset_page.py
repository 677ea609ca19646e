"""The dataset view as one self-contained HTML page: no script, no font, no network; readable on a phone."""

from __future__ import annotations

from html import escape

from eyas.views.dataset_view import MOST_BORDERS, DatasetSummary, ShownSample, visible

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5f6b7a; --paper: #fbfaf7; --card: #ffffff; --line: #e2e0d8;
  --on: #0b6b3a; --on-back: #dff3e6; --bar: #3b7dd8; --warn: #9a5b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa5b1; --paper: #15181c; --card: #1d2126; --line: #333a42;
  --on: #9be7b8; --on-back: #173a27; --bar: #5c9bf0; --warn: #e8b45c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.35rem; margin: .5rem 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
section, .sample { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; margin: .8rem 0; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .2rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .25rem .7rem; align-items: center; font-variant-numeric: tabular-nums; }
.bar { background: var(--bar); height: .9rem; border-radius: .2rem; min-width: 2px; }
.tokens { font: 14px/1.75 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; color: var(--soft); margin: .6rem 0; }
.tokens b { font-weight: 600; color: var(--on); background: var(--on-back); border-radius: .2rem; }
.tokens i, .tokens b { font-style: normal; border-left: 1px solid var(--line); }
.borders { font: 12.5px/1.5 ui-monospace, monospace; color: var(--soft); padding-left: 1.1rem; margin: 0; overflow-wrap: anywhere; }
.id { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
.warn { color: var(--warn); } ul { margin: .3rem 0; padding-left: 1.2rem; overflow-wrap: anywhere; }
@media (max-width: 32rem) { dl { grid-template-columns: minmax(6rem, 38%) 1fr; } }
"""


def page(summary: DatasetSummary) -> str:
    """The page's HTML. Every text of the dataset is escaped: data is shown, never run."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in summary.facts)
    most = max(summary.histogram.values(), default=1)
    bars = "".join(
        f'<span>{escape(name)}</span><div class="bar" style="width:{100 * count / most:.1f}%"></div><span>{count:,}</span>'
        for name, count in summary.histogram.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(summary.title)}: dataset</title><style>{STYLE}</style></head><body><main>
<h1>Dataset {escape(summary.title)}</h1>
<section><dl>{facts}</dl></section>
<h2>Lengths in tokens</h2><section><div class="bars">{bars}</div></section>
{_problems(summary)}<h2>Samples</h2>
<p>Supervised tokens, those the draft learns to predict, are <b style="color:var(--on)">green</b>. A thin line begins each token.</p>
{"".join(_sample(one) for one in summary.shown)}</main></body></html>
"""


def _problems(summary: DatasetSummary) -> str:
    if not summary.reasons and not summary.notes:
        return ""
    lines = [f"<li>not used, {count:,} ×: {escape(reason)}</li>" for reason, count in summary.reasons.items()]
    lines += [f"<li>{count:,} ×: {escape(note)}</li>" for note, count in summary.notes.items()]
    first = "".join(
        f"<li>{escape(str(one['file']))}:{one['line']}: {escape(str(one['reason']))}</li>" for one in summary.rejected
    )
    shown = f"<details><summary>The first rejected rows</summary><ul>{first}</ul></details>" if first else ""
    return f'<h2>Reported</h2><section><ul class="warn">{"".join(lines)}</ul>{shown}</section>\n'


def _sample(one: ShownSample) -> str:
    tokens = "".join(
        f'<{tag} title="{token}">{escape(visible(piece))}</{tag}>'
        for (piece, _), token, tag in zip(
            one.first(), one.token_ids, ("b" if flag else "i" for flag in one.mask), strict=False
        )
    )
    if one.hidden:
        tokens += f'<p class="warn">... and {one.hidden:,} more tokens</p>'
    borders = "".join(f"<li>{escape(border)}</li>" for border in one.borders[:MOST_BORDERS])
    return (
        f'<div class="sample"><strong>Sample {one.position}</strong>: {len(one.mask):,} tokens, {sum(one.mask):,} supervised'
        f'<div class="id">{one.id}</div><div class="tokens">{tokens}</div><ol class="borders">{borders}</ol></div>\n'
    )
