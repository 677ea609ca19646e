"""Guessing without a network: what a draft has to beat. Replayed over replies that are known, since guesses depend on tokens alone.

- prompt lookup: find the longest run of last tokens (3, 2, then 1) earlier in prompt and reply, guess what followed it there;
- n-gram: a table from training replies, from the last 3, 2 or 1 tokens to the token that most often followed;
- both: lookup where it finds a run of at least two, else the table.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from eyas.training.simulation import Acceptance

#: Takes the tokens so far and k; gives up to k guesses.
Guesser = Callable[[Sequence[int], int], list[int]]


def prompt_lookup(tokens: Sequence[int], k: int, longest: int = 3, shortest: int = 1) -> list[int]:
    """Guesses copied from the latest earlier place where the last `longest`..`shortest` tokens stand."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        tail = list(tokens[-n:])
        for start in range(len(tokens) - n - 1, -1, -1):
            if list(tokens[start : start + n]) == tail:
                return list(tokens[start + n : start + n + k])
    return []


class NgramTable:
    """Most frequent followers of the last 3, 2 and 1 tokens, counted over replies (with the tokens before them as context)."""

    def __init__(self, samples: Iterable[tuple[np.ndarray, np.ndarray]], longest: int = 3):
        """samples: (token_ids, loss_mask) pairs; only supervised tokens are counted as followers."""
        counts: list[defaultdict[tuple[int, ...], Counter[int]]] = [defaultdict(Counter) for _ in range(longest)]
        for token_ids, loss_mask in samples:
            ids = [int(t) for t in token_ids]
            for at in np.flatnonzero(np.asarray(loss_mask)):
                for n in range(1, longest + 1):
                    if at >= n:
                        counts[n - 1][tuple(ids[at - n : at])][ids[at]] += 1
        self._best = [{key: c.most_common(1)[0][0] for key, c in table.items()} for table in counts]

    def __call__(self, tokens: Sequence[int], k: int) -> list[int]:
        """Chain up to k guesses."""
        context, guesses = list(tokens[-len(self._best) :]), []
        for _ in range(k):
            found = next(
                (
                    self._best[n - 1][tuple(context[-n:])]
                    for n in range(min(len(self._best), len(context)), 0, -1)
                    if tuple(context[-n:]) in self._best[n - 1]
                ),
                None,
            )
            if found is None:
                break
            guesses.append(found)
            context.append(found)
        return guesses


def lookup_then_table(table: NgramTable) -> Guesser:
    """Prompt lookup on at least two tokens, else the table."""

    def guess(tokens: Sequence[int], k: int) -> list[int]:
        return prompt_lookup(tokens, k, shortest=2) or table(tokens, k)

    return guess


def replay(guess: Guesser, prompt: Sequence[int], reply: Sequence[int], k: int) -> Acceptance:
    """Acceptance of a guesser over one reply, counted as in `simulation.walk`: the reply's first token comes from the prefill."""
    tokens = [*prompt, *reply]
    at, end = len(prompt), len(tokens)
    accepted = np.zeros(k, np.int64)
    rounds = emitted = 0
    while at < end - 1:
        guesses = guess(tokens[: at + 1], k)
        left = end - 1 - at
        run = 0
        while run < min(len(guesses), left) and guesses[run] == tokens[at + 1 + run]:
            run += 1
        accepted[:run] += 1
        rounds += 1
        step = min(run + 1, left)
        emitted += step
        at += step
    return Acceptance(rounds, emitted, accepted)
