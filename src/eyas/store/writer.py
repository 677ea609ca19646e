"""Writing shards: bounded host memory, computing never waits for the disk until it must.

A writer owns a few host buffers, one [capacity, H] tensor per layer each (pinned when the states come from a GPU). Samples reserve
rows, whoever computes copies states into them (in chunks, in any order, asynchronously), and when every sample of a full buffer is
complete a thread checks it, hashes it and writes it: `<name>.tmp`, flushed, fsynced, renamed, directory fsynced. When all buffers are
waiting for the disk, `reserve` waits: a slow disk slows the engine down and never fills RAM.

What is checked of every shard on its way out: each state finite, no row all zero; where norms and sums were computed
beside the states on a GPU, that every row of the host copy has the same sum (a copy that never happened holds an earlier sample's rows).
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from eyas.base.errors import ContractError, StoreError
from eyas.base.tensors import write_tensors
from eyas.data.dataset import Sample
from eyas.store.checksums import checksum_metadata, row_sums
from eyas.store.format import DTYPES, StoreSpec, ids_to_words, zero_states

log = logging.getLogger(__name__)

#: Small enough that the last shards of a run are soon written, large enough that a terabyte is a few thousand files.
DEFAULT_SHARD_BYTES = 256_000_000
FP8_MAX = 448.0  # largest finite e4m3fn
#: Samples whose fate is looked at when failed ones are counted.
RECENT = 1000


def too_many_failed(failed: int, samples: int) -> bool:
    """Whether so many failed samples are a capture that does not work: more than two, and more than one in twenty."""
    return failed > max(2, samples // 20)


def buffers_for(step_bytes: int, shard_bytes: int) -> int:
    """How many buffers hold three steps' states: one being computed, one being copied, one being written. Four at least."""
    return max(4, -(-3 * step_bytes // shard_bytes) + 1)


class Ready(Protocol):
    """Something to wait for before the rows may be read, such as a `torch.cuda.Event`."""

    def synchronize(self) -> Any: ...


@dataclass(eq=False)
class Slot:
    """Rows reserved for one sample. `rows[layer]`: [T, H] view to copy into.

    `norms` [L, T] float32 and `sums` [L, T] int64: views for what the device computed of the rows, or None.
    """

    sample: Sample
    rows: dict[int, torch.Tensor]
    norms: torch.Tensor | None
    sums: torch.Tensor | None
    _buffer: _Buffer
    _start: int


@dataclass(eq=False)
class _Buffer:
    """One shard in the making: `hidden[layer]` [capacity, H], and the samples that lie in it."""

    hidden: dict[int, torch.Tensor]
    norms: torch.Tensor | None
    sums: torch.Tensor | None
    capacity: int
    used: int = 0
    open_slots: int = 0
    sealed: bool = False
    slots: list[Slot] = field(default_factory=list)
    waits: list[Ready] = field(default_factory=list)
    statistics: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class ShardWriter:
    """One writer of a store: one per process (rank). Not for several threads on the calling side.

    Args:
        directory: the store; must exist.
        spec: what the store holds.
        name: names the shards, `shard-<name>-<seq>`; unique among the writers of a store.
        shard_bytes: aimed at per shard; a longer sample gets a shard of its own.
        buffers: shards in memory at once, two at least.
        pin: page-locked buffers, for asynchronous copies from a GPU.
        threads: shards written at once; one thread writes about 1.5 GB/s to memory, less than a fast GPU computes.
        on_device: the states come from another memory, and the caller fills `slot.norms` (L2 norm of every row) and `slot.sums`
            (`row_sums`) with what was computed there.
        on_shard: called in the writing thread after each shard, with its manifest entry.

    Attributes:
        shards: manifest entries of the shards written so far.
        rejected: (sample id, reason) of samples whose states were not finite: they are left out, and belong in the ledger.
    """

    def __init__(
        self,
        directory: Path,
        spec: StoreSpec,
        name: str = "r000",
        *,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        buffers: int = 2,
        threads: int = 1,
        pin: bool = False,
        on_device: bool = False,
        on_shard: Callable[[dict[str, Any]], None] | None = None,
    ):
        self.directory, self.spec, self.name = Path(directory), spec, name
        self.capacity = max(1, shard_bytes // spec.bytes_per_token)
        self.shards: list[dict[str, Any]] = []
        self.rejected: list[tuple[str, str]] = []
        self._pin, self._on_device, self._on_shard = pin, on_device, on_shard
        self._recent: deque[bool] = deque(maxlen=RECENT)  # of the last samples: whether it failed
        self._max_buffers = max(2, buffers)
        self._buffers: list[_Buffer] = []
        self._free: list[_Buffer] = []
        self._open: _Buffer | None = None
        self._writing = 0
        self._completed = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        taken = [int(p.name.split("-")[-1].split(".")[0]) for p in self.directory.glob(f"shard-{name}-*.safetensors")]
        self._sequence = max(taken, default=-1) + 1
        if pin:
            # Page-locking takes a second per few gigabytes: now, not in the middle of the run.
            self._buffers = [self._allocate(self.capacity) for _ in range(self._max_buffers)]
            self._free = list(self._buffers)
        self._threads = ThreadPoolExecutor(max(1, threads), thread_name_prefix=f"shards-{name}")

    # -- the computing side

    def reserve(self, sample: Sample) -> Slot:
        """Rows for one sample; waits while every buffer is full and on its way to the disk.

        Raises what the writing thread met: DiskFullError, ContractError (a bad state), StoreError.
        """
        length = len(sample)
        with self._changed:
            if self._open is not None and self._open.used + length > self._open.capacity:
                self._seal(self._open)
            if self._open is None:
                self._open = self._next_buffer(length)
            buffer, start = self._open, self._open.used
            buffer.used += length
            buffer.open_slots += 1
        rows = {i: tensor[start : start + length] for i, tensor in buffer.hidden.items()}
        norms = sums = None
        if buffer.norms is not None and buffer.sums is not None:
            norms, sums = buffer.norms[:, start : start + length], buffer.sums[:, start : start + length]
            sums.zero_()  # what an earlier sample left here would fit the rows that it left
        slot = Slot(sample, rows, norms, sums, buffer, start)
        buffer.slots.append(slot)
        return slot

    def complete(self, slot: Slot, ready: Ready | None = None) -> None:
        """Every row of the sample is (or will be, once `ready`) in place."""
        with self._changed:
            if ready is not None:
                slot._buffer.waits.append(ready)
            slot._buffer.open_slots -= 1
            self._completed += 1
            self._pass_on(slot._buffer)

    def abandon(self, slot: Slot) -> None:
        """The sample will not come; its rows are left out of the shard."""
        with self._changed:
            slot._buffer.slots.remove(slot)
            slot._buffer.open_slots -= 1
            self._pass_on(slot._buffer)

    def finish_open_shard(self) -> None:
        """End the shard in the making (as far as its samples are complete), so that a stop loses nothing."""
        with self._changed:
            if self._open is not None:
                self._seal(self._open)

    def close(self) -> dict[str, int]:
        """Write what is open, wait for the disk, and return totals: `samples`, `tokens`, `bytes`, `shards`.

        Raises what the writing thread met, and StoreError for samples that were reserved but never completed.
        """
        self.finish_open_shard()
        stuck = [slot.sample.id for b in self._buffers if b.open_slots for slot in b.slots]
        self._threads.shutdown()
        self._raise_error()
        if stuck:
            raise StoreError(
                f"{len(stuck)} samples were begun and never completed, the first is {stuck[0]}",
                "this is a bug of the engine's capture; please report it with the run's logs",
            )
        written = sum(s["samples"] for s in self.shards)
        if written + len(self.rejected) != self._completed:
            raise StoreError(
                f"{self._completed} samples were captured, {written} written and {len(self.rejected)} rejected",
                "the writing thread died; see the log. Rerun the same command: finished shards are kept",
            )
        return {
            "samples": written,
            "tokens": sum(s["tokens"] for s in self.shards),
            "bytes": sum(s["bytes"] for s in self.shards),
            "shards": len(self.shards),
        }

    def give_up(self, error: BaseException) -> None:
        """Stop after an error on the computing side: nothing more is written, the threads end, finished shards stay."""
        self._error = self._error or error
        self._threads.shutdown(wait=False)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _seal(self, buffer: _Buffer) -> None:
        buffer.sealed = True
        self._open = None
        self._pass_on(buffer)

    def _pass_on(self, buffer: _Buffer) -> None:
        if buffer.sealed and buffer.open_slots == 0 and self._error is None:
            self._writing += 1
            self._threads.submit(self._write_buffer, buffer)

    def _next_buffer(self, length: int) -> _Buffer:
        """A free buffer of at least `length` rows, a new one, or the wait for one. Called with the lock held."""
        while True:
            self._raise_error()
            for buffer in self._free:
                if buffer.capacity >= length:
                    self._free.remove(buffer)
                    return buffer
            if self._free and length > self.capacity:
                # A sample longer than any buffer: a larger buffer takes the place of a free one.
                self._buffers.remove(self._free.pop())
            # Waiting helps only while something is being written. If all buffers wait for samples that are still being
            # computed (chunked prefill), the caller must go on to complete them: one more buffer, or it would wait forever.
            if len(self._buffers) < self._max_buffers or self._writing == 0:
                buffer = self._allocate(max(self.capacity, length))
                self._buffers.append(buffer)
                return buffer
            self._changed.wait(timeout=1.0)

    def _allocate(self, capacity: int) -> _Buffer:
        dtype, width = DTYPES[self.spec.dtype], self.spec.hidden_size
        hidden = {i: torch.empty((capacity, width), dtype=dtype, pin_memory=self._pin) for i in self.spec.layer_ids}
        norms = sums = None
        if self._on_device:
            shape = (len(self.spec.layer_ids), capacity)
            norms = torch.empty(shape, dtype=torch.float32, pin_memory=self._pin)
            sums = torch.empty(shape, dtype=torch.int64, pin_memory=self._pin)
        return _Buffer(hidden, norms, sums, capacity)

    # -- the writing side

    def _write_buffer(self, buffer: _Buffer) -> None:
        try:
            if self._error is None and buffer.slots:
                for ready in buffer.waits:
                    ready.synchronize()
                self._leave_out_unusable(buffer)
            if self._error is None and buffer.slots:
                entry = self._write(buffer)
                self.shards.append(entry)
                if self._on_shard is not None:
                    self._on_shard(entry)
        except BaseException as error:  # noqa: BLE001 - carried to the computing side, which raises it
            self._error = self._error or error
            log.error("writing shard %s failed: %s", self._sequence, error)
        with self._changed:
            buffer.used, buffer.sealed = 0, False
            buffer.slots, buffer.waits, buffer.statistics = [], [], {}
            self._writing -= 1
            if buffer in self._buffers and len(self._buffers) > self._max_buffers:
                self._buffers.remove(buffer)
            elif buffer in self._buffers:
                self._free.append(buffer)
            self._changed.notify_all()

    def _leave_out_unusable(self, buffer: _Buffer) -> None:
        """Check every state of a full buffer; drop samples with NaN or Inf, raise ContractError for anything systematic.

        A few samples may overflow in low precision without anything being wrong with the capture: they go to the ledger. An
        all-zero state, or more than a few bad samples, is a capture that does not work.
        """
        reasons: dict[str, str] = {}
        for position, i in enumerate(self.spec.layer_ids):
            for slot in buffer.slots:
                if slot.norms is None or slot.sums is None:
                    norms = torch.linalg.vector_norm(slot.rows[i], dim=1, dtype=torch.float32)
                else:
                    norms = slot.norms[position]
                    _compare_host_copy(slot, i, slot.sums[position])
                where = f"layer {i}, sample {slot.sample.id}, position"
                zero = zero_states(i, norms).nonzero()
                if len(zero):
                    raise ContractError(
                        f"{where} {int(zero[0])}: the state is all zero; {len(zero)} of the sample's {len(norms)} rows are",
                        "the capture of this layer does not work; run again with --trace and look at the hops of this layer",
                    )
                odd = (~torch.isfinite(norms)).nonzero()
                if len(odd):
                    reasons.setdefault(
                        slot.sample.id, f"{where} {int(odd[0])}: not finite; {len(odd)} of {len(norms)} rows"
                    )
                buffer.statistics.setdefault(i, []).append(norms)
        with self._changed:  # several threads write
            self._recent.extend(slot.sample.id in reasons for slot in buffer.slots)
            failed, samples = sum(self._recent), len(self._recent)
        if reasons and too_many_failed(failed, samples):
            raise ContractError(
                f"{failed} of the last {samples} samples have states that are not finite; one of them: {next(iter(reasons.values()))}",
                "this is not a rare overflow: check the weights (`eyas verify`), or run with --dtype float32 or bfloat16",
            )
        if reasons:
            self.rejected += reasons.items()
            log.warning(
                "%d samples left out of shard %d: %s", len(reasons), self._sequence, next(iter(reasons.values()))
            )
            keep = [j for j, slot in enumerate(buffer.slots) if slot.sample.id not in reasons]
            buffer.slots = [buffer.slots[j] for j in keep]
            buffer.statistics = {i: [norms[j] for j in keep] for i, norms in buffer.statistics.items()}

    def _write(self, buffer: _Buffer) -> dict[str, Any]:
        """Hash and write one checked buffer as a shard. Returns its manifest entry."""
        slots = buffer.slots
        offsets = np.concatenate([[0], np.cumsum([len(s.sample) for s in slots])]).astype(np.int64)
        # Without left-out samples the rows lie in order and without gaps, and no copy is needed.
        dense = all(slot._start == offsets[i] for i, slot in enumerate(slots))
        pick: Any = slice(0, int(offsets[-1]))
        if not dense:
            pick = torch.cat([torch.arange(s._start, s._start + len(s.sample)) for s in slots])
        tensors = {
            "token_ids": torch.from_numpy(np.concatenate([s.sample.token_ids for s in slots])),
            "loss_mask": torch.from_numpy(np.concatenate([s.sample.loss_mask for s in slots])),
            "offsets": torch.from_numpy(offsets),
            "sample_ids": ids_to_words([s.sample.id for s in slots]),
        }
        statistics: dict[str, dict[str, float]] = {}
        for i in self.spec.layer_ids:
            rows, norms = buffer.hidden[i][pick], torch.cat(buffer.statistics[i])
            statistics[str(i)] = {"mean": float(norms.mean()), "min": float(norms.min()), "max": float(norms.max())}
            if self.spec.store_dtype == "fp8":
                tensors[f"hidden.{i}"], tensors[f"scale.{i}"], error = quantise_fp8(rows)
                statistics[str(i)]["fp8_relative_l2"] = error
            else:
                tensors[f"hidden.{i}"] = rows
        metadata = {**self.spec.metadata(), **checksum_metadata(tensors), "norms": json.dumps(statistics)}
        with self._changed:
            path = self.directory / f"shard-{self.name}-{self._sequence:05d}.safetensors"
            self._sequence += 1
        if path.exists():
            raise StoreError(
                f"{path} exists already: another process writes shards of this name",
                "two runs share the directory; let one end, then rerun the same command: it makes what is missing",
            )
        write_shard_file(path, tensors, metadata)
        return {
            "name": path.name,
            "samples": len(slots),
            "tokens": int(offsets[-1]),
            "bytes": path.stat().st_size,
            "norms": statistics,
        }


def _compare_host_copy(slot: Slot, layer: int, sums: torch.Tensor) -> None:
    """Every row of the host copy against its sum [T] from the device: rows that were never copied are those of an earlier sample."""
    off = (row_sums(slot.rows[layer]) != sums).nonzero()
    if len(off):
        raise ContractError(
            f"layer {layer}, sample {slot.sample.id}, position {int(off[0])}: the host copy is not what was computed on the device; "
            f"{len(off)} of the sample's {len(sums)} rows differ",
            "the copy to the host is out of order; run again with --trace and report it",
        )


def write_shard_file(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write `<path>.tmp`, flush it to the disk, rename it: a reader sees all of a shard or nothing.

    Raises DiskFullError (the temporary file is removed), InputError or StoreError.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.touch(exist_ok=False)
        write_tensors(path, tensors, metadata, temporary=temporary)
    except FileExistsError:
        raise StoreError(
            f"{temporary} is half-written: another process writes shards of this name",
            "two runs share the directory; let one end, then rerun the same command",
        ) from None
    except OSError as error:
        raise StoreError(
            f"{path} could not be written: {error}", "check the disk, then rerun the same command"
        ) from error


def quantise_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """One scale per token: [T, H] -> ([T, H] float8_e4m3fn, [T] float32, relative L2 error of the whole)."""
    full = rows.float()
    scale = full.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / FP8_MAX
    quantised = (full / scale[:, None]).to(torch.float8_e4m3fn)
    error = torch.linalg.vector_norm(quantised.float() * scale[:, None] - full) / torch.linalg.vector_norm(full)
    return quantised, scale, float(error)
