"""What `eyas train` shows: one line of live figures, then a table. Rich does the drawing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from eyas.console import err, out
from eyas.runs import report_progress

if TYPE_CHECKING:
    from eyas.training import TrainReport


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
            size, coverage = figures["vocabulary"]["size"], figures["vocabulary"]["coverage"]
            out.print(f"draft vocabulary of {size:,} tokens covers {100 * coverage:.2f} % of the supervised ones")
            if figures["before"]:
                out.print(f"untrained: {describe(figures['before'])}")
            return
        if "simulated" in figures:
            self._length = f"{figures['simulated']['acceptance_length']:.2f}"
            out.print(f"step {figures['step']}: {describe(figures['simulated'])}")
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
                self._bar = Progress(
                    TextColumn("{task.description}"), BarColumn(20), TimeRemainingColumn(), console=out
                )
                self._task = self._bar.add_task("", total=1.0)
                self._bar.start()
            self._bar.update(self._task, completed=figures["share"], description=text)
        elif time.monotonic() - self._line_at >= 10 or figures["step"] == figures["total_steps"]:
            self._line_at = time.monotonic()
            out.print(text)

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
    table = Table(show_header=False, show_edge=False, pad_edge=False)
    table.add_row("draft", str(report.output_dir))
    table.add_row("trained", f"{report.steps} steps, {report.tokens:,} tokens, {report.seconds:.0f} s")
    for name, found in (("untrained", report.before), (f"best (step {report.best_step})", report.best)):
        if found:
            table.add_row(name, describe(found))
    out.print(table)
    if report.interrupted:
        err.print("stopped as asked, with a checkpoint. Run the same command again to go on.")


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


def _shown(x: float | None, form: str = "{:.2f}") -> str:
    return "-" if x is None else form.format(x)


def show_acceptance(report: dict[str, Any]) -> None:
    """One row per prompt set, the baselines beside the draft."""
    table = Table(
        title=f"acceptance length, chain of {report['settings']['chain']}, bonus token included", title_justify="left"
    )
    guessers = list(report["overall"]["baselines"])
    for column in ("set", "prompts", "draft", "95 %", "by position", *guessers, "tok/s", "plain", "speed-up"):
        table.add_column(column, justify="left" if column == "set" else "right", overflow="fold")
    for name, found in {
        **report["sets"],
        **({"overall": report["overall"]} if len(report["sets"]) > 1 else {}),
    }.items():
        table.add_row(
            name,
            str(found["prompts"]),
            _shown(found["acceptance_length"]),
            "-".join(_shown(x) for x in found["interval_95"]),
            " ".join(_shown(x, "{:.0%}").rstrip("%") for x in found["by_position"]) + " %",
            *(_shown(found["baselines"][g]) for g in guessers),
            _shown(found["tokens_per_second"], "{:.1f}"),
            _shown(found["plain_tokens_per_second"], "{:.1f}"),
            _shown(found["speed_up"]),
        )
    out.print(table)
    overall = report["overall"]
    if overall["replies_equal_to_plain"] is not None:
        equal = f"{overall['replies_equal_to_plain']} replies equal plain greedy decoding token by token"
        out.print(equal + (f", {len(overall['ties'])} part at a tie:" if overall["ties"] else ""))
        for tie in overall["ties"][:5]:
            out.print(f"  {tie}")
    for name, served in report.get("vllm", {}).items():
        places = " ".join(f"{100 * x:.0f}" for x in served["by_position"])
        out.print(
            f"vLLM on {name}: acceptance length {served['acceptance_length']:.3f}, {served['ratio_to_ours']:.3f} of ours "
            f"({served['ratio_by_its_rule']:.3f} with ours counted by its rule: guesses behind the end of a reply count too), "
            f"by position {places} %, {served['tokens_per_second']:.1f} tok/s"
        )
    diagnosis = report["diagnosis"]
    out.print(diagnosis["verdict"])
    for check in diagnosis["checks"]:
        out.print(
            f"  [{'green' if check['ok'] else 'bold red'}]{'OK' if check['ok'] else 'FAIL'}[/] {check['name']}: {check['text']}"
        )
