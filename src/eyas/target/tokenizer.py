"""The target's tokenizer and shape, without its weights: loaded, and described for manifests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from eyas.base.errors import InputError
from eyas.base.files import content_hash
from eyas.target.embedded import resolve_model_path


def load_tokenizer(model_path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory, hub id or `smollm2`. Raises InputError when there is none."""
    place = resolve_model_path(model_path, weights=False)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise InputError(
            f"no tokenizer could be loaded from {model_path}: {error}",
            "give a model's directory or hub id; some tokenizers need --trust-remote-code",
        ) from None


def stop_ids(model_path: str) -> list[int]:
    """The tokens at which the target's generation config stops, or its config where it has none; empty where neither names one."""
    from transformers import GenerationConfig

    place = resolve_model_path(model_path, weights=False)
    for file in ("generation_config.json", "config.json"):
        if not (place / file).is_file():
            continue
        try:
            ids = GenerationConfig.from_pretrained(place, config_file_name=file).eos_token_id
        except (OSError, ValueError):
            continue
        return [int(i) for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
    return []


def stop_tokens(model_path: str, tokenizer: Any) -> list[str]:
    """Their texts, as far as the tokenizer has them."""
    return [str(tokenizer.decode([i])) for i in stop_ids(model_path) if i < len(tokenizer)]


def token_lookup(tokenizer: Any) -> Callable[[bytes], int | None]:
    """bytes -> the one token that stands for exactly these bytes, None where there is none or more than one.

    The table is built at the first look-up (a second for 150,000 tokens).
    """
    table: dict[bytes, int | None] = {}

    def look_up(piece: bytes) -> int | None:
        if not table:
            for index in range(len(tokenizer)):
                own = bytes_of(tokenizer, index)
                if own is not None:
                    table[own] = None if own in table else index
        return table.get(piece)

    return look_up


def bytes_of(tokenizer: Any, index: int) -> bytes | None:
    """The bytes that a token stands for; None where they cannot be known from outside."""
    text = tokenizer.decode([index], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    name = tokenizer.convert_ids_to_tokens(index)
    if isinstance(name, str) and name.startswith("▁"):  # decoding a lone token drops its space
        return name.replace("▁", " ").encode()
    if "\ufffd" not in text:
        return text.encode()
    if isinstance(name, str) and all(letter in _BYTE_OF for letter in name):
        return bytes(_BYTE_OF[letter] for letter in name)
    if isinstance(name, str) and len(name) == 6 and name.startswith("<0x"):
        return bytes([int(name[3:5], 16)])
    return None


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level BPE writes bytes: printable ones as themselves, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_letters()


def describe_tokenizer(tokenizer: Any, template: str | None, model_path: str) -> dict[str, Any]:
    """What identifies the tokens of a dataset: hashes of vocabulary and (Jinja) template, sizes, the ids that end a turn."""
    return {
        "model_path": model_path,
        "class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "vocab_hash": vocabulary_hash(tokenizer),
        "template_hash": content_hash((template or "").encode()),
        "eos_token_id": tokenizer.eos_token_id,
    }


def embedding_rows(model_path: str, trust_remote_code: bool = False) -> int | None:
    """How many token ids the target knows; None where there is only a tokenizer. A tokenizer may have more tokens than that."""
    shape = describe_shape(model_path, trust_remote_code)
    return shape["vocab_size"] if shape else None


def unknown_token(token_ids: Iterable[int], rows: int | None) -> str | None:
    """What is wrong with token ids that the target, with `rows` rows of embeddings, does not know; None = nothing."""
    largest = max(token_ids, default=-1)
    if rows is None or largest < rows:
        return None
    return f"token id {largest}, and the target has {rows} rows of embeddings: its tokenizer has tokens that the model has not"


def vocabulary_hash(tokenizer: Any) -> str:
    """Hash of every (token, id) pair: equal for two tokenizers only if an id means the same token in both."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return content_hash(vocabulary.encode("utf-8", "surrogatepass"))


def describe_shape(model_path: str, trust_remote_code: bool = False) -> dict[str, int] | None:
    """Hidden size, number of layers and rows of embeddings of the target; None where there is only a tokenizer."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    place = resolve_model_path(model_path, weights=False)
    try:
        text = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code).get_text_config()
        return {
            "hidden_size": int(text.hidden_size),
            "num_layers": int(text.num_hidden_layers),
            "vocab_size": int(text.vocab_size),
        }
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError, StrictDataclassError):
        return None
