"""Seeing a dataset: the report of a run, statistics, and samples with the supervised tokens in colour."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from eyas.preparation import REJECTED, PrepareReport


def print_report(report: PrepareReport, console: Console | None = None) -> None:
    """The report of `eyas prepare` as a table, with the first rejected rows."""
    console = console or Console()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")

    def row(name: str, value: int, why: str = "", style: str = "") -> None:
        table.add_row(name, f"[{style}]{value:,}[/]" if style and value else f"{value:,}", why)

    row("rows read", report.rows)
    row("rows kept", report.kept)
    row("rows dropped", report.dropped, f"each with its reason in {REJECTED}", "red")
    row("samples", report.samples, f"{report.heldout_samples:,} of them held out" if report.heldout_samples else "")
    row("exact duplicates", report.duplicates)
    share = report.supervised_tokens / report.tokens if report.tokens else 0.0
    row(
        "tokens",
        report.tokens,
        f"{report.supervised_tokens:,} supervised ({share:.1%}); longest sample {report.longest:,}",
    )
    row("rows truncated", report.truncated, "", "yellow")
    row("answers", report.answers)
    row("  cut by the length limit", report.answers_cut, "their end is not in the dataset", "yellow")
    row("  wholly beyond it", report.answers_lost, "not in the dataset", "yellow")
    row(
        "  unfinished when generated",
        report.answers_unfinished,
        "marked; their end of turn is not supervised",
        "yellow",
    )
    console.print(table)
    for note, count in report.notes.most_common():
        console.print(f"  {count:,} rows: {note}", style="yellow")
    if report.dropped:
        console.print(f"[red]{report.dropped:,} of {report.rows:,} rows were not used:[/]")
        for reason, count in report.reasons.most_common(8):
            console.print(f"  {count:>8,}  {reason}", markup=False, highlight=False)
        for entry in report.rejected[:5]:
            console.print(
                f"  {entry['file']}:{entry['line']}: {entry['reason']}", markup=False, highlight=False, soft_wrap=True
            )
    print_histogram(report.histogram, console)
    console.print(
        f"{report.output}: {report.rows_per_second:,.0f} rows/s, {report.tokens_per_second:,.0f} tokens/s "
        f"({report.seconds:.1f} s, {report.workers} processes allowed)",
        highlight=False,
    )


def print_histogram(histogram: dict[str, Any], console: Console) -> None:
    """Lengths of samples in tokens, as bars."""
    most = max(histogram.values(), default=0)
    for name, count in histogram.items():
        console.print(f"  {name:>13} tokens  {'█' * max(1, round(40 * count / most))} {count:,}", highlight=False)
