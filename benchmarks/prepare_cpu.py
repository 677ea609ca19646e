"""Rate of `eyas prepare`: conversations of about 1,000 tokens, from JSONL to a finished dataset.

    python benchmarks/prepare_cpu.py [--rows 100000] [--workers 2] [--model-path smollm2]

Prints a table with hardware and versions. The rows are made up from the packaged texts, four questions and answers each; every row is
different. Peak memory is that of the parent process and of its largest worker.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import tempfile
from pathlib import Path

from eyas.base.manifest import package_version
from eyas.data.preparation import available_cores, packaged, prepare


def write_rows(path: Path, rows: int) -> None:
    """Conversations of four turns, each answer several packaged answers long."""
    rng = random.Random(0)
    texts = [
        message["content"]
        for line in packaged("conversations").read_text(encoding="utf-8").splitlines()
        for message in json.loads(line)["messages"]
        if message["role"] == "assistant"
    ]
    with open(path, "w", encoding="utf-8") as file:
        for number in range(rows):
            messages = []
            for turn in range(4):
                messages.append(
                    {"role": "user", "content": f"Question {number}, part {turn}: {rng.choice(texts)[:80]}"}
                )
                messages.append({"role": "assistant", "content": "\n\n".join(rng.sample(texts, 7))})
            file.write(json.dumps({"messages": messages}) + "\n")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=available_cores())
    parser.add_argument("--model-path", default="smollm2")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        write_rows(data, arguments.rows)
        size = data.stat().st_size
        before = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        report = prepare(data, arguments.model_path, Path(folder) / "dataset", workers=arguments.workers)
        written = sum(file.stat().st_size for file in (Path(folder) / "dataset").glob("*.parquet"))
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in usages) - before
    peaks = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    versions = ", ".join(f"{name} {package_version(name)}" for name in ("transformers", "tokenizers", "pyarrow"))
    for name, value in [
        ("hardware", f"{processor()}, {available_cores()} cores; {arguments.workers} tokenising processes"),
        ("versions", f"Python {platform.python_version()}, {versions}"),
        ("input", f"{report.rows:,} conversations, {size / 1e6:,.0f} MB"),
        ("output", f"{report.samples:,} samples, {report.tokens:,} tokens, {written / 1e6:,.0f} MB"),
        (
            "mean length",
            f"{report.tokens / max(report.samples, 1):,.0f} tokens, {report.answers / max(report.rows, 1):.0f} answers",
        ),
        ("time", f"{report.seconds:,.1f} s"),
        ("rate", f"{report.rows_per_second:,.0f} conversations/s, {report.tokens_per_second:,.0f} tokens/s"),
        (
            "CPU time",
            f"{cpu:,.1f} s in all processes, {1000 * cpu / max(report.rows, 1):.2f} ms a conversation; load average {os.getloadavg()[0]:.1f}",
        ),
        ("peak memory", f"{peaks[0]:,.0f} MB parent, {peaks[1]:,.0f} MB largest worker"),
    ]:
        print(f"{name:<12} {value}")


if __name__ == "__main__":
    main()
