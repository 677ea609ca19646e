"""`eyas runs ...`, `eyas doctor`, `eyas report`, and what makes any other command a run (`start_run`)."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge
from rich.prompt import Confirm

from eyas.base.errors import EXIT_INTERRUPTED, EyasError, InputError, PreflightError
from eyas.base.settings import Flag
from eyas.views.console import aside, out, raw

if TYPE_CHECKING:
    from eyas.runs.remote import Host
    from eyas.runs.run import RunView

#: The command line as given, without the program; `main` sets it.
typed: list[str] = []

HostName = Annotated[str | None, Flag("host", help="Do this on that host (user@box), over ssh.")]
HostCommand = Annotated[str | None, Flag(env="EYAS_REMOTE_COMMAND", help="How eyas is called there. Default: eyas.")]
RunName = Annotated[
    str, Flag(positional=True, help="A run's id, the beginning or end of it, its directory, or `last`.")
]
Detach = Annotated[bool, Flag(help="Run in the background, past logout.")]


def start_run(
    name: str,
    call: Callable[[], int | None],
    facts: dict[str, Any],
    *,
    run_dir: Path | None,
    run_id: str | None,
    detach: bool,
    log_level: str | None,
    stall_after: float,
    on_stall: str,
    host: str | None,
    host_dir: str | None,
    host_command: str | None,
) -> None:
    """Do `call` inside a run; or start `typed` as one in the background, here or on another host.

    Args:
        facts: what goes into `run.json`. call: returns the command's exit code, or None for 0.
    """
    from eyas.runs import background, launched, remote
    from eyas.runs import run as runs

    arguments = background.without_flags(typed)
    if (host or detach) and launched.own_rank() is not None:
        raise InputError(
            "--host and --detach start one process, not a launcher's ranks", "leave them out under torchrun"
        )
    if host:
        there = remote.host_of(host, host_command, host_dir)
        run_id = run_id or runs.new_run_id(name)
        record = remote.start_there(there, arguments, run_id)
        raw(f"run {run_id} is {record['state']} on {there.destination}")
        aside(f"  follow it: eyas runs logs {run_id} -f --host {there.destination}")
        return
    if detach:
        view = background.detach(name, arguments, run_dir, run_id)
        raw(view.id)
        aside(f"  follow it: eyas runs logs {view.id} -f   stop it: eyas runs stop {view.id}")
        return
    facts = {key: str(Path(value).absolute() if key == "output_dir" else value) for key, value in facts.items()}
    chosen: dict[str, Any] = {"run_dir": run_dir, "run_id": run_id, "log_level": log_level}
    try:
        with runs.start(name, list(typed), stall_after=stall_after, on_stall=on_stall, **chosen, **facts):
            code = call() or 0
            if code:
                sys.exit(code)
    except KeyboardInterrupt:
        aside("stopped; rerun the same command to resume", "yellow")
        sys.exit(EXIT_INTERRUPTED)


# --- eyas runs ... -----------------------------------------------------------------------------------------------------------


def _there(host: str | None, command: str | None) -> Host | None:
    from eyas.runs.remote import host_of

    return host_of(host, command) if host else None


def _pass(host: Host) -> None:
    """Give the whole command to the host and end with its exit code."""
    from eyas.runs import background, remote

    sys.exit(remote.pass_through(host, background.without_flags(typed)))


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


def list_(
    host: HostName = None,
    host_command: HostCommand = None,
    as_json: Annotated[bool, Flag("json", help="One JSON object per line.")] = False,
    limit: Annotated[int, Ge(0), Flag(help="How many, newest first; 0: all.")] = 20,
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
            raw(json.dumps(describe(view)))
        return
    if not views:
        raw(f"no runs yet (they will be in {runs.runs_folder()})")
        return
    shown = views[: limit or None]
    for line in run_table.table(shown, shutil.get_terminal_size((run_table.WIDE, 24)).columns):
        out.print(line, soft_wrap=True)
    if len(views) > limit > 0:
        raw(f"and {len(views) - limit} more: --limit 0")


def show(
    run: RunName,
    host: HostName = None,
    host_command: HostCommand = None,
    as_json: Annotated[bool, Flag("json", help="As JSON.")] = False,
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
        raw(json.dumps(describe(view)))
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
        raw(format_causes(causes))


def logs(
    run: RunName,
    follow: Annotated[bool, Flag(short="-f", help="Go on until the run ends.")] = False,
    rank: Annotated[tuple[int, ...] | None, Flag(help="Only these ranks.")] = None,
    role: Annotated[tuple[str, ...] | None, Flag(help="Only these: driver, engine, rank, keeper ...")] = None,
    level: Annotated[str | None, Flag(help="At least this level.")] = None,
    grep: Annotated[str | None, Flag(help="Only lines that fit this regular expression.")] = None,
    as_json: Annotated[bool, Flag("json", help="One JSON object per line.")] = False,
    after: Annotated[str | None, Flag(hidden=True)] = None,
    host: HostName = None,
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
        sys.exit(0)  # the reader has seen enough; the run goes on


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
        lambda text: aside(text, "yellow"),
    )
    sys.exit(code)


def stop(
    run: RunName,
    grace: Annotated[float, Ge(0), Flag(help="Seconds for the gentle end before the firm one.")] = 30.0,
    host: HostName = None,
    host_command: HostCommand = None,
) -> None:
    """End a run: gently (shard finished, resumable), then firmly; then prove that nothing of it is left."""
    from eyas.runs import run as runs
    from eyas.runs.stopping import stop_run

    there = _there(host, host_command)
    if there:
        _pass(there)
    view = runs.find(run)
    aside(f"stopping run {view.id} ({view.state}) ...")
    report = stop_run(view.folder, grace=grace)
    for line in report.lines():
        raw(line)
    if not report.clean:
        raise EyasError(f"something of run {view.id} is left, see above", "`eyas doctor` shows who holds what")


def resume(
    run: RunName,
    detach: Detach = False,
    host: HostName = None,
    host_command: HostCommand = None,
) -> None:
    """Give an interrupted run's command again, where it was given; what is finished is kept."""
    from eyas.runs import background
    from eyas.runs import run as runs

    there = _there(host, host_command)
    if there:
        remote_line = background.without_flags(typed)
        from eyas.runs import remote

        sys.exit(remote.pass_through(there, [*remote_line, "--detach"]))
    if not detach:
        background.resume_here(runs.find(run))
    view = background.resume(runs.find(run))
    raw(view.id)
    aside(f"  follow it: eyas runs logs {view.id} -f")


def clean(
    run: Annotated[
        tuple[str, ...] | None, Flag(positional=True, help="Only these runs. Default: all that are over.")
    ] = None,
    yes: Annotated[bool, Flag(short="-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, Flag(help="Only show.")] = False,
    older_than: Annotated[
        float | None, Ge(0), Flag(help="Also delete the folders of runs that ended this many days ago or earlier.")
    ] = None,
    host: HostName = None,
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
        raw("nothing is left of any run that is over")
        return
    for item in items:
        raw(f"{item.kind:<8} {item.what}   (run {item.run})")
    if dry_run:
        return
    if not yes and not (sys.stdin.isatty() and Confirm.ask(f"remove these {len(items)}?")):
        return
    left = stopping.clean(items)
    raw(f"removed {len(items) - len(left)}")
    if left:
        raise EyasError(
            "not removed: " + "; ".join(item.what for item in left), "another user's, or stuck in the kernel"
        )


# --- eyas doctor -----------------------------------------------------------------------------------------------------------


def doctor(
    output_dir: Annotated[Path | None, Flag(help="Where states would go; its disk is measured.")] = None,
    model_path: Annotated[str | None, Flag(help="Check this model's weights and predict memory.")] = None,
    prepared_data: Annotated[str | None, Flag(help="Predict the disk for this dataset.")] = None,
    tp_size: Annotated[int, Ge(1), Flag(help="Tensor parallel ranks to reckon with.")] = 1,
    quick: Annotated[bool, Flag(help="No write test.")] = False,
    host: HostName = None,
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
    output: Annotated[Path | None, Flag(short="-o", help="The page. Default: RUN.html here.")] = None,
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
    raw(str(path))
