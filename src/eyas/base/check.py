"""A row of a gate's table: what was looked at, what was found, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True)
class Check:
    """One row of preflight's and doctor's tables. `remedy` is empty where there is nothing to do."""

    name: str
    status: Status
    finding: str
    remedy: str = ""
