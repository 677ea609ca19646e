"""What an engine is to the bulk loop: it owns the forward pass, and writes what it captures through `ShardWriter`s of its own.

`extraction.py` decides *what* is computed (gates, plan, resume, manifest, ledger); an engine decides *how*.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from eyas.base.check import Check
from eyas.data.dataset import Sample
from eyas.store.format import StoreSpec


@dataclass(frozen=True)
class Progress:
    """Counts since this run began (a resumed run counts only its own work). `bytes`: written to finished shards."""

    samples: int
    tokens: int
    bytes: int


@dataclass
class CaptureResult:
    """What `Engine.capture` did: manifest entries of the shards it wrote, and (sample id, reason) of samples it could not."""

    shards: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    interrupted: bool = False


class Engine(Protocol):
    """An engine, made from settings; `load` is the expensive step.

    `name`: as in `--engine`. `description`: what goes into the manifest (version, device, parallelism ...).
    """

    name: str
    #: Tokens per forward pass when the user names no budget.
    default_batch_tokens: int

    def preflight(self) -> list[Check]:
        """The engine's own rows of gate 1: memory, devices, parallelism, versions. Loads nothing."""
        ...

    @property
    def description(self) -> dict[str, Any]: ...

    def load(self, layer_ids: Sequence[int]) -> None:
        """Load the model and make ready to capture these ids. Raises EngineError."""
        ...

    def capture(
        self,
        batches: Iterable[Sequence[Sample]],
        folder: Path,
        spec: StoreSpec,
        *,
        shard_bytes: int,
        done: Collection[str],
        progress: Callable[[Progress], None],
        stop: threading.Event,
    ) -> CaptureResult:
        """Run every batch and write its samples; when `stop` is set, finish what is begun and return early.

        Samples whose id is in `done` stand in finished shards: they are there so that a batch is made up as it was in the first
        run (rounding depends on it) and must not be written again. An engine may leave them out of its computation.
        """
        ...

    def close(self) -> None:
        """Free the model and end every process the engine started."""
        ...
