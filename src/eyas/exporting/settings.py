"""Settings of `eyas export` and `eyas import`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from eyas.base.settings import Flag, Settings


@dataclass(frozen=True)
class ExportSettings(Settings):
    """Settings of one export."""

    draft: Annotated[Path, Flag(exists=True)]
    """A draft directory from `eyas train`."""
    output_dir: Path
    """The directory for the engine: new, or an earlier export."""
    format: Literal["vllm", "sglang", "speculators", "eyas"] = "vllm"
    """Which engine loads it; eyas: a copy."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the weights."""
    embedding: bool = False
    """Also write the target's embedding (speculators gets it always, and a draft's own is always written)."""


@dataclass(frozen=True)
class ImportSettings(Settings):
    """Settings of one import."""

    source: Annotated[Path, Flag(exists=True)]
    """A vLLM, SGLang or speculators EAGLE-3 directory."""
    output_dir: Path
    """The eyas draft directory to make."""
    model_path: str
    """The draft's target."""
    layer_ids: tuple[int, ...] | None = None
    """Layers that feed it (eyas's numbering), if its config does not say."""
