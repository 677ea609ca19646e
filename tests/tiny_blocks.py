"""Tiny random block drafts and batches of blocks; loss and gradients against the slow reference."""

import torch
from reference_block import sample_losses
from tiny_drafts import random_samples, teacher_weights

from eyas.drafts.block.anchors import pack_blocks, sample_anchors
from eyas.drafts.block.model import BlockConfig, BlockDraft

SIZES = {
    "hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "vocab_size": 17, "draft_vocab_size": 17, "aux_layer_ids": (1, 2, 3), "target_layers": 6, "num_layers": 2, "mask_token_id": 16,
}  # fmt: skip
DFLASH = BlockConfig(kind="dflash", block_size=4, **SIZES)
DSPARK = BlockConfig(kind="dspark", block_size=3, markov_rank=5, confidence_head=True, **SIZES)


def random_block_draft(config, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    draft = BlockDraft(config)
    for name, parameter in draft.named_parameters():
        values = torch.randn(parameter.shape, dtype=dtype)
        parameter.data = 1 + 0.2 * values if "norm" in name else 0.4 * values
    ids = torch.arange(config.vocab_size)
    if config.draft_vocab_size < config.vocab_size:
        ids = ids[1 :: config.vocab_size // config.draft_vocab_size][: config.draft_vocab_size]
    draft.d2t.copy_(ids - torch.arange(len(ids)))
    draft.t2d[ids] = True
    draft.aux_scale = 0.5 + torch.rand(3 * config.hidden_size, dtype=dtype)
    draft.compute_dtype = dtype
    return draft


def packed_blocks(samples, config, most=99, epoch=0, anchors=None):
    ids, masks, aux, final = zip(*samples, strict=True)
    if anchors is None:
        anchors = [sample_anchors(m, most, 0, epoch, f"{i:x}") for i, m in enumerate(masks)]
    return pack_blocks(ids, masks, aux, final, anchors, config.draft_tokens), anchors


def block_loss(draft, batch, loss="ce", decay=0.8):
    counts = torch.tensor([t.count for t in batch.targets], dtype=torch.float64)
    weights = decay ** torch.arange(len(counts), dtype=torch.float64)
    teacher = batch.final[batch.rows] @ teacher_weights(draft.config, batch.final.dtype).T
    teacher = teacher if draft.config.kind == "dspark" else None
    return draft(batch, teacher, (weights * counts).sum() / weights, loss=loss, chunk=5)


def equals_the_reference(config, samples, loss="ce", most=99):
    """Loss and every gradient of a random draft against the slow reference."""
    draft = random_block_draft(config)
    batch, anchors = packed_blocks(samples, config, most)
    out = block_loss(draft, batch, loss)
    out.loss.backward()
    w = {k: v.detach().clone().requires_grad_(v.is_floating_point()) for k, v in draft.state_dict().items()}
    vocabulary = (draft.d2t + torch.arange(config.draft_vocab_size)).tolist()
    n = config.draft_tokens
    sums, counts = [0.0] * n, [0] * n
    for (ids, mask, aux, final), at in zip(samples, anchors, strict=True):
        logits = final @ teacher_weights(config).T
        s, c = sample_losses(w, config, ids, mask, aux, logits, at, vocabulary, loss)
        sums, counts = [a + b for a, b in zip(sums, s, strict=True)], [a + b for a, b in zip(counts, c, strict=True)]
    total = sum(0.8**i * s for i, s in enumerate(sums)) / sum(0.8**i * c for i, c in enumerate(counts))
    total.backward()
    assert [t.count for t in batch.targets] == counts
    torch.testing.assert_close(out.loss.detach(), total.detach(), rtol=1e-12, atol=1e-12)
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(
                parameter.grad, w[name].grad, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
            )


__all__ = [
    "DFLASH",
    "DSPARK",
    "block_loss",
    "equals_the_reference",
    "packed_blocks",
    "random_block_draft",
    "random_samples",
]
