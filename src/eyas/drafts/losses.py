"""Losses of the draft against the target's distribution: fp32, in chunks of rows, head included.

p is the target's distribution restricted to the draft vocabulary (softmax over the target's logits of those D tokens, which is the full
softmax renormalised), q the draft's. Per supervised row:

    kl   KL(p || q) = sum_v p_v (log p_v - log q_v)
    tv   1 - alpha, with alpha = sum_v min(p_v, q_v): the chance that rejection sampling accepts a token of q (total variation)
    lk   lambda KL + (1 - lambda) TV with lambda = exp(-3 alpha), alpha in lambda held constant: KL's strong gradient while the two lie
         apart, acceptance itself once they are near (Samarin et al., "LK Losses", arXiv 2602.23881, the hybrid objective)

The draft's logits never exist for all rows at once: each chunk's logits, loss and gradient with respect to the hidden rows are computed
in one go during the forward pass, so that the backward pass only scales. That costs no recomputation, and one [chunk, D] buffer.
Arithmetic after the head's matrix product is fp32 (fp64 for fp64 inputs): in bf16 a KL gradient near convergence is off by percents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.base.errors import InputError
from eyas.drafts.compiled import compile_piece
from eyas.drafts.packing import StepTargets

#: lambda's steepness in `lk`; 3 is the paper's best hybrid setting.
LK_ETA = 3.0


class StepLoss(NamedTuple):
    """Sums over the supervised rows of one step (0-dim, fp32): the loss (differentiable), rows whose argmax is the target's (among the
    draft vocabulary), and alpha = sum min(p, q)."""

    loss: Tensor
    correct: Tensor
    alpha: Tensor


def kl_rows(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL per row and its gradient.

    Args:
        log_q: [S, D] the draft's log-probabilities. log_p: [S, D] the target's, both fp32 (or fp64).

    Returns:
        loss [S], its gradient with respect to the draft's logits [S, D], alpha [S].
    """
    p, q = log_p.exp(), log_q.exp()
    return (p * (log_p - log_q)).sum(-1), q - p, torch.minimum(p, q).sum(-1)


def tv_rows(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Total variation per row and its gradient; arguments and results as in `kl_rows`."""
    p, q = log_p.exp(), log_q.exp()
    alpha = torch.minimum(p, q).sum(-1)
    return 1 - alpha, _tv_gradient(p, q), alpha


def lk_rows(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The hybrid LK loss per row and its gradient; arguments and results as in `kl_rows`."""
    p, q = log_p.exp(), log_q.exp()
    alpha = torch.minimum(p, q).sum(-1)
    share = torch.exp(-LK_ETA * alpha)
    loss = share * (p * (log_p - log_q)).sum(-1) + (1 - share) * (1 - alpha)
    gradient = share.unsqueeze(-1) * (q - p) + (1 - share).unsqueeze(-1) * _tv_gradient(p, q)
    return loss, gradient, alpha


def _tv_gradient(p: Tensor, q: Tensor) -> Tensor:
    # d(1 - sum min(p, q)) / dq is -1 where q < p and 0 elsewhere; then through the softmax.
    lower = (q < p).to(q.dtype)
    return q * ((q * lower).sum(-1, keepdim=True) - lower)


LossRows = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
LOSSES: dict[str, LossRows] = {"kl": kl_rows, "tv": tv_rows, "lk": lk_rows}


def loss_rows(name: str) -> LossRows:
    """The loss called `name`. Raises InputError for an unknown one, listing those there are."""
    if name not in LOSSES:
        raise InputError(f"unknown loss {name!r}", f"--loss is one of {', '.join(LOSSES)}")
    return LOSSES[name]


class TeacherRows(NamedTuple):
    """The target's logits over the draft vocabulary [R, D], with what every step needs of them: log-sum-exp [R] and argmax [R]."""

    logits: Tensor
    lse: Tensor
    best: Tensor


def teacher_rows(logits: Tensor, chunk: int = 2048, *, compiled: bool = False) -> TeacherRows:
    """Measure the teacher's rows once for all steps; logits [R, D] in the compute dtype, sums in fp32 (fp64 for fp64)."""
    measure = compile_piece(_measure) if compiled else _measure
    parts = [measure(part) for part in logits.split(chunk)]
    return TeacherRows(logits, torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


def _measure(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.logsumexp(logits.to(acc_dtype(logits)), -1), logits.argmax(-1)


def acc_dtype(x: Tensor) -> torch.dtype:
    """What sums over `x` are kept in: fp32, fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def step_loss(
    x: Tensor,
    head: Tensor,
    teacher: TeacherRows,
    targets: StepTargets,
    loss: str = "kl",
    *,
    chunk: int = 2048,
    compiled: bool = False,
) -> StepLoss:
    """Loss of one training-time-test step, summed over its supervised rows.

    Args:
        x: [R, H], the draft's normed output rows. head: [D, H] the draft's head.
        teacher: the target's logits for the same rows' tokens, from `teacher_rows`.
        targets: which rows learn from which states. loss: `kl`, `tv` or `lk`.
        chunk: rows at a time. compiled: fuse the row-wise part with torch.compile.

    Returns:
        StepLoss; `loss` is differentiable in `x`, and in `head` if it requires a gradient.
    """
    rows = _compiled_rows(loss) if compiled else _weighted_rows(loss)

    def measure(z: Tensor, at: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return rows(z, *teacher, targets.states[at], targets.weights[at].to(teacher.lse.dtype))

    total, correct, alpha = chunked_loss(measure, targets, chunk, (x, head))
    weights = targets.weights.to(alpha.dtype)
    return StepLoss(total, (correct * weights).sum(), (alpha * weights).sum())


#: Logits [c, D] of a chunk, and which of the step's rows they are -> the chunk's loss, its gradient with respect to the logits, and per
#: row whether its argmax is right, and alpha.
Measure = Callable[[Tensor, slice], tuple[Tensor, Tensor, Tensor, Tensor]]


def chunked_loss(
    measure: Measure, targets: StepTargets, chunk: int, *products: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """A loss over logits that exist for `chunk` rows at a time.

    Args:
        products: pairs of inputs [R, n] and weights [D, n]; the logits are the sum of their products. targets: which rows.

    Returns:
        the loss (0-dim, differentiable in all that require a gradient), and per row of `targets` [S] whether it is right, and alpha.
    """
    return _ChunkedLoss.apply(measure, targets, chunk, *(x for pair in products for x in pair))


def _weighted_rows(loss: str) -> Callable[..., Any]:
    rows = loss_rows(loss)

    def weighted(
        z: Tensor, teacher: Tensor, lse: Tensor, best: Tensor, states: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        log_q = torch.log_softmax(z, -1, dtype=lse.dtype)
        log_p = teacher[states].to(lse.dtype) - lse[states].unsqueeze(-1)
        losses, gradient, alpha = rows(log_q, log_p)
        return (
            (losses * weights).sum(),
            (gradient * weights.unsqueeze(-1)).to(z.dtype),
            (z.argmax(-1) == best[states]).to(lse.dtype),
            alpha,
        )

    return weighted


@cache
def _compiled_rows(loss: str) -> Callable[..., Any]:
    return compile_piece(_weighted_rows(loss))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, measure, targets, chunk, *flat):  # type: ignore[override]
        pairs, wanted = list(zip(flat[::2], flat[1::2], strict=True)), ctx.needs_input_grad[3:]
        acc = acc_dtype(flat[0])
        loss = torch.zeros((), dtype=acc, device=flat[0].device)
        grads = [
            None if not want else torch.zeros_like(x, dtype=acc if i % 2 else None)
            for i, (x, want) in enumerate(zip(flat, wanted, strict=True))
        ]
        per_row: list[tuple[Tensor, Tensor]] = []
        for start in range(0, len(targets.rows), chunk):
            at = slice(start, start + chunk)
            index = targets.rows[at]
            inputs = [x[index] for x, _ in pairs]
            z = inputs[0] @ pairs[0][1].T
            for x, (_, weight) in zip(inputs[1:], pairs[1:], strict=True):
                z = z + x @ weight.T
            one, grad_z, *rows = measure(z, at)
            loss += one
            per_row.append((rows[0], rows[1]))
            real = max(0, min(chunk, targets.count - start))  # the others are padding
            for i, (x, (_, weight)) in enumerate(zip(inputs, pairs, strict=True)):
                grad_x, grad_weight = grads[2 * i : 2 * i + 2]
                if grad_x is not None:
                    grad_x.index_copy_(0, index[:real], (grad_z @ weight)[:real])
                if grad_weight is not None:
                    grad_weight += grad_z.T @ x
        ctx.save_for_backward(*grads)
        ctx.dtypes = [x.dtype for x in flat]
        none = loss.new_zeros(0)
        correct, alpha = (torch.cat(x) for x in zip(*per_row, strict=True)) if per_row else (none, none.clone())
        ctx.mark_non_differentiable(correct, alpha)
        return loss, correct, alpha

    @staticmethod
    def backward(ctx: Any, grad_loss, _correct, _alpha):  # type: ignore[override]
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (None, None, None, *(None if g is None else (g * grad_loss.to(g.dtype)).to(d) for g, d in grads))
