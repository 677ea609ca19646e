"""Speculative decoding of a target with an EAGLE-3 draft, in transformers: the loop on one page, to read and to measure with.

One round, for every sequence of the batch: the draft proposes k draft tokens d_1..d_k after the last emitted token; the target reads the
last token and the draft tokens in one forward pass; they are accepted from the left as long as they are what the target itself says; the
target adds one token of its own behind them (the bonus). So a round emits 1 to k + 1 tokens, and with greedy choice exactly the tokens that
plain decoding emits. With a temperature, draft token d with draft probability q(d) and target probability p(d) is accepted with probability
min(1, p/q), and the first rejected one is replaced by a draw from max(0, p - q), normalised: the emitted tokens follow p.

Sequences accept different numbers of draft tokens. The caches stay rectangular: rejected places remain in them as holes that a mask hides, and
positions are counted per sequence, so any batch gives what single sequences give. The cache keeps all tokens of every layer, because a
sliding one cannot take rejected draft tokens back; a layer's window is then in its mask.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eyas.base.errors import InputError
from eyas.drafts.eagle3.decoding import DraftDecoder
from eyas.drafts.eagle3.model import Draft
from eyas.target.decoder import find_decoder, hook_streams


@dataclass
class Trace:
    """What decoding one prompt gave. tokens: the reply, up to and with the end token. emitted: tokens per round, the prefill's own first
    token not counted. accepted: draft tokens accepted per round (within the reply); behind: those of the last round behind the reply's end.
    gaps: per token, the target's logit lead of its choice."""

    tokens: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    behind: int = 0
    gaps: list[float] = field(default_factory=list)


class Target:
    """A Hugging Face causal LM that also hands out the residual stream at chosen layers.

    Args:
        model: loaded, in eval mode. layer_ids: our ids; id k is what enters layer k (N: what enters the final norm).

    Raises:
        InputError: layers that keep no key and value per token, or see others than the last ones: rejected draft tokens cannot be taken back.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]):
        self.model, self.layer_ids = model, tuple(layer_ids)
        config = model.config.get_text_config()
        self.window: int | None = getattr(config, "sliding_window", None)
        self.chunk: int | None = getattr(config, "attention_chunk_size", None)
        usual = ["sliding_attention" if self.window else "full_attention"]
        self.kinds = set(getattr(config, "layer_types", None) or usual)
        strange = sorted(self.kinds - {"full_attention", "sliding_attention", "chunked_attention"})
        if strange:
            raise InputError(
                f"{type(model).__name__} has layers of {', '.join(strange)}, from which eyas cannot take rejected draft tokens back",
                "serve the exported draft with an engine, which reports its acceptance",
            )
        self.device = next(model.parameters()).device
        self._taken: dict[int, Tensor] = {}
        decoder = find_decoder(model, config.num_hidden_layers)
        self._hooks = hook_streams(decoder, self.layer_ids, self._taken.__setitem__)

    def __call__(self, ids: Tensor, positions: Tensor, places: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """One forward pass.

        Args:
            ids, positions: [B, S]. places: [B, everything so far], the position of each token in the cache and of these; -1 for holes.

        Returns:
            logits [B, S, V] in fp32, states [B, S, L*H] side by side.
        """
        mask = (places >= 0).long() if self.kinds == {"full_attention"} else self._masks(positions, places)
        out = self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        states = torch.cat([self._taken[i] for i in self.layer_ids], -1) if self.layer_ids else ids.unsqueeze(-1)
        return out.logits.float(), states

    def read(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One forward pass over one sequence from its start: logits [1, T, V] in fp32, states [1, T, L*H]."""
        from transformers import DynamicCache

        ids = torch.tensor([list(token_ids)], device=self.device)
        positions = torch.arange(ids.shape[1], device=self.device).unsqueeze(0)
        return self(ids, positions, positions, DynamicCache())

    def close(self) -> None:
        """Let go of the model and its states."""
        for hook in self._hooks:
            hook.remove()
        self._taken.clear()
        self.model = None

    def _masks(self, positions: Tensor, places: Tensor) -> Any:
        """Additive masks [B, 1, S, everything], one per kind of layer: windows and chunks count positions, and holes have none."""
        own, others = positions.unsqueeze(2), places.unsqueeze(1)
        seen = (others >= 0) & (own >= others)
        allowed = {"full_attention": seen}
        if self.window:
            allowed["sliding_attention"] = seen & (own - others < self.window)
        if self.chunk:
            allowed["chunked_attention"] = seen & (own // self.chunk == others // self.chunk)
        dtype = self.model.dtype
        masks = {
            kind: torch.zeros(allowed[kind].shape, dtype=dtype, device=places.device)
            .masked_fill(~allowed[kind], torch.finfo(dtype).min)
            .unsqueeze(1)
            for kind in self.kinds
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


@torch.no_grad()
def decode(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_new_tokens: int,
    end_ids: Sequence[int],
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[list[Trace], float]:
    """Decode a batch of prompts; with draft None and k = 0 this is plain decoding.

    Args:
        prompts: token ids each. k: draft tokens per round. temperature: 0 for greedy.
        end_ids: any of these ends a reply.

    Returns:
        one Trace per prompt, and the seconds spent after the prefill.
    """
    from transformers import DynamicCache

    B, longest, device = len(prompts), max(len(p) for p in prompts), target.device
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[False] * (longest - len(p)) + [True] * len(p) for p in prompts], device=device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    places = positions.masked_fill(~mask, -1)  # of each token in the cache, per sequence; -1: a hole
    cache = DynamicCache()
    drafter = None if draft is None else DraftDecoder(draft, B, device)
    traces = [Trace() for _ in prompts]

    logits, states = target(ids, positions, places, cache)
    last, gaps = choose(logits[:, -1:], temperature, generator)  # [B, 1], the prefill's own token
    began = time.perf_counter()
    finished = [_take(t, last[b].tolist(), gaps[b].tolist(), end_ids, max_new_tokens) for b, t in enumerate(traces)]
    length = mask.sum(1)  # tokens the target has read, per sequence
    if drafter is not None:
        drafter.commit(states, torch.cat([ids[:, 1:], last], 1), positions, mask)
    while not all(finished):
        drafted, q = drafter.chain(k, temperature, generator) if drafter is not None else (last[:, :0], None)
        inputs = torch.cat([last, drafted], 1)  # [B, k + 1]
        positions = length.unsqueeze(1) + torch.arange(k + 1, device=device)
        logits, states = target(inputs, positions, torch.cat([places, positions], 1), cache)
        if temperature == 0 or q is None:
            answers, gaps = choose(logits, temperature, generator)  # [B, k + 1], what the target says after each input
            accepted = (drafted == answers[:, :k]).long().cumprod(1).sum(1)
        else:
            answers, accepted, gaps = reject(logits, drafted, q, temperature, generator)
        for b, trace in enumerate(traces):
            if not finished[b]:
                count = int(accepted[b]) + 1
                before = len(trace.tokens)
                finished[b] = _take(
                    trace, answers[b, :count].tolist(), gaps[b, :count].tolist(), end_ids, max_new_tokens
                )
                trace.emitted.append(len(trace.tokens) - before)
                trace.accepted.append(min(count - 1, trace.emitted[-1]))
                trace.behind += count - 1 - trace.accepted[-1]
        kept = torch.arange(k + 1, device=device) <= accepted.unsqueeze(1)  # inputs that are part of the reply
        if drafter is not None:
            drafter.commit(states, answers, positions, kept)
        most = int(accepted.max()) + 1
        places = torch.cat([places, positions.masked_fill(~kept, -1)[:, :most]], 1)
        if most < k + 1:  # places that no sequence accepted
            cache.crop(most - (k + 1))
        last = answers.gather(1, accepted.unsqueeze(1))
        length = length + accepted + 1
    return traces, time.perf_counter() - began


def choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """logits [B, S, V] -> tokens [B, S] (greedy or sampled), and how far the best logit leads the second [B, S]."""
    best = logits.topk(2, -1)
    gaps = best.values[..., 0] - best.values[..., 1]
    if temperature == 0:
        return best.indices[..., 0], gaps
    p = torch.softmax(logits / temperature, -1)
    return torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(p.shape[:2]), gaps


def reject(
    logits: Tensor, drafted: Tensor, q: Tensor, temperature: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rejection sampling (Leviathan et al. 2023; Chen et al. 2023): keeps the target's distribution exactly.

    Args:
        logits: [B, k+1, V] the target's. drafted: the draft tokens [B, k], drawn from q: [B, k, V], the draft's probabilities over the target's tokens.

    Returns:
        answers [B, k+1] (accepted draft tokens, then the replacement or bonus), accepted [B], gaps [B, k+1].
    """
    B, k = drafted.shape
    p = torch.softmax(logits / temperature, -1)
    p_drafted = p[:, :k].gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    q_drafted = q.gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    draw = torch.rand(B, k, device=p.device, dtype=p.dtype, generator=generator)
    accepted = (draw * q_drafted < p_drafted).long().cumprod(1).sum(1)  # u < p/q
    at = accepted.view(B, 1, 1).expand(B, 1, p.shape[-1])
    q_padded = torch.cat([q, torch.zeros_like(p[:, :1])], 1)  # no draft token stands at the bonus position: all of p
    rest = (p.gather(1, at) - q_padded.gather(1, at)).clamp_min(0).squeeze(1)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p.gather(1, at).squeeze(1))
    replacement = torch.multinomial(rest, 1, generator=generator)
    answers = torch.cat([drafted, replacement], 1)
    answers.scatter_(1, accepted.unsqueeze(1), replacement)
    best = logits.topk(2, -1).values
    return answers, accepted, best[..., 0] - best[..., 1]


def _take(trace: Trace, tokens: list[int], gaps: list[float], end_ids: Sequence[int], limit: int) -> bool:
    """Append tokens up to an end token or the limit; True when the reply is finished."""
    for token, gap in zip(tokens, gaps, strict=True):
        trace.tokens.append(token)
        trace.gaps.append(gap)
        if token in end_ids or len(trace.tokens) >= limit:
            return True
    return False
