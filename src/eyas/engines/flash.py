"""The one flash kernel for samples of different lengths, as torch carries it: causal attention within each sample, on a GPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def flash_fits(q: Tensor) -> bool:
    """Whether the kernel takes queries [n, heads, D] of this device, dtype and width."""
    wide = q.shape[-1]
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and wide % 8 == 0
        and wide <= 256
        and _is_ampere(q.device)
    )


@cache
def _is_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: tuple[Tensor, Tensor], longest: tuple[int, int], scale: float | None
) -> tuple[Tensor, Tensor]:
    """All samples in one kernel, aligned to each sample's last key: queries may be the tail of a sample.

    Args:
        q: [R, heads, D]. k, v: [T, kv_heads, D]. offsets: [n+1] int32 each, sample starts among queries and among keys.
        longest: most queries, and most keys, of a sample. scale: None for D ** -0.5.

    Returns:
        out [R, heads, D] and the log-sum-exp [heads, R] fp32.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *offsets, *longest, 0.0, True, False, scale=scale)
    return out, lse


def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, given `out` [R, heads, D] and `lse` [heads, R] (of this kernel, or of a softmax over more columns)."""
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's state, unused at rate 0
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad_out, q, k, v, out, lse, *offsets, *longest, 0.0, True, seed, unused, scale=scale
    )
