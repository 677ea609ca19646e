"""Answers of the target for `regenerate`, from a server's `/v1/completions`: prompts as token ids, several requests at once.

Every parameter that decides a token is sent with every request, because servers fill in what is left out (vLLM and SGLang from the
model's generation_config.json, llama.cpp from its command line). One request before the first prompt shows whether the server takes
them, and in which form it returns tokens: as ids (vLLM: `return_token_ids`), or one by one with their log-probabilities; each is then
looked up by its bytes, which is no tokenising.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from eyas.base.errors import EngineError, InputError
from eyas.data.generators import Answer
from eyas.data.settings import Sampling
from eyas.engines.generation import CHECKED_ANSWERS, require_argmax

#: What switches off all that may stand between the model's distribution and the choice, by the names of OpenAI, vLLM, SGLang and llama.cpp.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "repeat_penalty": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "typical_p": 1.0,
    "min_tokens": 0,
    "logit_bias": {},
    "bad_words": [],
    "ignore_eos": False,
    "watermarking": False,
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
    "mirostat": 0,
}
#: Statuses that blame the request, not the server's state.
REFUSED = (400, 413, 422)


class EndpointGenerator:
    """A server that speaks OpenAI's protocol.

    Args:
        url: with or without `/v1`. model: its name there, None = the only one.
        token_of_bytes: the one token that stands for these bytes, for servers that return no ids.
        end_id: ends an answer whose server keeps the token to itself at which it stopped.
        concurrency: requests at once. attempts: tries for one request, with growing waits, where the connection or the server fails.

    Raises:
        InputError: the client library is missing, or the server serves several models and none was named.
        EngineError: the server cannot be reached, refuses what it is asked, does not return tokens, or its greedy answers are not the argmax.
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
        try:
            from openai import OpenAI
        except ImportError:
            raise InputError("--endpoint needs the openai client", "pip install 'eyas[endpoint]'") from None
        self.url = url.rstrip("/").removesuffix("/v1")
        self.sampling, self.stop_ids, self.attempts = sampling, list(stop_ids), attempts
        self.token_of_bytes, self.end_id = token_of_bytes, end_id
        self._client = OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key or "none", timeout=timeout, max_retries=attempts - 1
        )
        self.model = model or self._only_model()
        self._sent = count()
        self._ids_need_logprobs = False
        self._probe()
        self._pool = ThreadPoolExecutor(concurrency)

    @property
    def description(self) -> dict[str, Any]:
        return {"name": "endpoint", "model": self.model}

    def _only_model(self) -> str:
        names = [entry.id for entry in self._call(self._client.models.list).data]
        if len(names) != 1:
            raise InputError(f"{self.url} serves {', '.join(names) or 'no model'}", "name one with --endpoint-model")
        return names[0]

    def _call(self, call: Callable[..., Any], **body: Any) -> Any:
        """One request. Raises EngineError with the server's own words; openai.APIStatusError where it refused the request itself."""
        import openai

        try:
            return call(**body)
        except openai.APIStatusError as error:
            if error.status_code in REFUSED:
                raise
            where, said = error.request.url.path, error.response.text[:300]
            if error.status_code >= 500 or error.status_code == 429:
                raise EngineError(
                    f"{self.url}{where} failed {self.attempts} times: {error.status_code}: {said}",
                    "is the server well? Rerun the same command to resume",
                ) from None
            raise EngineError(
                f"{self.url}{where} answers {error.status_code}: {said}", "the request does not suit this server"
            ) from None
        except (openai.APIError, json.JSONDecodeError) as error:  # no connection, time-out, or no JSON
            raise EngineError(
                f"{self.url} failed {self.attempts} times: {error.__cause__ or error}",
                "is the server running? Rerun the same command to resume",
            ) from None

    def _probe(self) -> None:
        """Ask for a few tokens and see that the server takes every parameter and returns what is needed."""
        import openai

        try:
            for self._ids_need_logprobs in (False, True):
                answer = self._complete(self.stop_ids[:1] or [0], 8, 0)
                if answer is not None and answer.finish_reason.startswith("error"):
                    raise EngineError(f"{self.url}: {answer.finish_reason}", "is it a server with /v1/completions?")
                if answer is not None:
                    return
        except openai.APIStatusError as error:
            raise EngineError(
                f"{self.url} refuses what it must be asked to answer as the model does: {error.status_code}: "
                f"{error.response.text[:300]}",
                f"use a server that takes {', '.join(NEUTRAL)} and logprobs, or --engine vllm",
            ) from None
        raise EngineError(
            f"{self.url} returns neither token ids nor log-probabilities that name each token, "
            "and tokenising its text again may give other tokens than were generated",
            "use a server that honours return_token_ids or logprobs, or --engine vllm",
        )

    def answer(self, prompts: Sequence[list[int]], limits: Sequence[int], salt: int) -> list[Answer]:
        return list(self._pool.map(self._one, prompts, limits, range(salt, salt + len(prompts))))

    def _one(self, prompt: list[int], limit: int, salt: int) -> Answer:
        import openai

        try:
            answer = self._complete(prompt, limit, salt)
        except openai.APIStatusError as error:  # this prompt does not suit the server, others may
            return Answer([], f"error: the server answers {error.status_code}: {error.response.text[:300]}")
        return answer or Answer([], "error: the server's reply does not name every token")

    def _complete(self, prompt: list[int], limit: int, salt: int) -> Answer | None:
        """One answer; None where its tokens cannot be told."""
        greedy = self.sampling.temperature == 0
        check = greedy and next(self._sent) < CHECKED_ANSWERS
        body: dict[str, Any] = {
            **NEUTRAL,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": limit,
            "stop_token_ids": self.stop_ids,
            "return_token_ids": True,
        }
        if not greedy:
            body["seed"] = self.sampling.seed + salt
        if check or self._ids_need_logprobs:
            body |= {"logprobs": 1, "return_tokens_as_token_ids": True}
        reply = self._call(self._client.completions.create, model=self.model, prompt=prompt, extra_body=body)
        try:
            choice = reply.choices[0].to_dict()
            reason = str(choice["finish_reason"])
        except (AttributeError, IndexError, KeyError, TypeError):
            return Answer([], f"error: unexpected reply {str(reply)[:200]}")
        ids = returned_ids(choice, self.token_of_bytes)
        if ids is None:
            return None
        if check and ids:
            self._require_argmax(choice)
        if reason == "length" and len(ids) < limit:
            raise EngineError(
                f"{self.url} cut an answer at {len(ids)} tokens where {limit} were asked for",
                "raise the server's own limit (its context, or max_new_tokens in its generation config), or lower --max-new-tokens",
            )
        if reason == "stop" and self.end_id is not None and (not ids or ids[-1] not in self.stop_ids):
            ids = [*ids, self.end_id]
        return Answer(ids, reason)

    def _require_argmax(self, choice: dict[str, Any]) -> None:
        steps = chosen_and_best(choice.get("logprobs"))
        if steps is None:
            raise EngineError(
                f"{self.url} returns no log-probabilities, so nothing shows that its greedy answers are the argmax",
                "use a server that honours logprobs, or --engine vllm",
            )
        require_argmax(steps, self.url)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()


def returned_ids(choice: dict[str, Any], token_of_bytes: Callable[[bytes], int | None]) -> list[int] | None:
    """The token ids in one choice of a completion, in whatever form the server gives them; None where any token is not certain."""
    if isinstance(choice.get("token_ids"), list):
        return [int(token) for token in choice["token_ids"]]
    given = choice.get("logprobs") or {}
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


def chosen_and_best(logprobs: dict[str, Any] | None) -> list[tuple[float, float]] | None:
    """(log-probability of the token, best of its step) along one choice, in OpenAI's older form or the newer one; None without them."""
    found = logprobs or {}
    try:
        if isinstance(found.get("content"), list):
            return [
                (one["logprob"], max(other["logprob"] for other in one["top_logprobs"])) for one in found["content"]
            ]
        chosen, top = found["token_logprobs"], found["top_logprobs"]
        return [(one, max(others.values())) for one, others in zip(chosen, top, strict=True)]
    except (KeyError, TypeError, ValueError):
        return None
