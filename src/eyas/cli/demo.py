"""`eyas demo`: the pipeline on the embedded model and the conversations that ship with eyas, minutes on a laptop CPU.

    prepare -> extract -> verify                           varied conversations, as they are
    regenerate -> extract -> verify -> train -> eval       a narrow domain that a draft learns in minutes

Every stage is the public function that a user calls, on real files; what it leaves can be looked at with `eyas inspect`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from eyas.base.errors import StoreError
from eyas.base.settings import Flag
from eyas.cli.demo_draft import narrow_domain_draft
from eyas.cli.demo_draft import rows as draft_rows
from eyas.cli.runs import typed
from eyas.data.preparation import prepare
from eyas.data.settings import PrepareSettings
from eyas.engines.base import Progress
from eyas.extraction.extract import extract
from eyas.extraction.settings import ExtractSettings
from eyas.gates.settings import VerifySettings
from eyas.gates.verification import verify
from eyas.runs import run as runs
from eyas.runs.run import note, report_progress
from eyas.target.embedded import EMBEDDED_NAME, resolve_model_path
from eyas.target.model_files import human_bytes
from eyas.views.console import BulkBar, parity_text, raw, say, show_preflight, show_rows
from eyas.views.report import write_report
from eyas.views.train_console import TrainDisplay

#: Optimizer steps of the demo: about two minutes; more gives more (`benchmarks/acceptance_cpu.py`).
TRAIN_STEPS = 280


Rows = tuple[tuple[str, str], ...]


def demo(
    output_dir: Annotated[Path, Flag(help="Where everything goes.")] = Path("eyas-demo"),
    states_only: Annotated[bool, Flag(help="Stop after the verified store: a minute or two.")] = False,
) -> None:
    """`eyas demo`: one run, and its page at the end."""
    store = str((output_dir / "states").absolute())
    with runs.start("demo", list(typed), output_dir=store, model_path=EMBEDDED_NAME) as one:
        pipeline(output_dir, states_only=states_only)
    page = write_report(runs.load(one.folder), output_dir / "report.html")
    raw(f"\nall of it on one page: {page}")


def pipeline(folder: Path, *, states_only: bool = False) -> Rows:
    """Run the demo into a directory (made if missing; resumed if it was stopped); returns the rows of its closing tables.

    Raises:
        StoreError: the store does not verify. And whatever the stages raise.
    """
    begun = time.monotonic()
    say("1/9  the embedded model (unpacked once, about 20 s)")
    model = resolve_model_path(EMBEDDED_NAME)
    say("2/9  prepare: conversations -> tokens and loss masks")
    prepared = prepare(PrepareSettings(("conversations",), EMBEDDED_NAME, folder / "dataset"))
    say("3/9  extract: hidden states of layers 2, 15, 27 and the target state")
    bar = BulkBar()

    def advance(done: Progress, samples: int, tokens: int) -> None:
        report_progress(samples=done.samples, total=samples, tokens=done.tokens, total_tokens=tokens, bytes=done.bytes)
        bar.update(done, samples, tokens)

    try:
        report = extract(
            ExtractSettings(model_path=EMBEDDED_NAME, prepared_data=folder / "dataset", output_dir=folder / "states"),
            on_preflight=show_preflight,
            on_stage=lambda line: bar.begin() if line.startswith("extracting") else None,
            on_progress=advance,
        )
    finally:
        bar.close()
    say("4/9  verify: every byte, then samples recomputed by an independent forward pass")
    checked = verify(VerifySettings(folder / "states"))
    if checked.problems:
        raise StoreError(
            f"the demo's store does not verify: {checked.problems[0]}", "please report it with this output"
        )
    rate = (
        f"extracted at {report.new_tokens / report.seconds:,.0f} tok/s"
        if report.new_tokens
        else "all there from an earlier run"
    )
    store_rows: Rows = (
        ("model", f"{EMBEDDED_NAME} (SmolLM2-135M-Instruct), {model}"),
        (
            "dataset",
            f"{folder / 'dataset'}: {prepared.samples} samples, {prepared.tokens} tokens, {prepared.supervised_tokens} supervised",
        ),
        (
            "states",
            f"{folder / 'states'}: {report.written} samples, {human_bytes(report.bytes)}, {rate}",
        ),
        ("parity", parity_text(report.parity)),
        ("verified", f"{checked.shards} shards, {checked.tokens} tokens; {checked.recompute_note}"),
        ("time", f"{time.monotonic() - begun:.0f} s"),
        ("look at it", f"eyas inspect {folder / 'states'}    eyas inspect {folder / 'dataset'}"),
    )
    show_rows(store_rows, "\ndone")
    note(results=[list(row) for row in store_rows])
    if states_only:
        return store_rows
    say("now a draft, on a narrow domain that it learns in minutes (Ctrl-C leaves the store as it is)")
    stage = iter(range(5, 10))
    display = TrainDisplay()
    try:
        draft = narrow_domain_draft(
            folder / "narrow",
            lambda line: say(f"{next(stage)}/9  {line}"),
            progress=display.update,
            steps=TRAIN_STEPS,
            eval_every=75,
        )
    finally:
        display.close()
    found: Rows = (*draft_rows(draft), ("time", f"{time.monotonic() - begun:.0f} s in all"))
    show_rows(found, "\ndone")
    note(results=[list(row) for row in (*store_rows, *found)])
    return (*store_rows, *found)
