"""What `accelerate launch` (its flags, its config file) asks of a training, by the environment that it leaves: taken over, or refused.

accelerate would act on some of it behind eyas's back: gradients divided by a number of micro-batches that eyas does not run, an autocast
over arithmetic that eyas keeps in fp32. Nothing of that passes silently.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas.base.errors import InputError
from eyas.training.settings import TrainSettings


def take_over_launcher(s: TrainSettings) -> TrainSettings:
    """The settings with what the launcher asks for.

    Raises:
        InputError: micro-batches, precision or a backend that eyas would not train with.
    """
    accumulate = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulate not in ("1", str(s.accumulate)):
        raise InputError(
            f"accelerate is set to {accumulate} gradient accumulation steps, eyas to --accumulate {s.accumulate}",
            f"take it out of accelerate's flags or config file, and give eyas train --accumulate {accumulate}",
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision == "bf16" and s.dtype == "auto":
        s = replace(s, dtype="bfloat16")
    elif precision != "no" and (precision, s.dtype) != ("bf16", "bfloat16"):
        raise InputError(
            f"accelerate is set to mixed precision {precision}, eyas to --dtype {s.dtype}",
            "give accelerate launch --mixed_precision no, and eyas train the --dtype that you want (bfloat16 or float32)",
        )
    if _yes("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        raise InputError(
            "accelerate is set to FSDP version 1, which flattens the weights that the draft reads one by one",
            "give accelerate launch --use_fsdp --fsdp_version 2",
        )
    if _yes("ACCELERATE_USE_DEEPSPEED") or _yes("ACCELERATE_USE_MEGATRON_LM"):
        raise InputError(
            "accelerate is set to DeepSpeed or Megatron-LM, eyas trains under DDP or FSDP2",
            "leave it out, or give accelerate launch --use_fsdp --fsdp_version 2",
        )
    return s


def begin_accelerate(trackers: list[str], project_dir: Path) -> Any:
    """An `Accelerator` that counts no micro-batches (eyas does) and casts nothing (eyas casts what bears it; its loss is fp32)."""
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    if _yes("ACCELERATE_USE_FSDP"):
        # The draft prepares its layers' weights together, so it is sharded as one unit (it is one layer anyway).
        os.environ["FSDP_AUTO_WRAP_POLICY"] = "NO_WRAP"
        # Every rank makes the same weights itself; accelerate's loading by rank 0 alone fails on a model with buffers.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return Accelerator(
        log_with=trackers or None,
        project_dir=str(project_dir),
        mixed_precision="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
    )


def _yes(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")
