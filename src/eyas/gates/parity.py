"""Gate 4: are the captured states really the states of the layers that were asked for, of the model that was asked for?

The evidence, whichever engine runs (see docs/engines.md):

1. *The same pass, by two mechanisms.* vLLM: the auxiliary interface against hooks on the decoder layers, bit for bit.
2. *The target state of that pass* -> the teacher that training will use -> against the model's own distribution, by KL divergence.
3. *Another pass.* vLLM: batched, alone and uncompiled; where the model fits, an independent pass by transformers. Judged by distribution.
4. *Which layer.* Each id must lie nearest to its own, row by row each state to its own token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from eyas.data.dataset import Sample
from eyas.gates.reference import captured_batch, judge_against_reference, pick_samples
from eyas.gates.vllm_parity import vllm_parity

if TYPE_CHECKING:
    from eyas.engines.base import Engine
    from eyas.engines.transformers import TransformersEngine
    from eyas.engines.vllm.engine import VllmEngine

__all__ = ["check_parity", "pick_samples"]


def check_parity(engine: Engine, samples: Sequence[Sample]) -> dict[str, Any]:
    """Gate 4 on a loaded engine, through the same capture path as bulk. Returns the report for the manifest.

    Raises ParityError naming layer, position and figures.
    """
    if engine.name == "vllm":
        return vllm_parity(cast("VllmEngine", engine), samples)
    loaded = cast("TransformersEngine", engine)
    states, last = captured_batch(loaded, samples)
    return judge_against_reference(loaded, samples, states, last)
