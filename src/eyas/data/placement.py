"""Where each text of the assistant stands in a rendering, found by substitution: the second of the two derivations in `masks.py`.

Every assistant text (answer, reasoning, name of a called tool) is replaced by a marker and the conversation rendered again. What stands
between the markers is the template's own; putting the texts back must give the first rendering, character by character.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eyas.data.conversations import RowError
from eyas.data.think_blocks import INLINE_THINK, REASONING_NAMES


class MaskError(RowError):
    """The assistant's tokens of one row cannot be derived with certainty; the text is the reason, for the report."""


@dataclass(frozen=True)
class Part:
    """One text of the assistant inside message `turn`; templates may strip white space off its ends (`variants`)."""

    turn: int
    kind: str  # reasoning, content, call
    value: str

    def variants(self) -> list[str]:
        v = self.value
        return list(
            dict.fromkeys((v, v.rstrip(), v.lstrip(), v.strip(), v.strip("\n"), v.lstrip("\n"), v.rstrip("\n")))
        )


@dataclass(frozen=True)
class Place:
    """Where a part stands in a rendering: [start, end) in characters."""

    part: Part
    start: int
    end: int


def parts_of(messages: list[dict[str, Any]], call_key: str = "name") -> list[Part]:
    """The assistant's texts in order. Thinking written into the content (`<think>...</think>answer`) is two parts; a tool call is
    known by its name, or by its id for templates that show only that (Kimi)."""
    parts: list[Part] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if message.get("reasoning_content"):
            parts.append(Part(turn, "reasoning", message["reasoning_content"]))
        content = message.get("content") or ""
        if inline := INLINE_THINK.fullmatch(content):
            if inline[2].strip():
                parts.append(Part(turn, "reasoning", inline[2]))
            content = inline[4]
        if content.strip():
            parts.append(Part(turn, "content", content))
        for call in message.get("tool_calls") or []:
            parts.append(Part(turn, "call", call["id"] if call_key == "id" else call["function"]["name"]))
    return parts


def _with_marks(messages: list[dict[str, Any]], marks: list[str], call_key: str) -> list[dict[str, Any]]:
    """The messages with the i-th part (in the order of `_parts`) replaced by the i-th mark."""
    queue = iter(marks)
    result = copy.deepcopy(messages)
    for message in result:
        if message["role"] != "assistant":
            continue
        if message.get("reasoning_content"):
            mark = next(queue)
            message |= {name: mark for name in ("reasoning_content", *REASONING_NAMES) if name in message}
        content = message.get("content") or ""
        head = ""
        if inline := INLINE_THINK.fullmatch(content):
            head = inline[1] + (next(queue) if inline[2].strip() else inline[2]) + inline[3]
            content = inline[4]
        if content.strip():
            content = next(queue)
        if head or content:
            message["content"] = head + content
        for call in message.get("tool_calls") or []:
            (call if call_key == "id" else call["function"])[call_key] = next(queue)
    return result


def place_texts(
    render: Callable[[list[dict[str, Any]]], str], text: str, messages: list[dict[str, Any]]
) -> list[Place]:
    """Where each assistant text stands in `text` = render(messages), from a second rendering with markers in their place.

    Raises MaskError when putting the texts back does not give `text`: the template changes them, or depends on them.
    """
    everything = repr(messages)
    nonce = next(n for n in (f"q{k}Zx" for k in range(10_000)) if n not in everything)
    for call_key in ("name", "id"):
        marks = {f"{nonce}{number:04d}Yv": part for number, part in enumerate(parts_of(messages, call_key))}
        marked = render(_with_marks(messages, list(marks), call_key))
        if all(mark in marked for mark, part in marks.items() if part.kind == "call"):
            break
    pieces = re.split(f"({nonce}\\d{{4}}Yv)", marked)
    if not text.startswith(pieces[0]) or (len(pieces) == 1 and text != marked):
        raise MaskError(
            "the template renders the conversation otherwise when a text changes; its spans cannot be placed"
        )
    places: list[Place] = []
    at = len(pieces[0])
    for index in range(1, len(pieces), 2):
        part, following = marks[pieces[index]], pieces[index + 1]
        closes = index + 2 == len(pieces)
        for variant in part.variants():
            end = at + len(variant)
            fits = text[end:] == following if closes else text.startswith(following, end)
            if fits and text.startswith(variant, at):
                break
        else:
            raise MaskError(
                f"the template alters the text of message {part.turn + 1}: "
                f"substitution and rendering differ near {text[at : at + 40]!r}"
            )
        if all(place.part is not part for place in places):
            places.append(Place(part, at, end))
        at = end + len(following)
    return places


def agree(text: str, span: tuple[int, int], turn: int, places: list[Place]) -> None:
    """Compare the two derivations: the span by continuation must hold the texts placed by substitution, all of its turn's and no other's."""
    for place in places:
        inside = span[0] <= place.start and place.end <= span[1]
        touches = place.start < span[1] and span[0] < place.end
        if place.part.turn == turn and not inside:
            raise MaskError(
                f"message {turn + 1}: two derivations of its tokens differ: continuation gives {text[slice(*span)][:60]!r}, "
                f"substitution places {text[place.start : place.end][:60]!r} elsewhere"
            )
        if place.part.turn != turn and touches and place.end > place.start:
            raise MaskError(
                f"message {turn + 1}: its span by continuation also covers text of message {place.part.turn + 1}"
            )
