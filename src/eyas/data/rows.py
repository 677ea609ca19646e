"""One row of chat data -> its samples: parsed, rendered, masked, cut to length. Runs in each worker process of `prepare`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

import numpy as np

from eyas.base.masks import runs
from eyas.data.chat_template import UNFINISHED, ChatTemplate, MaskedTokens, MaskError
from eyas.data.conversations import EMPTY, LEFT_OUT, MARKED, Conversation, RowError, TokenRow, parse_row, row_of
from eyas.data.settings import PrepareSettings
from eyas.data.sources import RawRow, Unreadable
from eyas.target.tokenizer import embedding_rows, load_tokenizer, stop_tokens, unknown_token

OnLong = Literal["truncate", "drop", "split"]


@dataclass(frozen=True)
class Piece:
    """A sample of a row: ids, mask, and what a cut did to it."""

    token_ids: np.ndarray
    loss_mask: np.ndarray
    truncated: bool
    cut: int
    lost: int
    unfinished: bool = False


@dataclass(frozen=True)
class RowResult:
    """What became of a row: its pieces, or the `reason` for which it has none.

    answers, lost, left_out: answers in the row, those wholly beyond the length limit, those that the data mark as not to be learnt.
    breaks_off: the rest of its file could not be read. columns: which of the mapped columns (`--column`) it has.
    """

    place: RawRow  # without its data
    pieces: list[Piece] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    answers: int = 0
    key: bytes = b""  # what the held-out split goes by
    reason: str | None = None
    lost: int = 0
    left_out: int = 0
    breaks_off: bool = False
    columns: frozenset[str] = frozenset()


@dataclass
class _Parsed:
    """A row on its way: what it holds or why not, and how many renderings it gave."""

    place: RawRow
    item: Conversation | TokenRow | None = None
    reason: str | None = None
    renderings: int = 0
    breaks_off: bool = False
    columns: frozenset[str] = frozenset()


class RowMaker:
    """Rows -> samples, with one tokenizer and template; lives in each worker process."""

    def __init__(
        self,
        settings: PrepareSettings,
    ):
        self.settings, self.columns = settings, settings.columns
        tokenizer = load_tokenizer(settings.model_path, settings.trust_remote_code)
        ends = stop_tokens(settings.model_path, tokenizer)
        self.template = ChatTemplate(tokenizer, settings.mask, settings.template_text(), ends)
        self.rows = embedding_rows(settings.model_path, settings.trust_remote_code)

    def __call__(self, rows: Sequence[RawRow]) -> list[RowResult]:
        parsed, texts = [], []
        for row in rows:
            one = _Parsed(RawRow(row.file, row.line, None), breaks_off=isinstance(row.data, Unreadable))
            parsed.append(one)
            try:
                data = row_of(row)
                one.columns = frozenset(column for column in self.columns.values() if column in data)
                one.item = parse_row(RawRow(row.file, row.line, data), self.columns)
                made = self.template.masked_texts(one.item) if isinstance(one.item, Conversation) else []
                one.renderings = len(made)
                texts += made
            except RowError as error:
                one.reason = str(error)
        tokens = iter(self.template.tokens(texts))
        results = []
        for one in parsed:
            made_tokens: list[MaskedTokens | MaskError] = list(islice(tokens, one.renderings))
            if isinstance(one.item, TokenRow):
                ids, mask = np.asarray(one.item.token_ids, np.int32), np.asarray(one.item.loss_mask, np.uint8)
                made_tokens = [MaskedTokens(ids, mask, [])]
                known = len(self.template.tokenizer)
                if int(ids.max()) >= known:
                    one.reason = (
                        f"token id {int(ids.max())} is not one of this tokenizer's {known}: rows of another model?"
                    )
                elif not self.settings.trust_masks and self.settings.mask.supervise != "all":
                    one.reason = self.template.given_mask_problem(ids, mask)
            results.append(self._result(one, made_tokens))
        return results

    def _result(self, row: _Parsed, tokens: list[MaskedTokens | MaskError]) -> RowResult:
        result = RowResult(row.place, breaks_off=row.breaks_off, columns=row.columns)
        failed = next((str(one) for one in tokens if isinstance(one, MaskError)), row.reason)
        if failed or row.item is None:
            return replace(result, reason=failed or "nothing in it")
        settings = self.settings
        pieces: list[Piece] = []
        notes: list[str] = []
        answers = lost = 0
        why = "no assistant token"
        for one in tokens:
            assert isinstance(one, MaskedTokens)
            if unknown := unknown_token([int(one.token_ids.max())], self.rows):
                return replace(result, reason=unknown)
            notes += one.notes
            answers += len(runs(one.loss_mask))
            fitted = fit(one.token_ids, one.loss_mask, settings.max_seq_len, settings.on_long)
            kept = [piece for piece in fitted if piece.loss_mask[1:].any()]
            if UNFINISHED in one.notes:
                kept = [replace(piece, truncated=True, unfinished=True) for piece in kept]
            if one.loss_mask.any() and not kept:
                lost += len(runs(one.loss_mask))
                why = (
                    "no supervised token but the first, which nothing stands before"
                    if not one.loss_mask[1:].any()
                    else f"longer than --max-seq-len {settings.max_seq_len} ({len(one.token_ids)} tokens)"
                    if settings.on_long == "drop"
                    else f"no assistant token within --max-seq-len {settings.max_seq_len}"
                )
            pieces += kept
        if not pieces:
            return replace(result, answers=answers, reason=why, lost=lost)
        messages = row.item.messages if isinstance(row.item, Conversation) and settings.mask.supervise != "all" else []
        if any(message.get(LEFT_OUT) == EMPTY for message in messages):
            notes.append("an empty answer is not supervised")
        left_out = sum(message.get(LEFT_OUT) == MARKED for message in messages)
        return replace(
            result, pieces=pieces, notes=notes, answers=answers, key=split_key(row.item), lost=lost, left_out=left_out
        )


def fit(token_ids: np.ndarray, loss_mask: np.ndarray, max_seq_len: int, on_long: OnLong) -> list[Piece]:
    """A sample [T] within the length limit: itself, cut, nothing, or windows of `max_seq_len`; every answer that lost tokens is counted.

    `cut` = answers that go on beyond the piece's end, `lost` = answers that lie wholly beyond it (always 0 for windows: nothing is lost).
    """
    T = len(token_ids)
    if max_seq_len >= T:
        return [Piece(token_ids, loss_mask, False, 0, 0)]
    if on_long == "drop":
        return []
    answers = runs(loss_mask)
    if on_long == "truncate":
        cut = sum(start < max_seq_len < end for start, end in answers)
        lost = sum(start >= max_seq_len for start, _ in answers)
        return [Piece(token_ids[:max_seq_len], loss_mask[:max_seq_len], True, cut, lost)]
    pieces = []
    for first in range(0, T, max_seq_len):
        last = min(first + max_seq_len, T)
        cut = sum(start < last < end for start, end in answers)
        pieces.append(Piece(token_ids[first:last], loss_mask[first:last], cut > 0, cut, 0))
    return pieces


def split_key(item: Conversation | TokenRow) -> bytes:
    """What the held-out split goes by: a hash of the *prompt*, the turns before the first answer.

    It depends on no tokenizer, template, length limit or order, and two answers to one question never lie on both sides.
    """
    if isinstance(item, TokenRow):
        first = next((i for i, flag in enumerate(item.loss_mask) if flag), len(item.token_ids))
        text = json.dumps(item.token_ids[:first])
    else:
        asked: list[list[str]] = []
        for message in item.messages:
            if message["role"] == "assistant" and asked:
                break
            if message["role"] != "system":
                asked.append([message["role"], " ".join(message["content"].split())])
        text = json.dumps(asked, ensure_ascii=False)
    return hashlib.blake2b(b"eyas.split.1" + text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def is_heldout(key: bytes, share: float) -> bool:
    """Whether a conversation with this split key is in the held-out part; a larger share contains a smaller one."""
    return int.from_bytes(key, "little") < share * 2**64
