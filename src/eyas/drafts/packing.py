"""Samples packed into one row for draft training, and the one place where targets are shifted.

A packed batch lays whole samples end to end, [T] tokens, without padding; `offsets` says where each begins. Row i of the draft at
training-time-test step k reads token x_{i+1+k} and predicts x_{i+2+k}; its teacher is the target's state y_{i+1+k}. Where that runs
past the end of the sample there is nothing to learn: never a token of the next sample (`supervised_rows`).

Trade-off: rows before the first one that has anything to predict (a long prompt) pass only through the key and value projections,
because nothing behind their queries reaches a loss. They are left out of everything else, which costs one index per batch and saves
most of the work on data with long prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

#: Rows of one step are padded up to a multiple of this (with rows of weight zero), so that compiled kernels see few shapes.
ROW_MULTIPLE = 64


@dataclass(frozen=True)
class Layout:
    """Where the samples lie in a packed row, on the device and as plain numbers.

    Attributes:
        lengths: tokens per sample, n entries, sum T.
        first_rows: per sample, the first row (counted within the sample) whose query matters; 0 keeps every row.
        key_offsets: [n+1] int32, sample starts among the T packed tokens.
        query_offsets: [n+1] int32, sample starts among the R query rows.
    """

    lengths: tuple[int, ...]
    first_rows: tuple[int, ...]
    key_offsets: Tensor
    query_offsets: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], first_rows: Sequence[int] | None = None) -> Layout:
        """Build from sample lengths; `first_rows` defaults to all zeros (every row is a query)."""
        first = [0] * len(lengths) if first_rows is None else list(first_rows)
        keys = np.concatenate([[0], np.cumsum(lengths)])
        queries = np.concatenate([[0], np.cumsum(np.subtract(lengths, first))])
        return cls(
            tuple(int(t) for t in lengths),
            tuple(int(f) for f in first),
            torch.from_numpy(keys.astype(np.int32)),
            torch.from_numpy(queries.astype(np.int32)),
        )

    @property
    def tokens(self) -> int:
        """T, all packed tokens."""
        return sum(self.lengths)

    @property
    def query_lengths(self) -> list[int]:
        """Query rows per sample, n entries, sum R."""
        return [t - f for t, f in zip(self.lengths, self.first_rows, strict=True)]

    @property
    def offsets(self) -> tuple[Tensor, Tensor]:
        """Starts among query rows and among tokens, as the flash kernel takes them."""
        return self.query_offsets, self.key_offsets

    @property
    def longest(self) -> tuple[int, int]:
        """Most query rows, and most tokens, of a sample."""
        return max(self.query_lengths), max(self.lengths)

    @property
    def all_rows(self) -> bool:
        """Whether every token is a query row (R = T)."""
        return not any(self.first_rows)


@dataclass(frozen=True)
class StepTargets:
    """What one training-time-test step learns from, padded to a multiple of ROW_MULTIPLE.

    Attributes:
        rows: [S] int64, indices into the R query rows.
        states: [S] int64, indices into the R query rows as well: the token whose target state y gives the teacher's logits.
        weights: [S] float32, 1 for a supervised row, 0 for padding.
        count: how many rows are supervised.
    """

    rows: Tensor
    states: Tensor
    weights: Tensor
    count: int


@dataclass(frozen=True)
class Batch:
    """Packed samples, ready for the draft.

    Attributes:
        token_ids: [T] int64. positions: [T] int64, each token's place in its own sample.
        aux: [T, L*H], the auxiliary states side by side in the draft's id order. final: [T, H], the target state before its norm.
        rows: [R] int64, the packed indices of the query rows. layout: where samples lie.
        targets: one StepTargets per training-time-test step.
    """

    token_ids: Tensor
    positions: Tensor
    aux: Tensor
    final: Tensor
    rows: Tensor
    layout: Layout
    targets: tuple[StepTargets, ...]

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    def to(self, device: torch.device | str) -> Self:
        """The same batch on `device` (asynchronously from pinned memory)."""
        return self._moved(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """The same batch in page-locked memory, so that `to` overlaps with computing."""
        return self._moved(lambda x: x.pin_memory())

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        layout = replace(
            self.layout,
            key_offsets=move(self.layout.key_offsets),
            query_offsets=move(self.layout.query_offsets),
        )
        return replace(
            self,
            token_ids=move(self.token_ids),
            positions=move(self.positions),
            aux=move(self.aux),
            final=move(self.final),
            rows=move(self.rows),
            layout=layout,
            targets=tuple(StepTargets(move(t.rows), move(t.states), move(t.weights), t.count) for t in self.targets),
        )


def supervised_rows(loss_mask: np.ndarray, step: int) -> np.ndarray:
    """The rows of one sample that learn something at a step: **the only shift in eyas's training.**

    Args:
        loss_mask: [T], 1 = this token is to be predicted.
        step: k, from 0.

    Returns:
        Ascending row numbers i with i + 2 + k < T and loss_mask[i + 2 + k] = 1: row i at step k predicts token i + 2 + k, and its
        teacher is the target's state at i + 1 + k.
    """
    shift = 2 + step
    return np.flatnonzero(np.asarray(loss_mask)[shift:])


def pack(
    token_ids: Sequence[np.ndarray],
    loss_masks: Sequence[np.ndarray],
    aux: Sequence[Tensor],
    final: Sequence[Tensor],
    steps: int,
    *,
    skip_prompts: bool = True,
    row_multiple: int = ROW_MULTIPLE,
) -> Batch:
    """Pack n samples end to end.

    Args:
        token_ids, loss_masks: n arrays [T_s]. aux: n tensors [T_s, L*H]. final: n tensors [T_s, H].
        steps: K, how many training-time-test steps to prepare targets for.
        skip_prompts: leave rows before the first useful one out of the queries. Losses and gradients are the same either way.
        row_multiple: pad each step's rows up to a multiple of this.
    """
    lengths = [len(ids) for ids in token_ids]
    first_rows = []
    for length, mask in zip(lengths, loss_masks, strict=True):
        useful = [rows[0] for rows in (supervised_rows(mask, k) for k in range(steps)) if len(rows)]
        first_rows.append((int(min(useful)) if useful else length - 1) if skip_prompts else 0)
    layout = Layout.of(lengths, first_rows)
    query_starts = layout.query_offsets.tolist()

    targets = []
    for step in range(steps):
        rows = np.concatenate(
            [supervised_rows(m, step) - f + q for m, f, q in zip(loss_masks, first_rows, query_starts, strict=False)]
        )
        targets.append(padded_targets(rows, rows + 1 + step, row_multiple))
    return Batch(**lay_out(token_ids, aux, final, layout), targets=tuple(targets))


def lay_out(
    token_ids: Sequence[np.ndarray], aux: Sequence[Tensor], final: Sequence[Tensor], layout: Layout
) -> dict[str, Any]:
    """The fields of a batch that do not depend on what is learnt: samples end to end, the query rows of `layout`."""
    starts = layout.key_offsets.tolist()
    rows = [np.arange(starts[s] + first, starts[s + 1]) for s, first in enumerate(layout.first_rows)]
    return {
        "token_ids": torch.from_numpy(np.concatenate(token_ids).astype(np.int64)),
        "positions": torch.from_numpy(np.concatenate([np.arange(t) for t in layout.lengths])),
        "aux": torch.cat(list(aux)),
        "final": torch.cat(list(final)),
        "rows": torch.from_numpy(np.concatenate(rows)),
        "layout": layout,
    }


def padded_targets(rows: np.ndarray, states: np.ndarray, multiple: int = ROW_MULTIPLE) -> StepTargets:
    """Rows and their states, with rows of weight zero up to a multiple."""
    count = len(rows)
    extra = -count % multiple
    weights = np.concatenate([np.ones(count, np.float32), np.zeros(extra, np.float32)])
    return StepTargets(
        torch.from_numpy(np.concatenate([rows, np.zeros(extra, np.int64)])),
        torch.from_numpy(np.concatenate([states, np.zeros(extra, np.int64)])),
        torch.from_numpy(weights),
        count,
    )
