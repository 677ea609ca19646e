"""What it costs the loader of `eyas train` to compare each sample with its checksums when it is first read.

    python benchmarks/loader_cpu.py [--folder /tmp] [--megabytes 2000] [--hidden-size 4096] [--rounds 5]

A store of random bf16 states (4 layers, samples of 128 to 1024 tokens) is written, then read for one epoch by the training's own `Reader` with
nobody computing: without comparing, comparing by sample, comparing whole shards (those of an eyas that wrote no checksums by sample),
in turn, in one process. Warm: the store lies in the page cache. Cold: the kernel is asked to drop it before each epoch. Prints hardware,
versions, tokens/s and ratios taken within a round, median of the rounds. The first epoch of a training compares; later ones do not.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import xxhash
from extract_cpu import cpu_name

from eyas.base.manifest import package_version
from eyas.data.dataset import Sample
from eyas.store.format import StoreSpec, write_store_manifest
from eyas.store.reader import open_states
from eyas.store.writer import ShardWriter
from eyas.target.model_files import human_bytes
from eyas.training.data import Reader, plan_epoch

LAYERS = (2, 18, 33, 36)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="eyas-bench-", dir=arguments.folder))
    try:
        run(arguments, work)
    finally:
        shutil.rmtree(work)


def run(arguments: argparse.Namespace, work: Path) -> None:
    torch.set_num_threads(1)
    write(arguments, work)
    print(
        f"{cpu_name()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    )
    print(
        f"torch {torch.__version__}, xxhash {xxhash.VERSION}, eyas {package_version('eyas')}, {package_version('safetensors')=}"
    )
    states = open_states(work)
    size = sum(path.stat().st_size for path in work.glob("shard-*"))
    print(f"{len(states)} samples, {int(states.lengths.sum())} tokens, {human_bytes(size)}, in {work.parent}\n")
    ways = {"not compared": False, "by sample": True}
    for name, cold in (("warm", False), ("cold", True)):
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.rounds):
            for way, check in ways.items():
                if cold:
                    forget(work)
                rates[way].append(epoch(arguments, work, check))
        for way, found in rates.items():
            ratio = statistics.median(a / b for a, b in zip(found, rates["not compared"], strict=True))
            print(f"{name}  {way:<13} {statistics.median(found):>9,.0f} tok/s  {ratio:.3f}")


def write(arguments: argparse.Namespace, work: Path) -> None:
    """A store of random states; nothing but its size matters here."""
    H = arguments.hidden_size
    model = {
        "id": "random",
        "config_hash": "c",
        "weights_hash": "w",
        "num_layers": 36,
        "hidden_size": H,
        "vocab_size": 9999,
    }
    spec = StoreSpec(model, LAYERS, "bfloat16", "bfloat16", {"hash": "d", "samples": 0, "tokens": 0, "path": "p"})
    rng = np.random.default_rng(0)
    noise = torch.randn(1024, H).bfloat16()
    writer, left = ShardWriter(work, spec), arguments.megabytes * 1_000_000
    while left > 0:
        length = int(rng.integers(128, 1025))
        slot = writer.reserve(Sample.of(rng.integers(0, 9999, length), np.ones(length, np.uint8)))
        for rows in slot.rows.values():
            rows.copy_(noise[:length])
        writer.complete(slot)
        left -= length * spec.bytes_per_token
    writer.close()
    write_store_manifest(work, spec, "complete", shards=writer.shards)


def forget(work: Path) -> None:
    """Ask the kernel to drop the store's pages."""
    os.sync()
    for path in work.glob("shard-*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def epoch(arguments: argparse.Namespace, work: Path, check: bool) -> float:
    """Tokens per second of one epoch, read for the first time."""
    states = open_states(work, check=check)
    positions = np.arange(len(states))
    plan = plan_epoch(positions, states.lengths, batch_tokens=arguments.batch_tokens, parts=1, seed=0, epoch=0)
    began = time.perf_counter()
    reader = Reader(states, iter([(parts, 5) for parts in plan]), LAYERS[:3], LAYERS[3])
    tokens = sum(batch.tokens for batches in reader for batch in batches)
    seconds = time.perf_counter() - began
    reader.close()
    return tokens / seconds


if __name__ == "__main__":
    main()
