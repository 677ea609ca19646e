"""The token dataset: what `eyas prepare` writes and `eyas extract` reads.

On disk either
- a folder with `manifest.json` and Parquet files (`data-00000.parquet` ...), columns `sample_id` (32 hex digits), `input_ids`
  (list of int32), `loss_mask` (list of uint8, 1 = this token is to be predicted) and a few more that tell where a row came from; or
- one `.jsonl` file (or a folder with `tokenized_data.jsonl`) with `input_ids` and `loss_mask` per line.

Trade-off: only lengths and ids (20 bytes a sample) are held in memory; tokens are read when asked for, a row group or a line at a
time. Samples are addressed by content: the same tokens and mask have the same id in every run, on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from eyas.base.errors import InputError, StoreError
from eyas.base.files import content_hash
from eyas.base.manifest import MANIFEST, read_manifest

KIND = "eyas.dataset"
#: What `prepare` and `regenerate` keep beside the files of a dataset that is not finished.
PROGRESS, REGENERATION = ".progress.json", "regeneration.json"
FORMAT_VERSION = 1


def sample_id(token_ids: np.ndarray, loss_mask: np.ndarray) -> str:
    """128-bit BLAKE2b of the token ids (int32, little endian) and the mask (one byte each), as 32 hex digits.

    Resuming, sharding over workers and splitting all go by this id, so they depend on no order, batch size or worker count.
    """
    state = hashlib.blake2b(b"eyas.sample.1", digest_size=16)
    state.update(len(token_ids).to_bytes(8, "little"))
    state.update(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())
    state.update(np.ascontiguousarray(loss_mask, dtype="u1").tobytes())
    return state.hexdigest()


@dataclass(frozen=True)
class Sample:
    """One sample: `token_ids` [T] int32 and `loss_mask` [T] uint8 (1 = to be predicted)."""

    token_ids: np.ndarray
    loss_mask: np.ndarray
    id: str

    @classmethod
    def of(cls, token_ids: Any, loss_mask: Any) -> Sample:
        """Build from any integer sequences of equal length, computing the id.

        Raises InputError when the lengths differ, the sample is empty, a token id is negative or no int32, or the mask is not 0/1.
        """
        ids, mask = np.asarray(token_ids), np.asarray(loss_mask)
        if ids.ndim != 1 or mask.ndim != 1 or len(ids) != len(mask):
            raise InputError(
                f"input_ids and loss_mask must be two flat lists of one length, got shapes {list(ids.shape)} and {list(mask.shape)}"
            )
        if len(ids) == 0:
            raise InputError("the sample is empty (no tokens)")
        if not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"input_ids must be integers, got {ids.dtype}")
        if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
            raise InputError(f"token ids must lie in 0..2^31-1, got {int(ids.min())}..{int(ids.max())}")
        if mask.dtype == bool:
            mask = mask.astype(np.uint8)
        if not np.issubdtype(mask.dtype, np.integer) or not np.isin(mask, (0, 1)).all():
            raise InputError("loss_mask must hold only 0 and 1")
        ids, mask = ids.astype(np.int32), mask.astype(np.uint8)
        return cls(ids, mask, sample_id(ids, mask))

    def __len__(self) -> int:
        return len(self.token_ids)


class TokenDataset:
    """Samples on disk, by position. `ids` and `lengths` are in memory, tokens are read on demand.

    Attributes:
        path: as given. manifest: the folder's manifest, None for a bare `.jsonl`.
        ids: list of n sample ids. lengths: [n] int64, tokens per sample.
        hash: content hash over the *sorted* ids, so that order does not matter.
        repeated: how many rows were dropped because an equal sample came before.
    """

    def __init__(
        self,
        path: Path,
        manifest: dict[str, Any] | None,
        ids: list[str],
        lengths: np.ndarray,
        rows: np.ndarray,
        read: Any,
        bounds: np.ndarray,
    ):
        self.path, self.manifest = path, manifest
        first: dict[str, int] = {}
        for position, one in enumerate(ids):
            first.setdefault(one, position)
        keep = np.fromiter(first.values(), dtype=np.int64, count=len(first))
        self.repeated = len(ids) - len(keep)
        self.ids = list(first)
        self.lengths = lengths[keep]
        self._rows = rows[keep]
        self._bounds = bounds[keep]  # no token id of a sample is larger
        self._read = read
        self.hash = content_hash("".join(sorted(self.ids)).encode())

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Sum of all lengths."""
        return int(self.lengths.sum())

    def beyond(self, vocab_size: int) -> Iterator[tuple[int, int]]:
        """(position, token id) of each sample with a token that a model with `vocab_size` rows of embeddings does not have.

        Reads only where there may be one.
        """
        for position in np.flatnonzero(self._bounds >= vocab_size):
            largest = int(np.max(self._read(int(self._rows[position]))[0]))
            if largest >= vocab_size:
                yield int(position), largest

    def __getitem__(self, position: int) -> Sample:
        token_ids, loss_mask = self._read(int(self._rows[position]))
        sample = Sample.of(token_ids, loss_mask)
        if sample.id != self.ids[position]:
            raise StoreError(
                f"{self.path}: sample {position} says its id is {self.ids[position]}, its content gives {sample.id}",
                "the dataset changed or is damaged; run `eyas prepare` again",
            )
        return sample

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))


def is_dataset(path: Path) -> bool:
    """Whether a path is a token dataset (of any form) and not another stage's folder."""
    if path.is_file() or (path / "tokenized_data.jsonl").exists() or _unfinished(path):
        return True
    try:
        return json.loads((path / MANIFEST).read_text(encoding="utf-8")).get("kind") == KIND
    except (OSError, ValueError, AttributeError):
        return False


def _unfinished(path: Path) -> str | None:
    """The stage that has not finished this dataset; None for what is finished or no dataset."""
    if (path / MANIFEST).exists():
        return None
    stages = {"prepare": PROGRESS, "regenerate": REGENERATION}
    return next((stage for stage, name in stages.items() if (path / name).exists()), None)


def open_dataset(path: str | Path) -> TokenDataset:
    """Open a dataset folder, a `.jsonl` of token rows, or a folder that holds `tokenized_data.jsonl`.

    Raises:
        InputError: not there, or a line of the `.jsonl` is wrong (file, line and reason are named).
        StoreError: a dataset folder whose manifest or files do not fit, or whose stage was interrupted.
    """
    path = Path(path)
    if path.is_dir() and (path / MANIFEST).exists():
        return _open_parquet(path)
    if path.is_dir() and (path / "tokenized_data.jsonl").exists():
        path = path / "tokenized_data.jsonl"
    if path.is_file() and path.suffix in {".jsonl", ".json"}:
        return _open_jsonl(path)
    if stage := _unfinished(path):
        raise StoreError(
            f"{path}: `eyas {stage}` was interrupted, or is still running", "rerun the same command to resume"
        )
    if not path.exists():
        raise InputError(
            f"{path} does not exist",
            "give --prepared-data a dataset folder from `eyas prepare`, or a .jsonl with input_ids and loss_mask per line",
        )
    raise InputError(
        f"{path} is no token dataset (no {MANIFEST}, no tokenized_data.jsonl)",
        "make one with `eyas prepare --data FILE --output-dir DIR`",
    )


def _open_jsonl(path: Path) -> TokenDataset:
    ids: list[str] = []
    lengths: list[int] = []
    offsets: list[int] = []
    largest: list[int] = []
    with open(path, "rb") as file:
        offset = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                sample = _parse_row(path, number, line)
                ids.append(sample.id)
                lengths.append(len(sample))
                offsets.append(offset)
                largest.append(int(sample.token_ids.max()))
            offset += len(line)
    if not ids:
        raise InputError(f"{path} holds no samples", "one JSON object with input_ids and loss_mask per line")

    def read(at: int) -> tuple[Any, Any]:
        with open(path, "rb") as source:
            source.seek(at)
            row = json.loads(source.readline())
        return row["input_ids"], row["loss_mask"]

    n_tokens, places, bounds = np.array([lengths, offsets, largest], dtype=np.int64)
    return TokenDataset(path, None, ids, n_tokens, places, read, bounds)


def _parse_row(path: Path, number: int, line: bytes) -> Sample:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}:{number}: not JSON ({error})", "one JSON object per line") from None
    if not isinstance(row, dict) or "input_ids" not in row or "loss_mask" not in row:
        keys = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise InputError(
            f"{path}:{number}: expected input_ids and loss_mask, found {keys}",
            "chat data goes through `eyas prepare` first",
        )
    try:
        return Sample.of(row["input_ids"], row["loss_mask"])
    except InputError as error:
        raise InputError(f"{path}:{number}: {error.what}", error.remedy) from None
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}:{number}: input_ids and loss_mask must be flat lists of integers ({error})") from None


def _open_parquet(folder: Path) -> TokenDataset:
    import pyarrow as pa
    import pyarrow.parquet as pq

    manifest = read_manifest(folder, KIND, FORMAT_VERSION, ("files",))
    ids: list[str] = []
    lengths: list[np.ndarray] = []
    bounds: list[np.ndarray] = []
    places: list[tuple[Path, int, int]] = []  # file, row group, first row (overall)
    total = 0
    try:
        files = [folder / entry["name"] for entry in manifest["files"]]
    except (KeyError, TypeError):
        raise StoreError(f"{folder / MANIFEST} has a damaged `files`", "run `eyas prepare` again") from None
    for file in files:
        if not file.exists():
            raise StoreError(
                f"{file} is missing, the manifest names it", "the dataset is incomplete; run `eyas prepare` again"
            )
        try:
            table = pq.ParquetFile(file)
            for group in range(table.num_row_groups):
                columns = table.read_row_group(group, columns=["sample_id", "n_tokens"])
                ids += columns["sample_id"].to_pylist()
                lengths.append(columns["n_tokens"].to_numpy())
                bounds.append(np.full(columns.num_rows, _largest(table, group), dtype=np.int64))
                places.append((file, group, total))
                total += columns.num_rows
        except (pa.ArrowInvalid, OSError, KeyError) as error:
            raise StoreError(f"{file} is not a readable dataset file: {error}", "run `eyas prepare` again") from None
    if not ids:
        raise StoreError(
            f"{folder} holds no samples", "run `eyas prepare` again; its report says why rows were dropped"
        )
    starts = np.array([first for _, _, first in places])

    @lru_cache(maxsize=8)
    def group_of(index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        file, group, _ = places[index]
        columns = pq.ParquetFile(file).read_row_group(group, columns=["input_ids", "loss_mask"])
        tokens, mask = columns["input_ids"].combine_chunks(), columns["loss_mask"].combine_chunks()
        return tokens.offsets.to_numpy(), tokens.values.to_numpy(), mask.values.to_numpy()

    def read(row: int) -> tuple[Any, Any]:
        index = int(np.searchsorted(starts, row, side="right")) - 1
        offsets, tokens, mask = group_of(index)
        at = row - places[index][2]
        return tokens[offsets[at] : offsets[at + 1]], mask[offsets[at] : offsets[at + 1]]

    dataset = TokenDataset(
        folder, manifest, ids, np.concatenate(lengths).astype(np.int64), np.arange(total), read, np.concatenate(bounds)
    )
    if manifest.get("hash") not in (None, dataset.hash):
        raise StoreError(
            f"{folder}: the manifest's hash {manifest['hash']} does not fit the samples ({dataset.hash})",
            "the dataset was changed by hand or is damaged; run `eyas prepare` again",
        )
    return dataset


def _largest(table: Any, group: int) -> int:
    """The largest token id of a row group, from the file's own statistics; without these, no bound."""
    columns = table.metadata.row_group(group)
    found = next(c for c in map(columns.column, range(columns.num_columns)) if c.path_in_schema.startswith("input_ids"))
    known = found.statistics is not None and found.statistics.has_min_max
    return int(found.statistics.max) if known else np.iinfo(np.int32).max


#: Rows per Parquet row group: what one read brings into memory.
ROWS_PER_GROUP = 512
#: Long samples close a group earlier, so that memory stays bounded.
TOKENS_PER_GROUP = 4_000_000


class DatasetWriter:
    """Streams samples into `data-*.parquet` and writes the manifest last: a folder without one is no dataset."""

    def __init__(self, folder: str | Path, rows_per_file: int = 64 * ROWS_PER_GROUP):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows_per_file = rows_per_file
        self.files: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.tokens = self.supervised = 0
        self._pending: list[dict[str, Any]] = []
        self._pending_tokens = 0
        self._writer: Any = None

    def add(self, sample: Sample, **extra: Any) -> None:
        """Append a sample. `extra`: `source` (file:line), `truncated`, `split`, `count`, `finish_reason`."""
        self.ids.append(sample.id)
        self.tokens += len(sample)
        self.supervised += int(sample.loss_mask.sum())
        self._pending.append(
            {
                "sample_id": sample.id,
                "n_tokens": len(sample),
                "input_ids": sample.token_ids,
                "loss_mask": sample.loss_mask,
                "source": extra.get("source"),
                "truncated": bool(extra.get("truncated", False)),
                "split": extra.get("split"),
                "count": int(extra.get("count", 1)),
                "finish_reason": extra.get("finish_reason"),
            }
        )
        self._pending_tokens += len(sample)
        if len(self._pending) >= ROWS_PER_GROUP or self._pending_tokens >= TOKENS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._pending:
            return
        schema = pa.schema(
            [
                ("sample_id", pa.string()),
                ("n_tokens", pa.int32()),
                ("input_ids", pa.list_(pa.int32())),
                ("loss_mask", pa.list_(pa.uint8())),
                ("source", pa.string()),
                ("truncated", pa.bool_()),
                ("split", pa.string()),
                ("count", pa.int32()),
                ("finish_reason", pa.string()),
            ]
        )
        if self._writer is None:
            name = f"data-{len(self.files):05d}.parquet"
            self._writer = pq.ParquetWriter(self.folder / name, schema, compression="zstd")
            self.files.append({"name": name, "rows": 0})
        starts = np.cumsum([0, *(row["n_tokens"] for row in self._pending)], dtype=np.int32)
        columns: list[Any] = []
        for column in schema:
            values = [row[column.name] for row in self._pending]
            if column.name in ("input_ids", "loss_mask"):  # one flat array: ten times faster than row by row
                columns.append(pa.ListArray.from_arrays(pa.array(starts), pa.array(np.concatenate(values))))
            else:
                columns.append(pa.array(values, column.type))
        self._writer.write_table(pa.Table.from_arrays(columns, schema=schema))
        self.files[-1]["rows"] += len(self._pending)
        self._pending, self._pending_tokens = [], 0
        if self.files[-1]["rows"] >= self.rows_per_file:
            self._writer.close()
            self._writer = None

    def finish_files(self) -> None:
        """Write what is pending and close the last file; without a manifest the folder is no dataset yet."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def close(self, **fields: Any) -> dict[str, Any]:
        """Finish the files and write `manifest.json` with `fields` (source, tokenizer, template, counts). Returns the manifest."""
        from eyas.base.files import write_json
        from eyas.base.manifest import made_by, now

        self.finish_files()
        manifest = {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "created": now(),
            "made_by": made_by(),
            "hash": content_hash("".join(sorted(set(self.ids))).encode()),
            "samples": len(self.ids),
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "files": self.files,
            **fields,
        }
        write_json(self.folder / MANIFEST, manifest)
        return manifest
