"""What a run costs an extraction: heartbeat, log files, captured stdout and stderr, the keeper, the watchdog.

    python benchmarks/runs_overhead.py [--model-path smollm2] [--samples 100] [--rounds 9] [--threads 1] [--lines 20]

The same capture of the same real conversations, bare and inside `runs.start` (debug level, a report of progress per batch, `--lines`
log records and printed lines per batch, many more than eyas writes), in turn, in one process with one loaded model.

Two measures, since a shared machine's speed drifts by more than one per cent from minute to minute:
- tokens/s bare against inside, as a ratio within each round; the median of the rounds, and how far they scatter;
- CPU seconds that the machinery itself used (keeper process, heartbeat thread, progress and log calls) per second of extraction: what it
  could take from the extraction at the very most, and hardly noisy.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from extract_cpu import cpu_name

from eyas.base.manifest import package_version
from eyas.data.dataset import open_dataset
from eyas.data.preparation import prepare
from eyas.engines.transformers import TransformersEngine, TransformersSettings
from eyas.extraction.batches import plan_batches
from eyas.runs import run as runs
from eyas.runs.processes import keepers_of_run
from eyas.store.format import StoreSpec
from eyas.target.embedded import resolve_model_path
from eyas.target.layers import resolve_layer_ids
from eyas.target.model_files import describe_model

log = logging.getLogger("eyas.benchmark")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def thread_seconds(name: str) -> float:
    """User and system time of this process's threads of that name."""
    total = 0
    wanted = {str(thread.native_id) for thread in threading.enumerate() if thread.name == name}
    for one in wanted:
        fields = Path(f"/proc/self/task/{one}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lines", type=int, default=20)
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="eyas-bench-"))
    os.environ["EYAS_STATE_DIR"] = str(work / "state")
    try:
        run(arguments, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def run(arguments: argparse.Namespace, work: Path) -> None:
    prepare("conversations", arguments.model_path, work / "dataset", limit=arguments.samples)
    dataset = open_dataset(work / "dataset")
    samples = list(dataset)
    info = describe_model(resolve_model_path(arguments.model_path), arguments.model_path)
    layer_ids = resolve_layer_ids(None, info.num_layers)
    engine = TransformersEngine(info, TransformersSettings("bfloat16", "cpu", arguments.threads))
    engine.load(layer_ids)
    plan = plan_batches(dataset.lengths, range(len(samples)), 2048, None)
    batches = [[samples[i] for i in batch] for batch in plan]
    identity = {"hash": dataset.hash, "samples": len(samples), "tokens": dataset.tokens, "path": "bench"}
    spec = StoreSpec(info.for_manifest(), tuple(layer_ids), "bfloat16", "bfloat16", identity)

    def capture(progress) -> float:
        folder = work / "store"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        begun = time.perf_counter()
        engine.capture(batches, folder, spec, shard_bytes=2**26, done=(), progress=progress, stop=threading.Event())
        return time.perf_counter() - begun

    calls = 0.0

    def report(done) -> None:
        nonlocal calls
        begun = time.thread_time()
        runs.report_progress(samples=done.samples, total=len(samples), tokens=done.tokens, bytes=done.bytes)
        for number in range(arguments.lines):
            log.debug("batch line %d, %d samples", number, done.samples)
            os.write(1, b"a line from native code, straight to the descriptor\n")
        calls += time.thread_time() - begun

    capture(lambda done: None)
    bare: list[float] = []
    inside: list[float] = []
    keeper = heartbeat = 0.0
    out = sys.stdout
    for number in range(arguments.rounds):
        for way in ("bare", "inside") if number % 2 else ("inside", "bare"):
            if way == "bare":
                bare.append(capture(lambda done: None))
                continue
            quiet = os.dup(1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the terminal is not what is measured
            with runs.start("bench", [], log_level="debug") as current:
                current.progress(stage="extract")
                (mark,) = keepers_of_run(current.id)
                before = cpu_seconds(mark.pid), thread_seconds("eyas-heartbeat")
                inside.append(capture(report))
                keeper += cpu_seconds(mark.pid) - before[0]
                heartbeat += thread_seconds("eyas-heartbeat") - before[1]
            os.dup2(quiet, 1)
            os.close(quiet)
    engine.close()
    ratios = [a / b for a, b in zip(bare, inside, strict=True)]
    spent = sum(inside)
    names = ", ".join(f"{name} {package_version(name)}" for name in ("torch", "transformers"))
    per_second = arguments.lines * len(batches) * 2 * len(inside) / spent
    lines = [
        f"machine    {platform.machine()}, {cpu_name()}, {arguments.threads} thread(s), load {os.getloadavg()[0]:.1f}",
        f"versions   {names}, Python {platform.python_version()}",
        f"work       {info.id}, {len(samples)} conversations, {dataset.tokens} tokens, {arguments.rounds} rounds, {per_second:.0f} lines/s",
        f"bare       {dataset.tokens / statistics.median(bare):,.0f} tok/s (median)",
        f"in a run   {dataset.tokens / statistics.median(inside):,.0f} tok/s (median)",
        f"ratio      {statistics.median(ratios):.4f} (each round: {', '.join(f'{r:.3f}' for r in ratios)})",
        f"CPU        keeper {100 * keeper / spent:.3f} %, heartbeat {100 * heartbeat / spent:.3f} %, "
        f"calls {100 * calls / spent:.3f} % of the extraction's time; together {100 * (keeper + heartbeat + calls) / spent:.3f} %",
    ]
    out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
