"""Acceptance of a draft trained on a CPU for a fixed wall time: the embedded model, a narrow domain, held-out prompts.

    python benchmarks/acceptance_cpu.py [--seconds 180] [--problems 256] [--eval-problems 52] [--folder DIR] [key=value ...]

The target answers the packaged word problems itself; a draft trains on that for `--seconds`; then held-out problems are decoded greedily
in fp32 with 5 draft tokens a step. Printed: simulated acceptance length while training, the real one with its interval, by position, the model-free
baselines, tokens/s. Figures depend on how quiet the machine is, since the budget is wall time. `key=value` changes a training
setting (`loss=lk`, `ttt_steps=5`), to compare. Finished stages in `--folder` are used again, so a second recipe trains on the same answers.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--eval-problems", type=int, default=52)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("settings", nargs="*")
    arguments = parser.parse_args()
    import torch

    from eyas.cli.demo_draft import narrow_domain_draft, rows

    changed = {}
    for pair in arguments.settings:
        key, _, value = pair.partition("=")
        changed[key] = json.loads(value) if value[:1] in "-0123456789{[tf" and value not in ("tv",) else value
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="eyas-acceptance-"))
    shutil.rmtree(folder / "draft", ignore_errors=True)
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {arguments.seconds:.0f} s of training, {folder}"
    )
    began = time.monotonic()

    def show(figures: dict) -> None:
        if "simulated" in figures:
            found = figures["simulated"]
            print(
                f"  step {figures['step']}: simulated {found['acceptance_length']:.3f}, by position {found['by_position']}",
                flush=True,
            )
        elif "loss" in figures and figures["step"] % 50 == 0:
            print(
                f"  step {figures['step']}: {figures['tokens_per_second']:,.0f} tok/s, loss {figures['loss']}",
                flush=True,
            )

    found = narrow_domain_draft(
        folder,
        lambda line: print(f"[{time.monotonic() - began:5.0f} s] {line}", flush=True),
        problems=arguments.problems,
        eval_problems=arguments.eval_problems,
        progress=show,
        **{"seconds": arguments.seconds, "eval_every": 100, **changed},
    )
    for name, text in rows(found):
        print(f"{name:<20} {text}")
    print(f"by position          {found.acceptance['overall']['by_position']}")


if __name__ == "__main__":
    main()
