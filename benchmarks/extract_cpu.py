"""Extraction on a CPU against a plain forward pass and against the usual way.

    python benchmarks/extract_cpu.py [--model-path smollm2] [--dtype bfloat16] [--threads 1] [--rounds 5] [--samples 200]

Three ways over the same real conversations (the packaged set, tokenised, mixed lengths), in turn, round after round:

    plain     the model's body over eyas's packed rows: no capture, nothing written
    eyas      the same rows captured, checked, hashed and written as a store
    usual     right-padded batches of 8 with output_hidden_states=True, wanted layers copied out, one file per sample

Prints hardware, versions, tokens/s of each (median of the rounds) and the ratios, each taken within a round so that a machine whose
speed drifts does not decide. Real tokens are counted, never padding.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from eyas.base.manifest import package_version
from eyas.data.dataset import open_dataset
from eyas.data.preparation import prepare
from eyas.engines import packed_attention
from eyas.engines.transformers import TransformersEngine, TransformersSettings
from eyas.extraction.batches import plan_batches
from eyas.store.format import StoreSpec
from eyas.target.embedded import resolve_model_path
from eyas.target.layers import resolve_layer_ids
from eyas.target.model_files import describe_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    arguments = parser.parse_args()

    work = Path(tempfile.mkdtemp(prefix="eyas-bench-"))
    try:
        run(arguments, work)
    finally:
        shutil.rmtree(work)


def run(arguments: argparse.Namespace, work: Path) -> None:
    prepare("conversations", arguments.model_path, work / "dataset", limit=arguments.samples)
    dataset = open_dataset(work / "dataset")
    samples = list(dataset)
    info = describe_model(resolve_model_path(arguments.model_path), arguments.model_path)
    layer_ids = resolve_layer_ids(None, info.num_layers)
    engine = TransformersEngine(info, TransformersSettings(arguments.dtype, "cpu", arguments.threads))
    engine.load(layer_ids)
    batches = [
        [samples[i] for i in batch]
        for batch in plan_batches(dataset.lengths, range(len(samples)), arguments.batch_tokens, None)
    ]
    identity = {"hash": dataset.hash, "samples": len(samples), "tokens": dataset.tokens, "path": "bench"}
    spec = StoreSpec(info.for_manifest(), tuple(layer_ids), arguments.dtype, arguments.dtype, identity)

    def plain() -> None:
        for batch in batches:
            lengths = [len(s) for s in batch]
            ids = torch.cat([torch.from_numpy(s.token_ids) for s in batch]).long()[None]
            positions = torch.cat([torch.arange(n) for n in lengths])[None]
            with torch.inference_mode(), packed_attention.packed(lengths):
                engine.decoder.base(input_ids=ids, position_ids=positions, use_cache=False)

    def eyas() -> None:
        folder = work / "store"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        engine.capture(
            batches, folder, spec, shard_bytes=2**26, done=(), progress=lambda p: None, stop=threading.Event()
        )

    def usual() -> None:
        folder = work / "usual"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        engine.model.set_attn_implementation("sdpa")
        for first in range(0, len(samples), 8):
            group = samples[first : first + 8]
            longest = max(len(s) for s in group)
            ids = torch.zeros(len(group), longest, dtype=torch.long)
            mask = torch.zeros(len(group), longest, dtype=torch.long)
            for row, sample in enumerate(group):
                ids[row, : len(sample)] = torch.from_numpy(sample.token_ids)
                mask[row, : len(sample)] = 1
            with torch.inference_mode():
                states = engine.model(
                    input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False
                ).hidden_states
            for row, sample in enumerate(group):
                save_file(
                    {str(i): states[i][row, : len(sample)].contiguous() for i in layer_ids},
                    folder / f"{sample.id}.safetensors",
                )
        engine.model.set_attn_implementation(packed_attention.NAME)

    engine.forward_captured(batches[0], lambda *_: None)
    ways = {"plain": plain, "eyas": eyas, "usual": usual}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for number in range(arguments.rounds):
        for name in order[number % 3 :] + order[: number % 3]:
            begun = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begun)
    print(f"machine    {platform.processor() or platform.machine()}, {cpu_name()}, {arguments.threads} thread(s)")
    print(
        "versions   "
        + ", ".join(f"{name} {package_version(name)}" for name in ("torch", "transformers", "safetensors"))
        + f", Python {platform.python_version()}"
    )
    print(
        f"work       {info.id} {arguments.dtype}, {len(samples)} conversations, {dataset.tokens} tokens, layers {layer_ids}, {arguments.rounds} rounds"
    )
    print(f"{'way':8}{'tok/s':>10}{'best':>10}{'worst':>10}")
    for name in ways:
        rates = [dataset.tokens / t for t in seconds[name]]
        print(f"{name:8}{statistics.median(rates):10,.0f}{max(rates):10,.0f}{min(rates):10,.0f}")
    for other in ("plain", "usual"):
        ratios = [b / a for a, b in zip(seconds["eyas"], seconds[other], strict=True)]
        print(f"eyas / {other}: {statistics.median(ratios):.3f}  (each round: {', '.join(f'{r:.3f}' for r in ratios)})")


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


if __name__ == "__main__":
    main()
