"""eyas: from a large language model to a trained EAGLE-3 draft.

Importing this package is cheap: each public function loads what it needs (torch, transformers, an engine) when first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

_PUBLIC = {
    "open_dataset": "eyas.data.dataset",
    "open_states": "eyas.store.reader",
    "verify": "eyas.gates.verification",
    "MaskSettings": "eyas.data.settings",
    "PrepareSettings": "eyas.data.settings",
    "RegenerateSettings": "eyas.data.settings",
    "Sampling": "eyas.data.settings",
    "ExtractSettings": "eyas.extraction.settings",
    "VerifySettings": "eyas.gates.settings",
    "TrainSettings": "eyas.training.settings",
    "EvalSettings": "eyas.evaluation.settings",
    "ExportSettings": "eyas.exporting.settings",
    "ImportSettings": "eyas.exporting.settings",
    "prepare": "eyas.data.preparation",
    "regenerate": "eyas.engines.regenerate",
    "extract": "eyas.extraction.extract",
    "train": "eyas.training.trainer",
    "evaluate": "eyas.evaluation.acceptance",
    "export": "eyas.exporting.folders",
    "import_draft": "eyas.exporting.foreign",
    "rehearse": "eyas.extraction.rehearse",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("eyas")
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'eyas' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
