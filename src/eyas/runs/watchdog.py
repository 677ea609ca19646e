"""No progress for a set time: ask every process of the run for its stacks, say so in the run's status, and stop it if that was asked.

Runs inside the keeper, so it works when the driver hangs, when a rank sits in native code with the GIL held, and when a rank is
stopped. What counts as progress: the run's counters move or its stage changes; before the first sample (loading, compiling) anything
that a process writes counts too.

Stacks come from py-spy where it is installed (it reads another process's memory, so it works on a stopped process too); else
SIGUSR1 asks the process's own faulthandler, which answers unless the process is stopped. The kernel's view (state, where it waits)
is always there.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.base.errors import StalledError
from eyas.base.files import write_json
from eyas.runs.processes import command_of, processes_of_run, state_letter

if TYPE_CHECKING:
    from eyas.runs.keeper import Keeper, Process

logger = logging.getLogger("eyas.runs.watchdog")

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for disk or driver",
    "T": "stopped",
    "t": "traced",
    "Z": "dead",
}
#: An ordered stop of a stalled run may take this long before it becomes firm, in seconds.
STOP_GRACE = 15.0


class Watchdog:
    """One per keeper; `look` is called about twice a second."""

    def __init__(self, folder: Path, run_id: str):
        self.folder, self.run_id = folder, run_id
        self.stalled_since = 0.0
        self.deaf_until = 0.0  # what processes write before this is the answer to our own question
        self.working: threading.Thread | None = None
        self._settings: tuple[float, str] | None = None
        self._next = 0.0

    def look(self, keeper: Keeper) -> None:
        now = time.time()
        if now < self._next or (self.working is not None and self.working.is_alive()):
            return
        if self._settings is None:
            record = _read(self.folder / "run.json")
            if "stall_after" not in record:
                return
            self._settings = float(record["stall_after"]), str(record.get("on_stall", "report"))
        stall_after, on_stall = self._settings
        if stall_after <= 0:
            return
        self._next = now + min(5.0, max(0.3, stall_after / 20))
        progress = _read(self.folder / "progress.json")
        if not progress:
            return
        moved = self._last_progress(progress)
        if now - moved < stall_after:
            if self.stalled_since:
                logger.warning("progress again after %.0f s", moved - self.stalled_since)
                self.stalled_since = 0.0
                write_json(self.folder / "watchdog.json", {"recovered": now})
            return
        if self.stalled_since:
            return
        self.stalled_since = moved
        self.working = threading.Thread(target=self._act, args=(keeper, moved, on_stall), daemon=True)
        self.working.start()

    def _last_progress(self, progress: dict[str, Any]) -> float:
        moved = float(progress.get("advanced", 0.0))
        if progress.get("samples"):
            return moved
        for path in (self.folder / "logs").glob("*.jsonl"):
            if not path.name.startswith("keeper") and not path.name.endswith(".stack.jsonl"):
                try:
                    written = path.stat().st_mtime
                except OSError:
                    continue  # renamed just now
                if written > self.deaf_until:
                    moved = max(moved, written)
        return moved

    def _act(self, keeper: Keeper, moved: float, on_stall: str) -> None:
        idle = time.time() - moved
        logger.error("no progress for %.0f s: the stack of every process follows", idle)
        state = {"stalled_since": moved, "noticed": time.time(), "on_stall": on_stall}
        write_json(self.folder / "watchdog.json", state)
        attached = {process.mark.pid: process for process in keeper.living()}
        for mark in processes_of_run(self.run_id, self.folder):
            process = attached.get(mark.pid)
            text = describe_process(mark.pid)
            if process is not None:
                text += "\n" + stack_of(mark.pid)
                write_stack(self.folder, process, text)
            else:
                logger.warning("%s", text)
        self.deaf_until = time.time() + 2.0
        if on_stall == "stop":
            from eyas.runs.stopping import stop_run

            write_json(self.folder / "watchdog.json", {**state, "stopped": time.time()})
            logger.error("stopping the run (--on-stall stop)")
            stop_run(self.folder, grace=STOP_GRACE, before_kill=lambda: _exit_driver(keeper), because="stalled")


def _exit_driver(keeper: Keeper) -> None:
    """A driver that does not hear SIGTERM (it sits in native code) still leaves with the watchdog's exit code, if a thread can run."""
    for client, process in list(keeper.clients.items()):
        if process.role == "driver":
            try:
                client.send(json.dumps({"say": "exit", "code": StalledError.exit_code}).encode())
            except OSError:
                return  # it is gone
            time.sleep(1.0)


def describe_process(pid: int) -> str:
    """What the kernel knows: `pid 12 (python ...): state T (stopped), waits in do_signal_stop`."""
    letter = state_letter(pid)
    try:
        waits = Path(f"/proc/{pid}/wchan").read_text().strip("\0\n ")
    except OSError:
        waits = ""
    where = f", waits in {waits}" if waits not in ("", "0") else ""
    return f"pid {pid} ({command_of(pid)[:120]}): state {letter} ({STATES.get(letter, 'unknown')}){where}"


def py_spy() -> str | None:
    """Path of py-spy: beside this Python, or on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def stack_of(pid: int) -> str:
    """The Python stacks of a process, one way or the other."""
    tool = py_spy()
    why = "py-spy is not installed"
    if tool is not None:
        command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout.rstrip()
            why = f"py-spy: {done.stderr.strip()[:200]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"py-spy: {error}"
    if not catches(pid, signal.SIGUSR1):
        return f"no stack to be had ({why}; the process does not listen to SIGUSR1)"
    os.kill(pid, signal.SIGUSR1)
    return f"its own faulthandler was asked, the stack is in its stderr ({why})"


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; without one SIGUSR1 would kill it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def write_stack(folder: Path, process: Process, text: str) -> None:
    """Into `NAME.stack.jsonl`, beside the process's other files."""
    record = {
        "time": round(time.time(), 6),
        "level": "warning",
        "stream": "stack",
        "role": process.role,
        "rank": process.rank,
        "pid": process.mark.pid,
        "text": f"stack, {text}",
    }
    with open(folder / "logs" / f"{process.stem}.stack.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
