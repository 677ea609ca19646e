"""What a model folder says before anything is loaded: its shape, its identity, and whether its weights are all there.

Reads `config.json`, the weights' index and the *headers* of the safetensors files: a few kilobytes per file, so that 540 GB on a
slow shared disk are checked in seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.base.errors import InputError
from eyas.base.files import content_hash

#: transformers loads in one thread at a time: while it does, it alters its own classes, and another thread's weights go missing.
LOADING = threading.RLock()

#: Model types whose final norm multiplies by (1 + weight), read from their source. Others multiply by the weight.
ONE_PLUS_NORMS = {
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "recurrent_gemma",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
}


@dataclass(frozen=True)
class ModelInfo:
    """A target's shape and identity, from its folder alone.

    `architecture`: outer class. `num_layers`, `hidden_size`, `vocab_size`, `num_heads`, `num_kv_heads`: of the text decoder.
    `final_norm`: {`kind`: rms | rms_1p | layer, `eps`}. `config_hash` covers config.json, `weights_hash` every weights file's
    header, size and three samples of its content (a fine-tuned model of the same shape differs).
    """

    id: str
    path: Path
    revision: str | None
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    max_position: int
    dtype: str
    final_norm: dict[str, Any]
    tied_head: bool
    is_moe: bool
    quantization: str | None
    weight_bytes: int
    config_hash: str
    weights_hash: str

    def for_manifest(self) -> dict[str, Any]:
        """The fields that a manifest keeps (no local path)."""
        fields = asdict(self)
        del fields["path"]
        return fields

    def quantises_activations(self) -> bool:
        """Whether the checkpoint's scheme rounds the inputs of its products too (FP8 W8A8 and the like), not only its weights.

        Engines round them at different places and transformers often not at all, so two right engines differ by several percent.
        """
        config = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        scheme = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
        groups = (scheme.get("config_groups") or {}).values()
        if any(isinstance(group, dict) and group.get("input_activations") for group in groups):
            return True
        return scheme.get("quant_method") in ("fp8", "fbgemm_fp8", "modelopt")


def describe_model(
    folder: Path, name: str | None = None, *, trust_remote_code: bool = False, need_weights: bool = True
) -> ModelInfo:
    """Read a model folder.

    Args:
        folder: a local Hugging Face model folder. name: how the user called it (kept in manifests).
        need_weights: False for a folder that holds only a config (dummy weights).

    Raises:
        InputError: no or unreadable config.json, unknown architecture, or weights missing or cut short.
    """
    with LOADING:
        from transformers import AutoConfig

    path = folder / "config.json"
    try:
        raw = path.read_bytes()
        json.loads(raw)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", "give a Hugging Face model folder") from None
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise InputError(
            f"{path} is not readable as a model config: {str(error).splitlines()[0]}",
            "check the file; a model with its own code needs --trust-remote-code, a new architecture a newer transformers",
        ) from None
    text = config.get_text_config()
    try:
        layers, hidden, vocabulary = int(text.num_hidden_layers), int(text.hidden_size), int(text.vocab_size)
    except (AttributeError, TypeError):
        raise InputError(
            f"{path} describes no causal language model (no depth, width or vocabulary)", "check --model-path"
        ) from None
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    files = check_weights(folder) if need_weights else []
    experts = [getattr(text, k, None) for k in ("num_experts", "num_local_experts", "n_routed_experts")]
    quantization = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    return ModelInfo(
        id=str(name or folder),
        path=folder,
        revision=_revision(folder),
        architecture=(config.architectures or ["unknown"])[0],
        model_type=config.model_type,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocabulary,
        num_heads=heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        max_position=int(getattr(text, "max_position_embeddings", 0) or 0),
        dtype=_dtype_name(getattr(config, "dtype", None) or getattr(text, "dtype", None)),
        final_norm=_final_norm(text),
        tied_head=bool(getattr(config, "tie_word_embeddings", False)),
        is_moe=any(isinstance(n, int) and n > 1 for n in experts),
        quantization=None if quantization is None else str(quantization.get("quant_method", "unknown")),
        weight_bytes=sum(size for _, size in files),
        config_hash=content_hash(raw),
        weights_hash=_weights_hash(folder, files),
    )


def _revision(folder: Path) -> str | None:
    # A hub snapshot folder is named after its commit.
    return folder.name if folder.parent.name == "snapshots" else None


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if name in {"float32", "bfloat16", "float16"} else "bfloat16"


def _final_norm(config: Any) -> dict[str, Any]:
    if config.model_type in ONE_PLUS_NORMS:
        kind = "rms_1p"
    elif hasattr(config, "rms_norm_eps"):
        kind = "rms"
    else:
        kind = "layer"
    eps = next(
        (
            getattr(config, k)
            for k in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
            if hasattr(config, k)
        ),
        1e-6,
    )
    return {"kind": kind, "eps": float(eps)}


def read_safetensors_header(path: Path) -> dict[str, Any]:
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
                f"{path} is no whole safetensors file: its header says {length} bytes, the file has {size}",
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


def check_weights(folder: Path) -> list[tuple[Path, int]]:
    """Every weights file with its size, after checking that all are there and whole.

    Raises:
        InputError: no weights, a file of the index missing, a tensor of the index not in its file, a file cut short.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
            raise InputError(f"{index} is not a weights index: {error}", "download it again") from None
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise InputError(
                f"{len(missing)} of {len(names)} weights files are missing in {folder}: {', '.join(missing[:5])}",
                "download them; the index names them",
            )
        for name in names:
            there = set(read_safetensors_header(folder / name))
            absent = next((key for key, where in weight_map.items() if where == name and key not in there), None)
            if absent:
                raise InputError(
                    f"{folder / name} does not hold {absent}, which the index places there",
                    "index and files are of different downloads",
                )
        return [(folder / name, (folder / name).stat().st_size) for name in names]
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    if not files:
        pickles = sorted(folder.glob("*.bin"))
        hint = (
            "these are pickles: convert them to safetensors"
            if pickles
            else "download the weights, or use `eyas rehearse` for dummy weights"
        )
        raise InputError(f"{folder} holds no safetensors weights", hint)
    for file in files:
        read_safetensors_header(file)
    return [(file, file.stat().st_size) for file in files]


def _weights_hash(folder: Path, files: list[tuple[Path, int]]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for path, size in files:
        state.update(f"{path.name}:{size}".encode())
        with open(path, "rb") as file:
            header = 8 + struct.unpack("<Q", file.read(8))[0]
            for at in (0, header, header + (size - header) // 2, max(header, size - 4096)):
                file.seek(at)
                state.update(file.read(4096))
    return state.hexdigest()


def free_bytes(folder: Path) -> int:
    """Free bytes for this user where `folder` is or will be."""
    place = folder
    while not place.exists():
        place = place.parent
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def human_bytes(count: float) -> str:
    """`1.2 GB`, decimal units, as disks are sold."""
    if count < 1000:
        return f"{count:.0f} B"
    step = min(int(math.log10(count) // 3), 5)
    return f"{count / 1000**step:.1f} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[step]}"
