"""Acceptance simulated from the state store: what serving would accept, without running the target.

For each supervised stretch of a held-out sample the walk of greedy speculative decoding is replayed: the last emitted token stands at
position `at`; the draft guesses the k tokens after it, reading the target's states up to the one before (row at - 1); guesses are
accepted up to the first that is not the target's own next token; the target adds one token of its own; on it goes from there.

    acceptance length = tokens emitted / verification rounds, the target's bonus token included

The target's next tokens are rebuilt from its stored states over its *full* vocabulary: a token the draft cannot say is a rejection, as
in serving. On answers that the target itself gave greedily the walk equals real decoding (in exact arithmetic); on answers of others it
says how often draft and target agree along them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eyas.drafts.packing import Batch
from eyas.target.teacher import Teacher


@dataclass(frozen=True)
class Acceptance:
    """Counts that add up over samples.

    rounds: verification steps. emitted: tokens, bonus included. accepted: [k] guesses accepted at each place of the chain.
    sayable: supervised tokens' targets inside the draft vocabulary; targets: all of them.
    """

    rounds: int
    emitted: int
    accepted: np.ndarray
    sayable: int = 0
    targets: int = 0

    @property
    def length(self) -> float:
        """Mean tokens emitted per verification step, bonus token included (1.0 = the draft never helps)."""
        return self.emitted / self.rounds if self.rounds else float("nan")

    @property
    def by_position(self) -> list[float]:
        """Share of rounds in which the guess at each place was accepted (all before it included)."""
        return [float(a) / self.rounds if self.rounds else float("nan") for a in self.accepted]

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.rounds + other.rounds,
            self.emitted + other.emitted,
            self.accepted + other.accepted,
            self.sayable + other.sayable,
            self.targets + other.targets,
        )

    def summary(self) -> dict[str, Any]:
        """For manifests and logs."""
        return {
            "acceptance_length": round(self.length, 4),
            "by_position": [round(x, 4) for x in self.by_position],
            "rounds": self.rounds,
            "emitted": self.emitted,
            "target_in_draft_vocabulary": round(self.sayable / self.targets, 4) if self.targets else None,
        }


def walk(hits: np.ndarray, first_row: int, loss_mask: np.ndarray) -> Acceptance:
    """Replay speculative decoding over one sample.

    Args:
        hits: [R, k] bool, guess k of row first_row + r is the target's own token. first_row: the first row's place in the sample.
        loss_mask: [T]. Each run of ones is an answer; its first token comes from the prefill and is not counted.
    """
    k = hits.shape[1]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(loss_mask, np.int8), [0]])))
    accepted = np.zeros(k, np.int64)
    rounds = emitted = 0
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        at = max(int(begin), 1)
        while at < end - 1:
            left = int(end) - 1 - at
            row = hits[at - 1 - first_row]
            run = k if row.all() else int(row.argmin())
            accepted[: min(run, left)] += 1
            rounds += 1
            emitted += min(run + 1, left)
            at += min(run + 1, left)
    return Acceptance(rounds, emitted, accepted)


def has_rounds(loss_mask: np.ndarray) -> bool:
    """Whether `walk` finds anything to count in a sample: an answer with a token behind its first one."""
    mask = np.asarray(loss_mask, bool)[1:]
    return bool((mask[1:] & mask[:-1]).any())


@torch.no_grad()
def simulate(
    draft: Any,
    teacher: Teacher,
    t2d: torch.Tensor,
    batches: Iterable[Batch],
    masks: Iterable[list[np.ndarray]],
    chain: int,
) -> Acceptance:
    """Simulated acceptance over packed batches.

    Args:
        draft: a Draft, or what wraps it for several GPUs. t2d: [V] bool, what the draft can say. batches: packed with at least `chain` steps, on the draft's device.
        masks: per batch, the samples' loss masks [T_s]. chain: guesses per round, k.
    """
    total = Acceptance(0, 0, np.zeros(chain, np.int64))
    for batch, batch_masks in zip(batches, masks, strict=True):
        guesses = draft(batch, guess=chain)  # [R, k] target ids
        answers = teacher.argmax(batch.final[batch.rows])  # [R], the target's token after each row's token
        ahead = (
            torch.arange(len(answers), device=answers.device).unsqueeze(1)
            + 1
            + torch.arange(chain, device=answers.device)
        )
        hits = (guesses == answers[ahead.clamp_max(len(answers) - 1)]).cpu().numpy()
        sayable = t2d[answers].cpu().numpy()
        starts = np.concatenate([[0], np.cumsum(np.subtract(batch.layout.lengths, batch.layout.first_rows))])
        for s, mask in enumerate(batch_masks):
            first = batch.layout.first_rows[s]
            mine = slice(starts[s], starts[s + 1])
            total = total + walk(hits[mine], first, mask)
            predicted = np.flatnonzero(
                np.asarray(mask)[first + 1 :]
            )  # row r's target state predicts token first + r + 1
            total = total + Acceptance(
                0, 0, np.zeros(chain, np.int64), int(sayable[mine][predicted].sum()), len(predicted)
            )
    return total
