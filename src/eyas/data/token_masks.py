"""Character spans of a rendering -> token ids and loss mask, for tokenizers with offsets and without."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from eyas.base.masks import runs
from eyas.data.placement import MaskError
from eyas.data.think_blocks import THINK_ONLY


@dataclass(frozen=True)
class MaskedText:
    """A rendering and what of it is supervised: `spans` are [start, end) in characters, in order, not touching."""

    text: str
    spans: list[tuple[int, int]]
    turns: list[int]  # which messages the spans belong to
    notes: list[str]  # what was remarkable, for the report: `unrolled`, `header differs`, `reasoning restored`, ...


@dataclass(frozen=True)
class MaskedTokens:
    """`token_ids` [T] int32 and `loss_mask` [T] uint8 of one sample, with the notes of its rendering."""

    token_ids: np.ndarray
    loss_mask: np.ndarray
    notes: list[str]


def mask_by_offsets(
    offsets: np.ndarray, spans: list[tuple[int, int]], special: re.Pattern[str], text: str
) -> tuple[np.ndarray, bool]:
    """(mask [T], True) from character offsets [T, 2]; False when a token straddles the border of a span, so that the text has to be
    tokenised in pieces, as generation does (the prompt's tokens are fixed before the answer's begin)."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    mask = np.zeros(len(offsets), dtype=np.uint8)
    clean = True
    for start, end in spans:
        inside = (starts >= start) & (ends <= end) & (ends > starts)
        straddling = np.flatnonzero((starts < end) & (ends > start) & ~inside)
        mask |= inside
        for index in straddling:
            piece = text[starts[index] : ends[index]]
            if starts[index] >= start and special.fullmatch(
                piece.rstrip()
            ):  # an end-of-turn token that swallows white space
                mask[index] = 1
            else:
                clean = False
    return mask, clean


def tokens_by_pieces(
    encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], one: MaskedText
) -> MaskedTokens:
    """Tokenise piece by piece at the borders of the spans, for tokenizers without offsets and for tokens that straddle a border.

    The pieces' texts must come back from their tokens; where a piece begins with an invented space (SentencePiece), it is encoded
    behind a piece of text that ends safely, and that piece's tokens are taken off again.

    Raises MaskError when neither gives the text back.
    """
    borders = sorted({0, len(one.text), *(b for span in one.spans for b in span)})
    supervised = {span[0] for span in one.spans}
    ids: list[int] = []
    mask: list[int] = []
    whole = encode(one.text)
    split = False
    for start, end in itertools.pairwise(borders):
        piece = one.text[start:end]
        tokens = encode(piece)
        if start > 0 and decode(ids + tokens) != one.text[:end]:
            tokens = _encode_behind(encode, decode, one.text, start, end, ids)
        ids += tokens
        mask += [int(start in supervised)] * len(tokens)
        split = True
    if split and ids != whole and decode(ids) != decode(whole):
        raise MaskError("tokenised in pieces, the text does not come back from its tokens; the mask cannot be placed")
    return MaskedTokens(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8), one.notes)


def _encode_behind(
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    text: str,
    start: int,
    end: int,
    before: list[int],
) -> list[int]:
    """Tokens of text[start:end] as they follow `before`: the tokens of text[:end] whose own text begins at `start`."""
    whole = encode(text[:end])
    low, high = 0, len(whole)
    while low < high:  # the fewest tokens whose text reaches `start`
        middle = (low + high) // 2
        if len(decode(whole[:middle])) < len(decode(before)):
            low = middle + 1
        else:
            high = middle
    if whole[:low] == before or decode(whole[:low]) == decode(before):
        return whole[low:]
    raise MaskError(
        "a token joins the prompt and the answer, and the tokenizer cannot split them; the mask cannot be placed"
    )


def shifted_mask(
    header: list[int], decode: Callable[[list[int]], str], token_ids: np.ndarray, loss_mask: np.ndarray
) -> str | None:
    """What is wrong with a mask [T] that came with its tokens [T]; None = nothing seen.

    An answer begins right behind the `header` of its turn (a think tag may stand between). A run of supervised tokens that covers a
    header, or begins one or two tokens behind one, is shifted or covers other turns.
    """
    if not header or len(header) > len(token_ids):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(token_ids, len(header))
    ends = np.flatnonzero((windows == np.asarray(header)).all(axis=1)) + len(header)
    for start, end in runs(loss_mask):
        covered = ends[(ends > start) & (ends - len(header) < end)]
        if len(covered):
            return f"loss_mask covers the generation prompt that ends at token {int(covered[0])} (supervised: {start} to {end - 1})"
        late = start - int(ends[ends <= start].max(initial=-10))
        if 0 < late <= 2 and not THINK_ONLY.fullmatch(decode(token_ids[start - late : start].tolist())):
            return f"loss_mask begins {late} token(s) behind the generation prompt (at token {start}): is it shifted?"
    return None
