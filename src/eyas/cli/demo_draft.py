"""The second half of `eyas demo`: a draft for the narrow domain, trained on what the target itself answers, and measured.

    regenerate -> extract -> verify -> train -> eval

A draft learns a narrow domain in minutes (grade-school word problems); general chat would need far more distinct data. The held-out
problems are never trained on. `benchmarks/acceptance_cpu.py` runs the same with a longer budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.base.errors import StoreError
from eyas.data.settings import RegenerateSettings, Sampling
from eyas.engines.regenerate import regenerate
from eyas.evaluation.acceptance import evaluate
from eyas.evaluation.settings import EvalSettings
from eyas.evaluation.statistics import interval_text
from eyas.extraction.extract import extract
from eyas.extraction.settings import ExtractSettings
from eyas.gates.settings import VerifySettings
from eyas.gates.verification import verify
from eyas.target.embedded import EMBEDDED_NAME
from eyas.training.settings import TrainSettings
from eyas.training.trainer import TrainReport, train

PROBLEMS, HELD_OUT = "word_problems", "word_problems_heldout"

#: What trains well on the embedded model (`benchmarks/results/draft_cpu.md` has the comparison).
RECIPE: dict[str, Any] = {
    "draft_vocab_size": 2048,
    "ttt_steps": 3,
    "ttt_warmup_fraction": 0.5,
    "learning_rate": 1e-3,
    "batch_tokens": 1024,
    "held_out": 0.05,
    "num_speculative_tokens": 5,
    "trackers": (),
}


@dataclass(frozen=True)
class DraftDemo:
    """folder: holds `answers`, `states`, `draft`. trained: the training's report. acceptance: `eyas eval`'s report, on held-out problems."""

    folder: Path
    trained: TrainReport
    acceptance: dict[str, Any]


def narrow_domain_draft(
    folder: Path,
    say: Callable[[str], None],
    *,
    problems: int = 160,
    max_new_tokens: int = 160,
    eval_problems: int = 12,
    progress: Callable[[dict[str, Any]], None] | None = None,
    **training: Any,
) -> DraftDemo:
    """Train and measure a draft of the embedded model on the packaged word problems.

    Args:
        folder: where everything goes; finished stages are found again.
        say: called with a line per stage. progress: training's figures.
        problems: how many the target answers first. eval_problems: held-out ones to decode in the end, greedily in fp32.
        training: settings over `RECIPE`, at least `steps` or `seconds`.

    Raises:
        StoreError: the store does not verify. And whatever the stages raise.
    """
    say(f"regenerate: the target answers {problems} word problems itself, greedily")
    regenerate(
        RegenerateSettings(
            (PROBLEMS,),
            EMBEDDED_NAME,
            folder / "answers",
            sampling=Sampling(max_new_tokens=max_new_tokens),
            batch_size=32,
            dtype="bfloat16",
            limit=problems,
        )
    )
    say("extract: hidden states of the answers")
    extract(
        ExtractSettings(
            model_path=EMBEDDED_NAME,
            prepared_data=folder / "answers",
            output_dir=folder / "states",
            dtype="bfloat16",
        )
    )
    say("verify: the states of the answers")
    checked = verify(VerifySettings(folder / "states"))
    if checked.problems:
        raise StoreError(
            f"the store of answers does not verify: {checked.problems[0]}", "please report it with this output"
        )
    say("train: an EAGLE-3 draft, bf16 compute")
    settings: dict[str, Any] = {"states": folder / "states", "output_dir": folder / "draft", **RECIPE, **training}
    report = train(TrainSettings(model_path=EMBEDDED_NAME, **settings), progress=progress)
    say(f"eval: speculative decoding of {eval_problems} held-out problems, compared with plain decoding")
    acceptance = evaluate(
        EvalSettings(
            draft=folder / "draft",
            model_path=EMBEDDED_NAME,
            prompts=(HELD_OUT,),
            chain=RECIPE["num_speculative_tokens"],
            max_new_tokens=max_new_tokens,
            plain=3,
            limit=eval_problems,
        )
    )
    return DraftDemo(folder, report, acceptance)


def rows(found: DraftDemo) -> tuple[tuple[str, str], ...]:
    """The closing table of the demo's second half."""
    overall = found.acceptance["overall"]
    before = found.trained.before or {}
    guessers = ", ".join(f"{name} {length:.2f}" for name, length in overall["baselines"].items())
    plain = overall["plain_tokens_per_second"]
    return (
        ("draft", f"{found.folder / 'draft'}: {found.trained.steps} steps in {found.trained.seconds:.0f} s"),
        (
            "acceptance before",
            f"{before.get('acceptance_length', float('nan')):.2f} tokens per verification step (untrained, simulated)",
        ),
        (
            "acceptance after",
            f"{overall['acceptance_length']:.2f} ({interval_text(overall['interval_95'], ' to ')}) on {overall['prompts']} held-out problems, chain of 5, "
            "bonus token included",
        ),
        ("checked against its store", found.acceptance["diagnosis"]["verdict"]),
        ("without a network", guessers),
        (
            "lossless",
            f"{overall['replies_equal_to_plain']} of {overall['prompts']} replies equal plain decoding token by token",
        ),
        (
            "speed",
            f"{overall['tokens_per_second']:.0f} tok/s with the draft, {plain:.0f} without (fp32, one prompt at a time)",
        ),
    )
