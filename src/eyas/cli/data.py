"""The commands that make token datasets: `eyas prepare`, `eyas regenerate`."""

from __future__ import annotations

from typing import Annotated

from eyas.base.errors import EXIT_INCOMPLETE
from eyas.base.settings import Flag
from eyas.data.settings import PrepareSettings, RegenerateSettings

Strict = Annotated[bool, Flag(help="End with exit code 20 when any row was rejected.")]


def prepare(settings: PrepareSettings, strict: Strict = False) -> int:
    """`eyas prepare`: a line of counts while it runs, a table at the end."""
    from eyas.data import preparation
    from eyas.views.console import err
    from eyas.views.dataset_view import print_report

    with err.status("preparing") as status:

        def show(so_far: preparation.PrepareReport) -> None:
            rate = f"{so_far.tokens_per_second:,.0f} tokens/s"
            status.update(f"{so_far.rows:,} rows, {so_far.dropped:,} dropped, {so_far.tokens:,} tokens, {rate}")

        report = preparation.prepare(settings, progress=show)
    print_report(report)
    return EXIT_INCOMPLETE if report.broken_sources or (strict and report.dropped) else 0


def regenerate(settings: RegenerateSettings, strict: Strict = False) -> int:
    """`eyas regenerate`: a table at the end."""
    from eyas.data.regeneration import RegenerateReport
    from eyas.engines.regenerate import regenerate as run
    from eyas.runs.run import report_progress
    from eyas.views.dataset_view import print_regenerated

    def heartbeat(so_far: RegenerateReport) -> None:
        report_progress(samples=so_far.resumed + so_far.conversations, tokens=so_far.generated_tokens)

    report = run(settings, progress=heartbeat)
    print_regenerated(report)
    return EXIT_INCOMPLETE if report.broken_sources or (strict and report.rejected) else 0
