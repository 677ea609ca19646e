"""The usual forms of chat data -> one `Conversation`, or ready `TokenRow`.

`parse_row(raw)` raises `RowError` with a reason a person can act on, whatever the row holds.

Trade-off: content given as a list of text parts is joined to one string, because most templates take only strings; a part that is
no text (an image) makes the row an error instead of being dropped.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.base.errors import InputError
from eyas.data.sources import BadRow, RawRow

#: Names that data sets use for a speaker, and the role that chat templates know.
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
#: How a message says that its answer is not to be trained on: OpenAI's and ShareGPT's `weight: 0`, Axolotl's `train: false` and others.
#: torchtune's `masked: true` says it the other way round.
TRAINING_MARKS = ("weight", "train", "training", "loss", "trainable")
#: Marks on *parts* of a message, which a mask of whole answers cannot follow.
PARTIAL_MARKS = ("train_detail", "training_detail")
#: The key of a `Conversation`'s message that is context and not supervised, with the reason.
LEFT_OUT = "left_out"
MARKED, EMPTY = "marked as not to be trained on", "empty"
#: What a row is made of -> the column that holds it, before any `--column` mapping.
COLUMNS = {
    "messages": ("messages",),
    "conversations": ("conversations", "conversation"),
    "instruction": ("instruction",),
    "input": ("input",),
    "output": ("output",),
    "prompt": ("prompt",),
    "completion": ("completion", "response"),
    "system": ("system",),
    "history": ("history",),
    "tools": ("tools", "functions"),
    "input_ids": ("input_ids",),
    "loss_mask": ("loss_mask",),
    "labels": ("labels",),
}


#: Deeper nesting of tools and arguments is refused: templates and their renderings recurse.
MOST_LEVELS = 100
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class RowError(Exception):
    """One row cannot be used; the text is the reason, of bounded length and such that it can be written and shown anywhere."""

    def __init__(self, reason: str):
        super().__init__(reason[:500].encode("utf-8", "backslashreplace").decode())


@dataclass(frozen=True)
class Conversation:
    """Chat messages as templates take them: `role`, `content` (text), and where given `reasoning_content`, `tool_calls`, `name`,
    `tool_call_id`; with two keys of our own, `finish_reason` ("length") and `left_out` (why an answer is not supervised)."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class TokenRow:
    """A row that is tokens already: `token_ids` and `loss_mask`, equally long lists of integers."""

    token_ids: list[int]
    loss_mask: list[int]


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise InputError when a `--column NAME=COLUMN` names something that no row is made of."""
    unknown = sorted(set(columns) - set(COLUMNS))
    if unknown:
        raise InputError(f"--column knows no {', '.join(unknown)}", f"the names are {', '.join(COLUMNS)}")


def row_of(raw: RawRow) -> dict[str, Any]:
    """A row's columns. Raises RowError for what is no JSON object."""
    row = raw.data
    if isinstance(row, BadRow):
        raise RowError(str(row))
    if isinstance(row, bytes):
        try:
            row = json.loads(row.decode())
        except UnicodeDecodeError as error:
            raise RowError(f"not UTF-8 text (byte {error.start})") from None
        except json.JSONDecodeError as error:
            raise RowError(f"not JSON ({error.msg} at column {error.colno})") from None
        except ValueError as error:
            raise RowError(f"a number that cannot be read ({error})") from None
        except RecursionError:
            raise RowError("JSON nested too deeply") from None
    if not isinstance(row, dict):
        raise RowError(f"expected a JSON object, found {_kind(row)}")
    return row


def parse_row(
    raw: RawRow, columns: Mapping[str, str] | None = None, *, need_answer: bool = True
) -> Conversation | TokenRow:
    """A row's conversation (or tokens), whatever usual form it has.

    Args:
        columns: what (a key of `COLUMNS`) -> the column that holds it.
        need_answer: False = a prompt alone will do (its answer is still to be generated).

    Raises:
        RowError: with the reason.
    """
    row = row_of(raw)
    mapped = columns or {}

    def get(name: str) -> Any:
        places = (mapped[name],) if name in mapped else COLUMNS[name]
        return next((row[column] for column in places if row.get(column) is not None), None)

    bad_answer = row.get("label") is False and get("completion") is not None  # preference data (KTO)
    if need_answer and (bad_answer or row.get("weight") == 0 or row.get("train") is False):
        raise RowError("the row is marked as not to be trained on")
    if get("input_ids") is not None:
        return _token_row(get("input_ids"), get("loss_mask"), get("labels"))
    found = next((given for name in ("messages", "conversations") if (given := get(name)) is not None), None)
    if found is None:
        found = _pair_messages(get, need_answer)
    if found is None:
        raise RowError(_no_known_columns(row, mapped))
    messages = _messages(found)
    system = get("system")
    if system is not None and not isinstance(system, str):
        raise RowError(f"system is {_kind(system)}, expected text")
    if system and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    answers = [message for message in messages if message["role"] == "assistant"]
    if answers and _was_cut(row):  # said of the whole row: its last answer
        answers[-1]["finish_reason"] = "length"
    if need_answer and not answers:
        raise RowError("no assistant turn")
    if need_answer and all(LEFT_OUT in one for one in answers):
        reasons = sorted({one[LEFT_OUT] for one in answers})
        raise RowError(f"no assistant turn to learn from: every one is {' or '.join(reasons)}")
    conversation = Conversation(messages, _tools(get("tools")))
    _check_values([conversation.messages, conversation.tools])
    return conversation


def _no_known_columns(row: Mapping[str, Any], mapped: Mapping[str, str]) -> str:
    there = f"found {', '.join(sorted(map(str, row)))[:200] or 'none'}"
    if missing := [f"{column!r} (--column {name}={column})" for name, column in mapped.items() if column not in row]:
        return f"no column {', '.join(missing)}: {there}"
    return f"no known columns: {there}; expected messages, conversations, instruction/output, prompt/completion or input_ids/loss_mask"


def _check_values(value: Any, level: int = 0) -> None:
    """Raise RowError for what no tokenizer and no template can take: half characters, endless numbers, bottomless nesting, dates."""
    if level > MOST_LEVELS:
        raise RowError(f"tools or arguments nested more than {MOST_LEVELS} levels deep")
    if isinstance(value, str):
        if not value.isascii() and (lone := _LONE_SURROGATE.search(value)):
            code = ord(lone.group())
            why = (
                "a byte that is not UTF-8"
                if 0xDC80 <= code <= 0xDCFF
                else f"half a character (lone surrogate U+{code:04X})"
            )
            raise RowError(f"the text holds {why} behind {value[max(0, lone.start() - 20) : lone.start()]!r}")
    elif isinstance(value, int) and value.bit_length() > 4096:
        raise RowError(f"a number of about {value.bit_length() * 3 // 10} digits")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_values(key, level + 1)
            _check_values(item, level + 1)
    elif isinstance(value, list):
        for item in value:
            _check_values(item, level + 1)
    elif not isinstance(value, float | int | None):
        raise RowError(f"tools or arguments hold a value that JSON does not have ({type(value).__name__})")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        list: "a list", str: "a string", int: "a number", float: "a number", bool: "a truth value", dict: "an object",
    }  # fmt: skip
    return names.get(type(value), type(value).__name__)


def _json(text: str, complaint: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also a number of thousands of digits
        raise RowError(complaint) from None


def _token_row(ids: Any, mask: Any, labels: Any) -> TokenRow:
    if mask is None and labels is None:
        raise RowError("input_ids without loss_mask (or labels)")
    name, given = ("loss_mask", mask) if mask is not None else ("labels", labels)
    for column, value in (("input_ids", ids), (name, given)):
        if not isinstance(value, list) or not all(type(item) is int or type(item) is bool for item in value):
            raise RowError(f"{column} must be a flat list of integers, found {_kind(value)}")
    mask = [int(item) for item in given] if mask is not None else [int(item != -100) for item in given]
    if len(ids) != len(mask):
        raise RowError(f"{len(ids)} input_ids but {len(mask)} mask values")
    if not ids:
        raise RowError("no tokens")
    if min(ids) < 0 or max(ids) >= 2**31:
        raise RowError("token ids must lie in 0..2^31-1")
    if not set(mask) <= {0, 1}:
        raise RowError("loss_mask must hold only 0 and 1")
    return TokenRow([int(item) for item in ids], mask)


def _pair_messages(get: Any, need_answer: bool) -> list[Any] | None:
    """Alpaca and prompt/completion rows as messages; None when the row is neither."""
    for question, answer in (("instruction", "output"), ("prompt", "completion")):
        asked, answered = get(question), get(answer)
        if asked is None and answered is None:
            continue
        if asked is not None and answered is None and not need_answer:
            answered = []
        if asked is None or answered is None:
            raise RowError(
                f"{question} and {answer} must both be there, {question if asked is None else answer} is missing"
            )
        extra, past = (get("input"), _history(get("history"))) if question == "instruction" else (None, [])
        if extra is not None and not isinstance(extra, str):
            raise RowError(f"input is {_kind(extra)}, expected text")
        if extra and extra.strip():
            if not isinstance(asked, str):
                raise RowError(f"instruction is {_kind(asked)} beside an input, expected text")
            asked = f"{asked}\n\n{extra}"
        asked = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
        answered = answered if isinstance(answered, list) else [{"role": "assistant", "content": answered}]
        return past + asked + answered
    return None


def _history(value: Any) -> list[dict[str, Any]]:
    pairs = [] if value is None else value
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise RowError("history must be a list of [question, answer] pairs")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        value = _json(value, "messages is a string that is not JSON")
    if not isinstance(value, list):
        raise RowError(f"messages must be a list, found {_kind(value)}")
    if not value:
        raise RowError("empty conversation")
    messages = [_message(number, message) for number, message in enumerate(value, 1)]
    waiting: list[str] = []
    for message in messages:  # a result without an id answers the first call that has none yet
        if message["role"] == "assistant":
            waiting = [call["id"] for call in message.get("tool_calls", [])]
        elif message["role"] == "tool" and waiting:
            message.setdefault("tool_call_id", waiting[0])
            waiting = [one for one in waiting if one != message["tool_call_id"]]
    return messages


def _message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(f"message {number} is {_kind(message)}, expected an object with role and content")
    said = message.get("role") if message.get("role") is not None else message.get("from")
    role = ROLES.get(said.strip().lower()) if isinstance(said, str) else None
    if role is None:
        raise RowError(
            f"message {number} has no role" if said is None else f"message {number} has the unknown role {said!r:.80}"
        )
    given = message["content"] if message.get("content") is not None else message.get("value")
    content, reasoning = _content(number, given)
    result: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        _fill_answer(
            number, message, result, reasoning, is_call=str(said).strip().lower() in ("function_call", "tool_call")
        )
    elif given is None:
        raise RowError(f"message {number} ({role}) has no content")
    for key in ("name", "tool_call_id"):
        if isinstance(value := message.get(key), str | int):
            result[key] = str(value)
    return result


def _was_cut(said: Mapping[str, Any]) -> bool:
    """Whether a message or row says that a token limit ended its answer, in the words of OpenAI, Anthropic or Google."""
    reasons = (said.get("finish_reason"), said.get("stop_reason"))
    return any(isinstance(reason, str) and reason.lower() in ("length", "max_tokens") for reason in reasons)


def _fill_answer(
    number: int, message: Mapping[str, Any], result: dict[str, Any], reasoning: str, is_call: bool
) -> None:
    """What only an assistant's message has: reasoning, calls, how it ended, whether it is to be learnt."""
    for key in ("thinking", "reasoning", "reasoning_content"):
        thought = message.get(key)
        if thought is not None and not isinstance(thought, str):
            raise RowError(f"message {number} has {_kind(thought)} as {key}, expected text")
        reasoning = thought if thought and thought.strip() else reasoning
    if reasoning:
        result["reasoning_content"] = reasoning
    calls = message.get("tool_calls") or message.get("function_call")  # the second: OpenAI's older form, one object
    if is_call and not calls:  # ShareGPT: the call is the value
        calls, result["content"] = _json(result["content"], f"message {number}: a function call that is not JSON"), ""
    if calls:
        result["tool_calls"] = _tool_calls(number, [calls] if isinstance(calls, dict) else calls)
    if _was_cut(message):
        result["finish_reason"] = "length"
    if partial := next((key for key in PARTIAL_MARKS if message.get(key)), None):
        raise RowError(f"message {number} has {partial}: only whole messages can be left out of training")
    for key in (*TRAINING_MARKS, "masked"):
        value = message.get(key)
        if value is not None and value not in (0, 1):
            raise RowError(f"message {number} has the {key} {reprlib.repr(value)}: an answer is learnt (1) or not (0)")
        if value is not None and bool(value) == (key == "masked"):
            result[LEFT_OUT] = MARKED
    if not result["content"].strip() and not reasoning and not calls:
        result.setdefault(LEFT_OUT, EMPTY)


def _content(number: int, content: Any) -> tuple[str, str]:
    """(text, reasoning) of a message's content: a string, null, or a list of parts."""
    if content is None:
        return "", ""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        raise RowError(f"message {number} has {_kind(content)} as content, expected text")
    texts: list[str] = []
    reasoning: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("thinking"), str):
            reasoning.append(part["thinking"])
        elif isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
            texts.append(part["text"])
        else:
            kind = part.get("type", "an object without text") if isinstance(part, dict) else _kind(part)
            raise RowError(f"message {number} has a content part that is not text ({kind!s:.80})")
    return "".join(texts), "".join(reasoning)


def _tool_calls(number: int, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowError(f"message {number}: tool_calls must be a list, found {_kind(calls)}")
    result = []
    for order, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
            raise RowError(f"message {number}: a tool call without a function name")
        name, arguments = function["name"], {} if function.get("arguments") is None else function["arguments"]
        if isinstance(
            arguments, str
        ):  # the API's form; templates want the object, and text only if it is no JSON object
            try:
                parsed = json.loads(arguments)
                arguments = parsed if isinstance(parsed, dict) else arguments
            except (ValueError, RecursionError):
                pass
        known = call.get("id") if isinstance(call.get("id"), (str, int)) else None
        result.append(
            {
                "id": str(known or f"functions.{name}:{order}"),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
    return result


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None or value == "" or value == []:
        return None
    if isinstance(value, str):
        value = _json(value, "tools is a string that is not JSON")
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("tools must be a list of objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value] or None
