"""Acceptance simulated from the state store: what serving would accept, without running the target.

For each supervised stretch of a held-out sample the walk of greedy speculative decoding is replayed: the last emitted token stands at
position `at`; the draft proposes the k tokens after it, reading the target's states up to the one before (row at - 1); they are
accepted up to the first that is not the target's own next token; the target adds one token of its own; on it goes from there.

    acceptance length = tokens emitted / verification rounds, the target's bonus token included

The target's next tokens are rebuilt from its stored states over its *full* vocabulary: a token outside the draft vocabulary is a
rejection, as in serving. On answers that the target itself gave greedily the walk equals real decoding (in exact arithmetic); on answers of others it
says how often draft and target agree along them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eyas.base.masks import runs
from eyas.drafts.packing import Batch
from eyas.store.reader import States
from eyas.target.teacher import Teacher
from eyas.training.data import read_batch
from eyas.training.ranks import Ranks


@dataclass(frozen=True)
class Acceptance:
    """Counts that add up over samples.

    rounds: verification steps. emitted: tokens, bonus included. accepted: [k] draft tokens accepted at each position.
    in_vocabulary: supervised tokens' targets inside the draft vocabulary; targets: all of them.
    """

    rounds: int
    emitted: int
    accepted: np.ndarray
    in_vocabulary: int = 0
    targets: int = 0

    @property
    def length(self) -> float:
        """Mean tokens emitted per verification step, bonus token included (1.0 = the draft never helps)."""
        return self.emitted / self.rounds if self.rounds else float("nan")

    @property
    def by_position(self) -> list[float]:
        """Share of rounds in which the draft token at each position was accepted (all before it included)."""
        return [float(a) / self.rounds if self.rounds else float("nan") for a in self.accepted]

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.rounds + other.rounds,
            self.emitted + other.emitted,
            self.accepted + other.accepted,
            self.in_vocabulary + other.in_vocabulary,
            self.targets + other.targets,
        )

    def summary(self) -> dict[str, Any]:
        """For manifests and logs."""
        return {
            "acceptance_length": round(self.length, 4),
            "by_position": [round(x, 4) for x in self.by_position],
            "rounds": self.rounds,
            "emitted": self.emitted,
            "target_in_draft_vocabulary": round(self.in_vocabulary / self.targets, 4) if self.targets else None,
        }


def walk(hits: np.ndarray, first_row: int, loss_mask: np.ndarray) -> Acceptance:
    """Replay speculative decoding over one sample.

    Args:
        hits: [R, k] bool, draft token k of row first_row + r is the target's own token. first_row: the first row's place in the sample.
        loss_mask: [T]. Each run of ones is an answer; its first token comes from the prefill and is not counted.
    """
    k = hits.shape[1]
    accepted = np.zeros(k, np.int64)
    rounds = emitted = 0
    for begin, end in runs(loss_mask):
        at = max(begin, 1)
        while at < end - 1:
            left = end - 1 - at
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
    draft: Any, teacher: Teacher, t2d: torch.Tensor, batch: Batch, masks: list[np.ndarray], num_speculative_tokens: int
) -> Acceptance:
    """Simulated acceptance over a packed batch.

    Args:
        draft: a Draft, or what wraps it for several GPUs. t2d: [V] bool, the draft vocabulary. batch: packed with at least
            `num_speculative_tokens` steps, on the draft's device. masks: the samples' loss masks [T_s].
    """
    k = num_speculative_tokens
    draft_tokens = draft(batch, draft_steps=k)  # [R, k] target ids
    answers = teacher.argmax(batch.final[batch.rows])  # [R], the target's token after each row's token
    ahead = torch.arange(len(answers), device=answers.device).unsqueeze(1) + 1 + torch.arange(k, device=answers.device)
    hits = (draft_tokens == answers[ahead.clamp_max(len(answers) - 1)]).cpu().numpy()  # [R, k]
    in_vocabulary = t2d[answers].cpu().numpy()  # [R]
    starts = np.concatenate([[0], np.cumsum(np.subtract(batch.layout.lengths, batch.layout.first_rows))])
    total = Acceptance(0, 0, np.zeros(k, np.int64))
    for s, mask in enumerate(masks):
        first, rows = batch.layout.first_rows[s], slice(starts[s], starts[s + 1])
        # Row r's target state predicts token first + r + 1.
        predicted = np.flatnonzero(np.asarray(mask)[first + 1 :])
        found = Acceptance(0, 0, np.zeros(k, np.int64), int(in_vocabulary[rows][predicted].sum()), len(predicted))
        total = total + walk(hits[rows], first, mask) + found
    return total


class HeldOut:
    """The held-out samples, dealt out over ranks in groups of at most `batch_tokens`, to be simulated again and again.

    Args:
        positions: in the store. aux_ids, final_id: layers. num_speculative_tokens: draft tokens per round, k.
    """

    def __init__(
        self,
        states: States,
        positions: np.ndarray,
        aux_ids: Sequence[int],
        final_id: int,
        ranks: Ranks,
        *,
        num_speculative_tokens: int,
        batch_tokens: int,
        skip_prompts: bool,
    ):
        self.positions, self._k, self._ranks = positions, num_speculative_tokens, ranks
        self._read = lambda group: read_batch(
            states, group, aux_ids, final_id, num_speculative_tokens, skip_prompts=skip_prompts
        )
        self._mask = lambda position: states.tokens(position)[1].numpy()
        dealt = [_grouped(positions[r :: ranks.count], states.lengths, batch_tokens) for r in range(ranks.count)]
        self._groups = dealt[ranks.rank]
        # FSDP's collectives need the same number of forward passes on every rank: short ranks read one sample more, uncounted.
        self._uncounted = max(map(len, dealt)) - len(self._groups)

    def __len__(self) -> int:
        return len(self.positions)

    def simulate(self, model: Any, teacher: Teacher, t2d: torch.Tensor) -> Acceptance:
        """Over all ranks' samples. Every rank must call it."""
        model.eval()
        total = Acceptance(0, 0, np.zeros(self._k, np.int64))
        for i, group in enumerate([*self._groups, *[[int(self.positions[0])]] * self._uncounted]):
            batch, masks = self._read(group).to(self._ranks.device), [self._mask(p) for p in group]
            found = simulate(model, teacher, t2d, batch, masks, self._k)
            if i < len(self._groups):
                total = total + found
        model.train()
        rounds, emitted, in_vocabulary, targets, *accepted = (
            int(x)
            for x in self._ranks.sum([total.rounds, total.emitted, total.in_vocabulary, total.targets, *total.accepted])
        )
        return Acceptance(rounds, emitted, np.array(accepted), in_vocabulary, targets)


def _grouped(positions: np.ndarray, lengths: np.ndarray, batch_tokens: int) -> list[list[int]]:
    """In order, as many together as fit into `batch_tokens`; a longer one alone."""
    groups: list[list[int]] = []
    filled = 0
    for position in positions.tolist():
        if not groups or filled + lengths[position] > batch_tokens:
            groups.append([])
            filled = 0
        groups[-1].append(position)
        filled += lengths[position]
    return groups
