"""The draft against a slow reference: losses and gradients, packed and single, every loss, every number of steps."""

import dataclasses

import numpy as np
import pytest
import torch
from reference_draft import sample_losses

from eyas.base.errors import ContractError, InputError
from eyas.drafts.eagle3.model import Draft, DraftConfig
from eyas.drafts.packing import pack

CONFIG = DraftConfig(
    hidden_size=12,
    intermediate_size=20,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=17,
    draft_vocab_size=9,
    aux_layer_ids=(1, 2, 3),
    target_layers=6,
)


def random_draft(config=CONFIG, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    draft = Draft(config)
    for name, parameter in draft.named_parameters():
        values = torch.randn(parameter.shape, dtype=dtype)
        parameter.data = 1 + 0.2 * values if "norm" in name else 0.4 * values
    draft.aux_scale = 0.5 + torch.rand(3 * config.hidden_size, dtype=dtype)
    draft.compute_dtype = dtype
    return draft


def random_samples(lengths, config=CONFIG, seed=1, dtype=torch.float64, prompt=2):
    """Samples with a prompt, an answer, and (in longer ones) a second turn: masks with holes."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        mask = np.zeros(length, np.uint8)
        mask[prompt:] = 1
        if length > 8:
            mask[5:7] = 0
        samples.append(
            (
                rng.integers(0, config.vocab_size, length).astype(np.int32),
                mask,
                torch.randn(length, 3 * config.hidden_size, generator=generator, dtype=dtype),
                torch.randn(length, config.hidden_size, generator=generator, dtype=dtype),
            )
        )
    return samples


def packed(samples, steps, **options):
    ids, masks, aux, final = zip(*samples, strict=True)
    return pack(ids, masks, aux, final, steps, **options)


def teacher_weights(config=CONFIG, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(config.draft_vocab_size, config.hidden_size, generator=generator, dtype=torch.float64).to(dtype)


def gradients_equal_the_reference(draft, samples, steps, loss, rotate=None, rtol=1e-9, **options):
    """Loss and every gradient of `draft` against the slow reference."""
    weights = [0.8**k for k in range(steps)]
    expected, gradients = reference_loss(draft, samples, steps, loss, weights, rotate)
    out, _ = eyas_loss(draft, samples, steps, loss, weights, **options)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), expected, rtol=1e-3 * rtol, atol=1e-3 * rtol)
    trained = {name: p.grad for name, p in draft.named_parameters() if p.requires_grad}
    assert set(trained) == set(gradients) - {"embed_tokens.weight", "aux_scale"}
    for name, gradient in trained.items():
        torch.testing.assert_close(
            gradient, gradients[name], rtol=rtol, atol=1e-2 * rtol, msg=lambda m, n=name: f"{n}: {m}"
        )
    return expected


def eyas_loss(draft, samples, steps, loss, weights, **options):
    batch = packed(samples, steps, **options)
    teacher = batch.final[batch.rows] @ teacher_weights(draft.config, batch.final.dtype).T
    counts = torch.tensor([t.count for t in batch.targets], dtype=torch.float64)
    out = draft(batch, teacher, counts / torch.tensor(weights, dtype=torch.float64), loss=loss, chunk=5)
    return out, counts


def reference_loss(draft, samples, steps, loss, weights, rotate=None):
    w = {k: v.detach().clone().requires_grad_(v.is_floating_point()) for k, v in draft.state_dict().items()}
    sums, counts = [0.0] * steps, [0] * steps
    for ids, mask, aux, final in samples:
        s, c = sample_losses(w, draft.config, ids, mask, aux, final @ teacher_weights().T, steps, loss, rotate)
        sums = [a + b for a, b in zip(sums, s, strict=True)]
        counts = [a + b for a, b in zip(counts, c, strict=True)]
    total = sum(w_k * s / n for w_k, s, n in zip(weights, sums, counts, strict=True))
    total.backward()
    return total.detach(), {k: v.grad for k, v in w.items() if v.grad is not None}


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
