"""The commands about states: `eyas extract`, `rehearse`, `trace`, `verify`, `inspect`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt

from eyas.base.errors import ContractError, InputError, StoreError
from eyas.base.settings import Flag
from eyas.extraction.settings import ExtractSettings
from eyas.gates.settings import VerifySettings

if TYPE_CHECKING:
    from eyas.base.check import Check
    from eyas.engines.base import Progress


def extract(settings: ExtractSettings) -> int:
    """`eyas extract`: the preflight table, a line for each stage, a bar for the bulk, a table at the end."""
    from eyas.extraction.extract import extract as run
    from eyas.runs.run import note, report_progress
    from eyas.views import console

    bar = console.BulkBar()

    def show(checks: list[Check]) -> None:
        note(preflight=[asdict(check) for check in checks])
        console.show_preflight(checks)

    def stage(line: str) -> None:
        report_progress(stage=line.split()[0])
        if line.startswith("extracting"):
            bar.begin()
        if line != "preflight":
            console.out.print(f"[bold]{line}[/]")

    def advance(done: Progress, samples: int, tokens: int) -> None:
        report_progress(samples=done.samples, total=samples, tokens=done.tokens, total_tokens=tokens, bytes=done.bytes)
        bar.update(done, samples, tokens)

    try:
        report = run(settings, on_preflight=show, on_stage=stage, on_progress=advance)
    finally:
        bar.close()
    console.show_extract_report(report)
    if report.interrupted:
        console.err.print("stopped as asked: finished shards are kept. Rerun the same command to resume.")
    return report.exit_code


def rehearse(settings: ExtractSettings) -> None:
    """`eyas rehearse`: the very flags of `eyas extract`, so that a command line is rehearsed by changing one word."""
    from eyas.engines.contract import hop_table
    from eyas.extraction.rehearse import rehearse as run
    from eyas.views import console

    def stage(line: str) -> None:
        if line != "preflight":
            console.out.print(f"[bold]{line}[/]")

    report = run(settings, on_preflight=console.show_preflight, on_stage=stage)
    console.raw(hop_table(report.hops[:24]))
    mapped = ", ".join(f"{asked} as {shallow}" for asked, shallow in report.layer_map.items())
    console.raw(
        f"rehearsed in {report.seconds:.0f} s (load {report.load_seconds:.0f} s): {report.path}; layers {mapped}; "
        f"{report.samples} samples, {report.tokens} tokens, {len(report.hops)} hops traced, store verified"
    )


def trace(
    path: Annotated[
        Path, Flag(positional=True, help="A store extracted with --trace, one trace file, or a run (id or directory).")
    ],
    limit: Annotated[int, Ge(0), Flag(help="Most rows to show; 0 for all.")] = 60,
) -> int:
    """`eyas trace`: a table of hops; ends with the contract's exit code where one is bad."""
    from eyas.engines.contract import first_bad, hop_table, read_hops
    from eyas.views import console

    hops = read_hops(_trace_of(path))
    bad = first_bad(hops)
    shown = hops if limit == 0 else hops[:limit]
    if bad is not None and bad not in shown:
        shown = [*shown, bad]
    console.raw(hop_table(shown))
    console.raw(f"{len(hops)} hops" + (f", {len(shown)} shown" if len(shown) < len(hops) else ""))
    return ContractError.exit_code if bad is not None else 0


def _trace_of(path: Path) -> Path:
    """A path that holds a trace is taken as it is; otherwise it names a run, whose store holds the trace."""
    from eyas.runs.run import find

    if path.is_file() or (path.is_dir() and any(path.rglob("trace-*.jsonl"))):
        return path
    try:
        output = find(path).record.get("output_dir")
    except InputError:
        return path  # neither: the reader says what is missing
    return Path(output) if output else path


def verify(settings: VerifySettings) -> int:
    """`eyas verify`: norms and errors by layer, every problem."""
    from eyas.gates.verification import verify as run
    from eyas.store.format import read_store_manifest
    from eyas.views import console

    report = run(settings)
    console.show_verify_report(report, read_store_manifest(settings.store)["model"]["num_layers"])
    return StoreError.exit_code if report.problems else 0


def inspect(
    directory: Annotated[Path, Flag(positional=True, exists=True, help="A state store, a token dataset or a draft.")],
    sample: Annotated[int | None, Flag(help="Which sample's tokens to show. Default: the first, or a few.")] = None,
    samples: Annotated[int, Ge(0), Flag(help="How many samples of a dataset to show.")] = 3,
    html: Annotated[Path | None, Flag(help="Also write a page about a dataset to this file.")] = None,
    model_path: Annotated[str | None, Flag(help="Whose tokenizer spells a dataset's tokens.")] = None,
    states: Annotated[int, Ge(1), Flag(help="States per token, for the predicted bytes of a dataset's states.")] = 4,
    tokens_per_second: Annotated[float, Gt(0), Flag(help="Assumed rate, for the predicted hours.")] = 20_000,
) -> None:
    """`eyas inspect`: whatever the directory is."""
    from eyas.data.dataset import is_dataset
    from eyas.views import console
    from eyas.views.dataset_view import inspect_dataset
    from eyas.views.draft_view import inspect_draft, is_draft

    if is_dataset(directory):
        inspect_dataset(
            directory,
            sample=sample,
            samples=samples,
            html=html,
            model_path=model_path,
            states=states,
            tokens_per_second=tokens_per_second,
        )
        return
    if html is not None and directory.is_dir():
        raise InputError(f"--html writes a page about a token dataset, which {directory} is not", "leave --html out")
    if is_draft(directory):
        inspect_draft(directory)
        return
    console.inspect_store(directory, sample or 0)
