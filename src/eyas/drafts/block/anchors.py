"""Blocks for training: where they begin, what each slot predicts, and what it must not learn from.

An *anchor* a is the position of the last token that is known while its hidden state is not (when serving: the token that verification just
gave). Its block drafts the n tokens behind it: draft token i is x_{a+1+i}, its teacher the target's state y_{a+i}, its predecessor x_{a+i}.
The block reads the target's states before a, of its own sample. That shift happens here alone.

An anchor is where serving would draft: a >= 1, x_a and x_{a+1} both supervised. A draft token is supervised as long as it and all before it in the
block are: nothing is learnt behind a masked token, or over the end of a sample. A block may reach there with its unsupervised slots, as it
does when serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from eyas.drafts.packing import Batch, Layout, lay_out, padded_targets


def anchor_candidates(loss_mask: np.ndarray) -> np.ndarray:
    """[T] mask -> ascending positions at which serving would draft."""
    mask = np.asarray(loss_mask, bool)
    return 1 + np.flatnonzero(mask[1:-1] & mask[2:])


def sample_anchors(loss_mask: np.ndarray, most: int, seed: int, epoch: int, sample_id: str) -> np.ndarray:
    """At most `most` anchors of a sample, ascending: drawn without replacement, anew each epoch, the same in every run."""
    candidates = anchor_candidates(loss_mask)
    if len(candidates) <= most:
        return candidates
    random = np.random.Generator(np.random.PCG64([seed, epoch, int(sample_id, 16)]))
    return np.sort(random.choice(candidates, most, replace=False))


def supervised_slots(loss_mask: np.ndarray, anchors: np.ndarray, n: int) -> np.ndarray:
    """[A, n] bool: draft token i of anchor a is in the sample and supervised, and so are those before it in the block."""
    mask, at = np.asarray(loss_mask, bool), np.asarray(anchors)[:, None] + 1 + np.arange(n)
    inside = at < len(mask)
    return np.logical_and.accumulate(inside & mask[np.minimum(at, len(mask) - 1)], axis=1)


@dataclass(frozen=True)
class BlockBatch(Batch):
    """Packed samples and the blocks in them. `targets` has one entry for each of the n draft tokens of a block; its `rows` count anchors.

    Attributes:
        anchors: [A] int64, ascending, among the T packed tokens. starts: [A] int64, where each one's sample begins.
        blocks: per sample, how many of the A anchors are its own.
    """

    anchors: Tensor
    starts: Tensor
    blocks: tuple[int, ...]

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        return replace(super()._moved(move), anchors=move(self.anchors), starts=move(self.starts))


def pack_blocks(
    token_ids: Sequence[np.ndarray],
    loss_masks: Sequence[np.ndarray],
    aux: Sequence[Tensor],
    final: Sequence[Tensor],
    anchors: Sequence[np.ndarray],
    n: int,
) -> BlockBatch:
    """Pack samples end to end, with a block of n draft tokens at each of their `anchors`; for the other arguments see `packing.pack`."""
    lengths = [len(ids) for ids in token_ids]
    # The row before an anchor too: simulated acceptance counts it under that one (`training.simulation.walk`).
    first_rows = [max(0, int(a[0]) - 1) if len(a) else t - 1 for a, t in zip(anchors, lengths, strict=True)]
    layout = Layout.of(lengths, first_rows)
    starts, query_starts = layout.key_offsets.numpy()[:-1], layout.query_offsets.numpy()[:-1]
    blocks = [len(a) for a in anchors]
    supervised = np.concatenate([supervised_slots(m, a, n) for m, a in zip(loss_masks, anchors, strict=True)])
    # Of each anchor, the row of its own target state among the R query rows.
    state = np.concatenate(
        [a - first + begin for a, first, begin in zip(anchors, first_rows, query_starts, strict=True)]
    )
    targets = []
    for i in range(n):
        rows = np.flatnonzero(supervised[:, i])
        targets.append(padded_targets(rows, state[rows] + i))
    begin = np.repeat(starts, blocks).astype(np.int64)
    return BlockBatch(
        **lay_out(token_ids, aux, final, layout),
        targets=tuple(targets),
        anchors=torch.from_numpy(np.concatenate(anchors).astype(np.int64) + begin),
        starts=torch.from_numpy(begin),
        blocks=tuple(blocks),
    )
