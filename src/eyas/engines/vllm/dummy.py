"""Random weights that behave like trained ones, for rehearsals and benchmarks (`--load-format dummy`).

vLLM's own dummy weights lie within +-0.001, norms included: every layer's update is lost in the rounding of the residual stream, all
layers look equal, and no check of the states means anything. Here: norms are 1, matrices have variance 1 / fan-in, packed integer
weights are random bits, scales are what four-bit weights of that variance have. The same on every rank, so that what tensor-parallel
ranks hold in common stays equal.

Registered with vLLM by name (`register_model_loader`), imported in every worker by `worker.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

LOAD_FORMAT = "eyas_dummy"
SEED = 20260113


@register_model_loader(LOAD_FORMAT)
class RandomWeights(DummyModelLoader):
    """vLLM's dummy loader, its values replaced before the weights are packed for the kernels."""

    def __init__(self, load_config: Any):
        from dataclasses import replace

        super().__init__(replace(load_config, load_format="dummy"))

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        super().load_weights(model, model_config)
        with torch.no_grad():
            for name, weight in model.state_dict().items():
                randomise(name, weight)


def randomise(name: str, weight: torch.Tensor) -> None:
    """Fill one weight, in place. `name` tells norms, scales and packed integers from matrices."""
    last = name.rsplit(".", 1)[-1]
    if weight.dtype in (torch.int32, torch.uint8, torch.int8):
        if "packed" in last or last in ("qweight", "weight", "w13_weight", "w2_weight"):
            generator = torch.Generator(device=weight.device).manual_seed(SEED)
            limits = torch.iinfo(weight.dtype)
            weight.random_(limits.min, limits.max, generator=generator)
    elif not weight.is_floating_point():
        return
    elif "scale" in last:
        weight.fill_(1 / (4.6 * math.sqrt(4096)))
    elif weight.dim() == 1:
        if "norm" in name and last == "weight":
            weight.fill_(1.0)
    elif weight.dtype in (torch.float32, torch.bfloat16, torch.float16):
        # The same seed for every matrix: equal on all ranks, and tensor parallel parts of one matrix need not fit together.
        generator = torch.Generator(device=weight.device).manual_seed(SEED)
        limit = math.sqrt(3 / weight.shape[-1])
        weight.uniform_(-limit, limit, generator=generator)
