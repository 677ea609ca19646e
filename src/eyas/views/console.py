"""What the command line shows: tables, the bulk progress, a sample's tokens with the loss mask in colour. Rich does the drawing."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from eyas.target.layers import describe_layer
from eyas.target.model_files import human_bytes

if TYPE_CHECKING:
    from eyas.base.check import Check
    from eyas.engines.base import Progress as BulkProgress
    from eyas.extraction.bulk import ExtractReport
    from eyas.gates.verification import VerifyReport

out = Console(highlight=False, soft_wrap=False)
err = Console(stderr=True, highlight=False)

STATUS_STYLE = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


def wrapped(text: str, indent: int = 0) -> str:
    """Text for the terminal's width, further lines indented. No word is broken: a path or an id can be copied.

    Without a terminal (a log, a pipe) lines stay whole, where a fold would hide them from grep.
    """
    lines = text.split("\n")
    if out.is_terminal:
        room = max(out.width - indent, 20)
        # A word that is longer than a line is left to the terminal, which copies it as one.
        folded = (textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) for line in lines)
        lines = [line for group in folded for line in (group or [""])]
    return ("\n" + " " * indent).join(lines)


def say(text: str, indent: int = 0) -> None:
    """Print a sentence as `wrapped` does; `indent`: of its further lines."""
    out.print(escape(wrapped(text, indent)), soft_wrap=True)


def raw(text: str) -> None:
    """Print text as it is: no markup, no line broken, so that it can be copied and piped."""
    out.print(text, soft_wrap=True, markup=False, highlight=False)


def aside(text: str, style: str | None = None) -> None:
    """The same to stderr."""
    err.print(text, style=style, soft_wrap=True, markup=False, highlight=False)


def show_preflight(checks: Sequence[Check], title: str = "preflight") -> None:
    """The findings of gate 1, and of `eyas doctor`, each remedy below its finding."""
    out.print(f"[italic]{title}[/]")
    width = max(len(check.name) for check in checks)
    for check in checks:
        text = wrapped(check.finding, width + 8)
        if check.remedy:
            text += "\n" + " " * (width + 8) + wrapped(f"-> {check.remedy}", width + 11)
        style = STATUS_STYLE[check.status]
        out.print(f"[{style}]{check.status:<4}[/]  {check.name:<{width}}  {escape(text)}", soft_wrap=True)


class BulkBar:
    """Progress of the bulk stage: samples, tokens/s, bytes, ETA. Without a terminal: a line every ten seconds."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: Any = None
        self._begun = self._line_at = time.monotonic()

    def update(self, done: BulkProgress, samples: int, tokens: int) -> None:
        """`samples`, `tokens`: what this run has to do in all."""
        now = time.monotonic()
        rate = done.tokens / max(now - self._begun, 1e-9)
        if out.is_terminal:
            if self._bar is None:
                self._bar = Progress(
                    TextColumn("{task.fields[samples]} samples", table_column=Column(no_wrap=True)),
                    BarColumn(None),
                    TextColumn(
                        "{task.percentage:>3.0f}%  {task.fields[rate]:,.0f} tok/s  {task.fields[written]}  ETA",
                        table_column=Column(no_wrap=True),
                    ),
                    TimeRemainingColumn(),
                    console=out,
                    expand=True,  # the bar takes what is left of the line
                )
                self._task = self._bar.add_task("", total=tokens, samples="", rate=0.0, written="")
                self._bar.start()
            text = f"{done.samples}/{samples}"
            self._bar.update(
                self._task, completed=done.tokens, samples=text, rate=rate, written=human_bytes(done.bytes)
            )
        elif now - self._line_at >= 10 or done.samples == samples:
            self._line_at = now
            eta = (tokens - done.tokens) / max(rate, 1e-9)
            say(
                f"{done.samples}/{samples} samples  {rate:,.0f} tok/s  {human_bytes(done.bytes)} written  ETA {eta:.0f} s"
            )

    def begin(self) -> None:
        """The rate counts from here."""
        self._begun = self._line_at = time.monotonic()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def parity_text(parity: dict[str, Any] | None, num_layers: int | None = None) -> str:
    """One line for a parity report."""
    if parity is None:
        return "not checked"
    # Engine vllm compares a sample alone with the same sample in a batch, engine transformers with an independent pass.
    off = parity.get("relative_l2") or parity.get("alone_relative_l2") or {}
    text = (
        f"passed on {parity['samples']} samples, worst layer off by {max(off.values(), default=0.0):.1e} (relative L2)"
    )
    if "top1_agreement" in parity:
        text += f", next token rebuilt at {parity['top1_agreement']:.1%} of positions"
        text += f" ({parity['near_ties']} near ties)" if parity.get("near_ties") else ""
    return text


def show_extract_report(report: ExtractReport) -> None:
    """What a run did, and where it lies."""
    rate = report.new_tokens / report.seconds if report.new_tokens and report.seconds else None
    rows = [
        ("store", str(report.folder)),
        ("samples", f"{report.written} of {report.samples}, {report.tokens} tokens, {human_bytes(report.bytes)}"),
        (
            "this run",
            f"{report.new_samples} samples, {report.new_tokens} tokens in {report.seconds:.1f} s"
            + (f", {rate:,.0f} tok/s" if rate else ""),
        ),
        ("parity", parity_text(report.parity)),
    ]
    if report.rejected:
        rows.append(
            (
                "not written",
                f"{len(report.rejected)}, reasons in {report.folder / 'ledger.jsonl'}; first: {report.rejected[0][1]}",
            )
        )
    show_rows(rows)


def show_rows(rows: Sequence[tuple[str, str]], title: str | None = None, whole: Sequence[str] = ()) -> None:
    """Name and value, one row each. whole: rows that are one line however long, to be copied."""
    if title:
        out.print(f"[italic]{title}[/]")
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        text = value if name in whole else wrapped(value, width + 2)
        out.print(f"[cyan]{name:<{width}}[/]  {escape(text)}", soft_wrap=True)


def show_verify_report(report: VerifyReport, num_layers: int) -> None:
    """What `verify` found, norms and errors per layer."""
    rows = [
        ("store", str(report.folder)),
        (
            "read",
            f"{report.shards} shards, {report.samples} samples, {report.tokens} tokens, {human_bytes(report.bytes)}",
        ),
    ]
    if report.not_written:
        rows.append(("ledger", f"{report.not_written} samples were not written"))
    if report.recompute_note:
        rows.append(("recomputed", report.recompute_note))
    show_rows(rows, "verify")
    show_layers(report.norms, num_layers, (report.recomputed or {}).get("relative_l2"))
    if report.mark_note:
        err.print(f"[yellow]WARN[/] {escape(report.mark_note)}", soft_wrap=True)
    for problem in report.problems:
        err.print(f"[bold red]FAIL[/] {escape(problem)}", soft_wrap=True)
    if not report.problems:
        out.print("[green]OK[/] the store is whole" + (" and its states are the target's" if report.recomputed else ""))


def show_layers(norms: dict[int, dict[str, float]], num_layers: int, errors: dict[str, float] | None = None) -> None:
    """Norms per layer (mean, min, max of ||h_t||), and the error against an independent pass where known."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("layer")
    for column in ("mean norm", "min", "max"):
        table.add_column(column, justify="right")
    if errors is not None:
        table.add_column("relative L2 to an independent pass", justify="right")
    for i, values in norms.items():
        cells = [describe_layer(i, num_layers), *(f"{values[k]:.4g}" for k in ("mean", "min", "max"))]
        if errors is not None:
            cells.append(f"{errors[str(i)]:.1e}" if str(i) in errors else "")
        table.add_row(*cells)
    out.print(table)


def masked_text(pieces: Sequence[str], mask: Sequence[int]) -> Text:
    """Tokens as text; supervised ones (mask 1) bold green, the rest dim. Control characters are spelled out."""
    text = Text()
    for piece, supervised in zip(pieces, mask, strict=True):
        shown = piece.replace("\n", "⏎\n").replace("\t", "⇥")
        text.append(shown, style="bold green" if supervised else "dim")
    return text


def decode_pieces(model_id: str, token_ids: Sequence[int]) -> list[str] | None:
    """Each token as text, by the target's tokenizer; None where that is not at hand."""
    from eyas.base.errors import InputError
    from eyas.target.embedded import resolve_model_path

    try:
        folder = resolve_model_path(model_id)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (InputError, OSError, ValueError):
        return None
    return [str(tokenizer.decode([int(i)])) for i in token_ids]


def inspect_store(folder: Path, sample: int) -> None:
    """`eyas inspect STORE`: what it holds, norms per layer, and one sample's tokens with the mask in colour."""
    from eyas.base.errors import InputError
    from eyas.gates.mark import read_mark
    from eyas.store.reader import open_states

    states = open_states(folder, allow_open=True)
    m = states.manifest
    totals = m.get("totals") or {"samples": len(states), "tokens": int(states.lengths.sum()), "bytes": 0}
    mark = read_mark(m)
    N = m["model"]["num_layers"]
    show_rows(
        [
            ("store", f"{folder} (format {m['format_version']}, {m['status']})"),
            ("model", f"{m['model']['id']}, {m['model']['architecture']}, {N} layers, H {m['model']['hidden_size']}"),
            ("layers", ", ".join(describe_layer(i, N) for i in m["layer_ids"])),
            ("dtype", m["dtype"] if m["store_dtype"] == m["dtype"] else f"{m['dtype']}, stored as {m['store_dtype']}"),
            (
                "engine",
                f"{m['engine'].get('name')} {m['engine'].get('version')} on {m['engine'].get('device_name', m['engine'].get('device'))}",
            ),
            (
                "holds",
                f"{totals['samples']} samples, {totals['tokens']} tokens, {human_bytes(totals['bytes'])}, dataset {m['dataset']['hash']}",
            ),
            ("not written", str(totals.get("not_written", 0))),
            ("parity", parity_text(m.get("parity"))),
            ("verified", "not yet: `eyas verify`" if mark is None else mark.text),
        ]
    )
    norms: dict[int, dict[str, float]] = {}
    for i in m["layer_ids"]:
        entries = [(s["tokens"], s["norms"][str(i)]) for s in m.get("shards", [])]
        if entries:
            tokens = sum(count for count, _ in entries)
            norms[i] = {
                "mean": sum(count * n["mean"] for count, n in entries) / tokens,
                "min": min(n["min"] for _, n in entries),
                "max": max(n["max"] for _, n in entries),
            }
    if norms:
        out.print()
        show_layers(norms, N)
    if not len(states):
        return
    if not 0 <= sample < len(states):
        raise InputError(f"--sample {sample}: the store holds {len(states)} samples", f"0 to {len(states) - 1}")
    one = states[sample]
    mask = one.loss_mask.tolist()
    out.print(f"\nsample {sample}, id {one.id}")
    out.print(f"{len(one)} tokens, {sum(mask)} supervised ([bold green]green[/])")
    pieces = decode_pieces(m["model"]["id"], one.token_ids.tolist())
    out.print(masked_text(pieces if pieces is not None else [f"{i} " for i in one.token_ids.tolist()], mask))
