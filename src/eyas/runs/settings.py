"""How a command is made a run, and on which host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from eyas.base.settings import Flag, Settings

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class LogOptions(Settings):
    log_level: LogLevel | None = None
    """Of eyas's own lines, in every process. Default: info in a run's logs, warning on the terminal."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(LogOptions):
    run_dir: Path | None = None
    """The run's directory. Default: a new one."""
    run_id: Annotated[str | None, Flag(hidden=True)] = None
    detach: bool = False
    """Run in the background, past logout."""
    stall_after: Annotated[float, Ge(0)] = 1800.0
    """Seconds without progress until the watchdog acts; 0: never."""
    on_stall: Literal["report", "stop"] = "report"
    """report: stacks into the logs; stop: that, then end."""
    host: str | None = None
    """Run there over ssh (user@box), detached."""
    host_dir: str | None = None
    """Directory on the host to run in."""
    host_command: Annotated[str | None, Flag(env="EYAS_REMOTE_COMMAND")] = None
    """How eyas is called there. Default: eyas."""
