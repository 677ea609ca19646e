"""Runs without a terminal: start one that survives logout (`--detach`), and start an interrupted one again (`eyas runs resume`)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from eyas.base.errors import FolderConflictError, InputError
from eyas.base.files import write_json
from eyas.base.manifest import now
from eyas.runs.processes import RUN_ID_VARIABLE, host_name
from eyas.runs.run import ASSIGNED_VARIABLE, RESUMES_VARIABLE, RunView, create, load

#: Flags that belong to how a run is started, not to what it does: `resume` gives the rest of the command line again.
START_FLAGS = {"--detach": 0, "--run-id": 1, "--host": 1, "--host-dir": 1, "--host-command": 1}


def without_flags(arguments: list[str], flags: dict[str, int] | None = None) -> list[str]:
    """A command line without some flags (name -> number of values), given as `--flag value` or `--flag=value`."""
    flags = START_FLAGS if flags is None else flags
    kept, skip = [], 0
    for argument in arguments:
        name = argument.split("=", 1)[0]
        if skip:
            skip -= 1
        elif name in flags:
            skip = flags[name] if "=" not in argument else 0
        else:
            kept.append(argument)
    return kept


def detach(
    command: str,
    arguments: list[str],
    run_dir: str | Path | None = None,
    run_id: str | None = None,
    cwd: str | Path | None = None,
    resumes: str | None = None,
) -> RunView:
    """Start `eyas ARGUMENTS` as a run in the background, in a session of its own: no terminal, hang-up or logout ends it.

    Returns once the process has taken the run over, or failed to.

    Raises:
        FolderConflictError: see `create`. InputError: the process ended at once; says what it printed.
    """
    folder = create(command, arguments, run_dir, run_id)
    launch = folder / "logs" / f"launch-{host_name()}.raw"
    environment = {**os.environ, ASSIGNED_VARIABLE: str(folder), RUN_ID_VARIABLE: load(folder).id}
    if resumes:
        environment[RESUMES_VARIABLE] = resumes
    with open(launch, "ab") as output:
        # It prints here until it has joined its own run (an import that fails, a flag that is wrong).
        process = subprocess.Popen(
            [sys.executable, "-m", "eyas", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None and load(folder).state == "starting":
        time.sleep(0.05)
    view = load(folder)
    if view.state == "starting" and process.poll() is not None:
        said = launch.read_text(encoding="utf-8", errors="replace").strip()
        record = {
            **view.record,
            "status": "failed",
            "exit_code": process.returncode,
            "ended": now(),
            "error": said[-2000:],
        }
        write_json(folder / "run.json", record)
        raise InputError(f"run {view.id} ended at once with code {process.returncode}:\n{said[-2000:]}", "see above")
    return view


def resume(view: RunView) -> RunView:
    """Run an interrupted run's command line again in the background, where it was run: finished work is found and kept.

    Raises:
        FolderConflictError: the run is still going on. InputError: it finished, or its folder to run in is gone.
    """
    _refuse_to_resume(view)
    arguments, cwd = _again(view)
    return detach(view.record["command"], arguments, cwd=cwd, resumes=view.id)


def resume_here(view: RunView) -> NoReturn:
    """The same in the foreground: this process becomes that command."""
    _refuse_to_resume(view)
    arguments, cwd = _again(view)
    os.environ[RESUMES_VARIABLE] = view.id
    os.chdir(cwd)
    os.execv(sys.executable, [sys.executable, "-m", "eyas", *arguments])


def _again(view: RunView) -> tuple[list[str], str]:
    arguments, cwd = without_flags(view.record["argv"]), view.record["cwd"]
    if not Path(cwd).is_dir():
        raise InputError(
            f"run {view.id} ran in {cwd}, which is gone", "give its command again: `eyas runs show` has it"
        )
    return arguments, cwd


def _refuse_to_resume(view: RunView) -> None:
    if view.state in ("running", "starting", "stalled") and not view.ended:
        raise FolderConflictError(f"run {view.id} is {view.state}", f"end it first: `eyas runs stop {view.id}`")
    if view.record.get("launch"):
        raise InputError(f"run {view.id} was started by a launcher", "give the launcher's command again (torchrun ...)")
    if view.state == "finished":
        raise InputError(f"run {view.id} finished; there is nothing to resume", "give the command again for a new run")
