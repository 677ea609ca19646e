"""Gate 1 and the plan: model, dataset and output directory read, batches made, the machine checked. Loads and writes nothing.

The plan of batches is made over the *whole* dataset and depends only on it and the batch settings; a resumed run makes the same batches
and skips what finished shards hold, so that a run killed at any moment and rerun ends with the same samples and the same bytes as an
undisturbed one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eyas.base.check import Check
from eyas.base.errors import FolderConflictError, InputError
from eyas.base.files import validate_output_directory
from eyas.base.manifest import MANIFEST
from eyas.base.part import Part
from eyas.data.dataset import TokenDataset, open_dataset
from eyas.engines.base import Engine
from eyas.extraction.batches import plan_batches
from eyas.extraction.settings import ExtractSettings
from eyas.gates import machine, preflight
from eyas.store.format import STORE_FILES, StoreSpec, distinct_samples, finished_shards, validate_same_states
from eyas.store.ledger import read_ledger
from eyas.target.embedded import resolve_model_path
from eyas.target.fitness import check_teacher
from eyas.target.layers import resolve_layer_ids
from eyas.target.model_files import ModelInfo, describe_model

#: Engine steps whose hops `--trace` records.
TRACED_STEPS = 3


@dataclass
class Job:
    """A run as planned: everything known before the load.

    Attributes:
        batches: of this part, positions in the dataset. done: ids in finished shards, of all parts. too_long: (id, reason) of this part.
        existing_files: manifest and finished shards that the plan has seen. quick_start: for a rehearsal.
    """

    settings: ExtractSettings
    info: ModelInfo
    dataset: TokenDataset
    spec: StoreSpec
    engine: Engine
    batches: list[list[int]]
    done: set[str]
    too_long: list[tuple[str, str]]
    checks: list[Check]
    existing_files: set[str]
    quick_start: bool

    @property
    def directory(self) -> Path:
        return self.settings.output_dir

    @property
    def part(self) -> Part:
        return self.settings.parts


def existing_files(directory: Path) -> set[str]:
    """Names of the store's manifest and finished shards, as far as they exist."""
    return {path.name for pattern in (MANIFEST, "shard-*.safetensors") for path in directory.glob(pattern)}


def plan(settings: ExtractSettings, *, quick_start: bool = False) -> Job:
    """Read what the run needs and plan it. `quick_start`: of a rehearsal, see `VllmSettings`.

    Raises:
        InputError: model, dataset or a setting. FolderConflictError: the output directory holds something else.
    """
    info = describe_model(
        resolve_model_path(settings.model_path, settings.revision),
        settings.model_path,
        trust_remote_code=settings.trust_remote_code,
        need_weights=settings.load_format != "dummy",
    )
    dataset = open_dataset(settings.prepared_data)
    directory = settings.output_dir
    validate_output_directory(directory, STORE_FILES)
    seen = existing_files(directory)
    max_seq_len = settings.max_seq_len or info.max_position or int(dataset.lengths.max())
    spec = _spec(settings, info, dataset)
    earlier = validate_same_states(directory, spec) or {}

    # Rounding depends on the number of threads and on which samples share a row: a resumed run takes the first run's.
    threads = settings.threads or earlier.get("engine", {}).get("threads")
    batch_tokens = settings.batch_tokens or earlier.get("capture", {}).get("batch_tokens")
    batch_size = settings.batch_size or earlier.get("capture", {}).get("batch_size")
    longest = min(max_seq_len, int(dataset.lengths.max()))
    engine = make_engine(settings, info, threads, longest, quick_start=quick_start)
    batch_tokens = batch_tokens or engine.default_batch_tokens
    capture = {
        "batch_tokens": batch_tokens,
        "batch_size": batch_size,
        "max_seq_len": max_seq_len,
        "shard_bytes": settings.shard_bytes,
        "layer_ids_as_asked": None if settings.layer_ids is None else [str(i) for i in settings.layer_ids],
        "layer_index_as_asked": settings.layer_index,
    }
    spec = replace(spec, engine=engine.description, capture=capture)

    in_this_part = np.array([settings.parts.holds(one) for one in dataset.ids])
    fits = dataset.lengths <= max_seq_len
    too_long = [
        (dataset.ids[i], f"{int(dataset.lengths[i])} tokens, longer than --max-seq-len {max_seq_len}")
        for i in np.flatnonzero(in_this_part & ~fits)
    ]
    batches = plan_batches(dataset.lengths, np.flatnonzero(in_this_part & fits), batch_tokens, batch_size)
    done = distinct_samples(finished_shards(directory)) if directory.is_dir() else set()
    unknown = done - set(dataset.ids)
    if unknown:
        raise FolderConflictError(
            f"{directory} holds {len(unknown)} samples of another run: they are not in {settings.prepared_data}",
            "name another --output-dir",
        )
    read_ledger(directory)  # a damaged one is said now, not when all is done
    # Of all parts: they share the store, and its disk.
    left = sum(int(dataset.lengths[i]) for i in np.flatnonzero(fits) if dataset.ids[i] not in done)
    is_final = spec.layer_ids[-1] == info.num_layers
    resumes = f"resuming, {len(done)} of {len(dataset)} samples are done" if done else "new store"
    checks = [
        preflight.check_model(info),
        check_teacher(info, needed=info.num_layers in spec.layer_ids),
        *preflight.check_lengths(dataset, info, max_seq_len),
        preflight.check_token_ids(dataset, info, max_seq_len),
        preflight.check_tokenizer(dataset, info, settings.trust_remote_code),
        Check("layers", "OK", f"ids {list(spec.layer_ids)}" + (", the last one the target state" if is_final else "")),
        Check("output", "OK", f"{directory}: {resumes}"),
        preflight.check_leftovers(directory),
        preflight.check_disk(directory, spec, left),
        *engine.preflight(),
        preflight.check_versions(),
        *machine.check_before_run(settings.tp_size),
    ]
    return Job(settings, info, dataset, spec, engine, batches, done, too_long, checks, seen, quick_start)


def _spec(settings: ExtractSettings, info: ModelInfo, dataset: TokenDataset) -> StoreSpec:
    """What the store will hold, as far as that does not depend on the engine."""
    dtype = info.dtype if settings.dtype == "auto" else settings.dtype
    store_dtype = dtype if settings.store_dtype == "auto" else settings.store_dtype
    if store_dtype not in (dtype, "fp8"):
        raise InputError(
            f"--store-dtype {store_dtype} does not go with --dtype {dtype}",
            f"auto (the same as computed: {dtype}) or fp8",
        )
    layer_ids = resolve_layer_ids(
        settings.layer_ids, info.num_layers, index=settings.layer_index, with_final=settings.final
    )
    described = {
        "hash": dataset.hash,
        "samples": len(dataset),
        "tokens": dataset.tokens,
        "path": str(settings.prepared_data.resolve()),
    }
    return StoreSpec(info.for_manifest(), tuple(layer_ids), dtype, store_dtype, described)


def make_engine(
    settings: ExtractSettings, info: ModelInfo, threads: int | None, longest: int, *, quick_start: bool = False
) -> Engine:
    """The engine that `--engine` names, not loaded yet. `longest`: tokens of the longest sample it must take."""
    common: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, "part": settings.parts}
    if settings.engine == "transformers":
        from eyas.engines.transformers import TransformersEngine, TransformersSettings

        return TransformersEngine(info, TransformersSettings(settings.dtype, settings.device, threads, **common))
    from eyas.engines.vllm.engine import VllmEngine, VllmSettings
    from eyas.engines.vllm.interface import capture_for

    over_ray = settings.distributed_executor_backend == "ray"
    return VllmEngine(
        VllmSettings(
            info,
            dtype=info.dtype if settings.dtype == "auto" else settings.dtype,
            tp_size=settings.tp_size,
            pp_size=settings.pp_size,
            expert_parallel=settings.expert_parallel,
            executor=settings.distributed_executor_backend,
            max_seq_len=longest,
            batch_size=settings.batch_size or 256,
            step_tokens=settings.batch_tokens,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            eager=True if settings.enforce_eager else None,
            load_format=settings.load_format,
            quick_start=quick_start,
            capture=capture_for(info) if settings.capture == "auto" else settings.capture,
            trace_steps=TRACED_STEPS if settings.trace else 0,
            shared_folder=settings.output_dir.resolve() if over_ray else None,
            **common,
        )
    )
