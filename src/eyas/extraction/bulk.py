"""The run as planned: load, parity, bulk, and what the store says of itself when it is over. Rerun, it resumes."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.base.errors import EXIT_INCOMPLETE, EXIT_INTERRUPTED
from eyas.base.files import translate_disk_full
from eyas.base.locks import lock_directory, manifest_lock
from eyas.base.stop_request import StopRequest, stoppable
from eyas.engines.base import Progress
from eyas.extraction.batches import read_batches
from eyas.extraction.plan import Job, existing_files, plan
from eyas.gates.parity import check_parity
from eyas.gates.preflight import refuse_failures
from eyas.gates.reference import pick_samples
from eyas.store.format import ShardHeader, distinct_samples, finished_shards, validate_same_states, write_store_manifest
from eyas.store.ledger import read_ledger, write_ledger

log = logging.getLogger(__name__)


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


@dataclass
class Outcome:
    """What came of a run's bulk. `parity` is None where there was nothing to do, `stopped` where nobody asked for a stop."""

    rejected: dict[str, str]
    parity: dict[str, Any] | None = None
    stopped: bool = False
    done: Progress = Progress(0, 0, 0)  # noqa: RUF009 - frozen
    seconds: float = 0.0


def run(
    job: Job, *, on_stage: Callable[[str], None], on_progress: Callable[[Progress, int, int], None] | None = None
) -> ExtractReport:
    """Run a plan, alone in its output directory or beside other parts. See `extract` for arguments and errors."""
    directory = job.directory
    with translate_disk_full(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with lock_directory(directory, job.part), stoppable() as stop:
        if existing_files(directory) != job.existing_files:
            job.engine.close()  # a run that ended, or another part that began, between the plan and the lock
            job = plan(job.settings, quick_start=job.quick_start)
            refuse_failures(job.checks)
        _remove_leftovers(job)
        outcome = _compute(job, stop, on_stage, on_progress)
        with manifest_lock(directory):
            return _finish(job, outcome)


def _remove_leftovers(job: Job) -> None:
    """What a killed run of this part began; other parts' files are theirs."""
    name = f"{job.part.name}r*" if job.part.name else "*"
    for half in job.directory.glob(f"shard-{name}.tmp"):
        log.info("removing half-written %s: it does not count", half.name)
        half.unlink()
    for left in job.directory.glob(f".parity-{job.part.name}*"):
        shutil.rmtree(left)


def _compute(
    job: Job,
    stop: StopRequest,
    say: Callable[[str], None],
    on_progress: Callable[[Progress, int, int], None] | None,
) -> Outcome:
    """Load the model, pass gate 4, and capture what no finished shard holds."""
    dataset, engine, directory = job.dataset, job.engine, job.directory
    outcome = Outcome(dict(job.too_long))
    todo = [batch for batch in job.batches if any(dataset.ids[i] not in job.done for i in batch)]
    if not todo:
        return outcome
    new = [i for batch in todo for i in batch if dataset.ids[i] not in job.done]
    new_tokens = int(sum(int(dataset.lengths[i]) for i in new))
    with manifest_lock(directory):
        earlier = validate_same_states(directory, job.spec)  # another part may have opened the store since the plan
        write_store_manifest(directory, job.spec, "open", parity=(earlier or {}).get("parity"))
    say(f"loading {job.info.id} ({job.spec.dtype}, {engine.name})")
    try:
        engine.load(job.spec.layer_ids)
        job.spec = replace(job.spec, engine=engine.description)
        say("parity")
        positions = [i for batch in job.batches for i in batch]
        chosen = pick_samples(dataset.lengths, positions, job.info, job.settings.parity_samples)
        outcome.parity = check_parity(engine, next(read_batches(dataset, [chosen], job.info.vocab_size)))
        with manifest_lock(directory):
            write_store_manifest(directory, job.spec, "open", parity=outcome.parity)
        say(f"extracting {len(new)} samples, {new_tokens} tokens")
        begun = time.monotonic()
        stop.in_bulk = True

        def advance(progress: Progress) -> None:
            outcome.done = progress
            if on_progress is not None:
                on_progress(progress, len(new), new_tokens)

        result = engine.capture(
            read_batches(dataset, todo, job.info.vocab_size),
            directory,
            job.spec,
            shard_bytes=job.settings.shard_bytes,
            done=job.done,
            progress=advance,
            stop=stop,
        )
        outcome.seconds = time.monotonic() - begun
        outcome.rejected |= dict(result.rejected)
        outcome.stopped = result.interrupted
    finally:
        engine.close()
    return outcome


def _finish(job: Job, outcome: Outcome) -> ExtractReport:
    """Sum up the store: ledger and manifest."""
    directory, ids = job.directory, job.dataset.ids
    earlier = validate_same_states(directory, job.spec) or {}
    headers = finished_shards(directory)
    written = distinct_samples(headers)
    reasons = {one: why for one, why in outcome.rejected.items() if one not in written}
    lost = [one for one in ids if job.part.holds(one) and one not in written and one not in reasons]
    # A stop leaves samples for the next run. Without one, what is in no shard and has no reason was lost: that is never passed over.
    interrupted = outcome.stopped and bool(lost)
    if not interrupted:
        reasons |= dict.fromkeys(lost, "no states came out of the engine for it, and no reason")
    ledger = read_ledger(directory)
    of_other_parts = [one for one in ids if not job.part.holds(one) and one not in written]
    reasons |= {one: ledger[one] for one in of_other_parts if one in ledger}
    under_way = any(one not in reasons for one in of_other_parts)
    write_ledger(directory, reasons)

    status = "open" if interrupted or under_way else ("incomplete" if reasons else "complete")
    shards = [_shard_entry(header) for header in headers]
    totals = {key: sum(entry[key] for entry in shards) for key in ("samples", "tokens", "bytes")}
    done = outcome.done
    more: dict[str, Any] = {
        "parity": outcome.parity,
        "last_run": {"samples": done.samples, "tokens": done.tokens, "seconds": round(outcome.seconds, 3)},
    }
    if outcome.parity is None and earlier:
        # This run computed nothing: what is said of the states, and that they were verified, stays as it was.
        job.spec = replace(job.spec, **{name: earlier[name] for name in ("engine", "capture")})
        unchanged = (earlier.get("status"), earlier.get("shards")) == (status, shards)
        kept = ("parity", "last_run", "verified") if unchanged else ("parity", "last_run")
        more |= {name: earlier[name] for name in kept if name in earlier}
    totals["not_written"] = len(reasons)
    write_store_manifest(directory, job.spec, status, totals=totals, shards=shards, **more)
    return ExtractReport(
        directory,
        len(ids),
        totals["samples"],
        totals["tokens"],
        totals["bytes"],
        done.samples,
        done.tokens,
        outcome.seconds,
        tuple(sorted(reasons.items())),
        more["parity"],
        interrupted,
    )


def _shard_entry(header: ShardHeader) -> dict[str, Any]:
    """A shard as the manifest names it."""
    return {
        "name": header.path.name,
        "samples": len(header.sample_ids),
        "tokens": header.tokens,
        "bytes": header.path.stat().st_size,
        "norms": json.loads(header.metadata["norms"]),
    }
