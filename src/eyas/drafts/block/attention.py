"""Attention of blocks: every slot sees its sample's context before the anchor, and its own block in both directions; no other block.

With a window W a slot at position p sees positions above p - W only, as engines count (their windows move with the query).
On a GPU this is flex attention, whose map of 128 x 128 tiles is made from the anchors: no mask exists as a whole. Elsewhere scores over the
context, sample by sample, and over the block share one softmax.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from eyas.drafts.block.anchors import BlockBatch

TILE = 128


class BlockMask:
    """Who sees whom in a batch of blocks of B slots, made once for all layers."""

    def __init__(self, batch: BlockBatch, slots: int, window: int | None):
        self.batch, self.slots, self.window = batch, slots, window
        self.flex = _flex_mask(batch, slots, window) if batch.anchors.is_cuda and len(batch.anchors) else None

    def attend(self, q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], scale: float) -> Tensor:
        """q [A * B, heads, D], context keys and values [T, kv_heads, D], own ones [A * B, kv_heads, D] -> [A * B, heads, D]."""
        if self.flex is None:
            return self._plain(q, context, own, scale)
        pad = -len(context[0]) % TILE  # own keys begin at a tile's edge
        keys, values = (torch.cat([c, c.new_zeros(pad, *c.shape[1:]), o]) for c, o in zip(context, own, strict=True))
        parts = (x.transpose(0, 1).unsqueeze(0) for x in (q, keys, values))
        out = _compiled_flex()(*parts, block_mask=self.flex, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    def _plain(self, q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], scale: float) -> Tensor:
        B, outs, at = self.slots, [], 0
        for count, start in zip(self.batch.blocks, self.batch.layout.key_offsets.tolist(), strict=False):
            if not count:
                continue
            anchors = self.batch.anchors[at : at + count]
            end = int(anchors[-1])
            rows = slice(at * B, (at + count) * B)
            k, v = (x[start:end] for x in context)
            k_own, v_own = (x[rows].unflatten(0, (count, B)) for x in own)
            outs.append(
                attend_blocks(q[rows].unflatten(0, (count, B)), k, v, k_own, v_own, anchors - start, scale, self.window)
            )
            at += count
        return torch.cat(outs).flatten(0, 1) if outs else q


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, k_own: Tensor, v_own: Tensor, anchors: Tensor, scale: float, window: int | None
) -> Tensor:
    """Blocks of one sample: q [A, B, heads, D], k, v [t, kv_heads, D] of its first t tokens, own ones [A, B, kv_heads, D], anchors [A]
    counted in the sample. Returns [A, B, heads, D]."""
    A, B, heads, D = q.shape
    kv_heads, acc = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    grouped = q.view(A, B, kv_heads, heads // kv_heads, D).to(acc)
    before = torch.einsum("abkgd,tkd->kgabt", grouped, k.to(acc)) * scale
    within = torch.einsum("abkgd,ackd->kgabc", grouped, k_own.to(acc)) * scale
    place = torch.arange(len(k), device=q.device)
    seen = (place < anchors.view(A, 1, 1)).expand(A, B, -1)
    if window is not None:
        seen = seen & (place > anchors.view(A, 1, 1) + torch.arange(B, device=q.device).view(1, B, 1) - window)
    p = torch.softmax(torch.cat([before.masked_fill(~seen, float("-inf")), within], -1), -1)
    p_before, p_within = p.split([len(k), B], -1)
    out = torch.einsum("kgabt,tkd->abkgd", p_before, v.to(acc)) + torch.einsum(
        "kgabc,ackd->abkgd", p_within, v_own.to(acc)
    )
    return out.reshape(A, B, heads, D).to(q.dtype)


def _flex_mask(batch: BlockBatch, B: int, window: int | None) -> Any:
    """flex attention's mask: which tiles of keys each tile of queries meets, and the rule within them."""
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    anchors, starts, device = batch.anchors, batch.starts, batch.anchors.device
    queries = len(anchors) * B
    context = batch.tokens + -batch.tokens % TILE
    tiles = -(-queries // TILE)
    rows = torch.arange(tiles, device=device)
    # Of each tile of queries, its first and last block; anchors ascend, and so do the starts of their samples.
    first = (rows * TILE) // B
    last = ((rows + 1) * TILE - 1).clamp_max(queries - 1) // B
    low = starts[first]
    if window is not None:
        low = torch.maximum(low, anchors[first] - window + 1).clamp_min(0)
    place = torch.arange(context // TILE, device=device)
    meets = (place >= (low // TILE).unsqueeze(1)) & (place * TILE < anchors[last].unsqueeze(1))
    own = torch.arange(tiles, device=device)
    near = ((own.unsqueeze(0) + 1) * TILE > (first * B).unsqueeze(1)) & (
        own.unsqueeze(0) * TILE < ((last + 1) * B).unsqueeze(1)
    )
    both = torch.cat([meets, near], 1).to(torch.int32)
    count = both.sum(1, dtype=torch.int32)
    order = torch.argsort(both, dim=1, descending=True, stable=True).to(torch.int32)

    def rule(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = (query // B).clamp_max(len(anchors) - 1)
        anchor = anchors[block]
        seen = (key < anchor) & (key >= starts[block])
        if window is not None:
            seen = seen & (key > anchor + query % B - window)
        return seen | ((key >= context) & ((key - context) // B == query // B))

    return FlexMask.from_kv_blocks(
        count[None, None], order[None, None], BLOCK_SIZE=TILE, mask_mod=rule, seq_lengths=(queries, context + queries)
    )


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
