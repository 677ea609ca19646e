"""Loading a target in transformers: one way and one rule for every stage that runs it.

What transformers only logs is an error here: a weight that is in no file or has another shape (it would be filled with random numbers).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eyas.base.errors import EngineError
from eyas.target.model_files import ModelInfo
from eyas.target.skeleton import first_that_works

if TYPE_CHECKING:
    import torch


def load_model(info: ModelInfo, dtype: str, device: torch.device) -> Any:
    """Load a causal LM, or the multimodal model around one, for inference.

    Args:
        dtype: `auto` (the checkpoint's) or torch's name of one.

    Raises:
        EngineError: transformers cannot load it (its own words), or a weight is in no file or has another shape than the config says.
    """
    import torch

    options: dict[str, Any] = {
        "dtype": getattr(torch, info.dtype if dtype == "auto" else dtype),
        "trust_remote_code": info.trust_remote_code,
        "attn_implementation": "eager" if _beyond_sdpa(info.text) else None,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    if device.type == "cuda":
        options["device_map"] = {"": device}
        avoid_cudnn_attention(device)
    try:
        model, report = first_that_works(lambda auto: auto.from_pretrained(info.path, **options))
    except EngineError as error:
        raise EngineError(f"{info.id}: {error.what}", error.remedy) from None
    absent = sorted(report.get("missing_keys") or [])
    if absent:
        raise EngineError(
            f"{info.id}: {len(absent)} weights are in no file, among them {absent[0]}",
            "the weights belong to another architecture or are incomplete",
        )
    if mismatched := sorted(report.get("mismatched_keys") or []):
        name, stored, wanted = mismatched[0]
        raise EngineError(
            f"{info.id}: {len(mismatched)} weights have another shape than config.json says, among them {name}: "
            f"{list(stored)}, expected {list(wanted)}",
            "config and weights are of different models",
        )
    if broken := report.get("error_msgs"):
        raise EngineError(f"{info.id}: {broken[0]}", "the weights are damaged, or of another architecture")
    model.requires_grad_(False)
    return model.eval().to(device) if device.type == "cpu" else model.eval()


def right_attention(model: Any) -> str:
    """transformers' attention implementation that computes what this model's config says: `eager` where sdpa would drop a part of it."""
    beyond = _beyond_sdpa(model.config.get_text_config().to_dict()) or not getattr(model, "_supports_sdpa", True)
    return "eager" if beyond else "sdpa"


def _beyond_sdpa(text: dict[str, Any]) -> bool:
    # Attention sinks too, but the classes that have them say so themselves.
    return text.get("attn_logit_softcapping") is not None


def avoid_cudnn_attention(device: torch.device) -> None:
    """Take cuDNN out of the kernels that `scaled_dot_product_attention` chooses from, for this process; does nothing for a CPU.

    torch prefers it on Hopper, and it builds a plan for every new length: on one H200 1.3 ms a call on samples that differ in
    length, and a new length with each token while decoding. vLLM does the same.
    """
    import torch

    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
