"""Reading a state store: shards mapped into memory, samples compared with their checksums when they are first read.

Opening costs the headers, `states[i]` costs the rows of one sample and the layers asked for. What changed on the disk after
`eyas verify` is found before anyone uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.base.errors import InputError, StoreError
from eyas.data.dataset import sample_id
from eyas.store.checksums import DIGITS, rows_checksum
from eyas.store.format import (
    DTYPES,
    ShardHeader,
    differences_from_manifest,
    finished_shards,
    open_shard,
    read_store_manifest,
)


@dataclass(frozen=True)
class StateSample:
    """One sample read back. `token_ids` [T] int32, `loss_mask` [T] uint8, `hidden`: layer id -> [T, H] in the compute dtype."""

    id: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden: dict[int, torch.Tensor]

    def __len__(self) -> int:
        return len(self.token_ids)


class States(torch.utils.data.Dataset[StateSample]):
    """A store, read by position; also a map-style `torch.utils.data.Dataset` (each loader worker opens its own maps).

    Attributes:
        path, manifest. layer_ids: the ids this reader returns. lengths: [n] int64 tokens per sample. ids: n sample ids.

    Samples come in the order of shard names, then of rows. Tensors are views of the memory map unless the store is fp8
    (then they are dequantised copies).

    The first time that a sample is read, what is read of it is compared with its checksums (`check=False`: not).
    """

    def __init__(
        self,
        path: Path,
        manifest: dict[str, Any],
        headers: Sequence[ShardHeader],
        layer_ids: Sequence[int],
        check: bool = True,
    ):
        self.path, self.manifest, self.layer_ids = path, manifest, tuple(layer_ids)
        self._headers = list(headers)
        self.ids: list[str] = [one for header in headers for one in header.sample_ids]
        counts = [len(header.sample_ids) for header in headers]
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.lengths = np.concatenate([np.diff(h.offsets) for h in headers]) if headers else np.zeros(0, np.int64)
        self._position = {one: i for i, one in enumerate(self.ids)}
        if len(self._position) != len(self.ids):
            twice = next(one for i, one in enumerate(self.ids) if self._position[one] != i)
            raise StoreError(f"{path}: sample {twice} stands in two shards", "two runs were mixed; make the store anew")
        self._files: dict[int, Any] = {}
        # What need not be compared (again). Two arrays, since two threads may read, and setting one element disturbs no other.
        self._tokens_sound, self._states_sound = (np.full(len(self.ids), not check) for _ in range(2))

    def __len__(self) -> int:
        return len(self.ids)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def index_of(self, sample_id: str) -> int:
        """Position of a sample id. Raises KeyError when the store does not hold it."""
        return self._position[sample_id]

    def __getitem__(self, index: int) -> StateSample:
        """One sample.

        Raises:
            StoreError: its content is not what was written, or its shard is gone. IndexError.
        """
        token_ids, loss_mask = self.compare(index)
        _, shard, at, rows = self._place(index)
        header, file = self._headers[shard], self._file(shard)
        hidden = {}
        for i in self.layer_ids:
            tensor = file.get_tensor(f"hidden.{i}")[rows]
            if header.metadata["store_dtype"] == "fp8":
                scale = file.get_tensor(f"scale.{i}")[rows]
                tensor = (tensor.float() * scale[:, None]).to(DTYPES[header.metadata["dtype"]])
            hidden[i] = tensor
        return StateSample(header.sample_ids[at], token_ids, loss_mask, hidden)

    def compare(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare a sample with its checksums, unless it was, so that `states[index]` need not; gives what `tokens` does. Raises as that."""
        tokens_and_mask = self.tokens(index)
        index, shard, at, rows = self._place(index)
        if not self._states_sound[index]:
            header, file = self._headers[shard], self._file(shard)
            kinds = ("hidden", "scale") if header.metadata["store_dtype"] == "fp8" else ("hidden",)
            for name in [f"{kind}.{i}" for i in self.layer_ids for kind in kinds]:
                want = header.sample_checksums[name][DIGITS * at : DIGITS * (at + 1)]
                got = rows_checksum(file.get_tensor(name)[rows])
                if got != want:
                    what = f"sample {self.ids[index]}, {name}: the checksum is {got}, its header says {want}"
                    raise self._changed(shard, what)
            self._states_sound[index] = True
        return tokens_and_mask

    def tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`token_ids` [T] int32 and `loss_mask` [T] uint8 of one sample; no state is read. Raises as `states[i]`."""
        index, shard, _, rows = self._place(index)
        file = self._file(shard)
        token_ids, loss_mask = file.get_tensor("token_ids")[rows], file.get_tensor("loss_mask")[rows]
        if not self._tokens_sound[index]:
            found = sample_id(token_ids.numpy(), loss_mask.numpy())
            if found != self.ids[index]:
                raise self._changed(shard, f"sample {self.ids[index]}: the id of its tokens and mask is {found} now")
            self._tokens_sound[index] = True
        return token_ids, loss_mask

    def _place(self, index: int) -> tuple[int, int, int, slice]:
        """Position (0..n-1), its shard, its place in the shard, its rows there."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} in a store of {len(self)} samples")
        index %= len(self)
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        at = index - int(self._starts[shard])
        offsets = self._headers[shard].offsets
        return index, shard, at, slice(int(offsets[at]), int(offsets[at + 1]))

    def _file(self, shard: int) -> Any:
        if shard not in self._files:
            self._files[shard] = open_shard(self._headers[shard].path)
        return self._files[shard]

    def _changed(self, shard: int, what: str) -> StoreError:
        return StoreError(
            f"{self._headers[shard].path}: {what}; the content changed after it was written",
            "delete this one file, rerun the same `eyas extract` (only its samples are made anew), then `eyas verify`; "
            "if it comes again, look at the disk",
        )

    def __iter__(self) -> Iterator[StateSample]:
        return (self[i] for i in range(len(self)))


def open_states(
    path: str | Path, layers: Sequence[int] | None = None, *, allow_open: bool = False, check: bool = True
) -> States:
    """Open a state store for reading.

    Args:
        path: the store's directory.
        layers: read only these ids (default: all, in the store's order).
        allow_open: also read a store whose run has not finished.
        check: compare each sample with its checksums when it is first read.

    Raises:
        StoreError: no store, a damaged shard, shards that disagree with the manifest, an unfinished run.
        InputError: a layer that the store does not hold.
    """
    path = Path(path)
    manifest = read_store_manifest(path)
    if manifest["status"] == "open" and not allow_open:
        raise StoreError(
            f"{path} is not finished (its last run was stopped or is still writing)",
            "rerun the same `eyas extract`: it resumes",
        )
    headers = finished_shards(path)
    for header in headers:
        lines = differences_from_manifest(header, manifest)
        if lines:
            raise StoreError(
                f"{header.path} does not belong to this store, it is of another run:\n  " + "\n  ".join(lines),
                "the directory was used for two runs; take this shard out",
            )
    if manifest["status"] != "open":
        named = {entry["name"] for entry in manifest.get("shards", [])}
        found = {header.path.name for header in headers}
        if named != found:
            raise StoreError(
                f"{path}: the manifest names {len(named)} shards, {len(found)} exist ({', '.join(sorted(named ^ found)[:5])})",
                "rerun the same `eyas extract`: it makes only what is missing",
            )
    unknown = [i for i in layers or [] if i not in manifest["layer_ids"]]
    if unknown:
        raise InputError(
            f"{path} holds layers {manifest['layer_ids']}, not {unknown}", "extract them, or ask for others"
        )
    return States(path, manifest, headers, layers or manifest["layer_ids"], check)
