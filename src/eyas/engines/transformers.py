"""The `transformers` engine: any Hugging Face causal LM, on a CPU or one GPU, at the speed of its plain forward pass.

Batches are packed by a token budget into one row without padding (`packed_attention.py`). Hooks on the decoder layers asked for
copy the residual stream straight into the shard's host buffer; no other layer's states are kept, the head is never run. On a GPU
the copies go to pinned memory on a stream of their own, and row norms are computed beside the states.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from eyas.base.check import Check
from eyas.base.errors import ContractError, EyasError, InputError
from eyas.base.part import WHOLE, Part
from eyas.data.dataset import Sample
from eyas.engines import packed_attention
from eyas.engines.base import CaptureResult, Progress
from eyas.store.checksums import row_sums
from eyas.store.format import DTYPES, StoreSpec
from eyas.store.writer import ShardWriter, Slot
from eyas.target.decoder import Decoder, find_decoder, hook_streams
from eyas.target.fitness import check_streams
from eyas.target.loading import load_model
from eyas.target.model_files import ModelInfo, human_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TransformersSettings:
    """`dtype`: auto | bfloat16 | float32 | float16. `device`: auto | cpu | cuda | cuda:1 ... `threads`: CPU threads, None = chosen.

    `part`: of `--part i/n`, in the names of the shards.
    """

    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    trust_remote_code: bool = False
    part: Part = WHOLE


class Capture:
    """Hooks that take the residual stream at chosen ids of a decoder. Pure: what is taken goes to `sink(layer_id, stream)`.

    `stream` is [1, T, H], read before the layer (or the final norm) that it enters has run.
    """

    def __init__(self, decoder: Decoder, layer_ids: Sequence[int], hidden_size: int):
        self.layer_ids = tuple(layer_ids)
        self.sink: Callable[[int, torch.Tensor], None] | None = None
        self._hidden_size = hidden_size
        self._taken: list[int] = []
        self._tokens = 0
        self._handles = hook_streams(decoder, self.layer_ids, self._take)

    def _take(self, layer_id: int, stream: Any) -> None:
        if self.sink is None:
            return
        wanted = [1, self._tokens, self._hidden_size]
        shape = list(stream.shape) if isinstance(stream, torch.Tensor) else type(stream).__name__
        if shape != wanted:
            several = isinstance(stream, torch.Tensor) and stream.numel() > torch.Size(wanted).numel()
            kind = (
                "several residual streams side by side (AltUp, hyper-connections)"
                if several
                else "indexed once too often"
            )
            raise ContractError(
                f"layer {layer_id}: the residual stream should be {wanted}, it is {shape}: {kind}",
                "eyas cannot capture this architecture with this engine; try --engine vllm",
            )
        if layer_id in self._taken:
            raise ContractError(
                f"layer {layer_id}: its module runs more than once in a forward pass, so what enters it is not one state",
                "eyas cannot capture this architecture yet; please report it",
            )
        self._taken.append(layer_id)
        self.sink(layer_id, stream)

    def run(self, forward: Callable[[], Any], tokens: int, sink: Callable[[int, torch.Tensor], None]) -> Any:
        """Run a forward pass of `tokens` tokens and check that each id was taken exactly once.

        Raises ContractError when hooks did not fire (a compiled model, an early exit) or fired twice.
        """
        self.sink, self._tokens, self._taken = sink, tokens, []
        try:
            result = forward()
        finally:
            self.sink = None
        if sorted(self._taken) != sorted(self.layer_ids):
            raise ContractError(
                f"one forward pass gave states of layers {sorted(self._taken)}, {sorted(self.layer_ids)} were asked for",
                "hooks of a compiled or wrapped model may not fire: load it plainly",
            )
        return result

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def sensible_threads() -> int:
    """CPU threads that are really free: with one busy neighbour, two threads on two cores run three times slower than one."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, min(int(os.environ["OMP_NUM_THREADS"]), available))
    busy = sum(psutil.cpu_percent(interval=0.3, percpu=True)) / 100
    return max(1, min(available, round(available - busy + 0.1)))


class TransformersEngine:
    """See the module's opening. Use: `load`, `parity`, `capture`, `close`."""

    name = "transformers"

    def __init__(self, info: ModelInfo, settings: TransformersSettings):
        self.info, self.settings = info, settings
        self.dtype = info.dtype if settings.dtype == "auto" else settings.dtype
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype {settings.dtype} is unknown", f"one of auto, {', '.join(DTYPES)}")
        device = settings.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise InputError(
                f"--device {device}: torch {torch.__version__} sees no GPU",
                "use --device cpu, or a torch with CUDA and a driver that fits",
            )
        self.threads = settings.threads or (sensible_threads() if self.device.type == "cpu" else None)
        # Long rows gain nothing on a CPU, where one row fills the cores; on a GPU they hide the launches.
        self.default_batch_tokens = 2048 if self.device.type == "cpu" else 16384
        self.one_by_one: str | None = None
        self.model: Any = None
        self.hooks: Any = None

    def preflight(self) -> list[Check]:
        rows = [check_streams(self.info), check_memory(self.info, self.dtype, str(self.device))]
        if (
            self.device.type == "cuda"
            and self.dtype == "bfloat16"
            and torch.cuda.get_device_capability(self.device) < (8, 0)
        ):
            finding = f"{torch.cuda.get_device_name(self.device)} computes bfloat16 by emulation, many times slower"
            rows.append(Check("dtype", "WARN", finding, "--dtype float16, or float32 where activations are large"))
        return rows

    @property
    def description(self) -> dict[str, Any]:
        import transformers

        return {
            "name": self.name,
            "version": transformers.__version__,
            "device": str(self.device),
            "device_name": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "threads": self.threads,
            "packing": self.one_by_one or "packed rows",
        }

    def load(self, layer_ids: Sequence[int]) -> None:
        """Load the weights and place the hooks. Raises EngineError when transformers cannot load the model."""
        if self.threads:
            torch.set_num_threads(self.threads)
        self.model = load_model(self.info, self.dtype, self.device)
        self.decoder = find_decoder(self.model, self.info.num_layers)
        log.info("decoder: %s", self.decoder.path)
        self.one_by_one = packed_attention.why_not_packable(self.model)
        if self.one_by_one:
            log.warning("samples run one by one: %s", self.one_by_one)
        else:
            packed_attention.register()
        self.hooks = Capture(self.decoder, layer_ids, self.info.hidden_size)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def forward_captured(
        self, samples: Sequence[Sample], sink: Callable[[int, torch.Tensor, list[int]], None]
    ) -> torch.Tensor:
        """One forward pass over packed samples. `sink(layer, stream [T, H], lengths)`. Returns the normed last state [T, H]."""
        if self.one_by_one:
            return torch.cat([self._forward([sample], sink) for sample in samples])
        return self._forward(samples, sink)

    def _forward(self, samples: Sequence[Sample], sink: Callable[[int, torch.Tensor, list[int]], None]) -> torch.Tensor:
        lengths = [len(s) for s in samples]
        token_ids = torch.cat([torch.from_numpy(s.token_ids) for s in samples]).long()[None]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        token_ids, positions = (
            token_ids.to(self.device, non_blocking=True),
            positions.to(self.device, non_blocking=True),
        )
        if not self.one_by_one and self.model.config._attn_implementation != packed_attention.NAME:
            self.model.set_attn_implementation(packed_attention.NAME)
        with torch.inference_mode(), packed_attention.packed(lengths):
            output = self.hooks.run(
                lambda: self.decoder.base(input_ids=token_ids, position_ids=positions, use_cache=False),
                sum(lengths),
                lambda i, stream: sink(i, stream[0], lengths),
            )
        return output.last_hidden_state[0]

    def capture(
        self,
        batches: Iterable[Sequence[Sample]],
        folder: Path,
        spec: StoreSpec,
        *,
        shard_bytes: int,
        done: Collection[str],
        progress: Callable[[Progress], None],
        stop: threading.Event,
    ) -> CaptureResult:
        """See `engines.base.Engine.capture`."""
        on_gpu = self.device.type == "cuda"
        writer = ShardWriter(
            folder,
            spec,
            f"{self.settings.part.name}r000",
            shard_bytes=shard_bytes,
            buffers=4 if on_gpu else 2,
            threads=2 if on_gpu else 1,
            pin=on_gpu,
            on_device=on_gpu,
        )
        samples_done = tokens_done = 0
        interrupted = False
        try:
            for batch in batches:
                slots = [None if sample.id in done else writer.reserve(sample) for sample in batch]
                ready = self._capture_batch(batch, slots, spec)
                for slot in filter(None, slots):
                    writer.complete(slot, ready)
                    samples_done += 1
                    tokens_done += len(slot.sample)
                progress(Progress(samples_done, tokens_done, sum(s["bytes"] for s in list(writer.shards))))
                if stop.is_set():
                    interrupted = True
                    break
        except BaseException:
            # Keep what is finished, and let the first error be the one that is seen.
            try:
                writer.close()
            except EyasError as error:
                log.debug("closing after a failure: %s", error)
            raise
        writer.close()
        return CaptureResult(writer.shards, writer.rejected, interrupted)

    def _capture_batch(self, batch: Sequence[Sample], slots: Sequence[Slot | None], spec: StoreSpec) -> Any:
        """Forward one batch into its slots. Returns a CUDA event to wait for, or None when the rows are in place."""
        order = {i: position for position, i in enumerate(spec.layer_ids)}
        taken: dict[int, int] = dict.fromkeys(spec.layer_ids, 0)

        def take(layer: int, stream: torch.Tensor, lengths: list[int]) -> None:
            start, first = 0, taken[layer]
            norms = sums = None
            if self._stream is not None:
                norms, sums = torch.linalg.vector_norm(stream, dim=1, dtype=torch.float32), row_sums(stream)
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream) if self._stream is not None else torch.no_grad():
                for slot, length in zip(slots[first:], lengths, strict=False):
                    if slot is not None:
                        slot.rows[layer].copy_(stream[start : start + length], non_blocking=True)
                        for found, target in ((norms, slot.norms), (sums, slot.sums)):
                            if found is not None and target is not None:
                                target[order[layer]].copy_(found[start : start + length], non_blocking=True)
                    start += length
            if self._stream is not None and norms is not None and sums is not None:
                for tensor in (stream, norms, sums):
                    tensor.record_stream(self._stream)
            taken[layer] = first + len(lengths)

        self.forward_captured(batch, take)
        if any(count != len(batch) for count in taken.values()):
            raise ContractError(
                f"a batch of {len(batch)} samples gave states of {taken} samples per layer", "please report it"
            )
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def close(self) -> None:
        if self.hooks is not None:
            self.hooks.remove()
        self.hooks = self.model = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def check_memory(info: ModelInfo, dtype: str, device: str) -> Check:
    """Memory for the weights, where one process holds them all (engine `transformers`)."""
    stored = DTYPES[info.dtype].itemsize
    need = int(info.weight_bytes * (1 if info.quantization else DTYPES[dtype].itemsize / stored))
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(torch.device(device))
        finding = f"{human_bytes(need)} of weights, {human_bytes(free)} of {human_bytes(total)} free on {torch.cuda.get_device_name(device)}"
        hint = "another process holds the GPU, or the model is too large: --engine vllm --tp-size N"
    else:
        free = psutil.virtual_memory().available
        finding = f"{human_bytes(need)} of weights as {dtype}, {human_bytes(free)} of memory available"
        hint = "use --dtype bfloat16, a machine with more memory, or --engine vllm on GPUs"
    if need > 0.95 * free:
        return Check("memory", "FAIL", finding, hint)
    return Check("memory", "WARN" if need > 0.7 * free else "OK", finding, hint if need > 0.7 * free else "")
