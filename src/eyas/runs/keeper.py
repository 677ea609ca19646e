"""The keeper: one small process per run and host that outlives every other process of the run.

    python -m eyas.runs.keeper RUN_FOLDER        started by `logs.attach_process`, never by hand

It does what a process cannot do for itself once it is dead, stopped or stuck:
- reads the stdout and stderr pipes of every process of the run, stamps the lines with time, role, rank and pid, appends them to files;
- writes down every process (`processes.jsonl`) and every shared-memory segment that one of them made (`shm-HOST.json`);
- ends what is left of a run when its driver is gone, also when that was SIGKILL and the rest hangs in native code; removes the
  segments that nobody uses any more;
- watches the progress and asks every process for its stacks when there is none (`watchdog.py`).

It leaves when the driver and all processes of the run are gone and every pipe is read to its end. If it is killed itself, the
processes start another one and hand it the same pipes: nothing in them is lost.
Trade-off: one more process of about 20 MB per host; in return no thread of ours competes for a rank's GIL, and nothing depends on a
dying process doing the right thing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import queue
import select
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from eyas.runs.log_records import RecordWriter, level_number, speaker
from eyas.runs.logs import keeper_address, same_user
from eyas.runs.processes import (
    SHM,
    Mark,
    boot_id,
    end_processes,
    host_name,
    is_alive,
    leftover_shm,
    processes_of_run,
    shm_names_of,
    state_letter,
)
from eyas.runs.watchdog import Watchdog

logger = logging.getLogger("eyas.runs.keeper")

#: A line longer than this is cut into several records.
LONGEST_LINE = 64 * 1024
#: How long the rest of a run may take to end by itself once the driver is gone, in seconds.
GRACE = 2.0
LAUNCHED_GRACE = 20.0


class Process:
    """One attached process: who it is, and the file its lines go to."""

    def __init__(self, hello: dict[str, Any], logs: Path, client: socket.socket):
        self.client = client
        self.mark = Mark.from_json(hello["mark"])
        self.role, self.rank, self.stem = hello["role"], hello["rank"], hello["stem"]
        self.logs = logs
        self.said_goodbye = False
        self.descriptor = -1

    @property
    def name(self) -> str:
        return f"{self.role}{'' if self.rank is None else f' {self.rank}'} (pid {self.mark.pid})"

    def append(self, stream: str, lines: list[str], now: float, level: str | None = None) -> None:
        if self.descriptor < 0:
            path = self.logs / f"{self.stem}.out.jsonl"
            self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        record = {"time": round(now, 6), "stream": stream, "role": self.role, "rank": self.rank, "pid": self.mark.pid}
        if level:
            record["level"] = level
        data = "".join(json.dumps({**record, "text": line}, ensure_ascii=False) + "\n" for line in lines)
        with contextlib.suppress(OSError):  # a full disk: go on reading, else the rank would block on its print
            os.write(self.descriptor, data.encode(errors="replace"))

    def rename(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nothing written yet
            os.rename(self.logs / f"{self.stem}.out.jsonl", self.logs / f"{message['stem']}.out.jsonl")
        self.role, self.rank, self.stem = message["role"], message["rank"], message["stem"]


class Stream:
    """One pipe of one process: cuts bytes into lines, and passes them on to the terminal where there is one."""

    def __init__(self, process: Process, name: str, descriptor: int, tee: Tee | None):
        self.process, self.descriptor, self.tee = process, descriptor, tee
        self.name = name.removeprefix("terminal-")
        self.rest = b""
        self.since = 0.0
        os.set_blocking(descriptor, False)

    def read(self, everything: bool = False) -> bool:
        """Take what is there (one chunk, or all of it). False at the end of the pipe."""
        while True:
            try:
                data = os.read(self.descriptor, 1 << 18)
            except BlockingIOError:
                return True
            if not data:
                self.flush()
                return False
            if self.tee is not None:
                self.tee.put(data)
            self.take(data)
            if not everything:
                return True

    def take(self, data: bytes) -> None:
        # A carriage return ends a line too: a progress bar's states are lines of their own, never one endless line.
        *lines, self.rest = (self.rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        while len(self.rest) > LONGEST_LINE:
            lines.append(self.rest[:LONGEST_LINE])
            self.rest = self.rest[LONGEST_LINE:]
        self.since = time.monotonic()
        texts = [line.decode(errors="replace") for line in lines if line]
        if texts:
            self.process.append(self.name, texts, time.time())

    def flush(self) -> None:
        """Write a line that has not ended, so that it is not held back for ever."""
        if self.rest:
            self.process.append(self.name, [self.rest.decode(errors="replace")], time.time())
            self.rest = b""


class Tee(threading.Thread):
    """Passes bytes on to the user's terminal in a thread of its own: a terminal held with Ctrl-S must not hold up the ranks."""

    def __init__(self, descriptor: int):
        super().__init__(daemon=True)
        self.descriptor = descriptor
        self.waiting: queue.Queue[bytes] = queue.Queue(maxsize=4096)
        self.start()

    def put(self, data: bytes) -> None:
        with contextlib.suppress(queue.Full):  # the terminal has been held for long; the file has it all
            self.waiting.put_nowait(data)

    def run(self) -> None:
        while True:
            data = self.waiting.get()
            if not data:
                os.close(self.descriptor)  # whoever reads it sees its end
                return
            with contextlib.suppress(OSError):  # the terminal is gone
                while data:
                    data = data[os.write(self.descriptor, data) :]
            self.waiting.task_done()

    def drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.002)


class SharedMemory:
    """Notes which segments under /dev/shm the run's own processes made: the only ones that `clean` may remove."""

    def __init__(self, folder: Path):
        self.path = folder / f"shm-{host_name()}.json"
        self.before = {(entry.name, entry.inode()) for entry in _scan(SHM)}
        self.segments: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError, KeyError):  # written by a keeper before this one
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["boot"] == boot_id():
                self.segments = data["segments"]
                self.before -= set(self.segments.items())
        self.notify = self._watch()

    def _watch(self) -> int:
        """Descriptor that becomes readable when something is made in /dev/shm, so that a short look at the right time is enough."""
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if (
            descriptor >= 0 and libc.inotify_add_watch(descriptor, str(SHM).encode(), 0x100 | 0x80) < 0
        ):  # CREATE, MOVED_TO
            os.close(descriptor)
            return -1
        return descriptor

    def look(self, pids: list[int]) -> None:
        """Attribute new segments: those that did not exist before the run and that one of its processes maps."""
        present = {entry.name: entry.inode() for entry in _scan(SHM)}
        unknown = {n for n, i in present.items() if (n, i) not in self.before and self.segments.get(n) != i}
        if not unknown:
            return
        found = False
        for pid in pids:
            for name in shm_names_of(pid) & unknown:
                self.segments[name] = present[name]
                found = True
        if found:
            data = {"boot": boot_id(), "host": host_name(), "segments": self.segments}
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(data), encoding="utf-8")
            os.replace(temporary, self.path)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(folder) if not entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


class Keeper:
    """The loop over sockets and pipes."""

    def __init__(self, folder: Path, listener: socket.socket):
        self.folder, self.listener = folder, listener
        self.run_id = os.environ["EYAS_KEEPER_OF"]
        self.logs = folder / "logs"
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, None)
        self.clients: dict[socket.socket, Process] = {}
        self.streams: dict[int, Stream] = {}
        self.processes: list[Process] = []
        self.driver: Mark | None = None
        self.driver_left = 0.0
        self.shm = SharedMemory(folder)
        if self.shm.notify >= 0:
            self.selector.register(self.shm.notify, selectors.EVENT_READ, "shm")
        self.look_at_shm = self.next_look = 0.0
        self.started = time.monotonic()
        self.ended_rest = False
        self.ending: threading.Thread | None = None
        self.watchdog = Watchdog(folder, self.run_id)

    def run(self) -> None:
        next_round = 0.0
        while True:
            for key, _ in self.selector.select(timeout=0.25):
                self._serve(key)
            now = time.monotonic()
            if self.look_at_shm and now >= self.look_at_shm:
                self.look_at_shm = 0.0
                self.shm.look([p.mark.pid for p in self.living()])
            if now >= next_round:
                next_round = now + 0.5
                self._round(now)
                if self._may_leave(now):
                    self._remove_segments()
                    return

    def _serve(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self.listener:
            self._accept()
        elif key.data == "shm":
            with contextlib.suppress(BlockingIOError):
                os.read(self.shm.notify, 1 << 16)
            # The maker maps it a moment after making it; many come at once.
            self.look_at_shm = self.look_at_shm or time.monotonic() + 0.02
        elif isinstance(key.data, Stream):
            self._read(key.data)
        else:
            self._hear(key.data)

    def _read(self, stream: Stream, everything: bool = False) -> None:
        # What a process said before it printed comes first: its rank, above all.
        client = stream.process.client
        while client in self.clients and select.select([client], [], [], 0)[0]:
            self._hear(client)
        if self.streams.get(stream.descriptor) is stream and not stream.read(everything):
            self._close(stream)

    def _accept(self) -> None:
        try:
            client, _ = self.listener.accept()
        except OSError:
            return
        if not same_user(client):
            client.close()
            return
        client.setblocking(False)
        self.selector.register(client, selectors.EVENT_READ, client)

    def _hear(self, client: socket.socket) -> None:
        if client.fileno() < 0:
            return  # hung up within this round
        try:
            data, descriptors, _, _ = socket.recv_fds(client, 1 << 16, 8)
        except BlockingIOError:
            return  # heard within this round
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._hang_up(client)
            return
        message = json.loads(data)
        process = self.clients.get(client)
        if message["say"] == "hello":
            self._welcome(client, message, list(descriptors))
        elif process is not None and message["say"] == "name":
            process.rename(message)
            self._write_down(process)
        elif process is not None and message["say"] == "bye":
            process.said_goodbye = True
            if message.get("leaves"):
                self._settle(process)
                self._hang_up(client)
        else:
            for descriptor in descriptors:
                os.close(descriptor)

    def _welcome(self, client: socket.socket, hello: dict[str, Any], descriptors: list[int]) -> None:
        process = Process(hello, self.logs, client)
        self.clients[client] = process
        self.processes.append(process)
        names = hello["streams"]
        tees = [Tee(descriptor) for descriptor in descriptors[len(names) :]]
        for name, descriptor in zip(names, descriptors, strict=False):
            tee = tees[0 if name == "stdout" else 1] if tees and not name.startswith("terminal-") else None
            stream = Stream(process, name, descriptor, tee)
            self.streams[descriptor] = stream
            self.selector.register(descriptor, selectors.EVENT_READ, stream)
        if process.role == "driver":
            self.driver = process.mark
        self._write_down(process)
        with contextlib.suppress(OSError):  # it died already
            client.send(b"{}")

    def _write_down(self, process: Process) -> None:
        record = {**process.mark.as_json(), "role": process.role, "rank": process.rank, "time": round(time.time(), 3)}
        path = self.folder / "processes.jsonl"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(descriptor, (json.dumps(record) + "\n").encode())
        os.close(descriptor)

    def _settle(self, leaving: Process) -> None:
        """Write and show all that has been said so far, before a process hands the terminal back."""
        for stream in list(self.streams.values()):
            self._read(stream, everything=True)
        for stream in self.streams.values():
            if stream.process is leaving:
                stream.flush()
                if stream.tee is not None:
                    stream.tee.drain(2.0)
                    stream.tee.put(b"")
                    stream.tee = None

    def _hang_up(self, client: socket.socket) -> None:
        self.selector.unregister(client)
        client.close()
        process = self.clients.pop(client, None)
        if process is not None and not process.said_goodbye and not self.ended_rest:
            # It may live on (a second thread closed the socket), so say only what is known.
            logger.info("%s ended without a goodbye (a signal, os._exit, or a crash)", process.name)

    def _close(self, stream: Stream) -> None:
        self.selector.unregister(stream.descriptor)
        os.close(stream.descriptor)
        if stream.tee is not None:
            stream.tee.put(b"")
        del self.streams[stream.descriptor]

    def living(self) -> list[Process]:
        return [process for process in self.processes if is_alive(process.mark)]

    def _round(self, now: float) -> None:
        for stream in self.streams.values():
            if stream.rest and now - stream.since > 1.0:
                stream.flush()
        if now >= self.next_look:  # for a segment that is mapped long after it is made, and where there is no notice
            self.next_look = now + 10.0
            self.look_at_shm = self.look_at_shm or now
        if self.driver is None:
            self.driver = _driver_in(self.folder)
        if self.driver is not None and not self.driver_left and self._driver_gone():
            self.driver_left = now
        if self.driver_left and not self.ended_rest and now - self.driver_left > self._grace():
            self.ended_rest = True
            self.ending = threading.Thread(target=self._end_the_rest, daemon=True)
            self.ending.start()
        if self.driver is not None and self.driver.host == host_name() and not self.driver_left:
            self.watchdog.look(self)

    def _driver_gone(self) -> bool:
        if any(process.mark == self.driver and process.said_goodbye for process in self.processes):
            return True
        return self.driver is not None and is_alive(self.driver) is False

    def _grace(self) -> float:
        """A launcher's ranks leave after rank 0, each in its time."""
        return LAUNCHED_GRACE if "launch" in _record(self.folder) else GRACE

    def _end_the_rest(self) -> None:
        def find() -> list[Mark]:
            return processes_of_run(self.run_id, self.folder, without=self.driver)

        left = find()
        if not left:
            return
        logger.warning("the driver is gone; ending what is left of the run: %s", ", ".join(str(m.pid) for m in left))
        ended, alive = end_processes(find)
        for mark in alive:
            logger.error("pid %d cannot be ended (state %s)", mark.pid, state_letter(mark.pid))
        logger.info("ended %d processes", len(ended))

    def _remove_segments(self) -> None:
        """vLLM on the CPU leaves its segments after every run, also a good one."""
        for path in leftover_shm(self.folder):
            try:
                path.unlink()
                logger.info("removed shared-memory segment %s", path.name)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", path, error)

    def _may_leave(self, now: float) -> bool:
        if self.ending is not None and self.ending.is_alive():
            return False
        if self.driver_left:
            return self.ended_rest and (not self.streams or now - self.driver_left > 60)
        # Started for a driver that never came, or on another host whose processes have all gone.
        return now - self.started > 30 and not self.clients and not self.streams


def _record(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _driver_in(folder: Path) -> Mark | None:
    try:
        return Mark.from_json(_record(folder)["driver"])
    except (KeyError, TypeError):
        return None


def main() -> int:
    folder = Path(sys.argv[1])
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.environ["EYAS_RUN_ID"] = os.environ["EYAS_KEEPER_OF"]
    address = keeper_address(folder)
    del os.environ["EYAS_RUN_ID"]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
    except OSError:
        return 0  # there is one already
    listener.listen(256)
    if os.fork():
        return 0  # "ready": it listens. The child belongs to nobody, so no end of a process tree takes it along
    descriptor = os.open(
        folder / "logs" / f"keeper-{host_name()}-{os.getpid()}.log.jsonl",
        os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
    )
    speaker.update(role="keeper")
    own = logging.getLogger("eyas")
    own.addHandler(RecordWriter(descriptor))
    own.setLevel(level_number(None))
    own.propagate = False
    Keeper(folder, listener).run()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
