"""The EAGLE-3 draft: one small decoder layer that reads the target's states and drafts the tokens after the next one.

With tokens x, the target's auxiliary states g (a few layers, side by side) and training-time-test step k = 0..K-1, row i:

    h^0 = fc(g_i)                                        h^{k+1} = u of step k
    z   = [input_layernorm(Embed(x_{i+1+k})) ; hidden_norm(h)]
    u   = h + Attention(z);  u = u + MLP(post_attention_layernorm(u))
    logits over the draft vocabulary = lm_head(norm(u)), for x_{i+2+k}

Weights carry the names that vLLM and SGLang read. Three things keep it fast and change no number beyond rounding:
- The embedding's half of q, k, v does not depend on k: it is computed once per token and shifted by one for each step.
- Queries, MLP and head run only for rows that have something to learn (`packing.py`).
- Master weights stay fp32; one cast copy per forward pass is what all K steps compute with.

The forward pass is a page: `Draft.ttt_rows`. Sizes, the draft vocabulary and weights from a target are in `init.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from eyas.base.errors import ContractError
from eyas.drafts.compiled import compile_piece
from eyas.drafts.eagle3.attention import ttt_attention
from eyas.drafts.losses import StepLoss, step_loss, teacher_rows
from eyas.drafts.module import (
    Attention,
    DraftLoss,
    DraftModule,
    DraftSizes,
    Mlp,
    RMSNorm,
    apply_rope,
    finish_rows,
    rms_norm,
)
from eyas.drafts.packing import Batch


@dataclass(frozen=True, kw_only=True)
class DraftConfig(DraftSizes):
    """Shape of an EAGLE-3 draft.

    Attributes:
        norm_aux: norm each auxiliary state before `fc` (EAGLE-3.1). norm_before_residual: the residual starts from the normed h.
        norm_output: carry norm(u), not u, to the next step (EAGLE-3.1).
    """

    norm_aux: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


class DraftLayer(nn.Module):
    """One decoder layer. The first one takes [embedding ; hidden] (2H) into q, k, v; later ones are ordinary."""

    def __init__(self, config: DraftConfig, first: bool):
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(H, eps)
        if first:
            self.hidden_norm = RMSNorm(H, eps)
        self.self_attn = Attention(config, 2 * H if first else H)
        self.post_attention_layernorm = RMSNorm(H, eps)
        self.mlp = Mlp(config)


class LayerWeights(NamedTuple):
    """One layer's weights in the compute dtype, as the K steps use them."""

    w_e: Tensor  # [(heads + 2 kv_heads) * D, H] of the embedding half; [.., 0] in later layers
    w_h: Tensor  # [(heads + 2 kv_heads) * D, H] of the hidden half
    norm: Tensor  # hidden_norm (first layer) or input_layernorm
    w_o: Tensor
    post_norm: Tensor
    w_gate_up: Tensor
    w_down: Tensor


class Draft(DraftModule[DraftConfig]):
    """The EAGLE-3 draft with its vocabulary maps."""

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        if config.norm_aux:
            norms = [RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.aux_layer_ids]
            self.aux_norms = nn.ModuleList(norms)
        self.layers = nn.ModuleList([DraftLayer(config, first=i == 0) for i in range(config.num_layers)])

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        """`layers`, with their type."""
        return cast("list[DraftLayer]", list(self.layers))

    def prepared(self) -> list[LayerWeights]:
        """Each layer's weights cast to the compute dtype, with q, k, v and gate, up fused and the first layer's halves apart."""
        H, dtype = self.config.hidden_size, self.compute_dtype
        prepared = []
        for i, layer in enumerate(self.decoder_layers):
            attn, mlp = layer.self_attn, layer.mlp
            qkv = torch.cat([p.weight.to(dtype) for p in (attn.q_proj, attn.k_proj, attn.v_proj)])
            w_e = qkv[:, : H if i == 0 else 0].contiguous()
            prepared.append(
                LayerWeights(
                    w_e,
                    (qkv[:, H:] if i == 0 else qkv).contiguous(),
                    (layer.hidden_norm if i == 0 else layer.input_layernorm).weight,
                    attn.o_proj.weight.to(dtype),
                    layer.post_attention_layernorm.weight,
                    torch.cat([mlp.gate_proj.weight.to(dtype), mlp.up_proj.weight.to(dtype)]),
                    mlp.down_proj.weight.to(dtype),
                )
            )
        return prepared

    def combine_aux(self, aux: Tensor) -> Tensor:
        """Auxiliary states [T, L*H] as stored -> h^0 [T, H] in the compute dtype."""
        scaled = self.scaled_aux(aux)
        if self.config.norm_aux:
            parts = scaled.split(self.config.hidden_size, -1)
            scaled = torch.cat([norm(x) for norm, x in zip(self.aux_norms, parts, strict=True)], -1)
        return scaled @ self.fc.weight.to(self.compute_dtype).T

    def ttt_rows(self, batch: Batch, steps: int) -> list[Tensor]:
        """K training-time-test steps over a packed batch.

        Returns:
            per step, norm(u) [R, H] of the query rows: what `lm_head` reads. Row r at step k predicts the token 2 + k after it.
        """
        config, rows, all_rows = self.config, batch.rows, batch.layout.all_rows
        if config.num_layers > 1 and not all_rows:
            raise ContractError("a draft of several layers needs every row as a query", "pack with skip_prompts=False")
        weights = self.prepared()
        q_size = config.num_attention_heads * config.head_dim
        eps, heads, kv_heads = config.rms_norm_eps, config.num_attention_heads, config.num_key_value_heads
        project, project_q, project_kv, finish, norm = _pieces(self.compiled)

        embedded = self.embed_tokens(batch.token_ids).to(self.compute_dtype)
        first = self.decoder_layers[0]
        # The embedding half of q, k, v for every token, padded so that row i can look K tokens ahead.
        e_part = norm(embedded, first.input_layernorm.weight, eps) @ weights[0].w_e.T
        e_part = torch.cat([e_part, e_part.new_zeros(steps, e_part.shape[1])])
        h = self.combine_aux(batch.aux)

        prefix: list[tuple[Tensor, Tensor]] = []  # per layer, the step-0 keys and values of all T tokens
        own: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.layers]
        outputs = []
        for step in range(steps):
            row_positions = batch.positions[rows] + 1 + step
            cos, sin = self.rope(row_positions)
            for i, w in enumerate(weights):
                ahead = slice(1 + step, 1 + step + len(rows)) if all_rows else rows + 1 + step
                e_rows = e_part[ahead] if i == 0 else None
                if step == 0 and not all_rows:
                    # Keys and values of every token, queries of the rows that matter.
                    k, v = project_kv(
                        h,
                        e_part[1 : 1 + len(h), q_size:],
                        w.norm,
                        w.w_h[q_size:],
                        *self.rope(batch.positions + 1),
                        eps,
                        kv_heads,
                    )
                    prefix.append((k, v))
                    h = h[rows]
                    q = project_q(h, e_part[ahead, :q_size], w.norm, w.w_h[:q_size], cos, sin, eps, heads)
                else:
                    q, k, v = project(h, e_rows, w.norm, w.w_h, cos, sin, eps, heads, kv_heads)
                    if step == 0:
                        prefix.append((k, v))
                    else:
                        own[i][0].append(k)
                        own[i][1].append(v)
                attended = ttt_attention(
                    q, *prefix[i], *own[i], batch.layout, config.head_dim**-0.5, compiled=self.compiled
                )
                residual = norm(h, w.norm, eps) if i == 0 and config.norm_before_residual else h
                h = finish(residual, attended.flatten(1), w.w_o, w.post_norm, w.w_gate_up, w.w_down, eps)
            normed = norm(h, self.norm.weight, eps)
            outputs.append(normed)
            if config.norm_output:
                h = normed
        return outputs

    @torch.no_grad()
    def draft_tokens(self, batch: Batch, steps: int, chunk: int = 2048) -> Tensor:
        """[R, K] target ids: each query row's greedy draft tokens for the places 2, 3, ... after it, reading the true tokens between."""
        head = self.lm_head.weight.to(self.compute_dtype)
        found = [
            torch.cat([(part @ head.T).argmax(-1) for part in x.split(chunk)]) for x in self.ttt_rows(batch, steps)
        ]
        return self.target_ids(torch.stack(found, 1))

    def forward(
        self,
        batch: Batch,
        teacher: Tensor | None = None,
        divisors: Tensor | None = None,
        *,
        loss: str = "kl",
        chunk: int = 2048,
        draft_steps: int | None = None,
    ) -> DraftLoss | Tensor:
        """Loss of a packed batch, all K = len(batch.targets) steps; with `draft_steps`, the `draft_tokens` instead (through DDP or FSDP alike).

        Args:
            batch: on the draft's device. teacher: [R, D], the target's logits over the draft vocabulary for the query rows' tokens.
            divisors: [K]; step k's summed loss is divided by divisors[k] (supervised rows over all ranks and micro-batches,
                over the step's weight).
            loss: `kl`, `tv` or `lk`. chunk: rows of logits at a time.
        """
        if draft_steps is not None:
            return self.draft_tokens(batch, draft_steps, chunk)
        if teacher is None or divisors is None:
            raise TypeError("a loss needs the teacher's logits and the divisors")
        head = self.lm_head.weight.to(self.compute_dtype)
        measured = teacher_rows(teacher, chunk, compiled=self.compiled)
        parts: list[StepLoss] = [
            step_loss(x, head, measured, targets, loss, chunk=chunk, compiled=self.compiled)
            for x, targets in zip(self.ttt_rows(batch, len(batch.targets)), batch.targets, strict=True)
        ]
        losses = torch.stack([p.loss for p in parts])
        return DraftLoss(
            (losses / divisors).sum(),
            losses.detach(),
            torch.stack([p.correct for p in parts]),
            torch.stack([p.alpha for p in parts]),
        )


# The element-wise parts and the products between them, as plain functions, so that torch.compile can fuse each as a whole.


def project_rows(h, e_rows, norm, w, cos, sin, eps: float, heads: int, kv_heads: int):
    """q, k, v of rows [n, H], rope applied; e_rows: the embedding's share (first layer) or None."""
    qkv = rms_norm(h, norm, eps) @ w.T
    if e_rows is not None:
        qkv = qkv + e_rows
    q, k, v = qkv.view(len(h), heads + 2 * kv_heads, -1).split([heads, kv_heads, kv_heads], 1)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v.contiguous()


def _project_q(h, e_rows, norm, w, cos, sin, eps: float, heads: int):
    return apply_rope((rms_norm(h, norm, eps) @ w.T + e_rows).view(len(h), heads, -1), cos, sin)


def _project_kv(h, e_rows, norm, w, cos, sin, eps: float, kv_heads: int):
    k, v = (rms_norm(h, norm, eps) @ w.T + e_rows).view(len(h), 2 * kv_heads, -1).chunk(2, 1)
    return apply_rope(k, cos, sin), v.contiguous()


@cache
def _pieces(compiled: bool):
    pieces = (project_rows, _project_q, _project_kv, finish_rows, rms_norm)
    return tuple(compile_piece(p) for p in pieces) if compiled else pieces
