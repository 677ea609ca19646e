"""eyas: from a large language model to a trained EAGLE-3 draft.

Importing this package is cheap: each public function loads what it needs (torch, transformers, an engine) when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "open_dataset": "eyas.dataset",
    "open_states": "eyas.store",
    "verify": "eyas.verification",
    "MaskSettings": "eyas.masks",
    "PrepareSettings": "eyas.row_samples",
    "prepare": "eyas.preparation",
    "regenerate": "eyas.regeneration",
    "extract": "eyas.extraction",
    "train": "eyas.training",
    "evaluate": "eyas.acceptance",
    "export": "eyas.exporting",
    "import_draft": "eyas.exporting",
    "rehearse": "eyas.rehearsal",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'eyas' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
