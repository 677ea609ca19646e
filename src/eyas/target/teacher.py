"""The target's next-token distribution, rebuilt from stored target states: final norm, then the head (`readout.py` has the formula).

Only embedding, final norm and head are read out of a model directory, whether its weights are one file or many, tied or not, also from
inside a multimodal wrapper. They are found by the loader's own renaming of weights, else by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyas.base.errors import InputError
from eyas.target.decoder import FINAL_NORMS, is_other_tower
from eyas.target.model_files import ModelInfo
from eyas.target.readout import normalise, squash
from eyas.target.skeleton import stored_names
from eyas.target.weights import Weights, find_weights, read_tensor

#: Names of weights, where the target's class could not be built to ask it.
NAMES = {
    "embedding": ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings"),
    "norm": FINAL_NORMS,
    "head": ("lm_head", "output", "embed_out"),
}


@dataclass(frozen=True)
class TargetParts:
    """What training needs of the target, so that logits = softcap * tanh(logit_scale * (head @ (state_scale * norm(x)) + head_bias) / softcap).

    embedding, head: [V, H] as stored (the same tensor when tied). norm: [H] the final norm's gain; norm_bias: [H] or None.
    norm_kind: rms or layer. head_bias: [V] or None. softcap: None for none.
    """

    embedding: Tensor
    norm: Tensor
    norm_bias: Tensor | None
    norm_kind: str
    norm_eps: float
    head: Tensor
    head_bias: Tensor | None = None
    state_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None


def load_target_parts(info: ModelInfo) -> TargetParts:
    """Read embedding, final norm and head of a model directory, memory-mapped.

    Raises:
        InputError: the target's logits cannot be rebuilt from its state before the final norm; or a part is not found, has another shape
            than the config says, is quantised in a format whose scales eyas does not know, or differs between two readers.
    """
    readout = info.readout
    if readout.tried and readout.problem:
        raise InputError(
            f"the logits of {info.id} cannot be rebuilt from its state before the final norm: {readout.problem}",
            "eyas cannot train a draft for this architecture yet; please report it",
        )
    weights = find_weights(info.path)
    keys = _find_parts(info, weights, readout.names)
    V, H = info.vocab_size, info.hidden_size
    tied = info.tied_head if readout.tied is None else readout.tied

    def read(part: str, *shape: int) -> Tensor | None:
        if part not in keys:
            return None
        tensor = read_tensor(weights, keys[part])
        if tensor.shape[1:] != shape[1:] or tensor.shape[0] < shape[0]:
            raise InputError(f"{info.path}: {keys[part]} has shape {list(tensor.shape)}, the config says {list(shape)}")
        return tensor[: shape[0]]

    embedding, head, weight = read("embedding", V, H), read("head", V, H), read("norm", H)
    if embedding is None:
        raise InputError(f"{info.path}: no embedding found", "check --model-path")
    if head is None:
        if not tied:
            raise InputError(
                f"{info.path}: no head was found, and the config does not tie it to the embedding", "check the download"
            )
        head = embedding
    elif tied and not torch.equal(head, embedding):
        raise InputError(
            f"{info.path}: the config ties the head to the embedding, but {keys['head']} differs from {keys['embedding']}: "
            "transformers would use it, vLLM would not",
            "correct `tie_word_embeddings` in config.json, or remove the head from the weights",
        )
    if weight is None:
        if "norm" in readout.names or not readout.tried:
            raise InputError(f"{info.path}: no final norm beside {keys['embedding']}", "check the download")
        weight = torch.ones(H)
    return TargetParts(
        embedding=embedding,
        norm=1 + weight.float() if readout.norm_kind.endswith("_1p") else weight.float(),
        norm_bias=read("norm_bias", H),
        norm_kind=readout.norm_kind.removesuffix("_1p"),
        norm_eps=readout.norm_eps,
        head=head,
        head_bias=read("head_bias", V),
        state_scale=readout.state_scale,
        logit_scale=readout.logit_scale,
        softcap=readout.softcap,
    )


def final_norm(x: Tensor, parts: TargetParts) -> Tensor:
    """The target's final norm of [n, H], in fp32 (fp64 for fp64)."""
    return normalise(x, parts.norm_kind, parts.norm_eps, parts.norm, parts.norm_bias)


def full_logits(x: Tensor, parts: TargetParts, dtype: torch.dtype = torch.float32, chunk: int = 1024) -> Tensor:
    """[n, H] target states (before the final norm) -> [n, V] the target's logits, on x's device; `dtype` is that of the head's product."""
    head = parts.head.to(x.device, dtype)
    bias = None if parts.head_bias is None else parts.head_bias.to(x.device, dtype)
    return torch.cat([_logits(rows, parts, head, bias) for rows in x.split(chunk)])


def _logits(x: Tensor, parts: TargetParts, head: Tensor, bias: Tensor | None) -> Tensor:
    read = final_norm(x, parts)
    if parts.state_scale != 1.0:
        read = read * parts.state_scale
    product = torch.nn.functional.linear(read.to(head.dtype), head, bias)
    return squash(product, parts.logit_scale, parts.softcap)


class Teacher:
    """The target's logits for draft training, on one device and in one dtype.

    Args:
        parts: from `load_target_parts`. draft_ids: [D] int64 target ids of the draft vocabulary.
    """

    def __init__(self, parts: TargetParts, draft_ids: Tensor, device: torch.device | str, dtype: torch.dtype):
        bias = None if parts.norm_bias is None else parts.norm_bias.to(device)
        self.parts = replace(parts, norm=parts.norm.to(device), norm_bias=bias)
        self.device, self.dtype = device, dtype
        ids = draft_ids.cpu()
        self.restricted = parts.head[ids].to(device, dtype)
        self.restricted_bias = None if parts.head_bias is None else parts.head_bias[ids].to(device, dtype)
        self._full: tuple[Tensor, Tensor | None] | None = None

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        """[n, H] target states (before the final norm) -> [n, D] logits over the draft vocabulary, in the compute dtype."""
        return _logits(final, self.parts, self.restricted, self.restricted_bias)

    @torch.no_grad()
    def argmax(self, final: Tensor, chunk: int = 2048) -> Tensor:
        """[n, H] target states -> [n] the target's own next tokens, over its full vocabulary."""
        if self._full is None:
            bias = self.parts.head_bias
            self._full = (
                self.parts.head.to(self.device, self.dtype),
                None if bias is None else bias.to(self.device, self.dtype),
            )
        return torch.cat([_logits(part, self.parts, *self._full).argmax(-1) for part in final.split(chunk)])


def _find_parts(info: ModelInfo, weights: Weights, names: dict[str, str]) -> dict[str, str]:
    """part -> name in the files, for the parts that are there."""
    # Weights of layers carry a number: also those of extra layers for multi-token prediction, with norm and head of their own.
    outside = [key for key in weights.tensors if not re.search(r"\.\d+\.", key) and not is_other_tower(key)]
    renamed = stored_names(info.config, outside, info.trust_remote_code)
    found = {part: renamed[name] for part, name in names.items() if name in renamed}
    for part, leaves in NAMES.items():
        if part in found or (names and part not in names):
            continue
        ends = [f"{leaf}.weight" for leaf in leaves]
        keys = [key for key in outside if any(key == end or key.endswith("." + end) for end in ends)]
        if keys:
            found[part] = min(keys, key=lambda key: (key.count("."), key))
            bias = found[part].removesuffix("weight") + "bias"
            if bias in weights.tensors:
                found[part + "_bias"] = bias
    packed = sorted(key for key in outside if "lm_head" in key and not key.endswith(".bias"))
    if "head" not in found and packed:
        raise InputError(
            f"{info.path}: the head is stored as {', '.join(packed[:3])}, a quantised format that eyas does not read",
            "use a checkpoint whose head is plain (most quantised models leave it so) or fp8",
        )
    return found
