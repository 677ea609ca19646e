"""`eyas eval` as users call it: the measurement, and the draft exported where vLLM is to serve it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.base.settings import takes
from eyas.evaluation import acceptance
from eyas.evaluation.settings import EvalSettings
from eyas.exporting.folders import export


@takes(EvalSettings)
def evaluate(settings: EvalSettings, *, progress: Callable[[str, int, int], None] | None = None) -> dict[str, Any]:
    """Measure a draft's acceptance; see `evaluation.acceptance.evaluate`."""

    def for_vllm(draft: Path, folder: Path, dtype: str) -> Path:
        return export(draft, folder, "vllm", dtype=dtype)

    return acceptance.evaluate(settings, export=for_vllm, progress=progress)
