"""A run's figures: summed on the device between two reports, kept in `metrics.jsonl`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from eyas.base.files import write_text
from eyas.drafts.module import DraftLoss
from eyas.drafts.packing import Batch
from eyas.training.ranks import Ranks

METRICS = "metrics.jsonl"


class Figures:
    """Sums since the last report. No step waits for the device; `close` does, once."""

    def __init__(self, steps: int, device: torch.device):
        self._sums = torch.zeros(3, steps, dtype=torch.float64, device=device)  # loss, correct, alpha
        self._counts = [0] * steps
        self._tokens, self._began = 0, time.monotonic()
        self.norm: Any = 0.0

    def add(self, out: DraftLoss, batch: Batch) -> None:
        """Count one micro-batch."""
        K = len(batch.targets)
        self._sums[:, :K] += torch.stack([out.losses.double(), out.correct.double(), out.alpha.double()])
        for k, targets in enumerate(batch.targets):
            self._counts[k] += targets.count
        self._tokens += batch.tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is no training: it does not lower the tokens per second."""
        began = time.monotonic()
        yield
        self._began += time.monotonic() - began

    def close(self, ranks: Ranks) -> dict[str, Any]:
        """Means over all ranks since the last close: loss, accuracy and alpha per step, tokens per second, gradient norm."""
        *count, tokens = ranks.sum([*self._counts, self._tokens])
        loss, correct, alpha = ranks.sum_on_device(self._sums).tolist()
        used = [k for k, n in enumerate(count) if n]
        norm = self.norm.full_tensor() if hasattr(self.norm, "full_tensor") else self.norm  # of a sharded draft
        figures = {
            "loss": [loss[k] / count[k] for k in used],
            "accuracy": [correct[k] / count[k] for k in used],
            "alpha": [alpha[k] / count[k] for k in used],
            "gradient_norm": float(norm),
            "tokens_per_second": tokens / max(time.monotonic() - self._began, 1e-9),
        }
        self._sums.zero_()
        self._counts = [0] * len(self._counts)
        self._tokens, self._began = 0, time.monotonic()
        return figures


def append_metrics(directory: Path, line: dict[str, Any]) -> None:
    """Add a line to a draft's `metrics.jsonl`."""
    with open(directory / METRICS, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; a run that was killed may have left half a one, which is passed over."""
    lines = []
    with suppress(FileNotFoundError):
        for text in (directory / METRICS).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                lines.append({**(line := json.loads(text)), "step": int(line["step"])})
    return lines


def cut_metrics(directory: Path, step: int) -> None:
    """Drop the lines behind `step`: a run that resumes there writes them again."""
    if (directory / METRICS).exists():
        kept = [line for line in read_metrics(directory) if line["step"] <= step]
        write_text(directory / METRICS, (json.dumps(line) + "\n" for line in kept))
