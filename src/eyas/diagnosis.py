"""Why a draft accepts less than its training promised: the store it was trained on, held against the target itself.

`eyas eval` runs this when the acceptance it measures lies well below the one simulated while training (or with `--diagnose`). Each check
names the fault it would find: states of other layers than their ids say, a target state that is not what enters the final norm (or another
norm or head), a loss mask shifted by a token, answers that the target would not give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.layers import describe_layer
from eyas.speculation import Target
from eyas.store import States, StateSample
from eyas.teacher import TargetParts, Teacher

#: A draft that reaches less than this share of its simulated acceptance length is looked into.
SUSPICIOUS = 0.85
#: Rebuilt next tokens must equal the model's own at this share of positions (bf16 prefill: 98.5 %, ties between runs included).
SAME_TOKENS = 0.9


@dataclass(frozen=True)
class Finding:
    """One check: `ok`, and a sentence with the figures."""

    name: str
    ok: bool
    text: str


def diagnose(
    states: States, target: Target, parts: TargetParts, end_ids: Sequence[int], samples: int = 6
) -> list[Finding]:
    """Compare stored samples with a fresh forward pass of the target.

    Args:
        states: the store the draft was trained on. target: the loaded model; `target.layer_ids` must be 0..N.
        parts: final norm and head. end_ids: tokens that end a reply.
    """
    chosen = [states[int(i)] for i in np.linspace(0, len(states) - 1, min(samples, len(states))).astype(int)]
    fresh = [fresh_states(target, sample) for sample in chosen]
    return [
        check_layers(states, chosen, fresh),
        check_teacher(states, chosen, fresh, parts),
        check_mask(states, end_ids),
        check_answers(chosen, fresh),
    ]


@torch.no_grad()
def fresh_states(target: Target, sample: StateSample) -> tuple[list[Tensor], Tensor]:
    """Every layer's stream [T, H] (ids 0..N) and the model's logits [T, V] for one stored sample."""
    from transformers import DynamicCache

    ids = sample.token_ids.long().unsqueeze(0).to(target.device)
    positions = torch.arange(ids.shape[1], device=target.device).unsqueeze(0)
    cache = DynamicCache(config=target.model.config.get_text_config())
    logits, stream = target(ids, positions, torch.ones_like(ids), cache)
    return list(stream[0].float().cpu().chunk(len(target.layer_ids), -1)), logits[0].cpu()


def check_layers(
    states: States, chosen: Sequence[StateSample], fresh: Sequence[tuple[list[Tensor], Tensor]]
) -> Finding:
    """Each stored layer must lie nearest to the fresh layer of its own id."""
    layers = len(fresh[0][0])
    wrong, worst = [], 0.0
    for i in states.layer_ids:
        distances = [
            float(
                np.mean(
                    [
                        float((f[0][j] - s.hidden[i].float()).norm() / f[0][j].norm())
                        for s, f in zip(chosen, fresh, strict=True)
                    ]
                )
            )
            for j in range(layers)
        ]
        nearest = int(np.argmin(distances))
        worst = max(worst, distances[i])
        if nearest != i and distances[nearest] < 0.7 * distances[i]:
            wrong.append(
                f"layer {describe_layer(i, layers - 1)} holds the states of layer {describe_layer(nearest, layers - 1)}"
            )
    if wrong:
        return Finding("layer ids", False, "; ".join(wrong))
    return Finding(
        "layer ids", worst < 0.3, f"every stored layer is nearest to its own id, worst relative distance {worst:.1e}"
    )


def check_teacher(
    states: States, chosen: Sequence[StateSample], fresh: Sequence[tuple[list[Tensor], Tensor]], parts: TargetParts
) -> Finding:
    """Stored target state -> final norm -> head must say the model's own next tokens."""
    final = max(states.layer_ids)
    teacher = Teacher(parts, torch.zeros(1, dtype=torch.int64), "cpu", torch.float32)
    same = [
        float((teacher.argmax(s.hidden[final]) == f[1].argmax(-1)).float().mean())
        for s, f in zip(chosen, fresh, strict=True)
    ]
    share = float(np.mean(same))
    text = f"rebuilt next tokens equal the model's at {100 * share:.1f} % of positions"
    if share < SAME_TOKENS:
        text += ": the target state is not what enters the final norm, or norm kind or head are others"
    return Finding("final norm and head", share >= SAME_TOKENS, text)


def check_mask(states: States, end_ids: Sequence[int], samples: int = 200) -> Finding:
    """Answers end with an end token: where the masks stop one token before or after it instead, they are shifted."""
    places = {-1: 0, 0: 0, 1: 0}  # where the end token stands, relative to the last supervised token
    for index in range(min(samples, len(states))):
        sample = states[index]
        ids, mask = sample.token_ids.numpy(), sample.loss_mask.numpy().astype(np.int8)
        last = np.flatnonzero(np.diff(np.append(mask, 0)) == -1)
        for at in last:
            for offset in places:
                if 0 <= at + offset < len(ids) and int(ids[at + offset]) in end_ids:
                    places[offset] += 1
                    break
    total = sum(places.values())
    if not total:
        return Finding("loss mask", True, "no answer ends with an end token, so a shift cannot be told")
    # An end token one place later also stands there when the turn end itself is not supervised by choice: then all answers agree on it.
    offset = max(places, key=lambda o: places[o])
    if offset == 0:
        return Finding("loss mask", True, f"{places[0]} of {total} answers end with their end token supervised")
    side = (
        "early: the end token is not supervised" if offset == 1 else "late: a token behind the end token is supervised"
    )
    return Finding("loss mask", False, f"{places[offset]} of {total} masks stop one token too {side}")


def check_answers(chosen: Sequence[StateSample], fresh: Sequence[tuple[list[Tensor], Tensor]]) -> Finding:
    """How often the supervised tokens are what the target itself would say (greedy answers: nearly always)."""
    same = total = 0
    for sample, (_, logits) in zip(chosen, fresh, strict=True):
        at = np.flatnonzero(sample.loss_mask.numpy()[1:])
        same += int((logits.argmax(-1).numpy()[at] == sample.token_ids.numpy()[1:][at]).sum())
        total += len(at)
    share = same / max(total, 1)
    text = f"{100 * share:.0f} % of the supervised tokens are the target's own greedy choice"
    if share < SAME_TOKENS:
        text += ": the simulation followed answers of others; regenerate them for a figure that serving will show"
    return Finding("answers", True, text)


def verdict(measured: float, simulated: float | None, findings: Sequence[Finding]) -> str:
    """One sentence: do both figures agree, and if not, which check failed."""
    if simulated is None:
        return "no simulated acceptance stands in the draft's manifest"
    line = f"measured {measured:.2f}, simulated while training {simulated:.2f}"
    failed = [f"{f.name} ({f.text})" for f in findings if not f.ok]
    if failed:
        return f"{line}: the draft was trained on wrong states: " + "; ".join(failed)
    if measured < SUSPICIOUS * simulated:
        return f"{line}: every check of the store passed; these prompts differ from what the draft was trained on"
    return f"{line}: they agree"
