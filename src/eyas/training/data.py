"""Batches for draft training, straight from the memory-mapped state store.

Which samples meet in which step is a pure function of (seed, epoch): shuffled, cut into one window per optimizer step, and each window
dealt out over ranks and micro-batches, longest first to the emptiest, so that all carry nearly the same number of tokens. Position in
the data is therefore one number, the step, and resuming needs nothing else.

A thread reads ahead: it copies the rows of the next batches out of the map and packs them (in page-locked memory for a GPU), while the
draft computes. `Reader.waited` says how long the draft stood still. A second thread, a step further ahead, compares samples that are read for
the first time with their checksums; a sample that changed on the disk ends the run before its step.

Trade-off: every batch is read once per epoch from the store (page cache or disk), nothing is kept; at 4 states of 2 H bytes a token,
100,000 tokens/s of H 4096 take 3.3 GB/s of a disk that must deliver them.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from eyas.base.errors import InputError
from eyas.drafts.eagle3.init import count_supervised
from eyas.drafts.packing import Batch, pack, supervised_rows
from eyas.store.reader import States


@dataclass(frozen=True)
class Survey:
    """What one pass over the tokens and masks of a store tells; the tokens are not kept.

    prompts: per sample a hash of its prompt, or None (`prompt_hash`). learns: [n] bool, whether a draft could learn anything from it.
    counts: [V] int64, how often each token is to be predicted.
    """

    prompts: list[str | None]
    learns: np.ndarray
    counts: np.ndarray


def survey(states: States, vocab_size: int) -> Survey:
    """Look at every sample of a store, without its states."""
    prompts, learns, counts = [], np.zeros(len(states), bool), np.zeros(vocab_size, np.int64)
    for i in range(len(states)):
        token_ids, loss_mask = (x.numpy() for x in states.tokens(i))
        prompts.append(prompt_hash(token_ids, loss_mask))
        learns[i] = len(supervised_rows(loss_mask, 0)) > 0
        count_supervised(counts, token_ids, loss_mask)
    return Survey(prompts, learns, counts)


@dataclass(frozen=True)
class Split:
    """Positions in a store: `train` and `held_out`, disjoint, each ascending."""

    train: np.ndarray
    held_out: np.ndarray


def split_by_prompt(ids: Sequence[str], prompts: Sequence[str | None], held_out: float, least: int = 1) -> Split:
    """Hold out a share of the samples by a hash of their prompts: the same sample falls on the same side in every run and store, and two
    answers to one question never lie on both sides, where the draft would be judged on what it has learnt by heart.

    Args:
        ids: sample ids (hex), for samples without a prompt of their own: supervised from the first token on, or with a prompt that more
            samples share than are to be held out (a system message before plain text).
        prompts: of each sample, from `prompt_hash`.
        held_out: share, 0..0.5. least: hold out at least so many (if there are twice as many).

    Raises:
        InputError: too few samples to split.
    """
    number = max(round(len(ids) * held_out), least) if held_out else 0
    if number * 2 > len(ids):
        raise InputError(
            f"{len(ids)} samples are too few to hold {number} of them out", "extract more, or set --held-out 0"
        )
    shared = Counter(prompts)
    keys = [
        one if prompt is None or shared[prompt] > number else prompt for one, prompt in zip(ids, prompts, strict=True)
    ]
    draws = np.array([int(key[-12:], 16) for key in keys], dtype=np.int64)
    order = np.argsort(draws, kind="stable")
    while 0 < number < len(order) and draws[order[number]] == draws[order[number - 1]]:
        number += 1  # the rest of that prompt's answers
    return Split(np.sort(order[number:]), np.sort(order[:number]))


def prompt_hash(token_ids: np.ndarray, loss_mask: np.ndarray) -> str | None:
    """Of what comes before the first supervised token; None where nothing does."""
    first = int(np.argmax(loss_mask)) if loss_mask.any() else 0
    return hashlib.blake2b(token_ids[:first].astype("<i4").tobytes(), digest_size=16).hexdigest() if first else None


def plan_epoch(
    positions: np.ndarray, lengths: np.ndarray, *, batch_tokens: int, parts: int, seed: int, epoch: int
) -> list[list[np.ndarray]]:
    """The epoch's optimizer steps: for each, `parts` lists of positions (ranks x micro-batches).

    Args:
        positions: which samples. lengths: [n] tokens of every sample of the store. batch_tokens: aimed at per part.
        parts: ranks times micro-batches per step.

    Returns:
        steps; within a step all parts hold nearly the same number of tokens, none is empty, and no sample is left out (the last window
        is joined to the one before when it has fewer samples than parts).

    Raises:
        InputError: fewer samples than parts.
    """
    if len(positions) < parts:
        raise InputError(
            f"{len(positions)} training samples cannot feed {parts} parts (ranks x micro-batches) of a step",
            "use fewer ranks or --accumulate 1, or extract more samples",
        )
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(positions)
    window_of = (np.cumsum(lengths[order]) - 1) // (batch_tokens * parts)
    begins = [0]
    for edge in np.flatnonzero(np.diff(window_of)) + 1:
        if edge - begins[-1] >= parts:
            begins.append(int(edge))
    if len(begins) > 1 and len(order) - begins[-1] < parts:
        begins.pop()
    return [_deal(window, lengths, parts) for window in np.split(order, begins[1:])]


def _deal(window: np.ndarray, lengths: np.ndarray, parts: int) -> list[np.ndarray]:
    """Longest first to the emptiest part."""
    bins: list[list[int]] = [[] for _ in range(parts)]
    load = np.zeros(parts, np.int64)
    for position in window[np.argsort(-lengths[window], kind="stable")]:
        lightest = int(load.argmin())
        bins[lightest].append(int(position))
        load[lightest] += lengths[position]
    return [np.array(b) for b in bins]


def planned_steps(first: int, plan: Callable[[int], list[list[np.ndarray]]]) -> Iterator[list[np.ndarray]]:
    """The parts of step `first` and of all steps behind it, without end. plan: epoch -> its steps.

    Epochs differ in their number of steps, so the place of a step is found by walking from the start: cheap, and exact.
    """
    begin = 0
    for epoch in count():
        steps = plan(epoch)
        yield from steps[max(0, first - begin) :]
        begin += len(steps)


def read_batch(
    states: States,
    positions: Sequence[int] | np.ndarray,
    aux_ids: Sequence[int],
    final_id: int,
    steps: int,
    *,
    skip_prompts: bool = True,
) -> Batch:
    """Copy samples out of the store and pack them; `aux_ids` in the draft's order, `steps`: K."""
    samples = [states[int(p)] for p in positions]
    return pack(
        [s.token_ids.numpy() for s in samples],
        [s.loss_mask.numpy() for s in samples],
        [torch.cat([s.hidden[i] for i in aux_ids], -1) for s in samples],
        [s.hidden[final_id] for s in samples],
        steps,
        skip_prompts=skip_prompts,
    )


def _compared(
    states: States, schedule: Iterable[tuple[list[np.ndarray], int]], pool: ThreadPoolExecutor
) -> Iterator[tuple[list[np.ndarray], int]]:
    """The schedule again; each step comes when its samples were compared, and the next step's are while it is being copied.

    Raises StoreError in the place of a step that holds a damaged sample.
    """

    def compare(parts: list[np.ndarray]) -> None:
        for part in parts:
            for position in part:
                states.compare(int(position))

    before: tuple[tuple[list[np.ndarray], int], Future[None]] | None = None
    for step in schedule:
        comparing = pool.submit(compare, step[0])
        if before is not None:
            before[1].result()
            yield before[0]
        before = step, comparing
    if before is not None:
        before[1].result()
        yield before[0]


class Reader:
    """Yields the micro-batches of each optimizer step, read ahead by a thread.

    Args:
        schedule: yields, per optimizer step, (positions of each micro-batch of this rank, K).
        ahead: how many steps to keep ready. pin: into page-locked memory.
    """

    def __init__(
        self,
        states: States,
        schedule: Iterator[tuple[list[np.ndarray], int]],
        aux_ids: Sequence[int],
        final_id: int,
        *,
        skip_prompts: bool = True,
        ahead: int = 3,
        pin: bool = False,
    ):
        self.waited = 0.0
        self._queue: queue.Queue[list[Batch] | BaseException | None] = queue.Queue(ahead)
        self._stop = threading.Event()

        def fill() -> None:
            try:
                with ThreadPoolExecutor(1, "eyas-compare") as pool:
                    for parts, steps in _compared(states, schedule, pool):
                        batches = [
                            read_batch(states, part, aux_ids, final_id, steps, skip_prompts=skip_prompts)
                            for part in parts
                        ]
                        if not self._offer([b.pin_memory() for b in batches] if pin else batches):
                            return
                self._offer(None)
            except BaseException as error:  # noqa: BLE001  handed over to the training loop, which raises it
                self._offer(error)

        self._thread = threading.Thread(target=fill, name="eyas-loader", daemon=True)
        self._thread.start()

    def _offer(self, item: list[Batch] | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[list[Batch]]:
        while True:
            began = time.perf_counter()
            item = self._queue.get()
            self.waited += time.perf_counter() - began
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Stop reading ahead and wait for the thread."""
        self._stop.set()
        self._thread.join()
