"""Prompts to measure acceptance on: files of conversations, questions, or tokens, each set under its own name.

Understood per line (JSONL, or whatever `eyas prepare` reads): chat messages or ShareGPT conversations (answers at the end are dropped),
GSM8K rows (`question`), HumanEval rows (`prompt`), MT-bench rows (`turns`, or a list as `prompt`: the first one), and token rows of a
dataset (up to the first supervised token). Packaged sets go by their name; `hf:OWNER/NAME:CONFIG:SPLIT` is read by the `datasets`
library (`hf:openai/gsm8k:main:test`; CONFIG and SPLIT may be left out); `NAME=PATH` names a set.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.base.errors import InputError
from eyas.base.manifest import MANIFEST
from eyas.data.chat_template import ChatTemplate
from eyas.data.conversations import Conversation, RowError, TokenRow, parse_row, row_of
from eyas.data.dataset import open_dataset
from eyas.data.preparation import PACKAGED, packaged
from eyas.data.sources import SUFFIXES, DataSource, RawRow, read_rows
from eyas.target.tokenizer import unknown_token


@dataclass(frozen=True)
class PromptSet:
    """`prompts`: token ids each, chat template applied, ready for an answer."""

    name: str
    prompts: list[list[int]]


def find_prompts(spec: str) -> tuple[str, str]:
    """The name of a set and where it is read from, without reading it. Raises InputError when nothing is there."""
    name, _, place = ("", "", spec) if "=" not in spec or Path(spec).exists() else spec.partition("=")
    if not place or not (place in PACKAGED or Path(place).exists() or place.startswith("hf:")):
        raise InputError(
            f"--prompts {spec}: no such file, directory or packaged set",
            f"packaged are {', '.join(sorted(PACKAGED))}; sets on the Hugging Face hub are written hf:OWNER/NAME:CONFIG:SPLIT",
        )
    return name or _name_of(place), place


def load_prompts(spec: str, tokenizer: Any, limit: int | None = None, rows: int | None = None) -> PromptSet:
    """Read one prompt set.

    Args:
        spec: a packaged set's name, a file or folder, `hf:...` as above, any of them behind `NAME=`.
        tokenizer: the target's. limit: at most so many, from the start. rows: of the target's embeddings, to check the token ids.

    Raises:
        InputError: nothing there, or a row without a prompt (file, line and reason).
    """
    name, place = find_prompts(spec)
    path = packaged(place) if place in PACKAGED else Path(place)
    prompts: list[list[int]] = []
    if path.is_dir() and (path / MANIFEST).exists():
        dataset = open_dataset(path)
        for i in range(min(len(dataset), limit or len(dataset))):
            prompts.append(_prompt_of_tokens(dataset[i].token_ids, dataset[i].loss_mask))
            if unknown := unknown_token(prompts[-1], rows):
                raise InputError(f"{path}: the prompt of sample {i} holds {unknown}", "leave it out")
    else:
        template = ChatTemplate(tokenizer)
        for raw in read_rows(_source(place, path)):
            if limit is not None and len(prompts) >= limit:
                break
            try:
                prompts.append(_prompt_of_row(row_of(raw), template))
                if unknown := unknown_token(prompts[-1], rows):
                    raise RowError(unknown)
            except RowError as error:
                raise InputError(
                    f"{raw.source}: {error}", "give chat messages, a `question`, a `prompt` or `turns`"
                ) from None
    prompts = [p for p in prompts if p]
    if not prompts:
        raise InputError(f"{path} holds no prompts", "give conversations, questions, or a token dataset")
    return PromptSet(name, prompts)


def _name_of(place: str) -> str:
    """What a set is called in the report: the file's or data set's name, without folders and endings."""
    if place.startswith("hf:"):
        return place.split(":")[1].rstrip("/").rpartition("/")[2]
    name = Path(place).name
    return name.removesuffix(next((s for s in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(s)), ""))


def _source(place: str, path: Path) -> DataSource:
    if not place.startswith("hf:"):
        return DataSource(str(path))
    parts = place.split(":")[1:]
    if not parts[0] or len(parts) > 3:
        raise InputError(
            f"--prompts {place} is no data set's name", "write hf:OWNER/NAME or hf:OWNER/NAME:CONFIG:SPLIT"
        )
    name, config, split = [*parts, "", ""][:3]
    return DataSource(f"hf:{name}", config or None, split or "train")


def _prompt_of_row(data: dict[str, Any], template: ChatTemplate) -> list[int]:
    if "messages" not in data and "conversations" not in data:
        text = next((data[key] for key in ("turns", "question", "prompt") if data.get(key)), None)
        text = text[0] if isinstance(text, list) else text
        if isinstance(text, str):
            data = {"prompt": text}
    row = parse_row(RawRow("", 0, data), need_answer=False)
    if isinstance(row, TokenRow):
        return _prompt_of_tokens(np.array(row.token_ids), np.array(row.loss_mask))
    assert isinstance(row, Conversation)
    messages = list(row.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise RowError("no user message to answer")
    return template.prompt_ids(messages, row.tools)


def _prompt_of_tokens(token_ids: np.ndarray, loss_mask: np.ndarray) -> list[int]:
    supervised = np.flatnonzero(loss_mask)
    return [int(t) for t in token_ids[: supervised[0] if len(supervised) else len(token_ids)]]
