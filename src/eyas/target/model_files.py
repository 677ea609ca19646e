"""What a model directory says before anything is loaded: the target's shape and identity."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.base.errors import InputError
from eyas.base.files import content_hash
from eyas.target.skeleton import LOADING
from eyas.target.weights import Weights, find_weights, hash_weights, require_numbers

if TYPE_CHECKING:
    from eyas.target.readout import Readout


@dataclass(frozen=True)
class ModelInfo:
    """A target's shape and identity, from its directory alone.

    `architecture`: outer class. `num_layers`, `hidden_size`, `vocab_size`, `num_heads`, `num_kv_heads`: of the text decoder.
    `config_hash` covers config.json, `weights_hash` every weights file's header, size and three samples of its content (a fine-tuned
    model of the same shape differs). `config`: the config as transformers' class resolves it, defaults filled in; what a model's shape
    and settings are is read from there (`text`), never from config.json.
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
    tied_head: bool
    is_moe: bool
    quantization: str | None
    weight_bytes: int
    config_hash: str
    weights_hash: str
    config: Any = field(repr=False, compare=False)
    trust_remote_code: bool = False

    @cached_property
    def text(self) -> dict[str, Any]:
        """The resolved config of the text decoder."""
        return self.config.get_text_config().to_dict()

    @property
    def uses_mla(self) -> bool:
        """Whether attention is multi-head latent attention (DeepSeek, Kimi)."""
        return bool(self.text.get("kv_lora_rank"))

    @property
    def is_multimodal(self) -> bool:
        """Whether the text decoder sits beside an encoder of images or sound."""
        own = self.config.to_dict()
        return "text_config" in own and ("vision_config" in own or "audio_config" in own)

    def for_manifest(self) -> dict[str, Any]:
        """The fields that a manifest keeps (nothing local), and `final_norm`."""
        local = ("path", "config", "trust_remote_code")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in local} | {
            "final_norm": self.final_norm
        }

    @cached_property
    def readout(self) -> Readout:
        """What the target's class does between its last layer and its logits, found by running it without its layers."""
        from eyas.target.readout import try_readout  # imports torch

        return try_readout(self.config, self.trust_remote_code)

    @property
    def final_norm(self) -> dict[str, Any]:
        """{`kind`: rms | rms_1p | layer | layer_1p, `eps`}."""
        return {"kind": self.readout.norm_kind, "eps": self.readout.norm_eps}

    def quantises_activations(self) -> bool:
        """Whether the checkpoint's scheme rounds the inputs of its products too (FP8 W8A8 and the like), not only its weights.

        Engines round them at different places and transformers often not at all, so two right engines differ by several percent.
        """
        scheme = _quantization(self.config)
        groups = (scheme.get("config_groups") or {}).values()
        if any(isinstance(group, dict) and group.get("input_activations") for group in groups):
            return True
        return scheme.get("quant_method") in ("fp8", "fbgemm_fp8", "modelopt")


def describe_model(
    directory: Path, name: str | None = None, *, trust_remote_code: bool = False, need_weights: bool = True
) -> ModelInfo:
    """Read a model directory.

    Args:
        directory: a local Hugging Face model directory. name: how the user called it (kept in manifests).
        need_weights: False for a directory that holds only a config (dummy weights).

    Raises:
        InputError: no or unreadable config.json, unknown architecture, or weights missing or cut short.
    """
    with LOADING:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

    path = directory / "config.json"
    try:
        raw = path.read_bytes()
        _require_target(directory, json.loads(raw))
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", "give a Hugging Face model directory") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, StrictDataclassError) as error:
        raise InputError(
            f"{path} is not readable as a model config: {' '.join(str(error).split())}",
            "check the file; a model with its own code needs --trust-remote-code, a new architecture a newer transformers",
        ) from None
    text = config.get_text_config()
    try:
        layers, hidden, vocabulary = int(text.num_hidden_layers), int(text.hidden_size), int(text.vocab_size)
    except (AttributeError, TypeError):
        raise InputError(
            f"{path} describes no causal language model (no depth, width or vocabulary)", "check --model-path"
        ) from None
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise InputError(
            f"{path}: its tokens also attend to those after them (use_bidirectional_attention), so it does not generate token by token",
            "eyas takes causal language models",
        )
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    quantization = _quantization(config)
    weights = find_weights(directory) if need_weights else Weights({}, {})
    require_numbers(directory, weights, quantization)
    experts = [getattr(text, k, None) for k in ("num_experts", "num_local_experts", "n_routed_experts")]
    return ModelInfo(
        id=str(name or directory),
        path=directory,
        revision=_revision(directory),
        architecture=(config.architectures or ["unknown"])[0],
        model_type=config.model_type,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocabulary,
        num_heads=heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        max_position=int(getattr(text, "max_position_embeddings", 0) or 0),
        dtype=_dtype_name(getattr(config, "dtype", None) or getattr(text, "dtype", None)),
        tied_head=bool(getattr(config, "tie_word_embeddings", False)),
        is_moe=any(isinstance(n, int) and n > 1 for n in experts),
        quantization=str(quantization.get("quant_method", "unknown")) if quantization else None,
        weight_bytes=sum(weights.files.values()),
        config_hash=content_hash(raw),
        weights_hash=hash_weights(weights),
        config=config,
        trust_remote_code=trust_remote_code,
    )


def _require_target(directory: Path, raw: dict[str, Any]) -> None:
    """Refuse a draft's directory: engines load another model in its place, or as what it is not."""
    marks = [key for key in ("speculators_config", "eagle_config", "draft_vocab_size") if key in raw]
    if marks:
        raise InputError(
            f"{directory} is a draft's directory (`{marks[0]}` in its config.json), not a target's: vLLM would load another model",
            "give --model-path the target that the draft belongs to",
        )


def _quantization(config: Any) -> dict[str, Any]:
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    return {} if found is None else found if isinstance(found, dict) else found.to_dict()


def _revision(directory: Path) -> str | None:
    # A hub snapshot directory is named after its commit.
    return directory.name if directory.parent.name == "snapshots" else None


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if name in {"float32", "bfloat16", "float16"} else "bfloat16"


def free_bytes(directory: Path) -> int:
    """Free bytes for this user where `directory` is or will be."""
    place = directory
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
