"""The state store on disk: what a manifest and a shard must hold, and reading both as far as no state is needed. See `docs/format.md`.

<directory>/manifest.json               what this is, of which model, which layers, from which dataset
            shard-<writer>-<seq>.safetensors   whole samples, ragged, one tensor per layer
            ledger.jsonl                one line for each sample that was not written, with the reason
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from eyas.base.errors import FolderConflictError, StoreError
from eyas.base.files import write_json
from eyas.base.manifest import MANIFEST, differing_fields, made_by, now, read_manifest
from eyas.store.checksums import read_sample_checksums

KIND = "eyas.states"
FORMAT_VERSION = 1
LEDGER = "ledger.jsonl"
#: Files that belong to a store; anything else in an output directory is refused before a run.
STORE_FILES = {
    MANIFEST,
    LEDGER,
    "shard-*.safetensors",
    "shard-*.safetensors.tmp",
    ".lock*",
    ".manifest.json.*.tmp",
    ".ledger.jsonl.*.tmp",
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
        scale = 4 if self.store_dtype == "fp8" else 0
        return len(self.layer_ids) * (self.hidden_size * STORE_DTYPES[self.store_dtype].itemsize + scale) + 5

    def identity(self) -> dict[str, Any]:
        """The fields that two runs into one directory must share: a difference means other states."""
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


def read_store_manifest(directory: Path) -> dict[str, Any]:
    """Read and check a store's manifest. Raises StoreError: none there, of another kind or version, cut short or malformed."""
    manifest = read_manifest(directory, KIND, FORMAT_VERSION, ("status", *(f.name for f in fields(StoreSpec))))
    try:
        spec = StoreSpec.from_manifest(manifest)
        _ = spec.identity(), spec.bytes_per_token, [entry["name"] for entry in manifest.get("shards", [])]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{directory / MANIFEST} is malformed ({type(error).__name__}: {error})"
        raise StoreError(what, "the manifest is damaged; put it back, or extract into a new directory") from None
    return manifest


def write_store_manifest(directory: Path, spec: StoreSpec, status: str, **more: Any) -> None:
    """Write `manifest.json`. `status`: `open` while a run writes, then `complete` or `incomplete` (see the ledger)."""
    created = now()
    if (directory / MANIFEST).exists():
        created = read_store_manifest(directory).get("created", created)
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
    write_json(directory / MANIFEST, manifest)


def validate_same_states(directory: Path, spec: StoreSpec) -> dict[str, Any] | None:
    """The manifest of an existing store, compared with what this run would write; None when there is none yet.

    Raises:
        FolderConflictError: other model, layers, dtype or dataset (each differing field is named), shards without a manifest, or a
            manifest that cannot be read.
    """
    if not (directory / MANIFEST).exists():
        orphans = sorted(p.name for p in directory.glob("shard-*.safetensors")) if directory.is_dir() else []
        if orphans:
            raise FolderConflictError(
                f"{directory} holds shards ({orphans[0]} ...) but no {MANIFEST}: nothing says of which run they are",
                "name a new --output-dir, or put the manifest back",
            )
        return None
    try:
        manifest = read_store_manifest(directory)
    except StoreError as error:
        raise FolderConflictError(error.what, "name another --output-dir") from None
    lines = differing_fields(StoreSpec.from_manifest(manifest).identity(), spec.identity())
    if lines:
        raise FolderConflictError(
            f"{directory} holds states of another run:\n  " + "\n  ".join(lines),
            "name another --output-dir; stores are never mixed",
        )
    return manifest


# --- one shard ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says of itself, checked for structure but not yet for content.

    `sample_ids` are hex; sample j holds rows `offsets[j]:offsets[j + 1]` of every tensor. `sample_checksums`: tensor name -> 16 hex
    digits for each sample, joined.
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


_REMAKE = "delete this one file and rerun the same `eyas extract`: only its samples are made anew"


def open_shard(path: Path) -> Any:
    """Memory-map a shard.

    Raises:
        StoreError: the file is missing, truncated, or its safetensors header is damaged or hostile.
    """
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise StoreError(f"{path} is missing", "the store is incomplete; rerun the same `eyas extract`") from None
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} is not a readable shard, cut short or damaged: {error}", _REMAKE) from None


def read_shard_header(path: Path) -> ShardHeader:
    """Open a shard and check everything that does not need its bulk: names, dtypes, shapes, offsets, ids.

    Raises:
        StoreError: naming the file and what about it is wrong.
    """
    file = open_shard(path)
    try:
        return _checked_header(path, file, file.metadata() or {})
    except ValueError as error:
        raise StoreError(f"{path}: {error}", _REMAKE) from None


def _checked_header(path: Path, file: Any, metadata: dict[str, str]) -> ShardHeader:
    """See `read_shard_header`. Raises ValueError for the first thing that is wrong."""
    layer_ids, hidden_size, checksums = _read_metadata(metadata)
    fp8 = metadata["store_dtype"] == "fp8"
    states = {f"{kind}.{i}" for i in layer_ids for kind in (("hidden", "scale") if fp8 else ("hidden",))}
    wanted = {"token_ids", "loss_mask", "offsets", "sample_ids"} | states
    names = set(file.keys())
    if names != wanted or set(checksums) != wanted:
        odd = sorted(names ^ wanted) or sorted(set(checksums) ^ wanted)
        raise ValueError(
            f"its tensors do not fit its layer ids {list(layer_ids)}: {', '.join(odd)} missing or unexpected"
        )

    found = {name: (part.get_shape(), part.get_dtype()) for name in wanted for part in (file.get_slice(name),)}
    shape, dtype = found["offsets"]
    if dtype != "I64" or len(shape) != 1 or shape[0] < 2:
        raise ValueError(f"offsets must be [n+1] int64 with n >= 1, got {shape} {dtype}")
    n = shape[0] - 1
    if found["sample_ids"] != ([n, 2], "I64"):
        raise ValueError(f"sample_ids must be [{n}, 2] int64, got {' '.join(map(str, found['sample_ids']))}")
    offsets = file.get_tensor("offsets").numpy()
    tokens = int(offsets[-1])
    if offsets[0] != 0 or (np.diff(offsets) <= 0).any():
        raise ValueError("offsets must start at 0 and rise strictly: samples would overlap or be empty")
    shapes = {"token_ids": ([tokens], "I32"), "loss_mask": ([tokens], "U8")}
    for name in states:
        as_stored = ([tokens, hidden_size], _SAFETENSORS_NAME[metadata["store_dtype"]])
        shapes[name] = ([tokens], "F32") if name.startswith("scale.") else as_stored
    for name, want in shapes.items():
        if found[name] != want:
            raise ValueError(f"{name} must be {want[0]} {want[1]}, got {found[name][0]} {found[name][1]}")
    ids = words_to_ids(file.get_tensor("sample_ids"))
    if len(set(ids)) != n:
        raise ValueError("a sample id stands twice in this shard")
    by_sample = read_sample_checksums(metadata["sample_checksums"], states, n)
    return ShardHeader(path, metadata, ids, offsets, layer_ids, checksums, by_sample)


def _read_metadata(metadata: dict[str, str]) -> tuple[tuple[int, ...], int, dict[str, str]]:
    """Layer ids, hidden size and checksums from a shard's metadata. Raises ValueError for what is malformed or of another format."""
    for key, want in (("format", KIND), ("format_version", str(FORMAT_VERSION))):
        if metadata.get(key) != want:
            raise ValueError(f"{key.replace('_', ' ')} is {metadata.get(key)!r}, this eyas reads {want!r}")
    try:
        layer_ids = tuple(int(i) for i in json.loads(metadata["layer_ids"]))
        hidden_size = int(json.loads(metadata["model"])["hidden_size"])
        checksums = dict(json.loads(metadata["checksums"]))
        _ = DTYPES[metadata["dtype"]], STORE_DTYPES[metadata["store_dtype"]], metadata["sample_checksums"]
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"its metadata is incomplete or malformed ({type(error).__name__}: {error})") from None
    return layer_ids, hidden_size, checksums


_SAFETENSORS_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "fp8": "F8_E4M3"}


def finished_shards(directory: Path) -> list[ShardHeader]:
    """Headers of all finished shards (temporary files are ignored), by name. Raises StoreError for a damaged one."""
    return [read_shard_header(path) for path in sorted(directory.glob("shard-*.safetensors"))]


def distinct_samples(headers: Sequence[ShardHeader]) -> set[str]:
    """Ids of the samples in some shards. Raises StoreError when two shards hold the same sample."""
    where: dict[str, Path] = {}
    for header in headers:
        for one in header.sample_ids:
            if where.setdefault(one, header.path) != header.path:
                raise StoreError(
                    f"sample {one} stands in two shards, {where[one]} and {header.path.name}",
                    "take one of the two out and rerun the same `eyas extract`: it makes what is missing",
                )
    return set(where)


def differences_from_manifest(header: ShardHeader, manifest: dict[str, Any]) -> list[str]:
    """What a shard says of itself that the store's manifest says otherwise; empty for a shard of this store."""

    def identity(metadata: dict[str, str]) -> dict[str, Any]:
        model = json.loads(metadata["model"])
        own = {key: metadata.get(key) for key in ("layer_ids", "dtype", "store_dtype", "dataset_hash")}
        return own | {key: model.get(key) for key in ("config_hash", "weights_hash")}

    return differing_fields(identity(header.metadata), identity(StoreSpec.from_manifest(manifest).metadata()))
