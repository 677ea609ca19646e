"""The draft against a slow reference: losses and gradients, packed and single, every loss, every number of steps."""

import dataclasses

import pytest
import torch
from tiny_drafts import CONFIG, eyas_loss, gradients_equal_the_reference, packed, random_draft, random_samples

from eyas.base.errors import ContractError, InputError
from eyas.drafts.eagle3.model import Draft


@pytest.mark.parametrize("loss", ["kl", "tv", "lk"])
@pytest.mark.parametrize(("steps", "lengths"), [(1, [9]), (2, [7, 9]), (3, [9, 4, 8]), (4, [10]), (5, [8, 11])])
def test_loss_and_gradients_equal_the_slow_reference(steps, lengths, loss):
    gradients_equal_the_reference(random_draft(), random_samples(lengths), steps, loss)


SHAPES = {
    "all heads have their own keys": {"num_key_value_heads": 4},
    "one key-value head": {"num_key_value_heads": 1},
    "norm_aux": {"norm_aux": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "EAGLE-3.1": {"norm_aux": True, "norm_before_residual": True, "norm_output": True},
    "two layers": {"num_layers": 2},
    "three layers, grouped, EAGLE-3.1": {
        "num_layers": 3, "num_key_value_heads": 1, "norm_aux": True, "norm_before_residual": True, "norm_output": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_draft_equals_the_slow_reference(shape):
    config = dataclasses.replace(CONFIG, **SHAPES[shape])
    alone = config.num_layers == 1  # several layers need every row as a query
    found = gradients_equal_the_reference(random_draft(config), random_samples([8, 6]), 3, "kl", skip_prompts=alone)
    plain = gradients_equal_the_reference(random_draft(), random_samples([8, 6]), 3, "kl")
    assert not torch.isclose(found, plain), "the option changes nothing"


def test_skipping_prompts_changes_no_loss_and_no_gradient():
    samples = random_samples([12, 9, 15], prompt=5)
    assert packed(samples, 3).layout.first_rows == (3, 3, 3)
    results = []
    for skip in (True, False):
        draft = random_draft()
        out, counts = eyas_loss(draft, samples, 3, "kl", [1.0] * 3, skip_prompts=skip)
        out.loss.backward()
        results.append((out.losses, counts, [p.grad for p in draft.parameters() if p.requires_grad]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-13)


def test_packed_equals_single_and_nothing_leaks_across_samples():
    samples = random_samples([9, 7, 12])
    draft = random_draft()
    together, counts = eyas_loss(draft, samples, 4, "kl", [1.0] * 4)
    alone = [eyas_loss(draft, [s], 4, "kl", [1.0] * 4) for s in samples]
    torch.testing.assert_close(together.losses, sum(a[0].losses for a in alone), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(counts, sum(a[1] for a in alone))
    # Other neighbours, the same loss: every token and state around the middle sample is another.
    others = random_samples([9, 7, 12], seed=99)
    losses = []
    for first, last in ((samples[0], samples[2]), (others[0], others[2])):
        quiet = [(ids, mask * 0, aux, final) for ids, mask, aux, final in (first, last)]
        losses.append(eyas_loss(draft, [quiet[0], samples[1], quiet[1]], 4, "kl", [1.0] * 4)[0].losses)
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)


def test_several_layers_refuse_skipped_rows():
    deep = random_draft(dataclasses.replace(CONFIG, num_layers=2))
    with pytest.raises(ContractError, match="every row"):
        eyas_loss(deep, random_samples([12], prompt=5), 2, "kl", [1.0] * 2)


def test_bf16_compute_stays_near_fp64_and_masters_stay_fp32():
    samples = random_samples([20, 31])
    exact, _ = eyas_loss(random_draft(), samples, 3, "kl", [1.0] * 3)
    draft = random_draft(dtype=torch.float32)
    draft.load_state_dict(random_draft().state_dict())
    draft.compute_dtype = torch.bfloat16
    samples = [(i, m, a.bfloat16(), f.bfloat16()) for i, m, a, f in samples]
    out, _ = eyas_loss(draft, samples, 3, "kl", [1.0] * 3)
    out.loss.backward()
    assert out.losses.dtype == torch.float32
    torch.testing.assert_close(out.losses.double(), exact.losses, rtol=0.05, atol=0.0)
    assert {p.grad.dtype for p in draft.parameters() if p.requires_grad} == {torch.float32}


def test_a_weight_that_nobody_filled_is_named():
    draft = Draft(CONFIG)
    draft.load_state_dict({k: v for k, v in random_draft().state_dict().items() if "down_proj" not in k}, strict=False)
    with pytest.raises(ContractError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        draft.check_filled()


def test_wrong_shapes_are_refused_with_the_flag_to_change():
    with pytest.raises(InputError, match="kv-heads"):
        dataclasses.replace(CONFIG, num_key_value_heads=3)
    with pytest.raises(InputError, match="longrope"):
        dataclasses.replace(CONFIG, rope={"rope_type": "longrope"})
