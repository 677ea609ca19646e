"""The target's tokenizer and shape, without its weights: loaded, and described for manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyas.errors import InputError
from eyas.manifest import content_hash
from eyas.masks import ChatTemplate


def load_tokenizer(model_path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder, hub id or `smollm2`. Raises InputError when there is none."""
    from transformers import AutoTokenizer

    from eyas.embedded import EMBEDDED_NAME, embedded_model

    # Not `resolve_model_path`, which would download the weights of a hub model too.
    place = embedded_model() if model_path == EMBEDDED_NAME and not Path(model_path).is_dir() else model_path
    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise InputError(
            f"no tokenizer could be loaded from {model_path}: {error}",
            "give a model's folder or hub id; some tokenizers need --trust-remote-code",
        ) from None


def stop_tokens(model_path: str, tokenizer: Any) -> list[str]:
    """Texts of the tokens at which the target's generation config stops; empty where it has none."""
    from transformers import GenerationConfig

    from eyas.embedded import EMBEDDED_NAME, embedded_model

    place = embedded_model() if model_path == EMBEDDED_NAME and not Path(model_path).is_dir() else model_path
    try:
        ids = GenerationConfig.from_pretrained(place).eos_token_id
    except (OSError, ValueError):
        return []
    known = len(tokenizer)
    return [
        str(tokenizer.decode([i])) for i in (ids if isinstance(ids, list) else [ids]) if i is not None and i < known
    ]


def describe_tokenizer(template: ChatTemplate, model_path: str) -> dict[str, Any]:
    """What identifies the tokens of a dataset: hashes of vocabulary and template, sizes, the ids that end a turn."""
    tokenizer = template.tokenizer
    return {
        "model_path": model_path,
        "class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "vocab_hash": vocabulary_hash(tokenizer),
        "template_hash": content_hash((template.source or "").encode()),
        "eos_token_id": tokenizer.eos_token_id,
    }


def vocabulary_hash(tokenizer: Any) -> str:
    """Hash of every (token, id) pair: equal for two tokenizers only if an id means the same token in both."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return content_hash(vocabulary.encode("utf-8", "surrogatepass"))


def describe_shape(model_path: str, trust_remote_code: bool = False) -> dict[str, int] | None:
    """Hidden size and number of layers of the target, for predictions; None where there is only a tokenizer."""
    from transformers import AutoConfig

    from eyas.embedded import EMBEDDED_NAME, embedded_model

    place = embedded_model() if model_path == EMBEDDED_NAME and not Path(model_path).is_dir() else model_path
    try:
        text = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code).get_text_config()
        return {"hidden_size": int(text.hidden_size), "num_layers": int(text.num_hidden_layers)}
    except (OSError, ValueError, KeyError, AttributeError, ImportError):
        return None
