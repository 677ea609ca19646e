"""The state store: what `eyas extract` writes and everything after it reads. The format itself is `docs/format.md`.

    <folder>/manifest.json                  what this is, of which model, which layers, from which dataset
             shard-<writer>-<seq>.safetensors   whole samples, ragged, one tensor per layer
             ledger.jsonl                   one line for each sample that was not written, with the reason

Reading maps files into memory: opening costs the headers, `states[i]` costs the rows of one sample and the layers asked for. The first
time, these rows are compared with their checksums: what changed on the disk after `eyas verify` is found before anyone uses it.
Writing is in `shard_writer.py`; checking a whole store in `verification.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from eyas.base.errors import FolderConflictError, InputError, StoreError
from eyas.base.manifest import MANIFEST, differing_fields, made_by, now, read_manifest, write_json
from eyas.data.dataset import sample_id
from eyas.store.checksums import of_states, read_sample_checksums, states_changed

KIND = "eyas.states"
FORMAT_VERSION = 1
LEDGER = "ledger.jsonl"
#: Files that belong to a store folder; anything else in an output folder is refused before a run.
STORE_FILES = {
    MANIFEST,
    LEDGER,
    "shard-*.safetensors",
    "shard-*.safetensors.tmp",
    ".lock*",
    ".manifest.json.*.tmp",
    "trace-*.jsonl",
    "fault-*.json",
    ".parity-*",
}

#: dtypes a state can be computed and stored in, by their name in manifests and headers.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORE_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class StoreSpec:
    """What a store holds; shared by every writer of it, repeated in every shard.

    Attributes:
        model: `id`, `revision`, `config_hash`, `weights_hash`, `architecture`, `num_layers`, `hidden_size`, `vocab_size`,
            `final_norm` ({`kind`: rms | rms_1p | layer, `eps`}), `tied_head`.
        layer_ids: our ids (stream numbering), in the order asked.
        dtype: compute dtype of the states. store_dtype: the same, or `fp8` (e4m3 with one float32 scale per token and layer).
        dataset: `hash`, `samples`, `tokens`, `path`.
        engine: `name`, `version` and what else tells how it ran. capture: batching and the like. Both are recorded, not compared.
    """

    model: dict[str, Any]
    layer_ids: tuple[int, ...]
    dtype: str
    store_dtype: str
    dataset: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    capture: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> StoreSpec:
        """The spec that a store's manifest was written from."""
        values = {f.name: manifest[f.name] for f in fields(cls)}
        return cls(**{**values, "layer_ids": tuple(values["layer_ids"])})

    @property
    def hidden_size(self) -> int:
        return int(self.model["hidden_size"])

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in a shard, all layers, ids, mask and scales included."""
        return len(self.layer_ids) * self.layer_bytes_per_token + 5

    @property
    def layer_bytes_per_token(self) -> int:
        width = self.hidden_size * STORE_DTYPES[self.store_dtype].itemsize
        return width + 4 if self.store_dtype == "fp8" else width

    def identity(self) -> dict[str, Any]:
        """The fields that two runs into one folder must share: a difference means other states."""
        model = {k: self.model.get(k) for k in ("config_hash", "weights_hash", "num_layers", "hidden_size")}
        return {
            "model": model,
            "layer_ids": list(self.layer_ids),
            "layer_index": "stream",
            "dtype": self.dtype,
            "store_dtype": self.store_dtype,
            "dataset": {"hash": self.dataset["hash"]},
        }

    def metadata(self) -> dict[str, str]:
        """What every shard's header says of itself, as safetensors wants it: strings to strings."""
        return {
            "format": KIND,
            "format_version": str(FORMAT_VERSION),
            "model": json.dumps(self.model),
            "layer_ids": json.dumps(list(self.layer_ids)),
            "layer_index": "stream",
            "dtype": self.dtype,
            "store_dtype": self.store_dtype,
            "dataset_hash": self.dataset["hash"],
        }


def write_store_manifest(folder: Path, spec: StoreSpec, status: str, **more: Any) -> dict[str, Any]:
    """Write `manifest.json`. `status`: `open` while a run writes, then `complete` or `incomplete` (see the ledger)."""
    created = now()
    if (folder / MANIFEST).exists():
        created = read_manifest(folder, KIND, FORMAT_VERSION).get("created", created)
    manifest = {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "status": status,
        "created": created,
        "updated": now(),
        "made_by": made_by(),
        "layer_index": "stream",
        **asdict(spec),
        "layer_ids": list(spec.layer_ids),
        **more,
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def refuse_other_states(folder: Path, spec: StoreSpec) -> dict[str, Any] | None:
    """Compare an existing store with what this run would write; None when the folder holds no manifest yet.

    Raises:
        FolderConflictError: other model, layers, dtype or dataset (each differing field is named), or shards without a manifest.
    """
    if not (folder / MANIFEST).exists():
        orphans = sorted(p.name for p in folder.glob("shard-*.safetensors")) if folder.is_dir() else []
        if orphans:
            raise FolderConflictError(
                f"{folder} holds shards ({orphans[0]} ...) but no {MANIFEST}: of which run they are, nothing tells (fault F12)",
                "name a new --output-dir, or put the manifest back",
            )
        return None
    try:
        manifest = read_manifest(folder, KIND, FORMAT_VERSION)
    except StoreError as error:
        raise FolderConflictError(error.what, "name another --output-dir") from None
    have = {
        "model": {k: manifest["model"].get(k) for k in spec.identity()["model"]},
        **{k: manifest.get(k) for k in ("layer_ids", "layer_index", "dtype", "store_dtype")},
        "dataset": {"hash": manifest["dataset"]["hash"]},
    }
    lines = differing_fields(have, spec.identity())
    if lines:
        raise FolderConflictError(
            f"{folder} holds states of another run (fault F12):\n  " + "\n  ".join(lines),
            "name another --output-dir; stores are never mixed",
        )
    return manifest


# --- one shard ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says of itself, checked for structure but not yet for content.

    `sample_ids` are hex; sample j holds rows `offsets[j]:offsets[j + 1]` of every tensor. `sample_checksums`: tensor name -> 16 hex
    digits for each sample, joined; empty for shards of an eyas that wrote none.
    """

    path: Path
    metadata: dict[str, str]
    sample_ids: tuple[str, ...]
    offsets: np.ndarray
    layer_ids: tuple[int, ...]
    checksums: dict[str, str]
    sample_checksums: dict[str, str]

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])


def ids_to_words(ids: Sequence[str]) -> torch.Tensor:
    """Hex sample ids -> [n, 2] int64: the id's 16 bytes as two little-endian 64-bit words (unsigned bits in int64)."""
    words = np.frombuffer(b"".join(bytes.fromhex(i) for i in ids), dtype="<i8").reshape(-1, 2)
    return torch.from_numpy(words.copy())


def words_to_ids(words: torch.Tensor) -> tuple[str, ...]:
    """Inverse of `ids_to_words`."""
    raw = words.numpy().astype("<i8").tobytes()
    return tuple(raw[i : i + 16].hex() for i in range(0, len(raw), 16))


def zero_states(layer_id: int, norms: torch.Tensor) -> torch.Tensor:
    """Which rows are wrongly all zero, [T] bool, from their norms [T].

    A residual stream is never zero, but an embedding (id 0) may be: padding tokens often have a zero row. There only a whole
    run of zeros is wrong.
    """
    zero = norms == 0
    return zero if layer_id != 0 or bool(zero.all()) else torch.zeros_like(zero)


def open_shard(path: Path) -> Any:
    """Memory-map a shard.

    Raises:
        StoreError: the file is missing, truncated, or its safetensors header is damaged or hostile.
    """
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise StoreError(f"{path} is missing", "the store is incomplete; run the same `eyas extract` again") from None
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} is no readable shard, cut short or damaged (fault F10): {error}", _REMAKE) from None


_REMAKE = "delete this one file and run the same `eyas extract` again: only its samples are made anew"


def read_shard_header(path: Path) -> ShardHeader:
    """Open a shard and check everything that does not need its bulk: names, dtypes, shapes, offsets, ids.

    Raises:
        StoreError: naming the file and what about it is wrong.
    """

    def wrong(what: str) -> StoreError:
        return StoreError(f"{path}: {what}", _REMAKE)

    file = open_shard(path)
    metadata = file.metadata() or {}
    if metadata.get("format") != KIND:
        raise wrong(f"format is {metadata.get('format')!r}, expected {KIND!r}")
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise wrong(f"format version {metadata.get('format_version')!r}, this eyas reads {FORMAT_VERSION}")
    try:
        layer_ids = tuple(int(i) for i in json.loads(metadata["layer_ids"]))
        model = json.loads(metadata["model"])
        hidden_size = int(model["hidden_size"])
        checksums = dict(json.loads(metadata["checksums"]))
        store_dtype = STORE_DTYPES[metadata["store_dtype"]]
        if metadata["dtype"] not in DTYPES:
            raise KeyError(metadata["dtype"])
    except (KeyError, ValueError, TypeError, json.JSONDecodeError) as error:
        raise wrong(f"its metadata is incomplete or malformed ({type(error).__name__}: {error})") from None

    wanted = {"token_ids", "loss_mask", "offsets", "sample_ids", *(f"hidden.{i}" for i in layer_ids)}
    if metadata["store_dtype"] == "fp8":
        wanted |= {f"scale.{i}" for i in layer_ids}
    names = set(file.keys())
    if names != wanted or set(checksums) != wanted:
        odd = sorted(names ^ wanted) or sorted(set(checksums) ^ wanted)
        raise wrong(f"its tensors do not fit its layer ids {list(layer_ids)}: {', '.join(odd)} missing or unexpected")

    offsets_slice, ids_slice = file.get_slice("offsets"), file.get_slice("sample_ids")
    if offsets_slice.get_dtype() != "I64" or len(offsets_slice.get_shape()) != 1 or offsets_slice.get_shape()[0] < 2:
        raise wrong(
            f"offsets must be [n+1] int64 with n >= 1, got {offsets_slice.get_shape()} {offsets_slice.get_dtype()}"
        )
    n = offsets_slice.get_shape()[0] - 1
    if ids_slice.get_dtype() != "I64" or ids_slice.get_shape() != [n, 2]:
        raise wrong(f"sample_ids must be [{n}, 2] int64, got {ids_slice.get_shape()} {ids_slice.get_dtype()}")
    offsets = file.get_tensor("offsets").numpy()
    tokens = int(offsets[-1])
    if offsets[0] != 0 or (np.diff(offsets) <= 0).any():
        raise wrong("offsets must start at 0 and rise strictly: samples would overlap or be empty")
    shapes = {"token_ids": ([tokens], "I32"), "loss_mask": ([tokens], "U8")}
    for i in layer_ids:
        shapes[f"hidden.{i}"] = ([tokens, hidden_size], _SAFETENSORS_NAME[store_dtype])
        if metadata["store_dtype"] == "fp8":
            shapes[f"scale.{i}"] = ([tokens], "F32")
    for name, (shape, dtype) in shapes.items():
        found = file.get_slice(name)
        if found.get_shape() != shape or found.get_dtype() != dtype:
            raise wrong(f"{name} must be {shape} {dtype}, got {found.get_shape()} {found.get_dtype()}")
    ids = words_to_ids(file.get_tensor("sample_ids"))
    if len(set(ids)) != n:
        raise wrong("a sample id stands twice in this shard")
    try:
        by_sample = read_sample_checksums(metadata, {name for name in wanted if of_states(name)}, n)
    except ValueError as error:
        raise wrong(f"its metadata is malformed: {error}") from None
    return ShardHeader(path, metadata, ids, offsets, layer_ids, checksums, by_sample)


_SAFETENSORS_NAME = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}


def finished_shards(folder: Path) -> list[ShardHeader]:
    """Headers of all finished shards (temporary files are ignored), by name. Raises StoreError for a damaged one."""
    return [read_shard_header(path) for path in sorted(folder.glob("shard-*.safetensors"))]


def done_samples(folder: Path) -> set[str]:
    """Ids of the samples in finished shards: what a resumed run need not compute again. Raises as `distinct_samples`."""
    return distinct_samples(finished_shards(folder))


def distinct_samples(headers: Sequence[ShardHeader]) -> set[str]:
    """Ids of the samples in some shards. Raises StoreError when two shards hold the same sample."""
    where: dict[str, Path] = {}
    for header in headers:
        for one in header.sample_ids:
            if where.setdefault(one, header.path) != header.path:
                raise StoreError(
                    f"{header.path}: sample {one} stands in {where[one].name} too (fault F11)",
                    "take one of the two shards out and run the same `eyas extract` again: it makes what is missing",
                )
    return set(where)


# --- reading --------------------------------------------------------------------------------------------------------


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

    The first time that a sample is read, what is read of it is compared with its checksums (`check=False`: not). A shard without
    checksums by sample, of an earlier eyas, is then compared whole, which costs its whole reading once.
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
            raise StoreError(
                f"{path}: sample {twice} stands in two shards (fault F11)", "two runs were mixed; make the store anew"
            )
        self._files: dict[int, Any] = {}
        # What need not be compared (again). Two arrays, since two threads may read, and setting one element disturbs no other.
        self._tokens_sound, self._states_sound = (np.full(len(self.ids), not check) for _ in range(2))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def compared_whole(self) -> list[Path]:
        """Shards that hold no checksums by sample."""
        return [header.path for header in self._headers if not header.sample_checksums]

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
        index, shard, at, _ = self._place(index)
        if not self._states_sound[index]:
            header = self._headers[shard]
            changed = states_changed(header, self._file(shard), at, self.layer_ids)
            if changed:
                raise self._changed(shard, changed)
            count = 1 if header.sample_checksums else len(header.sample_ids)
            first = index if header.sample_checksums else int(self._starts[shard])
            self._states_sound[first : first + count] = True
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
            "delete this one file, run the same `eyas extract` again (only its samples are made anew), then `eyas verify`; "
            "if it comes again, look at the disk",
        )

    def __iter__(self) -> Iterator[StateSample]:
        return (self[i] for i in range(len(self)))


def differences_from_manifest(header: ShardHeader, manifest: dict[str, Any]) -> list[str]:
    """What a shard says of itself that the store's manifest says otherwise; empty for a shard of this store."""
    own, model = json.loads(header.metadata["model"]), manifest["model"]
    said = {
        "layer_ids": list(header.layer_ids),
        "dataset": header.metadata.get("dataset_hash"),
        "dtype": header.metadata["dtype"],
        "store_dtype": header.metadata["store_dtype"],
        "config_hash": own.get("config_hash"),
        "weights_hash": own.get("weights_hash"),
    }
    want = {
        "layer_ids": manifest["layer_ids"],
        "dataset": manifest["dataset"]["hash"],
        "dtype": manifest["dtype"],
        "store_dtype": manifest["store_dtype"],
        "config_hash": model.get("config_hash"),
        "weights_hash": model.get("weights_hash"),
    }
    return differing_fields(said, want)


def open_states(
    path: str | Path, layers: Sequence[int] | None = None, *, allow_open: bool = False, check: bool = True
) -> States:
    """Open a state store for reading.

    Args:
        path: the store's folder.
        layers: read only these ids (default: all, in the store's order).
        allow_open: also read a store whose run has not finished.
        check: compare each sample with its checksums when it is first read.

    Raises:
        StoreError: no store, a damaged shard, shards that disagree with the manifest, an unfinished run.
        InputError: a layer that the store does not hold.
    """
    path = Path(path)
    manifest = read_manifest(path, KIND, FORMAT_VERSION)
    if manifest["status"] == "open" and not allow_open:
        raise StoreError(
            f"{path} is not finished (its last run was stopped or is still writing)",
            "run the same `eyas extract` again: it resumes",
        )
    headers = finished_shards(path)
    for header in headers:
        lines = differences_from_manifest(header, manifest)
        if lines:
            raise StoreError(
                f"{header.path} does not belong to this store (fault F12):\n  " + "\n  ".join(lines),
                "the folder was used for two runs; take this shard out",
            )
    if manifest["status"] != "open":
        named = {entry["name"] for entry in manifest.get("shards", [])}
        there = {header.path.name for header in headers}
        if named != there:
            raise StoreError(
                f"{path}: the manifest names {len(named)} shards, {len(there)} are there ({', '.join(sorted(named ^ there)[:5])})",
                "run the same `eyas extract` again: it makes only what is missing",
            )
    unknown = [i for i in layers or [] if i not in manifest["layer_ids"]]
    if unknown:
        raise InputError(
            f"{path} holds layers {manifest['layer_ids']}, not {unknown}", "extract them, or ask for others"
        )
    return States(path, manifest, headers, layers or manifest["layer_ids"], check)
