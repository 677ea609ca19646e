"""Gate 4: are the captured states really the states of the layers that were asked for?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from eyas.data.dataset import Sample
from eyas.gates.evidence import transformers_parity
from eyas.gates.vllm_parity import engine_parity

if TYPE_CHECKING:
    from eyas.engines.base import Engine
    from eyas.engines.transformers import TransformersEngine
    from eyas.engines.vllm.engine import VllmEngine


def check_parity(engine: Engine, samples: Sequence[Sample]) -> dict[str, Any]:
    """Gate 4 on a loaded engine, through the same capture path as bulk. Returns the report for the manifest.

    Raises ParityError naming layer, position and figures.
    """
    if engine.name == "vllm":
        return engine_parity(cast("VllmEngine", engine), samples)
    return transformers_parity(cast("TransformersEngine", engine), samples)
