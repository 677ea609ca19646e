"""Losses of block drafts, per supervised draft token, in fp32 (fp64 for fp64); each is weighed by its place in the block.

    dflash   CE to the token of the data (on the target's own greedy answers that token is the target's choice)
    dspark   0.1 CE + 0.9 |p - q|_1 + 1.0 BCE of the confidence head against 1 - TV(p, q), which is held constant

D-PACE (`dpace`) replaces the weights by place with what a token still can earn: with q_i the draft's probability of token i and
s_i = (1 + q_i) / 2, token j weighs sum over m >= j of s_0 * ... * s_m, over supervised places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from eyas.drafts.compiled import compile_piece
from eyas.drafts.losses import tv_rows

CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0


def _ce(log_q: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """CE per row [c] and its gradient [c, D]; rows whose label is -1 (outside the draft vocabulary) have neither."""
    known = (labels >= 0).to(log_q.dtype)
    at = labels.clamp_min(0).unsqueeze(-1)
    gradient = log_q.exp().scatter_add(-1, at, -torch.ones_like(at, dtype=log_q.dtype))
    return -log_q.gather(-1, at).squeeze(-1) * known, gradient * known.unsqueeze(-1)


def dflash_rows(z: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `losses.chunked_loss` measures: z [c, D] logits, labels [c] draft ids or -1. alpha is the probability of the label."""
    log_q = torch.log_softmax(z, -1, dtype=weights.dtype)
    losses, gradient = _ce(log_q, labels)
    alpha = torch.where(labels >= 0, torch.exp(-losses), 0)
    return (
        (losses * weights).sum(),
        (gradient * weights.unsqueeze(-1)).to(z.dtype),
        (z.argmax(-1) == labels).to(weights.dtype),
        alpha,
    )


def dspark_rows(
    z: Tensor, labels: Tensor, weights: Tensor, teacher: Tensor, lse: Tensor, best: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `dflash_rows`, with the teacher's logits [R, D], log-sum-exp and argmax [R], and each row's place in them [c]."""
    log_q = torch.log_softmax(z, -1, dtype=weights.dtype)
    log_p = teacher[states].to(weights.dtype) - lse[states].unsqueeze(-1)
    ce, ce_gradient = _ce(log_q, labels)
    tv, tv_gradient, alpha = tv_rows(log_q, log_p)
    losses = CE_WEIGHT * ce + L1_WEIGHT * 2 * tv  # |p - q|_1 is twice the total variation
    gradient = CE_WEIGHT * ce_gradient + L1_WEIGHT * 2 * tv_gradient
    return (
        (losses * weights).sum(),
        (gradient * weights.unsqueeze(-1)).to(z.dtype),
        (z.argmax(-1) == best[states]).to(weights.dtype),
        alpha,
    )


def dpace_weights(probability: Tensor, supervised: Tensor) -> Tensor:
    """[A, n] D-PACE weights from the draft's probabilities of the labels, and which places are supervised (0 or 1)."""
    reached = torch.cumprod((1 + probability) / 2, 1) * supervised
    return reached.flip(1).cumsum(1).flip(1) * supervised


@cache
def row_losses(kind: str, compiled: bool) -> Callable[..., Any]:
    """`dflash_rows` or `dspark_rows`, fused where wanted."""
    rows: Callable[..., Any] = dflash_rows if kind == "dflash" else dspark_rows
    return compile_piece(rows) if compiled else rows
