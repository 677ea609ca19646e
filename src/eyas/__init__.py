"""eyas: from a large language model to a trained EAGLE-3 draft.

Importing this package is cheap: each public function loads what it needs (torch, transformers, an engine) when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "open_dataset": "eyas.data.dataset",
    "open_states": "eyas.store.reader",
    "verify": "eyas.gates.verification",
    "MaskSettings": "eyas.data.chat_template",
    "PrepareSettings": "eyas.data.rows",
    "prepare": "eyas.data.preparation",
    "regenerate": "eyas.data.regeneration",
    "extract": "eyas.extraction.extract",
    "train": "eyas.training.trainer",
    "evaluate": "eyas.evaluation.acceptance",
    "export": "eyas.exporting.folders",
    "import_draft": "eyas.exporting.foreign",
    "rehearse": "eyas.extraction.rehearse",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'eyas' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
