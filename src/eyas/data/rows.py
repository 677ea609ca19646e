"""One row of chat data -> its samples: parsed, rendered, masked, cut to length. Runs in each worker process of `prepare`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

import numpy as np

from eyas.data.chat_template import UNFINISHED, ChatTemplate, MaskedTokens, MaskError, MaskSettings
from eyas.data.conversations import Conversation, RawRow, RowError, TokenRow, parse_row
from eyas.target.tokenizer import load_tokenizer, stop_tokens

OnLong = Literal["truncate", "drop", "split"]
Duplicates = Literal["once", "keep"]


@dataclass(frozen=True)
class PrepareSettings:
    """What decides the content of the dataset (and so stands in its manifest).

    max_seq_len: longest sample in tokens. on_long: what becomes of longer ones. heldout: share of the conversations kept apart.
    trust_masks: whether the masks of rows that are tokens already are taken without a look at their borders.
    duplicates: `once` = equal samples are written once with their count, `keep` = as often as they come.
    """

    max_seq_len: int = 2048
    on_long: OnLong = "truncate"
    mask: MaskSettings = field(default_factory=MaskSettings)
    duplicates: Duplicates = "once"
    heldout: float = 0.0
    trust_masks: bool = False


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
    place: RawRow  # without its data
    pieces: list[Piece]
    notes: list[str]
    answers: int
    key: bytes  # what the held-out split goes by
    reason: str | None = None
    lost: int = 0


class RowMaker:
    """Rows -> samples, with one tokenizer and template; lives in each worker process."""

    def __init__(
        self,
        model_path: str,
        trust_remote_code: bool,
        template: str | None,
        settings: PrepareSettings,
        columns: Mapping[str, str],
    ):
        self.settings, self.columns = settings, columns
        tokenizer = load_tokenizer(model_path, trust_remote_code)
        self.template = ChatTemplate(tokenizer, settings.mask, template, stop_tokens(model_path, tokenizer))

    def __call__(self, rows: Sequence[RawRow]) -> list[RowResult]:
        parsed: list[tuple[RawRow, Conversation | TokenRow | None, str | None, int]] = []
        texts = []
        item: Conversation | TokenRow | None
        for row in rows:
            place = RawRow(row.file, row.line, None)
            try:
                item = parse_row(row, self.columns)
                made = self.template.masked_texts(item) if isinstance(item, Conversation) else []
                texts += made
                parsed.append((place, item, None, len(made)))
            except (RowError, MaskError) as error:
                parsed.append((place, None, str(error), 0))
        tokens = iter(self.template.tokens(texts))
        results = []
        for place, item, reason, count in parsed:
            made_tokens: list[MaskedTokens | MaskError] = list(islice(tokens, count))
            if isinstance(item, TokenRow):
                ids, mask = np.asarray(item.token_ids, np.int32), np.asarray(item.loss_mask, np.uint8)
                made_tokens = [MaskedTokens(ids, mask, [])]
                known = len(self.template.tokenizer)
                if int(ids.max()) >= known:
                    reason = f"token id {int(ids.max())} is not one of this tokenizer's {known}: rows of another model?"
                elif not self.settings.trust_masks and self.settings.mask.supervise != "all":
                    reason = self.template.given_mask_problem(ids, mask)
            results.append(self._result(place, item, reason, made_tokens))
        return results

    def _result(
        self,
        place: RawRow,
        item: Conversation | TokenRow | None,
        reason: str | None,
        tokens: list[MaskedTokens | MaskError],
    ) -> RowResult:
        failed = next((str(one) for one in tokens if isinstance(one, MaskError)), reason)
        if failed or item is None:
            return RowResult(place, [], [], 0, b"", failed)
        settings = self.settings
        pieces: list[Piece] = []
        notes: list[str] = []
        answers = lost = 0
        why = "no assistant token (fault F13)"
        for one in tokens:
            assert isinstance(one, MaskedTokens)
            notes += one.notes
            answers += len(runs(one.loss_mask))
            fitted = fit(one.token_ids, one.loss_mask, settings.max_seq_len, settings.on_long)
            kept = [piece for piece in fitted if piece.loss_mask.any()]
            if UNFINISHED in one.notes:
                kept = [replace(piece, truncated=True, unfinished=True) for piece in kept]
            if one.loss_mask.any() and not kept:
                lost += len(runs(one.loss_mask))
                why = (
                    f"longer than --max-seq-len {settings.max_seq_len} ({len(one.token_ids)} tokens)"
                    if settings.on_long == "drop"
                    else f"no assistant token within --max-seq-len {settings.max_seq_len}"
                )
            pieces += kept
        if not pieces:
            return RowResult(place, [], [], answers, b"", why, lost)
        return RowResult(place, pieces, notes, answers, split_key(item), None, lost)


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of each run of ones in a mask [T]: one per answer."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


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
