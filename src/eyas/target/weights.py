"""Which files hold a model's weights, whether they are all there, and single tensors out of them.

The files are those that transformers loads: `model.safetensors`, else those of `model.safetensors.index.json`. Where another reader
(vLLM takes every `*.safetensors` that no index excludes) would take other ones, the directory is refused.
Only the index and the *headers* of the files are read: a few kilobytes each, so that 540 GB on a slow shared disk are checked in seconds.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.base.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: safetensors' names of types whose numbers are codes: without a scale that the loader applies they mean nothing.
CODES = {"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "F8_E4M3", "F8_E5M2", "F4"}


@dataclass(frozen=True)
class Weights:
    """files: path -> bytes. tensors: name -> (file, safetensors dtype)."""

    files: dict[Path, int]
    tensors: dict[str, tuple[Path, str]]


def find_weights(directory: Path) -> Weights:
    """The weights that transformers loads from `directory`, found whole.

    Raises:
        InputError: no weights; a file of the index missing or cut short; a tensor not where the index says, or in two files; files beside
            them that another reader would take as well.
    """
    index = directory / INDEX
    if (directory / "adapter_config.json").exists():
        raise InputError(
            f"{directory} holds an adapter (adapter_config.json), which some readers add to the model and others do not",
            "merge it into the model (peft's `merge_and_unload`), or move it elsewhere",
        )
    promised = _read_index(index) if index.exists() else {}
    if (directory / SINGLE).exists():
        names = [SINGLE]
        others = sorted({*promised.values()} - {SINGLE}) or (
            [] if promised else sorted(f.name for f in _beside(directory))
        )
        if others:
            raise InputError(
                f"{directory} holds two sets of weights: {SINGLE}, which transformers loads, and {', '.join(others[:3])}, "
                "which vLLM would load",
                "move the one that is not meant elsewhere",
            )
    elif promised:
        names = sorted(set(promised.values()))
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise InputError(
                f"{len(missing)} of {len(names)} weights files are missing in {directory}: {', '.join(missing[:5])}",
                "download them; the index names them",
            )
    else:
        raise InputError(f"{directory} holds neither {SINGLE} nor {INDEX}", _without_weights(directory))
    tensors: dict[str, tuple[Path, str]] = {}
    for name in names:
        for key, entry in read_header(directory / name).items():
            if key in tensors:
                raise InputError(
                    f"{directory}: {key} is stored in {tensors[key][0].name} and in {name}", "download the model again"
                )
            if key != "__metadata__":
                tensors[key] = (directory / name, str(entry["dtype"]))
    for key, name in promised.items():
        if key not in tensors or tensors[key][0].name != name:
            raise InputError(
                f"{directory / name} does not hold {key}, which the index places there",
                "index and files are of different downloads",
            )
    return Weights({directory / name: (directory / name).stat().st_size for name in names}, tensors)


def _read_index(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{index} is not a weights index: {error}", "download it again") from None


def _beside(directory: Path) -> list[Path]:
    return [f for f in directory.glob("*.safetensors") if f.name != SINGLE and not f.name.startswith("consolidated")]


def _without_weights(directory: Path) -> str:
    if _beside(directory):
        return f"its *.safetensors have other names and no index, so transformers would not load them: add the {INDEX}"
    if any(directory.glob("*.bin")):
        return "its *.bin are pickles: convert them to safetensors"
    return "download the weights, or use `eyas rehearse` for dummy weights"


def require_numbers(directory: Path, weights: Weights, quantization: Mapping[str, Any]) -> None:
    """Refuse weights that are codes (integers, fp8) where the config names no scheme by which a loader scales them."""
    if quantization:
        return
    coded = sorted(key for key, (_, kind) in weights.tensors.items() if kind in CODES and key.endswith("weight"))
    if coded:
        kind = weights.tensors[coded[0]][1]
        raise InputError(
            f"{directory}: {len(coded)} weights are stored as {kind} codes, among them {coded[0]}, and config.json has no "
            "quantization_config, so no loader would scale them",
            "use the config.json that belongs to these weights",
        )


def read_header(path: Path) -> dict[str, Any]:
    """Header of a safetensors file as JSON, after checking it against the file's length.

    Raises:
        InputError: truncated, cut short or with a malformed header; says which and by how many bytes.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, 100_000_000):
            raise InputError(
                f"{path} is not a whole safetensors file: its header says {length} bytes, the file has {size}",
                "download this file again",
            )
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, IndexError) as error:
            raise InputError(f"{path} has a damaged safetensors header: {error}", "download this file again") from None
    if size != 8 + length + end:
        raise InputError(
            f"{path} should have {8 + length + end} bytes by its header, it has {size}",
            "it was cut short or is still being copied: download this file again",
        )
    return header


def hash_weights(weights: Weights) -> str:
    """Hash of every file's name, size, first bytes, and three samples of its content."""
    state = hashlib.blake2b(digest_size=16)
    for path, size in weights.files.items():
        state.update(f"{path.name}:{size}".encode())
        with open(path, "rb") as file:
            header = 8 + struct.unpack("<Q", file.read(8))[0]
            for at in (0, header, header + (size - header) // 2, max(header, size - 4096)):
                file.seek(at)
                state.update(file.read(4096))
    return state.hexdigest()


def read_tensor(weights: Weights, key: str) -> Tensor:
    """One tensor, memory-mapped; fp8 is dequantised to bf16 with its `_scale` or `_scale_inv`.

    Raises InputError for other codes.
    """
    import torch
    from safetensors import safe_open

    path, _ = weights.tensors[key]
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor(key)
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor
    for suffix in ("_scale_inv", "_scale"):
        if tensor.dtype == torch.float8_e4m3fn and key + suffix in weights.tensors:
            return _dequantised(tensor, read_tensor(weights, key + suffix))
    raise InputError(
        f"{path}: {key} is stored as {tensor.dtype} without scales that eyas knows",
        "use a checkpoint whose embedding, final norm and head are plain or fp8 with weight_scale(_inv)",
    )


def _dequantised(tensor: Tensor, scale: Tensor) -> Tensor:
    """fp8 [V, H] with one scale, one per row, or one per block (DeepSeek's 128 x 128) -> bf16."""
    import torch

    if scale.dim() == 2 and scale.shape[0] < tensor.shape[0] and scale.numel() > 1:
        rows, columns = (-(-n // s) for n, s in zip(tensor.shape, scale.shape, strict=True))
        rows, columns = 1 << (rows - 1).bit_length(), 1 << (columns - 1).bit_length()
        scale = scale.repeat_interleave(rows, 0)[: tensor.shape[0]].repeat_interleave(columns, 1)[:, : tensor.shape[1]]
    elif scale.dim() == 1 and scale.numel() > 1:
        scale = scale.unsqueeze(-1)
    return (tensor.float() * scale.float()).to(torch.bfloat16)
