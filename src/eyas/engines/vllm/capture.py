"""What one rank does with the states of one engine step: check them, split them by request, copy its share, hand it to the writer.

Nothing here knows vLLM; `worker.py` takes what is needed out of its runners. The rules:

- Every tensor-parallel rank sees the same states, so each sample belongs to one rank by a stable hash of its id.
- On a GPU nothing waits. The owned rows are gathered on the compute stream (the engine may reuse its own tensors in the next step)
  together with their norms, their sums and the engine's own input ids; a stream of ours copies them into the writer's pinned buffers;
  the writing thread waits for the copy and compares the ids with the sample's, and each row's sum with the device's. That
  proves, for every row, that it belongs to this token of this sample and that it arrived.
- A full disk queue makes `reserve` wait, and with it this rank and the engine: memory stays bounded.
"""

from __future__ import annotations

import itertools
import logging
import threading
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.base.errors import ContractError, EyasError
from eyas.data.dataset import Sample
from eyas.engines.contract import (
    HOST_COPY,
    SHARD,
    SPLIT,
    Hop,
    check_model_output,
    describe_output,
    require_sound,
    write_hops,
)
from eyas.store.checksums import row_sums
from eyas.store.format import read_shard_header
from eyas.store.writer import ShardWriter, Slot

log = logging.getLogger(__name__)

REPORT = "please report it, with the table above and the versions in the manifest"


def owner_of(sample_id: str, owners: int) -> int:
    """Which of `owners` ranks writes this sample: CRC-32 of the id's bytes, the same in every process (`hash()` is not)."""
    return zlib.crc32(bytes.fromhex(sample_id)) % owners


def pack_mask(loss_mask: np.ndarray) -> str:
    """A 0/1 mask [T] as the hex digits of its bits: a sixth of its numbers' size in a request."""
    return np.packbits(loss_mask).tobytes().hex()


def unpack_mask(text: str, length: int) -> np.ndarray:
    """Inverse of `pack_mask`: [length] uint8."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=length)


@dataclass
class Pending:
    """A request of this rank on its way through the engine: `done` of its tokens have been captured."""

    sample: Sample
    done: int = 0
    slot: Slot | None = None
    copies: list[StepCopy] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """What one engine step computed, in the engine's own row order.

    `requests[i]` has `scheduled[i]` rows, following those of `requests[i - 1]`; `computed[r]` of its tokens came in earlier
    steps (0 = begun or begun anew after a preemption). `aux`: the model's auxiliary output. `input_ids`: [>= rows].
    """

    requests: Sequence[str]
    scheduled: Sequence[int]
    computed: Mapping[str, int]
    aux: Any
    input_ids: torch.Tensor


@dataclass(frozen=True)
class Segment:
    """Rows `row : row + length` of a step are tokens `at : at + length` of a sample."""

    pending: Pending
    row: int
    at: int
    length: int


class StepCopy:
    """The rows of one step on their way to the host. `synchronize()` (any thread, any number of times) waits for them, then proves them.

    Raises ContractError from `synchronize` when a row's input id is not the sample's token there.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        input_ids: torch.Tensor,
        found: Sequence[torch.Tensor] = (),
        event: Any = None,
    ):
        """`found`: norms and sums [L, rows] from the device, `event`: when they are there; both left out where nothing was copied."""
        self._segments, self._input_ids, self._found, self._event = segments, input_ids, found, event
        self._slots = [s.pending.slot for s in segments]
        self._lock = threading.Lock()
        self._finished = False

    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def synchronize(self) -> None:
        with self._lock:
            if self._finished:
                return
            if self._event is not None:
                self._event.synchronize()
            row = 0
            for segment, slot in zip(self._segments, self._slots, strict=True):
                rows = slice(row, row + segment.length)
                row += segment.length
                _require_own_tokens(self._input_ids[rows].numpy(), segment)
                if self._found:
                    for of_slot, found in zip((slot.norms, slot.sums), self._found, strict=True):  # type: ignore[union-attr]
                        of_slot[:, segment.at : segment.at + segment.length] = found[:, rows]  # type: ignore[index]
            self._finished = True


def _require_own_tokens(got: np.ndarray, segment: Segment) -> None:
    want = segment.pending.sample.token_ids[segment.at : segment.at + segment.length]
    if not np.array_equal(got, want):
        at = int(np.flatnonzero(got != want)[0])
        raise ContractError(
            f"sample {segment.pending.sample.id}, position {segment.at + at}: the engine computed token {int(got[at])} in this row, "
            f"the sample has {int(want[at])} there: states of another request",
            "the rows were split wrongly between the requests of a batch; " + REPORT,
        )


class _AllCopies:
    """What the writing thread waits for before it reads a sample's rows: the copies of all its chunks."""

    def __init__(self, copies: Sequence[StepCopy]):
        self._copies = copies

    def synchronize(self) -> None:
        for copy in self._copies:
            copy.synchronize()


class Capture:
    """One rank's capture of one run: from `step` to `ShardWriter`.

    Args:
        writer: this rank's; `on_device` when the states are on a GPU. Its spec says which states; the model returns layers ascending.
        rank: global, for messages. owner, owners: this rank's place among the ranks that see the states.
        device: where the states are. where: module path of the decoder, for messages.
        trace: file for hop records of the first `trace_steps` steps.
    """

    def __init__(
        self,
        writer: ShardWriter,
        *,
        rank: int,
        owner: int,
        owners: int,
        device: torch.device,
        where: str,
        trace: Path | None = None,
        trace_steps: int = 0,
    ):
        self.writer, self.rank, self.device, self.where = writer, rank, device, where
        self.owner, self.owners = owner, owners
        self.ascending = sorted(writer.spec.layer_ids)
        self.hidden_size, self.dtype = writer.spec.hidden_size, writer.spec.dtype
        self.trace, self.trace_steps = trace, trace_steps if trace is not None else 0
        self.steps = self.samples = self.tokens = 0
        self._pending: dict[str, Pending] = {}
        self._in_flight: deque[tuple[StepCopy, list[torch.Tensor]]] = deque()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    # -- requests

    def begin(self, request: str, token_ids: Sequence[int], extra: Mapping[str, Any] | None) -> None:
        """A request was scheduled for the first time (or anew). `extra`: `id` and `mask` (`pack_mask`) of the sample; None: not to be captured."""
        if extra is None or owner_of(extra["id"], self.owners) != self.owner:
            return
        known = self._pending.get(request)
        if known is None:
            sample = Sample.of(np.asarray(token_ids, dtype=np.int32), unpack_mask(extra["mask"], len(token_ids)))
            if sample.id != extra["id"]:
                raise ContractError(
                    f"request {request}: its tokens and mask hash to {sample.id}, the driver sent {extra['id']}",
                    "the prompt changed between driver and worker; " + REPORT,
                )
            self._pending[request] = Pending(sample)

    def finish(self, requests: Sequence[str]) -> None:
        """Requests that ended. One that ended before all its tokens came (an abort) is dropped; the driver counts what is missing."""
        for request in requests:
            pending = self._pending.pop(request, None)
            if pending is not None:
                self._abandon(pending)

    # -- states

    def step(self, step: Step) -> None:
        """Take this rank's share out of one engine step.

        Raises:
            ContractError: the model's output, or the rows of a request, are not what they must be; the table of hops is in the message.
            DiskFullError, StoreError: met by the writing thread.
        """
        rows = sum(step.scheduled)
        hops = check_model_output(
            step.aux,
            ascending_ids=self.ascending,
            tokens=rows,
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            where=self.where,
            rank=self.rank,
            step=self.steps,
        )
        require_sound(
            hops,
            "the engine's answer is not what this eyas knows; see `docs/engines.md`, and try --capture hooks or native",
        )
        segments = self._split(step)
        self._drop_arrived()
        if segments:
            copy = self._copy(segments, step)
            for segment in segments:
                segment.pending.copies.append(copy)
            if self.steps < self.trace_steps:
                self._record(hops, segments, step, copy)
            for segment in segments:
                if segment.pending.done == len(segment.pending.sample):
                    self._complete(segment.pending)
        self.steps += 1

    def close(self) -> dict[str, int]:
        """Drop what was begun and not completed, write the rest, wait for the disk. Returns the writer's totals plus `dropped`."""
        begun = [p for p in self._pending.values() if p.slot is not None]
        self.finish(list(self._pending))
        totals = self.writer.close()
        self._in_flight.clear()
        return {**totals, "dropped": len(begun), "steps": self.steps}

    def discard(self, error: EyasError) -> None:
        """End after a broken contract: finished shards stay, what is in the buffers is given up."""
        self._pending.clear()
        self._in_flight.clear()
        self.writer.give_up(error)

    def _split(self, step: Step) -> list[Segment]:
        """Segments of this rank, requests under way first: their buffers must fill before new ones are asked for."""
        found: list[Segment] = []
        row = 0
        for request, scheduled in zip(step.requests, step.scheduled, strict=True):
            pending = self._pending.get(request)
            if pending is not None:
                at = step.computed[request]
                length = min(scheduled, len(pending.sample) - at)  # what lies beyond is the generated token
                if at == 0 and pending.done > 0:  # preempted and begun anew
                    self._abandon(pending)
                if length > 0:
                    self._require_no_gap(request, pending, at, scheduled)
                    found.append(Segment(pending, row, at, length))
                    pending.done = at + length
            row += scheduled
        found.sort(key=lambda s: s.pending.slot is None)
        for segment in found:
            if segment.pending.slot is None:
                segment.pending.slot = self.writer.reserve(segment.pending.sample)
        return found

    def _abandon(self, pending: Pending) -> None:
        """Forget what came of a sample, once no copy on its way can still write to its rows: they will be another sample's."""
        for copy in pending.copies:
            copy.synchronize()
        if pending.slot is not None:
            self.writer.abandon(pending.slot)
        pending.done, pending.slot, pending.copies = 0, None, []

    def _require_no_gap(self, request: str, pending: Pending, at: int, scheduled: int) -> None:
        if at != pending.done:
            fault = (
                f"rows begin at token {at}: the engine skipped {at - pending.done} tokens, as a prefix-cache hit does"
            )
            expected = f"rows of tokens from {pending.done} on"
            shape = (scheduled, self.hidden_size)
            hop = Hop(
                SPLIT, -1, self.rank, request, shape, self.dtype, str(self.device), self.steps, pending.sample.id,
                expected=expected, fault=fault,
            )  # fmt: skip
            require_sound(
                [hop], "prefix caching must be off: let eyas start the engine, and pass no enable_prefix_caching"
            )

    def _copy(self, segments: Sequence[Segment], step: Step) -> StepCopy:
        if self._stream is not None:
            return self._copy_from_gpu(segments, step)
        for segment in segments:
            assert segment.pending.slot is not None
            for layer, states in zip(self.ascending, step.aux, strict=True):
                target = segment.pending.slot.rows[layer]
                target[segment.at : segment.at + segment.length] = states[segment.row : segment.row + segment.length]
        copy = StepCopy(segments, torch.cat([step.input_ids[s.row : s.row + s.length] for s in segments]))
        copy.synchronize()
        return copy

    def _copy_from_gpu(self, segments: Sequence[Segment], step: Step) -> StepCopy:
        assert self._stream is not None
        compute = torch.cuda.current_stream(self.device)
        gather = _gatherer(segments, self.device)
        staged = [gather(states) for states in step.aux]
        # The writer's norms are in the order asked, the model's layers ascending.
        asked = [staged[self.ascending.index(layer)] for layer in self.writer.spec.layer_ids]
        norms = torch.stack([torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32) for rows in asked])
        small = [gather(step.input_ids), norms, torch.stack([row_sums(rows) for rows in asked])]
        on_host = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in small]
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            for source, length, slot, at in _merged(segments, self.ascending[0]):
                for layer, rows in zip(self.ascending, staged, strict=True):
                    # One copy for all samples whose rows follow each other in the buffer.
                    target = slot.rows[layer][at:].as_strided((length, self.hidden_size), (self.hidden_size, 1))
                    target.copy_(rows[source : source + length], non_blocking=True)
            for one, target in zip(small, on_host, strict=True):
                target.copy_(one, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        copy = StepCopy(segments, on_host[0], on_host[1:], event)
        # The gathered rows stay referenced until their copy is done: only then may the allocator give their memory away.
        self._in_flight.append((copy, [*staged, *small]))
        return copy

    def _drop_arrived(self) -> None:
        while self._in_flight and self._in_flight[0][0].arrived():
            self._in_flight.popleft()
        # At most two steps' worth of gathered rows beside the engine's own memory.
        while len(self._in_flight) > 1:
            self._in_flight.popleft()[0]._event.synchronize()

    def _complete(self, pending: Pending) -> None:
        assert pending.slot is not None
        slot, pending.slot = pending.slot, None
        self.samples += 1
        self.tokens += len(pending.sample)
        ready = _AllCopies(pending.copies) if self._stream is not None else None
        pending.copies = []
        for request in [r for r, p in self._pending.items() if p is pending]:
            del self._pending[request]
        self.writer.complete(slot, ready)

    # -- trace

    def _record(self, hops: list[Hop], segments: Sequence[Segment], step: Step, copy: StepCopy) -> None:
        """Write the hops of one step; waits for the copies, so only traced steps pay for it."""
        copy.synchronize()
        rows = sum(step.scheduled)
        records = [replace(hop, norm=_mean_norm(states[:rows])) for hop, states in zip(hops, step.aux, strict=True)]
        for segment in segments:
            slot, first, after = segment.pending.slot, segment.at, segment.at + segment.length
            assert slot is not None
            span, in_step = f"tokens {first}:{after}", slice(segment.row, segment.row + segment.length)
            for layer, states in zip(self.ascending, step.aux, strict=True):
                records.append(
                    self._hop(SPLIT, layer, f"rows {in_step.start}:{in_step.stop} = {span}", states[in_step], segment)
                )
                host = slot.rows[layer][first:after]
                records.append(self._hop(HOST_COPY, layer, f"{self.writer.name} buffer, {span}", host, segment))
        assert self.trace is not None
        write_hops(self.trace, records)

    def _hop(self, name: str, layer: int, where: str, rows: torch.Tensor, segment: Segment) -> Hop:
        expected = f"[{segment.length}, {self.hidden_size}] {self.dtype}"
        shape, dtype, device = describe_output(rows)
        sample, norm = segment.pending.sample.id, _mean_norm(rows)
        return Hop(name, layer, self.rank, where, shape, dtype, device, self.steps, sample, norm, expected)

    def record_shard(self, entry: Mapping[str, Any]) -> None:
        """`on_shard` of the writer, in a traced run: the last hop, read back from the file."""
        if self.trace is None or int(entry["name"].rsplit("-", 1)[1].split(".")[0]) >= self.trace_steps:
            return
        header = read_shard_header(self.writer.directory / entry["name"])
        shape, dtype = (header.tokens, self.hidden_size), header.metadata["store_dtype"]
        fault = None if header.tokens == entry["tokens"] else f"{header.tokens} rows in the file"
        expected = f"[{entry['tokens']}, {self.hidden_size}]"
        hops = [
            Hop(
                SHARD, layer, self.rank, entry["name"], shape, dtype, "disk", self.steps,
                norm=entry["norms"][str(layer)]["mean"], expected=expected, fault=fault,
            )
            for layer in header.layer_ids
        ]  # fmt: skip
        write_hops(self.trace, hops)


def _mean_norm(rows: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).mean())


def _gatherer(segments: Sequence[Segment], device: torch.device) -> Any:
    """A function that takes the segments' rows, in their order, out of a step's tensor into a new one (on the compute stream)."""
    first, last = segments[0].row, segments[-1].row + segments[-1].length
    follows = all(a.row + a.length == b.row for a, b in itertools.pairwise(segments))
    if follows:
        return lambda tensor: tensor[first:last].clone()
    index = np.concatenate([np.arange(s.row, s.row + s.length, dtype=np.int64) for s in segments])
    on_device = torch.from_numpy(index).pin_memory().to(device, non_blocking=True)
    return lambda tensor: tensor.index_select(0, on_device)


def _merged(segments: Sequence[Segment], layer: int) -> list[tuple[int, int, Slot, int]]:
    """(first staged row, rows, slot, position in it) of copies as large as the buffer's layout allows."""
    copies: list[tuple[int, int, Slot, int]] = []
    row, end = 0, (-1, -1)
    for segment in segments:
        slot = segment.pending.slot
        assert slot is not None
        rows = slot.rows[layer]
        begin = (rows.untyped_storage().data_ptr(), rows.storage_offset() // rows.shape[1] + segment.at)
        if copies and begin == end:
            source, length, first, at = copies[-1]
            copies[-1] = (source, length + segment.length, first, at)
        else:
            copies.append((row, segment.length, slot, segment.at))
        end = (begin[0], begin[1] + segment.length)
        row += segment.length
    return copies
