"""eyas's own lines: loggers that no library can silence, one JSON line per record, and what of it the user sees.

`logs.py` puts this to work in every process of a run.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from typing import Any

LEVEL_VARIABLE = "EYAS_LOG_LEVEL"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

#: Who speaks: goes into every record of this process.
speaker: dict[str, Any] = {"role": "process", "rank": None}
#: The user's stderr past the log, while this process is the driver of a run.
_past_the_log: list[Any] = []


def level_number(name: str | None) -> int:
    """`debug` -> 10 ... ; None or empty: `EYAS_LOG_LEVEL`, else info. Raises ValueError on an unknown name."""
    name = (name or os.environ.get(LEVEL_VARIABLE) or "info").lower()
    if name == "warn":
        name = "warning"
    if name not in LEVELS:
        raise ValueError(f"log level {name!r}; expected one of {', '.join(LEVELS)}")
    return LEVELS[name]


class EyasLogger(logging.Logger):
    """Loggers named `eyas...`: heard at the level asked for this run, whatever level a library sets, now or later.

    `logging.disable(...)` and `dictConfig` with its default `disable_existing_loggers` silence ordinary loggers; not these.
    """

    threshold = logging.INFO

    def __new__(cls, name: str, level: int = logging.NOTSET) -> Any:
        if name == "eyas" or name.startswith("eyas."):
            return super().__new__(cls)
        return _plain_logger(name, level)

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the standard library's name
        return level >= EyasLogger.threshold

    def getEffectiveLevel(self) -> int:  # noqa: N802
        return EyasLogger.threshold

    def handle(self, record: logging.LogRecord) -> None:
        self.disabled = False
        super().handle(record)


_plain_logger: Any = logging.Logger


def _use_own_loggers() -> None:
    global _plain_logger
    current = logging.getLoggerClass()
    if current is not EyasLogger:
        _plain_logger = current
        logging.setLoggerClass(EyasLogger)
    for name, logger in list(logging.Logger.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and (name == "eyas" or name.startswith("eyas.")):
            logger.__class__ = EyasLogger


class RecordWriter(logging.Handler):
    """Appends each record as one JSON line, with one system call and no buffer of its own."""

    def __init__(self, descriptor: int):
        super().__init__(logging.NOTSET)
        self.descriptor = descriptor
        self.lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        data: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "role": speaker["role"],
            "rank": speaker["rank"],
            "pid": os.getpid(),
            "logger": record.name,
        }
        try:
            data["text"] = record.getMessage()
        except (TypeError, ValueError) as error:
            data["text"] = f"{record.msg!r} with arguments {record.args!r} ({error})"
        if record.exc_info and record.exc_info[0] is not None:
            data["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        if record.threadName not in (None, "MainThread"):
            data["thread"] = record.threadName
        try:
            os.write(self.descriptor, (json.dumps(data, ensure_ascii=False) + "\n").encode(errors="replace"))
        except OSError:
            self.lost += 1  # a full disk must not end the run because of a log line; `detach` reports the count


def terminal() -> Any:
    """The user's stderr, past the log: for what the log holds already."""
    return _past_the_log[-1] if _past_the_log else sys.stderr


def set_terminal(stream: Any) -> None:
    """Say where the user's terminal is past the log; None: it is sys.stderr again."""
    _past_the_log[:] = [] if stream is None else [stream]


class TerminalHandler(logging.StreamHandler):
    """eyas's own lines for the user. In a run straight to the terminal: the log has the record already."""

    @property
    def stream(self) -> Any:
        return terminal()

    @stream.setter
    def stream(self, stream: Any) -> None:
        pass  # looked up each time


def log_to_terminal(level: int) -> None:
    """Show eyas's own lines of this level and above on stderr; for the command line, once per process."""
    own = logging.getLogger("eyas")
    handler = next((one for one in own.handlers if isinstance(one, TerminalHandler)), None)
    if handler is None:
        handler = TerminalHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        own.addHandler(handler)
    handler.setLevel(level)
    own.setLevel(level)
    own.propagate = False


def install_writer(descriptor: int) -> RecordWriter:
    """From now on every record of this process goes to `descriptor`, at the level that the environment says."""
    EyasLogger.threshold = level_number(None)
    _use_own_loggers()
    writer = RecordWriter(descriptor)
    own, root = logging.getLogger("eyas"), logging.getLogger()
    for logger in (own, root):
        for old in [handler for handler in logger.handlers if isinstance(handler, RecordWriter)]:
            logger.removeHandler(old)
        logger.addHandler(writer)
    own.propagate = False  # else each record comes twice, and a library's root handler prints it a third time
    if root.level > EyasLogger.threshold or root.level == logging.NOTSET:
        root.setLevel(EyasLogger.threshold)
    return writer


def remove_writer(writer: RecordWriter) -> None:
    """Undo `install_writer`."""
    for logger in (logging.getLogger("eyas"), logging.getLogger()):
        logger.removeHandler(writer)
