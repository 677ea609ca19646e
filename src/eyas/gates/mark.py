"""The mark that `eyas verify` leaves in a store's manifest, and the one way to read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mark:
    """What was proven of a store. `passed`: nothing wrong was found by what was looked at, which is told by the other fields.

    `bytes`: every byte of it is what its writer wrote, in form and number. `parity`: gate 4 passed on the engine that made the
    states. `recomputed`: some samples agreed with an independent pass at the time of the mark. `note`: how many, or why not.
    """

    passed: bool
    time: str
    bytes: bool
    parity: bool
    recomputed: bool
    note: str
    problems: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line: `passed 2026-01-02T03:04:05Z: bytes, parity, recomputed (4 random samples ...)`."""
        proven = [name for name in ("bytes", "parity", "recomputed") if getattr(self, name)]
        found = ", ".join(proven) or "nothing" if self.passed else (self.problems or ("no problem is named",))[0]
        return f"{'passed' if self.passed else 'FAILED'} {self.time}: {found}" + (
            f" ({self.note})" if self.note else ""
        )


def read_mark(manifest: Mapping[str, Any]) -> Mark | None:
    """The mark in a store's manifest; None without one, and for anything that is not one (`{}`, true, a mark without its time)."""
    mark = manifest.get("verified")
    if not isinstance(mark, dict) or not isinstance(mark.get("passed"), bool) or not isinstance(mark.get("time"), str):
        return None
    problems = tuple(map(str, mark.get("problems") or ()))
    passed = mark["passed"] and not problems
    parity = manifest.get("parity")
    return Mark(
        passed,
        mark["time"],
        # Earlier marks say only whether all passed: every byte was always read, and a store without parity failed.
        mark.get("bytes", passed) is True,
        mark.get("parity", passed and isinstance(parity, dict) and parity.get("passed")) is True,
        bool(mark.get("recomputed")),
        str(mark.get("note") or ""),
        problems,
    )
