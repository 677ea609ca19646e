"""Settings of `eyas verify`, each stated once."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from eyas.base.settings import Flag, Settings


@dataclass(frozen=True)
class VerifySettings(Settings):
    store: Annotated[Path, Flag(positional=True, exists=True)]
    """A state store."""
    model_path: str | None = None
    """The target, to recompute samples. Default: the one that the store names, if it is here."""
    _: KW_ONLY
    recompute: Annotated[int, Ge(0)] = 4
    """How many random samples to recompute; 0 for none."""
    seed: int | None = None
    """Which samples. Default: others each time."""
    device: str = "auto"
    """auto, cpu, cuda ..."""
    trust_remote_code: bool = False
    """Run the model directory's own code."""
