"""A tokenizer in the manner of tiktoken-based ones: Python, bytes merged by rank, no character offsets."""

from __future__ import annotations

import itertools
import re

from transformers import PreTrainedTokenizer

WORDS = re.compile(r" ?[A-Za-z]+| ?[0-9]{1,3}|[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")
MERGES = [
    "th",
    "he",
    "the",
    "in",
    "an",
    "ll",
    "He",
    "ell",
    " a",
    " t",
    " the",
    "is",
    " is",
    "Hell",
    "Hello",
    "\n\n",
    "es",
    "Yes",
    "er",
    "om",
]


class SlowByteTokenizer(PreTrainedTokenizer):
    """256 bytes and a few merges; a token may hold a part of a character."""

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 - the name is the base class's

    def __init__(self, **kwargs):
        self.pieces = [bytes([b]) for b in range(256)] + [merge.encode() for merge in MERGES]
        self.ranks = {piece: rank for rank, piece in enumerate(self.pieces)}
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def get_vocab(self) -> dict[str, int]:
        return {self._convert_id_to_token(i): i for i in range(self.vocab_size)} | dict(self.added_tokens_encoder)

    def _tokenize(self, text: str, **kwargs) -> list[str]:
        return [piece.hex() for word in WORDS.findall(text) for piece in self._merged(word.encode())]

    def _merged(self, word: bytes) -> list[bytes]:
        parts = [word[i : i + 1] for i in range(len(word))]
        while True:
            pairs = [(self.ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
            if not pairs or min(pairs)[0] == 1 << 30:
                return parts
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    def _convert_token_to_id(self, token: str) -> int:
        return self.ranks[bytes.fromhex(token)]

    def _convert_id_to_token(self, index: int) -> str:
        return self.pieces[index].hex()

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        added = self.added_tokens_encoder
        parts = [token.encode() if token in added else bytes.fromhex(token) for token in tokens]
        return b"".join(parts).decode("utf-8", errors="replace")
