"""What every draft has, whatever its kind: sizes, the target's embedding and head, `fc`, norms, rope, vocabulary maps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from eyas.base.errors import ContractError, InputError
from eyas.drafts.losses import acc_dtype

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class DraftSizes:
    """Sizes that every kind of draft has.

    Attributes:
        hidden_size: H, the target's. vocab_size: V, the target's. draft_vocab_size: D.
        aux_layer_ids: the target's layers that feed the draft (our ids), in the order their states lie side by side.
        target_layers: N of the target, kept so that ids can be translated at export.
        rope: `rope_type` (default, linear, llama3, yarn), `rope_theta` and that kind's own keys, as in a Hugging Face config.
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


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(torch.full((outputs, inputs), torch.nan))  # NaN first: a weight nobody filled shows
    return layer


class Attention(nn.Module):
    def __init__(self, config: DraftSizes, inputs: int):
        super().__init__()
        self.q_proj = linear(inputs, config.num_attention_heads * config.head_dim)
        self.k_proj = linear(inputs, config.num_key_value_heads * config.head_dim)
        self.v_proj = linear(inputs, config.num_key_value_heads * config.head_dim)
        self.o_proj = linear(config.num_attention_heads * config.head_dim, config.hidden_size)


class Mlp(nn.Module):
    def __init__(self, config: DraftSizes):
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)


class DraftLoss(NamedTuple):
    """What a forward pass returns: `loss` to differentiate, and per step (K entries each) sums over supervised rows."""

    loss: Tensor
    losses: Tensor
    correct: Tensor
    alpha: Tensor


C = TypeVar("C", bound=DraftSizes)


class DraftModule(nn.Module, Generic[C]):
    """What the kinds of draft share; a kind adds `layers` and its forward pass.

    Buffers: `d2t` [D] int64 (target id = j + d2t[j]), `t2d` [V] bool, `aux_scale` [L*H] fp32: what auxiliary states are multiplied by
    before `fc` (1 / their measured RMS), folded into `fc` at export. `embed_tokens` is frozen, the target's own
    unless `own_embedding`.
    """

    d2t: Tensor
    t2d: Tensor
    aux_scale: Tensor
    inv_freq: Tensor

    def __init__(self, config: C):
        super().__init__()
        self.config = config
        H, aux = config.hidden_size, len(config.aux_layer_ids)
        self.embed_tokens = nn.Embedding(1, 1, device="meta")
        self.embed_tokens.weight = nn.Parameter(torch.full((config.vocab_size, H), torch.nan), requires_grad=False)
        self.fc = linear(aux * H, H)
        self.norm = RMSNorm(H, config.rms_norm_eps)
        self.lm_head = linear(H, config.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.register_buffer("aux_scale", torch.ones(aux * H))
        inv_freq, self.rope_scale = rope_frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.compute_dtype = torch.float32
        self.compiled = False

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

    def scaled_aux(self, aux: Tensor) -> Tensor:
        """Auxiliary states [T, L*H] as stored -> the same, scaled, in the compute dtype."""
        acc = acc_dtype(aux)
        return (aux.to(acc) * self.aux_scale.to(acc)).to(self.compute_dtype)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [n, D/2] fp32 (fp64 when computing in fp64), for int64 positions [n]."""
        acc = torch.promote_types(self.compute_dtype, torch.float32)
        angles = positions.to(acc).unsqueeze(-1) * self.inv_freq.to(acc)
        return angles.cos() * self.rope_scale, angles.sin() * self.rope_scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [n, heads, D] by cos, sin [n, D/2], halves paired (first half with second), as Llama does."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def finish_rows(residual, attended, w_o, post_norm, w_gate_up, w_down, eps: float):
    """Residual, output projection and gated MLP: [n, H] -> u [n, H]."""
    u = residual + attended @ w_o.T
    gate, up = (rms_norm(u, post_norm, eps) @ w_gate_up.T).chunk(2, -1)
    return u + (nn.functional.silu(gate) * up) @ w_down.T


def rope_frequencies(config: DraftSizes) -> tuple[Tensor, float]:
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
