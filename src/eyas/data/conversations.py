"""Reading chat data: any usual file or data set -> one `Conversation` (or ready `TokenRow`) per row, streaming.

Two steps, so that the costly one can run in worker processes:
- `read_rows(sources)` yields `RawRow`s (a line of bytes, or a dict) with the file and line they came from; it holds one of them at a time;
- `parse_row(raw)` makes it a `Conversation` or `TokenRow`, or raises `RowError` with a reason a person can act on.

Trade-off: content given as a list of text parts is joined to one string, because most templates take only strings; a part that is
no text (an image) makes the row an error instead of being dropped.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from eyas.base.errors import InputError

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
SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
#: The longest single element of a JSON array that is waited for: beyond it the array is taken to be broken.
ELEMENT_BYTES = 64 << 20
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
    "tools": ("tools",),
    "input_ids": ("input_ids",),
    "loss_mask": ("loss_mask",),
    "labels": ("labels",),
}


class RowError(Exception):
    """One row cannot be used; the text is the reason, for the report."""


class Unreadable(str):
    """In place of a row's data: why that place of a file could not be read."""


@dataclass(frozen=True)
class RawRow:
    """A row as read. `data` is the line's bytes (JSON not parsed yet) or a dict; `line` counts from 1 (rows, where a file has no lines)."""

    file: str
    line: int
    data: Any

    @property
    def source(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Conversation:
    """Chat messages as templates take them: `role`, `content` (text), and where given `reasoning_content`, `tool_calls`, `name`, `tool_call_id`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class TokenRow:
    """A row that is tokens already: `token_ids` and `loss_mask`, equally long lists of integers."""

    token_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True)
class DataSource:
    """Where rows come from: `path` is a file, a folder or a data set's name for the `datasets` library (with `config`, `split`)."""

    path: str
    config: str | None = None
    split: str = "train"
    columns: Mapping[str, str] = field(default_factory=dict)


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise InputError when a `--column NAME=COLUMN` names something that no row is made of."""
    unknown = sorted(set(columns) - set(COLUMNS))
    if unknown:
        raise InputError(f"--column knows no {', '.join(unknown)}", f"the names are {', '.join(COLUMNS)}")


# ---------------------------------------------------------------- reading


def read_rows(source: DataSource) -> Iterator[RawRow]:
    """Yield the rows of one source in order; a part of a file that cannot be read at all comes as a row whose data is `Unreadable`.

    Raises:
        InputError: no such file, folder or data set, or a folder without data files.
    """
    path = Path(source.path)
    if path.is_dir() and (path / "dataset_info.json").exists():
        yield from _read_saved_dataset(path, source)
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
        if not files:
            raise InputError(f"{path} holds no data files", f"expected files ending in {', '.join(SUFFIXES)}")
        for file in files:
            yield from _read_file(file)
    elif path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise InputError(f"{path}: unknown kind of data file", f"expected {', '.join(SUFFIXES)}")
        yield from _read_file(path)
    else:
        yield from _read_hub(source)


def _read_file(path: Path) -> Iterator[RawRow]:
    if path.name.endswith(".parquet"):
        yield from _read_parquet(path)
        return
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        if ".json" in path.suffixes and _first_byte(file) == b"[":
            yield from _read_array(path, file)
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield RawRow(str(path), number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)


def _first_byte(file: IO[bytes]) -> bytes:
    while byte := file.read(1):
        if byte.strip() and byte not in b"\xef\xbb\xbf":
            break
    file.seek(0)
    return byte


def _read_array(path: Path, file: IO[bytes]) -> Iterator[RawRow]:
    """The elements of one JSON array, decoded one by one from a window of the file, so that a large file needs little memory."""
    import codecs

    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    text, at, number, ended = "", 0, 0, False

    def more() -> bool:
        nonlocal text, at, ended
        chunk = file.read(1 << 20)
        ended = not chunk
        text, at = text[at:] + utf8.decode(chunk, ended), 0
        return not ended

    more()
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at >= len(text):
            if not more():
                yield RawRow(str(path), number + 1, Unreadable("the JSON array ends without its closing bracket"))
                return
            continue
        if text[at] == "]":
            return
        try:
            element, end = decoder.raw_decode(text, at)
            if end == len(text) and more():  # a number or literal could go on in the next window
                continue
        except json.JSONDecodeError as error:
            if not ended and len(text) - at < ELEMENT_BYTES:
                more()
                continue
            lost = Unreadable(f"not JSON from here on ({error.msg}); the rest of the file is lost")
            yield RawRow(str(path), number + 1, lost)
            return
        at = end
        number += 1
        yield RawRow(str(path), number, element)


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield RawRow(str(path), number, _without_nulls(row))
    except (pa.ArrowInvalid, OSError) as error:
        yield RawRow(str(path), number + 1, Unreadable(f"not a readable Parquet file: {error}"))


def _without_nulls(value: Any) -> Any:
    """Parquet gives every message the union of all keys, absent ones as None: leave those out again."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise InputError(
            "reading this source needs the `datasets` library", "install it with `pip install 'eyas[datasets]'`"
        ) from None
    return datasets


def _read_saved_dataset(path: Path, source: DataSource) -> Iterator[RawRow]:
    loaded = _datasets().load_from_disk(str(path))
    for number, row in enumerate(loaded, 1):
        yield RawRow(source.path, number, _without_nulls(dict(row)))


def _read_hub(source: DataSource) -> Iterator[RawRow]:
    missing = InputError(
        f"--data {source.path}: no such file or folder, and not a data set name of the form owner/name",
        "check the path; packaged sets are named `conversations`, `word_problems` and `word_problems_heldout`",
    )
    path = source.path.removeprefix("hf:")
    if path == source.path and (path.count("/") != 1 or path.startswith((".", "/")) or path.endswith(SUFFIXES)):
        raise missing
    try:
        loaded = _datasets().load_dataset(path, source.config, split=source.split, streaming=True)
    except (FileNotFoundError, ValueError, OSError) as error:
        raise InputError(
            f"--data {source.path}: no such file or folder, and `datasets` could not load it: {error}",
            "check the name, --data-config and --data-split; a local file needs its path",
        ) from None
    for number, row in enumerate(loaded, 1):
        yield RawRow(f"{source.path}[{source.split}]", number, _without_nulls(dict(row)))


# ---------------------------------------------------------------- parsing


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
    row = raw.data
    if isinstance(row, Unreadable):
        raise RowError(str(row))
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except json.JSONDecodeError as error:
            raise RowError(f"not JSON ({error.msg} at column {error.colno})") from None
        except UnicodeDecodeError as error:
            raise RowError(f"not UTF-8 text (byte {error.start})") from None
        except RecursionError:
            raise RowError("JSON nested too deeply") from None
    if not isinstance(row, dict):
        raise RowError(f"expected a JSON object, found {_kind(row)}")

    def get(name: str) -> Any:
        if columns and name in columns:
            return row.get(columns[name])
        return next((row[column] for column in COLUMNS[name] if row.get(column) is not None), None)

    if get("input_ids") is not None:
        return _token_row(get("input_ids"), get("loss_mask"), get("labels"))
    messages = get("messages")
    if messages is None:
        messages = get("conversations")
    if messages is None:
        messages = _pair_messages(get, need_answer)
    if messages is None:
        raise RowError(
            f"no known columns: found {', '.join(sorted(map(str, row)))[:200] or 'none'}; "
            "expected messages, conversations, instruction/output, prompt/completion or input_ids/loss_mask"
        )
    messages = _messages(messages)
    if isinstance(get("system"), str) and get("system").strip() and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": get("system")})
    if need_answer and not any(message["role"] == "assistant" for message in messages):
        raise RowError("no assistant turn")
    return Conversation(messages, _tools(get("tools")))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        list: "a list",
        str: "a string",
        int: "a number",
        float: "a number",
        bool: "a truth value",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def _token_row(ids: Any, mask: Any, labels: Any) -> TokenRow:
    if mask is None and labels is None:
        raise RowError("input_ids without loss_mask (or labels)")
    for name, value in (("input_ids", ids), ("loss_mask" if mask is not None else "labels", mask or labels)):
        if not isinstance(value, list) or not all(type(item) is int or type(item) is bool for item in value):
            raise RowError(f"{name} must be a flat list of integers")
    mask = [int(item) for item in mask] if mask is not None else [int(item != -100) for item in labels]
    if len(ids) != len(mask):
        raise RowError(f"{len(ids)} input_ids but {len(mask)} mask values")
    if not ids:
        raise RowError("no tokens")
    if min(ids) < 0 or max(ids) >= 2**31:
        raise RowError(f"token ids must lie in 0..2^31-1, found {min(ids)}..{max(ids)}")
    if not set(mask) <= {0, 1}:
        raise RowError("loss_mask must hold only 0 and 1")
    return TokenRow(ids, mask)


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
        if isinstance(asked, list) and isinstance(answered, list):  # conversational prompt and completion
            return asked + answered
        asked = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
        answered = answered if isinstance(answered, list) else [{"role": "assistant", "content": answered}]
        if question == "instruction":
            extra = get("input")
            if isinstance(extra, str) and extra.strip():
                asked = [{"role": "user", "content": f"{asked[0]['content']}\n\n{extra}"}]
            for pair in get("history") or []:
                if not isinstance(pair, list) or len(pair) != 2:
                    raise RowError("history must be a list of [question, answer] pairs")
            past = [
                {"role": role, "content": text}
                for pair in get("history") or []
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ]
            asked = past + asked
        return asked + answered
    return None


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise RowError("messages is a string that is not JSON") from None
    if not isinstance(value, list):
        raise RowError(f"messages must be a list, found {_kind(value)}")
    if not value:
        raise RowError("empty conversation")
    return [_message(number, message) for number, message in enumerate(value, 1)]


def _message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(f"message {number} is {_kind(message)}, expected an object with role and content")
    said = message.get("role", message.get("from"))
    role = ROLES.get(said.strip().lower()) if isinstance(said, str) else None
    if role is None:
        raise RowError(
            f"message {number} has no role" if said is None else f"message {number} has the unknown role {said!r}"
        )
    content, reasoning = _content(number, message["content"] if "content" in message else message.get("value"))
    result: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        for key in ("reasoning_content", "reasoning", "thinking"):
            if isinstance(message.get(key), str) and message[key].strip():
                reasoning = message[key]
                break
        if reasoning:
            result["reasoning_content"] = reasoning
        calls = message.get("tool_calls")
        if str(said).strip().lower() in ("function_call", "tool_call") and not calls:  # ShareGPT: the call is the value
            calls, result["content"] = _json(content, f"message {number}: a function call that is not JSON"), ""
            calls = calls if isinstance(calls, list) else [calls]
        if calls:
            result["tool_calls"] = _tool_calls(number, calls)
        if not result["content"].strip() and not reasoning and not calls:
            raise RowError(f"assistant message {number} is empty")
        if message.get("finish_reason") == "length":
            result["finish_reason"] = "length"
    elif message.get("content", message.get("value")) is None:
        raise RowError(f"message {number} ({role}) has no content")
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    return result


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
            raise RowError(f"message {number} has a content part that is not text ({kind})")
    return "".join(texts), "".join(reasoning)


def _json(text: str, complaint: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise RowError(complaint) from None


def _tool_calls(number: int, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowError(f"message {number}: tool_calls must be a list, found {_kind(calls)}")
    result = []
    for order, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"message {number}: a tool call without a function name")
        arguments = function.get("arguments", {})
        if isinstance(
            arguments, str
        ):  # the API's form; templates want the object, and a string only if it is no JSON object
            try:
                parsed = json.loads(arguments)
                arguments = parsed if isinstance(parsed, dict) else arguments
            except json.JSONDecodeError:
                pass
        name = function["name"]
        result.append(
            {
                "id": str(call.get("id") or f"functions.{name}:{order}"),
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
