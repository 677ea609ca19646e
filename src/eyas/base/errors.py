"""Errors that a user sees, each with its own exit code.

Every message says what was expected, what came, where, and what to do: `what` is the finding, `remedy` the next step.
The command line prints both and ends with `exit_code`; `docs/cli.md` lists the codes.
"""

from __future__ import annotations


class EyasError(Exception):
    """Something the user can act on. Args: what was found (with place and values), and what to do about it."""

    exit_code = 1

    def __init_subclass__(cls, code: int) -> None:
        cls.exit_code = code

    def __init__(self, what: str, remedy: str = ""):
        super().__init__(what if not remedy else f"{what}\n  -> {remedy}")
        self.what = what
        self.remedy = remedy


class InputError(EyasError, code=3):
    """Bad input: a file, a row, a flag's value, a model directory."""


class PreflightError(EyasError, code=4):
    """Gate 1: this machine, model and flags cannot give what was asked."""


class ContractError(EyasError, code=5):
    """A tensor on its way broke its declared shape, dtype or meaning (gates 2 and 5, and always)."""


class ParityError(EyasError, code=6):
    """Gate 4: the captured states are not the states of the layers that were asked for.

    `check` failed, with `value` where at most `allowed` would have passed (0: equality was asked for).
    """

    def __init__(self, what: str, remedy: str = "", *, check: str = "", value: float = 0.0, allowed: float = 0.0):
        super().__init__(what, remedy)
        self.check, self.value, self.allowed = check, value, allowed


class StoreError(EyasError, code=7):
    """A state store (or dataset) is damaged, incomplete or not what its manifest says."""


class FolderConflictError(EyasError, code=8):
    """The output directory holds something else, or another run is writing to it."""


class DiskFullError(EyasError, code=9):
    """Not enough disk, before or while writing. What was finished is kept."""


class EngineError(EyasError, code=10):
    """The engine (or one of its worker processes) failed or cannot do what was asked."""


class StalledError(EyasError, code=11):
    """The watchdog saw no progress for the set time and stopped the run (`--on-stall stop`); finished shards are kept."""


#: The run finished but some samples were not written: their reasons are in `ledger.jsonl`.
EXIT_INCOMPLETE = 20
#: The run was stopped on request (Ctrl-C, `eyas runs stop`); finished shards are kept, the same command resumes.
EXIT_INTERRUPTED = 130
