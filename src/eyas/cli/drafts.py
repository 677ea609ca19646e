"""The commands about drafts: `eyas train`, `eval`, `export`, `import`."""

from __future__ import annotations

import os
from typing import Any

from eyas.base.errors import EXIT_INTERRUPTED, StoreError
from eyas.evaluation.settings import EvalSettings
from eyas.exporting.settings import ExportSettings, ImportSettings
from eyas.training.settings import TrainSettings


def train(settings: TrainSettings) -> int:
    """`eyas train`: a line of live figures, a table at the end."""
    from eyas.base.stop_request import stoppable
    from eyas.runs.run import report_progress
    from eyas.training.trainer import train as run
    from eyas.views.train_console import TrainDisplay, show_train_report

    display = TrainDisplay()

    def show(figures: dict[str, Any]) -> None:
        display.update(figures)
        if "loss" in figures:
            done, total = figures["step"], figures["total_steps"]
            report_progress(stage="train", unit="steps", samples=done, total=total, loss=figures["loss"][0])

    with stoppable() as stop:
        stop.in_bulk = True  # from here on an ordered stop writes a checkpoint
        try:
            report = run(settings, progress=show, stop=stop)
        finally:
            display.close()
    if os.environ.get("RANK", "0") == "0":
        show_train_report(report)
    return EXIT_INTERRUPTED if report.interrupted else 0


def evaluate(settings: EvalSettings) -> int:
    """`eyas eval`: the tables; with a failed check the figures are kept, but no script may take them for a healthy draft's."""
    from eyas.evaluation.acceptance import evaluate as run
    from eyas.views.train_console import EvalDisplay, show_acceptance

    display = EvalDisplay()
    try:
        report = run(settings, progress=display.update)
    finally:
        display.close()
    show_acceptance(report)
    return 0 if all(check["ok"] for check in report["diagnosis"]["checks"]) else StoreError.exit_code


def export(settings: ExportSettings) -> None:
    """`eyas export`: what the exported README says."""
    from eyas.exporting.folders import export as run
    from eyas.views.console import raw

    directory = run(settings)
    readme = directory / "README.md"
    raw(readme.read_text() if readme.exists() else str(directory))


def import_draft(settings: ImportSettings) -> None:
    """`eyas import`: where the draft is."""
    from eyas.exporting.foreign import import_draft as run
    from eyas.views.console import raw

    raw(str(run(settings)))
