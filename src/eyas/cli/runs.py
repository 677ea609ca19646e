"""`eyas runs ...`, `eyas doctor`, `eyas report`, and what makes any other command a run (`in_run`)."""

from __future__ import annotations

import functools
import inspect
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.base.errors import EXIT_INTERRUPTED, EyasError, InputError, PreflightError

if TYPE_CHECKING:
    from eyas.runs.remote import Host
    from eyas.runs.run import RunView

runs_app = typer.Typer(no_args_is_help=True, help="Runs: list, follow, stop, resume them; clear up after them.")

#: The command line as typed, without the program; `cli.main` sets it.
typed: list[str] = []

_PANEL = "The run"
RunDir = Annotated[Path | None, typer.Option(help="The run's folder. Default: a new one.", rich_help_panel=_PANEL)]
RunId = Annotated[str | None, typer.Option(hidden=True)]
Detach = Annotated[bool, typer.Option("--detach", help="Run in the background, past logout.", rich_help_panel=_PANEL)]
LogLevel = Annotated[
    str | None,
    typer.Option(help="Of eyas's own lines, in every process: debug, info, warning, error.", rich_help_panel=_PANEL),
]
StallAfter = Annotated[
    float,
    typer.Option(min=0, help="Seconds without progress until the watchdog acts; 0: never.", rich_help_panel=_PANEL),
]
OnStall = Annotated[
    str, typer.Option(help="report (stacks into the logs) or stop (that, then end).", rich_help_panel=_PANEL)
]
HostName = Annotated[
    str | None, typer.Option("--host", help="Run there over ssh (user@box), detached.", rich_help_panel=_PANEL)
]
RunHost = Annotated[
    str | None,
    typer.Option("--host", help="The host on which the run is (user@box), over ssh.", rich_help_panel=_PANEL),
]
ThereName = Annotated[str | None, typer.Option("--host", help="Do this on that host (user@box), over ssh.")]
HostDir = Annotated[str | None, typer.Option(help="Folder on the host to run in.", rich_help_panel=_PANEL)]
HostCommand = Annotated[
    str | None,
    typer.Option(envvar="EYAS_REMOTE_COMMAND", help="How eyas is called there. Default: eyas.", rich_help_panel=_PANEL),
]

_OPTIONS: dict[str, tuple[Any, Any]] = {
    "run_dir": (RunDir, None),
    "run_id": (RunId, None),
    "detach": (Detach, False),
    "log_level": (LogLevel, None),
    "stall_after": (StallAfter, 1800.0),
    "on_stall": (OnStall, "report"),
    "host": (HostName, None),
    "host_dir": (HostDir, None),
    "host_command": (HostCommand, None),
}


def in_run(function: Callable[..., None], name: str | None = None) -> Callable[..., None]:
    """Make a command a run: adds the options above, and does what the command does inside `runs.start`.

    Put it between `@app.command()` and the function. Inside, `runs.report_progress(...)` is the heartbeat.
    """

    @functools.wraps(function)
    def command(**arguments: Any) -> None:
        chosen = {name: arguments.pop(name) for name in _OPTIONS}
        _start(function, name or function.__name__, chosen, arguments)

    signature = inspect.signature(function, eval_str=True)
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _OPTIONS.items()
    ]
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *extra])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in command.__signature__.parameters.values()}  # type: ignore[attr-defined]
    return command


def _start(function: Callable[..., None], name: str, chosen: dict[str, Any], arguments: dict[str, Any]) -> None:
    from eyas.runs import background, remote
    from eyas.runs import run as runs

    if chosen["on_stall"] not in ("report", "stop"):
        raise InputError(f"--on-stall {chosen['on_stall']} is unknown", "report or stop")
    if chosen["host"]:
        host = remote.host_of(chosen["host"], chosen["host_command"], chosen["host_dir"])
        run_id = chosen["run_id"] or runs.new_run_id(name)
        record = remote.start_there(host, background.without_flags(typed), run_id)
        typer.echo(f"run {run_id} is {record['state']} on {host.destination}")
        typer.echo(f"  follow it: eyas runs logs {run_id} -f --host {host.destination}", err=True)
        return
    if chosen["detach"]:
        view = background.detach(name, background.without_flags(typed), chosen["run_dir"], chosen["run_id"])
        typer.echo(view.id)
        typer.echo(f"  follow it: eyas runs logs {view.id} -f   stop it: eyas runs stop {view.id}", err=True)
        return
    if chosen["log_level"]:
        _show_level(chosen["log_level"])
    facts = {key: str(arguments[key]) for key in ("output_dir", "model_path", "prepared_data") if arguments.get(key)}
    if "output_dir" in facts:
        facts["output_dir"] = str(Path(facts["output_dir"]).absolute())
    try:
        with runs.start(
            name,
            list(typed),
            run_dir=chosen["run_dir"],
            run_id=chosen["run_id"],
            log_level=chosen["log_level"],
            stall_after=chosen["stall_after"],
            on_stall=chosen["on_stall"],
            **facts,
        ):
            function(**arguments)
    except KeyboardInterrupt:
        typer.secho("stopped; the same command goes on from what is finished", fg="yellow", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _show_level(name: str) -> None:
    from eyas.runs import log_records

    try:
        log_records.log_to_terminal(log_records.level_number(name))
    except ValueError as error:
        raise InputError(str(error), "give --log-level one of those") from None


# --- eyas runs ... -----------------------------------------------------------------------------------------------------------

RunName = Annotated[str, typer.Argument(help="A run's id, the beginning or end of it, its folder, or `last`.")]


def _there(host: str | None, command: str | None) -> Host | None:
    from eyas.runs.remote import host_of

    return host_of(host, command) if host else None


def _pass(host: Host) -> None:
    """Give the whole command to the host and end with its exit code."""
    from eyas.runs import background, remote

    raise typer.Exit(remote.pass_through(host, background.without_flags(typed)))


def describe(view: RunView) -> dict[str, Any]:
    """A run as `--json` gives it."""
    return {
        "id": view.id,
        "state": view.state,
        "folder": str(view.folder),
        "run": view.record,
        "progress": view.progress,
        "watchdog": view.watchdog,
    }


@runs_app.command("list")
def list_(
    host: ThereName = None,
    host_command: HostCommand = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="How many, newest first; 0: all.")] = 20,
) -> None:
    """The runs of this machine, newest first: state, progress, rate."""
    from eyas.runs import run as runs
    from eyas.views import run_table

    there = _there(host, host_command)
    if there:
        _pass(there)
    views = runs.list_runs()
    if as_json:
        for view in views[: limit or None]:
            typer.echo(json.dumps(describe(view)))
        return
    if not views:
        typer.echo(f"no runs yet (they will be in {runs.runs_folder()})")
        return
    shown = views[: limit or None]
    for line in run_table.table(shown, shutil.get_terminal_size((run_table.WIDE, 24)).columns):
        typer.echo(line)
    if len(views) > limit > 0:
        typer.echo(f"and {len(views) - limit} more: --limit 0")


@runs_app.command()
def show(
    run: RunName,
    host: RunHost = None,
    host_command: HostCommand = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """One run: what it was, how far it is, where it lies, and what went wrong first."""
    from eyas.runs import run as runs
    from eyas.runs.loglines import first_causes, format_causes
    from eyas.runs.processes import processes_of_run
    from eyas.views import console
    from eyas.views.run_table import how_far, rate

    there = _there(host, host_command)
    if there:
        _pass(there)
    view = runs.find(run)
    if as_json:
        typer.echo(json.dumps(describe(view)))
        return
    record, progress = view.record, view.progress
    rows = [
        ("run", view.id),
        ("state", view.state + (f", exit code {record['exit_code']}" if record.get("exit_code") is not None else "")),
        ("command", " ".join(["eyas", *record.get("argv", [])])),
        ("in", f"{record.get('host')}:{record.get('cwd')}"),
        ("started", str(record.get("started", record.get("created")))),
    ]
    rows += [("ended", str(record["ended"]))] if record.get("ended") else []
    rows += [("progress", f"{how_far(progress)}  {rate(progress)}")] if progress else []
    rows += [("output", str(record["output_dir"]))] if record.get("output_dir") else []
    rows += [("folder", str(view.folder))]
    if not view.ended:
        found = processes_of_run(view.id, view.folder, [view.driver] if view.driver else [])
        rows += [("processes", ", ".join(str(mark.pid) for mark in found) or "none on this host")]
    rows += [("error", str(record["error"]))] if record.get("error") else []
    if view.watchdog.get("stalled_since"):
        since = datetime.fromtimestamp(view.watchdog["stalled_since"]).strftime("%H:%M:%S")
        rows += [("watchdog", f"no progress since {since}; stacks: eyas runs logs {view.id} --grep stack")]
    console.show_rows(rows, whole=("command",))
    causes = [cause for cause in first_causes(view.folder) if cause.role != "driver" or view.state != "finished"]
    if causes and view.state not in ("running", "finished"):
        typer.echo(format_causes(causes))


@runs_app.command()
def logs(
    run: RunName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    rank: Annotated[list[int] | None, typer.Option(help="Only these ranks.")] = None,
    role: Annotated[list[str] | None, typer.Option(help="Only these: driver, engine, rank, keeper ...")] = None,
    level: Annotated[str | None, typer.Option(help="At least this level.")] = None,
    grep: Annotated[str | None, typer.Option(help="Only lines that fit this regular expression.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    after: Annotated[str | None, typer.Option(hidden=True)] = None,
    host: RunHost = None,
    host_command: HostCommand = None,
) -> None:
    """What every process of a run said, merged by time."""
    import re

    from eyas.runs import loglines
    from eyas.runs import run as runs

    if level and level not in loglines.LEVELS:
        raise InputError(f"--level {level} is unknown", f"one of {', '.join(loglines.LEVELS)}")
    try:
        wanted = loglines.Wanted(tuple(rank or ()), tuple(role or ()), level, grep)
        wanted.test()
    except re.error as error:
        raise InputError(f"--grep {grep!r} is no regular expression: {error}") from None
    colour = sys.stdout.isatty()

    def print_line(line: loglines.Line) -> None:
        text = json.dumps(loglines.as_json(line), ensure_ascii=False) if as_json else loglines.format_line(line, colour)
        sys.stdout.write(text + "\n")
        if follow:
            sys.stdout.flush()

    there = _there(host, host_command)
    if there:
        _logs_there(there, print_line)
        return
    view = runs.find(run)
    lines: Iterator[loglines.Line]
    if follow:
        lines = loglines.follow_lines(view.folder, _over(view), wanted, json.loads(after) if after else None)
    else:
        lines = loglines.read_lines(view.folder, wanted)
    try:
        for line in lines:
            print_line(line)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stderr.close()  # `| head`: enough was read
    except KeyboardInterrupt:
        raise typer.Exit(0) from None  # the reader has seen enough; the run goes on


def _over(view: RunView) -> Callable[[], bool]:
    """Whether a run has ended and its last lines have had a moment to arrive."""
    from eyas.runs import run as runs

    ended: list[float] = []

    def over() -> bool:
        if not ended and runs.load(view.folder).ended:
            ended.append(time.monotonic())
        return bool(ended) and time.monotonic() - ended[0] > 1.0

    return over


def _logs_there(host: Host, print_line: Callable[[Any], None]) -> None:
    from eyas.runs import background, loglines, remote

    arguments = background.without_flags(typed)
    if "--json" not in arguments:
        arguments.append("--json")
    code = remote.follow_there(
        host,
        arguments,
        lambda data: print_line(loglines.from_json(data)),
        lambda text: typer.secho(text, fg="yellow", err=True),
    )
    raise typer.Exit(code)


@runs_app.command()
def stop(
    run: RunName,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for the gentle end before the firm one.")] = 30.0,
    host: RunHost = None,
    host_command: HostCommand = None,
) -> None:
    """End a run: gently (shard finished, resumable), then firmly; then prove that nothing of it is left."""
    from eyas.runs import run as runs
    from eyas.runs.stopping import stop_run

    there = _there(host, host_command)
    if there:
        _pass(there)
    view = runs.find(run)
    typer.echo(f"stopping run {view.id} ({view.state}) ...", err=True)
    report = stop_run(view.folder, grace=grace)
    for line in report.lines():
        typer.echo(line)
    if not report.clean:
        raise EyasError(f"something of run {view.id} is left, see above", "`eyas doctor` shows who holds what")


@runs_app.command()
def resume(
    run: RunName,
    detach: Detach = False,
    host: RunHost = None,
    host_command: HostCommand = None,
) -> None:
    """Give an interrupted run's command again, where it was given; what is finished is kept."""
    from eyas.runs import background
    from eyas.runs import run as runs

    there = _there(host, host_command)
    if there:
        remote_line = background.without_flags(typed)
        from eyas.runs import remote

        raise typer.Exit(remote.pass_through(there, [*remote_line, "--detach"]))
    if not detach:
        background.resume_here(runs.find(run))
    view = background.resume(runs.find(run))
    typer.echo(view.id)
    typer.echo(f"  follow it: eyas runs logs {view.id} -f", err=True)


@runs_app.command()
def clean(
    run: Annotated[list[str] | None, typer.Argument(help="Only these runs. Default: all that are over.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option(min=0, help="Also delete the folders of runs that ended this many days ago or earlier."),
    ] = None,
    host: ThereName = None,
    host_command: HostCommand = None,
) -> None:
    """Remove what runs that are over left behind (processes, shared memory, half shards): only eyas's own, after showing it."""
    from eyas.runs import run as runs
    from eyas.runs import stopping

    there = _there(host, host_command)
    if there:
        _pass(there)
    views = [runs.find(name) for name in run] if run else None
    for view in views or []:
        if not view.ended:
            raise InputError(f"run {view.id} is {view.state}", f"`eyas runs stop {view.id}` first")
    items = stopping.leftovers(views, older_than)
    if not items:
        typer.echo("nothing is left of any run that is over")
        return
    for item in items:
        typer.echo(f"{item.kind:<8} {item.what}   (run {item.run})")
    if dry_run:
        return
    if not yes and not typer.confirm(f"remove these {len(items)}?"):
        raise typer.Exit(0)
    left = stopping.clean(items)
    typer.echo(f"removed {len(items) - len(left)}")
    if left:
        raise EyasError(
            "not removed: " + "; ".join(item.what for item in left), "another user's, or stuck in the kernel"
        )


# --- eyas doctor -----------------------------------------------------------------------------------------------------------


def doctor(
    output_dir: Annotated[Path | None, typer.Option(help="Where states would go; its disk is measured.")] = None,
    model_path: Annotated[str | None, typer.Option(help="Check this model's weights and predict memory.")] = None,
    prepared_data: Annotated[str | None, typer.Option(help="Predict the disk for this dataset.")] = None,
    tp_size: Annotated[int, typer.Option(min=1, help="Tensor parallel ranks to reckon with.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="No write test.")] = False,
    host: ThereName = None,
    host_command: HostCommand = None,
) -> None:
    """What this machine has against what a run needs, and what earlier runs left behind."""
    from eyas.cli.doctor import diagnose
    from eyas.views import console

    there = _there(host, host_command)
    if there:
        _pass(there)
    rows = diagnose(output_dir, model_path, prepared_data, tp_size, quick)
    console.show_preflight(rows, "doctor")
    failed = [row.name for row in rows if row.status == "FAIL"]
    if failed:
        raise PreflightError(f"not fit for a run: {', '.join(failed)}", "see the last column")


# --- eyas report ---------------------------------------------------------------------------------------------------------------


def report(
    run: RunName,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The page. Default: RUN.html here.")] = None,
) -> None:
    """Write one self-contained HTML page of a run: what ran, where, rates, norms, parity, what was not written, warnings."""
    from eyas.runs import run as runs
    from eyas.views.report import write_report

    view = runs.find(run)
    path = output or Path(f"{view.id}.html")
    try:
        write_report(view, path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}", "name another --output") from None
    typer.echo(str(path))
