"""From a target and a store to a draft that is ready to train: its sizes, its vocabulary, its first weights.

Choices, each measured on the embedded model (`benchmarks/results` has the figures):
- Embedding and head start as the target's rows, the draft's norm as the target's final norm: the head reads what it was made for.
- Auxiliary states differ by two orders of magnitude in scale, so each dimension is divided by its RMS before `fc` (folded in at export).
- `fc` starts as the last auxiliary state passed through, attention starts by looking at its own row, and `down_proj` starts at zero:
  the untrained draft is the target's own "logit lens", and learning begins there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.base.errors import InputError
from eyas.base.files import content_hash
from eyas.drafts.eagle3.model import Draft, DraftConfig
from eyas.drafts.module import ROPE_KINDS
from eyas.drafts.settings import DraftInit
from eyas.target.model_files import ModelInfo
from eyas.target.teacher import TargetParts


def derive_config(
    info: ModelInfo,
    aux_layer_ids: Sequence[int],
    draft_vocab_size: int,
    *,
    plain_rope: bool = False,
    **overrides: Any,
) -> DraftConfig:
    """Sizes of a draft for a target; any DraftConfig field can be overridden (None means derive).

    - heads of 128 (64 for narrow targets), as many as fill H; key-value heads as the target's where that divides, but all of them for
      targets up to 16 heads, whose draft cache is small anyway;
    - MLP: the target's own width up to 3 H for dense targets; 2 H for mixtures of experts, whose `intermediate_size` belongs to a few
      wide dense layers (18432 for Kimi-K2) and says nothing about a draft.
    """
    config = info.text
    H = info.hidden_size
    head_dim = int(config.get("head_dim") or 0)
    if info.uses_mla or not head_dim:  # multi-head latent attention's head_dim is no plain head's
        per_head = H // info.num_heads if info.num_heads and H % info.num_heads == 0 else 0
        head_dim = per_head if per_head in (32, 64, 128) else (128 if H >= 2048 else 64)
    heads = overrides.get("num_attention_heads") or max(1, H // head_dim)
    kv_heads = heads if heads <= 16 else info.num_kv_heads if heads % info.num_kv_heads == 0 else math.gcd(heads, 8)
    if info.num_kv_heads == info.num_heads and heads > 16:
        kv_heads = math.gcd(heads, 8)
    width = int(config.get("intermediate_size") or config.get("ffn_dim") or 0)
    intermediate = 2 * H if info.is_moe or not width else min(width, 3 * H)
    derived: dict[str, Any] = {
        "hidden_size": H,
        "intermediate_size": -(-intermediate // 64) * 64,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": info.vocab_size,
        "draft_vocab_size": min(draft_vocab_size, info.vocab_size),
        "aux_layer_ids": tuple(aux_layer_ids),
        "target_layers": info.num_layers,
        "rms_norm_eps": info.final_norm["eps"],
        "rope": {"rope_type": "default", "rope_theta": rope_of(config)["rope_theta"]}
        if plain_rope
        else rope_of(config),
        "max_position_embeddings": info.max_position or 4096,
    }
    return DraftConfig(**{**derived, **{k: v for k, v in overrides.items() if v is not None}})


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """The rope settings of a target's config, old form (`rope_scaling`, `rope_theta`) or new (`rope_parameters`), as one flat dict.

    A share of each head (`partial_rotary_factor`) is left out: a draft rotates whole heads. A kind that engines do not draft with
    (longrope, proportional) becomes plain rope of the same base: the draft learns its own attention.
    """
    rope = dict(config.get("rope_parameters") or {})
    if "full_attention" in rope:  # one entry per kind of layer
        rope = dict(rope["full_attention"])
    rope = {**dict(config.get("rope_scaling") or {}), **rope}
    rope.setdefault("rope_type", rope.pop("type", None) or "default")
    rope.pop("type", None)
    if (
        rope["rope_type"] not in ROPE_KINDS or "mrope_section" in rope
    ):  # mrope: all sections of a text position are equal
        rope = {"rope_type": "default", **({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})}
    rope.setdefault("rope_theta", float(config.get("rope_theta") or 10000.0))
    rope.pop("partial_rotary_factor", None)
    if "attention_factor" in rope:
        rope.pop("attn_factor", None)  # the same, for engines that know the other key only (`exporting.rope_fields`)
    return rope


# --- the draft vocabulary -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftVocabulary:
    """ids: [D] int64 target token ids, ascending. dataset_hash: of the data it was counted on. coverage: share of supervised tokens."""

    ids: Tensor
    dataset_hash: str
    coverage: float

    @property
    def hash(self) -> str:
        """Content hash of the ids."""
        return content_hash(self.ids.numpy().astype("<i8").tobytes())

    def d2t(self) -> Tensor:
        """[D] int64: target id of draft id j, minus j."""
        return self.ids - torch.arange(len(self.ids))

    def t2d(self, vocab_size: int) -> Tensor:
        """[V] bool: which target ids the draft can say."""
        table = torch.zeros(vocab_size, dtype=torch.bool)
        table[self.ids] = True
        return table


def count_supervised(counts: np.ndarray, token_ids: np.ndarray, loss_mask: np.ndarray) -> None:
    """Add how often each token of one sample is to be predicted to `counts` [V] int64."""
    ids, found = np.unique(token_ids[loss_mask.astype(bool)], return_counts=True)
    counts[ids] += found


def choose_vocabulary(counts: np.ndarray, size: int, dataset_hash: str) -> DraftVocabulary:
    """The `size` most frequent supervised tokens, sorted ascending; equal counts go to the smaller id.

    When fewer distinct tokens than `size` are supervised, unseen ones fill up from the smallest id (they cost nothing in quality, and D
    stays what was asked).

    Raises:
        InputError: nothing is supervised at all.
    """
    if counts.sum() == 0:
        raise InputError(
            "no token in the store is supervised (every loss mask is zero)",
            "run `eyas prepare` again and look at its masks",
        )
    order = np.lexsort((np.arange(len(counts)), -counts))[:size]
    ids = np.sort(order)
    return DraftVocabulary(torch.from_numpy(ids.copy()), dataset_hash, float(counts[ids].sum() / counts.sum()))


# --- first weights --------------------------------------------------------------------------------------------------


def measured_scale(states: Iterable[Tensor], layers: int, by: str = "dimension") -> Tensor:
    """[L*H] fp32: 1 / RMS of the auxiliary states, over an iterable of [T, L*H].

    Args:
        layers: L. by: RMS of each `dimension` or of each `layer`; `none` gives ones.

    A dimension that is (nearly) silent keeps at most 100 times the median scale, so that noise is not blown up.
    """
    total, rows = None, 0
    for one in states:
        squares = one.float().square().sum(0)
        total = squares if total is None else total + squares
        rows += len(one)
    if total is None:
        raise InputError("no samples to measure the auxiliary states on", "the store's training split is empty")
    if by == "none":
        return torch.ones_like(total)
    mean = total / rows
    if by == "layer":
        mean = mean.view(layers, -1).mean(1, keepdim=True).expand(-1, mean.numel() // layers).flatten()
    rms = mean.sqrt()
    return 1.0 / rms.clamp_min(float(rms.median()) / 100 + 1e-12)


@torch.no_grad()
def initialise(
    draft: Draft,
    parts: TargetParts,
    vocabulary: DraftVocabulary,
    aux_scale: Tensor,
    *,
    seed: int = 0,
    first: DraftInit | None = None,
) -> None:
    """Fill every weight of a new draft, in place.

    Args:
        aux_scale: [L*H], from `measured_scale` (ones for none). first: how to begin (its `aux_scale` is for `measured_scale`).
    """
    first = first or DraftInit()
    config, generator = draft.config, torch.Generator().manual_seed(seed)
    H, D = config.hidden_size, config.head_dim

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    draft.embed_tokens.weight.copy_(parts.embedding)
    draft.lm_head.weight.copy_(parts.head[vocabulary.ids])
    draft.d2t.copy_(vocabulary.d2t())
    draft.t2d.copy_(vocabulary.t2d(config.vocab_size))
    draft.aux_scale.copy_(aux_scale)
    draft.norm.weight.copy_(
        parts.norm * (parts.state_scale * parts.logit_scale)
    )  # the scales of the target's logits, for its lens
    for name, parameter in draft.named_parameters():
        if (name.endswith("norm.weight") and name != "norm.weight") or name.startswith("aux_norms"):
            parameter.fill_(1.0)
    aux = len(config.aux_layer_ids)
    draft.fc.weight.copy_(normal(H, aux * H, std=(aux * H) ** -0.5 * (0.1 if first.logit_lens else 1.0)))
    if first.logit_lens:
        # Undo the scaling of the last auxiliary state, relative to its overall size: h then points where the target's stream does.
        last = slice((aux - 1) * H, aux * H)
        size = 1.0 / aux_scale[last].float()
        draft.fc.weight[:, last] += torch.diag(size / size.square().mean().sqrt())
    for i, layer in enumerate(draft.decoder_layers):
        inputs = 2 * H if i == 0 else H
        attn, mlp = layer.self_attn, layer.mlp
        for projection in (attn.q_proj, attn.k_proj, attn.v_proj):
            projection.weight.copy_(normal(*projection.weight.shape, std=inputs**-0.5))
        if first.self_attention:
            group = config.num_attention_heads // config.num_key_value_heads
            keys = attn.k_proj.weight.view(config.num_key_value_heads, D, inputs)
            attn.q_proj.weight.copy_(keys.repeat_interleave(group, 0).reshape(-1, inputs))
        attn.o_proj.weight.copy_(normal(*attn.o_proj.weight.shape, std=attn.o_proj.weight.shape[1] ** -0.5 * 0.5))
        mlp.gate_proj.weight.copy_(normal(*mlp.gate_proj.weight.shape, std=H**-0.5))
        mlp.up_proj.weight.copy_(normal(*mlp.up_proj.weight.shape, std=H**-0.5))
        width = config.intermediate_size
        mlp.down_proj.weight.copy_(
            torch.zeros(H, width) if first.zero_down else normal(H, width, std=width**-0.5 * 0.5)
        )
    draft.check_filled()
