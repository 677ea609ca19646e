"""Tiny random drafts and samples, packed; a draft's loss and gradients against the slow reference."""

import dataclasses

import numpy as np
import torch
from reference_draft import sample_losses

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


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 8192},
    "yarn": YARN | {"rope_theta": 1e4, "original_max_position_embeddings": 4096},
    "yarn as DeepSeek and Kimi have it": YARN
    | {"rope_theta": 5e4, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, unequal mscales": YARN
    | {"rope_theta": 5e4, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn as gpt-oss has it": YARN | {"rope_theta": 1.5e5, "original_max_position_embeddings": 4096, "truncate": False},
}


def config_with(rope, **changes):
    return dataclasses.replace(CONFIG, rope=rope, max_position_embeddings=163840, **changes)
