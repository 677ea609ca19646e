"""`eyas extract`: from a token dataset to a state store, through the gates.

    preflight -> (rehearsal) -> load -> parity -> bulk

What is computed is decided here, how by the engine. The plan of batches is made over the *whole* dataset and depends only on it
and the batch settings; a resumed run makes the same batches and skips what finished shards hold, so that a run killed at any
moment and started again ends with the same samples and the same bytes as an undisturbed one.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from eyas.base.check import Check
from eyas.base.errors import EXIT_INCOMPLETE, EXIT_INTERRUPTED, FolderConflictError, InputError, StoreError
from eyas.base.files import translate_disk_full, validate_output_directory
from eyas.base.locks import lock_directory, manifest_lock
from eyas.base.manifest import MANIFEST, now
from eyas.base.part import Part
from eyas.base.stop_request import StopRequest, stoppable
from eyas.data.dataset import TokenDataset, open_dataset
from eyas.engines.base import Engine, Progress
from eyas.extraction.batches import pick_parity_samples, plan_batches, read_batches
from eyas.gates import machine, preflight
from eyas.gates.parity import check_parity
from eyas.store.format import (
    LEDGER,
    STORE_DTYPES,
    STORE_FILES,
    StoreSpec,
    distinct_samples,
    finished_shards,
    validate_same_states,
    write_store_manifest,
)
from eyas.store.writer import DEFAULT_SHARD_BYTES
from eyas.target.embedded import resolve_model_path
from eyas.target.fitness import check_teacher
from eyas.target.layers import LayerIndex, resolve_layer_ids
from eyas.target.model_files import ModelInfo, describe_model

log = logging.getLogger(__name__)

#: Engine steps whose hops `--trace` records.
TRACED_STEPS = 3
#: Weights of more bytes are rehearsed first: at 1 GB/s from a disk they load for minutes.
REHEARSE_BYTES = 150 * 10**9
#: `rehearsal` of the extraction that a rehearsal itself makes.
IS_REHEARSAL = "this"


@dataclass(frozen=True, kw_only=True)
class ExtractSettings:
    """What a run is asked for; the flags of `eyas extract` have the same names.

    Attributes:
        model_path: folder, hub id or `smollm2`. prepared_data: see `dataset.open_dataset`. output_dir: the store's folder.
        engine: transformers | vllm. layer_ids: ids or `final`, None for the default aux layers. layer_index: how they count.
        with_final: also store the target state (id N). dtype: auto | bfloat16 | float32 | float16.
        store_dtype: auto (as computed) | fp8 | bfloat16 ...: only `auto` and `fp8` differ in bytes.
        batch_size: most samples in one forward pass (None: no limit). batch_tokens: most tokens in one (None: by device).
        max_seq_len: longer samples go to the ledger (None: the model's positions).
        shard_bytes: aimed at per shard. parity_samples: how many samples gate 4 takes.
        device, threads: engine `transformers`. The rest belongs to engine `vllm`: tp_size, pp_size, expert_parallel,
        gpu_memory_utilization, distributed_executor_backend (mp | ray), enforce_eager, load_format (auto | dummy), capture (aux |
        hooks | native), trace (record the hops of the first steps).
        rehearsal: auto (before loads of more than `REHEARSE_BYTES`) | always | never: gate 2, engine `vllm`.
        part: `i/n`, this run extracts the i-th of n parts of the dataset; n runs write into one store side by side.
    """

    model_path: str
    prepared_data: str
    output_dir: str
    engine: str = "transformers"
    revision: str | None = None
    layer_ids: Sequence[int | str] | None = None
    layer_index: LayerIndex = "stream"
    with_final: bool = True
    dtype: str = "auto"
    store_dtype: str = "auto"
    batch_size: int | None = None
    batch_tokens: int | None = None
    max_seq_len: int | None = None
    shard_bytes: int = DEFAULT_SHARD_BYTES
    parity_samples: int = 4
    device: str = "auto"
    threads: int | None = None
    tp_size: int = 1
    gpu_memory_utilization: float = 0.9
    trust_remote_code: bool = False
    pp_size: int = 1
    expert_parallel: bool = False
    distributed_executor_backend: str | None = None
    enforce_eager: bool = False
    load_format: str = "auto"
    capture: str = "aux"
    trace: bool = False
    part: str | None = None
    rehearsal: str = "auto"

    @property
    def parts(self) -> Part:
        """`part`, read. Raises InputError as `Part.parse`."""
        return Part.parse(self.part)


@dataclass(frozen=True)
class ExtractReport:
    """What a run did. `written`, `tokens`, `bytes`: the whole store; `new_*`: this run. `exit_code`: 0, 20 or 130."""

    folder: Path
    samples: int
    written: int
    tokens: int
    bytes: int
    new_samples: int
    new_tokens: int
    seconds: float
    rejected: tuple[tuple[str, str], ...]
    parity: dict[str, Any] | None
    interrupted: bool

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return EXIT_INTERRUPTED
        return EXIT_INCOMPLETE if self.rejected else 0


def extract(
    *,
    on_preflight: Callable[[list[Check]], None] | None = None,
    on_stage: Callable[[str], None] | None = None,
    on_progress: Callable[[Progress, int, int], None] | None = None,
    **options: Any,
) -> ExtractReport:
    """Extract hidden states of chosen layers for every sample of a dataset.

    Args:
        on_preflight: called with the preflight table. on_stage: called with a line for each stage that begins.
        on_progress: called with (progress, samples to do, tokens to do) after each batch.
        options: the fields of `ExtractSettings`.

    Returns:
        ExtractReport; `exit_code` tells a complete run (0) from one with samples in the ledger (20) or stopped (130).

    Raises:
        InputError, PreflightError, FolderConflictError, ParityError, ContractError, DiskFullError, EngineError, StoreError:
        each says what was found, where, and what to do. Finished shards are always kept.
    """
    known = {f.name for f in fields(ExtractSettings)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise InputError(f"unknown option {unknown[0]!r}", f"one of {', '.join(sorted(known))}")
    settings = ExtractSettings(**options)
    say = on_stage or (lambda line: log.info(line))
    say("preflight")
    job = plan(settings)
    if on_preflight is not None:
        on_preflight(job.checks)
    preflight.refuse_failures(job.checks)
    if wants_rehearsal(settings, job.info):
        from eyas.extraction.rehearsal import rehearse

        say("rehearsal")
        rehearsed = rehearse(on_stage=lambda line: say(f"rehearsal: {line}"), **options)
        say(f"rehearsal passed in {rehearsed.seconds:.0f} s: {rehearsed.path}")
    folder = Path(settings.output_dir)
    with translate_disk_full(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with lock_directory(folder, settings.parts), stoppable() as stop:
        if _what_is_there(folder) != job.there:
            job.engine.close()
            job = plan(settings)  # a run that ended, or another part that began, between the plan and the lock
            preflight.refuse_failures(job.checks)
        return _run(job, folder, stop, say, on_progress)


@dataclass
class Job:
    """A run as planned: everything known before the load."""

    settings: ExtractSettings
    info: ModelInfo
    dataset: TokenDataset
    spec: StoreSpec
    engine: Engine
    batches: list[list[int]]
    done: set[str]
    too_long: list[tuple[str, str]]
    checks: list[Check]
    there: set[str]


def _what_is_there(folder: Path) -> set[str]:
    """Names of the store's manifest and finished shards, as far as they are there."""
    return {path.name for pattern in (MANIFEST, "shard-*.safetensors") for path in folder.glob(pattern)}


def plan(settings: ExtractSettings) -> Job:
    """Gate 1: read model, dataset and output folder, plan the batches, check the machine. Loads and writes nothing."""
    _check_numbers(settings)
    _check_engine(settings)
    path = resolve_model_path(settings.model_path, settings.revision)
    dummy = settings.engine == "vllm" and settings.load_format == "dummy"
    info = describe_model(
        path, settings.model_path, trust_remote_code=settings.trust_remote_code, need_weights=not dummy
    )
    layer_ids = resolve_layer_ids(
        settings.layer_ids, info.num_layers, index=settings.layer_index, with_final=settings.with_final
    )
    dataset = open_dataset(settings.prepared_data)
    folder = Path(settings.output_dir)
    validate_output_directory(folder, STORE_FILES)
    there = _what_is_there(folder)

    dtype = info.dtype if settings.dtype == "auto" else settings.dtype
    store_dtype = dtype if settings.store_dtype == "auto" else settings.store_dtype
    if store_dtype not in (dtype, "fp8") or store_dtype not in STORE_DTYPES:
        raise InputError(
            f"--store-dtype {store_dtype} does not go with --dtype {dtype}",
            f"auto (the same as computed: {dtype}) or fp8",
        )
    max_seq_len = settings.max_seq_len or info.max_position or int(dataset.lengths.max())
    identity = {
        "hash": dataset.hash,
        "samples": len(dataset),
        "tokens": dataset.tokens,
        "path": str(Path(settings.prepared_data).resolve()),
    }
    spec = StoreSpec(info.for_manifest(), tuple(layer_ids), dtype, store_dtype, identity)
    earlier = validate_same_states(folder, spec)

    # Rounding depends on the number of threads and on which samples share a row: a resumed run takes the first run's.
    threads, batch_tokens, batch_size = settings.threads, settings.batch_tokens, settings.batch_size
    if earlier is not None:
        threads = threads or earlier.get("engine", {}).get("threads")
        batch_tokens = batch_tokens or earlier.get("capture", {}).get("batch_tokens")
        batch_size = batch_size or earlier.get("capture", {}).get("batch_size")
    longest = min(max_seq_len, int(dataset.lengths.max()))
    engine = make_engine(settings, info, threads, longest)
    batch_tokens = batch_tokens or engine.default_batch_tokens
    capture = {
        "batch_tokens": batch_tokens,
        "batch_size": batch_size,
        "max_seq_len": max_seq_len,
        "shard_bytes": settings.shard_bytes,
        "layer_ids_as_asked": None if settings.layer_ids is None else [str(i) for i in settings.layer_ids],
        "layer_index_as_asked": settings.layer_index,
    }
    spec = StoreSpec(spec.model, spec.layer_ids, dtype, store_dtype, identity, engine.description, capture)

    mine = np.array([settings.parts.holds(one) for one in dataset.ids])
    fitting = np.flatnonzero(mine & (dataset.lengths <= max_seq_len))
    too_long = [
        (dataset.ids[i], f"{int(dataset.lengths[i])} tokens, longer than --max-seq-len {max_seq_len}")
        for i in np.flatnonzero(mine & (dataset.lengths > max_seq_len))
    ]
    batches = plan_batches(dataset.lengths, fitting, batch_tokens, batch_size)
    done = distinct_samples(finished_shards(folder)) if folder.is_dir() else set()
    unknown = done - set(dataset.ids)
    read_ledger(folder)  # a damaged one is said now, not when all is done
    if unknown:
        raise FolderConflictError(
            f"{folder} holds {len(unknown)} samples that are not in {settings.prepared_data} (fault F12)",
            "name another --output-dir",
        )
    # Of all parts: they share the store, and its disk.
    missing = (i for i in np.flatnonzero(dataset.lengths <= max_seq_len) if dataset.ids[i] not in done)
    left = int(sum(int(dataset.lengths[i]) for i in missing))
    checks = [
        preflight.check_model(info),
        check_teacher(info, needed=info.num_layers in layer_ids),
        *preflight.check_lengths(dataset, info, max_seq_len),
        preflight.check_tokenizer(dataset, info, settings.trust_remote_code),
        Check(
            "layers",
            "OK",
            f"ids {layer_ids}" + (", the last one the target state" if layer_ids[-1] == info.num_layers else ""),
        ),
        Check(
            "output",
            "OK",
            f"{folder}: " + (f"resuming, {len(done)} of {len(dataset)} samples are there" if done else "new store"),
        ),
        preflight.check_leftovers(folder),
        preflight.check_disk(folder, spec, left),
        *engine.preflight(),
        preflight.check_versions(),
        *machine.check_before_run(settings.tp_size),
    ]
    return Job(settings, info, dataset, spec, engine, batches, done, too_long, checks, there)


def _check_numbers(settings: ExtractSettings) -> None:
    for name in (
        "batch_size",
        "batch_tokens",
        "max_seq_len",
        "threads",
        "tp_size",
        "pp_size",
        "shard_bytes",
        "parity_samples",
    ):
        value = getattr(settings, name)
        if value is not None and value < 1:
            if name == "shard_bytes":  # the flag counts megabytes
                raise InputError(f"--shard-size is {value / 1e6:g}", "megabytes, above 0")
            raise InputError(f"--{name.replace('_', '-')} is {value}", "it must be 1 or more")
    if not 0 < settings.gpu_memory_utilization <= 1:
        raise InputError(f"--gpu-memory-utilization is {settings.gpu_memory_utilization}", "a share between 0 and 1")


#: Settings that one engine alone knows, beside those that both take or that do no harm.
ONE_ENGINES_OWN = {
    "transformers": ("device", "threads"),
    "vllm": (
        "tp_size",
        "pp_size",
        "expert_parallel",
        "distributed_executor_backend",
        "load_format",
        "capture",
        "trace",
    ),
}


def _check_engine(settings: ExtractSettings) -> None:
    """Raise InputError for a setting that the engine would pass over in silence."""
    if settings.engine not in ONE_ENGINES_OWN:
        raise InputError(f"--engine {settings.engine} is unknown", "transformers or vllm")
    defaults = {f.name: f.default for f in fields(ExtractSettings)}
    for owner, names in ONE_ENGINES_OWN.items():
        for name in names:
            value = getattr(settings, name)
            if owner != settings.engine and value != defaults[name]:
                flag = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
                raise InputError(
                    f"{flag} is for engine {owner}; engine {settings.engine} would pass over it",
                    f"--engine {owner}, or leave it out",
                )
    if settings.rehearsal == "always" and settings.engine != "vllm":
        raise InputError(
            f"--rehearsal always: engine {settings.engine} has nothing to rehearse, its load is short", "leave it out"
        )


def wants_rehearsal(settings: ExtractSettings, info: ModelInfo) -> bool:
    """Whether gate 2 runs before the load: engine `vllm`, and a load that takes longer than the rehearsal by far."""
    if settings.rehearsal == IS_REHEARSAL:
        return False
    if settings.rehearsal not in ("auto", "always", "never"):
        raise InputError(f"--rehearsal {settings.rehearsal} is not known", "auto, always or never")
    if settings.engine != "vllm" or settings.rehearsal == "never" or settings.load_format == "dummy":
        return False
    return settings.rehearsal == "always" or info.weight_bytes > REHEARSE_BYTES


def make_engine(settings: ExtractSettings, info: ModelInfo, threads: int | None, longest: int) -> Engine:
    """The engine that `--engine` names, not loaded yet. `longest`: tokens of the longest sample it must take."""
    if settings.engine == "transformers":
        from eyas.engines.transformers import TransformersEngine, TransformersSettings

        return TransformersEngine(
            info,
            TransformersSettings(settings.dtype, settings.device, threads, settings.trust_remote_code, settings.parts),
        )
    from eyas.engines.vllm.engine import VllmEngine, VllmSettings

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
            trust_remote_code=settings.trust_remote_code,
            quick_start=settings.rehearsal == IS_REHEARSAL,
            capture=settings.capture,
            trace_steps=TRACED_STEPS if settings.trace else 0,
            part=settings.parts,
            shared_folder=Path(settings.output_dir).resolve() if over_ray else None,
        )
    )


def _run(
    job: Job,
    folder: Path,
    stop: StopRequest,
    say: Callable[[str], None],
    on_progress: Callable[[Progress, int, int], None] | None,
) -> ExtractReport:
    import time

    settings, dataset, engine = job.settings, job.dataset, job.engine
    part = settings.parts.name
    for half in folder.glob(f"shard-{part}r*.tmp" if part else "shard-*.tmp"):
        log.info("removing half-written %s: it does not count (fault F10)", half.name)
        half.unlink()
    for left in folder.glob(f".parity-{part}*"):
        shutil.rmtree(left)
    todo = [batch for batch in job.batches if any(dataset.ids[i] not in job.done for i in batch)]
    new = [i for batch in todo for i in batch if dataset.ids[i] not in job.done]
    new_tokens = int(sum(int(dataset.lengths[i]) for i in new))
    earlier = read_parity(folder)
    parity: dict[str, Any] | None = earlier
    rejected, interrupted = list(job.too_long), False
    seconds = 0.0
    done_now = Progress(0, 0, 0)
    if todo:
        with manifest_lock(folder):
            validate_same_states(folder, job.spec)  # another part may have opened the folder since the plan
            write_store_manifest(folder, job.spec, "open", parity=parity)
        say(f"loading {job.info.id} ({job.spec.dtype}, {engine.name})")
        try:
            engine.load(job.spec.layer_ids)
            job.spec = replace(job.spec, engine=engine.description)
            say("parity")
            chosen = pick_parity_samples(dataset.lengths, job.batches, settings.parity_samples)
            parity = check_parity(engine, next(read_batches(dataset, [chosen], job.info.vocab_size)))
            with manifest_lock(folder):
                write_store_manifest(folder, job.spec, "open", parity=parity)
            say(f"extracting {len(new)} samples, {new_tokens} tokens")
            begun = time.monotonic()
            stop.in_bulk = True

            def advance(progress: Progress) -> None:
                nonlocal done_now
                done_now = progress
                if on_progress is not None:
                    on_progress(progress, len(new), new_tokens)

            result = engine.capture(
                read_batches(dataset, todo, job.info.vocab_size),
                folder,
                job.spec,
                shard_bytes=settings.shard_bytes,
                done=job.done,
                progress=advance,
                stop=stop,
            )
            seconds = time.monotonic() - begun
            rejected += result.rejected
            interrupted = result.interrupted and done_now.samples < len(new)
        finally:
            engine.close()
    with manifest_lock(folder):
        return _finish(job, folder, rejected, parity if todo else None, interrupted, done_now, seconds)


def _finish(
    job: Job,
    folder: Path,
    rejected: list[tuple[str, str]],
    parity: dict[str, Any] | None,
    interrupted: bool,
    done_now: Progress,
    seconds: float,
) -> ExtractReport:
    """Sum up the store: ledger and manifest. `parity`: of this run, None for a run that had nothing to do."""
    earlier = validate_same_states(folder, job.spec) or {}
    headers = finished_shards(folder)
    there = distinct_samples(headers)
    reasons = dict(rejected)
    own = job.settings.parts
    others = [one for one in job.dataset.ids if not own.holds(one)]
    if not interrupted:
        # Whatever neither lies in a shard nor has a reason was lost on the way: that is never passed over in silence (F16).
        for one in job.dataset.ids:
            if one not in there and one not in reasons and own.holds(one):
                reasons[one] = "no states came out of the engine for it, and no reason (fault F16)"
    told = read_ledger(folder)
    reasons |= {one: told[one] for one in others if one in told}
    under_way = [one for one in others if one not in there and one not in reasons]
    rejected = sorted((one, why) for one, why in reasons.items() if one not in there)
    write_ledger(folder, rejected)
    totals = {
        "samples": len(there),
        "tokens": sum(header.tokens for header in headers),
        "bytes": sum(header.path.stat().st_size for header in headers),
        "not_written": len(rejected),
    }
    shards = [
        {
            "name": h.path.name,
            "samples": len(h.sample_ids),
            "tokens": h.tokens,
            "bytes": h.path.stat().st_size,
            "norms": json.loads(h.metadata["norms"]),
        }
        for h in headers
    ]
    status = "open" if interrupted or under_way else ("incomplete" if rejected else "complete")
    more: dict[str, Any] = {
        "last_run": {"samples": done_now.samples, "tokens": done_now.tokens, "seconds": round(seconds, 3)}
    }
    if parity is None and earlier:
        # This run computed nothing: what is told of the states, and that they were verified, stays as it was.
        job.spec = replace(job.spec, **{name: earlier[name] for name in ("engine", "capture")})
        kept = (
            ["last_run"]
            if (earlier.get("status"), earlier.get("shards")) != (status, shards)
            else ["last_run", "verified"]
        )
        parity = earlier.get("parity")
        more |= {name: earlier[name] for name in kept if name in earlier}
    write_store_manifest(folder, job.spec, status, parity=parity, totals=totals, shards=shards, **more)
    return ExtractReport(
        folder,
        len(job.dataset),
        totals["samples"],
        totals["tokens"],
        totals["bytes"],
        done_now.samples,
        done_now.tokens,
        seconds,
        tuple(rejected),
        parity,
        interrupted,
    )


def read_parity(folder: Path) -> dict[str, Any] | None:
    """The parity report of an earlier run into this folder, if any."""
    path = folder / "manifest.json"
    return json.loads(path.read_text()).get("parity") if path.exists() else None


def read_ledger(folder: Path) -> dict[str, str]:
    """Sample id -> reason, of the ledger as it stands; {} without one. Raises StoreError for a damaged one."""
    path = folder / LEDGER
    if not path.exists():
        return {}
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {row["sample_id"]: row["reason"] for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} is damaged: {error}",
            "delete this one file and run the same `eyas extract` again: it is written anew",
        ) from None


def write_ledger(folder: Path, rejected: Sequence[tuple[str, str]]) -> None:
    """`ledger.jsonl`: one line per sample that is not in the store. No samples, no file."""
    path = folder / LEDGER
    if not rejected:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(".lock.ledger.tmp")
    lines = (json.dumps({"sample_id": one, "reason": why, "time": now()}) + "\n" for one, why in rejected)
    temporary.write_text("".join(lines), encoding="utf-8")
    os.replace(temporary, path)
