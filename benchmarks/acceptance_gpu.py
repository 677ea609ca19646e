"""Real acceptance length of a draft trained on one GPU, on as much regenerated data as a time budget gives.

    python benchmarks/acceptance_gpu.py --folder DIR [--model-path DIR] [--prompts FILE ...] [--held-out FILE ...]
        [--generator vllm] [--answer-seconds 240] [--answers-per-prompt 2] [--train-seconds 120] [--json OUT] [key=value ...]

Four stages, each timed, all or those of `--stages`, so that the work can be spread over several calls with the same `--folder`:

    answer    the target answers the prompts, greedily first, then (--answers-per-prompt) by sampling; a later call goes on where the
              time ran out
    extract   hidden states of all answers so far, verified
    train     a draft, in FOLDER/NAME (`--draft NAME`): several calls may train several drafts on the same states at the same time
    eval      held-out prompts decoded greedily with 5 draft tokens a step, compared with plain decoding

`key=value` changes a training setting (`loss=lk`, `steps=2000`, `seed=1`, `'draft={"num_key_value_heads": 3}'`), so that calls compare
recipes. Prompts: packaged sets by default; `prompt_sets.py` fetches larger ones.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

STAGES = ("answer", "extract", "train", "eval")
#: What `train` is given unless `key=value` says otherwise; `ablation_gpu.py` starts from the same.
RECIPE: dict[str, Any] = {
    "draft_vocab_size": 16384,
    "ttt_steps": 5,
    "ttt_warmup_fraction": 0.3,
    "learning_rate": 1e-3,
    "batch_tokens": 8192,
    "eval_every": 200,
    "eval_samples": 256,
    "trackers": (),
    # Compiling takes a minute or more of a budget of minutes, and wins a draft of the embedded model's size nothing in it.
    "compile": "off",
}


def take_settings(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The command line without its `key=value` words, and these as training settings; a value is JSON, or else text.

    They are taken out before parsing, so that they may stand anywhere, also behind a flag that takes several words.
    """
    from eyas.training.settings import TrainSettings

    known = {field.name for field in fields(TrainSettings)}
    found: dict[str, Any] = {}
    rest = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            rest.append(word)
            continue
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return rest, found


def answer(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> None:
    """Answer the prompts until all are answered or the time is up, and gather all answers in `samples.jsonl`."""
    from eyas.data.dataset import open_dataset
    from eyas.data.generators import Generator
    from eyas.data.settings import RegenerateSettings, Sampling
    from eyas.engines.generation import TransformersGenerator, VllmGenerator
    from eyas.engines.regenerate import regenerate

    began = time.monotonic()
    shared: list[Generator] = []

    class Kept:
        """One generator for all rounds: `regenerate` closes what it is given, and an engine takes a minute to start."""

        def __init__(self, sampling: Sampling, stop: list[int]):
            if not shared:
                if arguments.generator == "vllm":
                    longest, share = arguments.max_seq_len, arguments.gpu_memory_utilization
                    shared.append(
                        VllmGenerator(
                            arguments.model_path,
                            sampling,
                            stop,
                            max_seq_len=longest,
                            gpu_memory_utilization=share,
                            dtype=arguments.dtype,
                        )
                    )
                else:
                    size = arguments.batch_size
                    shared.append(
                        TransformersGenerator(
                            arguments.model_path, sampling, stop, batch_size=size, dtype=arguments.dtype
                        )
                    )
                say(f"{arguments.generator} has started")
            self.inner, self.sampling = shared[0], sampling

        @property
        def description(self) -> dict[str, Any]:
            return self.inner.description

        def answer(self, prompts: Any, limits: Any, salt: int) -> Any:
            self.inner.sampling = self.sampling  # type: ignore[attr-defined]
            return self.inner.answer(prompts, limits, salt)

        def close(self) -> None: ...

    try:
        for number in range(arguments.answers_per_prompt):
            left = None if arguments.answer_seconds is None else arguments.answer_seconds - (time.monotonic() - began)
            name = folder / ("answers" if number == 0 else f"answers-{number}")
            if left is not None and left <= 0:
                say(f"no time left for {name.name}")
                break
            sampling = Sampling(
                max_new_tokens=arguments.max_new_tokens,
                temperature=arguments.temperature if number else 0.0,
                seed=number,
            )
            done = regenerate(
                RegenerateSettings(
                    tuple(arguments.prompts),
                    arguments.model_path,
                    name,
                    max_seq_len=arguments.max_seq_len,
                    sampling=sampling,
                    limit=arguments.limit,
                    window=arguments.window or 4 * arguments.batch_size,
                    seconds=left,
                ),
                generator=lambda _, stop_ids, sampling=sampling: Kept(sampling, stop_ids),
            )
            say(
                f"{name.name}: {done.resumed} answered before, {done.conversations} now ({done.generated_tokens:,} tokens"
                f"{', out of time' if done.out_of_time else ''}); {done.finish_reasons.get('length', 0)} cut at the limit"
            )
    finally:
        for generator in shared:
            generator.close()
    rows = supervised = 0
    with open(folder / "samples.jsonl", "w", encoding="utf-8") as file:
        for part in sorted(folder.glob("answers*/manifest.json")):
            for sample in open_dataset(part.parent):
                line = {"input_ids": sample.token_ids.tolist(), "loss_mask": sample.loss_mask.tolist()}
                file.write(json.dumps(line) + "\n")
                rows, supervised = rows + 1, supervised + int(sample.loss_mask.sum())
    say(f"{rows:,} samples with {supervised:,} supervised tokens")


def extract_states(arguments: argparse.Namespace, folder: Path, device: str, say: Callable[[str], None]) -> None:
    """States of `samples.jsonl`; those of an earlier, smaller set of answers are removed."""
    from eyas.data.dataset import open_dataset
    from eyas.extraction.extract import extract
    from eyas.gates.verification import verify

    states, samples = folder / "states", folder / "samples.jsonl"
    if (states / "manifest.json").exists():
        have = json.loads((states / "manifest.json").read_text())["dataset"]["hash"]
        if have != open_dataset(samples).hash:
            say("there are more answers than states: extracting anew")
            shutil.rmtree(states)
    done = extract(
        model_path=arguments.model_path,
        prepared_data=str(samples),
        output_dir=str(states),
        dtype=arguments.dtype,
        store_dtype=arguments.store_dtype,
        device=device,
    )
    say(f"extracted {done.tokens:,} tokens in {done.seconds:.0f} s, {done.bytes / 1e9:.1f} GB")
    checked = verify(states)
    if checked.problems:
        raise SystemExit(f"the store does not verify: {checked.problems}")
    say(f"verified {checked.tokens:,} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where everything goes; finished work in it is used again")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--prompts", nargs="+", default=["word_problems", "conversations"])
    parser.add_argument("--held-out", nargs="+", default=["word_problems_heldout"])
    parser.add_argument("--limit", type=int, help="answer at most so many prompts")
    parser.add_argument("--generator", default="transformers", choices=["transformers", "vllm"])
    parser.add_argument("--answer-seconds", type=float, help="begin no further window of prompts after so long")
    parser.add_argument("--answers-per-prompt", type=int, default=1, help="the first greedy, the others sampled")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the sampled answers")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=512, help="prompts answered together (transformers)")
    parser.add_argument("--window", type=int, help="prompts between two looks at the clock (4 batches)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5, help="vLLM's share")
    parser.add_argument("--draft", default="draft", help="the draft's folder under --folder")
    parser.add_argument("--train-seconds", type=float, default=60)
    parser.add_argument("--eval-limit", type=int, default=64, help="held-out prompts per set")
    parser.add_argument("--eval-batch-size", type=int, default=32)
    parser.add_argument("--eval-plain", type=int, help="held-out prompts also decoded plainly (all)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--store-dtype", default="auto", choices=["auto", "fp8"], help="fp8 halves the states on disk")
    parser.add_argument("--eval-dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--json", type=Path)
    words, settings = take_settings(sys.argv[1:])
    arguments = parser.parse_args(words)
    import torch

    from eyas.evaluation.acceptance import evaluate
    from eyas.training.trainer import train

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="eyas-acceptance-"))
    folder.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {arguments.model_path}, {folder}", flush=True)
    began = time.monotonic()

    def stage(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {arguments.draft}: {line}", flush=True)

    def show(figures: dict) -> None:
        if "simulated" in figures:
            found = figures["simulated"]
            stage(
                f"step {figures['step']}: simulated {found['acceptance_length']:.3f}, by position {found['by_position']}"
            )
        elif "loss" in figures and figures["step"] % 200 == 0:
            stage(
                f"step {figures['step']}: {figures['tokens_per_second']:,.0f} tok/s, "
                f"data wait {figures['data_wait']} s, loss {[round(x, 3) for x in figures['loss']]}"
            )

    if "answer" in arguments.stages:
        answer(arguments, folder, stage)
    if "extract" in arguments.stages:
        extract_states(arguments, folder, device, stage)
    draft = folder / arguments.draft
    results: dict[str, Any] = {"folder": str(folder), "device": name}
    if "train" in arguments.stages:
        shutil.rmtree(draft, ignore_errors=True)
        recipe = {**RECIPE, "seconds": arguments.train_seconds, **settings}
        trained = train(
            states=folder / "states", model_path=arguments.model_path, output_dir=draft, progress=show, **recipe
        )
        rate = trained.tokens / trained.seconds
        stage(
            f"trained {trained.steps} steps, {trained.tokens:,} tokens in {trained.seconds:.0f} s, {rate:,.0f} tok/s; "
            f"best simulated {trained.best and trained.best['acceptance_length']} at step {trained.best_step}"
        )
        results |= {"recipe": recipe, "steps": trained.steps, "tokens": trained.tokens, "best": trained.best}
    if "eval" in arguments.stages:
        report = evaluate(
            draft=draft,
            model_path=arguments.model_path,
            prompts=tuple(arguments.held_out),
            chain=5,
            max_new_tokens=arguments.max_new_tokens,
            batch_size=arguments.eval_batch_size,
            plain=arguments.eval_plain,
            limit=arguments.eval_limit,
            dtype=arguments.eval_dtype,
        )
        for one, found in {**report["sets"], "overall": report["overall"]}.items():
            stage(
                f"{one}: acceptance length {found['acceptance_length']:.3f} {found['interval_95']}, by position "
                f"{found['by_position']}, baselines {found['baselines']}, {found['replies_equal_to_plain']} of "
                f"{found['prompts']} replies equal plain decoding"
            )
        results["report"] = report
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1, default=str))


if __name__ == "__main__":
    main()
