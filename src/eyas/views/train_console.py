"""What `eyas train` shows: one line of live figures, then a table. Rich does the drawing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from eyas.evaluation.statistics import interval_text
from eyas.runs.run import report_progress
from eyas.views.console import err, out, say, show_rows, wrapped

if TYPE_CHECKING:
    from eyas.training.trainer import TrainReport


class TrainDisplay:
    """Loss, accuracy per step, simulated acceptance length, tokens/s, data wait. Without a terminal: a line every ten seconds."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: Any = None
        self._line_at = 0.0
        self._length = ""

    def update(self, figures: dict[str, Any]) -> None:
        """Take one report of the training loop."""
        if "vocabulary" in figures:
            say(f"states: {figures['states']}")
            size, coverage = figures["vocabulary"]["size"], figures["vocabulary"]["coverage"]
            say(f"draft vocabulary of {size:,} tokens covers {100 * coverage:.2f} % of the supervised ones")
            if figures["before"]:
                say(f"untrained: {describe(figures['before'])}")
            return
        if "simulated" in figures:
            self._length = f"{figures['simulated']['acceptance_length']:.2f}"
            say(f"step {figures['step']}: {describe(figures['simulated'])}", 2)
            return
        report_progress(
            stage="train", samples=figures["step"], total=figures["total_steps"], unit="steps", loss=figures["loss"][0]
        )
        accuracy = " ".join(f"{100 * a:.0f}" for a in figures["accuracy"])
        text = (
            f"step {figures['step']}  loss {figures['loss'][0]:.3f}  accuracy by step {accuracy} %  "
            f"{figures['tokens_per_second']:,.0f} tok/s  waited {figures['data_wait']:.1f} s for data"
        )
        if self._length:
            text += f"  acceptance length {self._length}"
        if out.is_terminal:
            if self._bar is None:
                column = TextColumn("{task.description}", table_column=Column(no_wrap=True))
                self._bar = Progress(column, BarColumn(None), TimeRemainingColumn(), console=out, expand=True)
                self._task = self._bar.add_task("", total=1.0)
                self._bar.start()
            short = f"step {figures['step']}  loss {figures['loss'][0]:.3f}  {figures['tokens_per_second']:,.0f} tok/s"
            short += f"  data {figures['data_wait']:.1f} s late" if figures["data_wait"] >= 0.05 else ""
            short += f"  length {self._length}" if self._length else ""
            fits = len(text) + 20 <= out.width
            self._bar.update(self._task, completed=figures["share"], description=text if fits else short)
        elif time.monotonic() - self._line_at >= 10 or figures["step"] == figures["total_steps"]:
            self._line_at = time.monotonic()
            say(text)

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()


def describe(simulated: dict[str, Any]) -> str:
    """One line for a simulated acceptance."""
    places = " ".join(f"{100 * x:.0f}" for x in simulated["by_position"])
    return (
        f"simulated acceptance length {simulated['acceptance_length']:.3f} (bonus token included), by position {places} %, "
        f"target's token in the draft vocabulary {100 * simulated['target_in_draft_vocabulary']:.1f} %"
    )


def show_train_report(report: TrainReport) -> None:
    """The closing table."""
    rows = [
        ("draft", str(report.output_dir)),
        ("trained", f"{report.steps} steps, {report.tokens:,} tokens, {report.seconds:.0f} s"),
    ]
    for name, found in (("untrained", report.before), (f"best (step {report.best_step})", report.best)):
        if found:
            rows.append((name, describe(found)))
    show_rows(rows)
    if report.interrupted:
        err.print("stopped as asked, with a checkpoint. Rerun the same command to resume.")


class EvalDisplay:
    """How many prompts of which set are answered."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._tasks: dict[str, Any] = {}

    def update(self, name: str, done: int, total: int) -> None:
        """Take one step."""
        if not out.is_terminal:
            return
        if self._bar is None:
            self._bar = Progress(TextColumn("{task.description}"), BarColumn(30), TimeRemainingColumn(), console=out)
            self._bar.start()
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total)
        self._bar.update(self._tasks[name], completed=done, description=f"{name} {done}/{total}")

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()


def _table(first: str, *columns: str) -> Table:
    """A name and figures; where the line is too short only the name folds."""
    table = Table(Column(first, overflow="fold"), show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _shown(x: float | None, form: str = "{:.2f}") -> str:
    return "-" if x is None else form.format(x)


#: Heads for guessers: their names in `acceptance.json` are wider than their figures.
HEADS = {"prompt lookup": "lookup", "n-gram": "n-gram", "lookup, then n-gram": "both"}


def show_acceptance(report: dict[str, Any]) -> None:
    """What the draft accepts, then what guessers without a network do on the same replies and what the clock says: a row per prompt set."""
    sets = {**report["sets"], **({"overall": report["overall"]} if len(report["sets"]) > 1 else {})}
    say(f"acceptance length, chain of {report['settings']['chain']}, bonus token included")
    accepted = _table("set", "prompts", "draft", "95 %", "% by position")
    for name, found in sets.items():
        places = " ".join(_shown(x, "{:.0%}").rstrip("%") for x in found["by_position"])
        length, spread = _shown(found["acceptance_length"]), interval_text(found["interval_95"])
        accepted.add_row(name, str(found["prompts"]), length, spread, places)
    out.print(accepted)
    say("\nguessers without a network on the same replies; tokens/s with the draft and plainly")
    guessers = list(report["overall"]["baselines"])
    beside = _table("set", *(HEADS.get(g, g) for g in guessers), "draft tok/s", "plain", "speed-up")
    for name, found in sets.items():
        speeds = [_shown(found[k], "{:.1f}") for k in ("tokens_per_second", "plain_tokens_per_second")]
        beside.add_row(name, *(_shown(found["baselines"][g]) for g in guessers), *speeds, _shown(found["speed_up"]))
    out.print(beside)
    out.print()
    overall = report["overall"]
    if overall["replies_equal_to_plain"] is not None:
        equal = f"{overall['replies_equal_to_plain']} replies equal plain greedy decoding token by token"
        say(equal + (f", {len(overall['ties'])} part at a tie:" if overall["ties"] else ""))
        for tie in overall["ties"][:5]:
            say(f"  {tie}", 4)
    for name, served in report.get("vllm", {}).items():
        places = " ".join(f"{100 * x:.0f}" for x in served["by_position"])
        say(
            f"vLLM on {name}: acceptance length {served['acceptance_length']:.3f}, {served['ratio_to_ours']:.3f} of ours "
            f"({served['ratio_by_its_rule']:.3f} with ours counted by its rule: guesses behind the end of a reply count too), "
            f"by position {places} %, {served['tokens_per_second']:.1f} tok/s"
        )
    diagnosis = report["diagnosis"]
    say(diagnosis["verdict"])
    for check in diagnosis["checks"]:
        style, word = ("green", "OK") if check["ok"] else ("bold red", "FAIL")
        text = escape(wrapped(f"{check['name']}: {check['text']}", 7))
        out.print(f"  [{style}]{word:<4}[/] {text}", soft_wrap=True)
