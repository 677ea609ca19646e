"""What each idea in the training recipe is worth: drafts trained on the same states, one change each, several seeds, many at a time.

    python benchmarks/ablation_gpu.py --folder DIR [--seconds 480] [--processes 6] [--seeds 3] [--steps 600] [--json OUT] [key=value ...] [--rows NAME ...]

DIR holds `states` (`acceptance_gpu.py --folder DIR --stages answer extract`). Each job trains one draft for `--steps` optimizer steps and
counts the best simulated acceptance length on held-out samples (greedy answers' share of it is the real figure, see docs/training.md).
Jobs run seed by seed, `--processes` at a time on one GPU (with `compile=on` the first one alone: it compiles what the others then find compiled), until `--seconds` are over: jobs that have not begun by then are left out, and
the same call with the same `--json` goes on with them. Printed: a Markdown table, mean and spread over seeds, and the difference to the
unchanged recipe with the seeds paired. `key=value` changes the recipe of all rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from acceptance_gpu import RECIPE, take_settings  # which also puts src on the path

UNCHANGED = "the recipe"
#: What is changed -> the settings that change it. `draft` and `draft_init` are merged into the recipe's own.
ROWS: dict[str, dict[str, Any]] = {
    UNCHANGED: {},
    "auxiliary states not scaled": {"draft_init": {"aux_scale": "none"}},
    "auxiliary states scaled by layer, not dimension": {"draft_init": {"aux_scale": "layer"}},
    "attention not started on its own row": {"draft_init": {"self_attention": False}},
    "MLP not started at zero": {"draft_init": {"zero_down": False}},
    "`fc` not started as the last state": {"draft_init": {"logit_lens": False}},
    "as few key-value heads as the target": {"draft": {"num_key_value_heads": "target"}},
    "no share of single steps": {"ttt_warmup_fraction": 0.0},
    "loss tv": {"loss": "tv"},
    "loss lk": {"loss": "lk"},
    "equal step weights": {"step_decay": 1.0},
    "K 3": {"ttt_steps": 3},
    "K 7": {"ttt_steps": 7},
    "head trained": {"train_head": True},
    "auxiliary states normed (3.1)": {"draft": {"norm_aux": True}},
    "norm before the residual (3.1)": {"draft": {"norm_before_residual": True}},
    "normed state carried on (3.1)": {"draft": {"norm_output": True}},
    "two layers": {"draft": {"num_layers": 2}},
    "learning rate halved": {"learning_rate": 0.5 * RECIPE["learning_rate"]},
    "learning rate doubled": {"learning_rate": 2.0 * RECIPE["learning_rate"]},
    "weight decay 0.1": {"weight_decay": 0.1},
    "whole vocabulary": {"draft_vocab_size": 1 << 30},
}


def settings_of(name: str, base: dict[str, Any], kv_heads: int) -> dict[str, Any]:
    """The recipe with one row's change; `target` as a number of key-value heads stands for the target's own."""
    merged = dict(base)
    for key, value in ROWS[name].items():
        merged[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    if merged.get("draft", {}).get("num_key_value_heads") == "target":
        merged["draft"] = {**merged["draft"], "num_key_value_heads": kv_heads}
    return merged


def train_one(folder: str, model_path: str, name: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One job, in a process of its own pool."""
    from eyas.training.trainer import train

    draft = Path(folder) / "ablation" / f"{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        found = train(
            states=Path(folder) / "states", model_path=model_path, output_dir=draft, **{**settings, "seed": seed}
        )
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    best = found.best or {}
    return {
        "row": name,
        "seed": seed,
        "steps": found.steps,
        "best_step": found.best_step,
        "before": (found.before or {}).get("acceptance_length"),
        "length": best["acceptance_length"],
        "by_position": best["by_position"],
        "tokens_per_second": found.tokens / found.seconds,
        "seconds": found.seconds,
    }


def table(results: list[dict[str, Any]], rows: list[str]) -> str:
    """Markdown: row, seeds, mean +- spread (sample standard deviation), paired difference, first and last place of the chain, tokens/s."""
    reference = {r["seed"]: r["length"] for r in results if r["row"] == UNCHANGED}
    lines = [
        "| change | seeds | acceptance length | against the recipe | place 1 | place 5 | tok/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        of = [r for r in results if r["row"] == row]
        if not of:
            lines.append(f"| {row} | 0 | not run | | | | |")
            continue
        pairs = [r["length"] - reference[r["seed"]] for r in of if r["seed"] in reference and row != UNCHANGED]
        places = [statistics.mean(column) for column in zip(*(r["by_position"] for r in of), strict=True)]
        lines.append(
            f"| {row} | {len(of)} | {spread([r['length'] for r in of])} | {spread(pairs, '+') if pairs else ''} | "
            f"{places[0]:.3f} | {places[-1]:.3f} | {statistics.mean(r['tokens_per_second'] for r in of):,.0f} |"
        )
    return "\n".join(lines)


def spread(values: list[float], sign: str = "") -> str:
    """Mean and, of two or more values, sample standard deviation."""
    mean = format(statistics.mean(values), f"{sign}.3f")
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=480, help="begin no job that would not end within so long")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--json", type=Path, help="results, kept after every job and gone on with")
    words, settings = take_settings(sys.argv[1:])
    arguments = parser.parse_args(words)
    from eyas.store.reader import open_states
    from eyas.target.embedded import resolve_model_path
    from eyas.target.model_files import describe_model

    began = time.monotonic()
    info = describe_model(resolve_model_path(arguments.model_path), arguments.model_path)
    steps = arguments.steps
    base = {**RECIPE, "steps": steps, "eval_every": max(1, steps // 4), "keep": 1, "log_every": 100}
    base |= settings
    rows = list(dict.fromkeys([UNCHANGED, *arguments.rows]))
    kept = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else None
    states = open_states(arguments.folder / "states").manifest
    told = {"recipe": base, "states": {"dataset": states["dataset"]["hash"], "store_dtype": states.get("store_dtype")}}
    told = json.loads(json.dumps(told))
    if kept and {k: kept[k] for k in told} != told:
        raise SystemExit(
            f"{arguments.json} holds results of another recipe or store: {kept['recipe']}, {kept['states']}"
        )
    results: list[dict[str, Any]] = kept["results"] if kept else []
    done = {(r["row"], r["seed"]) for r in results}
    jobs = [(row, seed) for seed in range(arguments.seeds) for row in rows if (row, seed) not in done]
    print(
        f"{len(jobs)} jobs of {steps} steps, {arguments.processes} at a time, {len(results)} results kept", flush=True
    )
    context = multiprocessing.get_context("spawn")
    threads = str(max(1, (os.cpu_count() or 1) // arguments.processes))
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, threads)  # each process would take all cores
    running: dict[Future, tuple[str, int]] = {}
    slowest = 0.0
    alone = not results and base["compile"] != "off"
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        begun: dict[Future, float] = {}
        while jobs or running:
            while jobs and len(running) < (1 if alone else arguments.processes):
                if time.monotonic() - began + slowest > arguments.seconds:
                    print(f"out of time: {len(jobs)} jobs not begun", flush=True)
                    jobs = []
                    break
                row, seed = jobs.pop(0)
                changed = settings_of(row, base, info.num_kv_heads)
                task = pool.submit(train_one, str(arguments.folder), arguments.model_path, row, seed, changed)
                running[task], begun[task] = (row, seed), time.monotonic()
            for task in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                row, seed = running.pop(task)
                slowest = max(slowest, time.monotonic() - begun[task])
                found, alone = task.result(), False
                results.append(found)
                print(
                    f"[{time.monotonic() - began:5.0f} s] {row}, seed {seed}: {found['length']:.3f} (step {found['best_step']}, "
                    f"{found['seconds']:.0f} s, {found['tokens_per_second']:,.0f} tok/s)",
                    flush=True,
                )
                if arguments.json:
                    arguments.json.write_text(json.dumps({**told, "results": results}, indent=1), encoding="utf-8")
    print("\n" + table(results, rows))


if __name__ == "__main__":
    main()
