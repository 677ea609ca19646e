"""`eyas eval`: the acceptance length that a draft really reaches, with proof that nothing changed in the output.

    eyas eval --draft DRAFT --model-path TARGET --prompts word_problems_heldout

Per prompt set: every prompt is answered twice, plainly and speculatively (`speculation.py`). Greedy replies must be equal token by token,
or the run fails and shows the first difference; in bf16 a difference between two nearly equal logits is named a tie and ends the
comparison of that reply, not the run. Acceptance length = mean tokens emitted per verification step, **bonus token included**, the prefill's
own first token not counted. The guessers without a network (`baselines.py`) are replayed over the same replies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.base.errors import ContractError, FolderConflictError, InputError, StoreError
from eyas.base.files import write_json
from eyas.base.manifest import MANIFEST, differing_fields, made_by, now
from eyas.data.prompts import PromptSet, load_prompts
from eyas.drafts.eagle3.model import Draft
from eyas.drafts.files import load_draft
from eyas.engines.packed_attention import avoid_cudnn_attention
from eyas.engines.transformers import sensible_threads
from eyas.evaluation.baselines import Guesser, NgramTable, lookup_then_table, prompt_lookup, replay
from eyas.evaluation.decode import Target, Trace, choose, decode
from eyas.evaluation.statistics import SetResult, Timing, joined
from eyas.target.embedded import resolve_model_path
from eyas.target.model_files import ModelInfo, describe_model
from eyas.target.teacher import load_target_parts
from eyas.training.settings import compute_dtype
from eyas.training.simulation import Acceptance
from eyas.views.acceptance_plot import plot

log = logging.getLogger(__name__)

#: Largest logit gap between best and second that still counts as a tie, by compute dtype (bf16 logits near 20 lie 0.125 apart).
TIE = {torch.float32: 2e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


def evaluate(
    draft: str | Path,
    model_path: str,
    prompts: Sequence[str],
    *,
    chain: int = 5,
    max_new_tokens: int = 256,
    batch_size: int = 1,
    limit: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "auto",
    plain: int | None = None,
    ngram_data: str | Path | None = None,
    output: str | Path | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    diagnose: bool | None = None,
    engine: str = "transformers",
) -> dict[str, Any]:
    """Measure a draft's acceptance by real speculative decoding.

    Args:
        draft: an eyas draft folder. model_path: its target. prompts: see `prompts.load_prompts`.
        chain: guesses per verification step. limit: at most so many prompts per set. temperature: 0 is greedy.
        dtype: float32 (exactly lossless), bfloat16 or auto. plain: how many prompts per set are also decoded plainly, for the speed and the
            lossless check (None: all); the other greedy replies are checked by one forward pass over each.
        ngram_data: a state store or token dataset whose replies the n-gram baseline is counted on; default: the draft's own store.
        output: folder for `acceptance.json` and `acceptance.svg`.
        progress: called with (set, prompts done, prompts).
        engine: `vllm` also serves the exported draft by real vLLM on the same prompts (greedy) and puts its figures beside ours.
        diagnose: hold the store that the draft was trained on against the target (a few forward passes); None: wherever it still exists.

    Returns:
        the report: settings, `sets` (per set) and `overall`, as in `acceptance.json`.

    Raises:
        StoreError: the draft is of another target. ContractError: greedy output differs from plain decoding (the first difference).
        FolderConflictError: output is a file. InputError: prompts or model not readable, a setting out of range, two sets of one name. EngineError: vLLM is asked for and missing.
    """
    check_options(chain, max_new_tokens, batch_size, limit, temperature, plain, engine)
    if output is not None and Path(output).exists() and not Path(output).is_dir():
        raise FolderConflictError(f"{output} is a file, expected a folder", "name another --output-dir")
    place = find_device(device)
    folder = resolve_model_path(model_path)
    info = describe_model(folder, model_path, trust_remote_code=trust_remote_code)
    compute = compute_dtype(dtype, place)
    if place.type == "cpu":
        torch.set_num_threads(sensible_threads())
    from eyas.target.tokenizer import load_tokenizer

    model, manifest = load_for(draft, info, place, compute)
    tokenizer = load_tokenizer(model_path, trust_remote_code)
    sets = load_sets(prompts, tokenizer, limit)
    store = _store_path(manifest)
    guessers, damage = baseline_guessers(ngram_data, store)
    target = load_model(info, model.config.aux_layer_ids, place, compute, trust_remote_code)
    end_ids = end_tokens(target.model, tokenizer)
    results = []
    for one in sets:
        found = measure(
            target,
            model,
            one,
            chain=chain,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            temperature=temperature,
            generator=torch.Generator(place).manual_seed(seed),
            end_ids=end_ids,
            plain=plain,
            guessers=guessers,
            progress=progress,
        )
        results.append(found)
    report: dict[str, Any] = {
        "kind": "eyas.acceptance",
        "created": now(),
        "made_by": made_by(),
        "draft": str(draft),
        "target": model_path,
        "settings": {
            "chain": chain,
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "temperature": temperature,
            "dtype": str(compute).removeprefix("torch."),
            "device": place.type,
        },
        "acceptance_length_counts": "tokens per verification step, bonus token included",
        "simulated": (manifest.get("acceptance") or {}).get("simulated"),
        "simulated_chain": (manifest.get("acceptance") or {}).get("chain"),
        "sets": {r.name: r.summary(seed) for r in results},
        "overall": joined(results).summary(seed),
    }
    if engine == "vllm":
        from eyas.evaluation.vllm import measure_vllm

        name = str(compute).removeprefix("torch.")
        served = measure_vllm(draft, folder, sets, chain=chain, max_new_tokens=max_new_tokens, dtype=name)
        for one_name, figures in served.items():
            del figures["replies"]
            put_beside(figures, report["sets"][one_name])
        report["vllm"] = served
    report["diagnosis"] = explain(report, manifest, target, info, tokenizer, end_ids, diagnose, damage)
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
        write_json(Path(output) / "acceptance.json", report)
        (Path(output) / "acceptance.svg").write_text(plot(report), encoding="utf-8")
    return report


def check_options(
    chain: int,
    max_new_tokens: int,
    batch_size: int,
    limit: int | None,
    temperature: float,
    plain: int | None,
    engine: str,
) -> None:
    """Refuse settings out of range, before anything is loaded. Raises as `evaluate`."""
    wrong = [
        (chain < 1, f"--chain {chain}", "at least 1"),
        (
            max_new_tokens < 2,
            f"--max-new-tokens {max_new_tokens}",
            "at least 2: the first token comes from the prefill",
        ),
        (batch_size < 1, f"--batch-size {batch_size}", "at least 1"),
        (limit is not None and limit < 1, f"--limit {limit}", "at least 1"),
        (not 0 <= temperature < float("inf"), f"--temperature {temperature}", "0 (greedy) or above"),
        (plain is not None and plain < 0, f"--plain {plain}", "0 or more"),
    ]
    for bad, what, want in wrong:
        if bad:
            raise InputError(f"{what} is out of range", f"give {want}")
    if engine not in ("transformers", "vllm"):
        raise InputError(f"unknown engine {engine!r}", "--engine is transformers or vllm")
    if engine == "vllm":
        if temperature > 0:
            raise InputError(
                f"--engine vllm decodes greedily, --temperature {temperature} would not be comparable",
                "leave --temperature at 0, or --engine out",
            )
        from eyas.evaluation.vllm import require_vllm

        require_vllm()


def find_device(name: str) -> torch.device:
    """`auto`: the GPU where there is one. Raises InputError for one that is not there."""
    try:
        found = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.zeros(1, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {name} cannot be used: {reason}", "give auto, cpu or cuda") from None
    return found


def load_sets(specs: Sequence[str], tokenizer: Any, limit: int | None) -> list[PromptSet]:
    """Every prompt set. Raises InputError when two have one name: one would hide the other in the report."""
    sets = [load_prompts(spec, tokenizer, limit) for spec in specs]
    names = [one.name for one in sets]
    twice = [spec for spec, name in zip(specs, names, strict=True) if names.count(name) > 1]
    if twice:
        raise InputError(f"prompt sets of one name: {', '.join(twice)}", "name them: --prompts gsm8k=PATH mtbench=PATH")
    return sets


def _store_path(manifest: dict[str, Any]) -> str | None:
    """The store that a draft was trained on, by the draft's manifest."""
    return (manifest.get("store") or {}).get("path")


def explain(
    report: dict[str, Any],
    manifest: dict[str, Any],
    target: Target,
    info: ModelInfo,
    tokenizer: Any,
    end_ids: Sequence[int],
    wanted: bool | None,
    damage: str | None = None,
) -> dict[str, Any]:
    """The measured figure against the simulated one, and the checks of the store that the draft was trained on.

    damage: what was found wrong with the store's content before.
    """
    from eyas.evaluation import diagnosis
    from eyas.store.reader import open_states

    findings = [diagnosis.Finding(diagnosis.CONTENT, False, damage)] if damage else []
    store = _store_path(manifest)
    unchecked = None
    if not store:
        unchecked = "the draft names no store"
    elif wanted is False:
        unchecked = "the store was not to be checked"
    elif not (Path(store) / MANIFEST).exists():
        unchecked = f"its store {store} is not there any more"
    elif not damage:
        try:
            states = open_states(store)
            if states.manifest["dataset"]["hash"] != manifest.get("dataset_hash"):
                unchecked = f"{store} holds other samples now than those it was trained on"
            else:
                findings = diagnosis.diagnose(
                    states,
                    Target(target.model, range(info.num_layers + 1)),
                    load_target_parts(info),
                    end_ids,
                    prompt_end=diagnosis.generation_prompt(tokenizer),
                    experts=info.is_moe,
                )
        except StoreError as error:  # the draft was measured all the same
            findings = [diagnosis.Finding(diagnosis.CONTENT, False, error.what)]
    pair = diagnosis.comparable(report)
    return {
        "verdict": diagnosis.verdict(pair, findings, unchecked, diagnosis.why_incomparable(report)),
        "agree": None if pair is None else diagnosis.judge(pair)[0],
        "checks": [{"name": f.name, "ok": f.ok, "text": f.text} for f in findings],
    }


def put_beside(served: dict[str, Any], ours: dict[str, Any]) -> None:
    """Complete vLLM's figures of a set by their ratio to ours: as reported, and with ours counted by vLLM's rule.

    vLLM also counts guesses accepted behind the end of a reply; ours, counted so, is 1 + all accepted guesses / rounds.
    """
    served["ratio_to_ours"] = round(served["acceptance_length"] / ours["acceptance_length"], 4)
    likewise = 1 + ours["accepted_guesses"] / ours["rounds"] + ours["accepted_behind_the_end"] / ours["rounds"]
    served["ours_by_its_rule"] = round(likewise, 4)
    served["ratio_by_its_rule"] = round(served["acceptance_length"] / likewise, 4)


def load_for(
    draft: str | Path, info: ModelInfo, device: torch.device, compute: torch.dtype
) -> tuple[Draft, dict[str, Any]]:
    """Load a draft for running beside its target. Raises StoreError when it was trained for another one."""
    parts = load_target_parts(info)
    model, manifest = load_draft(draft, parts.embedding)
    have = {k: manifest["target"].get(k) for k in ("config_hash", "weights_hash")}
    lines = differing_fields(have, {k: getattr(info, k) for k in have})
    if lines:
        raise StoreError(
            f"{draft} was trained for {manifest['target'].get('id')}, not for {info.id}:\n  " + "\n  ".join(lines),
            "give --model-path the draft's own target",
        )
    model.compute_dtype = compute
    return model.to(device).eval(), manifest


def load_model(info: ModelInfo, aux: Sequence[int], device: torch.device, compute: torch.dtype, trust: bool) -> Target:
    """Load the target in transformers, ready to hand out its auxiliary states."""
    from transformers import AutoModelForCausalLM

    avoid_cudnn_attention(device)
    model = AutoModelForCausalLM.from_pretrained(info.path, dtype=compute, trust_remote_code=trust)
    model = model.eval()
    torch.nn.Module.to(model, device)  # the class narrows `to` in its own signature
    return Target(model, aux)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a reply: the generation config's and the tokenizer's."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, (list, tuple)) else set() if ids is None else {int(ids)}
    return sorted(found)


def baseline_guessers(
    data: str | Path | None, store: str | Path | None = None
) -> tuple[dict[str, Guesser], str | None]:
    """Prompt lookup always; n-gram and both together when there are replies to count.

    Args:
        data: a store or a dataset; default: `store`, the draft's own, if it still is there.

    Returns:
        name -> guesser, and what is wrong with the draft's own store: then it is not counted, and the draft is measured all the same.

    Raises:
        StoreError: `data` is damaged, or neither store nor dataset.
    """
    guessers: dict[str, Guesser] = {"prompt lookup": prompt_lookup}
    if data is None and (store is None or not (Path(store) / MANIFEST).exists()):
        return guessers, None
    try:
        table = NgramTable(read_replies(Path(data or store or "")))
    except StoreError as error:
        if data is not None:
            raise
        return guessers, error.what
    return {**guessers, "n-gram": table, "lookup, then n-gram": lookup_then_table(table)}, None


def read_replies(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """(token_ids, loss_mask) of every sample of a state store or a token dataset.

    Raises:
        StoreError: it is neither, or a sample is not what was written.
    """
    from eyas.data.dataset import open_dataset
    from eyas.store.reader import open_states
    from eyas.views.dataset_view import is_dataset

    if is_dataset(path):
        return [(s.token_ids, s.loss_mask) for s in open_dataset(path)]
    states = open_states(path)
    return [(ids.numpy().copy(), mask.numpy().copy()) for ids, mask in map(states.tokens, range(len(states)))]


def measure(
    target: Target,
    draft: Draft,
    prompt_set: PromptSet,
    *,
    chain: int,
    max_new_tokens: int,
    batch_size: int = 1,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    end_ids: Sequence[int] = (),
    plain: int | None = None,
    guessers: dict[str, Guesser] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> SetResult:
    """Answer one prompt set speculatively (and plainly), compare, and replay the baselines. Raises as `evaluate`."""
    result = SetResult(prompt_set.name, baselines={name: [] for name in guessers or {}})
    for at in range(0, len(prompt_set.prompts), batch_size):
        prompts = prompt_set.prompts[at : at + batch_size]
        common: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "end_ids": end_ids,
            "temperature": temperature,
            "generator": generator,
        }
        traces, spent = decode(target, draft, prompts, k=chain, **common)
        alone: list[Trace] = []
        plain_seconds = 0.0
        if plain is None or at < plain:
            alone, plain_seconds = decode(target, None, prompts, k=0, **common)
        result.timings.append(Timing(count_emitted(traces), spent, count_emitted(alone), plain_seconds))
        for i, trace in enumerate(traces if temperature == 0 else []):
            other = alone[i] if alone else greedy_reading(target, prompts[i], trace)
            tie = compare(trace, other, f"{prompt_set.name}, prompt {at + i + 1}", TIE.get(draft.compute_dtype, 0.0))
            result.compared += 1
            if tie:
                result.ties.append(tie)
        for prompt, trace in zip(prompts, traces, strict=True):
            accepted = np.array(trace.accepted, dtype=np.int64)
            by_place = np.array([(accepted > place).sum() for place in range(chain)], np.int64)
            result.acceptance.append(Acceptance(len(trace.emitted), sum(trace.emitted), by_place))
            result.behind += trace.behind
            for name, guess in (guessers or {}).items():
                result.baselines[name].append(replay(guess, prompt, trace.tokens, chain))
        if progress is not None:
            progress(prompt_set.name, min(at + batch_size, len(prompt_set.prompts)), len(prompt_set.prompts))
    return result


def count_emitted(traces: Sequence[Trace]) -> int:
    """Tokens of the replies, the prefill's own first ones not counted."""
    return sum(sum(trace.emitted) for trace in traces)


@torch.no_grad()
def greedy_reading(target: Target, prompt: Sequence[int], trace: Trace) -> Trace:
    """The target's greedy choice after each token of prompt and reply, in one forward pass.

    If every token of the reply is the choice after those before it, the reply *is* what plain greedy decoding gives, by induction; the
    first that is not is where plain decoding would have left it.
    """
    from transformers import DynamicCache

    ids = torch.tensor([[*prompt, *trace.tokens]], device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device).unsqueeze(0)
    logits, _ = target(ids, positions, positions, DynamicCache())
    choices, gaps = choose(logits[:, len(prompt) - 1 : -1], 0.0, None)
    return Trace(tokens=choices[0].tolist(), gaps=gaps[0].tolist())


def compare(speculative: Trace, plain: Trace, where: str, tie: float) -> str | None:
    """None when both replies are equal, a line when they part at a tie.

    Raises:
        ContractError: they part where the target was not undecided: speculative decoding is not lossless here.
    """
    if speculative.tokens == plain.tokens:
        return None
    pairs = list(zip(speculative.tokens, plain.tokens, strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    gap = min(t.gaps[at] for t in (speculative, plain) if at < len(t.gaps))
    both = f"token {at + 1} is {speculative.tokens[at : at + 1]} speculatively, {plain.tokens[at : at + 1]} plainly"
    if gap <= tie:
        return f"{where}: {both}; a tie (logit gap {gap:.4f})"
    raise ContractError(
        f"greedy speculative decoding changed the output: {where}, {both}, with a logit gap of {gap:.4f}",
        f"this must not happen above {tie} in this dtype; please report it with the draft and the prompt",
    )
