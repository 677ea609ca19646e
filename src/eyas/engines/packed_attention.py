"""Attention over a packed row: several samples one after another, each attending only to itself, without a mask.

The usual ways cost: padding computes tokens that nobody wants, a block-diagonal mask is O(T^2) in memory and forbids the fast
kernels. On a GPU one flash kernel for variable lengths takes the row, where it can; else each sample is a call of its own to
`scaled_dot_product_attention` with `is_causal`: exact, and the matrix products around attention still see the whole row. It is
registered with transformers as an attention implementation, so no model is patched. Where a model cannot be packed this way,
`why_not_packable` says so and samples run one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from eyas.engines.flash import flash_fits, flash_forward

NAME = "eyas_packed"


class _Row:
    """The samples in a packed row: their lengths, and where they begin, as the flash kernel wants it (made once for all layers)."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths = tuple(lengths)
        self._offsets: torch.Tensor | None = None

    def offsets(self, device: torch.device) -> torch.Tensor:
        """[samples + 1] int32."""
        if self._offsets is None or self._offsets.device != device:
            ends = torch.tensor((0, *self.lengths)).cumsum(0)
            self._offsets = ends.to(device=device, dtype=torch.int32)
        return self._offsets


_row: ContextVar[_Row] = ContextVar("the samples in the packed row")


@contextmanager
def packed(lengths: Sequence[int]) -> Iterator[None]:
    """While active, rows are read as samples of these lengths, in order."""
    token = _row.set(_Row(lengths))
    try:
        yield
    finally:
        _row.reset(token)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. query [1, Q, T, D], key and value [1, KV, T, D or D'] -> [1, T, Q, D'].

    Supports grouped queries, sliding windows (position i sees j with i - j < window), soft-capped logits (Gemma 2) and
    attention sinks (gpt-oss: one extra logit per head that takes probability and gives no value).
    """
    row = _row.get()
    lengths = row.lengths
    if sum(lengths) != query.shape[2]:
        raise RuntimeError(f"packed row of {query.shape[2]} tokens, lengths sum to {sum(lengths)}")
    plain = softcap is None and s_aux is None and (sliding_window is None or max(lengths) <= sliding_window)
    if plain and query.shape[-1] == value.shape[-1] and flash_fits(query):
        return _flash(query, key, value, row, scaling), None
    outputs = []
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        q, k, v = query[:, :, rows], key[:, :, rows], value[:, :, rows]
        windowed = sliding_window is not None and length > sliding_window
        if softcap is not None or s_aux is not None:
            outputs.append(_explicit(q, k, v, scaling, sliding_window if windowed else None, softcap, s_aux))
        else:
            mask = _band(length, sliding_window, q.device) if windowed and sliding_window is not None else None
            grouped = k.shape[1] != q.shape[1]
            outputs.append(
                F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
                )
            )
        start += length
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return joined.transpose(1, 2).contiguous(), None


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: _Row, scaling: float | None
) -> torch.Tensor:
    """All samples in one kernel. query [1, Q, T, D], key and value [1, KV, T, D] -> [1, T, Q, D]."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    offsets, longest = row.offsets(query.device), max(row.lengths)
    out, _ = flash_forward(q, k, v, (offsets, offsets), (longest, longest), scaling)
    return out.unsqueeze(0)


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """[T, T] bool, True where position i may see j: j <= i and i - j < window."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    allowed = _band(length, window or length, q.device)
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, length, 1).to(scores.dtype)
        scores = torch.cat([scores, sinks], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        weights = torch.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return weights.to(v.dtype) @ v


def register() -> None:
    """Make `eyas_packed` known to transformers. No mask is registered under the name, so models build none."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def why_not_packable(model: Any) -> str | None:
    """Reason why this model's samples must run one by one, or None.

    Packing is exact only if attention is the one place where positions meet, and goes through transformers' interface.
    """
    config = model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} does not use transformers' attention interface"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    odd = kinds - {"full_attention", "sliding_attention"}
    if odd:
        return f"it has layers of kind {', '.join(sorted(odd))}"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds_of_rope = {p.get("rope_type") for p in [rope, *rope.values()] if isinstance(p, dict)}
    stretched = kinds_of_rope & {"dynamic", "longrope"}
    if stretched:
        return f"its {stretched.pop()} rope depends on the longest position in the row"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is not causal"
    return None
