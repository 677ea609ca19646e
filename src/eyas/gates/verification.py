"""`eyas verify`: is a store what its manifest says, and are its states the target's?

Structure first (headers, offsets, ids, checksums, finite, no zero row, no two layers equal, nothing missing), over every byte; for that no
model is needed. Then, where the target is here and fits, a random few samples recomputed by an independent forward pass; where it does
not, the report says why, and the store has passed all the same. What was and was not proven stands in the manifest's mark (`mark.py`),
for which `eyas train` asks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.base.errors import DiskFullError, EngineError, EyasError, InputError, PreflightError, StoreError
from eyas.base.locks import manifest_lock
from eyas.base.manifest import differing_fields, now
from eyas.base.settings import takes
from eyas.data.dataset import Sample, sample_id
from eyas.gates.preflight import refuse_failures
from eyas.gates.settings import VerifySettings
from eyas.store.checksums import checksums_of
from eyas.store.format import (
    LEDGER,
    ShardHeader,
    StoreSpec,
    differences_from_manifest,
    open_shard,
    read_shard_header,
    read_store_manifest,
    write_store_manifest,
    zero_states,
)
from eyas.store.reader import open_states
from eyas.target.embedded import resolve_model_path
from eyas.target.model_files import ModelInfo, describe_model

log = logging.getLogger(__name__)

#: Rows per read while scanning a shard: bounded memory however large the shard.
SCAN_ROWS = 8192


@dataclass
class VerifyReport:
    """What was checked and found. `problems` is empty for a good store; `recomputed` is the parity report, or None.

    `whole`: every byte, checksum, count and norm is as it must be. `recompute_note`: what was recomputed, or why nothing was.
    `mark_note`: why the manifest could not be marked, empty if it was.
    """

    folder: Path
    shards: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    not_written: int = 0
    whole: bool = False
    norms: dict[int, dict[str, float]] = field(default_factory=dict)
    recomputed: dict[str, Any] | None = None
    recompute_note: str = ""
    mark_note: str = ""
    problems: list[str] = field(default_factory=list)


@takes(VerifySettings)
def verify(settings: VerifySettings, *, on_shard: Callable[[str, int, int], None] | None = None) -> VerifyReport:
    """Check a store; see the module's opening for what.

    Args:
        on_shard: called with (name, how many done, how many in all).

    Returns:
        VerifyReport; a store with problems is reported, not raised, so that all of them are seen.

    Raises:
        StoreError: no store at all, or one whose run has not finished. InputError: `model_path` is no model.
    """
    folder, model_path, recompute = settings.store, settings.model_path, settings.recompute
    manifest = read_store_manifest(folder)
    if manifest["status"] == "open":
        raise StoreError(
            f"{folder} is not finished (its last run was stopped or is still writing)",
            "run the same `eyas extract` again: it resumes",
        )
    info: ModelInfo | None = None
    if recompute and model_path is not None:  # before hours of reading, and no fault of the store
        info = describe_model(resolve_model_path(model_path), model_path, trust_remote_code=settings.trust_remote_code)
        lines = _model_differs(manifest, info)
        if lines:
            raise InputError(
                f"{model_path} is another model than the one these states are of:\n  " + "\n  ".join(lines),
                "give the store's own target, or --recompute 0",
            )
    report = VerifyReport(folder)
    seen: dict[str, str] = {}
    paths = sorted(folder.glob("shard-*.safetensors"))
    sums: dict[int, list[float]] = {int(i): [0.0, float("inf"), 0.0] for i in manifest["layer_ids"]}
    for number, shard in enumerate(paths, 1):
        try:
            header = _check_shard(shard, manifest, seen, sums)
            report.samples += len(header.sample_ids)
            report.tokens += header.tokens
            report.bytes += shard.stat().st_size
        except EyasError as error:
            report.problems.append(str(error))
        report.shards += 1
        if on_shard is not None:
            on_shard(shard.name, number, len(paths))
    report.norms = {
        i: {"mean": s / max(report.tokens, 1), "min": low, "max": high} for i, (s, low, high) in sums.items()
    }
    _check_totals(folder, manifest, report)
    report.whole = not report.problems
    if recompute and report.whole:
        _recompute(report, manifest, info, recompute, settings.seed, settings.device, settings.trust_remote_code)
    elif not recompute:
        report.recompute_note = "not recomputed: --recompute 0"
    _mark(folder, manifest, report)
    return report


def _check_shard(
    path: Path, manifest: dict[str, Any], seen: dict[str, str], sums: dict[int, list[float]]
) -> ShardHeader:
    """Every byte of one shard. Raises StoreError at its first problem."""
    header = read_shard_header(path)
    lines = differences_from_manifest(header, manifest)
    if lines:
        raise StoreError(f"{path} does not belong to this store:\n  " + "\n  ".join(lines), "take this shard out")
    file = open_shard(path)
    for name, want in header.checksums.items():
        got, by_sample = checksums_of(name, file.get_tensor(name), header.offsets)
        if got != want:
            raise StoreError(
                f"{path}: {name} has checksum {got}, its header says {want}: the content changed after it was written",
                "delete this one file and run the same `eyas extract` again",
            )
        if by_sample != header.sample_checksums.get(name, by_sample):
            raise StoreError(
                f"{path}: the header's checksums of single samples of {name} are not those of its content",
                "delete this one file and run the same `eyas extract` again",
            )
    token_ids, loss_mask = file.get_tensor("token_ids").numpy(), file.get_tensor("loss_mask").numpy()
    for j, one in enumerate(header.sample_ids):
        rows = slice(int(header.offsets[j]), int(header.offsets[j + 1]))
        if one in seen:
            raise StoreError(f"{path}: sample {one} stands in {seen[one]} too", "take one of the two shards out")
        seen[one] = path.name
        if sample_id(token_ids[rows], loss_mask[rows]) != one:
            raise StoreError(
                f"{path}: sample {one} holds tokens and a mask of another sample",
                "delete this one file and run the same `eyas extract` again",
            )
    by_checksum: dict[str, int] = {}
    for i in header.layer_ids:
        twin = by_checksum.setdefault(header.checksums[f"hidden.{i}"], i)
        if twin != i:
            raise StoreError(
                f"{path}: layers {twin} and {i} hold the same states",
                "one layer was captured twice; check the engine and extract again",
            )
        _scan_rows(path, file, header, i, sums[i])
    return header


def _scan_rows(path: Path, file: Any, header: ShardHeader, layer: int, sums: list[float]) -> None:
    tensor = file.get_tensor(f"hidden.{layer}")
    scale = file.get_tensor(f"scale.{layer}") if header.metadata["store_dtype"] == "fp8" else None
    for start in range(0, header.tokens, SCAN_ROWS):
        rows = tensor[start : start + SCAN_ROWS]
        norms = torch.linalg.vector_norm(rows.float() if scale is not None else rows, dim=1, dtype=torch.float32)
        if scale is not None:
            norms = norms * scale[start : start + SCAN_ROWS]
        bad = ~torch.isfinite(norms) | zero_states(layer, norms)
        if bad.any():
            row = start + int(bad.nonzero()[0])
            at = int(np.searchsorted(header.offsets, row, side="right")) - 1
            what = "all zero" if float(norms[row - start]) == 0 else "not finite"
            raise StoreError(
                f"{path}: layer {layer}, sample {header.sample_ids[at]}, position {row - int(header.offsets[at])}: the state is {what}",
                "delete this one file and run the same `eyas extract` again",
            )
        sums[0] += float(norms.double().sum())
        sums[1] = min(sums[1], float(norms.min()))
        sums[2] = max(sums[2], float(norms.max()))


def _check_totals(folder: Path, manifest: dict[str, Any], report: VerifyReport) -> None:
    named = {entry["name"] for entry in manifest.get("shards", [])}
    there = {p.name for p in folder.glob("shard-*.safetensors")}
    for name in sorted(named - there):
        error = StoreError(
            f"{folder / name} is missing, the manifest names it",
            "run the same `eyas extract` again: it makes only what is missing",
        )
        report.problems.append(str(error))
    for name in sorted(there - named):
        report.problems.append(f"{folder / name} is not in the manifest: it is of another run")
    ledger = folder / LEDGER
    report.not_written = len(ledger.read_text().splitlines()) if ledger.exists() else 0
    if not report.problems and report.samples + report.not_written != manifest["dataset"]["samples"]:
        report.problems.append(
            f"the dataset has {manifest['dataset']['samples']} samples, {report.samples} are in shards and {report.not_written} in the ledger: some are lost"
        )
    totals = manifest.get("totals", {})
    if not report.problems and (totals.get("samples"), totals.get("tokens")) != (report.samples, report.tokens):
        report.problems.append(
            f"the manifest counts {totals.get('samples')} samples and {totals.get('tokens')} tokens, the shards hold {report.samples} and {report.tokens}"
        )
    if not _parity_passed(manifest):
        report.problems.append("the manifest has no parity result: the states were never compared with the model's own")


def _parity_passed(manifest: dict[str, Any]) -> bool:
    return isinstance(manifest.get("parity"), dict) and manifest["parity"].get("passed") is True


def _model_differs(manifest: dict[str, Any], info: ModelInfo) -> list[str]:
    return differing_fields(
        {k: manifest["model"].get(k) for k in ("config_hash", "weights_hash")},
        {"config_hash": info.config_hash, "weights_hash": info.weights_hash},
    )


def _recompute(
    report: VerifyReport,
    manifest: dict[str, Any],
    info: ModelInfo | None,
    count: int,
    seed: int | None,
    device: str,
    trust_remote_code: bool,
) -> None:
    """Recompute a random few samples with transformers; states that differ become a problem, a target that is not here or does not fit a note.

    info: the target, None for the one that the manifest names.
    """
    from eyas.engines.transformers import TransformersEngine, TransformersSettings
    from eyas.gates.reference import judge_against_reference

    if info is None:
        name = manifest["model"]["id"]
        try:
            info = describe_model(resolve_model_path(name), name, trust_remote_code=trust_remote_code)
        except InputError as error:
            report.recompute_note = f"not recomputed: the target is not here ({error.what})"
            return
        lines = _model_differs(manifest, info)
        if lines:
            report.problems.append(
                f"{name} is another model now than the one these states are of:\n  " + "\n  ".join(lines)
            )
            return
    states = open_states(report.folder)
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    order = np.random.default_rng(seed).permutation(len(states))
    chosen: list[int] = []
    for i in order:
        if len(chosen) < count and (
            not chosen or sum(int(states.lengths[j]) for j in chosen) + states.lengths[i] <= 4096
        ):
            chosen.append(int(i))
    engine = TransformersEngine(info, TransformersSettings(manifest["dtype"], device, None, trust_remote_code))
    try:
        refuse_failures(engine.preflight())
        engine.load(manifest["layer_ids"])
    except (EngineError, PreflightError) as error:  # no fault of the store
        report.recompute_note = f"not recomputed: {error.what.splitlines()[-1].strip()}"
        engine.close()
        return
    try:
        samples, stored = [], []
        for i in chosen:
            one = states[i]
            samples.append(Sample(one.token_ids.numpy(), one.loss_mask.numpy(), one.id))
            stored.append(one.hidden)
        # fp8 keeps three mantissa bits: its rounding, measured when written, comes on top.
        report.recomputed = judge_against_reference(
            engine, samples, stored, extra_limit=0.05 if manifest["store_dtype"] == "fp8" else 0.0
        )
        report.recompute_note = f"{len(samples)} random samples recomputed (seed {seed})"
    except EyasError as error:
        report.problems.append(f"recomputed with seed {seed}: {error}")
    finally:
        engine.close()


def _mark(folder: Path, manifest: dict[str, Any], report: VerifyReport) -> None:
    """Write the result into the manifest: of the store as it was read, never over what a run has written since."""
    try:
        with manifest_lock(folder):
            there = read_store_manifest(folder)
            if any(there.get(key) != manifest.get(key) for key in ("status", "created", "shards")):
                report.problems.append(
                    "an `eyas extract` wrote to this store while it was read: verify it again when that is over"
                )
                return
            _write_mark(folder, there, report)
    except (InputError, DiskFullError) as error:
        report.mark_note = f"{error.what}: the store is not marked as verified, `eyas train` will ask for it"
        log.warning("%s", report.mark_note)


def _write_mark(folder: Path, manifest: dict[str, Any], report: VerifyReport) -> None:
    spec = StoreSpec.from_manifest(manifest)
    fixed = {
        *(f.name for f in fields(StoreSpec)),
        "kind",
        "format_version",
        "status",
        "created",
        "updated",
        "made_by",
        "layer_index",
    }
    rest = {k: v for k, v in manifest.items() if k not in fixed}
    rest["verified"] = {
        "passed": not report.problems,
        "time": now(),
        "samples": report.samples,
        "bytes": report.whole,
        "parity": _parity_passed(manifest),
        "recomputed": report.recomputed,
        "note": report.recompute_note,
        "problems": report.problems[:20],
    }
    write_store_manifest(folder, spec, manifest["status"], **rest)
