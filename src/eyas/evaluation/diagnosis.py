"""Why a draft accepts less than its training promised: the store it was trained on, compared with the target itself.

`eyas eval` compares the acceptance it measures with the one simulated while training, and runs these checks wherever the store still exists.
Each names the fault it would find: states of other layers than their ids say, a target state that is not what enters the final norm (or
another norm or head), a loss mask shifted by a token. Measured and simulated figures alone tell too little: a neighbouring layer costs
few tokens, a shifted mask none that one would see, and a wrong norm spoils the simulation itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.base.errors import StoreError
from eyas.base.manifest import MANIFEST
from eyas.base.masks import runs
from eyas.evaluation.decode import Target
from eyas.gates.evidence import row_relative_l2
from eyas.store.reader import States, StateSample, open_states
from eyas.target.layers import describe_layer
from eyas.target.model_files import ModelInfo
from eyas.target.teacher import TargetParts, Teacher, final_norm, load_target_parts

#: A draft that reaches less than this share of its simulated acceptance length does not do what its training promised; what lies between,
#: other prompts alone may explain.
SUSPICIOUS = 0.85
#: Rebuilt next tokens must equal the model's own at this share of positions (bf16 prefill: 98.5 %, ties between runs included).
SAME_TOKENS = 0.9
#: Largest relative distance of a stored layer to a fresh one (bf16 and fp8 stores of dense models: below 0.05).
FAR = 0.3
#: The check that fails when the store's bytes are not those that were written; then no other is made.
CONTENT = "content"
#: A sample is read up to here: attention is causal, so the states of its beginning are the same, and memory stays small.
MOST_TOKENS = 512


@dataclass(frozen=True)
class Finding:
    """One check: `ok`, and a sentence with the figures."""

    name: str
    ok: bool
    text: str


@dataclass(frozen=True)
class Probe:
    """One stored sample beside a fresh pass over its first T tokens.

    distances: stored id -> relative L2 to each fresh layer 0..N. to_normed: of the stored target state to the fresh one *after* the norm.
    rebuilt, choices: [T] next tokens from the stored target state, and by the model itself. token_ids, loss_mask: [T].
    """

    distances: dict[int, list[float]]
    to_normed: float
    rebuilt: np.ndarray
    choices: np.ndarray
    token_ids: np.ndarray
    loss_mask: np.ndarray


def store_of(manifest: dict[str, Any]) -> Path | None:
    """The store that a draft was trained on, by the draft's manifest; None where none is named or it is not there any more."""
    path = (manifest.get("store") or {}).get("path")
    return Path(path) if path and (Path(path) / MANIFEST).exists() else None


def check_store(
    manifest: dict[str, Any],
    target: Target,
    info: ModelInfo,
    tokenizer: Any,
    end_ids: Sequence[int],
    *,
    wanted: bool = True,
    damage: str | None = None,
) -> tuple[list[Finding], str | None]:
    """The checks of the store that a draft was trained on, and why there are none, if there are none.

    manifest: the draft's. target: loaded. damage: what was found wrong with the store's content before.
    """
    named, store = (manifest.get("store") or {}).get("path"), store_of(manifest)
    if damage:
        return [Finding(CONTENT, False, damage)], None
    if not named:
        return [], "the draft names no store"
    if not wanted:
        return [], "the store was not to be checked"
    if store is None:
        return [], f"its store {named} is not there any more"
    try:
        states = open_states(store)
        if states.manifest["dataset"]["hash"] != manifest.get("dataset_hash"):
            return [], f"{store} holds other samples now than those it was trained on"
        every = Target(target.model, range(info.num_layers + 1))
        prompt_end = generation_prompt(tokenizer)
        findings = diagnose(states, every, load_target_parts(info), end_ids, prompt_end=prompt_end, experts=info.is_moe)
        every.close()
        return findings, None
    except StoreError as error:  # the draft was measured all the same
        return [Finding(CONTENT, False, error.what)], None


def conclude(report: dict[str, Any], findings: Sequence[Finding], unchecked: str | None) -> dict[str, Any]:
    """The part `diagnosis` of a report: the measured figure against the simulated one, and the checks."""
    pair = comparable(report)
    return {
        "verdict": verdict(pair, findings, unchecked, why_incomparable(report)),
        "agree": None if pair is None else judge(pair)[0],
        "checks": [{"name": f.name, "ok": f.ok, "text": f.text} for f in findings],
    }


def diagnose(
    states: States,
    target: Target,
    parts: TargetParts,
    end_ids: Sequence[int],
    *,
    prompt_end: Sequence[int] = (),
    experts: bool = False,
    samples: int = 6,
) -> list[Finding]:
    """Compare stored samples with a fresh forward pass of the target.

    Args:
        states: the store the draft was trained on. target: the loaded model; `target.layer_ids` must be 0..N.
        parts: final norm and head. end_ids: tokens that end a reply. prompt_end: those that stand before each answer (`generation_prompt`).
        experts: a mixture of experts, whose states in low precision may lie far apart and still be the right ones.
    """
    chosen = [states[int(i)] for i in np.linspace(0, len(states) - 1, min(samples, len(states))).astype(int)]
    teacher = Teacher(parts, torch.zeros(1, dtype=torch.int64), target.device, torch.float32)
    probes = [probe(sample, target, teacher) for sample in chosen]
    final = len(target.layer_ids) - 1
    return [
        check_layers(probes, [i for i in states.layer_ids if i != final], final, far=float("inf") if experts else FAR),
        check_teacher(probes, final, far=float("inf") if experts else FAR),
        check_mask(states, end_ids, prompt_end),
        check_answers(probes),
    ]


@torch.no_grad()
def probe(sample: StateSample, target: Target, teacher: Teacher) -> Probe:
    """Read a stored sample's beginning with the target anew."""
    T = min(len(sample.token_ids), MOST_TOKENS)
    logits, stream = target.read(sample.token_ids[:T].tolist())
    fresh = list(stream[0].float().chunk(len(target.layer_ids), -1))
    final = len(fresh) - 1
    stored = {i: state[:T].to(target.device).float() for i, state in sample.hidden.items()}
    return Probe(
        distances={i: [row_relative_l2(state, other) for other in fresh] for i, state in stored.items()},
        to_normed=row_relative_l2(stored[final], final_norm(fresh[final], teacher.parts)),
        rebuilt=teacher.argmax(stored[final]).cpu().numpy(),
        choices=logits[0].argmax(-1).cpu().numpy(),
        token_ids=sample.token_ids[:T].numpy(),
        loss_mask=sample.loss_mask[:T].numpy(),
    )


def generation_prompt(tokenizer: Any) -> list[int]:
    """The tokens that the chat template puts before an answer; empty without a template, or where they cannot be seen."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    message = [{"role": "user", "content": "a"}]
    without, with_prompt = (
        list(tokenizer.apply_chat_template(message, add_generation_prompt=flag, tokenize=True, return_dict=False))
        for flag in (False, True)
    )
    return [int(t) for t in with_prompt[len(without) :]] if with_prompt[: len(without)] == without else []


def check_layers(probes: Sequence[Probe], aux: Sequence[int], final: int, far: float = FAR) -> Finding:
    """Each stored auxiliary layer must lie nearest to the fresh layer of its own id."""
    wrong, distant, worst = [], [], 0.0
    for i in aux:
        distances = np.mean([p.distances[i] for p in probes], 0)
        nearest = int(np.argmin(distances))
        worst = max(worst, float(distances[i]))
        if distances[nearest] < distances[i]:
            wrong.append(f"layer {describe_layer(i, final)} holds the states of layer {describe_layer(nearest, final)}")
        elif not distances[i] <= far:
            distant.append(
                f"layer {describe_layer(i, final)} is {distances[i]:.2f} (relative) away from the target's own"
            )
    if wrong or distant:
        return Finding("layer ids", False, "; ".join(wrong + distant))
    return Finding("layer ids", True, f"every layer is nearest to its own id, worst relative distance {worst:.1e}")


def check_teacher(probes: Sequence[Probe], final: int, far: float = FAR) -> Finding:
    """The stored target state must be what enters the final norm, and norm and head must rebuild the model's own next tokens from it."""
    share = float(np.mean([np.mean(p.rebuilt == p.choices) for p in probes]))
    distances = np.mean([p.distances[final] for p in probes], 0)
    nearest, own = int(np.argmin(distances)), float(distances[final])
    text = f"rebuilt next tokens equal the model's at {100 * share:.1f} % of positions"
    if float(np.mean([p.to_normed for p in probes])) <= min(FAR, 0.5 * own):
        return Finding("final norm and head", False, f"the target state was stored after the final norm ({text})")
    if distances[nearest] < own:
        what = f"the target state is that of layer {describe_layer(nearest, final)}"
        return Finding("final norm and head", False, f"{what} ({text})")
    if share < SAME_TOKENS or not own <= far:
        what = "the target state is not what enters the final norm, or norm kind or head are others"
        return Finding("final norm and head", False, f"{text}: {what} (relative distance {own:.2f})")
    return Finding("final norm and head", True, text)


def check_mask(states: States, end_ids: Sequence[int], prompt_end: Sequence[int] = (), samples: int = 200) -> Finding:
    """Answers begin behind the generation prompt and end with an end token: where masks lie one token beside that, they are shifted.

    The beginning decides where the template shows it: a mask may leave the turn's end out on purpose, or take a newline behind it in.
    """
    starts: Counter[int] = Counter()  # how far the mask begins behind the place where the answer begins
    ends: Counter[int] = Counter()  # how far the mask ends behind the end token
    before = list(prompt_end)[-4:]
    for index in range(min(samples, len(states))):
        token_ids, loss_mask = states.tokens(index)
        ids, mask = token_ids.tolist(), loss_mask.numpy().astype(np.int8)
        for begin, end in runs(mask):
            if begin == 0:  # everything is supervised: there is no answer's place to miss
                continue
            for late in (0, 1, -1):
                at = begin - late
                if before and at >= len(before) and ids[at - len(before) : at] == before:
                    starts[late] += 1
                    break
            for late in (0, 1, -1):
                if 0 <= end - 1 - late < len(ids) and ids[end - 1 - late] in end_ids:
                    ends[late] += 1
                    break
    late, count, total = _most(ends)
    if sum(starts.values()):
        side, agreeing, seen = _most(starts)
        if side:
            return Finding("loss mask", False, f"{agreeing} of {seen} masks begin one token too {_side(side)}")
        note = "" if not total or not late else ", and do not stop at the end token, as it seems by choice"
        return Finding("loss mask", True, f"{agreeing} of {seen} masks begin with the answer{note}")
    if not total:
        return Finding("loss mask", True, "no answer shows where it begins or ends, so a shift would not be seen")
    if late == 0:
        return Finding("loss mask", True, f"{count} of {total} answers end with their end token supervised")
    what = "the end token is not supervised" if late < 0 else "a token behind the end token is supervised"
    return Finding("loss mask", False, f"{count} of {total} masks stop one token too {_side(late)}: {what}")


def _most(places: Counter[int]) -> tuple[int, int, int]:
    """The most frequent place, how often, and of how many."""
    place, count = places.most_common(1)[0] if places else (0, 0)
    return place, count, sum(places.values())


def _side(late: int) -> str:
    return "late" if late > 0 else "early"


def check_answers(probes: Sequence[Probe]) -> Finding:
    """How often the supervised tokens are what the target itself would say (greedy answers: nearly always)."""
    same = total = 0
    for p in probes:
        at = np.flatnonzero(p.loss_mask[1:])
        same += int((p.choices[at] == p.token_ids[1:][at]).sum())
        total += len(at)
    if not total:
        return Finding("answers", True, "no supervised token within the samples' beginnings")
    share = same / total
    text = f"{100 * share:.0f} % of the supervised tokens are the target's own greedy choice"
    if share < SAME_TOKENS:
        text += ": the simulation followed answers of others; regenerate them for a figure that serving will show"
    return Finding("answers", True, text)


@dataclass(frozen=True)
class Comparison:
    """Measured and simulated acceptance length of one and the same chain. low, high: 95 % interval of the measured one, None for a single prompt."""

    measured: float
    simulated: float
    low: float | None
    high: float | None
    prompts: int

    def __str__(self) -> str:
        one = "1 prompt" if self.prompts == 1 else f"{self.prompts} prompts"
        spread = one if self.low is None else f"95 %: {self.low:.2f} to {self.high:.2f}, {one}"
        return f"measured {self.measured:.2f} ({spread}), simulated while training {self.simulated:.2f}"


def comparable(report: dict[str, Any]) -> Comparison | None:
    """The two acceptance lengths of an `eyas eval` report, for one and the same chain; None without a simulated one, or when sampling.

    Where the chains differ, both are those of the shorter one: 1 + the acceptance rates of its places.
    """
    simulated, overall = report["simulated"], report["overall"]
    if not simulated or report["settings"]["temperature"] > 0 or overall["acceptance_length"] is None:
        return None
    chain, theirs = report["settings"]["chain"], report.get("simulated_chain")
    length, interval = overall["acceptance_length"], overall["interval_95"]
    expected = simulated["acceptance_length"]
    if theirs is not None and theirs != chain:
        places = min(chain, theirs)
        length, interval = 1 + sum(overall["by_position"][:places]), overall["interval_95_by_chain"][places - 1]
        expected = 1 + sum(simulated["by_position"][:places])
    low, high = interval
    return Comparison(length, expected, low, high, overall["prompts"])


def why_incomparable(report: dict[str, Any]) -> str:
    """Why `comparable` has no pair of an `eyas eval` report."""
    if not report["simulated"]:
        return "the draft has no simulated acceptance (it was imported, or trained without an evaluation)"
    if report["settings"]["temperature"] > 0:
        return "the simulation is greedy, and this was sampled"
    return "nothing was measured"


def judge(pair: Comparison) -> tuple[bool | None, str]:
    """Whether the draft does what its training promised, as far as the measured interval tells, and that in words.

    True: the interval holds the simulated figure and leaves no room for a suspicious one, or lies above. False: it lies below. None: too
    few prompts to tell.
    """
    measured, simulated, low, high = pair.measured, pair.simulated, pair.low, pair.high
    if low is None or high is None:
        return None, "one prompt has no interval, so nothing can be said of the difference"
    if low > simulated:
        return True, "more than simulated"
    if high < simulated:
        less = f"{100 * (1 - measured / simulated):.0f} % less than simulated"
        return (
            False,
            "they disagree" if measured < SUSPICIOUS * simulated else f"{less}, and the interval does not hold it",
        )
    if low < SUSPICIOUS * simulated:
        return None, "the interval holds it, but is too wide to tell: measure more prompts"
    return True, "they agree: the interval holds it"


def verdict(
    pair: Comparison | None,
    findings: Sequence[Finding],
    unchecked: str | None = None,
    incomparable: str = "there is no simulated figure",
) -> str:
    """One sentence: do the figures agree, and which check of the store failed.

    Args:
        pair: measured and simulated length, from `comparable`. unchecked: why no check ran, if none did.
        incomparable: why there is no pair, from `why_incomparable`.
    """
    agree, line = None, f"no comparison: {incomparable}"
    if pair is not None:
        agree, words = judge(pair)
        line = f"{pair}: {words}"
    failed = [f"{f.name} ({f.text})" for f in findings if not f.ok]
    if failed:
        damaged = all(f.name == CONTENT for f in findings if not f.ok)
        what = "its store is damaged now" if damaged else "the draft was trained on wrong data"
        return f"{line}; {what}, this check of its store fails: {'; '.join(failed)}"
    if agree is not False:
        return f"{line}; {f'no check ran, {unchecked}' if unchecked else 'every check of the store passed'}"
    if unchecked:
        return f"{line}, and the reason is not known: no check ran, {unchecked}"
    return f"{line}; every check of the store passed; these prompts differ from what the draft was trained on"
