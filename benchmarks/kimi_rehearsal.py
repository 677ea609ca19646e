"""Kimi-K2.5's real widths and depth with dummy weights, through the public command line: rehearse, extract, verify, and plain prefill.

    PYTHONPATH=src python benchmarks/kimi_rehearsal.py --tp-size 2 --out results/

`KimiK25ForConditionalGeneration`, H 7168, 61 layers, INT4 experts (compressed-tensors), fewer of them than the 384 of the original
(`--experts`), ids 2 30 58 60 and the target state, samples of 512 tokens (or up to `--max-seq-len`). Steps (`--steps`), each with its time:

    rehearse     eyas rehearse ...   random weights, few layers
    again        the same            imports and files now in memory
    rehearse-ep  the same with --expert-parallel
    extract      eyas extract ...    random weights, all layers, parity on the engine itself
    verify       eyas verify ...     every byte; then each id of all samples must be [tokens, 7168]
    prefill      `extract_gpu.py` on the same model: prefill with the states computed and not stored, the same with capture, and,
                 when time allows, an engine without auxiliary states
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import extract_gpu
import model_shapes

#: Step -> the most seconds it may take.
STEPS = {"rehearse": 240, "again": 150, "rehearse-ep": 150, "extract": 600, "verify": 300, "prefill": 600}


def write_dataset(path: Path, count: int, longest: int, vocabulary: int, *, mixed: bool) -> int:
    """Random samples as `.jsonl`; lengths all `longest`, or mixed up to it. Returns the tokens."""
    import numpy as np

    random, tokens = np.random.default_rng(7), 0
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            length = int(random.integers(longest // 8, longest + 1)) if mixed else longest
            ids = random.integers(10, vocabulary - 10, length)
            mask = (np.arange(length) >= length // 3).astype(int)
            file.write(json.dumps({"input_ids": ids.tolist(), "loss_mask": mask.tolist()}) + "\n")
            tokens += length
    return tokens


def step(name: str, command: list[str], log: Path, timeout: float) -> tuple[float, int]:
    """Run one command with its output in a file; print its last lines. Returns seconds and exit code (124 = too long)."""
    print(f"=== {name}: {' '.join(command[2:])}", flush=True)
    begun = time.monotonic()
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            code = 124
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            code = code if code != 124 else 124
    seconds = time.monotonic() - begun
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    print("\n".join(lines[-12 if code == 0 else -45 :]), flush=True)
    print(f"--- {name}: exit {code} after {seconds:.0f} s", flush=True)
    keep_run_logs(log.with_suffix(""), show=12 if code else 0)
    return seconds, code


def keep_run_logs(folder: Path, *, show: int) -> None:
    """Copy what each process of the newest run said beside the results (it went to the run folder, not to this terminal); print `show` last lines."""
    runs = sorted(Path(os.environ["EYAS_STATE_DIR"]).glob("runs/*"), key=lambda p: p.stat().st_mtime)
    for file in sorted(runs[-1].rglob("logs/*.jsonl")) if runs else []:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / file.name)
        if show:
            tail = file.read_text(encoding="utf-8", errors="replace").splitlines()[-show:]
            print(f"    {file.name}", *(f"      {line[:300]}" for line in tail), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results")
    parser.add_argument("--work", default="/dev/shm/eyas-kimi")
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--experts", type=int, default=48)
    parser.add_argument("--num-layers", type=int, default=61)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--mixed", action="store_true", help="lengths up to --max-seq-len instead of all that long")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.80)
    parser.add_argument("--layer-ids", nargs="+", default=["2", "30", "58", "60"])
    parser.add_argument("--tiny", action="store_true", help="small widths, to try this script without a GPU")
    parser.add_argument("--bf16-experts", action="store_true", help="experts not quantised")
    parser.add_argument("--budget", type=float, default=600, help="seconds for everything")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS)
    arguments = parser.parse_args()
    begun, out, work = time.monotonic(), Path(arguments.out), Path(arguments.work)
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work, ignore_errors=True)
    extract_gpu.compile_bytecode()
    config = model_shapes.kimi_k25(
        arguments.experts, layers=arguments.num_layers, int4=not (arguments.tiny or arguments.bf16_experts)
    )
    text = config["text_config"]
    if arguments.tiny:
        text.update(
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
        text.update(q_lora_rank=64, qk_nope_head_dim=32, v_head_dim=32, vocab_size=2048)
        config["vision_config"].update(text_hidden_size=128)
    width, layers = text["hidden_size"], len(arguments.layer_ids) + 1
    predicted = arguments.samples * arguments.max_seq_len * width * layers * 2
    room = extract_gpu.make_room(work, predicted)
    count = max(8, min(arguments.samples, int(0.8 * room / (predicted / arguments.samples))))
    model = model_shapes.write_folder(work / "model", config)
    tokens = write_dataset(
        work / "samples.jsonl", count, arguments.max_seq_len, text["vocab_size"], mixed=arguments.mixed
    )
    stores = {"extract", "prefill"} & set(arguments.steps)
    touched = extract_gpu.touch_pages(work, min(predicted, 30 * 2**30)) if stores else 0.0
    print(
        f"{count} samples, {tokens} tokens, {tokens * width * layers * 2 / 1e9:.1f} GB of states; memory touched in {touched:.0f} s"
    )

    flags = [
        "--model-path",
        str(model),
        "--prepared-data",
        str(work / "samples.jsonl"),
        "--output-dir",
        str(work / "store"),
    ]
    flags += ["--engine", "vllm", "--tp-size", str(arguments.tp_size), "--max-seq-len", str(arguments.max_seq_len)]
    flags += ["--gpu-memory-utilization", str(arguments.gpu_memory_utilization), "--load-format", "dummy"]
    flags += ["--dtype", "bfloat16", "--layer-ids", *arguments.layer_ids]
    if arguments.batch_size:
        flags += ["--batch-size", str(arguments.batch_size)]
    eyas = [sys.executable, "-m", "eyas"]
    os.environ["EYAS_STATE_DIR"] = str(work / "state")
    results: dict[str, Any] = {
        "hardware": extract_gpu.hardware(),
        "tp_size": arguments.tp_size,
        "experts": arguments.experts,
        "layers": arguments.num_layers,
        "samples": count,
        "tokens": tokens,
        "flags": flags[4:],
        "steps": {},
    }

    def left() -> float:
        return arguments.budget - (time.monotonic() - begun)

    def save() -> None:
        (out / f"kimi_rehearsal-tp{arguments.tp_size}.json").write_text(json.dumps(results, indent=1))

    for name, command in (
        ("rehearse", [*eyas, "rehearse", *flags]),
        ("again", [*eyas, "rehearse", *flags]),
        ("rehearse-ep", [*eyas, "rehearse", *flags, "--expert-parallel"]),
        ("extract", [*eyas, "extract", *flags]),
        ("verify", [*eyas, "verify", str(work / "store"), "--recompute", "0"]),
    ):
        if name in arguments.steps:
            seconds, code = step(name, command, out / f"kimi-{name}.log", max(20, min(STEPS[name], left())))
            results["steps"][name] = {"seconds": round(seconds, 1), "exit": code}
            save()
    if "extract" in arguments.steps:
        try:
            results |= look(work / "store", [*map(int, arguments.layer_ids), arguments.num_layers], width)
        except Exception as error:  # noqa: BLE001 - whatever it is, it goes into the results and the next part runs
            results["look"] = f"{type(error).__name__}: {error}"
        save()
    if "prefill" in arguments.steps and left() > 100 and not arguments.tiny:
        shutil.rmtree(work / "store", ignore_errors=True)
        name, tp = "kimi-k25-61-int4", str(arguments.tp_size)
        flags = [
            "--shape",
            name,
            "--tp",
            tp,
            "--out",
            str(out),
            "--work",
            str(work),
            "--repeats",
            "2",
            "--parts",
            "eyas",
        ]
        flags += ["plain"] * (left() > 330)
        flags += ["--length", str(arguments.max_seq_len), "--samples", str(count), "--experts", str(arguments.experts)]
        flags += ["--num-layers", str(arguments.num_layers)]
        flags += ["--gpu-memory-utilization", str(arguments.gpu_memory_utilization)]
        flags += ["--part-timeout", str(left() - 10), "--budget", str(left())]
        step("prefill", [sys.executable, "benchmarks/extract_gpu.py", *flags], out / "kimi-prefill.log", left())
        found = out / f"extract_gpu-{name}-tp{tp}.json"
        if found.exists():
            results["prefill"] = json.loads(found.read_text())["parts"]
    save()
    shutil.rmtree(work, ignore_errors=True)
    print(json.dumps({k: v for k, v in results.items() if k not in ("flags", "norms")}, indent=1))


def look(store: Path, layer_ids: list[int], width: int) -> dict[str, Any]:
    """Read the store as a user would: shapes of every id for all samples, samples per rank, rates of the run."""
    import eyas

    states = eyas.open_states(store)
    manifest = states.manifest
    wrong = []
    for index in range(len(states)):
        sample = states[index]
        for layer in layer_ids:
            if list(sample.hidden[layer].shape) != [len(sample), width]:
                wrong.append((sample.id, layer, list(sample.hidden[layer].shape)))
    ranks: dict[str, dict[str, float]] = {}
    for shard in manifest["shards"]:
        rank = ranks.setdefault(shard["name"].split("-")[1], {"samples": 0, "bytes": 0})
        rank["samples"] += shard["samples"]
        rank["bytes"] += shard["bytes"]
    run = manifest["last_run"]
    return {
        "path": " -> ".join(manifest["engine"].get("path", [])),
        "load_seconds": manifest["engine"].get("load_seconds"),
        "shapes": f"{len(states)} samples, ids {list(states.layer_ids)}, {len(wrong)} wrong {wrong[:3]}",
        "status": manifest["status"],
        "tokens_per_s": round(run["tokens"] / max(run["seconds"], 1e-9)),
        "bytes_per_s_per_rank": {
            name: round(rank["bytes"] / max(run["seconds"], 1e-9)) for name, rank in ranks.items()
        },
        "samples_per_rank": {name: rank["samples"] for name, rank in ranks.items()},
        "parity": manifest["parity"],
        "norms": manifest["shards"][0]["norms"],
    }


if __name__ == "__main__":
    main()
