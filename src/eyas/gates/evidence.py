"""What gate 4 judges by: pure functions of states and logits, the same for every engine.

A tensor that went through other kernels is never equal, and in bfloat16 a few rows are always far off. So whole distributions are
judged (medians over positions, the share of a tail), and wherever it can be, against a *runner-up* instead of a tolerance: a layer
must lie nearer to its own id than to any other, a row nearer to itself than to its neighbour, the rebuilt teacher nearer to the
model's own distribution with the final norm than without or twice. Each check gives a margin: above 1 it holds.

`relative error` of a row is ||a_t - b_t|| / ||b_t||: many models carry a hundredfold norm at the first position, beside which an
error anywhere else would not show in a norm over the whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.base.errors import ParityError
from eyas.target.layers import describe_layer
from eyas.target.readout import squash
from eyas.target.teacher import TargetParts, Teacher, final_norm

if TYPE_CHECKING:
    from eyas.data.dataset import Sample

#: Largest median of a layer's relative errors between two passes through different kernels, by compute dtype.
LIMIT = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 8e-2}
#: Share of rows that may lie beyond ten times the limit, and further from themselves than half of what lies between unrelated rows;
#: and where experts route differently (a tenth of Kimi-K2.5's rows between a compiled and an uncompiled pass).
TAIL, EXPERTS_TAIL = 0.05, 0.15
#: Two passes of one engine: a layer's median error may be this many times that of the target state (whose pass is proven by its logits),
#: and is always allowed this many roundings of the dtype; twice as many where experts route differently.
TIMES_TARGET, EPSILONS = 4.0, 2.0
#: Up to this relative error a state resembles another; beyond, they are different things.
RESEMBLES = 0.3
#: Largest KL divergence of the rebuilt teacher, as a multiple of what the dtype's own rounding makes of it; and always allowed.
ROUNDINGS, NOTHING = 15.0, 1e-5
#: The same where activations are quantised, which no rounding of ours imitates.
QUANTISED_KL = 0.05
#: The check of `judge_same_pass`.
SAME_PASS = "same pass, two mechanisms"


def row_errors(a: Tensor, b: Tensor) -> Tensor:
    """[T, H] twice -> [T] float32: ||a_t - b_t|| / ||b_t||."""
    b = b.float()
    difference = torch.linalg.vector_norm(a.to(b.device).float() - b, dim=1)
    return difference / torch.linalg.vector_norm(b, dim=1).clamp_min(1e-30)


def row_relative_l2(a: Tensor, b: Tensor) -> float:
    """Root mean square over positions of the relative errors of [T, H]."""
    return float(row_errors(a, b).pow(2).mean().sqrt())


def _median(rows: Tensor) -> float:
    return float(rows.median())  # NaN if any row is


def against_limit(value: float, limit: float) -> dict[str, float]:
    """A check that holds while `value` is at most `limit`, for the report."""
    return {"value": value, "limit": limit, "margin": limit / max(value, 1e-12)}


def against_runner_up(value: float, runner_up: float) -> dict[str, float]:
    """A check that holds while `value` is below the best of the wrong answers."""
    return {"value": value, "runner_up": runner_up, "margin": runner_up / max(value, 1e-12)}


def require_shapes(samples: Sequence[Sample], states: Sequence[Mapping[int, Tensor]], width: int) -> None:
    """Raise ParityError unless each state is [T, width] and finite."""
    for sample, layers in zip(samples, states, strict=True):
        for i, rows in layers.items():
            what = f"parity, sample {sample.id} ({len(sample)} tokens), layer {i}"
            if list(rows.shape) != [len(sample), width]:
                raise ParityError(
                    f"{what} has shape {list(rows.shape)}, expected [{len(sample)}, {width}]: states are missing",
                    "please report it",
                    check="shape",
                )
            if not rows.isfinite().all():
                at = int((~rows.isfinite().all(1)).nonzero()[0])
                if rows.dtype == torch.float16:
                    raise ParityError(
                        f"{what}, position {at}: the residual stream overflows float16, whose largest number is 65504",
                        "use --dtype bfloat16 (or float32): this model's stream is larger than float16 can hold",
                        check="finite",
                    )
                raise ParityError(
                    f"{what}, position {at}: the state is not finite", "run again with --trace", check="finite"
                )


def explain(rows: Tensor, reference: Mapping[int, Tensor], layer: int, num_layers: int, normed: Tensor | None) -> str:
    """What a state [T, H] that is not the reference's `layer` looks like instead."""
    errors = {j: _median(row_errors(rows, other)) for j, other in reference.items()}
    own = errors[layer]
    if normed is not None and _median(row_errors(rows, normed)) < min(own, RESEMBLES):
        return "it was taken after the final norm"
    nearest = min(errors, key=lambda j: errors[j])
    if nearest != layer and errors[nearest] <= RESEMBLES:
        return (
            f"it is nearest to the reference's layer {nearest} (relative error {errors[nearest]:.2g}; to its own "
            f"{own:.2g}): a layer early, late or swapped"
        )
    if len(rows) > 1:
        for shift in (1, -1):
            if _median(row_errors(rows, reference[layer].roll(shift, 0))) < 0.5 * own:
                return "each row is that of its neighbour: states of another request, or shifted by one"
    if not own <= RESEMBLES:
        return f"it resembles no layer of the reference (relative error {own:.2g}): hidden without its residual, or states of another request"
    return f"relative error {own:.2g}: the numbers were altered on the way"


def judge_same_pass(
    samples: Sequence[Sample],
    states: Sequence[Mapping[int, Tensor]],
    witness: Sequence[Mapping[int, Tensor]],
    num_layers: int,
    normed: Sequence[Tensor | None],
) -> dict[str, dict[str, float]]:
    """States against what hooks saw in the very same pass: bit for bit. `witness`: per sample, id -> [T, H] of each id and its neighbours.

    Returns the checks; the runner-up is the nearest other layer's median error. Raises ParityError.
    """
    runner_up = float("inf")
    for sample, layers, seen, last in zip(samples, states, witness, normed, strict=True):
        for i, rows in layers.items():
            if not torch.equal(rows, seen[i]):
                unequal = (rows != seen[i]).any(1) | rows.isnan().any(1)
                raise ParityError(
                    f"parity, sample {sample.id} ({len(sample)} tokens): layer {describe_layer(i, num_layers)} is not what a hook on "
                    f"the decoder saw in the same pass, at {int(unequal.sum())} positions, first {int(unequal.nonzero()[0])}: "
                    + explain(rows, seen, i, num_layers, last if i == num_layers else None),
                    "the engine hands out other states than its layers compute: run again with --trace, or try --capture hooks",
                    check=SAME_PASS,
                    value=float(row_errors(rows, seen[i]).nan_to_num(float("inf")).max()),
                )
            for j, other in seen.items():
                if j != i and not torch.equal(other, seen[i]):
                    runner_up = min(runner_up, _median(row_errors(rows, other)))
    return {SAME_PASS: against_runner_up(0.0, runner_up)}


def judge_states(
    samples: Sequence[Sample],
    states: Sequence[Mapping[int, Tensor]],
    reference: Sequence[Mapping[int, Tensor]],
    num_layers: int,
    limit: float,
    *,
    strict: bool,
    against: str,
    normed: Sequence[Tensor] | None = None,
    breaks: Sequence[int] = (),
    by_target: bool = False,
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """States against another pass, by distribution.

    Args:
        states, reference: per sample, id -> [T, H]. `reference` may hold more ids: each state must lie nearest to its own.
        limit: of the median relative error. strict: False where two right passes differ by more (experts that route differently,
            quantised activations): there only runners-up, and with `by_target` the target state, judge.
        against: names the reference in messages. normed: per sample, the reference's state after the final norm.
        breaks: positions at which windows and context lengths end; what lies behind each is judged by itself.
        by_target: the target state of both passes is known to be right; by how much it differs limits the layers before it.

    Returns:
        layer -> median relative error; the checks. Raises ParityError.
    """
    errors = {
        i: [row_errors(one[i], other[i]) for one, other in zip(states, reference, strict=True)] for i in states[0]
    }
    medians = {i: _median(torch.cat(own)) for i, own in errors.items()}
    natural = RESEMBLES
    if by_target and num_layers in medians:
        eps = torch.finfo(states[0][num_layers].dtype).eps
        natural = max(TIMES_TARGET * medians[num_layers], EPSILONS * eps) * (1 if strict else 2)
    bound = min(limit if strict else RESEMBLES, natural)
    names = {key: f"{key}, {against}" for key in ("nearest layer is its own", "median relative error", "rows far off")}
    nearest_other, share, tail = float("inf"), 0.0, TAIL if strict else EXPERTS_TAIL
    for i, own in errors.items():
        what = f"parity against {against}: layer {describe_layer(i, num_layers)}"
        ratio = _judge_nearest(i, states, reference, medians[i], num_layers, normed, what, names)
        nearest_other = min(nearest_other, ratio)
        apart = [row_errors(one[i].roll(1, 0), one[i]) for one in reference]
        off = []
        for sample, rows, neighbours in zip(samples, own, apart, strict=True):
            one, between = _median(rows), _median(neighbours)
            allowed = 3 * limit if strict else max(RESEMBLES, 0.75 * between)
            if not (one <= allowed and (one <= RESEMBLES or one <= 0.75 * between)):
                raise ParityError(
                    f"parity against {against}, sample {sample.id} ({len(sample)} tokens): layer {describe_layer(i, num_layers)} differs by "
                    f"a median relative error of {one:.2g}, allowed is "
                    f"{min(allowed, max(RESEMBLES, 0.75 * between)):.2g}" + _from_where(rows, limit, breaks),
                    "states of another request, missing tokens, a leak between samples of a batch, or hidden without its residual: run again with --trace",
                    check=names["median relative error"],
                    value=one,
                    allowed=min(allowed, max(RESEMBLES, 0.75 * between)),
                )
            off.append(rows > max(10 * bound, 0.5 * between))
        if strict:
            _judge_lengths(own, limit, breaks, what, names["median relative error"])
        if (strict or by_target) and not medians[i] <= bound:
            raise ParityError(
                f"{what} differs by a median relative error of {medians[i]:.2g}, allowed is {bound:.2g}"
                + (f" (the target state differs by {medians[num_layers]:.2g})" if bound == natural else ""),
                "a leak between samples of a batch, states altered on the way, or an engine that computes another model: run again with --trace",
                check=names["median relative error"],
                value=medians[i],
                allowed=bound,
            )
        far = float(torch.cat(off).float().mean())
        share = max(share, far)
        if not far <= tail:
            raise ParityError(
                f"{what} differs at {far:.1%} of the positions (allowed {tail:.0%}) by more than {10 * bound:.2g} and by more than half of "
                "what lies between neighbours",
                "states of other tokens or of an earlier step among the right ones, or a leak between samples of a batch: run again with --trace",
                check=names["rows far off"],
                value=far,
                allowed=tail,
            )
    checks = {names["nearest layer is its own"]: against_runner_up(1.0, nearest_other)}
    if strict or by_target:
        checks[names["median relative error"]] = against_limit(max(medians.values()), bound)
    checks[names["rows far off"]] = against_limit(share, tail)
    return {str(i): median for i, median in medians.items()}, checks


def _judge_nearest(
    layer: int,
    states: Sequence[Mapping[int, Tensor]],
    reference: Sequence[Mapping[int, Tensor]],
    own: float,
    num_layers: int,
    normed: Sequence[Tensor] | None,
    what: str,
    names: Mapping[str, str],
) -> float:
    """How much further than its own (median error `own`) the nearest other layer is from a state. Raises ParityError unless that is above 1."""
    rows = torch.cat([one[layer] for one in states])
    target = torch.cat([one[layer] for one in reference])
    others = {j: torch.cat([one[j] for one in reference]) for j in reference[0] if j != layer}
    if normed is not None and layer == num_layers:
        others[-1] = torch.cat(list(normed))
    nearest = float("inf")
    for other in others.values():
        if torch.equal(other, target):  # a layer that does nothing
            continue
        error = _median(row_errors(rows, other))
        if not own < error:
            near = {layer: target, **{k: v for k, v in others.items() if k >= 0}}
            raise ParityError(
                f"{what}: " + explain(rows, near, layer, num_layers, others.get(-1)),
                "check how the layer ids are counted (--layer-index), and the engine's version",
                check=names["nearest layer is its own"],
                value=own,
                allowed=error,
            )
        nearest = min(nearest, error / max(own, 1e-12))
    return nearest


def _judge_lengths(own: Sequence[Tensor], limit: float, breaks: Sequence[int], what: str, check: str) -> None:
    for at in breaks:
        beyond = [errors[at:] for errors in own if len(errors) > at]
        if beyond and not (median := _median(torch.cat(beyond))) <= limit:
            longest = max(own, key=len)
            raise ParityError(
                f"{what} differs beyond position {at} by a median relative error of {median:.2g}, allowed is {limit:.2g}"
                + _from_where(longest, limit, breaks),
                "engine and reference disagree about what a token sees at this length (a sliding window, a rope factor, an original "
                "context length): use another version of the engine, or --max-seq-len below that position",
                check=check,
                value=median,
                allowed=limit,
            )


def _from_where(errors: Tensor, limit: float, breaks: Sequence[int]) -> str:
    """`; right up to position 511, wrong from 512 on`, when there is such a position."""
    bad = errors > limit
    if not bad.any() or bad[0]:
        return ""
    first = int(bad.nonzero()[0])
    if float(bad[first:].float().mean()) < 0.5:
        return ""
    window = next((f", where a window or context length of {b} ends" for b in breaks if abs(first - b) <= 1), "")
    return f"; right up to position {first - 1}, wrong from {first} on{window}"


def judge_target(
    final: Tensor, logits: Tensor, parts: TargetParts, dtype: str, *, quantised: bool, where: str
) -> tuple[float, float, dict[str, dict[str, float]]]:
    """The rebuilt teacher against the model's own distribution, at the same positions of the same pass.

    Args:
        final: [P, H] target states. logits: [P, V'] the model's own, V' >= V.
        dtype: compute dtype, whose rounding is imitated for the limit. quantised: activations are quantised too.

    Returns:
        median KL(model || teacher); share of positions with the same most likely token; the checks. Raises ParityError.
    """
    size = parts.head.shape[0]
    own = logits[:, :size].float().log_softmax(-1)
    teacher = Teacher(parts, torch.arange(size), "cpu", torch.float32)
    rebuilt = teacher.logits(final.float())
    kl = _kl(own, rebuilt)
    value = _median(kl)
    wide = getattr(torch, dtype)
    noise = torch.rand(final.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    rounded = final.float() * (1 + torch.finfo(wide).eps / 2 * noise)
    floor = _kl(rebuilt.log_softmax(-1), teacher.logits(rounded).to(wide).float())
    limit = QUANTISED_KL if quantised else ROUNDINGS * _median(floor) + NOTHING
    tail_limit = 10 * limit if quantised else ROUNDINGS * float(floor.quantile(0.9)) + 10 * NOTHING
    tail = float(kl.quantile(0.9))
    normed = final_norm(final.float(), parts)
    wrong = {"without the final norm": _median(_kl(own, _head(final.float(), parts)))}
    twice = final_norm(normed, parts)
    if (
        _median(row_errors(twice, normed)) > 0.01
    ):  # else the norm's gains are all one, and a second norm changes nothing
        wrong["normed twice"] = _median(_kl(own, teacher.logits(normed)))
    if _median(row_errors(final.roll(1, 0), final)) > 0.01:  # else one token was repeated
        wrong["of the neighbouring row"] = _median(_kl(own, rebuilt.roll(1, 0)))
    best = min(wrong, key=lambda name: wrong[name])
    agreement = float((rebuilt.argmax(-1) == own.argmax(-1)).float().mean())
    failed: dict[str, Any] = {
        "check": f"teacher's KL to the model, {where}",
        "value": max(value, tail * limit / tail_limit),
        "allowed": limit,
    }
    if not (value <= limit and tail <= tail_limit):
        if wrong["without the final norm"] < value:
            raise ParityError(
                f"parity, {where}: the target state gives the model's own distribution without the final norm (KL {wrong[best]:.2g}), not "
                f"with it ({value:.2g}): it was taken after the final norm",
                "store the stream before the norm; id N here is not Hugging Face's hidden_states[N]",
                **failed,
            )
        raise ParityError(
            f"parity, {where}: the distribution rebuilt from the target state is not the model's own: KL divergence {value:.2g} in the median "
            f"(allowed {limit:.2g}), {tail:.2g} at the 90th percentile ({tail_limit:.2g}), same next token at {agreement:.1%} of "
            f"{len(final)} positions",
            "the target state was taken without its residual or of another layer, or between it and the logits the model does what eyas "
            "does not (a bias, a scale, a cap): please report the architecture",
            **failed,
        )
    if not value <= max(wrong[best] / 2, NOTHING):
        raise ParityError(
            f"parity, {where}: the rebuilt distribution fits the model's own no better (KL {value:.2g}) than the one {best} ({wrong[best]:.2g})",
            "nothing is proven of this target state: take other samples (--parity-samples), or please report the architecture",
            check=f"teacher against others, {where}",
            value=value,
            allowed=wrong[best] / 2,
        )
    return (
        value,
        agreement,
        {
            f"teacher's KL to the model, {where}": against_limit(value, limit),
            f"teacher against one {best}, {where}": against_runner_up(value, wrong[best]),
        },
    )


def _kl(logprobs: Tensor, logits: Tensor) -> Tensor:
    """[P] KL divergence of `logits` [P, V] from the distribution with `logprobs`; never below 0."""
    p = logprobs.exp()
    terms = p * (logprobs - logits.log_softmax(-1))
    return terms.masked_fill(p == 0, 0.0).sum(-1).clamp_min(0.0)


def _head(normed: Tensor, parts: TargetParts) -> Tensor:
    """[n, H] states that no norm is applied to any more -> [n, V] logits."""
    bias = None if parts.head_bias is None else parts.head_bias.float()
    return squash(F.linear(normed * parts.state_scale, parts.head.float(), bias), parts.logit_scale, parts.softcap)
