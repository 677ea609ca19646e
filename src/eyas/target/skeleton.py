"""A target's class as transformers has it, built without weights: to see how it is made before anything is loaded."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

from eyas.base.errors import EngineError

#: transformers loads in one thread at a time: while it does, it alters its own classes, and another thread's weights go missing.
LOADING = threading.RLock()
#: transformers' classes of models that generate text, in the order tried; the later ones hold multimodal wrappers.
AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")


def build_skeleton(config: Any, vocab_size: int, trust_remote_code: bool = False) -> Any:
    """The model's modules without weights (on torch's `meta` device, in float32), with a vocabulary of `vocab_size`.

    Raises EngineError when transformers has no class for it, or the class cannot be built.
    """
    import torch

    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, 0)  # they must lie in the vocabulary
    text.vocab_size = vocab_size
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}

    def build(auto: Any) -> Any:
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=trust_remote_code, **options)

    return first_that_works(build).eval()


def stored_names(config: Any, keys: Sequence[str], trust_remote_code: bool = False) -> dict[str, str]:
    """Parameter of the target's class -> the key under which a file holds it, for `keys`, by transformers' own renaming.

    Empty where the class cannot be built, or this transformers keeps its renaming elsewhere.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        model = build_skeleton(config, 64, trust_remote_code)
        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        own, prefix = model.state_dict(), model.base_model_prefix
        names = {rename_source_key(key, renamings, converters, prefix, own)[0]: key for key in keys}
    except (EngineError, ImportError, TypeError, AttributeError):
        return {}
    return {**{key: key for key in keys if key in own}, **{name: key for name, key in names.items() if name in own}}


def first_that_works(make: Callable[[Any], Any]) -> Any:
    """`make(auto class)` for transformers' causal LMs, then for its multimodal classes. Raises EngineError with every failure."""
    import transformers

    failures = []
    for name in AUTO_CLASSES:
        auto = getattr(transformers, name, None)
        if auto is None:
            continue
        try:
            with LOADING:
                return make(auto)
        except (ValueError, OSError, KeyError, RuntimeError, ImportError, AttributeError, TypeError) as error:
            failures.append(f"{name}: {(str(error) or type(error).__name__).splitlines()[0]}")
    known = [failure for failure in failures if "Unrecognized configuration class" not in failure]
    raise EngineError(
        f"transformers cannot load it: {'; '.join(known or failures[:1])}",
        "try --engine vllm, or another version of transformers",
    )
