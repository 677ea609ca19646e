"""The commands around the vLLM engine's gates, `eyas rehearse` and `eyas trace`; `cli.py` registers them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer


def extract_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of `eyas extract` as the options of `eyas.extract`."""
    options = {name: flag.value if isinstance(flag, Enum) else flag for name, flag in flags.items()}
    if options["layer_ids"] is not None:
        options["layer_ids"] = [int(i) if i.lstrip("-").isdigit() else i for i in options["layer_ids"]]
    return options


def rehearse_like(extract: Callable[..., None]) -> Callable[..., None]:
    """`eyas rehearse` takes the very flags of `eyas extract`, so that a command line is rehearsed by changing one word."""

    def rehearse(**flags: Any) -> None:
        """Gate 2: the whole of `extract` with random weights and few layers, all ranks, into a temporary store (engine vllm)."""
        from eyas.engines.contract import hop_table
        from eyas.extraction.rehearse import rehearse as run
        from eyas.extraction.settings import ExtractSettings
        from eyas.views import console

        def stage(line: str) -> None:
            if line != "preflight":
                console.out.print(f"[bold]{line}[/]")

        report = run(ExtractSettings(**extract_options(flags)), on_preflight=console.show_preflight, on_stage=stage)
        typer.echo(hop_table(report.hops[:24]))
        mapped = ", ".join(f"{asked} as {shallow}" for asked, shallow in report.layer_map.items())
        typer.echo(
            f"rehearsed in {report.seconds:.0f} s (load {report.load_seconds:.0f} s): {report.path}; layers {mapped}; "
            f"{report.samples} samples, {report.tokens} tokens, {len(report.hops)} hops traced, store verified"
        )

    signature = inspect.signature(extract, eval_str=True)
    rehearse.__signature__ = signature  # type: ignore[attr-defined]
    rehearse.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return rehearse


def trace(
    path: Annotated[
        Path, typer.Argument(help="A store extracted with --trace, one trace file, or a run (id or folder).")
    ],
    limit: Annotated[int, typer.Option(min=0, help="Most rows to show; 0 for all.")] = 60,
) -> None:
    """Show the hops that traced states took: model output, split by request, host copy, shard; the first bad one marked."""
    from eyas.base.errors import ContractError
    from eyas.engines.contract import first_bad, hop_table, read_hops

    hops = read_hops(_where_traced(path))
    bad = first_bad(hops)
    shown = hops if limit == 0 else hops[:limit]
    if bad is not None and bad not in shown:
        shown = [*shown, bad]
    typer.echo(hop_table(shown))
    typer.echo(f"{len(hops)} hops" + (f", {len(shown)} shown" if len(shown) < len(hops) else ""))
    if bad is not None:
        raise typer.Exit(ContractError.exit_code)


def _where_traced(path: Path) -> Path:
    """A path that holds a trace is taken as it is; otherwise it names a run, and the trace lies in the store that the run wrote."""
    from eyas.base.errors import InputError
    from eyas.runs.run import find

    if path.is_file() or (path.is_dir() and any(path.rglob("trace-*.jsonl"))):
        return path
    try:
        output = find(path).record.get("output_dir")
    except InputError:
        return path  # neither: the reader says what is missing
    return Path(output) if output else path
