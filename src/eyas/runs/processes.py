"""Which processes, shared-memory segments and GPU memory belong to a run, and to nobody else.

A process is named by pid *and* start time *and* boot id: a pid alone is reused, and killing by pid alone kills strangers.
A process belongs to a run when one of these holds:
- it told the run's keeper so when it started (`processes.jsonl`, see `logs.py`);
- its environment, as the kernel recorded it at exec, carries `EYAS_RUN_ID` of that run;
- it descends from such a process.
Names, command lines and users are never taken as proof. Linux; elsewhere only what was recorded is known.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

#: Set in the environment of every process of a run.
RUN_ID_VARIABLE = "EYAS_RUN_ID"
SHM = Path("/dev/shm")
#: Elsewhere (macOS) psutil tells pid and start time, and nothing more is known of a process.
PROC = Path("/proc/self/stat").exists()


@dataclass(frozen=True)
class Mark:
    """One process, for good: `started` is in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    started: int
    boot: str
    host: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Mark:
        return cls(int(data["pid"]), int(data["started"]), str(data["boot"]), str(data["host"]))


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Changes with every boot (and is empty where the kernel does not tell)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@lru_cache(maxsize=1)
def host_name() -> str:
    return socket.gethostname()


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (index 0 is field 3), or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def mark_of(pid: int) -> Mark | None:
    """The mark of a living process; None when it is gone or a zombie."""
    fields = _stat(pid)
    if fields is None and not PROC:
        return _mark_without_proc(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return Mark(pid, int(fields[19]), boot_id(), host_name())


def _mark_without_proc(pid: int) -> Mark | None:
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return Mark(pid, int(process.create_time() * 100), boot_id(), host_name())
    except psutil.Error:
        return None


def this_process() -> Mark:
    mark = mark_of(os.getpid())
    return mark or Mark(os.getpid(), 0, boot_id(), host_name())


def is_alive(mark: Mark) -> bool | None:
    """Whether that very process lives. None: it ran on another host, so this one cannot know."""
    if mark.host != host_name():
        return None
    if mark.boot != boot_id():
        return False
    return mark_of(mark.pid) == mark


def state_letter(pid: int) -> str:
    """The kernel's state letter (R, S, D, T = stopped ...), `-` when gone."""
    fields = _stat(pid)
    return fields[0] if fields else "-"


def parent_of(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def environment_of(pid: int) -> dict[str, str]:
    """The environment at exec; empty when gone or not ours to read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.split(b"=", 1) for item in raw.split(b"\0") if b"=" in item)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in pairs}


def is_own(pid: int) -> bool:
    """Whether a process is this user's. Root could end anybody's; it must not."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


def command_of(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def all_pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def recorded_processes(folder: Path) -> list[dict[str, Any]]:
    """What `processes.jsonl` of a run folder says: one record per attached process (mark, role, rank)."""
    try:
        lines = (folder / "processes.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the last line of a machine that lost power
    return records


def processes_of_run(run_id: str, folder: Path, extra: Iterable[Mark] = (), without: Mark | None = None) -> list[Mark]:
    """Every living process of a run on this host, except the caller and what it descends from.

    Args:
        run_id: as in `run.json`.
        folder: the run folder with `processes.jsonl`.
        extra: marks known otherwise (the driver in `run.json`).
        without: a driver that is done with this run but lives on (a notebook, `eyas demo` in its next stage): it and what it
            started since are not of this run.
    """
    known: dict[int, Mark] = {}
    for mark in [*extra, *(Mark.from_json(record) for record in recorded_processes(folder))]:
        if is_alive(mark):
            known[mark.pid] = mark
    parents: dict[int, int] = {}
    for pid in all_pids():
        parents[pid] = parent_of(pid)
        if pid not in known and environment_of(pid).get(RUN_ID_VARIABLE) == run_id and is_own(pid):
            found = mark_of(pid)
            if found:
                known[pid] = found
    if without is not None:
        known.pop(without.pid, None)
    grown = True
    while grown:
        grown = False
        for pid, parent in parents.items():
            if parent in known and pid not in known:
                found = mark_of(pid)
                if found and not _is_keeper(pid):
                    known[pid] = found
                    grown = True
    for spared in _lineage(os.getpid(), parents):
        known.pop(spared, None)
    return sorted(known.values(), key=lambda mark: mark.pid)


def runs_in_environments() -> dict[str, list[int]]:
    """Run id -> this user's living processes that carry it in their environment, by one look over all processes."""
    found: dict[str, list[int]] = {}
    for pid in all_pids():
        if pid == os.getpid() or not is_own(pid):
            continue
        environment = environment_of(pid)
        run = environment.get(RUN_ID_VARIABLE) or environment.get("EYAS_KEEPER_OF")
        if run:
            found.setdefault(run, []).append(pid)
    return found


def _is_keeper(pid: int) -> bool:
    return "EYAS_KEEPER_OF" in environment_of(pid)


def _lineage(pid: int, parents: dict[int, int]) -> list[int]:
    line = []
    while pid > 1 and pid not in line:
        line.append(pid)
        pid = parents.get(pid, 0)
    return line


def keepers_of_run(run_id: str) -> list[Mark]:
    """The run's keeper processes on this host (see `keeper.py`), the caller excepted."""
    marks = []
    for pid in all_pids():
        if pid != os.getpid() and environment_of(pid).get("EYAS_KEEPER_OF") == run_id:
            mark = mark_of(pid)
            if mark:
                marks.append(mark)
    return marks


def send(mark: Mark, number: int) -> bool:
    """Signal that very process; False when it is gone or not ours to signal."""
    if not is_alive(mark):
        return False
    try:
        os.kill(mark.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def wait_gone(marks: Iterable[Mark], seconds: float) -> list[Mark]:
    """Wait until the processes are gone; returns those that still live after `seconds`."""
    deadline = time.monotonic() + seconds
    left = [mark for mark in marks if is_alive(mark)]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [mark for mark in left if is_alive(mark)]
    return left


def end_processes(find: Any, term_seconds: float = 3.0, kill_seconds: float = 10.0) -> tuple[list[Mark], list[Mark]]:
    """SIGTERM (and SIGCONT, since a stopped process sees no SIGTERM), then SIGKILL, until none is found.

    Args:
        find: () -> list of marks; asked again in every round, because processes start children while they end.

    Returns:
        (those ended, those that live on: unkillable in the kernel, or another user's)
    """
    met: dict[int, Mark] = {}
    for mark in find():
        met[mark.pid] = mark
        send(mark, signal.SIGTERM)
        send(mark, signal.SIGCONT)
    if met:
        wait_gone(met.values(), term_seconds)
    deadline = time.monotonic() + kill_seconds
    while True:
        left = find()
        if not left or time.monotonic() > deadline:
            break
        for mark in left:
            met[mark.pid] = mark
            send(mark, signal.SIGKILL)
        wait_gone(left, 0.5)
    alive = {mark.pid for mark in left}
    return [mark for mark in met.values() if mark.pid not in alive], left


def shm_names_of(pid: int) -> set[str]:
    """Names under /dev/shm that a process maps or holds open."""
    names: set[str] = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            at = line.find("/dev/shm/")
            if at >= 0 and not line.endswith("(deleted)"):
                names.add(line[at + len("/dev/shm/") :])
    except OSError:
        pass  # gone, or another user's: then it is not of this run
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            target = os.readlink(entry.path)
            if target.startswith("/dev/shm/") and not target.endswith("(deleted)"):
                names.add(target[len("/dev/shm/") :])
    except OSError:
        pass
    return names


def recorded_shm(folder: Path) -> dict[str, int]:
    """Segments that processes of the run made, name -> inode, from the keeper's `shm.json`."""
    segments: dict[str, int] = {}
    for path in folder.glob("shm*.json"):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            continue  # the keeper writes it again, or died while it did
        if data.get("boot") == boot_id() and data.get("host") == host_name():
            segments.update({name: int(inode) for name, inode in data["segments"].items()})
    return segments


def leftover_shm(folder: Path) -> list[Path]:
    """Recorded segments that still exist, are the same file as recorded, and that no living process uses."""
    present = []
    for name, inode in recorded_shm(folder).items():
        path = SHM / name
        try:
            status = path.stat()
        except OSError:
            continue
        if status.st_ino == inode and status.st_uid == os.getuid():
            present.append(path)
    if not present:
        return []
    used: set[str] = set()
    for pid in all_pids():
        used |= shm_names_of(pid)
    return [path for path in present if str(path.relative_to(SHM)) not in used]


@dataclass(frozen=True)
class GpuUse:
    """Memory that one process holds on one GPU, in MiB."""

    gpu: str
    pid: int
    mebibytes: int


def gpu_uses() -> list[GpuUse] | None:
    """Who holds GPU memory, by the driver's own tool; None where there is no NVIDIA driver."""
    rows = nvidia_query("compute-apps", ["gpu_uuid", "pid", "used_memory"])
    if rows is None:
        return None
    uses = []
    for row in rows:
        if row[1].isdigit():
            uses.append(GpuUse(row[0], int(row[1]), int(row[2]) if row[2].isdigit() else 0))
    return uses


def gpu_memory_used() -> dict[str, int] | None:
    """MiB in use per GPU (by its uuid), by whomever; None where there is no NVIDIA driver."""
    rows = nvidia_query("gpu", ["uuid", "memory.used"])
    return None if rows is None else {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def nvidia_query(what: str, fields: list[str]) -> list[list[str]] | None:
    """Rows of `nvidia-smi --query-WHAT=FIELDS`, values stripped; None where the tool is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
