"""Chat template -> tokens and loss mask, without trust in the template.

Templates seldom say which tokens are the assistant's, so the spans are derived from what the template renders, in two ways that share
no step, and compared:

1. **Continuation.** The prompt that serving would send for turn i is `render(messages[:i], add_generation_prompt=True)`. What the
   rendering with the turn adds to it, up to its end-of-turn token, is what the model generates.
2. **Substitution.** Every assistant text (answer, reasoning, name of a called tool) is replaced by a marker and the conversation rendered again.
   The text between markers is the template's own; putting the texts back must give the first rendering, character by character. So each
   text has one known place, also where the same words occur twice or the template strips white space.

A template with `{% generation %}` blocks gives a third. Any disagreement makes the row an error (`MaskError`), never a guess.

What counts as generated: the assistant's texts, what the template puts between them (closing a think block, opening a channel), and the
end-of-turn token. Not: the generation prompt, an *empty* think block, and what follows the end of turn (a line break).

A template may show an earlier turn otherwise than it was generated (Qwen3 removes its thinking, gpt-oss its channel). Such a turn
cannot be learnt from the full rendering: it becomes a sample of its own, with exactly the prompt of its moment (`rewritten="unroll"`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from eyas.conversations import Conversation
from eyas.errors import InputError
from eyas.placement import CLOSE_TAG, OPEN_TAG, MaskError, Place, agree, parts_of, place_texts
from eyas.token_masks import MaskedText, MaskedTokens, mask_by_offsets, tokens_by_pieces

Supervise = Literal["all", "assistant", "last-turn"]
Rewritten = Literal["unroll", "skip"]

_EMPTY_THINK = re.compile(rf"\s*(?:{OPEN_TAG})?\s*{CLOSE_TAG}\s*")
_THINK_REST = re.compile(rf"\s*(?:{OPEN_TAG}\s*(?:{CLOSE_TAG}\s*)?)?")
_OPEN_AT_END = re.compile(rf"{OPEN_TAG}\s*$")


@dataclass(frozen=True)
class MaskSettings:
    """How tokens and masks are made.

    supervise: `assistant` = every assistant turn, `last-turn` = only the last one, `all` = every token (the assistant's place is not derived).
    rewritten: what becomes of an earlier turn that the full rendering shows otherwise than it was generated.
    chat_template_kwargs: passed to the template, as serving would (`{"enable_thinking": false}`).
    """

    supervise: Supervise = "assistant"
    rewritten: Rewritten = "unroll"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """A tokenizer's chat template with fixed settings: renders conversations and derives what of them is generated.

    Args:
        tokenizer: a Hugging Face tokenizer, fast or slow, with a chat template (or one given).
        chat_template: Jinja text that replaces the tokenizer's own.

    Raises:
        InputError: no template, or the template cannot be rendered at all.
    """

    def __init__(self, tokenizer: Any, settings: MaskSettings | None = None, chat_template: str | None = None):
        self.tokenizer, self.settings = tokenizer, settings or MaskSettings()
        self.chat_template = chat_template
        self.source = chat_template or _template_text(tokenizer)
        if not self.source:
            raise InputError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template",
                "give one with --chat-template FILE, or use the instruct model's folder",
            )
        self.has_generation_block = bool(re.search(r"\{%-?\s*generation\s*-?%\}", self.source))
        added = getattr(tokenizer, "added_tokens_decoder", {}) or {}
        special = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        special = {token for token in special if token and not re.fullmatch(f"{OPEN_TAG}|{CLOSE_TAG}", token)}
        alternatives = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or r"(?!)"
        self._special = re.compile(alternatives)
        self._end_of_turn = re.compile(rf"(?P<eot>(?:{alternatives})+)(?:\s+(?:{alternatives})*)*$")
        self._generation_prompt: str | None = None

    # ------------------------------------------------------------ rendering

    def render(self, messages: list[dict[str, Any]], tools: Any = None, generation_prompt: bool = False) -> str:
        """The template's text for `messages`. Raises MaskError with the template's own complaint."""
        from jinja2 import TemplateError

        kwargs = dict(self.settings.chat_template_kwargs)
        if self.chat_template:
            kwargs["chat_template"] = self.chat_template
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **kwargs
            )
        except (TemplateError, TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            raise MaskError(f"the chat template refuses it: {str(error).strip() or type(error).__name__}") from None

    def prompt(self, messages: list[dict[str, Any]], tools: Any = None) -> str:
        """The prompt that serving sends for the answer that follows `messages`."""
        return self.render(messages, tools, generation_prompt=True)

    def generation_prompt(self) -> str:
        """What the template adds to ask for an answer, e.g. `<|im_start|>assistant\\n`; empty when it adds nothing."""
        if self._generation_prompt is None:
            one = [{"role": "user", "content": "a"}]
            without, with_it = self.render(one), self.render(one, generation_prompt=True)
            same = len(_common_prefix(without, with_it))
            self._generation_prompt = with_it[same:]
        return self._generation_prompt

    # ------------------------------------------------------------ spans

    def masked_texts(self, conversation: Conversation) -> list[MaskedText]:
        """The renderings of one conversation with their supervised spans: one, or more where earlier turns are unrolled.

        Raises MaskError when the two derivations differ, the template refuses the row, or nothing would be supervised.
        """
        messages, notes = _without_trailing(conversation.messages)
        tools = conversation.tools
        if self.settings.supervise == "all":
            text = self.render(_clean(conversation.messages), tools)
            return [MaskedText(text, [(0, len(text))], list(range(len(conversation.messages))), [])]
        for part in parts_of(messages):
            if special := self._special.search(part.value):
                raise MaskError(f"message {part.turn + 1} contains the special token {special.group()} as text")
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.settings.supervise == "last-turn":
            turns = turns[-1:]
        clean = _clean(messages)
        full = self.render(clean, tools)
        places = place_texts(lambda marked: self.render(marked, tools), full, clean)
        spans: list[tuple[int, int]] = []
        kept: list[int] = []
        alone: list[MaskedText] = []
        for turn in turns:
            last = turn == len(messages) - 1
            before = [] if turn == 0 and not messages else clean[:turn]
            rendered = full if last else self.render(clean[: turn + 1], tools)
            here = places if last else None
            own = self._turn(clean[: turn + 1], before, tools, rendered, here)
            if own.notes and "reasoning restored" in own.notes:
                alone.append(own)
                continue
            start, end = own.spans[0]
            found: tuple[int, int] | None
            if last or full.startswith(own.text[:end]):
                found = (start, end)
            else:
                found = _moved(full, own, [p for p in places if p.part.turn == turn])
                if found:
                    notes = [*notes, "header differs"]
            if found is None:
                if self.settings.rewritten == "unroll":
                    alone.append(replace(own, notes=[*own.notes, "unrolled"]))
                else:
                    notes = [*notes, "rewritten turn not supervised"]
                continue
            spans.append(self._cut(found, messages[turn], full))
            kept.append(turn)
            notes = [*notes, *own.notes]
            agree(full, found, turn, places)
        alone = [replace(one, spans=[self._cut(one.spans[0], messages[one.turns[0]], one.text)]) for one in alone]
        results = alone
        if spans:
            if self.has_generation_block:
                self._check_generation_block(clean, tools, full, spans, places)
            results = [*alone, MaskedText(full, spans, kept, list(dict.fromkeys(notes)))]
        if not results:
            raise MaskError("no assistant turn can be supervised")
        return results

    def _cut(self, span: tuple[int, int], message: dict[str, Any], text: str) -> tuple[int, int]:
        """An answer that the token limit cut off never generated its end-of-turn token: do not teach it."""
        if message.get("finish_reason") != "length":
            return span
        found = self._end_of_turn.search(text, span[0], span[1])
        return (span[0], found.start("eot")) if found else span

    def _turn(
        self,
        messages: list[dict[str, Any]],
        before: list[dict[str, Any]],
        tools: Any,
        rendered: str,
        places: list[Place] | None,
    ) -> MaskedText:
        """The last message of `messages` as it is generated: `rendered` (or a restored form of it) and its one span."""
        turn = len(before)
        places = (
            place_texts(lambda marked: self.render(marked, tools), rendered, messages) if places is None else places
        )
        own = [place for place in places if place.part.turn == turn]
        missing = [part for part in parts_of(messages) if part.turn == turn and part not in [p.part for p in own]]
        notes: list[str] = []
        if any(part.kind != "reasoning" for part in missing) or not own:
            raise MaskError(f"the template drops text of message {turn + 1}")
        prompt = self._prompt_before(before, tools, rendered, own)
        if missing:
            restored = _restore_reasoning(prompt, rendered, own, missing[0].value)
            if restored is None:
                raise MaskError(
                    f"the template drops the reasoning of message {turn + 1} even where it is the last; "
                    "prepare with thinking on (--chat-template-kwargs), or remove the reasoning"
                )
            rendered, notes, own = restored, ["reasoning restored"], []
            first, last = len(prompt), len(rendered)
        else:
            first, last = own[0].start, own[-1].end
        start = len(prompt)
        if not rendered.startswith(prompt):
            start = len(_common_prefix(prompt, rendered))
            if not _THINK_REST.fullmatch(prompt[start:]) or start > first:
                reason = (
                    "its reasoning is shown although thinking is off"
                    if any(p.part.kind == "reasoning" for p in own)
                    else "the rendering does not continue the generation prompt"
                )
                raise MaskError(
                    f"message {turn + 1}: {reason} ({prompt[start:][:60]!r} against {rendered[start:][:60]!r})"
                )
        if own and not any(place.part.kind == "reasoning" for place in own):
            opened = _OPEN_AT_END.search(rendered, 0, start)
            head = rendered[opened.start() if opened else start : first]
            if empty := _EMPTY_THINK.match(head):
                start = max(start, (opened.start() if opened else start) + empty.end())
                notes.append("empty think block not supervised")
        # The end-of-turn token: special tokens that follow the turn's last text (and the template's closing of it), then at most white space.
        found = self._end_of_turn.search(rendered, last if own else start)
        if found is None:
            end = max(last, len(rendered.rstrip())) if own and own[-1].part.kind == "call" else last
            notes.append("no end-of-turn token")
        else:
            end = found.end("eot")
            eos = self.tokenizer.eos_token
            if eos and found.group("eot").startswith(eos):
                end = found.start("eot") + len(eos)
        return MaskedText(rendered, [(start, end)], [turn], notes)

    def _prompt_before(self, before: list[dict[str, Any]], tools: Any, rendered: str, own: list[Place]) -> str:
        """The serving prompt of a turn; for a conversation that the assistant opens, what stands before its text, if that ends
        as every generation prompt does."""
        if any(message["role"] != "system" for message in before):
            return self.prompt(before, tools)
        try:
            prompt = self.prompt(before, tools)
            if rendered.startswith(prompt):
                return prompt
        except MaskError:
            pass
        usual = self.generation_prompt()
        at = rendered.rfind(usual, 0, own[0].start) if usual else -1
        if at < 0 or rendered[at + len(usual) : own[0].start].strip():
            raise MaskError(
                "the assistant opens the conversation, and the template shows no generation prompt before it"
            )
        return rendered[: at + len(usual)]

    def _check_generation_block(
        self, messages: list[dict[str, Any]], tools: Any, text: str, spans: list[tuple[int, int]], places: list[Place]
    ) -> None:
        """The template's own `{% generation %}` blocks must lie within our spans (white space and end of turn aside) and hold every text."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            both: Any = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.settings.chat_template_kwargs},
            )
        except (TypeError, ValueError) as error:
            raise MaskError(f"the template's generation blocks cannot be rendered: {error}") from None
        rendered, blocks = both
        if rendered[0] != text:
            raise MaskError("the template renders otherwise with its generation blocks")
        supervised = np.zeros(len(text), dtype=bool)
        for start, end in spans:
            supervised[start:end] = True
        inside = np.zeros(len(text), dtype=bool)
        block: Any
        for block in blocks[0]:
            inside[block[0] : block[1]] = True
        turns_supervised = [
            place for place in places if supervised[place.start : place.end].all() and place.end > place.start
        ]
        for place in turns_supervised:
            if not inside[place.start : place.end].all():
                raise MaskError(
                    f"the template's generation block misses text of message {place.part.turn + 1} that the rendering shows as generated"
                )
        if self.settings.supervise != "assistant":
            return
        for at in np.flatnonzero(inside & ~supervised):
            if (
                not text[at].isspace()
                and not any(p.start <= at < p.end for p in places)
                and not self._in_special(text, int(at))
            ):
                raise MaskError(
                    f"the template's generation block covers {text[at : at + 30]!r}, which no turn generates"
                )

    def _in_special(self, text: str, at: int) -> bool:
        return any(
            found.start() <= at < found.end() for found in self._special.finditer(text, max(0, at - 64), at + 64)
        )

    # ------------------------------------------------------------ tokens

    def tokens(self, masked: list[MaskedText]) -> list[MaskedTokens | MaskError]:
        """Tokenise renderings (together, which fast tokenizers do much quicker) and mark the tokens of their spans.

        One result per rendering: its tokens, or why the mask could not be placed on them.
        """
        results: list[MaskedTokens | MaskError] = []
        encoded: Any = None
        if masked and getattr(self.tokenizer, "is_fast", False):
            encoded = self.tokenizer(
                [one.text for one in masked],
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
        for number, one in enumerate(masked):
            if encoded is not None:
                offsets = np.asarray(encoded["offset_mapping"][number], dtype=np.int64).reshape(-1, 2)
                mask, clean = mask_by_offsets(offsets, one.spans, self._special, one.text)
                if clean:
                    ids = np.asarray(encoded["input_ids"][number], dtype=np.int32)
                    results.append(MaskedTokens(ids, mask, one.notes))
                    continue
            try:
                results.append(tokens_by_pieces(self._encode, self._decode, one))
            except MaskError as error:
                results.append(error)
        return results

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""

    def samples(self, conversation: Conversation) -> list[MaskedTokens]:
        """All samples of one conversation. Raises MaskError."""
        results: list[MaskedTokens] = []
        for one in self.tokens(self.masked_texts(conversation)):
            if isinstance(one, MaskError):
                raise one
            results.append(one)
        return results


# ---------------------------------------------------------------- pieces of the above


def _template_text(tokenizer: Any) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return template.get("default") or next(iter(template.values()), None)
    return template


def _common_prefix(a: str, b: str) -> str:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return a[:index]
    return a[: min(len(a), len(b))]


def _without_trailing(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Cut what follows the last assistant turn: nothing there is supervised, and some templates would render earlier turns otherwise."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last < 0:
        raise MaskError("no assistant turn")
    return messages[: last + 1], ["turns after the last answer left out"] if last + 1 < len(messages) else []


def _clean(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in message.items() if key != "finish_reason"} for message in messages]


def _moved(full: str, own: MaskedText, places: list[Place]) -> tuple[int, int] | None:
    """Where a turn's generated text stands in the full rendering although what stands before it differs (a think block left out
    of the header); None when the generated text itself was changed."""
    if not places:
        return None
    start, end = own.spans[0]
    generated = own.text[start:end]
    at = generated.find(full[places[0].start : places[0].end])
    if at < 0 or places[0].start < at:
        return None
    begin = places[0].start - at
    return (begin, begin + len(generated)) if full.startswith(generated, begin) else None


def _restore_reasoning(prompt: str, rendered: str, own: list[Place], reasoning: str) -> str | None:
    """The turn with the reasoning that its template leaves out even in the last turn, where the generation prompt opens a think
    block for it (Kimi-K2.5, DeepSeek-R1): prompt + reasoning + closing tag + answer + end of turn. None when the prompt opens none."""
    opened = _OPEN_AT_END.search(prompt)
    content = next((place for place in own if place.part.kind == "content"), own[0])
    if opened is None or not rendered.startswith(prompt[: opened.start()]):
        return None
    tag = opened.group().strip()
    close = (
        "◁/think▷" if "◁" in tag else tag.replace("[", "[/", 1) if tag.startswith("[") else tag.replace("<", "</", 1)
    )
    after_prompt = rendered[len(prompt) :] if rendered.startswith(prompt) else ""
    if after_prompt.lstrip().startswith(close):  # the rendering closes it itself: `<think></think>answer`
        return prompt + reasoning + after_prompt
    line = "\n" if opened.group().endswith("\n") else ""
    return prompt + reasoning.strip("\n") + line + close + line * 2 + rendered[content.start :]
