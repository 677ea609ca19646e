"""Checksums of a shard's tensors: of each whole tensor, and of each sample's rows in it.

`eyas verify` compares whole tensors. Whoever reads single samples (`eyas train`, in random order) compares just the rows that are read
anyway: a sample costs no other byte of its shard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import torch
import xxhash

from eyas.base.tensors import bytes_of

#: Hex digits of one sample's checksum (xxh3-64).
DIGITS = 16


def tensor_checksum(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(bytes_of(tensor))


def rows_checksum(rows: torch.Tensor) -> str:
    """xxh3-64 of some rows' bytes, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(bytes_of(rows))


def row_sums(rows: torch.Tensor) -> torch.Tensor:
    """[T, H] -> [T] int64: the sum of each row's bytes, read as the widest integers that fit, modulo 2^64.

    The same on every device, whatever the bytes mean: NaN equals NaN. Thirty times as fast as a norm on a CPU, one reduction on a GPU.
    """
    words = next(w for w in (torch.int64, torch.int32, torch.int16, torch.uint8) if rows[:1].nbytes % w.itemsize == 0)
    return rows.contiguous().view(words).sum(dim=1, dtype=torch.int64)


def of_states(name: str) -> bool:
    """Whether a tensor holds states (or their scales): those have checksums by sample. Tokens and mask have the sample's id."""
    return name.startswith(("hidden.", "scale."))


def checksums_of(name: str, tensor: torch.Tensor, offsets: np.ndarray) -> tuple[str, str | None]:
    """The checksum of a shard's tensor, and for states those of its samples, 16 digits each, joined.

    Args:
        offsets: [n+1], rows of sample j are `offsets[j]:offsets[j + 1]`.

    One pass over the memory: a sample's rows are still in the processor's cache when they are hashed again.
    """
    if not of_states(name):
        return tensor_checksum(tensor), None
    data, width = bytes_of(tensor), tensor[:1].numel() * tensor.element_size()
    whole, each = xxhash.xxh3_128(), []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        rows = data[begin * width : end * width]
        whole.update(rows)
        each.append(xxhash.xxh3_64_hexdigest(rows))
    return whole.hexdigest(), "".join(each)


def checksum_metadata(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The entries `checksums` and `sample_checksums` of a shard's header, from all its tensors (docs/format.md)."""
    found = {name: checksums_of(name, tensor, tensors["offsets"].numpy()) for name, tensor in tensors.items()}
    return {
        "checksums": json.dumps({name: whole for name, (whole, _) in found.items()}),
        "sample_checksums": json.dumps({name: each for name, (_, each) in found.items() if each is not None}),
    }


def read_sample_checksums(text: str, wanted: set[str], samples: int) -> dict[str, str]:
    """The entry `sample_checksums` of a shard's header: tensor name -> checksums of its samples.

    Raises:
        ValueError: other tensors than `wanted`, or not one checksum per sample.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or set(found) != wanted:
        raise ValueError(f"sample_checksums must name {', '.join(sorted(wanted))}")
    for name, digits in found.items():
        if not isinstance(digits, str) or len(digits) != DIGITS * samples or set(digits) - set("0123456789abcdef"):
            raise ValueError(f"sample_checksums of {name} must be {samples} times {DIGITS} hex digits")
    return found
