"""The vLLM engine: the driver's side. Starts vLLM with our worker class, feeds it prompts, keeps count of what the ranks wrote.

    settings -> LLM(worker_cls=eyas...CaptureWorker) -> one request per sample, one token each -> ranks write shards -> totals

The states never come here: `worker.py` and `vllm_capture.py` take them where they are computed. This file keeps the engine's queue
filled, counts what came back against what was sent, and turns what a rank or a dying process left behind into an error that says
which rank met what. How vLLM is started is in `vllm_start.py`.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas.base import errors
from eyas.base.check import Check, Status
from eyas.base.errors import EngineError, EyasError
from eyas.data.dataset import Sample
from eyas.engines.base import CaptureResult, Progress
from eyas.engines.vllm.capture import pack_mask
from eyas.engines.vllm.native import NativeCapture
from eyas.engines.vllm.start import (
    STEP_TOKENS,
    SUPPORTED,
    VllmSettings,
    engine_arguments,
    engine_environment,
    environment,
    first_engine_here,
    gpu_memory,
    has_gpu,
    installed_vllm,
    refuse_impossible,
    writer_settings,
)
from eyas.engines.vllm.stop import end_engine
from eyas.store.format import DTYPES, StoreSpec, read_shard_header
from eyas.store.writer import too_many_failed
from eyas.target.model_files import human_bytes

log = logging.getLogger(__name__)

DIED = (
    "finished shards are kept and the same command resumes; the cause is above, in the lines of the engine's processes"
)
NOT_STARTED = (
    "nothing was written; the cause is above, in the lines of the engine's processes (`eyas runs logs` keeps them)"
)


class VllmEngine:
    """A running vLLM with our workers. One engine serves many captures. See `base.Engine`."""

    name = "vllm"

    def __init__(self, settings: VllmSettings):
        self.settings = settings
        self.default_batch_tokens = STEP_TOKENS["cuda" if has_gpu() else "cpu"]
        self.loaded: dict[str, Any] = {}
        self.layer_ids: tuple[int, ...] = ()
        self.load_seconds = 0.0
        #: Seconds of the last capture: `open` (buffers), `run` (first prompt to last answer), `close` (until the last shard is there).
        self.timings: dict[str, float] = {}
        self._llm: Any = None
        self._native = tempfile.TemporaryDirectory(prefix="eyas-native-", dir=settings.native_folder)
        self.native_folder = Path(self._native.name)
        self._faults = tempfile.TemporaryDirectory(prefix="eyas-engine-")
        self._request = 0

    def preflight(self) -> list[Check]:
        """vLLM's version, its parallelism against the model's shape, memory against the weights. Loads nothing."""
        checks = []
        for name, look in (
            ("vLLM", self._check_version),
            ("parallelism", self._check_parallelism),
            ("memory", self._check_memory),
            ("capture", self._check_capture),
        ):
            try:
                status, finding, remedy = look()
            except EyasError as error:
                status, finding, remedy = "FAIL", error.what, error.remedy
            checks.append(Check(name, status, finding, remedy))
        return checks

    def _check_version(self) -> tuple[Status, str, str]:
        return (
            "OK",
            f"{installed_vllm()}, supported are {SUPPORTED[0][0]}.{SUPPORTED[0][1]} to {SUPPORTED[1][0]}.{SUPPORTED[1][1]}",
            "",
        )

    def _check_parallelism(self) -> tuple[Status, str, str]:
        refuse_impossible(self.settings)
        own = self.settings
        return "OK", f"tensor parallel {own.tp_size}, pipeline {own.pp_size}; {own.model.num_heads} heads divide", ""

    def _check_capture(self) -> tuple[Status, str, str]:
        """How the states will be taken; only eager hooks cost speed."""
        if self.settings.capture == "transformers":
            return "OK", "transformers: the model as vLLM's Transformers backend runs it", ""
        if self.settings.capture == "hooks":
            return (
                "WARN",
                "hooks: eager mode, no CUDA graphs",
                "--capture auto takes a faster way where the model has one",
            )
        return "OK", f"{self.settings.capture}: vLLM's own interface", ""

    def _check_memory(self) -> tuple[Status, str, str]:
        import psutil

        own, ranks = self.settings, self.settings.tp_size * self.settings.pp_size
        stored = DTYPES[own.model.dtype].itemsize
        need = own.model.weight_bytes * (1 if own.model.quantization else DTYPES[own.dtype].itemsize / stored) / ranks
        hint = "more GPUs (--tp-size), a quantised model, or another process to end first"
        memory = gpu_memory()
        if memory is not None:
            free, total = memory
            asked = total * own.gpu_memory_utilization
            finding = f"{human_bytes(need)} of weights a rank, {human_bytes(free)} of {human_bytes(total)} free on the first GPU"
            if need > 0.95 * asked or free < asked:
                return "FAIL", f"{finding}, --gpu-memory-utilization asks for {human_bytes(asked)}", hint
            return "OK", finding, ""
        available = psutil.virtual_memory().available
        finding = f"{human_bytes(need * ranks)} of weights, {human_bytes(available)} of memory available"
        return ("FAIL", finding, hint) if need * ranks > 0.9 * available else ("OK", finding, "")

    @property
    def description(self) -> dict[str, Any]:
        """For the manifest: version, parallelism, runner, device, compile mode, path to the decoder."""
        keep = ("path", "num_layers", "runner", "device", "compile_mode", "cudagraph_mode")
        return {
            "name": self.name,
            "version": installed_vllm(),
            "tp_size": self.settings.tp_size,
            "pp_size": self.settings.pp_size,
            "expert_parallel": self.settings.expert_parallel,
            "executor": self.settings.executor,
            "capture": self.settings.capture,
            "load_format": self.settings.load_format,
            **({"load_seconds": round(self.load_seconds, 1)} if self.loaded else {}),
            **{k: self.loaded[k] for k in keep if k in self.loaded},
        }

    @property
    def path(self) -> str:
        """`KimiK25ForConditionalGeneration -> DeepseekV3ForCausalLM -> DeepseekV2Model, 61 layers`."""
        return f"{' -> '.join(self.loaded.get('path', ['?']))}, {self.loaded.get('num_layers', '?')} layers"

    def load(self, layer_ids: Sequence[int]) -> None:
        """Start vLLM and load the model. Raises EngineError, or what a rank met (ContractError, InputError)."""
        installed_vllm()
        gpu = has_gpu()
        refuse_impossible(self.settings, gpu=gpu)
        arguments = engine_arguments(self.settings, layer_ids, self.native_folder, gpu=gpu)
        first = first_engine_here()
        self.layer_ids = tuple(layer_ids)
        started = time.monotonic()
        with environment(engine_environment(self.settings, Path(self._faults.name), gpu=gpu, first=first)):
            from vllm import LLM

            try:
                self._llm = LLM(**arguments)
            except Exception as error:
                raise self._explained(error, "vLLM did not start", remedy=NOT_STARTED) from error
        self.load_seconds = time.monotonic() - started
        threading.Thread(
            target=_wake_when_dead, args=(weakref.ref(self._llm),), name="eyas-engine-watch", daemon=True
        ).start()
        described = self._rpc("eyas_describe")
        self.loaded = described[-1]
        if self.loaded["num_layers"] != self.settings.model.num_layers:
            raise EngineError(
                f"config.json says {self.settings.model.num_layers} layers, the loaded {self.path} differ",
                "the model folder and this vLLM do not agree; check --model-path",
            )
        log.info(
            "%s on %s, runner %s, ready after %.0f s",
            self.path,
            self.loaded["device"],
            self.loaded["runner"],
            self.load_seconds,
        )

    def capture(
        self,
        batches: Iterable[Sequence[Sample]],
        directory: Path,
        spec: StoreSpec,
        *,
        shard_bytes: int,
        done: Collection[str],
        progress: Callable[[Progress], None],
        stop: threading.Event,
    ) -> CaptureResult:
        """Run every sample through the engine once. See `base.Engine.capture`."""
        result = CaptureResult()
        expected: list[str] = []
        # Requests join and leave the engine's steps one by one, so samples that are done need not keep a batch company.
        feed = (sample for batch in batches for sample in batch if sample.id not in done)
        self._forget_faults(directory)  # of a run of more ranks
        begun = time.monotonic()
        ranks: Ranks | NativeCapture = Ranks(self, directory)
        if self.settings.capture == "native":
            ranks = NativeCapture(self.native_folder, directory, f"{self.settings.part.name}r000")
        try:
            ranks.open(spec, shard_bytes)
            opened = time.monotonic()
            tokens, looked = 0, 0.0
            with closing(self._run(feed, expected, result.rejected, stop)) as answers:
                for samples, (finished, output) in enumerate(answers, 1):
                    ranks.take(finished, output)
                    tokens += len(finished)
                    progress(Progress(samples, tokens, tokens * spec.bytes_per_token))
                    if time.monotonic() - looked > 0.1:
                        looked = time.monotonic()
                        self._raise_fault(directory)
            ran = time.monotonic()
            totals = ranks.close()
            self.timings = {"open": opened - begun, "run": ran - opened, "close": time.monotonic() - ran}
        except EyasError:
            ranks.give_up()
            raise
        except Exception as error:
            if not stop.is_set():
                raise self._explained(error, "the engine died", directory) from error
            # Ctrl-C reaches the engine's processes too, and they end at once; each rank writes what it has complete.
            log.warning("the engine stopped with the run: %s", type(error).__name__)
            result.interrupted = True
            return result
        result.interrupted = stop.is_set()
        result.shards = [entry for total in totals for entry in total.get("entries", [])]
        result.rejected += [(one, why) for total in totals for one, why in total.get("rejected", [])]
        known = {one for entry in result.shards for one in read_shard_header(directory / entry["name"]).sample_ids}
        known |= {one for one, _ in result.rejected}
        reason = "the engine ended this request without computing all its tokens"
        result.rejected += [(one, reason) for one in expected if one not in known]
        return result

    def _run(
        self, samples: Iterable[Sample], expected: list[str], rejected: list[tuple[str, str]], stop: threading.Event
    ) -> Generator[tuple[Sample, Any], None, None]:
        """Keep the engine's queue filled, but no fuller than six steps need (two run, the next must be there when one ends); yields (sample, answer) as requests end."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        limit = 6 * (self.settings.step_tokens or self.default_batch_tokens)
        under_way: dict[str, Sample] = {}
        waiting_tokens = 0
        feed = iter(samples)
        exhausted = False
        try:
            while True:
                while not exhausted and not stop.is_set() and (waiting_tokens < limit or not under_way):
                    sample = next(feed, None)
                    if sample is None:
                        exhausted = True
                        break
                    extra = {"eyas": {"id": sample.id, "mask": pack_mask(sample.loss_mask)}}
                    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra)
                    name = f"{sample.id}.{self._request}"
                    self._request += 1
                    try:
                        engine.add_request(name, {"prompt_token_ids": sample.token_ids.tolist()}, params)
                    except ValueError as error:
                        rejected.append((sample.id, f"refused by the engine: {error}"))
                        if too_many_failed(len(rejected), len(rejected) + len(expected)):
                            raise EngineError(
                                f"vLLM refused {len(rejected)} of {len(rejected) + len(expected)} samples, the last: {error}",
                                "the samples do not fit this model or these settings",
                            ) from error
                        continue
                    under_way[name] = sample
                    waiting_tokens += len(sample)
                    expected.append(sample.id)
                if not under_way:
                    return
                for output in engine.step():
                    if output.finished and output.request_id in under_way:
                        sample = under_way.pop(output.request_id)
                        waiting_tokens -= len(sample)
                        yield sample, output
        except GeneratorExit:
            # Left early: let the engine forget what is still queued, so that it can serve another capture.
            engine.abort_request(list(under_way))
            while engine.has_unfinished_requests():
                engine.step()
            raise

    @contextmanager
    def witnessed(
        self, folder: Path, positions: Mapping[str, Sequence[int]], *, layers: bool = True
    ) -> Iterator[list[dict[str, Any]]]:
        """While active, a witness looks at the passes that are captured (see `witness.Witness`); afterwards the list holds each rank's answer.

        folder: on every rank's host. positions: sample id -> positions whose logits are kept, ascending. layers: with hooks on the
        decoder layers, the model uncompiled; False for its logits alone, the pass as in bulk.
        """
        answers: list[dict[str, Any]] = []
        asked = {"folder": str(folder), "positions": {k: list(v) for k, v in positions.items()}, "layers": layers}
        self._rpc("eyas_witness", asked)
        try:
            yield answers
        finally:
            answers += self._rpc("eyas_witness", None)

    def prefill(self, samples: Sequence[Sample]) -> float:
        """Seconds of plain prefill of these samples, nothing captured: the yardstick of the benchmarks."""
        started = time.monotonic()
        for _ in self._run(samples, [], [], threading.Event()):
            pass
        return time.monotonic() - started

    def close(self) -> None:
        """End every process of the engine."""
        llm, self._llm = self._llm, None
        if llm is not None:
            try:
                end_engine(llm.llm_engine.engine_core)
            except Exception as error:  # noqa: BLE001 - it is being thrown away; what matters is that the processes end
                log.warning("vLLM's shutdown: %s", error)
            del llm
        self._faults.cleanup()
        self._native.cleanup()

    # -- talking to the ranks

    def _rpc(self, method: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        """Call a worker method on every rank; one answer per rank, in rank order."""
        answers = self._llm.collective_rpc(method, timeout=timeout, args=arguments)
        if not isinstance(answers, list) or len(answers) != self.settings.tp_size * self.settings.pp_size:
            raise errors.ContractError(
                f"collective_rpc({method}) gave {type(answers).__name__} of length {len(answers) if hasattr(answers, '__len__') else '-'}, "
                f"expected one answer for each of {self.settings.tp_size * self.settings.pp_size} ranks",
                "this version of vLLM is not supported; `docs/engines.md` lists which are",
            )
        return answers

    def _faults_of(self, place: Path) -> list[Path]:
        """What ranks of this engine left, the lowest rank's first; other parts that write beside it leave their own."""
        part = "" if place == Path(self._faults.name) else self.settings.part.name
        return sorted(place.glob(f"fault-{part}r*.json"))

    def _raise_fault(self, place: Path) -> None:
        """Raise the error that a rank left in a directory."""
        for file in self._faults_of(place):
            raise _from_record(json.loads(file.read_text(encoding="utf-8")))

    def _forget_faults(self, place: Path) -> None:
        for file in self._faults_of(place):
            file.unlink(missing_ok=True)

    def _explained(self, error: Exception, what: str, folder: Path | None = None, remedy: str = DIED) -> EyasError:
        """The first rank's own error when it left one, else what vLLM said, shortened to its last line."""
        for place in (Path(self._faults.name), folder):
            if place is not None:
                try:
                    self._raise_fault(place)
                except EyasError as known:
                    self._forget_faults(place)
                    return known
        lines = [line for line in str(error).splitlines() if line.strip() and "errors.pydantic.dev" not in line]
        return EngineError(
            f"{what}: {type(error).__name__}: {lines[-1] if lines else 'no message'}",
            remedy,
        )


def _wake_when_dead(engine: weakref.ref[Any]) -> None:
    """Break the wait for an engine core that was killed: vLLM notes the death, but its client goes on waiting for an answer."""
    while (llm := engine()) is not None:
        core = llm.llm_engine.engine_core
        resources, answers = getattr(core, "resources", None), getattr(core, "outputs_queue", None)
        if resources is None or answers is None:
            return  # an engine inside this process
        if resources.engine_dead:
            answers.put_nowait(RuntimeError("its core process is gone"))
            return
        del llm, core
        time.sleep(0.5)


def _from_record(record: Mapping[str, Any]) -> EyasError:
    kind = getattr(errors, record["class"], EngineError)
    where = f"rank {record['rank']}: " if "rank" in record else ""
    return kind(where + record["what"], record["remedy"])


class Ranks:
    """The capture of one run, in the engine's ranks: opened, and closed, on all of them at once."""

    def __init__(self, engine: VllmEngine, directory: Path):
        self.engine, self.directory = engine, directory

    def open(self, spec: StoreSpec, shard_bytes: int) -> None:
        """Make every rank ready. Raises what a rank met."""
        own = self.engine.settings
        opened = {
            "folder": str(self.directory.resolve()),
            "spec": {**asdict(spec), "layer_ids": list(spec.layer_ids)},
            "name": own.part.name,
            "shard_bytes": shard_bytes,
            **writer_settings(own, spec.bytes_per_token, shard_bytes, gpu=has_gpu()),
            "trace_steps": own.trace_steps,
        }
        _raise_errors(self.engine._rpc("eyas_open", opened))

    def take(self, sample: Sample, output: Any) -> None:
        """A sample was computed: its states never come here."""

    def close(self) -> list[dict[str, Any]]:
        """Totals of each rank, when its last shard is written. Raises what a rank met."""
        totals = self.engine._rpc("eyas_close")
        self.engine._raise_fault(self.directory)
        return _raise_errors(totals)

    def give_up(self) -> None:
        """After an error: let the other ranks write what is complete. The error that is being raised is the one to be seen."""
        try:
            self.engine._rpc("eyas_close", timeout=120)
        except Exception as error:  # noqa: BLE001
            log.warning("closing the capture after an error: %s", error)
        self.engine._forget_faults(self.directory)


def _raise_errors(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for answer in answers:
        if "error" in answer:
            raise _from_record(answer["error"])
    return answers
