"""From a large language model to a trained EAGLE-3 draft: hidden states of chosen layers, proven right, at prefill speed."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from enum import Enum
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eyas.base.errors import EXIT_INTERRUPTED, EyasError, InputError
from eyas.cli import data as cli_data
from eyas.cli import gates as cli_gates
from eyas.cli import runs as cli_runs
from eyas.cli import train as cli_train
from eyas.cli.config_file import expand_config

if TYPE_CHECKING:
    from eyas.base.check import Check
    from eyas.engines.base import Progress

EPILOG = "Any command takes --config FILE.yaml: flags without their dashes, and values; what is typed wins."

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__, epilog=EPILOG
)


class Dtype(str, Enum):
    """Compute dtype."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float16 = "float16"


def _version(show: bool) -> None:
    if show:
        from eyas.base.manifest import package_version

        typer.echo(f"eyas {package_version('eyas') or 'unknown'}")
        raise typer.Exit


@app.callback()
def settings(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    log_level: Annotated[
        str | None,
        typer.Option(
            envvar="EYAS_LOG_LEVEL",
            help="debug, info, warning or error, for eyas's own lines. Default: info into a run's logs, warning here.",
        ),
    ] = None,
) -> None:
    """Set up before any command."""
    from eyas.runs import log_records

    try:
        level = log_records.level_number(log_level or "warning")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--log-level") from None
    if log_level:
        os.environ[log_records.LEVEL_VARIABLE] = log_level
    log_records.log_to_terminal(level)


app.command()(cli_data.prepare)
app.command()(cli_runs.in_run(cli_train.train))
app.command("eval")(cli_runs.in_run(cli_train.evaluate, "eval"))
app.command()(cli_train.export)
app.command("import")(cli_train.import_draft)
app.command()(cli_runs.doctor)
app.command()(cli_runs.report)
app.command()(cli_runs.in_run(cli_data.regenerate))
app.add_typer(cli_runs.runs_app, name="runs")


@app.command()
@cli_runs.in_run
def extract(
    model_path: Annotated[
        str, typer.Option(help="The target: a Hugging Face folder, a hub id, or `smollm2` (embedded).")
    ],
    prepared_data: Annotated[
        str, typer.Option(help="Token dataset: a folder from `eyas prepare`, or a .jsonl of input_ids and loss_mask.")
    ],
    output_dir: Annotated[str, typer.Option(help="The state store. Resumed when it holds the same run's states.")],
    engine: Annotated[str, typer.Option(help="transformers | vllm")] = "transformers",
    layer_ids: Annotated[
        list[str] | None,
        typer.Option(help="Layers to store, or `final`; several after one flag. Default: 2, N//2, N-3."),
    ] = None,
    layer_index: Annotated[
        Literal["stream", "output"],
        typer.Option(help="How --layer-ids count: `stream` (k = after k layers) or `output` (0-based layer outputs)."),
    ] = "stream",
    final: Annotated[
        bool,
        typer.Option("--final/--no-final", help="Also store the target state (the last layer, before the final norm)."),
    ] = True,
    dtype: Annotated[Dtype, typer.Option(help="Compute dtype; auto is the checkpoint's.")] = Dtype.auto,
    store_dtype: Annotated[
        str, typer.Option(help="auto (as computed) or fp8 (one scale per token and layer).")
    ] = "auto",
    batch_size: Annotated[int | None, typer.Option(help="Most samples per forward pass. Default: no limit.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Most tokens per forward pass. Default: by device.")] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Longer samples go to the ledger. Default: the model's positions.")
    ] = None,
    tp_size: Annotated[int, typer.Option(help="Tensor parallel ranks (engine vllm).")] = 1,
    pp_size: Annotated[int, typer.Option(help="Pipeline stages (engine vllm).")] = 1,
    expert_parallel: Annotated[bool, typer.Option(help="Split experts over the ranks (engine vllm).")] = False,
    distributed_executor_backend: Annotated[
        str | None, typer.Option(help="mp (one host) or ray (several), passed to vLLM.")
    ] = None,
    enforce_eager: Annotated[bool, typer.Option(help="No torch.compile, no CUDA graphs (engine vllm).")] = False,
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights (engine vllm).")] = "auto",
    capture: Annotated[
        str, typer.Option(help="aux (the model's interface), hooks (eager) or native (vLLM's own connector).")
    ] = "aux",
    trace: Annotated[
        bool, typer.Option(help="Record every hop of the first steps; see `eyas trace` (engine vllm).")
    ] = False,
    rehearsal: Annotated[
        str, typer.Option(help="Gate 2 first: auto (before long loads), always or never (engine vllm).")
    ] = "auto",
    part: Annotated[str | None, typer.Option(help="i/n: extract the i-th of n parts into one shared store.")] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of GPU memory for the engine (engine vllm).")
    ] = 0.9,
    shard_size: Annotated[float, typer.Option(help="Megabytes aimed at per shard.")] = 256,
    parity_samples: Annotated[int, typer.Option(help="Samples for the parity gate.")] = 4,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 (engine transformers).")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads (engine transformers). Default: as many as are free.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the model folder's own code.")] = False,
) -> None:
    """Extract hidden states of chosen layers into a state store, through the gates: preflight, parity, bulk."""
    options = cli_gates.extract_options(locals())
    from eyas.extraction.extract import extract as run
    from eyas.extraction.settings import ExtractSettings
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
        report = run(
            ExtractSettings(**options),
            on_preflight=show,
            on_stage=stage,
            on_progress=advance,
        )
    finally:
        bar.close()
    console.show_extract_report(report)
    if report.interrupted:
        console.err.print("stopped as asked: finished shards are kept. Run the same command again to go on.")
    raise typer.Exit(report.exit_code)


app.command()(cli_runs.in_run(cli_gates.rehearse_like(unwrap(extract))))
app.command()(cli_gates.trace)


@app.command()
def verify(
    store: Annotated[Path, typer.Argument(help="A state store.")],
    model_path: Annotated[
        str | None,
        typer.Option(help="The target, to recompute samples. Default: the one the store names, if it is here."),
    ] = None,
    recompute: Annotated[int, typer.Option(min=0, help="How many random samples to recompute; 0 for none.")] = 4,
    seed: Annotated[int | None, typer.Option(help="Which samples; default: others each time.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option(help="Run the model folder's own code.")] = False,
) -> None:
    """Check every byte of a store, then recompute a few samples by an independent forward pass."""
    from eyas.base.errors import StoreError
    from eyas.base.manifest import read_manifest
    from eyas.gates.verification import verify as run
    from eyas.store.format import FORMAT_VERSION, KIND
    from eyas.views import console

    report = run(store, model_path, recompute=recompute, seed=seed, device=device, trust_remote_code=trust_remote_code)
    console.show_verify_report(report, read_manifest(store, KIND, FORMAT_VERSION)["model"]["num_layers"])
    if report.problems:
        raise typer.Exit(StoreError.exit_code)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A state store, a token dataset or a draft.")],
    sample: Annotated[
        int | None, typer.Option(help="Which sample's tokens to show. Default: the first, or a few.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="How many samples of a dataset to show.")] = 3,
    html: Annotated[Path | None, typer.Option(help="Also write a page about a dataset to this file.")] = None,
    model_path: Annotated[str | None, typer.Option(help="Whose tokenizer spells a dataset's tokens.")] = None,
    states: Annotated[
        int, typer.Option(min=1, help="States per token, for the predicted bytes of a dataset's states.")
    ] = 4,
    tokens_per_second: Annotated[float, typer.Option(min=1, help="Assumed rate, for the predicted hours.")] = 20_000,
) -> None:
    """Show what a folder holds; of stores and datasets also samples' tokens with the loss mask in colour."""
    from eyas.data.dataset import is_dataset
    from eyas.views import console
    from eyas.views.dataset_view import inspect_dataset
    from eyas.views.draft_view import inspect_draft, is_draft

    if is_dataset(folder):
        inspect_dataset(
            folder,
            sample=sample,
            samples=samples,
            html=html,
            model_path=model_path,
            states=states,
            tokens_per_second=tokens_per_second,
        )
        return
    if html is not None and folder.is_dir():
        raise InputError(f"--html writes a page about a token dataset, and {folder} is none", "leave --html out")
    if is_draft(folder):
        inspect_draft(folder)
        return
    console.inspect_store(folder, sample or 0)


@app.command()
def demo(
    output_dir: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("eyas-demo"),
    states_only: Annotated[bool, typer.Option(help="Stop after the verified store: a minute or two.")] = False,
) -> None:
    """The whole pipeline on the embedded model: minutes on a laptop CPU, no network."""
    from eyas.cli.demo import demo as run
    from eyas.runs import run as runs
    from eyas.views import console
    from eyas.views.report import write_report

    store = str((output_dir / "states").absolute())
    with runs.start("demo", list(cli_runs.typed), output_dir=store, model_path="smollm2") as one:
        run(
            output_dir,
            lambda line: console.out.print(f"[bold]{line}[/]"),
            lambda report: console.show_rows(report.rows, "\ndone"),
            states_only=states_only,
        )
    page = write_report(runs.load(one.folder), output_dir / "report.html")
    console.out.print(f"\nall of it on one page: {page}")


#: Options that take several values after one flag, as in `--layer-ids 2 30 58 60`.
MANY = ("--layer-ids", "--aux-layers", "--prompts")


def spread_lists(arguments: list[str]) -> list[str]:
    """`--layer-ids 2 30 58` -> `--layer-ids 2 --layer-ids 30 --layer-ids 58`, since the parser takes one value per flag."""
    spread: list[str] = []
    flag: str | None = None
    for argument in arguments:
        if argument in MANY:
            flag = argument
        elif flag is not None and not argument.startswith("--"):
            spread += [flag, argument]
        else:
            flag = None
            spread.append(argument)
    if arguments and arguments[-1] in MANY:
        spread.append(arguments[-1])
    return spread


def flags_of(arguments: list[str]) -> set[str]:
    """Every flag of the command that these arguments begin with (`extract ...`, `runs list ...`); empty where they name none."""
    command: Any = typer.main.get_command(app)
    for word in arguments:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
    if hasattr(command, "commands"):
        return set()
    return {name for one in command.params for name in (*one.opts, *one.secondary_opts)}


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; an EyasError becomes its message on stderr and its own exit code."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # Before torch is loaded: on a shared machine, OpenMP threads that spin while they wait made two threads up to eight times
    # slower than one (measured); sleeping ones cost next to nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        cli_runs.typed[:] = expand_config(sys.argv[1:] if arguments is None else arguments, flags_of)
        app(spread_lists(cli_runs.typed), prog_name="eyas")
    except EyasError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.secho(
            "stopped at once: finished shards are kept, the same command goes on from there", fg="yellow", err=True
        )
        sys.exit(EXIT_INTERRUPTED)
