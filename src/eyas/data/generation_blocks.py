"""A template's own `{% generation %}` blocks, where it has them: a third derivation, compared with the spans of `chat_template.py`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from eyas.data.placement import MaskError, Place


def block_ranges(
    source: str, text: str, messages: list[dict[str, Any]], tools: Any, kwargs: dict[str, Any]
) -> np.ndarray:
    """Which characters of `text`, the template's rendering of `messages`, lie in its generation blocks: [len(text)] bool. Raises MaskError."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        both: Any = render_jinja_template(
            conversations=[messages], tools=tools, chat_template=source, return_assistant_tokens_mask=True, **kwargs
        )
    except (TypeError, ValueError) as error:
        raise MaskError(f"the template's generation blocks cannot be rendered: {error}") from None
    rendered, blocks = both
    if rendered[0] != text:
        raise MaskError("the template renders otherwise with its generation blocks")
    inside = np.zeros(len(text), dtype=bool)
    block: Any
    for block in blocks[0]:
        inside[block[0] : block[1]] = True
    return inside


def compare_blocks(
    text: str,
    inside: np.ndarray,
    spans: list[tuple[int, int]],
    places: list[Place],
    special: re.Pattern[str],
    every_turn: bool,
) -> None:
    """Raise MaskError unless the blocks hold every supervised text, and (where every turn is supervised) nothing that no turn generates,
    white space and special tokens aside."""
    supervised = np.zeros(len(text), dtype=bool)
    for start, end in spans:
        supervised[start:end] = True
    for place in places:
        if (
            place.end > place.start
            and supervised[place.start : place.end].all()
            and not inside[place.start : place.end].all()
        ):
            raise MaskError(
                f"the template's generation block misses text of message {place.part.turn + 1} that the rendering shows as generated"
            )
    if not every_turn:
        return
    known = np.zeros(len(text), dtype=bool)
    for start, end in [(p.start, p.end) for p in places] + [found.span() for found in special.finditer(text)]:
        known[start:end] = True
    for at in np.flatnonzero(inside & ~supervised & ~known):
        if not text[at].isspace():
            raise MaskError(f"the template's generation block covers {text[at : at + 30]!r}, which no turn generates")
