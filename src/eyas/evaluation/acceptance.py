"""`eyas eval`: the acceptance length that a draft really reaches, with proof that nothing changed in the output.

    eyas eval --draft DRAFT --model-path TARGET --prompts word_problems_heldout

Per prompt set: every prompt is answered twice, with the draft and without it (`decode.py`). Greedy replies must be equal token by token,
or the run fails and shows the first difference; in bf16 a difference between two nearly equal logits is named a tie and ends the
comparison of that reply, not the run. Acceptance length = mean tokens emitted per verification step, **bonus token included**, the prefill's
own first token not counted. The model-free baselines (`baselines.py`) are replayed over the same replies.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.base.errors import ContractError, InputError, StoreError
from eyas.base.files import write_json
from eyas.base.manifest import differing_fields, made_by, now
from eyas.base.settings import takes
from eyas.data.prompts import PromptSet, load_prompts
from eyas.drafts.eagle3.model import Draft
from eyas.drafts.files import load_draft
from eyas.engines.transformers import sensible_threads
from eyas.evaluation import diagnosis
from eyas.evaluation.baselines import Baseline, load_baselines, replay
from eyas.evaluation.decode import Target, Trace, choose, decode
from eyas.evaluation.plot import plot
from eyas.evaluation.settings import EvalSettings
from eyas.evaluation.statistics import SetResult, Timing, joined
from eyas.evaluation.vllm import measure_vllm, put_beside, require_vllm
from eyas.target.embedded import resolve_model_path
from eyas.target.loading import load_model
from eyas.target.model_files import ModelInfo, describe_model
from eyas.target.teacher import load_target_parts
from eyas.target.tokenizer import load_tokenizer, stop_ids
from eyas.training.inputs import compute_dtype
from eyas.training.simulation import Acceptance

log = logging.getLogger(__name__)

#: Largest logit gap between best and second that still counts as a tie, by compute dtype (bf16 logits near 20 lie 0.125 apart).
TIE = {torch.float32: 2e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


@takes(EvalSettings)
def evaluate(settings: EvalSettings, *, progress: Callable[[str, int, int], None] | None = None) -> dict[str, Any]:
    """Measure a draft's acceptance by real speculative decoding.

    Args:
        settings: what to measure, and how.
        progress: called with (set, prompts done, prompts).

    Returns:
        the report: settings, `sets` (per set) and `overall`, as in `acceptance.json`.

    Raises:
        StoreError: the draft is of another target. ContractError: greedy output differs from plain decoding (the first difference).
        InputError: prompts or model not readable. EngineError: the target cannot be loaded; vLLM is asked for and missing.
    """
    if settings.engine == "vllm":
        require_vllm()
    device = find_device(settings.device)
    compute = compute_dtype(settings.dtype, device)
    if device.type == "cpu":
        torch.set_num_threads(sensible_threads())
    trust = settings.trust_remote_code
    info = describe_model(resolve_model_path(settings.model_path), settings.model_path, trust_remote_code=trust)
    draft, manifest = load_for(settings.draft, info, device, compute)
    tokenizer = load_tokenizer(settings.model_path, trust)
    sets = [load_prompts(spec, tokenizer, settings.limit, info.vocab_size) for spec in settings.prompts]
    end_ids = sorted({*stop_ids(settings.model_path), *({tokenizer.eos_token_id} - {None})})
    baselines = load_baselines(settings.ngram_data, diagnosis.store_of(manifest))

    dtype = str(compute).removeprefix("torch.")
    target = Target(load_model(info, dtype, device), draft.config.aux_layer_ids)
    run = Decoding(target, draft, settings, end_ids, torch.Generator(device).manual_seed(settings.seed))
    results = [measure(run, one, baselines.by_name, progress) for one in sets]
    report: dict[str, Any] = {
        "kind": "eyas.acceptance",
        "created": now(),
        "made_by": made_by(),
        "draft": str(settings.draft),
        "target": settings.model_path,
        "settings": {
            **{key: getattr(settings, key) for key in ("chain", "max_new_tokens", "batch_size", "temperature")},
            "dtype": dtype,
            "device": device.type,
        },
        "acceptance_length_counts": "tokens per verification step, bonus token included",
        "simulated": (manifest.get("acceptance") or {}).get("simulated"),
        "simulated_chain": (manifest.get("acceptance") or {}).get("chain"),
        "ngram_tokens": baselines.tokens,
        "sets": {r.name: r.summary(settings.seed) for r in results},
        "overall": joined(results).summary(settings.seed),
    }
    findings, unchecked = diagnosis.check_store(
        manifest, target, info, tokenizer, end_ids, wanted=settings.diagnose, damage=baselines.damage
    )
    report["diagnosis"] = diagnosis.conclude(report, findings, unchecked)
    if settings.engine == "vllm":
        target.close()  # vLLM wants the memory
        del draft, run
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        report["vllm"] = measure_vllm(settings, info.path, sets, end_ids, dtype=dtype)
        for name, figures in report["vllm"].items():
            del figures["replies"]
            put_beside(figures, report["sets"][name])
    write_report(report, settings.output)
    return report


def write_report(report: dict[str, Any], directory: Path) -> None:
    """`acceptance.json` and `acceptance.svg`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "acceptance.json", report)
    (directory / "acceptance.svg").write_text(plot(report), encoding="utf-8")


def find_device(name: str) -> torch.device:
    """`auto`: the GPU where there is one. Raises InputError for one that is not there."""
    try:
        found = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.zeros(1, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {name} cannot be used: {reason}", "give auto, cpu or cuda") from None
    return found


def load_for(draft: Path, info: ModelInfo, device: torch.device, compute: torch.dtype) -> tuple[Draft, dict[str, Any]]:
    """Load a draft for running beside its target. Raises StoreError when it was trained for another one."""
    model, manifest = load_draft(draft, load_target_parts(info).embedding)
    have = {k: manifest["target"].get(k) for k in ("config_hash", "weights_hash")}
    lines = differing_fields(have, {k: getattr(info, k) for k in have})
    if lines:
        raise StoreError(
            f"{draft} was trained for {manifest['target'].get('id')}, not for {info.id}:\n  " + "\n  ".join(lines),
            "give --model-path the draft's own target",
        )
    model.compute_dtype = compute
    return model.to(device).eval(), manifest


@dataclass(frozen=True)
class Decoding:
    """A target and its draft, ready to answer. end_ids: any of these ends a reply."""

    target: Target
    draft: Draft
    settings: EvalSettings
    end_ids: Sequence[int]
    generator: torch.Generator

    def __call__(self, prompts: Sequence[Sequence[int]], draft: Draft | None) -> tuple[list[Trace], float]:
        return decode(
            self.target,
            draft,
            prompts,
            k=self.settings.chain if draft is not None else 0,
            max_new_tokens=self.settings.max_new_tokens,
            end_ids=self.end_ids,
            temperature=self.settings.temperature,
            generator=self.generator,
        )


def measure(
    run: Decoding,
    prompt_set: PromptSet,
    baselines: dict[str, Baseline],
    progress: Callable[[str, int, int], None] | None = None,
) -> SetResult:
    """Answer one prompt set with the draft and without, compare, and replay the baselines. Raises as `evaluate`."""
    settings, prompts = run.settings, prompt_set.prompts
    result = SetResult(prompt_set.name, baselines={name: [] for name in baselines})
    for at in range(0, len(prompts), settings.batch_size):
        batch = prompts[at : at + settings.batch_size]
        traces, spent = run(batch, run.draft)
        alone: list[Trace] = []
        plain_seconds = 0.0
        if settings.plain is None or at < settings.plain:
            alone, plain_seconds = run(batch, None)
        result.timings.append(Timing(count_emitted(traces), spent, count_emitted(alone), plain_seconds))
        for i, trace in enumerate(traces if settings.temperature == 0 else []):
            other = alone[i] if alone else greedy_reading(run.target, batch[i], trace)
            tie = compare(
                trace, other, f"{prompt_set.name}, prompt {at + i + 1}", TIE.get(run.draft.compute_dtype, 0.0)
            )
            result.compared += 1
            if tie:
                result.ties.append(tie)
        for prompt, trace in zip(batch, traces, strict=True):
            accepted = np.array(trace.accepted, dtype=np.int64)
            by_place = np.array([(accepted > place).sum() for place in range(settings.chain)], np.int64)
            result.acceptance.append(Acceptance(len(trace.emitted), sum(trace.emitted), by_place))
            result.behind += trace.behind
            for name, baseline in baselines.items():
                result.baselines[name].append(replay(baseline, prompt, trace.tokens, settings.chain))
        if progress is not None:
            progress(prompt_set.name, min(at + settings.batch_size, len(prompts)), len(prompts))
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
    logits, _ = target.read([*prompt, *trace.tokens])
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
    both = f"token {at + 1} is {speculative.tokens[at : at + 1]} with the draft, {plain.tokens[at : at + 1]} without"
    if gap <= tie:
        return f"{where}: {both}; a tie (logit gap {gap:.4f})"
    raise ContractError(
        f"greedy speculative decoding changed the output: {where}, {both}, with a logit gap of {gap:.4f}",
        f"this must not happen above {tie} in this dtype; please report it with the draft and the prompt",
    )
