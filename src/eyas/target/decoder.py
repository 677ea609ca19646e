"""Where the residual stream is found in a loaded model, and the hooks that read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eyas.base.errors import EngineError

LAYER_LISTS = ("layers", "h", "blocks", "block")
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "layer_norm", "embedding_norm")
#: Modules of a multimodal wrapper that are not its text decoder.
OTHER_TOWERS = ("vision", "visual", "audio", "image", "speech")


@dataclass(frozen=True)
class Decoder:
    """Where the residual stream is found in a loaded model.

    `base`: the module to run (no head). `layers`: its decoder layers. `norm`: the final norm. `path`: from the outer class
    to the decoder, for people.
    """

    base: torch.nn.Module
    layers: torch.nn.ModuleList
    norm: torch.nn.Module
    path: str


def find_decoder(model: Any, num_layers: int) -> Decoder:
    """The text decoder inside a causal LM, also when it sits in a multimodal wrapper.

    Raises EngineError when no module has `num_layers` layers and a final norm of its own.
    """
    depths = set()
    for name, module in model.named_modules():
        if is_other_tower(name):
            continue
        lists = [getattr(module, n, None) for n in LAYER_LISTS]
        layers = next((found for found in lists if isinstance(found, torch.nn.ModuleList)), None)
        norms = [getattr(module, n, None) for n in FINAL_NORMS]
        norm = next((found for found in norms if isinstance(found, torch.nn.Module)), None)
        if layers is None or norm is None:
            continue
        depths.add(len(layers))
        if len(layers) == num_layers:
            classes = [type(model).__name__]
            current = model
            for part in name.split(".") if name else []:
                current = getattr(current, part)
                classes.append(type(current).__name__)
            return Decoder(module, layers, norm, " -> ".join(classes) + f", {num_layers} layers")
    found = f"stacks of {', '.join(map(str, sorted(depths)))} layers were found" if depths else "no stack was found"
    raise EngineError(
        f"{type(model).__name__} has no decoder of {num_layers} layers with a final norm ({found})",
        "this architecture's modules are named in a way eyas does not know; please report it, or try --engine vllm",
    )


def is_other_tower(name: str) -> bool:
    """Whether a module or weight of this dotted name belongs to an encoder of images or sound."""
    return any(part.startswith(OTHER_TOWERS) for part in name.lower().split("."))


def hook_streams(decoder: Decoder, layer_ids: Sequence[int], sink: Callable[[int, Any], None]) -> list[Any]:
    """Let each forward pass hand `sink(layer id, what enters that layer)`; id N is what enters the final norm. Returns removable handles.

    What enters is the model's own tensor, usually [batch, T, H]; nothing is checked or copied here.
    """

    def hook(layer_id: int) -> Callable[..., None]:
        def take(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            sink(layer_id, args[0] if args else kwargs.get("hidden_states"))

        return take

    modules = [*decoder.layers, decoder.norm]
    return [modules[i].register_forward_pre_hook(hook(i), with_kwargs=True) for i in layer_ids]
