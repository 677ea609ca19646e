"""Reading the logs of a run: one stream of lines out of many files, merged by time; and what went wrong first.

Each file is in order already (one writer, append only), so a merge never holds more than one line per file.
"""

from __future__ import annotations

import heapq
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from eyas.runs.log_records import LEVELS

#: Level words that libraries put at the start of a printed line: `WARNING 11-30 ...`, `(EngineCore pid=3) ERROR ...`, `[rank0]:E...`.
_PRINTED_LEVEL = re.compile(r"^(?:\([^)]*\)\s*|\[[^\]]*\]:?\s*)*(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
#: Colours and cursor movements.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: Ends of native code, as glibc, CPython's faulthandler, C++ and the CUDA libraries print them.
_NATIVE_END = re.compile(
    r"Fatal Python error|terminate called after|Segmentation fault|Segfault encountered|\*\*\* stack smashing|malloc\(\)|free\(\)|double free|"
    r"CUDA error|NCCL (?:WARN|error)|Out of memory|illegal memory access"
)
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Line:
    """One line of one process. `stream`: `log` (Python logging), `stdout`, `stderr`, `stack` (asked for by the watchdog)."""

    time: float
    role: str
    rank: int | None
    pid: int
    level: str
    stream: str
    text: str
    logger: str = ""
    source: str = field(default="", compare=False)
    offset: int = field(default=0, compare=False)  # where the next line of that file begins

    @property
    def who(self) -> str:
        return f"{self.role} {self.rank}" if self.rank is not None else self.role


@dataclass(frozen=True)
class Wanted:
    """Which lines are asked for. Empty tuples and None mean all."""

    ranks: tuple[int, ...] = ()
    roles: tuple[str, ...] = ()
    level: str | None = None
    grep: str | None = None

    def test(self) -> Callable[[Line], bool]:
        least = LEVELS[self.level] if self.level else 0
        pattern = re.compile(self.grep) if self.grep else None

        def fits(line: Line) -> bool:
            return (
                (not self.ranks or line.rank in self.ranks)
                and (not self.roles or line.role in self.roles)
                and LEVELS.get(line.level, 20) >= least
                and (pattern is None or pattern.search(line.text) is not None)
            )

        return fits


def parse_line(raw: bytes, source: str = "", offset: int = 0) -> Line | None:
    """A line of a `.jsonl` file; None for the torn last line of a machine that lost power."""
    try:
        data = json.loads(raw)
        text = _CONTROL.sub("", str(data["text"]))
        if data.get("traceback"):
            text = f"{text}\n{data['traceback'].rstrip()}"
        stream = data.get("stream", "log")
        level = data.get("level") or _level_of_print(text, stream)
        return Line(
            float(data["time"]),
            str(data["role"]),
            data.get("rank"),
            int(data["pid"]),
            level,
            stream,
            text,
            data.get("logger", ""),
            source,
            offset,
        )
    except (ValueError, KeyError, TypeError):
        return None


def _level_of_print(text: str, stream: str) -> str:
    found = _PRINTED_LEVEL.match(text)
    if found:
        return found.group(1).lower()
    if _TRACEBACK in text or _NATIVE_END.search(text):
        return "error"
    return "warning" if stream == "stderr" else "info"


class LogFile:
    """One file, read from where it was left. Only whole lines are taken."""

    def __init__(self, path: Path, offset: int = 0):
        self.path, self.offset = path, offset
        self.handle = open(path, "rb")  # noqa: SIM115 - kept open: the file may be renamed while it is followed
        self.handle.seek(offset)

    def lines(self) -> Iterator[Line]:
        while True:
            raw = self.handle.readline()
            if not raw.endswith(b"\n"):
                self.handle.seek(self.offset)
                return
            self.offset += len(raw)
            if self.path.suffix == ".raw":
                text = raw.decode(errors="replace").rstrip("\n")
                moment = self.path.stat().st_mtime if self.path.exists() else time.time()
                role, _, rest = self.path.stem.partition("-")
                pid = int(rest.split("-")[-2]) if rest.count("-") >= 2 else 0
                yield Line(moment, role, None, pid, "info", "stdout", text, "", file_key(self.path), self.offset)
                continue
            line = parse_line(raw, file_key(self.path), self.offset)
            if line is not None:
                yield line


def file_key(path: Path) -> str:
    """Names a file without its role, which changes when a process learns its rank: `HOST-PID-START.out.jsonl`."""
    return path.name.partition("-")[2]


def log_files(folder: Path) -> list[Path]:
    """All files with lines of a run, those of attempts put aside excepted."""
    logs = folder / "logs"
    return sorted([*logs.glob("*.jsonl"), *logs.glob("*.raw")]) if logs.is_dir() else []


def read_lines(folder: Path, wanted: Wanted | None = None) -> Iterator[Line]:
    """Every line of a run, merged by time."""
    fits = (wanted or Wanted()).test()
    files = [LogFile(path) for path in log_files(folder)]
    try:
        merged: Iterable[Line] = heapq.merge(*(one.lines() for one in files), key=lambda line: line.time)
        yield from filter(fits, merged)
    finally:
        for one in files:
            one.handle.close()


def follow_lines(
    folder: Path,
    over: Callable[[], bool],
    wanted: Wanted | None = None,
    after: dict[str, int] | None = None,
    settle: float = 0.3,
) -> Iterator[Line]:
    """Lines as they come, merged by time.

    Args:
        over: says that the run has ended; then what is left is read and the iterator ends.
        after: `file_key` -> offset to start from (a reader that was cut off goes on there).
        settle: seconds a line is held back, so that an earlier one from another file can still come first.
    """
    fits = (wanted or Wanted()).test()
    files: dict[int, LogFile] = {}  # by inode: files are renamed when a process learns its rank
    held: list[tuple[float, int, Line]] = []
    count = 0
    try:
        while True:
            last_round = over()
            for path in log_files(folder):
                try:
                    inode = path.stat().st_ino
                    if inode not in files:
                        files[inode] = LogFile(path, (after or {}).get(file_key(path), 0))
                    files[inode].path = path
                except FileNotFoundError:
                    continue  # renamed between the listing and here; the next round finds it
            for one in files.values():
                for line in one.lines():
                    count += 1
                    heapq.heappush(held, (line.time, count, line))
            ripe = time.time() - settle
            while held and (last_round or held[0][0] <= ripe):
                line = heapq.heappop(held)[2]
                if fits(line):
                    yield line
            if last_round:
                return
            time.sleep(0.15)
    finally:
        for one in files.values():
            one.handle.close()


def format_line(line: Line, colour: bool = False) -> str:
    """`12:34:56.789  rank 3    warning  text`, with further lines of a traceback indented below."""
    moment = datetime.fromtimestamp(line.time).strftime("%H:%M:%S.%f")[:-3]
    mark = {"stdout": ">", "stderr": ">", "stack": "#"}.get(line.stream, " ")
    first, *rest = line.text.rstrip().split("\n")
    shown = f"{moment} {line.who:<10} {line.level:<8}{mark} {first}"
    if colour:
        code = {"error": "31", "critical": "31", "warning": "33", "debug": "2"}.get(line.level)
        shown = f"\x1b[{code}m{shown}\x1b[0m" if code else shown
    return "\n".join([shown, *(f"{'':33}{one}" for one in rest)])


# --- what went wrong first ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cause:
    """A traceback or a native end, as one process told it."""

    time: float
    role: str
    rank: int | None
    pid: int
    headline: str
    text: str

    @property
    def who(self) -> str:
        return f"{self.role} {self.rank}" if self.rank is not None else self.role


def first_causes(folder: Path) -> list[Cause]:
    """Every traceback and native crash in a run's logs, one per process and message, the earliest first.

    What comes first is the likeliest cause: when one rank dies, the others fail in the collective that waits for it.
    """
    causes: list[Cause] = []
    for path in log_files(folder):
        if path.name.startswith("keeper"):
            continue
        one = LogFile(path)
        try:
            causes += _causes_in([line for line in one.lines() if line.stream != "stack"])
        finally:
            one.handle.close()
    causes.sort(key=lambda cause: cause.time)
    seen: set[tuple[int, str]] = set()
    unique = []
    for cause in causes:
        if (cause.pid, cause.headline) not in seen:
            seen.add((cause.pid, cause.headline))
            unique.append(cause)
    return unique


def _causes_in(lines: list[Line]) -> list[Cause]:
    causes: list[Cause] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.stream == "log":
            if _TRACEBACK in line.text:
                causes.append(_cause(line, line.text))
            at += 1
        elif _TRACEBACK in line.text:
            prefix = line.text[: line.text.index(_TRACEBACK)]
            block, at = _printed_traceback(lines, at, prefix)
            causes.append(_cause(line, "\n".join(block)))
        elif _NATIVE_END.search(line.text):
            block = []
            start = line.time
            while (
                at < len(lines)
                and len(block) < 120
                and lines[at].time - start < 1.0
                and _TRACEBACK not in lines[at].text
            ):
                block.append(lines[at].text)
                at += 1
            causes.append(_cause(line, "\n".join(block), block[0]))
        else:
            at += 1
    return causes


def _printed_traceback(lines: list[Line], at: int, prefix: str) -> tuple[list[str], int]:
    """A traceback printed line by line, each line perhaps behind a library's prefix; ends with its first unindented line."""
    block = [_TRACEBACK]
    stream = lines[at].stream
    at += 1
    while at < len(lines):
        if lines[at].stream != stream:
            at += 1
            continue
        text = lines[at].text
        text = text[len(prefix) :] if len(text) >= len(prefix) else text
        block.append(text)
        at += 1
        if (text and not text.startswith((" ", "\t"))) or len(block) > 200:
            break
    return block, at


def _cause(line: Line, text: str, headline: str | None = None) -> Cause:
    if headline is None:
        flat = [one for one in text.split("\n") if one.strip()]
        headline = flat[-1].strip() if flat else ""
    return Cause(line.time, line.role, line.rank, line.pid, headline, text)


def format_causes(causes: list[Cause]) -> str:
    """The first cause in full, those after it in a line each, for the terminal."""
    first, *others = causes
    moment = datetime.fromtimestamp(first.time).strftime("%H:%M:%S.%f")[:-3]
    lines = [f"\nfirst cause, {first.who} (pid {first.pid}), {moment}:"]
    lines += [f"  {one}" for one in first.text.rstrip().split("\n")]
    for cause in others[:8]:
        moment = datetime.fromtimestamp(cause.time).strftime("%H:%M:%S.%f")[:-3]
        lines.append(f"then, {cause.who} (pid {cause.pid}), {moment}: {cause.headline}")
    if len(others) > 8:
        lines.append(f"and {len(others) - 8} more, in the logs")
    return "\n".join(lines) + "\n"


def as_json(line: Line) -> dict[str, Any]:
    """For `--json` and for a reader on another host, who goes on at `at` after a broken connection."""
    data = {name: getattr(line, name) for name in ("time", "role", "rank", "pid", "level", "stream", "text", "logger")}
    return {**data, "at": [line.source, line.offset]}


def from_json(data: dict[str, Any]) -> Line:
    source, offset = data.pop("at")
    return replace(Line(**data), source=source, offset=offset)
