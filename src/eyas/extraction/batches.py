"""Which samples go into one forward pass, and in what order: pure functions of the dataset and the batch settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from eyas.base.errors import InputError
from eyas.data.dataset import Sample, TokenDataset


def plan_batches(
    lengths: np.ndarray, positions: np.ndarray, batch_tokens: int, batch_size: int | None
) -> list[list[int]]:
    """Next-fit in dataset order: rows of at most `batch_tokens` tokens and `batch_size` samples; a longer sample has its own.

    Nothing is padded, so there is nothing to gain from sorting by length, and dataset order keeps reads sequential.
    """
    batches: list[list[int]] = []
    used = 0
    for position in positions:
        length = int(lengths[position])
        if not batches or used + length > batch_tokens or (batch_size is not None and len(batches[-1]) >= batch_size):
            batches.append([])
            used = 0
        batches[-1].append(int(position))
        used += length
    return batches


def read_batches(dataset: TokenDataset, batches: Sequence[Sequence[int]], vocab_size: int) -> Iterator[list[Sample]]:
    """Read batches when they are asked for, checking token ids against the target's vocabulary.

    Raises InputError for a token id outside it: the dataset was made with another tokenizer.
    """
    for batch in batches:
        samples = [dataset[i] for i in batch]
        for position, sample in zip(batch, samples, strict=True):
            if int(sample.token_ids.max()) >= vocab_size:
                raise InputError(
                    f"{dataset.path}: sample {position} has token id {int(sample.token_ids.max())}, the target's vocabulary has {vocab_size}",
                    "the dataset changed since it was looked at; run `eyas prepare` again",
                )
        yield samples
