"""The block draft: a few Qwen3 layers that draft a whole block of tokens in one pass (DFlash), with a Markov head beside (DSpark).

With tokens x, the target's auxiliary states g (side by side) and an anchor a (`anchors.py`):

    c_t    = hidden_norm(fc(g_t))                                  the context, one row per token, the same for every layer
    stream = Embed(x_a), Embed(mask), Embed(mask), ...             the block's slots, at positions a, a + 1, ...
    q from input_layernorm(stream); k, v from c_t (t < a) and from input_layernorm(stream): the same projections, k_norm and rope over both
    stream += o_proj(attention); stream += MLP(post_attention_layernorm(stream))
    logits of draft token i = head(norm(stream of its slot)) [+ W2 W1[x_{a+i}]]

| kind | slots of a block of n draft tokens | heads |
|---|---|---|
| dflash | n + 1: the anchor's own slot drafts nothing, slot i + 1 drafts token i | the target's |
| dspark | n: slot i drafts token i | and the Markov bias of the token before; a confidence head: sigma(w [norm(stream) ; W1[x_{a+i}]]) |

Weights carry the names that vLLM and SGLang read. Embedding and head are the target's, frozen, and in no file unless the vocabulary is reduced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.base.errors import InputError
from eyas.drafts.block.anchors import BlockBatch
from eyas.drafts.block.attention import BlockMask
from eyas.drafts.block.losses import CONFIDENCE_WEIGHT, dpace_weights, row_losses
from eyas.drafts.losses import chunked_loss, teacher_rows
from eyas.drafts.module import (
    Attention,
    DraftLoss,
    DraftModule,
    DraftSizes,
    Mlp,
    RMSNorm,
    apply_rope,
    finish_rows,
    linear,
    rms_norm,
)
from eyas.drafts.packing import StepTargets


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DraftSizes):
    """Shape of a block draft.

    Attributes:
        kind: dflash or dspark. block_size: slots of a block. mask_token_id: the target's token that stands in undrafted slots.
        sliding_window: how far every layer looks back, None for all. markov_rank: of DSpark's Markov head, 0 for DFlash.
        confidence_head: DSpark's.
    """

    kind: str
    block_size: int
    mask_token_id: int
    sliding_window: int | None = None
    markov_rank: int = 0
    confidence_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1 + self.first_slot:
            raise InputError(f"a block of {self.block_size} drafts nothing", "raise --block-size")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(
                f"mask token {self.mask_token_id} is outside the target's vocabulary of {self.vocab_size}",
                "give --mask-token-id one that the target has and no text holds",
            )
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise InputError(
                f"a window of {self.sliding_window} is shorter than a block of {self.block_size}",
                "widen --sliding-window",
            )

    @property
    def first_slot(self) -> int:
        """The slot that drafts token 0."""
        return 1 if self.kind == "dflash" else 0

    @property
    def draft_tokens(self) -> int:
        """n, draft tokens of a block."""
        return self.block_size - self.first_slot


class BlockLayer(nn.Module):
    """One Qwen3 decoder layer."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(H, eps)
        self.self_attn = Attention(config, H)
        self.self_attn.q_norm = RMSNorm(config.head_dim, eps)
        self.self_attn.k_norm = RMSNorm(config.head_dim, eps)
        self.post_attention_layernorm = RMSNorm(H, eps)
        self.mlp = Mlp(config)


class LayerWeights(NamedTuple):
    """One layer's weights in the compute dtype: q, k, v and gate, up fused; `kv` is the share of `qkv` that the context goes through."""

    norm: Tensor
    qkv: Tensor
    kv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    w_o: Tensor
    post_norm: Tensor
    w_gate_up: Tensor
    w_down: Tensor


class BlockDraft(DraftModule[BlockConfig]):
    """A DFlash or DSpark draft."""

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        H, rank = config.hidden_size, config.markov_rank
        self.lm_head.weight.requires_grad_(False)
        self.hidden_norm = RMSNorm(H, config.rms_norm_eps)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.num_layers)])
        if rank:
            self.markov_head = nn.Module()
            self.markov_head.markov_w1 = linear(rank, config.vocab_size)
            self.markov_head.markov_w2 = linear(rank, config.draft_vocab_size)
        if config.confidence_head:
            self.confidence_head = nn.Module()
            self.confidence_head.proj = linear(H + rank, 1)
            self.confidence_head.proj.bias = nn.Parameter(torch.full((1,), torch.nan))

    def prepared(self) -> list[LayerWeights]:
        """Each layer's weights as one pass computes with them."""
        dtype, prepared = self.compute_dtype, []
        layer: Any
        for layer in self.layers:
            attn, mlp = layer.self_attn, layer.mlp
            qkv = torch.cat([p.weight.to(dtype) for p in (attn.q_proj, attn.k_proj, attn.v_proj)])
            prepared.append(
                LayerWeights(
                    layer.input_layernorm.weight,
                    qkv,
                    qkv[self.config.num_attention_heads * self.config.head_dim :],
                    attn.q_norm.weight,
                    attn.k_norm.weight,
                    attn.o_proj.weight.to(dtype),
                    layer.post_attention_layernorm.weight,
                    torch.cat([mlp.gate_proj.weight.to(dtype), mlp.up_proj.weight.to(dtype)]),
                    mlp.down_proj.weight.to(dtype),
                )
            )
        return prepared

    def context(self, aux: Tensor, positions: Tensor, weights: list[LayerWeights]) -> list[tuple[Tensor, Tensor]]:
        """Auxiliary states [T, L*H] at positions [T] -> each layer's keys and values [T, kv_heads, D]."""
        kv_heads, eps = self.config.num_key_value_heads, self.config.rms_norm_eps
        c = self.hidden_norm(self.scaled_aux(aux) @ self.fc.weight.to(self.compute_dtype).T)
        cos, sin = self.rope(positions)
        fused = (c @ torch.cat([w.kv for w in weights]).T).view(len(c), len(weights), 2, kv_heads, -1)
        return [
            (apply_rope(rms_norm(fused[:, i, 0], w.k_norm, eps), cos, sin), fused[:, i, 1])
            for i, w in enumerate(weights)
        ]

    def slots(self, anchor_tokens: Tensor, slots: int) -> Tensor:
        """[A] token ids -> the stream of their blocks [A * slots, H] before the first layer."""
        ids = anchor_tokens.new_full((len(anchor_tokens), slots), self.config.mask_token_id)
        ids[:, 0] = anchor_tokens
        return self.embed_tokens(ids.flatten()).to(self.compute_dtype)

    def run_layers(self, stream: Tensor, positions: Tensor, weights: list[LayerWeights], attend: Any) -> Tensor:
        """The blocks' stream [n, H] at positions [n] through all layers and the last norm. attend: (layer, q, k, v) -> [n, heads, D]."""
        config, eps = self.config, self.config.rms_norm_eps
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        cos, sin = self.rope(positions)
        for i, w in enumerate(weights):
            qkv = (rms_norm(stream, w.norm, eps) @ w.qkv.T).view(len(stream), heads + 2 * kv_heads, config.head_dim)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
            q = apply_rope(rms_norm(q, w.q_norm, eps), cos, sin)
            k = apply_rope(rms_norm(k, w.k_norm, eps), cos, sin)
            attended = attend(i, q, k, v)
            stream = finish_rows(stream, attended.flatten(1), w.w_o, w.post_norm, w.w_gate_up, w.w_down, eps)
        return rms_norm(stream, self.norm.weight, eps)

    def block_rows(self, batch: BlockBatch) -> Tensor:
        """[A, n, H]: of each anchor's block, norm(stream) of the slots that draft."""
        config, B, weights = self.config, self.config.block_size, self.prepared()
        mask = BlockMask(batch, B, config.sliding_window)
        context = self.context(batch.aux, batch.positions, weights)
        places = batch.positions[batch.anchors].unsqueeze(1) + torch.arange(B, device=batch.anchors.device)
        normed = self.run_layers(
            self.slots(batch.token_ids[batch.anchors], B),
            places.flatten(),
            weights,
            lambda i, q, k, v: mask.attend(q, context[i], (k, v), config.head_dim**-0.5),
        )
        return normed.unflatten(0, (len(batch.anchors), B))[:, config.first_slot :]

    def bias(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """DSpark: W1 rows [A, r] of the tokens [A] before, and W2 [D, r]; their product is added to the logits."""
        head: Any = self.markov_head
        return F.embedding(tokens, head.markov_w1.weight).to(self.compute_dtype), head.markov_w2.weight.to(
            self.compute_dtype
        )

    def confidence(self, normed: Tensor, before: Tensor) -> Tensor:
        """Logit of each draft token's chance to be accepted [A], in fp32; normed [A, H], before [A, r] the Markov rows."""
        proj: Any = self.confidence_head.proj
        acc = torch.promote_types(normed.dtype, torch.float32)
        return F.linear(torch.cat([normed, before], -1).to(acc), proj.weight.to(acc), proj.bias.to(acc)).squeeze(-1)

    def draft_from(self, normed: Tensor, first: Tensor, head: Tensor) -> Tensor:
        """Greedy draft tokens [A, k] (target ids) of blocks [A, k, H] whose anchors are the tokens `first` [A]."""
        tokens, before = [], first
        for i in range(normed.shape[1]):
            logits = normed[:, i] @ head.T
            if self.config.markov_rank:
                rows, w2 = self.bias(before)
                logits = logits + rows @ w2.T
            before = self.target_ids(logits.argmax(-1))
            tokens.append(before)
        return torch.stack(tokens, 1)

    @torch.no_grad()
    def draft_tokens(self, batch: BlockBatch, steps: int, chunk: int = 2048) -> Tensor:
        """[R, k] target ids, as `simulation` counts them: the row before each anchor has the greedy draft tokens of its block, others -1."""
        head = self.lm_head.weight.to(self.compute_dtype)
        normed, first = self.block_rows(batch)[:, :steps], batch.token_ids[batch.anchors]
        parts = zip(normed.split(chunk), first.split(chunk), strict=True)
        drafted = torch.cat([self.draft_from(*part, head) for part in parts])
        found = drafted.new_full((batch.tokens, steps), -1)
        found[batch.anchors - 1] = drafted
        return found[batch.rows]

    def forward(
        self,
        batch: BlockBatch,
        teacher: Tensor | None = None,
        divisors: Tensor | None = None,
        *,
        loss: str = "ce",
        chunk: int = 2048,
        draft_steps: int | None = None,
    ) -> DraftLoss | Tensor:
        """Loss of a packed batch; with `draft_steps`, the `draft_tokens` instead (through DDP or FSDP alike).

        Args:
            batch: on the draft's device. teacher: [R, D], the target's logits over the draft vocabulary for the query rows' tokens (DSpark).
            divisors: [n]; the summed loss of draft token i is divided by divisors[i].
            loss: for DFlash `ce` or `dpace`. chunk: rows of logits at a time.
        """
        if draft_steps is not None:
            return self.draft_tokens(batch, draft_steps, chunk)
        if divisors is None:
            raise TypeError("a loss needs the divisors")
        normed = self.block_rows(batch)
        measured = () if teacher is None else teacher_rows(teacher, chunk, compiled=self.compiled)
        targets = batch.targets
        if loss == "dpace":
            targets = self._dpace(normed.detach(), batch, chunk)
        parts = [self._slot_loss(i, normed[:, i], batch, t, measured, chunk) for i, t in enumerate(targets)]
        losses, correct, alpha = (torch.stack(x) for x in zip(*parts, strict=True))
        return DraftLoss((losses / divisors).sum(), losses.detach(), correct, alpha)

    def _slot_loss(
        self, i: int, x: Tensor, batch: BlockBatch, targets: StepTargets, measured: Any, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft token i of all blocks [A, H]: sums of the weighed loss, of right tokens and of alpha over supervised ones."""
        rows = row_losses(self.config.kind, self.compiled)
        labels = self._labels(batch, i)[targets.rows]
        weights = targets.weights.to(torch.promote_types(x.dtype, torch.float32))
        real = (torch.arange(len(weights), device=x.device) < targets.count).to(weights.dtype)
        products = [(x, self.lm_head.weight.to(self.compute_dtype))]
        if self.config.markov_rank:
            products.append(self.bias(batch.token_ids[self._ahead(batch, i)]))

        def measure(z: Tensor, at: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            return rows(z, labels[at], weights[at], *((*measured, targets.states[at]) if measured else ()))

        loss, correct, alpha = chunked_loss(measure, targets, chunk, *products)
        if self.config.confidence_head:
            said = self.confidence(x[targets.rows], products[1][0][targets.rows])
            bce = F.binary_cross_entropy_with_logits(said, alpha.detach(), reduction="none")
            loss = loss + CONFIDENCE_WEIGHT * (bce * weights).sum()
        return loss, (correct * real).sum(), (alpha * real).sum()

    def _ahead(self, batch: BlockBatch, steps: int) -> Tensor:
        """[A] places `steps` behind each anchor; over the end of the row where nothing is supervised: its last one."""
        return (batch.anchors + steps).clamp_max(batch.tokens - 1)

    def _labels(self, batch: BlockBatch, i: int) -> Tensor:
        """[A] draft ids of the tokens that draft token i should be, -1 outside the draft vocabulary."""
        tokens = batch.token_ids[self._ahead(batch, i + 1)]
        return torch.where(self.t2d[tokens], self.t2d.cumsum(0)[tokens] - 1, -1)

    @torch.no_grad()
    def _dpace(self, normed: Tensor, batch: BlockBatch, chunk: int) -> tuple[StepTargets, ...]:
        """The batch's targets with D-PACE's weights."""
        A, n = normed.shape[:2]
        chance, supervised = normed.new_zeros(2, A, n, dtype=torch.promote_types(normed.dtype, torch.float32))
        head = self.lm_head.weight.to(self.compute_dtype)
        for i, targets in enumerate(batch.targets):
            rows, labels = targets.rows[: targets.count], self._labels(batch, i)
            for part in rows.split(chunk):
                log_q = torch.log_softmax(normed[part, i] @ head.T, -1, dtype=chance.dtype)
                known = log_q.gather(-1, labels[part].clamp_min(0).unsqueeze(-1)).squeeze(-1).exp()
                chance[part, i] = torch.where(labels[part] >= 0, known, 0)
            supervised[rows, i] = 1
        weights = dpace_weights(chance, supervised)
        return tuple(replace(t, weights=t.weights * weights[t.rows, i]) for i, t in enumerate(batch.targets))
