"""Model-free baselines: what a draft has to beat. Replayed over replies that are known, since their draft tokens depend on tokens alone.

- prompt lookup: find the longest run of last tokens (3, 2, then 1) earlier in prompt and reply, propose what followed it there;
- n-gram: a table from training replies, from the last 3, 2 or 1 tokens to the token that most often followed;
- both: lookup where it finds a run of at least two, else the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eyas.base.errors import StoreError
from eyas.data.dataset import is_dataset, open_dataset
from eyas.store.reader import open_states
from eyas.training.simulation import Acceptance

#: Takes the tokens so far and k; proposes up to k draft tokens.
Baseline = Callable[[Sequence[int], int], list[int]]
#: The n-gram table counts so many tokens at most, from the start: its memory is at most 100 bytes for each.
MOST_TOKENS = 10_000_000
#: Bits of one token id in a context's key: three of them fit into 64.
TOKEN_BITS = 21


def prompt_lookup(tokens: Sequence[int], k: int, longest: int = 3, shortest: int = 1) -> list[int]:
    """Draft tokens copied from the latest earlier place where the last `longest`..`shortest` tokens stand."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        tail = list(tokens[-n:])
        for start in range(len(tokens) - n - 1, -1, -1):
            if list(tokens[start : start + n]) == tail:
                return list(tokens[start + n : start + n + k])
    return []


class NgramTable:
    """Most frequent followers of the last 3, 2 and 1 tokens, counted over replies (with the tokens before them as context).

    Args:
        samples: (token_ids, loss_mask) pairs; only supervised tokens are counted as followers.
        most_tokens: no sample is read once so many tokens were.

    `tokens`: how many were read. `tables`: per length of context its keys [n] uint64, sorted, and the followers [n] int32.
    """

    def __init__(
        self, samples: Iterable[tuple[np.ndarray, np.ndarray]], longest: int = 3, most_tokens: int = MOST_TOKENS
    ):
        found: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(longest)]
        self.tokens = 0
        for token_ids, loss_mask in samples:
            ids, supervised = np.asarray(token_ids), np.flatnonzero(loss_mask)
            for n in range(1, longest + 1):
                at = supervised[supervised >= n]
                found[n - 1].append((_keys([ids[at - n + i] for i in range(n)]), ids[at].astype(np.int32)))
            self.tokens += len(ids)
            if self.tokens >= most_tokens:
                break
        self.tables = [_most_frequent(*map(np.concatenate, zip(*one, strict=True))) for one in found if one]

    def __call__(self, tokens: Sequence[int], k: int) -> list[int]:
        """Up to k draft tokens, each the follower of those before it."""
        context = list(tokens)
        for _ in range(k):
            follower = next(
                (f for n in range(len(self.tables), 0, -1) if (f := self._after(context, n)) is not None), None
            )
            if follower is None:
                break
            context.append(follower)
        return context[len(tokens) :]

    def _after(self, context: Sequence[int], n: int) -> int | None:
        if len(context) < n:
            return None
        keys, followers = self.tables[n - 1]
        key = _keys([np.array([token]) for token in context[-n:]])[0]
        at = int(np.searchsorted(keys, key))
        return int(followers[at]) if at < len(keys) and keys[at] == key else None


def _keys(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Contexts as one number each: columns of n tokens [T] -> [T] uint64."""
    keys = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        keys = (keys << np.uint64(TOKEN_BITS)) | column.astype(np.uint64)
    return keys


def _most_frequent(keys: np.ndarray, followers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[T] pairs -> each key once, sorted, with its most frequent follower (of equally frequent ones the first seen)."""
    order = np.lexsort((followers, keys))  # stable: a pair's first place comes first
    keys, followers = keys[order], followers[order]
    starts = np.flatnonzero(_changes(keys) | _changes(followers))
    counts = np.diff(np.append(starts, len(keys)))
    best = np.lexsort((order[starts], -counts, keys[starts]))
    keys, followers = keys[starts][best], followers[starts][best]
    first = _changes(keys)
    return keys[first], followers[first]


def _changes(values: np.ndarray) -> np.ndarray:
    """[T] bool: where a value differs from the one before."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def lookup_then_table(table: NgramTable) -> Baseline:
    """Prompt lookup on at least two tokens, else the table."""

    def propose(tokens: Sequence[int], k: int) -> list[int]:
        return prompt_lookup(tokens, k, shortest=2) or table(tokens, k)

    return propose


@dataclass(frozen=True)
class Baselines:
    """by_name: the baselines. tokens: how many the n-gram table was counted over, None without one. damage: what is wrong with the
    draft's own store, which then is not counted, and the draft is measured all the same."""

    by_name: dict[str, Baseline]
    tokens: int | None = None
    damage: str | None = None


def load_baselines(data: Path | None, store: Path | None) -> Baselines:
    """Prompt lookup always; n-gram and both together when there are replies to count.

    Args:
        data: a store or a dataset. store: the draft's own, counted when `data` is None; None: it is not there.

    Raises:
        StoreError: `data` is damaged, or neither store nor dataset.
    """
    found: dict[str, Baseline] = {"prompt lookup": prompt_lookup}
    place = data or store
    if place is None:
        return Baselines(found)
    try:
        table = NgramTable(read_replies(place))
    except StoreError as error:
        if data is not None:
            raise
        return Baselines(found, damage=error.what)
    return Baselines({**found, "n-gram": table, "lookup, then n-gram": lookup_then_table(table)}, table.tokens)


def read_replies(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(token_ids, loss_mask) of the samples of a state store or a token dataset, one at a time.

    Raises:
        StoreError: it is neither, or a sample is not what was written.
    """
    if is_dataset(path):
        for sample in open_dataset(path):
            yield sample.token_ids, sample.loss_mask
        return
    states = open_states(path)
    for index in range(len(states)):
        token_ids, loss_mask = states.tokens(index)
        yield token_ids.numpy(), loss_mask.numpy()


def replay(baseline: Baseline, prompt: Sequence[int], reply: Sequence[int], k: int) -> Acceptance:
    """Acceptance of a baseline over one reply, counted as in `simulation.walk`: the reply's first token comes from the prefill."""
    tokens = [*prompt, *reply]
    at, end = len(prompt), len(tokens)
    accepted = np.zeros(k, np.int64)
    rounds = emitted = 0
    while at < end - 1:
        proposed = baseline(tokens[: at + 1], k)
        left = end - 1 - at
        run = 0
        while run < min(len(proposed), left) and proposed[run] == tokens[at + 1 + run]:
            run += 1
        accepted[:run] += 1
        rounds += 1
        step = min(run + 1, left)
        emitted += step
        at += step
    return Acceptance(rounds, emitted, accepted)
