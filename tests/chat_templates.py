"""Small chat templates in the manner of well-known models, and tiny tokenizers that carry them."""

from __future__ import annotations

from functools import lru_cache

CHATML = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>

{{ m['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

#: kind -> (template, special tokens, bos, eos)
TEMPLATES = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], None, "<|im_end|>"),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|>",
        "<|end_of_text|>",
    ),
}

TEXT = [
    "The quick brown fox jumps over the lazy dog. Hello there, how are you today? I am fine, thank you.",
    "system user assistant tool You are a helpful assistant. What is the answer to 12 + 30? It is 42.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
]


@lru_cache
def byte_level_tokenizer(kind: str):
    """A fast byte-level BPE tokenizer of a few hundred tokens with the template of `kind`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template, special, bos, eos = TEMPLATES[kind]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        chat_template=template,
        additional_special_tokens=special,
    )
