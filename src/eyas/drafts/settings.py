"""What a user may choose of a draft: its shape, and what it begins with. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from eyas.base.settings import Flag, Settings


@dataclass(frozen=True, kw_only=True)
class DraftShape(Settings):
    """Sizes and variants of an EAGLE-3 draft; None: derived from the target (`drafts.eagle3.init.derive_config`)."""

    num_attention_heads: Annotated[int | None, Ge(1), Flag("heads")] = None
    """Attention heads. Default: derived from the target, like the other sizes."""
    num_key_value_heads: Annotated[int | None, Ge(1), Flag("kv-heads")] = None
    """Key-value heads."""
    head_dim: Annotated[int | None, Ge(1)] = None
    """Size of a head."""
    intermediate_size: Annotated[int | None, Ge(1), Flag("mlp")] = None
    """Width of the MLP."""
    num_layers: Annotated[int, Ge(1), Flag("layers")] = 1
    """Decoder layers."""
    rope: Literal["target", "default"] = "target"
    """The target's kind of rope, or plain rope of the same base."""
    norm_aux: bool = False
    """Norm each auxiliary state before fc (EAGLE-3.1)."""
    norm_before_residual: bool = False
    """The residual starts normed."""
    norm_output: bool = False
    """Carry the normed state between steps (EAGLE-3.1)."""


@dataclass(frozen=True, kw_only=True)
class DraftInit(Settings):
    """What a new draft begins with; each can be switched off, to measure what it is worth (`benchmarks/ablation_gpu.py`)."""

    aux_scale: Literal["dimension", "layer", "none"] = "dimension"
    """What auxiliary states are divided by: the RMS of each dimension, of each layer, or nothing."""
    self_attention: bool = True
    """Query and key of a head start equal on the hidden half, so that each row attends mostly to itself."""
    zero_down: bool = True
    """The MLP starts as nothing."""
    logit_lens: bool = True
    """fc starts as the last auxiliary state passed through, so that the untrained draft is the target's logit lens."""
