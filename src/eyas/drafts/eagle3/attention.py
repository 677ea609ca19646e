"""Exact attention of the training-time test, over packed samples, without a growing mask.

At step k, row i of a sample sees the step-0 keys j <= i of its own sample (a causal prefix, the same keys at every step) and, of the
steps 1..k, only its own column i. The prefix is ordinary flash attention, one sample after the other; each own column adds a single
score. Softmax over both together is the prefix's output and the own values, weighed by their shares of the common log-sum-exp:

    lse = log(exp(lse_prefix) + sum_m exp(s_m)),   s_m = scale * q . k_m
    out = exp(lse_prefix - lse) * out_prefix + sum_m exp(s_m - lse) * v_m

The backward pass needs no second derivation: a flash kernel's backward recomputes its probabilities from the log-sum-exp that it is
given and its row term from the output that it is given, so handing it the *common* ones yields the exact gradients of q, k, v for the
prefix part (ring attention uses the same property). Memory is O(T), and the own columns cost a few passes over [R, heads, D].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eyas.drafts.compiled import compile_piece
from eyas.drafts.packing import Layout
from eyas.engines.flash import flash_backward, flash_fits, flash_forward


def ttt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    layout: Layout,
    scale: float,
    *,
    compiled: bool = False,
) -> Tensor:
    """Attention of one training-time-test step.

    Args:
        q: [R, heads, D] of the query rows, rope applied. k, v: [T, kv_heads, D], the step-0 keys and values of all tokens.
        own_keys, own_values: for each step 1..k one [R, kv_heads, D]; empty at step 0.
        layout: where the samples lie. scale: usually D ** -0.5.
        compiled: run the element-wise part through torch.compile (worth it on a GPU).

    Returns:
        [R, heads, D], differentiable in every tensor given.
    """
    return _TttAttention.apply(q, k, v, layout, scale, compiled, len(own_keys), *own_keys, *own_values)


class _TttAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, layout, scale, compiled, n_own, *own):  # type: ignore[override]
        out, lse = prefix_forward(q, k, v, layout, scale)
        if n_own:
            out, lse = _elementwise(merge_own, compiled)(q, out, lse, own[:n_own], own[n_own:], scale)
        ctx.save_for_backward(q, k, v, out, lse, *own)
        ctx.layout, ctx.scale, ctx.compiled, ctx.n_own = layout, scale, compiled, n_own
        return out

    @staticmethod
    def backward(ctx: Any, grad_out):  # type: ignore[override]
        q, k, v, out, lse, *own = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grad_q, grad_k, grad_v = prefix_backward(grad_out, q, k, v, out, lse, ctx.layout, ctx.scale)
        grads_own: list[Tensor] = []
        if ctx.n_own:
            own_k, own_v = own[: ctx.n_own], own[ctx.n_own :]
            grad_q, grads_k, grads_v = _elementwise(merge_own_backward, ctx.compiled)(
                grad_out, grad_q, q, out, lse, own_k, own_v, ctx.scale
            )
            grads_own = [*grads_k, *grads_v]
        return grad_q, grad_k, grad_v, None, None, None, None, *grads_own


def merge_own(
    q: Tensor, out: Tensor, lse: Tensor, own_k: Sequence[Tensor], own_v: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Add one own column per earlier step to a finished prefix. lse: [R, heads] fp32 (fp64 for fp64). Returns (out, lse)."""
    R, heads, D = q.shape
    kv_heads = own_k[0].shape[1]
    acc = lse.dtype
    q_grouped = q.view(R, kv_heads, heads // kv_heads, D).to(acc)
    scores = [(q_grouped * k.unsqueeze(2).to(acc)).sum(-1) * scale for k in own_k]  # each [R, kv_heads, group]
    prefix = lse.view(R, kv_heads, -1)
    peak = prefix
    for score in scores:
        peak = torch.maximum(peak, score)
    share = torch.exp(prefix - peak)
    shares = [torch.exp(score - peak) for score in scores]
    total = share
    for one in shares:
        total = total + one
    merged = out.view(R, kv_heads, -1, D).to(acc) * (share / total).unsqueeze(-1)
    for one, v in zip(shares, own_v, strict=True):
        merged = merged + (one / total).unsqueeze(-1) * v.unsqueeze(2).to(acc)
    return merged.view(R, heads, D).to(out.dtype), (peak + torch.log(total)).view(R, heads)


def merge_own_backward(
    grad_out: Tensor,
    grad_q: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    own_k: Sequence[Tensor],
    own_v: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of the own columns; `grad_q` is the prefix's share, to which theirs is added. `out`, `lse`: of both together."""
    R, heads, D = q.shape
    kv_heads = own_k[0].shape[1]
    acc = lse.dtype
    grouped = (R, kv_heads, heads // kv_heads, D)
    g, q_acc = grad_out.view(grouped).to(acc), q.view(grouped).to(acc)
    row_term = (g * out.view(grouped).to(acc)).sum(-1)  # the softmax backward's sum over all columns
    lse = lse.view(R, kv_heads, -1)
    grad_q_acc = grad_q.view(grouped).to(acc)
    grads_k, grads_v = [], []
    for k, v in zip(own_k, own_v, strict=True):
        k_acc, v_acc = k.unsqueeze(2).to(acc), v.unsqueeze(2).to(acc)
        p = torch.exp((q_acc * k_acc).sum(-1) * scale - lse)
        ds = (p * ((g * v_acc).sum(-1) - row_term) * scale).unsqueeze(-1)
        grad_q_acc = grad_q_acc + ds * k_acc
        grads_k.append((ds * q_acc).sum(2).to(k.dtype))
        grads_v.append((p.unsqueeze(-1) * g).sum(2).to(v.dtype))
    return grad_q_acc.view(R, heads, D).to(grad_q.dtype), grads_k, grads_v


def _elementwise(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return compile_piece(function) if compiled else function


# The prefix: one flash kernel for all samples on a GPU (variable lengths), one call per sample on a CPU.


def prefix_forward(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention within each sample. Returns out [R, heads, D] and the log-sum-exp [R, heads] (fp32, or fp64 for fp64)."""
    if flash_fits(q):
        out, lse = flash_forward(q, k, v, layout.offsets, layout.longest, scale)
        return out, lse.transpose(0, 1).contiguous()  # the kernel's is [heads, R]
    outs, lses = [], []
    for q_s, k_s, v_s in _by_sample(q, k, v, layout):
        out_s, lse_s = _sample_forward(q_s, k_s, v_s, scale)
        outs.append(out_s)
        lses.append(lse_s)
    return torch.cat(outs), torch.cat(lses)


def prefix_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [R, heads, D], k and v [T, kv_heads, D] for the prefix, given the common `out` and `lse`."""
    if flash_fits(q):
        lse = lse.transpose(0, 1).contiguous()
        return flash_backward(grad_out, q, k, v, out, lse, layout.offsets, layout.longest, scale)
    grads: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    queries = layout.query_lengths
    extras = zip(grad_out.split(queries), out.split(queries), lse.split(queries), strict=True)
    for (q_s, k_s, v_s), (g_s, o_s, l_s) in zip(_by_sample(q, k, v, layout), extras, strict=True):
        for into, one in zip(grads, _sample_backward(g_s, q_s, k_s, v_s, o_s, l_s, scale), strict=True):
            into.append(one)
    return torch.cat(grads[0]), torch.cat(grads[1]), torch.cat(grads[2])


def _by_sample(q: Tensor, k: Tensor, v: Tensor, layout: Layout):
    queries = layout.query_lengths
    return zip(q.split(queries), k.split(layout.lengths), v.split(layout.lengths), strict=True)


def _heads_first(x: Tensor, repeat: int = 1, rows_before: int = 0) -> Tensor:
    """[n, heads, D] -> [1, heads * repeat, rows_before + n, D]; the rows before are zero."""
    if repeat > 1:
        x = x.repeat_interleave(repeat, dim=1)
    if rows_before:
        x = torch.cat([x.new_zeros(rows_before, *x.shape[1:]), x])
    return x.transpose(0, 1).unsqueeze(0)


def _sample_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    before, group = len(k) - len(q), q.shape[1] // k.shape[1]
    if q.is_cuda:
        scores = _causal_scores(q, k, group, scale)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse.unsqueeze(-1))
        out = torch.einsum("hrt,thd->rhd", p, v.repeat_interleave(group, 1).to(p.dtype))
        return out.to(q.dtype), lse.transpose(0, 1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _heads_first(q, rows_before=before), _heads_first(k, group), _heads_first(v, group), 0.0, True, scale=scale
    )
    return out[0].transpose(0, 1)[before:], lse[0].transpose(0, 1)[before:]


def _sample_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    before, group = len(k) - len(q), q.shape[1] // k.shape[1]
    if q.is_cuda:
        acc = lse.dtype
        p = torch.exp(_causal_scores(q, k, group, scale) - lse.transpose(0, 1).unsqueeze(-1))  # [heads, R, T]
        k_all, v_all = k.repeat_interleave(group, 1).to(acc), v.repeat_interleave(group, 1).to(acc)
        row_term = (g.to(acc) * out.to(acc)).sum(-1).transpose(0, 1).unsqueeze(-1)
        ds = p * (torch.einsum("rhd,thd->hrt", g.to(acc), v_all) - row_term) * scale
        grad_q = torch.einsum("hrt,thd->rhd", ds, k_all)
        grad_k = torch.einsum("hrt,rhd->thd", ds, q.to(acc))
        grad_v = torch.einsum("hrt,rhd->thd", p, g.to(acc))
    else:
        grad_q, grad_k, grad_v = (
            x[0].transpose(0, 1)
            for x in torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(g, rows_before=before),
                _heads_first(q, rows_before=before),
                _heads_first(k, group),
                _heads_first(v, group),
                _heads_first(out, rows_before=before),
                _heads_first(lse.unsqueeze(-1), rows_before=before).squeeze(-1),
                0.0,
                True,
                scale=scale,
            )
        )
        grad_q = grad_q[before:]
    T, kv_heads, D = k.shape
    if group > 1:
        grad_k = grad_k.reshape(T, kv_heads, group, D).sum(2)
        grad_v = grad_v.reshape(T, kv_heads, group, D).sum(2)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _causal_scores(q: Tensor, k: Tensor, group: int, scale: float) -> Tensor:
    """[heads, R, T] scores in fp32 (fp64 for fp64), -inf above the diagonal: for GPU dtypes that no flash kernel takes."""
    acc = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("rhd,thd->hrt", q.to(acc), k.repeat_interleave(group, 1).to(acc)) * scale
    rows = torch.arange(len(k) - len(q), len(k), device=q.device)
    return scores.masked_fill(torch.arange(len(k), device=q.device) > rows.unsqueeze(-1), float("-inf"))
