"""Ending a run and proving it: no process of it lives, its GPU memory is free, its shared-memory segments are gone.

And clearing up after runs that ended badly: only what is ours by `processes.py`'s rules, only of runs that are over, only after
showing it.
"""

from __future__ import annotations

import logging
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from eyas.base.errors import InputError, StalledError
from eyas.base.files import write_json
from eyas.base.locks import abandoned
from eyas.base.manifest import now
from eyas.runs.processes import (
    GpuUse,
    Mark,
    command_of,
    end_processes,
    environment_of,
    gpu_memory_used,
    gpu_uses,
    host_name,
    is_alive,
    keepers_of_run,
    leftover_shm,
    mark_of,
    processes_of_run,
    recorded_processes,
    runs_in_environments,
    send,
    state_letter,
    wait_gone,
)
from eyas.runs.run import RunView, list_runs, load, read_json

logger = logging.getLogger(__name__)

#: MiB by which a GPU's use may differ from before: the driver itself takes some when it wakes up.
GPU_SLACK = 300


@dataclass
class StopReport:
    """What `stop_run` did and what it found afterwards. `clean`: nothing of the run is left on this host."""

    run: str
    gentle: bool = False
    ended: list[Mark] = field(default_factory=list)
    alive: list[Mark] = field(default_factory=list)
    segments_removed: list[str] = field(default_factory=list)
    segments_left: list[str] = field(default_factory=list)
    gpu_left: list[GpuUse] | None = None  # None: no NVIDIA driver to ask
    gpu_more: dict[str, int] = field(
        default_factory=dict
    )  # MiB more in use per GPU than when the run began, by nobody visible
    state: str = ""

    @property
    def clean(self) -> bool:
        return not self.alive and not self.segments_left and not self.gpu_left and not self.gpu_more

    def lines(self) -> list[str]:
        """For people."""
        how = "by itself, resumable" if self.gentle else "by force"
        out = [f"run {self.run}: ended {how}" if self.state != "was over" else f"run {self.run}: was over already"]
        if self.alive:
            living = ", ".join(f"{mark.pid} (state {state_letter(mark.pid)})" for mark in self.alive)
            out.append(f"processes: {living} cannot be ended")
        else:
            out.append(f"processes: none lives ({len(self.ended)} ended by this command)")
        if self.gpu_left is None:
            out.append("GPU memory: no NVIDIA driver here, nothing to free")
        elif self.gpu_left:
            held = ", ".join(f"pid {use.pid}: {use.mebibytes} MiB on {use.gpu}" for use in self.gpu_left)
            out.append(f"GPU memory: still held: {held}")
        elif self.gpu_more:
            more = ", ".join(f"{count} MiB on {gpu}" for gpu, count in self.gpu_more.items())
            out.append(
                f"GPU memory: {more} more in use than when the run began, by processes that cannot be seen from here"
            )
        else:
            out.append("GPU memory: none held by the run, and no GPU has more in use than when it began")
        removed = f" ({len(self.segments_removed)} removed: {', '.join(self.segments_removed[:4])})"
        if self.segments_left:
            out.append(f"shared memory: {', '.join(self.segments_left)} cannot be removed")
        else:
            out.append("shared memory: no segment left" + (removed if self.segments_removed else ""))
        return out


def _find(view: RunView) -> Callable[[], list[Mark]]:
    """All living processes of a run. A driver that ended the run in good order and lives on is not one of them."""
    driver = view.driver
    over = view.record.get("ended") is not None

    def find() -> list[Mark]:
        extra = [driver] if driver is not None and not over else []
        return processes_of_run(view.id, view.folder, extra, without=driver if over else None)

    return find


def stop_run(
    folder: Path,
    *,
    grace: float = 30.0,
    before_kill: Callable[[], None] | None = None,
    because: str = "asked",
) -> StopReport:
    """End a run: gently (its driver finishes the open shard), after `grace` seconds firmly, then clear up and look again.

    Args:
        folder: run folder. grace: seconds for the gentle way; 0 goes straight to the firm one.
        before_kill: called once before anything is killed.

    Raises:
        InputError: the run is on another host.
    """
    view = load(folder)
    driver = view.driver
    if driver is not None and driver.host != host_name() and view.state in ("running", "stalled"):
        raise InputError(
            f"run {view.id} is on host {driver.host}, this is {host_name()}",
            f"run the same command with --host {driver.host}",
        )
    report = StopReport(view.id)
    find = _find(view)
    pids = {mark.pid for mark in find()} | {int(record["pid"]) for record in recorded_processes(view.folder)}
    was_over = view.ended and view.state != "lost"
    forced = False
    if driver is not None and is_alive(driver) and not view.record.get("ended"):
        report.gentle = _ask_gently(driver, grace)
        forced = not report.gentle
    if report.gentle:
        wait_gone(find(), 5.0)  # the engine is closing its own processes
    left = find()
    if left and before_kill is not None:
        before_kill()
    report.ended, report.alive = end_processes(find)
    _end_keepers(view.id)
    _remove_segments(view, report)
    report.gpu_left, report.gpu_more = _gpu_held(pids, read_json(view.folder / "gpus.json"))
    report.state = "was over" if was_over else load(folder).state
    after = load(folder)
    # The driver can write no more, so this is the one that may. One that left only when it was forced to may have called itself stopped.
    if after.record.get("status") in ("running", "starting", *(["stopped"] if forced else [])) and not report.alive:
        state = "stalled" if because == "stalled" else "killed"
        code = StalledError.exit_code if because == "stalled" else None
        write_json(
            folder / "run.json",
            {
                **after.record,
                "status": state,
                "exit_code": code,
                "ended": now(),
                "error": f"stopped by force ({because})",
            },
        )
        report.state = state
    return report


def _ask_gently(driver: Mark, grace: float) -> bool:
    if grace <= 0:
        return False
    send(driver, signal.SIGTERM)
    send(driver, signal.SIGCONT)
    return not wait_gone([driver], grace)


def _end_keepers(run_id: str) -> None:
    """They leave by themselves a few seconds after the last process; a stuck one is ended so that nothing stays."""
    for mark in wait_gone(keepers_of_run(run_id), 8.0):
        send(mark, signal.SIGKILL)
    wait_gone(keepers_of_run(run_id), 2.0)


def _remove_segments(view: RunView, report: StopReport) -> None:
    for path in leftover_shm(view.folder):
        try:
            path.unlink()
            report.segments_removed.append(path.name)
        except FileNotFoundError:
            continue  # its owner removed it just now
        except OSError as error:
            logger.warning("%s cannot be removed: %s", path, error)
            report.segments_left.append(path.name)


def _gpu_held(
    pids: Iterable[int], before: dict[str, int], seconds: float = 6.0
) -> tuple[list[GpuUse] | None, dict[str, int]]:
    """What processes of the run still hold on a GPU, and how much more a GPU has in use than before, where no other process explains it.

    Waits a little: the driver needs a moment to free memory after a process is gone. In a container the driver may not show any
    process at all; then only the comparison tells.
    """
    wanted = set(pids)
    deadline = time.monotonic() + seconds
    while True:
        uses = gpu_uses()
        if uses is None:
            return None, {}
        held = [use for use in uses if use.pid in wanted]
        others = {use.gpu for use in uses if use.pid not in wanted}
        used = gpu_memory_used() or {}
        more = {gpu: used[gpu] - count for gpu, count in before.items() if gpu in used and gpu not in others}
        more = {gpu: count for gpu, count in more.items() if count > GPU_SLACK}
        if not (held or more) or time.monotonic() > deadline:
            return held, more
        time.sleep(0.5)


# --- leftovers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leftover:
    """Something of a run that is over. `kind`: process, segment, shard, run (its folder)."""

    kind: str
    run: str
    what: str
    mark: Mark | None = None
    path: Path | None = None


def leftovers(views: Iterable[RunView] | None = None, older_than_days: float | None = None) -> list[Leftover]:
    """What runs that are over have left on this host.

    Args:
        views: which runs; None: all that are known, and processes whose run folder nobody has any more.
        older_than_days: also list the folders of runs that ended longer ago than this.
    """
    found: list[Leftover] = []
    marked = runs_in_environments()
    for view in list_runs() if views is None else views:
        if not view.ended or view.state == "starting":
            continue
        if view.driver is not None and view.driver.host != host_name():
            continue
        if view.id in marked or any(is_alive(Mark.from_json(one)) for one in recorded_processes(view.folder)):
            found += [_process_left(view.id, mark) for mark in _find(view)()]
            if not _keeper_leaves_by_itself(view):
                found += [_process_left(view.id, mark) for mark in keepers_of_run(view.id)]
        for path in leftover_shm(view.folder):
            found.append(Leftover("segment", view.id, f"{path} ({path.stat().st_size} bytes)", path=path))
        found += _half_shards(view)
        if older_than_days is not None and time.time() - _end_time(view) > older_than_days * 86400:
            found.append(Leftover("run", view.id, str(view.folder), path=view.folder))
    if views is None:
        found += _of_unknown_runs(marked, {view.id for view in list_runs()})
    return found


def _process_left(run: str, mark: Mark) -> Leftover:
    return Leftover("process", run, f"pid {mark.pid}: {command_of(mark.pid)[:100]}", mark=mark)


def _keeper_leaves_by_itself(view: RunView) -> bool:
    return time.time() - _end_time(view) < 15


def _end_time(view: RunView) -> float:
    try:
        return max(
            (view.folder / name).stat().st_mtime
            for name in ("run.json", "progress.json")
            if (view.folder / name).exists()
        )
    except (OSError, ValueError):
        return time.time()


def _half_shards(view: RunView) -> list[Leftover]:
    """Temporary shards in the run's output directory that nobody writes now."""
    output = view.record.get("output_dir")
    if not output or not Path(output).is_dir():
        return []
    return [
        Leftover("shard", view.id, f"{path} ({path.stat().st_size} bytes)", path=path)
        for path in abandoned(Path(output), "shard-*.tmp")
    ]


def _of_unknown_runs(marked: dict[str, list[int]], known: set[str]) -> list[Leftover]:
    """Processes with a run's mark in their environment whose run folder is gone. A run listed elsewhere is looked at there."""
    found = []
    for run, pids in marked.items():
        for pid in pids if run not in known else ():
            folder, mark = environment_of(pid).get("EYAS_RUN_DIR"), mark_of(pid)
            if folder and not (Path(folder) / "run.json").exists() and mark is not None:
                found.append(_process_left(run, mark))
    return found


def clean(items: Iterable[Leftover]) -> list[Leftover]:
    """Remove leftovers; returns those that are still there. A process is only ended if it is still the very same."""
    items = list(items)
    marks = [item.mark for item in items if item.mark is not None]
    end_processes(lambda: [mark for mark in marks if is_alive(mark)])
    for item in items:
        if item.kind in ("segment", "shard") and item.path is not None:
            item.path.unlink(missing_ok=True)
        elif item.kind == "run" and item.path is not None:
            _delete_run(item)
    views = {view.id: view for view in list_runs()}
    for run in {item.run for item in items if item.kind == "process"} & set(views):
        for path in leftover_shm(views[run].folder):  # in use a moment ago, by a process that has just been ended
            path.unlink(missing_ok=True)
    return [
        item
        for item in items
        if (item.mark is not None and is_alive(item.mark)) or (item.path is not None and item.path.exists())
    ]


def _delete_run(item: Leftover) -> None:
    from eyas.runs.run import runs_folder

    folder = item.path
    if folder is None or not (folder / "run.json").exists():
        return
    listed = runs_folder() / item.run
    shutil.rmtree(folder)
    if listed.is_symlink():
        listed.unlink()
