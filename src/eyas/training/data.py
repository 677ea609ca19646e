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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from eyas.base.errors import InputError
from eyas.drafts.packing import Batch, pack
from eyas.store.reader import States


@dataclass(frozen=True)
class Split:
    """Positions in a store: `train` and `held_out`, disjoint, each ascending."""

    train: np.ndarray
    held_out: np.ndarray


def split_by_prompt(
    ids: Sequence[str], samples: Sequence[tuple[np.ndarray, np.ndarray]], held_out: float, least: int = 1
) -> Split:
    """Hold out a share of the samples by a hash of their prompts: the same sample falls on the same side in every run and store, and two
    answers to one question never lie on both sides, where the draft would be judged on what it has learnt by heart.

    Args:
        ids: sample ids (hex), for samples without a prompt of their own: supervised from the first token on, or with a prompt that more
            samples share than are to be held out (a system message before plain text).
        samples: (token_ids, loss_mask) each; the prompt is what comes before the first supervised token.
        held_out: share, 0..0.5. least: hold out at least so many (if there are twice as many).

    Raises:
        InputError: a share outside 0..0.5, or too few samples to split.
    """
    if not 0 <= held_out <= 0.5:
        raise InputError(f"--held-out {held_out} is no share between 0 and 0.5", "for example 0.05")
    count = max(round(len(ids) * held_out), least) if held_out else 0
    prompts = [_prompt_hash(token_ids, loss_mask) for token_ids, loss_mask in samples]
    shared = Counter(prompts)
    keys = [
        one if prompt is None or shared[prompt] > count else prompt for one, prompt in zip(ids, prompts, strict=True)
    ]
    draws = np.array([int(key[-12:], 16) for key in keys], dtype=np.int64)
    if count * 2 > len(ids):
        raise InputError(
            f"{len(ids)} samples are too few to hold {count} of them out", "extract more, or set --held-out 0"
        )
    order = np.argsort(draws, kind="stable")
    while 0 < count < len(order) and draws[order[count]] == draws[order[count - 1]]:
        count += 1  # the rest of that prompt's answers
    return Split(np.sort(order[count:]), np.sort(order[:count]))


def _prompt_hash(token_ids: np.ndarray, loss_mask: np.ndarray) -> str | None:
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
    windows = [order[window_of == w] for w in np.unique(window_of)]
    joined: list[np.ndarray] = []
    for window in windows:
        if joined and (len(joined[-1]) < parts or (window is windows[-1] and len(window) < parts)):
            joined[-1] = np.concatenate([joined[-1], window])
        else:
            joined.append(window)
    steps = []
    for window in joined:
        bins: list[list[int]] = [[] for _ in range(parts)]
        load = np.zeros(parts, np.int64)
        for position in window[np.argsort(-lengths[window], kind="stable")]:
            lightest = int(load.argmin())
            bins[lightest].append(int(position))
            load[lightest] += lengths[position]
        steps.append([np.array(b) for b in bins])
    return steps


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
