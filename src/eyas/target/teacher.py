"""The target's next-token distribution, rebuilt from stored target states: final norm, then the head. No other weight is loaded.

`load_target_parts` reads three tensors out of a model folder (embedding, final norm, head) by name, from one file or many, tied or not,
also from inside a multimodal wrapper. A head in fp8 is dequantised with its scales; packed integer formats are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from eyas.base.errors import InputError
from eyas.target.model_files import ModelInfo, read_safetensors_header

EMBEDDING_NAMES = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
)
NORM_NAMES = ("norm.weight", "final_layernorm.weight", "ln_f.weight", "final_layer_norm.weight", "final_norm.weight")
HEAD_NAMES = ("lm_head.weight", "output.weight", "embed_out.weight")


@dataclass(frozen=True)
class TargetParts:
    """What training needs of the target. embedding, head: [V, H] as stored (the same tensor when tied). norm: [H]; norm_bias: [H] or None.

    norm_kind: rms (gain w), rms_1p (gain 1 + w) or layer. logit_scale, softcap: logits = softcap * tanh(scale * z / softcap); softcap
    None for none.
    """

    embedding: Tensor
    norm: Tensor
    norm_bias: Tensor | None
    norm_kind: str
    norm_eps: float
    head: Tensor
    logit_scale: float = 1.0
    softcap: float | None = None


def load_target_parts(info: ModelInfo) -> TargetParts:
    """Read embedding, final norm and head of a model folder, memory-mapped.

    Raises:
        InputError: a part is not found, stands there more than once, has another shape than the config says, or is quantised in a
            format whose scales eyas does not know.
    """
    places = _tensor_places(info.path)
    V, H = info.vocab_size, info.hidden_size
    embedding_key = _the_one(places, EMBEDDING_NAMES, "embedding", info.path)
    prefix = embedding_key[: -len(next(n for n in EMBEDDING_NAMES if embedding_key.endswith(n)))]
    norm_key = next((prefix + n for n in NORM_NAMES if prefix + n in places), None)
    if norm_key is None:
        raise InputError(
            f"{info.path}: no final norm beside {embedding_key} (looked for {', '.join(prefix + n for n in NORM_NAMES)})",
            "eyas rebuilds the target's distribution from final norm and head; this architecture is not known yet",
        )
    embedding = _read(places, embedding_key)
    heads = [key for key in places if key.endswith(HEAD_NAMES) and "visual" not in key and "vision" not in key]
    if not heads:
        packed = sorted(key for key in places if "lm_head" in key)
        if packed:
            raise InputError(
                f"{info.path}: the head is stored as {', '.join(packed[:3])}, a quantised format that eyas does not read",
                "use a checkpoint whose head is plain (most quantised models leave it so) or fp8",
            )
        if not info.tied_head:
            raise InputError(
                f"{info.path}: no lm_head, and the config does not tie it to the embedding", "check the download"
            )
        head = embedding
    else:
        head = _read(places, _the_one(places, HEAD_NAMES, "head", info.path))
    norm = _read(places, norm_key)
    for name, tensor, shape in ((embedding_key, embedding, (V, H)), ("head", head, (V, H)), (norm_key, norm, (H,))):
        if tensor.shape[-1] != H or (len(shape) == 2 and tensor.shape[0] < V):
            raise InputError(f"{info.path}: {name} has shape {list(tensor.shape)}, the config says {list(shape)}")
    config = _text_config(info.path)
    bias_key = norm_key.removesuffix("weight") + "bias"
    return TargetParts(
        embedding=embedding[:V],
        norm=norm,
        norm_bias=_read(places, bias_key) if bias_key in places else None,
        norm_kind=info.final_norm["kind"],
        norm_eps=info.final_norm["eps"],
        head=head[:V],
        # Cohere multiplies its logits, Granite divides them, Gemma 2 caps them.
        logit_scale=float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0),
        softcap=config.get("final_logit_softcapping"),
    )


def final_norm(x: Tensor, parts: TargetParts) -> Tensor:
    """The target's final norm of [n, H], in fp32 (fp64 for fp64), by the kind that the store's manifest names."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    weight = parts.norm.to(x.device, wide.dtype)
    if parts.norm_kind == "layer":
        bias = None if parts.norm_bias is None else parts.norm_bias.to(x.device, wide.dtype)
        return F.layer_norm(wide, wide.shape[-1:], weight, bias, parts.norm_eps)
    gain = 1 + weight if parts.norm_kind == "rms_1p" else weight
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + parts.norm_eps) * gain


class Teacher:
    """The target's logits for draft training, on one device and in one dtype.

    Args:
        parts: from `load_target_parts`. draft_ids: [D] int64 target ids of the draft vocabulary.
    """

    def __init__(self, parts: TargetParts, draft_ids: Tensor, device: torch.device | str, dtype: torch.dtype):
        bias = None if parts.norm_bias is None else parts.norm_bias.to(device)
        self.parts = replace(parts, norm=parts.norm.to(device), norm_bias=bias)
        self.device, self.dtype = device, dtype
        self.restricted = parts.head[draft_ids.cpu()].to(device, dtype)
        self._full: Tensor | None = None

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        """[n, H] target states (before the final norm) -> [n, D] logits over the draft vocabulary, in the compute dtype."""
        return self._scaled(final_norm(final, self.parts).to(self.dtype) @ self.restricted.T)

    @torch.no_grad()
    def argmax(self, final: Tensor, chunk: int = 2048) -> Tensor:
        """[n, H] target states -> [n] the target's own next tokens, over its full vocabulary."""
        if self._full is None:
            self._full = self.parts.head.to(self.device, self.dtype)
        normed = final_norm(final, self.parts).to(self.dtype)
        return torch.cat([(part @ self._full.T).argmax(-1) for part in normed.split(chunk)])

    def _scaled(self, z: Tensor) -> Tensor:
        if self.parts.logit_scale != 1.0:
            z = z * self.parts.logit_scale
        return z if self.parts.softcap is None else torch.tanh(z / self.parts.softcap) * self.parts.softcap


def _text_config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {**config, **(config.get("text_config") or {})}


def _tensor_places(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {key: folder / name for key, name in json.loads(index.read_text())["weight_map"].items()}
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    return {key: file for file in files for key in read_safetensors_header(file) if key != "__metadata__"}


def _the_one(places: dict[str, Path], names: Sequence[str], what: str, folder: Path) -> str:
    found = [
        key
        for key in places
        if any(key == n or key.endswith("." + n) for n in names) and "visual" not in key and "vision" not in key
    ]
    # Some checkpoints carry an extra multi-token-prediction layer with its own copy: the shortest name is the model's.
    found.sort(key=lambda key: (key.count("."), key))
    if not found:
        raise InputError(
            f"{folder}: no {what} found (looked for names ending in {', '.join(names)})", "check --model-path"
        )
    return found[0]


def _read(places: dict[str, Path], key: str) -> Tensor:
    with safe_open(places[key], framework="pt") as file:
        tensor = file.get_tensor(key)
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor
    for suffix in ("_scale_inv", "_scale"):
        if tensor.dtype == torch.float8_e4m3fn and key + suffix in places:
            return _dequantised(tensor, _read(places, key + suffix))
    raise InputError(
        f"{places[key]}: {key} is stored as {tensor.dtype} without scales that eyas knows",
        "use a checkpoint whose embedding, final norm and head are plain or fp8 with weight_scale(_inv)",
    )


def _dequantised(tensor: Tensor, scale: Tensor) -> Tensor:
    """fp8 [V, H] with one scale, one per row, or one per block (DeepSeek's 128 x 128) -> bf16."""
    if scale.dim() == 2 and scale.shape[0] < tensor.shape[0] and scale.numel() > 1:
        rows, columns = (-(-n // s) for n, s in zip(tensor.shape, scale.shape, strict=True))
        rows, columns = 1 << (rows - 1).bit_length(), 1 << (columns - 1).bit_length()
        scale = scale.repeat_interleave(rows, 0)[: tensor.shape[0]].repeat_interleave(columns, 1)[:, : tensor.shape[1]]
    elif scale.dim() == 1 and scale.numel() > 1:
        scale = scale.unsqueeze(-1)
    return (tensor.float() * scale.float()).to(torch.bfloat16)
