"""Real acceptance length of a draft trained on one GPU, on as much regenerated data as a time budget gives.

    python benchmarks/acceptance_gpu.py --model-path DIR [--prompts FILE ...] [--limit 4000] [--train-seconds 120] [--json OUT]

Stages, each timed: the target answers the prompts greedily (transformers, large batches); states are extracted and verified; a draft
trains for `--train-seconds`; held-out prompts are decoded greedily with a chain of 5, compared with plain decoding. `key=value` at the end
changes a training setting, so that runs compare recipes on the same states (`--folder` keeps them). Default prompts: the packaged sets.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--prompts", nargs="+", default=["word_problems", "conversations"])
    parser.add_argument("--held-out", nargs="+", default=["word_problems_heldout"])
    parser.add_argument("--limit", type=int, help="answer at most so many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=512, help="prompts answered together")
    parser.add_argument("--train-seconds", type=float, default=60)
    parser.add_argument("--eval-limit", type=int, default=64, help="held-out prompts per set")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--eval-dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("settings", nargs="*", help="training settings, key=value")
    arguments = parser.parse_args()
    import torch

    from eyas.acceptance import evaluate
    from eyas.extraction import extract
    from eyas.generators import Sampling, TransformersGenerator
    from eyas.regeneration import RegenerateSettings, regenerate
    from eyas.training import train
    from eyas.verification import verify

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="eyas-acceptance-"))
    shutil.rmtree(folder / "draft", ignore_errors=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {arguments.model_path}, {folder}", flush=True)
    changed = {}
    for pair in arguments.settings:
        key, _, value = pair.partition("=")
        try:
            changed[key] = json.loads(value)
        except json.JSONDecodeError:
            changed[key] = value
    began = time.monotonic()

    def stage(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {line}", flush=True)

    sampling = Sampling(max_new_tokens=arguments.max_new_tokens)
    answered = regenerate(
        arguments.prompts,
        arguments.model_path,
        folder / "answers",
        lambda template: TransformersGenerator(
            arguments.model_path,
            sampling,
            template.end_of_turn_ids(),
            batch_size=arguments.batch_size,
            dtype=arguments.dtype,
            device=device,
        ),
        settings=RegenerateSettings(sampling=sampling),
        limit=arguments.limit,
        window=4 * arguments.batch_size,
    )
    stage(f"answered {answered.conversations} prompts, {answered.generated_tokens:,} tokens")
    extract(
        model_path=arguments.model_path,
        prepared_data=str(folder / "answers"),
        output_dir=str(folder / "states"),
        dtype=arguments.dtype,
        device=device,
    )
    checked = verify(folder / "states")
    if checked.problems:
        raise SystemExit(f"the store does not verify: {checked.problems}")
    stage(f"extracted and verified {checked.tokens:,} tokens")

    def show(figures: dict) -> None:
        if "simulated" in figures:
            found = figures["simulated"]
            stage(
                f"step {figures['step']}: simulated {found['acceptance_length']:.3f}, by position {found['by_position']}"
            )

    recipe = {
        "draft_vocab_size": 16384,
        "ttt_steps": 5,
        "single_step_share": 0.3,
        "learning_rate": 1e-3,
        "batch_tokens": 8192,
        "eval_every": 200,
        "trackers": (),
        "seconds": arguments.train_seconds,
        **changed,
    }
    trained = train(
        states=folder / "states", model_path=arguments.model_path, output_dir=folder / "draft", progress=show, **recipe
    )
    stage(
        f"trained {trained.steps} steps, {trained.tokens:,} tokens in {trained.seconds:.0f} s, {trained.tokens / trained.seconds:,.0f} tok/s"
    )
    report = evaluate(
        folder / "draft",
        arguments.model_path,
        arguments.held_out,
        chain=5,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=16,
        limit=arguments.eval_limit,
        dtype=arguments.eval_dtype,
        output=folder / "draft",
    )
    for one, found in {**report["sets"], "overall": report["overall"]}.items():
        stage(
            f"{one}: acceptance length {found['acceptance_length']:.3f} {found['interval_95']}, by position {found['by_position']}, "
            f"baselines {found['baselines']}, {found['replies_equal_to_plain']} of {found['prompts']} replies equal plain decoding"
        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {"recipe": recipe, "trained_steps": trained.steps, "best": trained.best, "report": report}, indent=1
            )
        )


if __name__ == "__main__":
    main()
