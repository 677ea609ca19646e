"""DFlash and DSpark drafts against a slow reference, and what their blocks may learn from."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_blocks import (
    DFLASH,
    DSPARK,
    block_loss,
    equals_the_reference,
    packed_blocks,
    random_block_draft,
    random_samples,
)

from eyas.base.errors import InputError
from eyas.drafts.block.anchors import anchor_candidates, pack_blocks, sample_anchors, supervised_slots

VARIANTS = {
    "dflash": (DFLASH, {}),
    "dflash, D-PACE": (DFLASH, {"loss": "dpace"}),
    "dflash, a window": (dataclasses.replace(DFLASH, sliding_window=4), {}),
    "dflash, reduced vocabulary": (dataclasses.replace(DFLASH, draft_vocab_size=8, num_key_value_heads=1), {}),
    "dspark": (DSPARK, {}),
    "dspark, few anchors": (DSPARK, {"most": 2}),
    "dspark, no confidence head": (dataclasses.replace(DSPARK, confidence_head=False, num_layers=1), {}),
    "dspark, reduced vocabulary, a window": (dataclasses.replace(DSPARK, draft_vocab_size=8, sliding_window=3), {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_equal_the_slow_reference(variant):
    config, options = VARIANTS[variant]
    equals_the_reference(config, random_samples([9, 12], config), **options)


def masks(least=3):
    return st.lists(st.booleans(), min_size=least, max_size=30).map(lambda x: np.array(x, np.uint8))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(masks(), st.integers(1, 8), st.integers(0, 3))
def test_anchors_are_where_serving_would_draft_and_anew_each_epoch(mask, most, epoch):
    candidates = anchor_candidates(mask).tolist()
    assert candidates == [a for a in range(1, len(mask) - 1) if mask[a] and mask[a + 1]]
    found = sample_anchors(mask, most, 0, epoch, "ab12").tolist()
    assert len(found) == min(most, len(candidates))
    assert found == sorted(set(found))
    assert set(found) <= set(candidates)
    assert found == sample_anchors(mask, most, 0, epoch, "ab12").tolist()


def test_anchors_depend_on_seed_epoch_and_sample():
    mask = np.ones(200, np.uint8)
    drawn = [sample_anchors(mask, 5, *key).tolist() for key in [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]]
    assert len({tuple(x) for x in drawn}) == 4


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(masks(), min_size=1, max_size=4), st.integers(1, 6))
def test_labels_teachers_and_borders_of_packed_blocks(all_masks, n):
    ids = [np.arange(len(m)) + 100 * s for s, m in enumerate(all_masks)]  # a token says its sample and place
    states = [torch.from_numpy(x).double().unsqueeze(1) for x in ids]
    anchors = [anchor_candidates(m) for m in all_masks]
    batch = pack_blocks(ids, all_masks, states, states, anchors, n)
    found = set()
    for i, targets in enumerate(batch.targets):
        rows = targets.rows[: targets.count]
        first = batch.token_ids[batch.anchors[rows]]
        teachers = batch.final[batch.rows][targets.states[: targets.count], 0].long()
        assert (teachers == first + i).all()  # also the token before: the Markov head's
        labels = batch.token_ids[batch.anchors[rows] + 1 + i]
        assert (labels == first + 1 + i).all()  # in the same sample
        assert (batch.token_ids[batch.starts[rows]] == first // 100 * 100).all()
        found |= {(int(a), i) for a in first}
    expected = {
        (100 * s + int(a), i)
        for s, (m, at) in enumerate(zip(all_masks, anchors, strict=True))
        for a in at
        for i in range(n)
        if a + 1 + i < len(m) and m[a + 1 : a + 2 + i].all()
    }
    assert found == expected


def test_nothing_behind_a_masked_token_is_supervised():
    mask = np.array([0, 1, 1, 1, 0, 1, 1, 1])
    found = supervised_slots(mask, anchor_candidates(mask), 4)
    assert anchor_candidates(mask).tolist() == [1, 2, 5, 6]
    assert found.sum(1).tolist() == [2, 1, 2, 1]


@pytest.mark.parametrize("config", [DFLASH, DSPARK], ids=["dflash", "dspark"])
def test_a_block_sees_its_own_context_before_the_anchor_and_nothing_else(config):
    """Change one thing at a time: blocks that may see it change, all others stay to the bit."""
    draft, samples = random_block_draft(config), random_samples([10, 11], config)
    anchors = [np.array([3, 7]), np.array([4, 8])]

    def rows(of, at=anchors):
        return draft.block_rows(packed_blocks(of, config, anchors=at)[0]).detach()

    plain = rows(samples)
    for sample in (0, 1):
        for place in range(10):
            ids, _, aux, _ = samples[sample]
            other = aux.clone()
            other[place] += 1
            changed = [list(s) for s in samples]
            changed[sample][2] = other
            moved = (rows(changed) != plain).flatten(1).any(1).tolist()
            assert moved == [s == sample and place < a for s in (0, 1) for a in anchors[s]]
            changed[sample][2] = aux
            tokens = ids.copy()
            tokens[place] = (tokens[place] + 1) % 16
            changed[sample][0] = tokens
            moved = (rows(changed) != plain).flatten(1).any(1).tolist()
            assert moved == [s == sample and place == a for s in (0, 1) for a in anchors[s]]
    # Without the other blocks, the same.
    alone = rows(samples, [anchors[0][:1], anchors[1][1:]])
    torch.testing.assert_close(alone, plain[[0, 3]], rtol=1e-13, atol=1e-13)


def test_slots_of_a_block_see_those_behind_them():
    draft = random_block_draft(DFLASH)
    longer = random_block_draft(dataclasses.replace(DFLASH, block_size=5))
    longer.load_state_dict(draft.state_dict())
    samples, anchors = random_samples([10], DFLASH), [np.array([4])]
    short, long = (d.block_rows(packed_blocks(samples, d.config, anchors=anchors)[0]) for d in (draft, longer))
    assert not torch.allclose(short[0, 0], long[0, 0])


def test_samples_without_blocks_add_nothing():
    samples = random_samples([6], DSPARK)
    quiet = [(ids, mask * 0, aux, final) for ids, mask, aux, final in samples]
    draft = random_block_draft(DSPARK)
    out = block_loss(draft, packed_blocks(quiet + samples, DSPARK)[0])
    alone = block_loss(draft, packed_blocks(samples, DSPARK)[0])
    torch.testing.assert_close(out.losses, alone.losses, rtol=1e-12, atol=1e-13)
    nothing = block_loss(draft, packed_blocks(quiet, DSPARK)[0])
    assert nothing.losses.tolist() == [0, 0, 0]
    nothing.loss.nan_to_num().backward()


def test_shapes_that_cannot_be_are_refused_with_the_flag_to_change():
    for change, flag in (({"block_size": 1}, "block-size"), ({"mask_token_id": 17}, "mask-token-id"), ({"sliding_window": 2}, "sliding-window")):  # fmt: skip
        with pytest.raises(InputError, match=flag):
            dataclasses.replace(DFLASH, **change)
