"""What `regenerate` asks of whoever answers: prompts go in as token ids, answers come out as token ids, exactly as generated.

The engines that do it stand in `eyas.engines`: `generation` (transformers and vLLM in this process) and `endpoint` (a server).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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
