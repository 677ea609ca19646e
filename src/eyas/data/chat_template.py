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

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from eyas.base.errors import InputError
from eyas.data.conversations import LEFT_OUT, Conversation
from eyas.data.generation_blocks import block_ranges, compare_blocks
from eyas.data.placement import MaskError, Place, agree, parts_of, place_texts
from eyas.data.settings import MaskSettings
from eyas.data.think_blocks import (
    CLOSE_TAG,
    EMPTY_THINK,
    OPEN_AT_END,
    OPEN_TAG,
    REASONING_NAMES,
    THINK_TAIL,
    UNCLOSED,
    restore_reasoning,
    thought_apart,
    without_opening,
    without_reasoning,
)
from eyas.data.token_masks import MaskedText, MaskedTokens, mask_by_offsets, shifted_mask, tokens_by_pieces

#: The note of a sample with an answer that the token limit cut off when it was generated.
UNFINISHED = "answer unfinished when it was generated"
RESTORED = "reasoning restored"
HEADLESS = "set behind a tool's answer without a header, as it is served"


class ChatTemplate:
    """A tokenizer's chat template with fixed settings: renders conversations and derives what of them is generated.

    Args:
        tokenizer: a Hugging Face tokenizer, fast or slow, with a chat template (or one given).
        chat_template: Jinja text that replaces the tokenizer's own.
        stop_tokens: texts of the tokens that end generation (of the generation config), for templates without an end of turn,
            where the next turn's first token is what the target generates to stop (GLM).

    Raises:
        InputError: no template, or the template cannot be rendered at all.
    """

    def __init__(
        self,
        tokenizer: Any,
        settings: MaskSettings | None = None,
        chat_template: str | None = None,
        stop_tokens: Sequence[str] = (),
    ):
        self._stop_tokens = tuple(token for token in stop_tokens if token)
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
        names = [name for name in REASONING_NAMES if re.search(rf"""\.{name}\b|["']{name}["']""", self.source)]
        self._reasoning_names = names
        self._reads_reasoning = bool(names) or "reasoning_content" in self.source
        # Two demands that templates make on tool calls: Mistral's ids have nine letters, DeepSeek's arguments are text.
        self._short_ids = bool(re.search(r"length\s*!=\s*9", self.source))
        self._text_arguments = self._wants_text_arguments()

    def _wants_text_arguments(self) -> bool:
        """Whether the template takes a call's arguments only as text: with an object it fails, with text it does not."""
        if "arguments" not in (self.source or ""):
            return False
        function = {"name": "f", "arguments": {"a": 1}}
        call = {"id": "a" * 9, "type": "function", "function": function}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        self._text_arguments = False
        try:
            self.render(messages)
        except MaskError:
            try:
                self.render([messages[0], {**messages[1], "tool_calls": [_with_text_arguments(call)]}])
            except MaskError:
                return False
            return True
        return False

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
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
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

    def _clean(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages as the template takes them: without our own keys, the reasoning under every name that the template reads."""
        result = []
        for message in messages:
            one = {key: value for key, value in message.items() if key not in ("finish_reason", LEFT_OUT)}
            if self._short_ids and message.get("tool_calls"):
                one["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
            if self._short_ids and "tool_call_id" in one:
                one["tool_call_id"] = _short_id(one["tool_call_id"])
            if self._text_arguments and message.get("tool_calls"):
                one["tool_calls"] = [_with_text_arguments(call) for call in one["tool_calls"]]
            if "reasoning_content" in one:
                one |= dict.fromkeys(self._reasoning_names, one["reasoning_content"])
            result.append(one)
        return result

    def _header(self) -> str:
        """The generation prompt without a think tag at its end."""
        usual = self.generation_prompt()
        return usual[: tail.start()] if (tail := THINK_TAIL.search(usual)) else usual

    def prompt_ids(self, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
        """The tokens of `prompt`, as serving would send them."""
        return self._encode(self.prompt(self._clean(messages), tools))

    def decode_answer(self, token_ids: list[int]) -> str:
        """The text of an answer without its end of turn."""
        text = self._decode(token_ids)
        found = self._end_of_turn.search(text)
        return text[: found.start("eot")] if found else text

    def opens_thinking(self, prompt_ids: list[int]) -> bool:
        """Whether a prompt ends in an opened think block."""
        return bool(OPEN_AT_END.search(self._decode(prompt_ids[-16:])))

    def end_of_turn_id(self) -> int | None:
        """The token that the template shows behind an answer; None where it shows none."""
        try:
            [shown] = self.samples(
                Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
            )
        except MaskError:
            return None
        last = int(shown.token_ids[np.flatnonzero(shown.loss_mask)[-1]])
        return last if self._special.fullmatch(self._decode([last])) else None

    def end_of_turn_ids(self) -> list[int]:
        """The tokens that end an answer: the template's, and eos."""
        return sorted({self.tokenizer.eos_token_id, self.end_of_turn_id()} - {None})

    # ------------------------------------------------------------ spans

    def masked_texts(self, conversation: Conversation) -> list[MaskedText]:
        """The renderings of one conversation with their supervised spans: one, or more where earlier turns are unrolled.

        Raises MaskError when the two derivations differ, the template refuses the row, or nothing would be supervised.
        """
        messages, notes = _without_trailing(conversation.messages)
        if self.settings.reasoning == "drop":
            messages = without_reasoning(messages)
        tools = conversation.tools
        if self._reads_reasoning or OPEN_AT_END.search(self.generation_prompt()):
            messages = [thought_apart(message, bare=self._reads_reasoning) for message in messages]
        if self.settings.supervise == "all":
            text = self.render(self._clean(conversation.messages), tools)
            return [MaskedText(text, [(0, len(text))], list(range(len(conversation.messages))), [])]
        for part in parts_of(messages):
            if special := self._special.search(part.value):
                raise MaskError(f"message {part.turn + 1} contains the special token {special.group()} as text")
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.settings.supervise == "last-turn":
            turns = turns[-1:]
        turns = [i for i in turns if LEFT_OUT not in messages[i]]
        if not turns:
            raise MaskError("the last assistant turn is one not to learn from")
        alone: list[MaskedText] = []
        if unclosed := [i for i in turns if UNCLOSED.match(messages[i]["content"])]:
            if unclosed != [len(messages) - 1] or messages[-1].get("tool_calls"):
                raise MaskError(f"message {unclosed[0] + 1}: a thought without an end, and more behind it")
            alone = [self._unfinished_thought(messages, tools)]
            if not (turns := turns[:-1]):
                return alone
            messages = messages[: turns[-1] + 1]
        clean = self._clean(messages)
        full = self.render(clean, tools)
        places = place_texts(lambda marked: self.render(marked, tools), full, clean)
        spans: list[tuple[int, int]] = []
        restored: list[MaskedText] = []
        kept: list[int] = []
        for turn in turns:
            last = turn == len(messages) - 1
            rendered = full if last else self.render(clean[: turn + 1], tools)
            known = places if full.startswith(rendered) else None  # the places in a prefix are those in the whole
            own, base = self._turn(clean[: turn + 1], tools, rendered, known)
            if RESTORED in own.notes or HEADLESS in own.notes:
                restored.append(own)
                continue
            start, end = own.spans[0]
            found: tuple[int, int] | None
            if full.startswith(own.text[:end]):
                found = (start, end)
            elif full.startswith(own.text[:base]):
                found = _moved(full, own, [p for p in places if p.part.turn == turn])
                if found:
                    notes = [*notes, "think block before an earlier answer left out"]
            else:
                found = None
            if found is None:
                if self.settings.rewritten == "unroll":
                    restored.append(replace(own, notes=[*own.notes, "rewritten turn unrolled"]))
                else:
                    notes = [*notes, "rewritten turn not supervised"]
                continue
            if "no end-of-turn token" in own.notes and (
                stop := next((token for token in self._stop_tokens if full.startswith(token, found[1])), None)
            ):
                found = (found[0], found[1] + len(stop))
            agree(full, found, turn, places)
            spans.append(self._cut(found, messages[turn], full))
            kept.append(turn)
            notes = [*notes, *own.notes, *([UNFINISHED] if messages[turn].get("finish_reason") == "length" else [])]
        alone = [self._cut_alone(one, messages[one.turns[0]]) for one in restored] + alone
        results = alone
        if spans:
            if self.has_generation_block:
                self._compare_generation_blocks(clean, tools, full, spans, places)
            results = [*alone, MaskedText(full, spans, kept, list(dict.fromkeys(notes)))]
        if not results:
            raise MaskError("no assistant turn can be supervised")
        return results

    def _unfinished_thought(self, messages: list[dict[str, Any]], tools: Any) -> MaskedText:
        """A last turn that was cut inside its thought: the serving prompt and the thought, without an end of turn. A template
        would close it, or put it behind an empty think block."""
        prompt = self.prompt(self._clean(messages[:-1]), tools)
        tag = re.match(rf"\s*({OPEN_TAG})", messages[-1]["content"])
        if self._reads_reasoning and tag and tag[1] not in str(self.source):
            raise MaskError(f"message {len(messages)}: the template writes thoughts otherwise than {tag[1]}")
        if re.search(rf"{CLOSE_TAG}\s*$", prompt):
            raise MaskError(
                f"message {len(messages)} begins a thought although the generation prompt closes it; thinking is off"
            )
        text = prompt + without_opening(prompt, messages[-1]["content"])
        return MaskedText(text, [(len(prompt), len(text))], [len(messages) - 1], [UNFINISHED])

    def _cut(self, span: tuple[int, int], message: dict[str, Any], text: str) -> tuple[int, int]:
        """An answer that the token limit cut off never generated its end-of-turn token: do not teach it."""
        if message.get("finish_reason") != "length":
            return span
        found = self._end_of_turn.search(text, span[0], span[1])
        return (span[0], found.start("eot")) if found else span

    def _cut_alone(self, one: MaskedText, message: dict[str, Any]) -> MaskedText:
        if message.get("finish_reason") != "length":
            return one
        return replace(one, spans=[self._cut(one.spans[0], message, one.text)], notes=[*one.notes, UNFINISHED])

    def _turn(
        self,
        messages: list[dict[str, Any]],
        tools: Any,
        rendered: str,
        places: list[Place] | None,
    ) -> tuple[MaskedText, int]:
        """The last message of `messages` as it is generated: `rendered` (or a restored form of it) with its one span, and
        the length of its prompt without a think tag at the end."""
        turn = len(messages) - 1
        places = (
            place_texts(lambda marked: self.render(marked, tools), rendered, messages) if places is None else places
        )
        own = [place for place in places if place.part.turn == turn]
        shown = [place.part for place in own]
        called = any(part.kind == "call" for part in shown)  # by name or by id
        missing = [
            part
            for part in parts_of(messages)
            if part.turn == turn and part not in shown and not (part.kind == "call" and called)
        ]
        notes: list[str] = []
        if any(part.kind != "reasoning" for part in missing) or not own:
            raise MaskError(f"the template drops text of message {turn + 1}")
        prompt = self._prompt_before(messages, tools, rendered, own)
        base = prompt[: tail.start()] if (tail := THINK_TAIL.search(prompt)) else prompt
        if not rendered.startswith(base):
            rendered, own = self._grafted(turn, base, prompt, rendered, own)
        if missing:
            whole = restore_reasoning(prompt, rendered, missing[0].value)
            if whole is None:
                raise MaskError(
                    f"the template leaves out the reasoning of message {turn + 1} even where it is the last; "
                    "prepare with thinking on (--chat-template-kwargs) or leave it out (--reasoning drop)"
                )
            rendered, notes, own = whole, [RESTORED], []
            first, last = len(prompt), len(rendered)
        else:
            first, last = own[0].start, own[-1].end
        start, header = len(prompt), self._header()
        if header and not prompt.endswith(header) and rendered.startswith(prompt + header):
            # Behind a tool's answer serving sends no header (Gemma 4): the target goes on at once, although the rendering shows one.
            rendered = prompt + rendered[start + len(header) :]
            own = [Place(one.part, one.start - len(header), one.end - len(header)) for one in own]
            first, last = first - len(header), last - len(header)
            notes.append(HEADLESS)
        if not rendered.startswith(prompt):
            # A generation prompt may end in a think tag that the template leaves out again when it shows the turn.
            start = len(base)
            notes.append("shown without the think tag of its generation prompt")
            if any(place.part.kind == "reasoning" for place in own) and prompt[start:].strip():
                why = "its reasoning is shown although the generation prompt closes it; thinking is off (--reasoning drop leaves it out)"
                raise MaskError(_not_continued(turn, prompt, rendered, why))
        if own and not any(place.part.kind == "reasoning" for place in own):
            opened = OPEN_AT_END.search(rendered, 0, start)
            head = rendered[opened.start() if opened else start : first]
            if empty := EMPTY_THINK.match(head):
                after = len(head) - len(head[empty.end() :].lstrip())
                start = max(start, (opened.start() if opened else start) + after)
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
        agree(rendered, (start, end), turn, own)
        return MaskedText(rendered, [(start, end)], [turn], notes), len(base)

    def _grafted(self, turn: int, base: str, prompt: str, rendered: str, own: list[Place]) -> tuple[str, list[Place]]:
        """A turn whose rendering shows *earlier* turns otherwise than its prompt did (Kimi-K2.5 drops the reasoning behind a tool call
        once the call is answered): the turn's own part of the rendering, set behind the prompt that serving sent."""
        header = self._header()
        at = rendered.rfind(header, 0, own[0].start) if header else -1
        if at < 0 or not base.endswith(header):
            raise MaskError(
                _not_continued(turn, prompt, rendered, "the rendering does not continue the generation prompt")
            )
        cut = at + len(header)
        shift = len(base) - cut
        return base + rendered[cut:], [Place(one.part, one.start + shift, one.end + shift) for one in own]

    def _prompt_before(self, messages: list[dict[str, Any]], tools: Any, rendered: str, own: list[Place]) -> str:
        """The serving prompt of a turn; for a conversation that the assistant opens, what stands before its text, if that ends
        as every generation prompt does."""
        before = messages[:-1]
        if any(message["role"] != "system" for message in before):
            return self.prompt(before, tools)
        try:
            prompt = self.prompt(before, tools)
            if rendered.startswith(prompt):
                return prompt
        except MaskError:
            pass
        # Between the generation prompt and the text must stand just what stands there in an ordinary turn.
        usual = self.generation_prompt()
        ordinary = self.render([{"role": "user", "content": "a"}, messages[-1]], tools)
        text = rendered[own[0].start : own[0].end]
        head = ordinary[ordinary.rfind(usual) + len(usual) : ordinary.rfind(text)] if usual in ordinary else ""
        before_text = rendered[: own[0].start].removesuffix(head)
        if not usual or not before_text.endswith(usual):
            raise MaskError(
                "the assistant opens the conversation, and the template shows no generation prompt before it"
            )
        return before_text

    def _compare_generation_blocks(
        self, messages: list[dict[str, Any]], tools: Any, text: str, spans: list[tuple[int, int]], places: list[Place]
    ) -> None:
        kwargs = {**self.tokenizer.special_tokens_map, **self.settings.chat_template_kwargs}
        inside = block_ranges(str(self.source), text, messages, tools, kwargs)
        compare_blocks(text, inside, spans, places, self._special, self.settings.supervise == "assistant")

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
                pairs = encoded["offset_mapping"][number]
                offsets = np.fromiter(chain.from_iterable(pairs), np.int64, 2 * len(pairs)).reshape(-1, 2)
                mask, clean = mask_by_offsets(offsets, one.spans, self._special, one.text)
                if clean:
                    ids = np.fromiter(encoded["input_ids"][number], np.int32, len(mask))
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

    def given_mask_problem(self, token_ids: np.ndarray, loss_mask: np.ndarray) -> str | None:
        """What is wrong with a mask that came with its tokens [T], judged by the template's generation prompt; None = nothing seen."""
        return shifted_mask(self._encode(self._header()), self._decode, token_ids, loss_mask)

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


def _short_id(name: str) -> str:
    """Nine letters and digits for a call's id; one that has this form already stays."""
    return (
        name if re.fullmatch(r"[A-Za-z0-9]{9}", name) else hashlib.blake2b(name.encode(), digest_size=8).hexdigest()[:9]
    )


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _common_prefix(a: str, b: str) -> str:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return a[:index]
    return a[: min(len(a), len(b))]


def _not_continued(turn: int, prompt: str, rendered: str, why: str) -> str:
    same = max(0, len(_common_prefix(prompt, rendered)) - 20)
    return f"message {turn + 1}: {why}: prompt ...{prompt[same:][:60]!r}, rendering ...{rendered[same:][:60]!r}"


def _without_trailing(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Cut what follows the last assistant turn: nothing there is supervised, and some templates would render earlier turns otherwise."""
    last = max((i for i, one in enumerate(messages) if one["role"] == "assistant" and LEFT_OUT not in one), default=-1)
    if last < 0:
        raise MaskError("no assistant turn")
    return messages[: last + 1], ["turns after the last answer left out"] if last + 1 < len(messages) else []


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
