"""Gate 4: are the captured states really the states of the layers that were asked for?

Three kinds of evidence, from the weakest assumption to the strongest:

1. *The same pass.* final state -> final norm (written out here, not the model's module) -> head must give the model's own last
   state, logits and next tokens. Catches a target state stored after the norm (F6), the wrong norm, hidden instead of hidden +
   residual (F7) at the end.
2. *Another pass.* Each sample alone, through transformers' own attention and `output_hidden_states`, must agree with what was
   captured in a batch: relative L2 per position, root mean square per layer. Catches states of another request (F2), missing ones (F3), leaks between packed samples.
3. *Which layer.* For every id, the reference layer that lies nearest must be that very id: one layer early or late (F5), a
   repeated or swapped layer. This one holds even where low precision makes a mixture of experts route differently.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from eyas.base.errors import ParityError
from eyas.data.dataset import Sample
from eyas.target.decoder import hook_streams
from eyas.target.layers import describe_layer
from eyas.target.loading import right_attention
from eyas.target.readout import normalise, squash

if TYPE_CHECKING:
    from eyas.engines.transformers import TransformersEngine

log = logging.getLogger(__name__)

#: Largest relative L2 between the captured states of a layer and an independent pass, by compute dtype.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 8e-2}
#: A next token that differs is a near tie, and no failure, if the model's own logits of the two lie closer than this many
#: standard deviations of its logits at that position.
TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
#: Up to this relative L2 to its nearest reference layer a state is that layer's; beyond, it is no layer's at all.
RESEMBLES = 0.3


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b|| over the whole tensors, in float64 sums of float32 differences."""
    return float(
        (a.float() - b.float()).norm(dtype=torch.float64) / b.float().norm(dtype=torch.float64).clamp_min(1e-30)
    )


def row_relative_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root mean square over positions of ||a_t - b_t|| / ||b_t||, for [T, H].

    Not over the whole tensor: many models carry a hundredfold norm at the first position, beside which an error anywhere
    else would not show.
    """
    difference = torch.linalg.vector_norm(a.float() - b.float(), dim=1)
    return float((difference / torch.linalg.vector_norm(b.float(), dim=1).clamp_min(1e-30)).pow(2).mean().sqrt())


def reference_states(
    engine: TransformersEngine, sample: Sample
) -> tuple[dict[int, torch.Tensor], torch.Tensor, torch.Tensor]:
    """An independent forward pass of one sample alone, with transformers' own attention and masks.

    Returns: layer id -> [T, H] for *every* id 0..N (id N taken at the final norm's door), the normed last state [T, H],
    the model's logits [T, V].
    """
    model, decoder = engine.model, engine.decoder
    if not engine.one_by_one:
        model.set_attn_implementation(right_attention(model))
    final: dict[int, torch.Tensor] = {}
    (handle,) = hook_streams(decoder, [engine.info.num_layers], final.__setitem__)
    try:
        with torch.inference_mode():
            token_ids = torch.from_numpy(sample.token_ids).long()[None].to(engine.device)
            output = model(input_ids=token_ids, output_hidden_states=True, use_cache=False)
    finally:
        handle.remove()
    streams = {i: h[0] for i, h in enumerate(output.hidden_states[:-1])}
    streams[engine.info.num_layers] = final[engine.info.num_layers][0]
    return streams, output.hidden_states[-1][0], output.logits[0]


def compare_layers(
    captured: dict[int, torch.Tensor], reference: dict[int, torch.Tensor], num_layers: int
) -> dict[int, dict[str, float]]:
    """For each captured id: `row_relative_l2` to the same reference layer, and which reference layer lies nearest by it."""
    result: dict[int, dict[str, float]] = {}
    for i, stream in captured.items():
        errors = {j: row_relative_l2(stream.to(other.device), other) for j, other in reference.items()}
        nearest = min(errors, key=lambda j: errors[j])
        result[i] = {"error": errors[i], "nearest": nearest, "nearest_error": errors[nearest]}
    return result


def judge_layers(
    comparison: dict[int, dict[str, float]], num_layers: int, tolerance: float, what: str, *, strict: bool
) -> None:
    """Raise ParityError for a wrong layer (always) or, when `strict`, for an error above `tolerance`."""
    for i, figures in comparison.items():
        name = describe_layer(i, num_layers)
        error, nearest = figures["error"], int(figures["nearest"])
        # The negated comparison also catches NaN.
        if nearest != i and not error <= max(2 * figures["nearest_error"], 1e-6):
            if strict and not figures["nearest_error"] <= RESEMBLES:
                raise ParityError(
                    f"{what}: layer {name} resembles no layer of the reference (relative L2 to its own {error:.2g}, to layer {nearest} "
                    f"{figures['nearest_error']:.2g}): hidden without its residual (fault F7), or states of another request (fault F2)",
                    "run again with --trace",
                )
            raise ParityError(
                f"{what}: layer {name} is nearest to the reference's layer {nearest} (relative L2 {figures['nearest_error']:.2g}; to its own {error:.2g}): a layer early, late or swapped (fault F5)",
                "check how the layer ids are counted (--layer-index), and the engine's version",
            )
        if strict and not error <= tolerance:
            raise ParityError(
                f"{what}: layer {name} differs from an independent forward pass by relative L2 {error:.2g}, allowed is {tolerance:.2g}",
                "states of another sample (F2), missing tokens (F3), a leak between packed samples, or hidden without residual (F7): run again with --trace",
            )


def judge_final(
    final: torch.Tensor, last: torch.Tensor, engine: TransformersEngine, tolerance: float, what: str
) -> dict[str, float]:
    """Final state [T, H] -> final norm -> compare with the model's own normed state `last` [T, H]; raises ParityError (F6, F7)."""
    kind, eps = engine.info.readout.norm_kind, engine.info.readout.norm_eps
    mine = _normed(final, engine)
    error = relative_l2(mine, last)
    already = relative_l2(final, last)
    if already <= tolerance / 10 or not error <= tolerance:
        if already <= tolerance:
            raise _already_normed(already, what)
        raise ParityError(
            f"{what}: final state -> {kind} norm (eps {eps:g}) differs from the model's own by relative L2 {error:.2g}, allowed is {tolerance:.2g}",
            "a wrong kind of norm, or hidden instead of hidden + residual (fault F7); please report the architecture",
        )
    return {"norm_error": error}


def _normed(x: torch.Tensor, engine: TransformersEngine) -> torch.Tensor:
    readout, norm = engine.info.readout, engine.decoder.norm
    return normalise(x, readout.norm_kind, readout.norm_eps, getattr(norm, "weight", None), getattr(norm, "bias", None))


def _already_normed(error: float, what: str) -> ParityError:
    return ParityError(
        f"{what}: the target state is already normed (relative L2 to the model's normed state {error:.2g}): it was taken after the final norm (fault F6)",
        "store the stream before the norm; id N here is not Hugging Face's hidden_states[N]",
    )


def transformers_parity(engine: TransformersEngine, samples: Sequence[Sample]) -> dict[str, Any]:
    """Capture `samples` in one batch and judge it by all three kinds of evidence."""
    captured: list[dict[int, list[torch.Tensor]]] = [{} for _ in samples]
    seen: dict[int, int] = {}

    def take(layer: int, stream: torch.Tensor, lengths: list[int]) -> None:
        start = 0
        for length in lengths:
            index = seen.get(layer, 0)
            captured[index].setdefault(layer, []).append(stream[start : start + length].clone())
            seen[layer] = index + 1
            start += length

    last_in_pass = engine.forward_captured(samples, take)
    states = [{i: torch.cat(parts) for i, parts in one.items()} for one in captured]
    return judge_parity(engine, samples, states, last_in_pass)


def judge_parity(
    engine: TransformersEngine,
    samples: Sequence[Sample],
    states: Sequence[dict[int, torch.Tensor]],
    last_in_pass: torch.Tensor | None = None,
    extra_tolerance: float = 0.0,
) -> dict[str, Any]:
    """Judge captured (or stored) states of `samples` against an independent pass. See `transformers_parity`.

    Args:
        states: per sample, layer id -> [T, H]. last_in_pass: [sum T, H] normed last states of the capturing pass, if known.
        extra_tolerance: added where the states were stored in less precision than computed.
    """
    info, dtype = engine.info, engine.dtype
    tolerance = TOLERANCE[dtype] + extra_tolerance
    N = info.num_layers
    # Low precision sends tokens of a mixture of experts to other experts, and quantised activations are rounded elsewhere by each engine:
    # there only the nearest layer and the same pass prove.
    loose = "mixture of experts" if dtype != "float32" and info.is_moe else None
    if info.quantises_activations():
        loose = "quantised activations"
    strict = loose is None
    worst: dict[int, float] = {}
    alone_last, logit_error = 0.0, 0.0
    positions = ties = disagree = 0
    start = 0
    for sample, captured in zip(samples, states, strict=True):
        what = f"parity, sample {sample.id} ({len(sample)} tokens)"
        for i, stream in captured.items():
            if list(stream.shape) != [len(sample), info.hidden_size]:
                raise ParityError(
                    f"{what}: layer {i} has shape {list(stream.shape)}, expected [{len(sample)}, {info.hidden_size}] (F1, F3)",
                    "please report it",
                )
        reference, last, logits = reference_states(engine, sample)
        if N in captured and (already := relative_l2(captured[N].to(last.device), last)) <= tolerance / 10:
            raise _already_normed(already, what)
        comparison = compare_layers(captured, reference, N)
        judge_layers(comparison, N, tolerance, what, strict=strict)
        for i, figures in comparison.items():
            worst[i] = max(worst.get(i, 0.0), figures["error"])
        if N in captured:
            own = last if last_in_pass is None else last_in_pass[start : start + len(sample)]
            if strict or last_in_pass is not None:
                figures = judge_final(captured[N].to(own.device), own, engine, tolerance, what)
                alone_last = max(alone_last, figures["norm_error"])
            head, readout = engine.model.get_output_embeddings(), info.readout
            read = _normed(captured[N].to(last.device), engine) * readout.state_scale
            with torch.inference_mode():
                rebuilt = squash(head(read.to(head.weight.dtype)), readout.logit_scale, readout.softcap)
            differs, decisive = decisive_differences(rebuilt, logits, max(TIE[dtype], 10 * extra_tolerance))
            ties += differs - len(decisive)
            positions += len(sample)
            logit_error = max(logit_error, relative_l2(rebuilt, logits))
            if strict and decisive:
                raise ParityError(
                    f"{what}: the next token rebuilt from the final state is not the model's own at {len(decisive)} of {len(sample)} positions, first at {decisive[0]}, and these are no near ties",
                    "the target state, the norm or the head is wrong (faults F6, F7)",
                )
            disagree += len(decisive)
        start += len(sample)
    report: dict[str, Any] = {
        "passed": True,
        "samples": len(samples),
        "positions": sum(len(s) for s in samples),
        "relative_l2": {str(i): error for i, error in worst.items()},
        "tolerance": tolerance if strict else None,
        "note": None if strict else f"{dtype}, {loose}: judged by nearest layer and by the same pass, not by error",
    }
    if positions:
        report |= {
            "norm_relative_l2": alone_last,
            "top1_agreement": 1 - (ties + disagree) / positions,
            "near_ties": ties,
            "logits_relative_l2": logit_error,
        }
    return report


def decisive_differences(rebuilt: torch.Tensor, own: torch.Tensor, tie: float) -> tuple[int, list[int]]:
    """Compare argmaxes of logits [T, V]: how many differ, and the positions where they differ by more than a near tie."""
    mine, theirs = rebuilt.argmax(-1), own.argmax(-1)
    differs = (mine != theirs).nonzero().flatten()
    gap = (own.gather(-1, theirs[:, None]) - own.gather(-1, mine[:, None])).squeeze(-1).float()
    decisive = [int(i) for i in differs if not float(gap[i]) <= tie * float(own[i].float().std())]
    return len(differs), decisive
