"""The independent pass: a target in transformers, one sample alone, with the attention that implements the model, all its layers kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eyas.base.errors import ParityError
from eyas.data.dataset import Sample
from eyas.gates.evidence import (
    LIMIT,
    RESEMBLES,
    against_limit,
    against_runner_up,
    judge_states,
    judge_target,
    require_shapes,
    row_errors,
)
from eyas.target.decoder import hook_streams
from eyas.target.loading import right_attention
from eyas.target.model_files import ModelInfo
from eyas.target.teacher import TargetParts, final_norm, load_target_parts

if TYPE_CHECKING:
    from eyas.engines.transformers import TransformersEngine

#: Most numbers in the logits that gate 4 compares (positions x vocabulary): 0.2 GB in float32, a second or two of a CPU.
MOST_LOGITS = 5 * 10**7


def length_breaks(info: ModelInfo) -> list[int]:
    """Positions from which on a token may see another context than before: the ends of sliding windows, attention chunks and original
    context lengths, ascending."""
    found: set[int] = set()

    def look(config: Mapping[str, Any]) -> None:
        for key, value in config.items():
            if isinstance(value, dict):
                look(value)
            elif key in LENGTHS and isinstance(value, int) and 0 < value < (info.max_position or value + 1):
                found.add(value)

    look(info.text)
    return sorted(found)


LENGTHS = ("sliding_window", "sliding_window_size", "attention_chunk_size", "original_max_position_embeddings")


def pick_samples(
    lengths: np.ndarray, positions: Sequence[int], info: ModelInfo, count: int, most_tokens: int = 4096
) -> list[int]:
    """Dataset positions of a few samples for gate 4: the shortest, one past every window and original context length that a sample
    of the dataset passes, then others spread over the dataset while they fit in `most_tokens`."""
    shortest = min(positions, key=lambda i: int(lengths[i]))
    chosen = [shortest]
    for at in reversed(length_breaks(info)):
        beyond = [i for i in positions if lengths[i] > at]
        if beyond:
            # The shortest with a sixteenth of the length behind it, or the longest there is.
            enough = [i for i in beyond if lengths[i] > at + at // 16]
            chosen.append(
                min(enough, key=lambda i: int(lengths[i])) if enough else max(beyond, key=lambda i: int(lengths[i]))
            )
            break
    chosen = list(dict.fromkeys(chosen))
    tokens = sum(int(lengths[i]) for i in chosen)
    for i in (positions[k] for k in np.linspace(0, len(positions) - 1, max(count, 2)).astype(int)):
        if i not in chosen and len(chosen) < count and tokens + int(lengths[i]) <= most_tokens:
            chosen.append(i)
            tokens += int(lengths[i])
    return chosen


def spread_positions(samples: Sequence[Sample], vocab_size: int) -> dict[str, list[int]]:
    """Sample id -> positions whose logits are compared: all, or as many as memory allows, spread evenly, the last one among them."""
    most = max(8, MOST_LOGITS // vocab_size // max(len(samples), 1))
    return {one.id: sorted({int(p) for p in np.linspace(len(one) - 1, 0, min(most, len(one)))}) for one in samples}


def why_loose(info: ModelInfo, dtype: str) -> str | None:
    """Why two right passes of this target may differ by more than rounding, or None."""
    if info.quantises_activations():
        return "quantised activations"  # rounded elsewhere by each engine
    return "mixture of experts" if dtype != "float32" and info.is_moe else None  # other experts are chosen


def _reference_pass(
    engine: TransformersEngine, sample: Sample
) -> tuple[dict[int, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Layer id -> [T, H] for every id 0..N (N taken at the final norm's door), the normed last state [T, H], the model's logits [T, V]."""
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
    streams = {i: h[0].cpu() for i, h in enumerate(output.hidden_states[:-1])}
    streams[engine.info.num_layers] = final[engine.info.num_layers][0].cpu()
    return streams, output.hidden_states[-1][0].cpu(), output.logits[0]


def judge_against_reference(
    engine: TransformersEngine,
    samples: Sequence[Sample],
    states: Sequence[Mapping[int, torch.Tensor]],
    last_in_pass: torch.Tensor | None = None,
    extra_limit: float = 0.0,
) -> dict[str, Any]:
    """Judge captured (or stored) states of `samples` by an independent pass of each. Returns the report; raises ParityError.

    Args:
        engine: loaded. states: per sample, layer id -> [T, H]. last_in_pass: [sum T, H] normed last states of the capturing pass, if known.
        extra_limit: added where the states were stored in less precision than computed.
    """
    info, dtype, N = engine.info, engine.dtype, engine.info.num_layers
    states = [{i: rows.cpu() for i, rows in one.items()} for one in states]
    require_shapes(samples, states, info.hidden_size)
    loose = why_loose(info, dtype)
    parts = load_target_parts(info) if N in states[0] else None
    wanted = spread_positions(samples, info.vocab_size)
    reference, normed, finals, logits = [], [], [], []
    for sample in samples:
        streams, last, own = _reference_pass(engine, sample)
        reference.append(streams)
        normed.append(last)
        finals.append(streams[N][wanted[sample.id]])
        logits.append(own[wanted[sample.id]].float().cpu())
        del own
    limit = LIMIT[dtype] + extra_limit
    medians, checks = judge_states(
        samples, states, reference, N, limit,
        strict=loose is None, against="an independent pass", normed=normed, breaks=length_breaks(info),
    )  # fmt: skip
    report: dict[str, Any] = {
        "passed": True,
        "samples": len(samples),
        "positions": sum(len(s) for s in samples),
        "relative_l2": medians,
        "tolerance": limit if loose is None else None,
        "note": None
        if loose is None
        else f"{dtype}, {loose}: judged by the nearest layer and by the same pass, not by the error",
    }
    if parts is not None:
        if last_in_pass is not None:
            checks |= _judge_norm(torch.cat([one[N] for one in states]), last_in_pass.cpu(), parts, limit)
        kl, agreement, found = judge_target(
            torch.cat(finals),
            torch.cat(logits),
            parts,
            dtype,
            quantised=info.quantises_activations(),
            where="independent pass",
        )
        report |= {"target_kl": kl, "top1_agreement": agreement}
        checks |= found
    return {**report, "checks": checks}


def _judge_norm(
    final: torch.Tensor, last: torch.Tensor, parts: TargetParts, limit: float
) -> dict[str, dict[str, float]]:
    """Captured target states against the normed ones of the same pass [n, H]: with the final norm they must agree, without they must not."""
    with_norm = float(row_errors(final_norm(final, parts), last).median())
    without = float(row_errors(final, last).median())
    if not without > with_norm and without <= RESEMBLES:
        raise ParityError(
            f"parity: the target state is already normed (relative error to the model's normed state {without:.2g}): it was taken after the final norm",
            "store the stream before the norm; id N here is not Hugging Face's hidden_states[N]",
        )
    if not with_norm <= limit:
        raise ParityError(
            f"parity: target state -> {parts.norm_kind} norm (eps {parts.norm_eps:g}) differs from the model's own by a relative error of "
            f"{with_norm:.2g}, allowed is {limit:.2g}",
            "another kind of norm, or hidden without its residual; please report the architecture",
        )
    return {
        "final norm in the same pass": against_limit(with_norm, limit),
        "with the final norm against without": against_runner_up(with_norm, without),
    }


def captured_batch(
    engine: TransformersEngine, samples: Sequence[Sample]
) -> tuple[list[dict[int, torch.Tensor]], torch.Tensor]:
    """Capture `samples` in one batch, as bulk does. Returns per sample id -> [T, H], and the normed last states [sum T, H]."""
    captured: list[dict[int, list[torch.Tensor]]] = [{} for _ in samples]
    seen: dict[int, int] = {}

    def take(layer: int, stream: torch.Tensor, lengths: list[int]) -> None:
        for rows in stream.split(lengths):
            index = seen.get(layer, 0)
            captured[index].setdefault(layer, []).append(rows.clone())
            seen[layer] = index + 1

    last = engine.forward_captured(samples, take)
    return [{i: torch.cat(parts) for i, parts in one.items()} for one in captured], last
