"""Think blocks: the tags that open and close reasoning, in prompts, in renderings and in texts."""

from __future__ import annotations

import re
from typing import Any

#: `<think>`, `◁think▷`, `[THINK]`: a tag that opens a block of reasoning, and the same name closing it.
OPEN_TAG = r"(?:<[\w:|]*think(?:ing)?[\w:|]*>|◁think▷|\[THINK\]|<\|channel>thought)"
CLOSE_TAG = r"(?:</[\w:|]*think(?:ing)?[\w:|]*>|◁/think▷|\[/THINK\]|<channel\|>)"
#: Other names for `reasoning_content` that templates read.
REASONING_NAMES = ("thinking", "reasoning")
INLINE_THINK = re.compile(rf"(\s*{OPEN_TAG})(.*?)({CLOSE_TAG})(.*)", re.DOTALL)
#: A thought in any form that ends: `<think>...</think>answer`, or `...</think>answer` where the prompt opened the block.
THOUGHT = re.compile(rf"\s*(?:{OPEN_TAG})?(.*?){CLOSE_TAG}(.*)", re.DOTALL)
UNCLOSED = re.compile(rf"\s*{OPEN_TAG}(?!.*{CLOSE_TAG})", re.DOTALL)
EMPTY_THINK = re.compile(rf"\s*(?:{OPEN_TAG})?\s*{CLOSE_TAG}")
THINK_TAIL = re.compile(rf"(?:{OPEN_TAG}\s*(?:{CLOSE_TAG}\s*)?|{CLOSE_TAG}\s*)$")
THINK_ONLY = re.compile(rf"(?:\s|{OPEN_TAG}|{CLOSE_TAG})*")
OPEN_AT_END = re.compile(rf"{OPEN_TAG}\s*$")


def without_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without any reasoning: neither as a field nor as a think block in the text."""
    result = []
    for message in messages:
        one = {key: value for key, value in message.items() if key not in ("reasoning_content", *REASONING_NAMES)}
        if message["role"] == "assistant" and (thought := THOUGHT.fullmatch(message.get("content") or "")):
            one["content"] = thought[2].lstrip()
        result.append(one)
    return result


def thought_apart(message: dict[str, Any], bare: bool) -> dict[str, Any]:
    """An assistant's message whose text holds a thought, with the thought in `reasoning_content`: a template that reads this
    field would show the text's own tags behind an empty think block. `bare`: without the line breaks around both, which the template sets.
    """
    found = THOUGHT.fullmatch(message.get("content") or "") if message["role"] == "assistant" else None
    if found is None or message.get("reasoning_content"):
        return message
    thought, answer = (found[1].strip("\n"), found[2].lstrip("\n")) if bare else (found[1], found[2])
    return {**message, "content": answer} | ({"reasoning_content": thought} if thought.strip() else {})


def without_opening(prompt: str, thought: str) -> str:
    """A thought that was cut before its end, as it is generated behind `prompt`: without its tag where the prompt opens the block."""
    if opened := OPEN_AT_END.search(prompt):
        thought = re.sub(rf"^\s*{OPEN_TAG}", "", thought)
        return thought.lstrip("\n") if opened.group().endswith("\n") else thought
    return thought.lstrip()


def restore_reasoning(prompt: str, rendered: str, reasoning: str) -> str | None:
    """The turn with the reasoning that its template leaves out even in the last turn, where the generation prompt opens a think
    block for it (Kimi-K2.5, DeepSeek-R1) or the rendering shows an empty one: prompt + reasoning + closing tag + answer + end of turn.
    None when there is neither."""
    opened = OPEN_AT_END.search(prompt)
    if opened is None:  # the block is generated too: fill the empty one that the rendering shows (Kimi-K2-Thinking)
        empty = (
            re.match(rf"(\s*{OPEN_TAG}\s*){CLOSE_TAG}", rendered[len(prompt) :])
            if rendered.startswith(prompt)
            else None
        )
        return prompt + empty[1] + reasoning + rendered[len(prompt) + empty.end(1) :] if empty else None
    if not rendered.startswith(prompt[: opened.start()]):
        return None
    tag = opened.group().strip()
    close = (
        "◁/think▷" if "◁" in tag else tag.replace("[", "[/", 1) if tag.startswith("[") else tag.replace("<", "</", 1)
    )
    rest = rendered[len(prompt) if rendered.startswith(prompt) else opened.start() :]
    if empty := EMPTY_THINK.match(rest):  # the rendering closes it itself: `<think></think>answer`
        rest = rest[empty.end() :]
    line = "\n" if opened.group().endswith("\n") else ""
    gap = "" if rest[:1].isspace() else line * 2
    return prompt + reasoning.strip("\n") + line + close + gap + rest
