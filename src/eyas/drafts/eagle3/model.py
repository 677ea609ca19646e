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

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from eyas.base.errors import ContractError, InputError
from eyas.drafts.compiled import compile_piece
from eyas.drafts.eagle3.attention import ttt_attention
from eyas.drafts.losses import StepLoss, acc_dtype, step_loss, teacher_rows
from eyas.drafts.packing import Batch

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shape of a draft.

    Attributes:
        hidden_size: H, the target's. vocab_size: V, the target's. draft_vocab_size: D.
        aux_layer_ids: the target's layers that feed the draft (our ids), in the order their states lie side by side.
        target_layers: N of the target, kept so that ids can be translated at export.
        rope: `rope_type` (default, linear, llama3, yarn), `rope_theta` and that kind's own keys, as in a Hugging Face config.
        norm_aux: norm each auxiliary state before `fc` (EAGLE-3.1). norm_before_residual: the residual starts from the normed h.
        norm_output: carry norm(u), not u, to the next step (EAGLE-3.1).
        own_embedding: the draft brought an embedding that is not the target's (`--init-from`, `eyas import`); its files hold it.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    target_layers: int
    num_layers: int = 1
    rms_norm_eps: float = 1e-5
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 4096
    norm_aux: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_embedding: bool = False

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"{self.num_attention_heads} attention heads are not a multiple of {self.num_key_value_heads} key-value heads",
                "choose --kv-heads that divides --heads",
            )
        if self.rope.get("rope_type", "default") not in ROPE_KINDS:
            raise InputError(
                f"rope kind {self.rope.get('rope_type')!r} is not one that engines draft with ({', '.join(ROPE_KINDS)})",
                "pass --rope default to train the draft with plain rope of the same base",
            )
        if self.draft_vocab_size > self.vocab_size:
            raise InputError(
                f"draft vocabulary of {self.draft_vocab_size} is larger than the target's {self.vocab_size}",
                "lower --draft-vocab-size",
            )


class RMSNorm(nn.Module):
    """Root-mean-square norm with a plain gain; the arithmetic is fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), torch.nan))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in fp32 (fp64 for fp64), returned in x's dtype."""
    acc = x.to(acc_dtype(x))
    return (acc * torch.rsqrt(acc.square().mean(-1, keepdim=True) + eps) * weight.to(acc.dtype)).to(x.dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(torch.full((outputs, inputs), torch.nan))  # NaN first: a weight nobody filled shows
    return layer


class _Attention(nn.Module):
    def __init__(self, config: DraftConfig, inputs: int):
        super().__init__()
        self.q_proj = _linear(inputs, config.num_attention_heads * config.head_dim)
        self.k_proj = _linear(inputs, config.num_key_value_heads * config.head_dim)
        self.v_proj = _linear(inputs, config.num_key_value_heads * config.head_dim)
        self.o_proj = _linear(config.num_attention_heads * config.head_dim, config.hidden_size)


class _Mlp(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)


class DraftLayer(nn.Module):
    """One decoder layer. The first one takes [embedding ; hidden] (2H) into q, k, v; later ones are ordinary."""

    def __init__(self, config: DraftConfig, first: bool):
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(H, eps)
        if first:
            self.hidden_norm = RMSNorm(H, eps)
        self.self_attn = _Attention(config, 2 * H if first else H)
        self.post_attention_layernorm = RMSNorm(H, eps)
        self.mlp = _Mlp(config)


class LayerWeights(NamedTuple):
    """One layer's weights in the compute dtype, as the K steps use them."""

    w_e: Tensor  # [(heads + 2 kv_heads) * D, H] of the embedding half; [.., 0] in later layers
    w_h: Tensor  # [(heads + 2 kv_heads) * D, H] of the hidden half
    norm: Tensor  # hidden_norm (first layer) or input_layernorm
    w_o: Tensor
    post_norm: Tensor
    w_gate_up: Tensor
    w_down: Tensor


class DraftLoss(NamedTuple):
    """What a forward pass returns: `loss` to differentiate, and per step (K entries each) sums over supervised rows."""

    loss: Tensor
    losses: Tensor
    correct: Tensor
    alpha: Tensor


class Draft(nn.Module):
    """The draft with its vocabulary maps.

    Buffers: `d2t` [D] int64 (target id = j + d2t[j]), `t2d` [V] bool, `aux_scale` [L*H] fp32: what auxiliary states are multiplied by
    before `fc` (1 / their measured RMS), folded into `fc` at export. `embed_tokens` is frozen, the target's own
    unless `own_embedding`.
    """

    d2t: Tensor
    t2d: Tensor
    aux_scale: Tensor
    inv_freq: Tensor

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        H, aux = config.hidden_size, len(config.aux_layer_ids)
        self.embed_tokens = nn.Embedding(1, 1, device="meta")
        self.embed_tokens.weight = nn.Parameter(torch.full((config.vocab_size, H), torch.nan), requires_grad=False)
        if config.norm_aux:
            self.aux_norms = nn.ModuleList([RMSNorm(H, config.rms_norm_eps) for _ in range(aux)])
        self.fc = _linear(aux * H, H)
        self.layers = nn.ModuleList([DraftLayer(config, first=i == 0) for i in range(config.num_layers)])
        self.norm = RMSNorm(H, config.rms_norm_eps)
        self.lm_head = _linear(H, config.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.register_buffer("aux_scale", torch.ones(aux * H))
        inv_freq, self.rope_scale = rope_frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.compute_dtype = torch.float32
        self.compiled = False

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        """`layers`, with their type."""
        return cast("list[DraftLayer]", list(self.layers))

    def check_filled(self) -> None:
        """Raise ContractError naming weights that are still NaN: nobody loaded or initialised them."""
        missing = [name for name, p in self.named_parameters() if not bool(torch.isfinite(p).all())]
        if missing:
            raise ContractError(
                f"draft weights never filled (or not finite): {', '.join(missing[:8])}",
                "the checkpoint lacks them; see --init-from",
            )

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft vocabulary ids (any shape) -> target token ids."""
        return draft_ids + self.d2t[draft_ids]

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
        H = self.config.hidden_size
        acc = acc_dtype(aux)
        scaled = (aux.to(acc) * self.aux_scale.to(acc)).to(self.compute_dtype)
        if self.config.norm_aux:
            scaled = torch.cat([norm(x) for norm, x in zip(self.aux_norms, scaled.split(H, -1), strict=True)], -1)
        return scaled @ self.fc.weight.to(self.compute_dtype).T

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [n, D/2] fp32 (fp64 when computing in fp64), for int64 positions [n]."""
        acc = torch.promote_types(self.compute_dtype, torch.float32)
        angles = positions.to(acc).unsqueeze(-1) * self.inv_freq.to(acc)
        return angles.cos() * self.rope_scale, angles.sin() * self.rope_scale

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


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [n, heads, D] by cos, sin [n, D/2], halves paired (first half with second), as Llama does."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


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


def finish_rows(residual, attended, w_o, post_norm, w_gate_up, w_down, eps: float):
    """Residual, output projection and gated MLP: [n, H] -> u [n, H]."""
    u = residual + attended @ w_o.T
    gate, up = (rms_norm(u, post_norm, eps) @ w_gate_up.T).chunk(2, -1)
    return u + (nn.functional.silu(gate) * up) @ w_down.T


@cache
def _pieces(compiled: bool):
    pieces = (project_rows, _project_q, _project_kv, finish_rows, rms_norm)
    return tuple(compile_piece(p) for p in pieces) if compiled else pieces


def rope_frequencies(config: DraftConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] fp32 and the factor on cos and sin, by the rope kind's own formula (transformers')."""
    kind = config.rope.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (float(config.rope["rope_theta"]) ** exponents), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope),
    )
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](llama, torch.device("cpu"))
    return inv_freq.float(), float(scale)
