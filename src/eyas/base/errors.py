"""Errors that a user sees, each with its own exit code.

Every message says what was expected, what came, where, and what to do: `what` is the finding, `remedy` the next step.
The command line prints both and ends with `exit_code`; `docs/cli.md` lists the codes.
"""

from __future__ import annotations


class EyasError(Exception):
    """Something the user can act on. Args: what was found (with place and values), and what to do about it."""

    exit_code = 1

    def __init__(self, what: str, remedy: str = ""):
        super().__init__(what if not remedy else f"{what}\n  -> {remedy}")
        self.what = what
        self.remedy = remedy


class InputError(EyasError):
    """Bad input: a file, a row, a flag's value, a model directory."""

    exit_code = 3


class PreflightError(EyasError):
    """Gate 1: this machine, model and flags cannot give what was asked."""

    exit_code = 4


class ContractError(EyasError):
    """A tensor on its way broke its declared shape, dtype or meaning (gates 2 and 5, and always)."""

    exit_code = 5


class ParityError(EyasError):
    """Gate 4: the captured states are not the states of the layers that were asked for."""

    exit_code = 6


class StoreError(EyasError):
    """A state store (or dataset) is damaged, incomplete or not what its manifest says."""

    exit_code = 7


class FolderConflictError(EyasError):
    """The output directory holds something else, or another run is writing to it."""

    exit_code = 8


class DiskFullError(EyasError):
    """Not enough disk, before or while writing. What was finished is kept."""

    exit_code = 9


class EngineError(EyasError):
    """The engine (or one of its worker processes) failed or cannot do what was asked."""

    exit_code = 10


class StalledError(EyasError):
    """The watchdog saw no progress for the set time and stopped the run (`--on-stall stop`); finished shards are kept."""

    exit_code = 11


#: The run finished but some samples were not written: their reasons are in `ledger.jsonl`.
EXIT_INCOMPLETE = 20
#: The run was stopped on request (Ctrl-C, `eyas runs stop`); finished shards are kept, the same command resumes.
EXIT_INTERRUPTED = 130
