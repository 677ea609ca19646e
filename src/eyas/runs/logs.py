"""What a process of a run says is kept, whatever happens to it next.

    eyas.runs.logs.attach_process(role="rank", rank=3)     in a worker; does nothing outside a run

Two ways lead into the run folder's `logs/`, each into a file of that process alone:
- **Python logging** goes as one JSON line per record straight from the process into `NAME.log.jsonl`: one unbuffered append per
  record, so a record is in the kernel's hands before the next statement runs and `os._exit` or SIGKILL cannot take it back.
- **stdout and stderr**, at file-descriptor level, so also what C, C++ and NCCL print: each is a pipe to the run's *keeper*
  (`keeper.py`), another process, which stamps every line with the time and appends it to `NAME.out.jsonl`. C's own stdio buffer is
  switched off, because bytes in it would die with the process.

Processes attach themselves: a Python child started with exec finds the run through its environment (`startup/sitecustomize.py`),
a forked one through a fork hook. Only streams inherited from the run are taken over, so a child whose output somebody reads
through a pipe of his own is left alone. `attach_process` then only gives the process its name.

Trade-off: a pipe and a second process cost a context switch per burst of output. Writing stdout to a file directly would be cheaper,
but no line would have a time, and merging by time is what makes eight ranks readable.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import io
import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from eyas.runs.log_records import install_writer, remove_writer, set_terminal, speaker

RUN_DIR_VARIABLE = "EYAS_RUN_DIR"
#: `device:inode` of the pipes that belong to the run: a child takes over a stream only when it is one of these.
STREAMS_VARIABLE = "EYAS_STREAMS"
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[ABCDEFGHJKSThl]")
_STARTUP = str(Path(__file__).resolve().parent / "startup")
LINUX = sys.platform.startswith("linux")

_state: dict[str, Any] = {}  # of this process: folder, pid, role, rank, connection, pipes; empty when not attached


def attach_process(role: str = "process", rank: int | None = None, *, force_streams: bool = True) -> bool:
    """Join the run that this process was started by: log records, stdout, stderr and crash dumps go to files of its own.

    Call it first thing in a worker. Again with another role or rank, it renames. Outside a run it does nothing.

    Args:
        role: what the process is: `driver`, `engine`, `rank`, `loader` ...
        rank: tensor-parallel or data-parallel rank, shown in every line.
        force_streams: take over stdout and stderr even where they do not come from the run (a Ray worker's, say).

    Returns:
        Whether there is a run.
    """
    folder = os.environ.get(RUN_DIR_VARIABLE)
    if not folder or "EYAS_KEEPER_OF" in os.environ:
        return False
    if _state.get("pid") == os.getpid():
        with _naming:
            _rename(role, rank)
        _dump_on_crash()
        return True
    _leave_terminal_group()
    _attach(Path(folder), role, rank, force_streams)
    return True


def _leave_terminal_group() -> None:
    """Ctrl-C is for the driver, which ends the run in good order; an engine or loader that hears it too shuts down under its feet."""
    with contextlib.suppress(OSError):  # it leads a session of its own already
        os.setpgid(0, 0)


def _file_stem(role: str, rank: int | None) -> str:
    from eyas.runs.processes import host_name, this_process

    mark = this_process()
    return f"{role}{'' if rank is None else rank}-{host_name()}-{mark.pid}-{mark.started}"


def _attach(
    folder: Path, role: str, rank: int | None, force_streams: bool, terminal: tuple[int, int] | None = None
) -> None:
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    stem = _file_stem(role, rank)
    path = logs / f"{stem}.log.jsonl"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    _state.clear()
    _state.update(folder=folder, pid=os.getpid(), role=role, rank=rank, stem=stem, terminal=terminal, asked=0)
    speaker.update(role=role, rank=rank)
    _state["writer"] = install_writer(descriptor)
    if LINUX:
        _attach_streams(force_streams or terminal is not None)
    _install_crash_hooks()


def _attach_streams(force: bool) -> None:
    """Make pipes for stdout and stderr, hand their reading ends to the keeper, and put the writing ends on 1 and 2."""
    known = set(os.environ.get(STREAMS_VARIABLE, "").split())
    takes = [number for number in (1, 2) if force or _identity(number) in known]
    pipes: dict[str, tuple[int, int]] = {}  # stream -> (reading end, writing end)
    for number in takes:
        pipes[_STREAM_NAMES[number]] = os.pipe()
    if _state["terminal"] is not None:
        pipes["terminal-stdout"], pipes["terminal-stderr"] = os.pipe(), os.pipe()
    _state["pipes"] = pipes
    if not _connect(start=True):
        for reading, writing in pipes.values():
            os.close(reading)
            os.close(writing)
        _state["pipes"] = {}
        _redirect_to_files(takes)
        return
    for number in takes:
        os.dup2(pipes[_STREAM_NAMES[number]][1], number, inheritable=True)
    _unbuffer()
    os.environ[STREAMS_VARIABLE] = " ".join(sorted(known | {_identity(number) for number in takes}))
    threading.Thread(target=_stay_connected, args=(os.getpid(),), name="eyas-keeper", daemon=True).start()


_STREAM_NAMES = {1: "stdout", 2: "stderr"}


def _identity(descriptor: int) -> str:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return "closed"
    return f"{status.st_dev}:{status.st_ino}"


def _redirect_to_files(takes: list[int]) -> None:
    """No keeper can be had: keep the lines without a time rather than lose them."""
    path = _state["folder"] / "logs" / f"{_state['stem']}.raw"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    for number in takes:
        os.dup2(descriptor, number, inheritable=True)
    _unbuffer()
    logging.getLogger(__name__).warning("no keeper process can be reached or started; stdout and stderr go to %s", path)


def _unbuffer() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=True)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a C library without these symbols keeps its buffer
        libc = ctypes.CDLL(None)
        for name in ("stdout", "stderr"):
            libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, 2, 0)  # 2 = _IONBF


# --- the connection to the keeper ----------------------------------------------------------------------------------------


def keeper_address(folder: Path) -> str:
    """Abstract socket name, one per run and host: nothing in the file system to leave behind, no path-length limit."""
    return f"\0eyas-keeper-{os.environ.get('EYAS_RUN_ID') or folder.name}"


def same_user(connection: socket.socket) -> bool:
    """An abstract socket has no permissions: both ends check that the other is the same user (or root)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid = int.from_bytes(raw[4:8], sys.byteorder)
    return uid in (os.getuid(), 0)


def start_keeper(folder: Path) -> bool:
    """Start the run's keeper on this host, unless one runs. True when one answers afterwards."""
    from eyas.runs.processes import RUN_ID_VARIABLE

    environment = {key: value for key, value in os.environ.items() if key not in (RUN_ID_VARIABLE, RUN_DIR_VARIABLE)}
    environment["EYAS_KEEPER_OF"] = os.environ.get(RUN_ID_VARIABLE, folder.name)
    package_root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([package_root, *environment.get("PYTHONPATH", "").split(os.pathsep)])
    errors = os.open(folder / "logs" / "keeper.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        # It puts itself into the background once it listens, so the end of this child means "ready".
        done = subprocess.run(
            [sys.executable, "-m", "eyas.runs.keeper", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        os.close(errors)
    return done.returncode == 0


def _connect(start: bool) -> bool:
    from eyas.runs.processes import this_process

    folder = _state["folder"]
    connection = _reach(folder)
    if connection is None and start and start_keeper(folder):
        connection = _reach(folder)
    if connection is None:
        return False
    pipes = _state["pipes"]
    terminal = _state["terminal"] or ()
    hello = {
        "say": "hello",
        "mark": this_process().as_json(),
        "parent": os.getppid(),
        "role": _state["role"],
        "rank": _state["rank"],
        "stem": _state["stem"],
        "streams": list(pipes),
        "tees": len(terminal),
    }
    descriptors = [*(reading for reading, _ in pipes.values()), *terminal]
    try:
        socket.send_fds(connection, [json.dumps(hello).encode()], descriptors)
        connection.recv(1024)  # the keeper has written the process down: from here on it can be found
    except OSError:
        connection.close()
        return False
    _state["connection"] = connection
    return True


def _reach(folder: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(keeper_address(folder))
        if same_user(connection):
            return connection
    except OSError:
        pass  # nobody listens
    connection.close()
    return None


def _say(**message: Any) -> bool:
    connection = _state.get("connection")
    if connection is None or _state.get("pid") != os.getpid():
        return False
    try:
        connection.send(json.dumps(message).encode())
    except OSError:
        return False  # the keeper is gone
    return True


def _say_last(**message: Any) -> None:
    """Say it even if the keeper has just died: what is still in the pipes needs a reader before this process lets go of them."""
    connection = _state.get("connection")
    if connection is not None and not _say(**message) and _connect_again(connection):
        _say(**message)


def _connect_again(dead: socket.socket | None) -> bool:
    with _connecting:
        return _state.get("connection") is not dead or _connect(start=True)


_connecting, _naming = threading.Lock(), threading.Lock()


def _stay_connected(pid: int) -> None:
    """Thread: leave when the keeper says so; when the keeper dies, start another, or leave if the driver is dead too."""
    failures = 0
    while os.getpid() == pid and _state.get("pid") == pid:
        connection = _state.get("connection")
        guessing = _state["role"] in _GUESSED and _state["asked"] < 60
        if connection is not None and guessing and not select.select([connection], [], [], 1.0)[0]:
            _learn_role()
            continue
        try:
            data = connection.recv(4096) if connection is not None else b""
        except OSError:
            data = b""
        if _state.get("leaving") or _state.get("pid") != pid:
            return
        if data:
            message = json.loads(data)
            if message.get("say") == "exit":
                os._exit(int(message["code"]))
            continue
        if not _driver_lives():
            os._exit(1)
        time.sleep(min(5.0, 0.05 * 2**failures))
        failures = 0 if _connect_again(connection) else failures + 1


_GUESSED = ("worker", "fork")


def _learn_role() -> None:
    """A process that attached before it knew what it is: its name in multiprocessing, or PyTorch's data loader, tells later."""
    _state["asked"] += 1
    loader = getattr(sys.modules.get("torch.utils.data._utils.worker"), "_worker_info", None)
    process = getattr(sys.modules.get("multiprocessing.process"), "_current_process", None)
    if loader is not None:
        role, rank = "loader", int(loader.id)
    elif str(getattr(process, "name", "")).startswith("EngineCore"):
        role, rank = "engine", None
    else:
        return  # it may still be importing what it will be
    with _naming:
        if _state["role"] in _GUESSED:  # it may have said itself what it is just now
            _rename(role, rank)


def _driver_lives() -> bool:
    from eyas.runs.processes import Mark, is_alive

    try:
        run = json.loads((_state["folder"] / "run.json").read_text(encoding="utf-8"))
        return is_alive(Mark.from_json(run["driver"])) is not False
    except (OSError, ValueError, KeyError):
        return True  # cannot tell: on a broken shared disk, living on is the smaller harm


def _rename(role: str, rank: int | None) -> None:
    if (role, rank) == (_state["role"], _state["rank"]):
        return
    logs = _state["folder"] / "logs"
    stem = _file_stem(role, rank)
    with contextlib.suppress(OSError):  # the name is for people; the descriptor stays the same
        os.rename(logs / f"{_state['stem']}.log.jsonl", logs / f"{stem}.log.jsonl")
    _state.update(role=role, rank=rank, stem=stem)
    speaker.update(role=role, rank=rank)
    _say(say="name", role=role, rank=rank, stem=stem)


# --- the end of a process, wanted or not -----------------------------------------------------------------------------------


def _install_crash_hooks() -> None:
    """Uncaught exceptions become records; native crashes and SIGUSR1 (the watchdog's question) dump every thread's stack to stderr."""
    _dump_on_crash()
    if "hooked" in _hooks:
        return
    _hooks.add("hooked")
    ordinary, ordinary_thread = sys.excepthook, threading.excepthook

    def process_hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            logging.getLogger("eyas.runs.logs").critical("uncaught %s", kind.__name__, exc_info=(kind, value, trace))
        ordinary(kind, value, trace)

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None:
            logging.getLogger("eyas.runs.logs").critical(
                "uncaught %s in thread %s",
                arguments.exc_type.__name__,
                arguments.thread.name if arguments.thread else "?",
                exc_info=(arguments.exc_type, arguments.exc_value, arguments.exc_traceback),
            )
        ordinary_thread(arguments)

    sys.excepthook, threading.excepthook = process_hook, thread_hook
    atexit.register(_goodbye)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)


_hooks: set[str] = set()


def _dump_on_crash() -> None:
    # Off and on again: the last to install a handler is asked first, and calls the one before it. A library that has put its own
    # in place since (it shows C frames only) still gets its turn, after the Python stack.
    with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):  # stderr is closed
        faulthandler.disable()
        faulthandler.enable(file=2, all_threads=True)
        if LINUX:
            faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)


def _goodbye() -> None:
    if _state.get("pid") == os.getpid():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or the reader is gone
                stream.flush()
        _say_last(say="bye")


def _after_fork() -> None:
    """A forked child must not write into its parent's files: it attaches as a process of its own."""
    if not _state or _state.get("leaving"):
        return
    folder = _state["folder"]
    global _connecting, _naming
    _connecting, _naming = (
        threading.Lock(),
        threading.Lock(),
    )  # the parent's may have been held by a thread that does not exist here
    old = dict(_state)
    for reading, writing in old.get("pipes", {}).values():
        os.close(reading)
        if writing not in (1, 2):
            os.close(writing)
    if old.get("connection") is not None:
        old["connection"].close()
    os.close(old["writer"].descriptor)
    _leave_terminal_group()
    _attach(folder, "fork", None, False)
    for number, stream in old.get("streams", {}).items():
        # Libraries hold on to these (vLLM's log handler does): what this process writes there is its own, not the driver's.
        stream.copy_to = -1
        os.dup2(number, stream.fileno(), inheritable=False)
    # Before Python 3.12 a child of multiprocessing leaves by os._exit, without atexit. It clears its finalizers as it begins, so ours is
    # put in place by what it runs right after that.
    finalizers = sys.modules.get("multiprocessing.util")
    if finalizers is not None:
        finalizers.register_after_fork(_goodbye, lambda goodbye: finalizers.Finalize(None, goodbye, exitpriority=-100))


# --- the driver: its terminal, and the end of the run ------------------------------------------------------------------------


class TerminalStream(io.TextIOWrapper):
    """The driver's sys.stdout or sys.stderr: still the real terminal (so bars and colours work), with a copy into the log."""

    copy_to: int = -1
    gone: bool = False

    def write(self, text: str) -> int:
        # Cursor movements are a progress bar being redrawn, dozens of times a second: no log wants that. Colours are fine.
        if self.copy_to >= 0 and "\r" not in text and not _CURSOR.search(text):
            with contextlib.suppress(OSError):  # the keeper died; the terminal still has the line
                os.write(self.copy_to, text.encode(errors="replace"))
        if not self.gone:
            try:
                return super().write(text)
            except OSError:
                self.gone = True  # the terminal was closed, or `| head` has seen enough: no reason to end a long run
        return len(text)

    def flush(self) -> None:
        if not self.gone:
            try:
                super().flush()
            except OSError:
                self.gone = True


def attach_driver(folder: Path, role: str = "driver", rank: int | None = None, watched: bool = True) -> None:
    """Attach the run's first process, or a rank that a launcher started. What it prints still reaches the terminal; what C code in it, or a child that is not Python,
    prints reaches the terminal through the keeper. Undone by `detach_driver`.

    watched: False for a run in the background, whose stdout and stderr are a file of the run's logs: what the keeper writes down would
    stand there a second time.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = (sys.stdout, sys.stderr)
    real = (os.dup(1), os.dup(2))
    os.environ[RUN_DIR_VARIABLE] = str(folder)
    paths = [_STARTUP, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != _STARTUP)]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    _attach(folder, role, rank, True, terminal=real if watched else (nowhere, nowhere))
    # Without a keeper (it cannot be started, or this is no Linux) that file is the only one that has the lines.
    shown = real if watched or not _state.get("pipes") else (nowhere, nowhere)
    streams = []
    for number, name in ((0, "terminal-stdout"), (1, "terminal-stderr")):
        stream = TerminalStream(
            io.FileIO(os.dup(shown[number]), "w"), encoding="utf-8", errors="replace", write_through=True
        )
        pipe = _state.get("pipes", {}).get(name)
        if pipe:
            stream.copy_to = pipe[1]
        streams.append(stream)
    sys.stdout, sys.stderr = streams
    plain = TerminalStream(io.FileIO(os.dup(shown[1]), "w"), encoding="utf-8", errors="replace", write_through=True)
    set_terminal(plain)
    _state.update(saved=saved, real=real, nowhere=nowhere, streams={1: streams[0], 2: streams[1]})


def detach_driver() -> None:
    """Give the terminal back. The keeper stays until the last process of the run is gone."""
    if _state.get("pid") != os.getpid() or "saved" not in _state:
        return
    lost = _state["writer"].lost
    if lost:
        logging.getLogger(__name__).warning("%d log records could not be written (disk full?)", lost)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed
            stream.flush()
        if isinstance(stream, TerminalStream):
            stream.copy_to = -1  # a library may hold on to the stream: it still reaches the terminal
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)
    _state["leaving"] = True
    _say_last(say="bye", leaves=True)
    sys.stdout, sys.stderr = _state["saved"]
    for number in (1, 2):
        os.dup2(_state["real"][number - 1], number, inheritable=True)
    for reading, writing in _state.get("pipes", {}).values():
        os.close(reading)
        os.close(writing)
    connection = _state.get("connection")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.settimeout(3.0)
            while connection.recv(
                4096
            ):  # the keeper closes when the driver's lines are all written and on the terminal
                pass
        connection.close()
    remove_writer(_state["writer"])
    set_terminal(None)
    for name in (RUN_DIR_VARIABLE, STREAMS_VARIABLE, "EYAS_RUN_ID"):
        os.environ.pop(name, None)
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != _STARTUP]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for descriptor in (*_state["real"], _state["nowhere"]):
        os.close(descriptor)
    _state.clear()


def auto_attach() -> None:
    """What `startup/sitecustomize.py` calls in every Python child of a run."""
    arguments = " ".join(sys.orig_argv)
    if "resource_tracker" in arguments or "eyas.runs.keeper" in arguments:
        return
    if "RANK" in os.environ and "LOCAL_RANK" in os.environ:
        attach_process("rank", int(os.environ["RANK"]), force_streams=False)  # torchrun and its kin
        return
    role = "child"
    if "multiprocessing" in arguments:
        role = "worker"
    elif "-m" in sys.orig_argv:
        at = sys.orig_argv.index("-m") + 1
        role = sys.orig_argv[at].rsplit(".", 1)[-1] if at < len(sys.orig_argv) else role
    attach_process(role, force_streams=False)
