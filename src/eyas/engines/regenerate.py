"""`eyas regenerate` with the generator that its settings name; what it does stands in `eyas.data.regeneration`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from eyas.base.settings import takes
from eyas.data.chat_template import ChatTemplate
from eyas.data.generators import Generator
from eyas.data.regeneration import RegenerateReport
from eyas.data.regeneration import regenerate as answer_and_write
from eyas.data.settings import RegenerateSettings
from eyas.engines.endpoint import EndpointGenerator
from eyas.engines.generation import TransformersGenerator, VllmGenerator
from eyas.target.tokenizer import token_lookup


def generator_of(settings: RegenerateSettings, template: ChatTemplate, stop: list[int]) -> Generator:
    """Whoever `--engine` or `--endpoint` names."""
    if settings.endpoint:
        return EndpointGenerator(
            settings.endpoint,
            settings.endpoint_model,
            settings.sampling,
            stop,
            token_of_bytes=token_lookup(template.tokenizer),
            end_id=template.end_of_turn_id(),
            concurrency=settings.batch_size,
            api_key=settings.api_key,
        )
    common: dict[str, Any] = {"dtype": settings.dtype, "trust_remote_code": settings.trust_remote_code}
    if settings.engine == "vllm":
        return VllmGenerator(
            settings.model_path,
            settings.sampling,
            stop,
            max_seq_len=settings.max_seq_len,
            tp_size=settings.tp_size,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            **common,
        )
    return TransformersGenerator(
        settings.model_path, settings.sampling, stop, batch_size=settings.batch_size, device=settings.device, **common
    )


@takes(RegenerateSettings)
def regenerate(
    settings: RegenerateSettings,
    *,
    generator: Callable[[ChatTemplate, list[int]], Generator] | None = None,
    progress: Callable[[RegenerateReport], None] | None = None,
) -> RegenerateReport:
    """Answer the prompts of chat data with the target itself and write the dataset; see `eyas.data.regeneration`.

    Args:
        generator: makes the one who answers, from the template and the tokens that end a turn, instead of `engine` or `endpoint`.
        progress: called with the running report after each window of conversations.
    """
    return answer_and_write(settings, generator or partial(generator_of, settings), progress=progress)
