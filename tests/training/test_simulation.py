"""Simulated acceptance counts as serving counts."""

import numpy as np
import torch
from tiny_drafts import CONFIG, packed, random_draft, random_samples

from eyas.target.teacher import TargetParts, Teacher
from eyas.training.simulation import simulate, walk


def test_walk_by_hand():
    #            row: 0      1      2      3      4      5      6
    hits = np.array([[1, 1], [1, 0], [0, 1], [1, 1], [1, 1], [0, 0], [1, 1]], bool)
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 1], np.uint8)
    # First answer token at 2 comes from the prefill. Row 1 hits once: tokens 3 and (bonus) 4. Row 3 hits twice: 5, 6 and bonus 7.
    found = walk(hits, 0, mask)
    assert (found.rounds, found.emitted, found.accepted.tolist()) == (2, 5, [2, 1])
    assert found.length == 2.5
    assert found.by_position == [1.0, 0.5]
    # The same with rows counted from 1, and an answer that ends inside a chain: only what is left counts.
    assert walk(hits[1:], 1, mask).emitted == 5
    short = walk(hits, 0, np.array([0, 0, 0, 0, 1, 1, 0, 0], np.uint8))
    assert (short.rounds, short.emitted, short.accepted.tolist()) == (1, 1, [1, 0])
    nothing = walk(hits, 0, np.array([0, 0, 0, 0, 0, 0, 0, 1], np.uint8))
    assert nothing.rounds == 0
    assert np.isnan(nothing.length)


def test_two_answers_are_two_walks():
    hits = np.zeros((10, 3), bool)
    mask = np.array([0, 1, 1, 1, 0, 0, 1, 1, 1, 1], np.uint8)
    found = walk(hits, 0, mask)
    assert (found.rounds, found.emitted) == (5, 5)  # nothing accepted: one token a round, first tokens not counted


def test_simulation_equals_speculative_decoding_done_token_by_token():
    """An independent replay, with single unpacked samples and one chain at a time from the draft's own guesses."""
    steps = 3
    samples = random_samples([14, 9, 12])
    draft = random_draft(seed=3)
    head = torch.randn(
        CONFIG.vocab_size, CONFIG.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    ids = torch.tensor([1, 2, 3, 5, 8, 9, 11, 13, 16])
    draft.d2t = ids - torch.arange(9)
    t2d = torch.zeros(17, dtype=torch.bool).index_fill(0, ids, True)
    parts = TargetParts(head, torch.ones(12, dtype=torch.float64), None, "rms", 1e-6, head)
    teacher = Teacher(parts, ids, "cpu", torch.float64)
    # Make the samples greedy answers of this "target": each next token is what the head says of the state before it.
    greedy = []
    for tokens, _, aux, final in samples:
        answers = teacher.argmax(final).numpy()
        tokens = tokens.copy()
        tokens[3:] = answers[2:-1]
        greedy.append((tokens, (np.arange(len(tokens)) >= 3).astype(np.uint8), aux, final))
    rounds = emitted = 0
    for tokens, mask, aux, final in greedy:
        at = 3
        while at < len(tokens) - 1:
            run = 0
            while run < steps and at + 1 + run < len(tokens):
                # Rows 0..at-1, the chain's true tokens so far (equal to the draft's accepted guesses), one more guess.
                upto = at + 1 + run
                batch = packed(
                    [(tokens[: upto + 1], mask[: upto + 1], aux[: upto + 1], final[: upto + 1])],
                    steps,
                    skip_prompts=False,
                )
                guess = draft(batch, draft_steps=steps)[at - 1, run]
                if int(guess) != tokens[at + 1 + run]:
                    break
                run += 1
            rounds += 1
            step = min(run + 1, len(tokens) - 1 - at)
            emitted += step
            at += step
    batch = packed(greedy, steps)
    found = simulate(draft, teacher, t2d, batch, [m for _, m, _, _ in greedy], steps)
    assert (found.rounds, found.emitted) == (rounds, emitted)
    answers = np.concatenate([t[4:] for t, _, _, _ in greedy])
    assert found.targets == sum(int(m[1:].sum()) for _, m, _, _ in greedy)
    assert found.in_vocabulary >= np.isin(answers, ids.numpy()).sum()
