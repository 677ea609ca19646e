"""Seeing a dataset: the report of a run, statistics, and samples with the supervised tokens in colour, on the terminal or as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.base.errors import InputError
from eyas.base.masks import runs
from eyas.data.dataset import Sample, TokenDataset, open_dataset
from eyas.data.preparation import HELDOUT, REJECTED, PrepareReport, length_histogram, predicted_bytes
from eyas.target.model_files import human_bytes
from eyas.target.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from eyas.data.regeneration import RegenerateReport

#: States per token that are assumed for predictions: three auxiliary layers and the target state.
STATES = 4
#: Tokens per second assumed for predictions, of the order that a Kimi-K2-like model reaches on four H200.
TOKENS_PER_SECOND = 20_000.0
#: Of one sample at most so many tokens and borders are shown: a long one would make a page that no browser likes.
MOST_TOKENS, MOST_BORDERS = 4096, 64
COUNT_NAMES = {
    "rows": "rows read",
    "kept": "rows kept",
    "dropped": "rows dropped",
    "duplicates": "exact duplicates",
    "truncated": "rows truncated",
    "answers": "answers",
    "answers_cut": "answers cut by the length limit",
    "answers_lost": "answers wholly beyond it",
    "answers_unfinished": "answers unfinished when generated",
    "answers_left_out": "answers marked as not to be trained on",
    "broken_sources": "files that break off",
}


def print_report(report: PrepareReport, console: Console | None = None) -> None:
    """The report of `eyas prepare` as a table, with the first rejected rows and what extraction will cost."""
    console = console or Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")

    def row(name: str, value: int, why: str = "", style: str = "") -> None:
        table.add_row(name, f"[{style}]{value:,}[/]" if style and value else f"{value:,}", why)

    row("rows read", report.rows)
    row("rows kept", report.kept)
    row("rows dropped", report.dropped, f"each with its reason in {REJECTED}" if report.dropped else "", "red")
    row("samples", report.samples, f"{report.heldout_samples:,} of them held out" if report.heldout_samples else "")
    row("exact duplicates", report.duplicates)
    share = report.supervised_tokens / report.tokens if report.tokens else 0.0
    row("tokens", report.tokens, f"{report.supervised_tokens:,} supervised ({share:.1%}); longest {report.longest:,}")
    row("rows truncated", report.truncated, "", "yellow")
    row("answers", report.answers)
    if report.windows:
        row("  windows of long rows", report.windows, "answers may go on in the next window", "yellow")
    row(
        "  cut by the limit",
        report.answers_cut,
        "their end is not in the dataset" if report.answers_cut else "",
        "yellow",
    )
    row("  wholly beyond it", report.answers_lost, "not in the dataset" if report.answers_lost else "", "yellow")
    if report.answers_unfinished:
        row("  unfinished", report.answers_unfinished, "cut when generated; their end is not supervised", "yellow")
    if report.answers_left_out:
        row("  left out", report.answers_left_out, "marked as not to be trained on", "yellow")
    if report.broken_sources:
        row("files that break off", report.broken_sources, "what follows in them was not read", "red")
    console.print(table)
    if report.files_passed_over:
        shown = ", ".join(report.files_passed_over[:8]) + (", ..." if len(report.files_passed_over) > 8 else "")
        console.print(f"files passed over, of no data format: {shown}", style="yellow", markup=False, soft_wrap=True)
    for note, count in report.notes.most_common():
        console.print(f"  {count:,} ×: {note}", style="yellow")
    if report.dropped:
        console.print(f"[red]{report.dropped:,} of {report.rows:,} rows were not used:[/]")
        for reason, count in report.reasons.most_common(8):
            console.print(f"  {count:>8,}  {reason}", markup=False)
        for entry in report.rejected[:5]:
            console.print(f"  {entry['file']}:{entry['line']}: {entry['reason']}", markup=False, soft_wrap=True)
    _print_histogram(report.histogram, console)
    if report.model:
        console.print(prediction(report.tokens, report.model), soft_wrap=not console.is_terminal)
    console.print(
        f"{report.output}: {report.rows_per_second:,.0f} rows/s, {report.tokens_per_second:,.0f} tokens/s ({report.seconds:.1f} s)",
        soft_wrap=True,
    )


def print_regenerated(report: RegenerateReport, console: Console | None = None) -> None:
    """The report of `eyas regenerate`."""
    console = console or Console(highlight=False)
    cut = report.finish_reasons["length"]
    rate = report.generated_tokens / report.seconds if report.seconds else 0.0
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, value, why in [
        ("rows read", report.rows, f"{report.repeated:,} of them repeated prompts" if report.repeated else ""),
        ("answered before", report.resumed, "by an earlier run"),
        ("conversations", report.conversations, "answered by this run"),
        ("answers", report.answers, f"{report.generated_tokens:,} tokens, {rate:,.0f} tokens/s"),
        ("  cut by a limit", cut, "marked; they teach no end of turn" if cut else ""),
        (
            "ended early",
            report.stopped_early,
            "later questions no longer fit --max-seq-len" if report.stopped_early else "",
        ),
        ("rows rejected", report.rejected, f"each with its reason in {REJECTED}" if report.rejected else ""),
        ("samples", report.samples, f"{report.heldout_samples:,} of them held out" if report.heldout_samples else ""),
        ("tokens", report.tokens, f"{report.supervised_tokens:,} supervised"),
    ]:
        table.add_row(name, f"{value:,}", why)
    console.print(table)
    console.print(f"{report.output} ({report.seconds:.1f} s)", soft_wrap=True)


def _print_histogram(histogram: Mapping[str, int], console: Console) -> None:
    most = max(histogram.values(), default=0)
    for name, count in histogram.items():
        console.print(f"  {name:>13} tokens  {'█' * max(1, round(40 * count / most))} {count:,}")


def prediction(
    tokens: int, model: Mapping[str, int], states: int = STATES, tokens_per_second: float = TOKENS_PER_SECOND
) -> str:
    """What extracting `tokens` tokens will write and take, with the assumptions named."""
    size = predicted_bytes(tokens, model["hidden_size"], states)
    hours = tokens / tokens_per_second / 3600
    time = f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.1f} minutes"
    return (
        f"extraction will write {human_bytes(size)} ({states} states of {model['hidden_size']:,} bf16 values a token) "
        f"and take {time} at {tokens_per_second:,.0f} tokens/s (assumed; `eyas inspect --tokens-per-second` sets it)"
    )


@dataclass(frozen=True)
class ShownSample:
    """One sample as it is shown: each token's text, the mask, and the borders of each run of supervised tokens."""

    position: int
    id: str
    pieces: list[str]
    token_ids: list[int]
    mask: list[int]
    borders: list[str] = field(default_factory=list)

    def first(self) -> list[tuple[str, int]]:
        """(text, mask) of the tokens that are shown: the first `MOST_TOKENS`."""
        return list(zip(self.pieces, self.mask, strict=True))[:MOST_TOKENS]

    @property
    def hidden(self) -> int:
        """Tokens that are not shown."""
        return max(0, len(self.mask) - MOST_TOKENS)


@dataclass(frozen=True)
class DatasetSummary:
    """What `eyas inspect` shows of a dataset, on the terminal and on the page."""

    title: str
    facts: list[tuple[str, str]]
    histogram: dict[str, int]
    reasons: dict[str, int]
    rejected: list[dict[str, Any]]
    notes: dict[str, int]
    shown: list[ShownSample]


def summarise(
    folder: Path,
    *,
    sample: int | None = None,
    samples: int = 3,
    model_path: str | None = None,
    states: int = STATES,
    tokens_per_second: float = TOKENS_PER_SECOND,
) -> DatasetSummary:
    """Read a dataset and collect what is worth seeing.

    Args:
        sample: the one to show; None = `samples` of them, evenly spread.
        model_path: whose tokenizer spells the tokens; None = the one that the manifest names.

    Raises:
        InputError: no dataset, or no such sample.
    """
    dataset = open_dataset(folder)
    manifest = dataset.manifest or {}
    counts = manifest.get("counts", {})
    supervised = manifest.get("supervised_tokens")
    if supervised is None:
        supervised = sum(int(one.loss_mask.sum()) for one in dataset)
    lengths = dataset.lengths
    middle, high = (int(np.percentile(lengths, q)) for q in (50, 95))
    facts = [
        ("samples", f"{len(dataset):,}" + (f" ({dataset.repeated:,} repeated)" if dataset.repeated else "")),
        ("tokens", f"{dataset.tokens:,}"),
        ("supervised", f"{supervised:,} ({supervised / dataset.tokens:.1%})"),
        ("length", f"median {middle:,}, 95 % up to {high:,}, longest {int(lengths.max()):,}"),
    ]
    if tokenizer := manifest.get("tokenizer"):
        facts.append(("tokenizer", f"{tokenizer['model_path']}, {tokenizer['vocab_size']:,} tokens"))
    if settings := manifest.get("settings"):
        mask = settings["mask"]
        kwargs = f", template kwargs {json.dumps(mask['chat_template_kwargs'])}" if mask["chat_template_kwargs"] else ""
        facts.append(
            (
                "settings",
                f"at most {settings['max_seq_len']:,} tokens ({settings['on_long']}), {mask['supervise']} supervised{kwargs}",
            )
        )
    facts += [(name, f"{counts[key]:,}") for key, name in COUNT_NAMES.items() if key in counts]
    if reasons := counts.get("finish_reasons"):
        facts.append(("answers ended by", ", ".join(f"{name} {count:,}" for name, count in reasons.items())))
    if (folder / HELDOUT).is_dir():
        facts.append(("held out", f"{len(open_dataset(folder / HELDOUT)):,} samples in {HELDOUT}/"))
    if manifest.get("model"):
        facts.append(("prediction", prediction(dataset.tokens, manifest["model"], states, tokens_per_second)))
    positions = _positions(dataset, sample, samples)
    spell = _speller(model_path or (manifest.get("tokenizer") or {}).get("model_path"))
    rejected = folder / REJECTED
    first: list[dict[str, Any]] = []
    if rejected.is_file():
        with open(rejected, encoding="utf-8") as file:
            first = [json.loads(line) for line, _ in zip(file, range(20), strict=False)]
    return DatasetSummary(
        title=str(folder),
        facts=facts,
        histogram=length_histogram(lengths),
        reasons=dict(sorted(counts.get("reasons", {}).items(), key=lambda item: -item[1])),
        rejected=first,
        notes=counts.get("notes", {}),
        shown=[_shown(position, dataset[position], spell) for position in positions],
    )


def _positions(dataset: TokenDataset, sample: int | None, samples: int) -> list[int]:
    if sample is None:
        return sorted({int(at) for at in np.linspace(0, len(dataset) - 1, min(samples, len(dataset)))})
    if not 0 <= sample < len(dataset):
        raise InputError(f"--sample {sample}: the dataset holds {len(dataset)} samples", f"0 to {len(dataset) - 1}")
    return [sample]


def _speller(model_path: str | None) -> Any:
    """Token id -> its text; where the tokenizer is not at hand, the id itself."""
    if model_path is not None:
        try:
            tokenizer = load_tokenizer(model_path)
        except InputError:
            pass
        else:
            return lambda token: str(tokenizer.decode([token]))
    return lambda token: f"{token} "


def _shown(position: int, sample: Sample, spell: Any) -> ShownSample:
    ids = sample.token_ids.tolist()
    pieces = [spell(token) for token in ids]
    borders = []

    def named(at: int) -> str:
        return f"{pieces[at]!r} ({ids[at]})"

    for start, end in runs(sample.loss_mask):
        before = f"after {named(start - 1)}" if start else "at the start"
        after = f", then {named(end)}" if end < len(ids) else ", the last token"
        borders.append(f"{start}-{end - 1}: {before} begins {named(start)}, ends {named(end - 1)}{after}")
    return ShownSample(position, sample.id, pieces, ids, sample.loss_mask.tolist(), borders)


def visible(piece: str) -> str:
    """A token's text with line breaks, tabs and a lone space spelled out."""
    return piece.replace("\r", "␍").replace("\n", "⏎\n").replace("\t", "⇥") or "∅"


def print_summary(summary: DatasetSummary, console: Console | None = None) -> None:
    """The summary on the terminal: supervised tokens bold green, the others dim, with every border spelled out."""
    console = console or Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("dataset", Text(summary.title))
    for name, value in summary.facts:
        table.add_row(name, Text(value))
    console.print(table)
    _print_histogram(summary.histogram, console)
    for title, values in (("not used", summary.reasons), ("remarkable", summary.notes)):
        for reason, count in values.items():
            console.print(f"  {title}, {count:,} ×: {reason}", markup=False, soft_wrap=True)
    for one in summary.rejected[:5]:
        console.print(f"  {one['file']}:{one['line']}: {one['reason']}", markup=False, soft_wrap=True)
    for shown in summary.shown:
        console.print(
            f"\n[bold]sample {shown.position}[/], id {shown.id}: {len(shown.mask)} tokens, {sum(shown.mask)} supervised ([bold green]green[/])"
        )
        text = Text()
        for piece, flag in shown.first():
            text.append(visible(piece), style="bold green" if flag else "dim")
        console.print(text)
        if shown.hidden:
            console.print(f"... and {shown.hidden:,} more tokens", style="yellow")
        for border in shown.borders[:MOST_BORDERS]:
            console.print(f"  {border}", markup=False, style="cyan", soft_wrap=True)


def inspect_dataset(
    folder: Path,
    *,
    sample: int | None = None,
    samples: int = 3,
    html: Path | None = None,
    model_path: str | None = None,
    states: int = STATES,
    tokens_per_second: float = TOKENS_PER_SECOND,
    console: Console | None = None,
) -> DatasetSummary:
    """`eyas inspect DATASET`: the terminal view, and with `html` also a self-contained page. Raises InputError."""
    from eyas.views.dataset_page import page

    summary = summarise(
        folder,
        sample=sample,
        samples=samples,
        model_path=model_path,
        states=states,
        tokens_per_second=tokens_per_second,
    )
    print_summary(summary, console)
    if html is not None:
        try:
            html.write_text(page(summary), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--html {html}: {error}", "name a file in a folder that exists") from None
    return summary
