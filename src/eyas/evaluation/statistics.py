"""The figures of `eyas eval`: what is counted per prompt and per batch, summed up, each with a 95 % interval.

Intervals are bootstraps (2000 draws): of prompts for what the draft accepts, of batches for what the clock says. One alone has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eyas.training.simulation import Acceptance


@dataclass(frozen=True)
class Timing:
    """One batch of prompts: tokens and seconds of decoding after the prefill, with the draft and (where done) without."""

    tokens: int
    seconds: float
    plain_tokens: int = 0
    plain_seconds: float = 0.0


@dataclass
class SetResult:
    """One prompt set. `acceptance` per prompt, `baselines`: name -> per prompt, `timings` per batch.

    `behind`: draft tokens accepted behind the end of a reply, in its last round: no part of the figures; vLLM counts them.
    """

    name: str
    acceptance: list[Acceptance] = field(default_factory=list)
    baselines: dict[str, list[Acceptance]] = field(default_factory=dict)
    timings: list[Timing] = field(default_factory=list)
    behind: int = 0
    ties: list[str] = field(default_factory=list)
    compared: int = 0

    def summary(self, seed: int = 0) -> dict[str, Any]:
        """Figures for the report, each with a 95 % interval: length and rate by position (bootstrap over prompts), speeds (over batches)."""
        total = sum_of(self.acceptance)
        rounds = [a.rounds for a in self.acceptance]
        tokens, seconds = [t.tokens for t in self.timings], [t.seconds for t in self.timings]
        beside = [t for t in self.timings if t.plain_seconds]
        plain_tokens, plain_seconds = [t.plain_tokens for t in beside], [t.plain_seconds for t in beside]
        # Tokens with the draft times seconds without, over the reverse: the ratio of both speeds on the same prompts.
        plain = sum(plain_tokens) / sum(plain_seconds) if beside else None
        speed_up = sum(t.tokens for t in beside) / sum(t.seconds for t in beside) / plain if plain else None
        return {
            "prompts": len(self.acceptance),
            "acceptance_length": _rounded(total.length),
            "interval_95": [_rounded(x) for x in bootstrap(self.acceptance, seed)],
            "by_position": [_rounded(x) for x in total.by_position],
            "by_position_interval_95": [
                [_rounded(x) for x in ratio_interval([a.accepted[place] for a in self.acceptance], rounds, seed)]
                for place in range(len(total.accepted))
            ],
            # Of 1 + the rates of the first place, the first two, ...: what the same draft reaches with a shorter chain.
            "interval_95_by_chain": [
                [
                    _rounded(1 + x)
                    for x in ratio_interval([a.accepted[:places].sum() for a in self.acceptance], rounds, seed)
                ]
                for places in range(1, len(total.accepted) + 1)
            ],
            "rounds": total.rounds,
            "accepted_guesses": int(total.accepted.sum()),
            "accepted_behind_the_end": self.behind,
            "tokens": sum(tokens),
            "tokens_per_second": _rounded(sum(tokens) / sum(seconds), 2) if sum(seconds) else None,
            "tokens_per_second_interval_95": [_rounded(x, 2) for x in ratio_interval(tokens, seconds, seed)],
            "plain_tokens_per_second": _rounded(plain, 2),
            "speed_up": _rounded(speed_up, 3),
            "speed_up_interval_95": [_rounded(x, 3) for x in speed_up_interval(beside, seed)] if beside else None,
            "replies_equal_to_plain": self.compared - len(self.ties) if self.compared else None,
            "ties": self.ties,
            "baselines": {name: _rounded(sum_of(found).length) for name, found in self.baselines.items()},
        }


def interval_text(ends: Sequence[float | None], between: str = "-") -> str:
    """`1.20-1.50`, or `-` where there is none (a single prompt)."""
    low, high = ends
    return "-" if low is None or high is None else f"{low:.2f}{between}{high:.2f}"


def _rounded(x: float | None, digits: int = 4) -> float | None:
    """Rounded for the report; None where there is no figure (JSON knows no NaN)."""
    return None if x is None or not np.isfinite(x) else round(float(x), digits)


def sum_of(found: Sequence[Acceptance]) -> Acceptance:
    """All counts together."""
    total = found[0]
    for one in found[1:]:
        total = total + one
    return total


def bootstrap(found: Sequence[Acceptance], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the acceptance length, resampling prompts."""
    return ratio_interval([a.emitted for a in found], [a.rounds for a in found], seed)


def ratio_interval(above: Sequence[float], below: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % interval of sum(above) / sum(below), resampling the pairs; NaN for a single pair, or where everything below is zero."""
    if len(below) < 2:
        return float("nan"), float("nan")
    over, under = (np.array(x, dtype=float)[_picks(len(below), seed)].sum(1) for x in (above, below))
    return _interval(over[under > 0] / under[under > 0])


def speed_up_interval(timings: Sequence[Timing], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the speed with the draft over the plain speed, resampling batches; NaN for a single one."""
    if len(timings) < 2:
        return float("nan"), float("nan")
    rows = np.array([(t.tokens, t.seconds, t.plain_tokens, t.plain_seconds) for t in timings])
    tokens, seconds, plain_tokens, plain_seconds = rows[_picks(len(rows), seed)].sum(1).T
    defined = (seconds > 0) & (plain_tokens > 0)
    return _interval(tokens[defined] / seconds[defined] * plain_seconds[defined] / plain_tokens[defined])


def _picks(count: int, seed: int, draws: int = 2000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, (draws, count))


def _interval(values: np.ndarray) -> tuple[float, float]:
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def joined(results: Sequence[SetResult]) -> SetResult:
    """All sets as one."""
    total = SetResult("overall", baselines={name: [] for name in results[0].baselines})
    for one in results:
        total.acceptance += one.acceptance
        for name, found in one.baselines.items():
            total.baselines[name] += found
        total.timings += one.timings
        total.behind += one.behind
        total.ties += one.ties
        total.compared += one.compared
    return total
