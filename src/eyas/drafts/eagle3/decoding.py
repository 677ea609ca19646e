"""The draft at work: one token after the other, with a key-value cache, for `evaluation.decode`.

Training sees all rows at once; here rows come as the target accepts tokens. A *committed* row pairs the target's state of a token with
the token after it (training's step 0) and stays in the cache. A *chain* then runs k - 1 further rows from the last committed one on the
draft tokens (training's steps 1..k-1): each sees the committed rows and the chain's earlier rows, and is forgotten afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafts.eagle3.model import Draft, project_rows
from eyas.drafts.module import finish_rows, rms_norm


class DraftDecoder:
    """A draft with its cache, for a batch of B sequences that advance by different numbers of tokens."""

    def __init__(self, draft: Draft, batch: int, device: torch.device | str):
        self.draft, self.weights = draft, draft.prepared()
        config = draft.config
        shape = (batch, 0, config.num_key_value_heads, config.head_dim)
        dtype = draft.compute_dtype
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in draft.layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in draft.layers]
        self.seen = torch.zeros(batch, 0, dtype=torch.bool, device=device)  # cached rows that are real, per sequence
        self.head = draft.lm_head.weight.to(dtype)
        self.h = torch.zeros(batch, config.hidden_size, dtype=dtype, device=device)  # the last committed row's output
        self.position = torch.zeros(batch, dtype=torch.int64, device=device)

    def commit(self, aux: Tensor, tokens: Tensor, positions: Tensor, real: Tensor) -> None:
        """Add rows: aux [B, S, L*H], the target's states; tokens [B, S], the token after each; positions [B, S] of the states.

        real: [B, S] bool; the others (padding, rejected draft tokens) stay in the cache as holes. Each sequence has at least one.
        """
        B, S = tokens.shape
        among = torch.ones(S, S, dtype=torch.bool, device=tokens.device).tril() & real.unsqueeze(1)
        # A hole sees itself, so that its softmax is defined; nothing ever sees a hole.
        among = among | torch.eye(S, dtype=torch.bool, device=tokens.device)
        allowed = torch.cat([self.seen.unsqueeze(1).expand(B, S, -1), among], -1)
        h = self.draft.combine_aux(aux.flatten(0, 1)).view(B, S, -1)
        u = self._rows(h, tokens, positions + 1, allowed)
        self.seen = torch.cat([self.seen, real], 1)
        last = (real.long() * torch.arange(1, S + 1, device=tokens.device)).argmax(1)
        self.h = u[torch.arange(B), last]
        self.position = positions[torch.arange(B), last] + 1

    def chain(self, k: int, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
        """k draft tokens [B, k] as target ids after the last committed one; when sampling also their distributions [B, k, V]."""
        keys, values = list(self.keys), list(self.values)
        h, distributions = self.h, []
        drafted: list[Tensor] = []
        seen = self.seen
        for step in range(k):
            if step:
                seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
                carried = (
                    rms_norm(h, self.draft.norm.weight, self.draft.norm.eps) if self.draft.config.norm_output else h
                )
                h = self._rows(
                    carried.unsqueeze(1),
                    drafted[-1].unsqueeze(1),
                    (self.position + step).unsqueeze(1),
                    seen.unsqueeze(1),
                )[:, 0]
            logits = rms_norm(h, self.draft.norm.weight, self.draft.norm.eps) @ self.head.T
            if temperature == 0:
                drafted.append(self.draft.target_ids(logits.argmax(-1)))
            else:
                q = torch.softmax(logits.float() / temperature, -1)
                picked = torch.multinomial(q, 1, generator=generator).squeeze(1)
                drafted.append(self.draft.target_ids(picked))
                full = torch.zeros(len(q), self.draft.config.vocab_size, dtype=q.dtype, device=q.device)
                distributions.append(
                    full.scatter_(1, self.draft.target_ids(torch.arange(q.shape[1], device=q.device)).expand_as(q), q)
                )
        self.keys, self.values = keys, values
        return torch.stack(drafted, 1), torch.stack(distributions, 1) if distributions else None

    def _rows(self, h: Tensor, tokens: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        """Run rows [B, S] through the layers and append their keys and values. allowed: [B, S, cached + S] bool. Returns u [B, S, H]."""
        config, (B, S) = self.draft.config, tokens.shape
        heads, kv_heads, eps = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
        cos, sin = self.draft.rope(positions.flatten())
        embedded = self.draft.embed_tokens(tokens.flatten()).to(h.dtype)
        e_rows: Tensor | None = (
            rms_norm(embedded, self.draft.decoder_layers[0].input_layernorm.weight, eps) @ self.weights[0].w_e.T
        )
        x = h.flatten(0, 1)
        for i, w in enumerate(self.weights):
            q, k, v = project_rows(x, e_rows, w.norm, w.w_h, cos, sin, eps, heads, kv_heads)
            self.keys[i] = torch.cat([self.keys[i], k.view(B, S, kv_heads, -1)], 1)
            self.values[i] = torch.cat([self.values[i], v.view(B, S, kv_heads, -1)], 1)
            attended = F.scaled_dot_product_attention(
                q.view(B, S, heads, -1).transpose(1, 2),
                self.keys[i].transpose(1, 2),
                self.values[i].transpose(1, 2),
                attn_mask=allowed.unsqueeze(1),
                enable_gqa=heads != kv_heads,
            )
            residual = rms_norm(x, w.norm, eps) if i == 0 and config.norm_before_residual else x
            attended = attended.transpose(1, 2).reshape(B * S, -1)
            x = finish_rows(residual, attended, w.w_o, w.post_norm, w.w_gate_up, w.w_down, eps)
            e_rows = None
        return x.view(B, S, -1)
