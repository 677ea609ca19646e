"""Which tokens are supervised, for the embedded model's ChatML and for a Llama-3-like template."""

from __future__ import annotations

import pytest
from chat_templates import TEMPLATES, byte_level_tokenizer

from eyas.conversations import Conversation
from eyas.masks import ChatTemplate, MaskedTokens


def conversation(*turns: str) -> Conversation:
    """Texts of user and assistant in turn; a first text beginning with `system:` is the system's."""
    messages = []
    texts = list(turns)
    if texts[0].startswith("system:"):
        messages.append({"role": "system", "content": texts.pop(0).removeprefix("system:")})
    for number, text in enumerate(texts):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    return Conversation(messages)


def supervised(tokenizer, sample: MaskedTokens) -> list[str]:
    """Texts of the runs of supervised tokens."""
    texts: list[str] = []
    run: list[int] = []
    for token, flag in zip(sample.token_ids.tolist(), [*sample.loss_mask.tolist()], strict=True):
        if flag:
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run))
            run = []
    return [*texts, tokenizer.decode(run)] if run else texts


@pytest.mark.parametrize(("kind", "end"), [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>")])
def test_answers_and_their_end_of_turn_are_supervised_and_nothing_else(kind, end):
    tokenizer = byte_level_tokenizer(kind)
    [sample] = ChatTemplate(tokenizer).samples(
        conversation("system:Be brief.", "Hi there", "Hello!", "And now?", "\n\nBye. ")
    )
    text = tokenizer.decode(sample.token_ids.tolist())
    assert text.count(end) == 5
    # Llama's template strips white space, ChatML's does not; what the template shows is what the model would generate.
    assert supervised(tokenizer, sample) == ["Hello!" + end, ("Bye." if kind == "llama3" else "\n\nBye. ") + end]


def test_the_template_of_each_kind_is_used_as_it_is():
    tokenizer = byte_level_tokenizer("chatml")
    one = conversation("Hi", "Yes")
    [sample] = ChatTemplate(tokenizer).samples(one)
    expected = tokenizer.apply_chat_template(one.messages, tokenize=True, return_dict=False)
    assert sample.token_ids.tolist() == list(expected)
    assert set(TEMPLATES) >= {"chatml", "llama3"}
