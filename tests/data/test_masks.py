"""Golden tests: exactly which tokens are supervised, for each kind of chat template and tokenizer."""

from __future__ import annotations

import pytest
from chat_templates import (
    CHATML,
    CHATML_BLOCKS,
    TEMPLATES,
    byte_level_tokenizer,
    metaspace_tokenizer,
    slow_byte_tokenizer,
    slow_sentencepiece_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.data.chat_template import ChatTemplate, MaskedTokens, MaskError
from eyas.data.conversations import Conversation
from eyas.data.settings import MaskSettings

FAMILY = {
    "mistral": metaspace_tokenizer,
    "gemma3": metaspace_tokenizer,
    "kimi-k2.5": slow_byte_tokenizer,
    "kimi-k2-thinking": slow_byte_tokenizer,
}


def tokenizer_of(kind: str):
    return FAMILY.get(kind, byte_level_tokenizer)(kind)


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, reasoning=None, call=None):
    message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if call:
        function = {"name": call, "arguments": {"city": "Paris"}}
        message["tool_calls"] = [{"id": f"functions.{call}:0", "type": "function", "function": function}]
    return message


def tool(text):
    return {"role": "tool", "content": text, "tool_call_id": "functions.weather:0"}


def runs(tokenizer, sample: MaskedTokens) -> list[list[str]]:
    """The runs of supervised tokens, each token as its own text."""
    found: list[list[str]] = []
    before = 0
    for token, flag in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if flag and not before:
            found.append([])
        if flag:
            found[-1].append(tokenizer.decode([token]))
        before = flag
    return found


def supervised(kind, *messages, tools=None, **kwargs) -> list[list[list[str]]]:
    """For each sample of the conversation, its runs of supervised tokens."""
    tokenizer = tokenizer_of(kind)
    stop = ["<|user|>", "<|endoftext|>"] if kind == "glm" else []
    template = ChatTemplate(tokenizer, MaskSettings(**kwargs), stop_tokens=stop)
    return [runs(tokenizer, sample) for sample in template.samples(Conversation(list(messages), tools))]


def texts(samples) -> list[list[str]]:
    return [["".join(run) for run in sample] for sample in samples]


PLAIN = [system("Be brief."), user("Hi"), assistant("Hello."), user("And?"), assistant(" Hello. ")]
REASONED = [user("Hi"), assistant("Hello.", "I should"), user("And?"), assistant("Yes.", "the answer")]
CALLED = [user("Hi"), assistant("", "I need it.", "weather"), tool("Sunny"), assistant("It is Sunny.")]
THINKING_ON, THINKING_OFF = {"thinking": True}, {"thinking": False, "enable_thinking": False}


# The same words twice, the second time with white space around them; the answer, its end of turn, nothing else.
PLAIN_GOLDEN = {
    "chatml": [[["Hel", "lo", ".", "<|im_end|>"], [" Hello", ".", " ", "<|im_end|>"]]],
    "chatml-blocks": [[["Hel", "lo", ".", "<|im_end|>"], [" Hello", ".", " ", "<|im_end|>"]]],
    "llama3": [[["Hel", "lo", ".", "<|eot_id|>"], ["Hel", "lo", ".", "<|eot_id|>"]]],
    "qwen3": [[["Hel", "lo", ".", "<|im_end|>"], [" Hello", ".", " ", "<|im_end|>"]]],
    # The system text moves to the last question, so the first answer had another prompt: a sample of its own.
    "mistral": [[["Hello", ".", "</s>"]], [["Hello", ".", "</s>"]]],
    "gemma3": [[["Hello", ".", "<end_of_turn>"], ["Hello", ".", "<end_of_turn>"]]],
    "deepseek-v3": [[["Hel", "lo", ".", "<｜end▁of▁sentence｜>"], [" Hello", ".", " ", "<｜end▁of▁sentence｜>"]]],
    "deepseek-r1": [[["Hel", "lo", ".", "<｜end▁of▁sentence｜>"], [" Hello", ".", " ", "<｜end▁of▁sentence｜>"]]],
    # An earlier answer is shown with <|end|> although the model generated <|return|>: a sample of its own.
    "gpt-oss": [
        [["<|channel|>", "f", "in", "a", "l", "<|message|>", "Hel", "lo", ".", "<|return|>"]],
        [["<|channel|>", "f", "in", "a", "l", "<|message|>", " Hello", ".", " ", "<|return|>"]],
    ],
    "kimi-k2.5": [[["Hello", ".", "<|im_end|>"], [" ", "Hello", ".", " ", "<|im_end|>"]]],
    "kimi-k2-thinking": [[["Hello", ".", "<|im_end|>"], [" ", "Hello", ".", " ", "<|im_end|>"]]],
    # The next turn's first token is what ends the first answer; nothing ends the last one.
    "nemotron3": [[["Hel", "lo", ".", "<|im_end|>"], [" Hello", ".", "<|im_end|>"]]],
    "gemma4": [[["Hel", "lo", ".", "<turn|>"], ["Hel", "lo", ".", "<turn|>"]]],
    "glm": [[["Hel", "lo", ".", "<|user|>"], ["Hel", "lo", "."]]],
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_plain_conversation(kind):
    assert supervised(kind, *PLAIN) == PLAIN_GOLDEN[kind]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_token_ids_are_those_of_the_rendering(kind):
    tokenizer, messages = tokenizer_of(kind), PLAIN[1:3]
    [sample] = ChatTemplate(tokenizer).samples(Conversation(messages))
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert sample.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


# Every turn as it was generated: its own reasoning, then what closes it, then the answer.
REASONED_GOLDEN = {
    "qwen3": [
        ["<think>\nI should\n</think>\n\nHello.<|im_end|>"],
        ["<think>\nthe answer\n</think>\n\nYes.<|im_end|>"],
    ],
    # These two templates show no reasoning of answered questions at all; the generation prompt opens the block.
    "deepseek-v3": [["I should</think>Hello.<｜end▁of▁sentence｜>"], ["the answer</think>Yes.<｜end▁of▁sentence｜>"]],
    "deepseek-r1": [
        ["I should\n</think>\n\nHello.<｜end▁of▁sentence｜>"],
        ["the answer\n</think>\n\nYes.<｜end▁of▁sentence｜>"],
    ],
    "kimi-k2.5": [["I should</think>Hello.<|im_end|>"], ["the answer</think>Yes.<|im_end|>"]],
    # Here the prompt opens no block: its tag is generated too.
    "kimi-k2-thinking": [["<think>I should</think>Hello.<|im_end|>"], ["<think>the answer</think>Yes.<|im_end|>"]],
    "glm": [["\n<think>I should</think>\nHello."], ["\n<think>the answer</think>\nYes."]],
    "gpt-oss": [
        ["<|channel|>analysis<|message|>I should<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"],
        ["<|channel|>analysis<|message|>the answer<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"],
    ],
}


@pytest.mark.parametrize("kind", REASONED_GOLDEN)
def test_reasoning_is_supervised_where_it_was_generated(kind):
    assert texts(supervised(kind, *REASONED, chat_template_kwargs=THINKING_ON)) == REASONED_GOLDEN[kind]


def test_the_prompt_of_an_unrolled_turn_is_what_serving_would_send():
    for kind in REASONED_GOLDEN:
        tokenizer = tokenizer_of(kind)
        template = ChatTemplate(tokenizer, MaskSettings(chat_template_kwargs=THINKING_ON))
        for turn, sample in zip((1, 3), template.samples(Conversation(REASONED)), strict=True):
            served = template.prompt(template._clean(REASONED[:turn]))
            start = sample.loss_mask.tolist().index(1)
            assert tokenizer.decode(sample.token_ids[:start].tolist()) == served, kind


CALLED_GOLDEN = {
    "nemotron3": [
        [
            "I need it.\n</think>\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n<|im_end|>",
            "It is Sunny.<|im_end|>",
        ]
    ],
    "qwen3": [
        [
            '<think>\nI need it.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
            "It is Sunny.<|im_end|>",
        ]
    ],
    "deepseek-v3": [
        [
            'I need it.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        ],
        ["It is Sunny.<｜end▁of▁sentence｜>"],
    ],
    "gpt-oss": [
        [
            "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant to=functions.weather"
            '<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
            "<|channel|>final<|message|>It is Sunny.<|return|>",
        ]
    ],
    "kimi-k2.5": [
        [
            "I need it.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
            '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        ],
        ["It is Sunny.<|im_end|>"],
    ],
}


@pytest.mark.parametrize("kind", CALLED_GOLDEN)
def test_tool_calls_are_supervised_and_their_results_are_not(kind):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    assert texts(supervised(kind, *CALLED, tools=tools, chat_template_kwargs=THINKING_ON)) == CALLED_GOLDEN[kind]


def test_tools_are_shown_to_the_model_and_not_supervised():
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "text"}}}]
    for kind in ("qwen3", "kimi-k2.5"):
        tokenizer = tokenizer_of(kind)
        template = ChatTemplate(tokenizer, MaskSettings(chat_template_kwargs=THINKING_ON))
        for sample in template.samples(Conversation(CALLED, tools)):
            first = sample.loss_mask.tolist().index(1)
            assert '"parameters"' in tokenizer.decode(sample.token_ids[:first].tolist()), kind


def test_tool_calls_of_the_mistral_kind():
    [[first, second]] = texts(supervised("mistral", *CALLED, reasoning="drop"))
    # A lone ▁ decodes to nothing, so the spaces of single tokens do not show.
    assert first.replace(" ", "") == '[TOOL_CALLS][{"name":"weather","arguments":{"city":"Paris"}}]</s>'
    assert second.replace(" ", "") == "ItisSunny.</s>"


@pytest.mark.parametrize(
    ("kind", "end"),
    [("mistral", "</s>"), ("gemma3", "<end_of_turn>"), ("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>")],
)
def test_the_slow_sentencepiece_tokenizer(kind, end):
    pytest.importorskip("sentencepiece")
    tokenizer = slow_sentencepiece_tokenizer(kind)
    messages = [user("Hello there"), assistant("Hello. It is."), user("Hello"), assistant("Hello.")]
    [sample] = ChatTemplate(tokenizer).samples(Conversation(messages))
    ids, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
    pieces = [tokenizer.convert_ids_to_tokens(token) for token, flag in zip(ids, mask, strict=True) if flag]
    assert pieces == ["▁Hello", ".", "▁I", "t", "▁is", ".", end, "▁Hello", ".", end]
    assert (
        ids == tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    )


# ---------------------------------------------------------------- thinking on and off


def test_an_empty_think_block_is_the_templates_and_not_supervised():
    for kwargs in ({}, THINKING_ON, THINKING_OFF):
        for kind, end in (
            ("qwen3", "<|im_end|>"),
            ("kimi-k2.5", "<|im_end|>"),
            ("deepseek-v3", "<｜end▁of▁sentence｜>"),
        ):
            samples = texts(supervised(kind, user("Hi"), assistant("Hello."), chat_template_kwargs=kwargs))
            assert samples == [["Hello." + end]], (kind, kwargs)


def test_reasoning_with_thinking_off_is_refused_or_left_out():
    with pytest.raises(MaskError, match="thinking is off"):
        supervised("qwen3", *REASONED, chat_template_kwargs=THINKING_OFF)
    dropped = texts(supervised("qwen3", *REASONED, chat_template_kwargs=THINKING_OFF, reasoning="drop"))
    assert dropped == [["Hello.<|im_end|>", "Yes.<|im_end|>"]]


def test_reasoning_that_a_template_cannot_show_is_refused():
    with pytest.raises(MaskError, match="leaves out the reasoning of message 2"):
        supervised("chatml", *REASONED)


def test_reasoning_written_into_the_content():
    inline = [user("Hi"), assistant("<think>\nI should\n</think>\n\nHello.")]
    assert texts(supervised("qwen3", *inline)) == [["<think>\nI should\n</think>\n\nHello.<|im_end|>"]]
    assert texts(supervised("deepseek-v3", *inline, chat_template_kwargs=THINKING_ON)) == [
        ["I should</think>\n\nHello.<｜end▁of▁sentence｜>"]
    ]
    assert texts(supervised("chatml", *inline)) == [["<think>\nI should\n</think>\n\nHello.<|im_end|>"]]
    assert texts(supervised("chatml", *inline, reasoning="drop")) == [["Hello.<|im_end|>"]]


@pytest.mark.parametrize("kind", [*REASONED_GOLDEN, "nemotron3"])
@pytest.mark.parametrize("form", ["<think>\nI should\n</think>\n\nHello.", "I should\n</think>\n\nHello."])
def test_a_thought_in_the_text_is_supervised_as_it_is_generated(kind, form):
    """As a field, between its tags, or as generated behind a prompt that opens the block: one and the same sample."""
    as_field = [user("Hi"), assistant("Hello." if kind not in ("deepseek-v3",) else "\n\nHello.", "I should")]
    expected = supervised(kind, *as_field, chat_template_kwargs=THINKING_ON)
    assert supervised(kind, user("Hi"), assistant(form), chat_template_kwargs=THINKING_ON) == expected
    assert "I should" in texts(expected)[0][0]


UNCLOSED = {
    "qwen3": "<think>\nI should go",  # not `</think>`, and no empty block before it
    "chatml": "<think>\nI should go",
    "kimi-k2-thinking": "<think>\nI should go",
    "deepseek-r1": "I should go",  # the prompt opens the block, with its line break
    "nemotron3": "I should go",
    "kimi-k2.5": "\nI should go",
}


@pytest.mark.parametrize("kind", UNCLOSED)
def test_a_thought_that_was_cut_is_what_the_target_generated_behind_its_prompt(kind):
    tokenizer = tokenizer_of(kind)
    template = ChatTemplate(tokenizer, MaskSettings(chat_template_kwargs=THINKING_ON))
    [sample] = template.samples(Conversation([user("Hi"), assistant("<think>\nI should go")]))
    start = sample.loss_mask.tolist().index(1)
    assert sample.loss_mask[start:].all()
    assert tokenizer.decode(sample.token_ids[:start].tolist()) == template.prompt([user("Hi")])
    assert tokenizer.decode(sample.token_ids[start:].tolist()) == UNCLOSED[kind]
    assert sample.notes == ["answer unfinished when it was generated"]
    both = texts(supervised(kind, user("Hi"), assistant("Yes."), user("And?"), assistant("<think>\nI should go"), chat_template_kwargs=THINKING_ON))  # fmt: skip
    assert len(both) == 2
    assert both[0] == [UNCLOSED[kind]]
    assert both[1][0].startswith("Yes.")


def test_a_cut_thought_that_the_target_cannot_have_generated_is_refused():
    with pytest.raises(MaskError, match="thinking is off"):
        supervised("qwen3", user("Hi"), assistant("<think>\nI should go"), chat_template_kwargs=THINKING_OFF)
    with pytest.raises(MaskError, match="thoughts otherwise than <think>"):
        supervised("gpt-oss", user("Hi"), assistant("<think>\nI should go"))
    with pytest.raises(MaskError, match="a thought without an end, and more behind it"):
        supervised("qwen3", user("Hi"), assistant("<think>\nI should go"), user("And?"), assistant("Yes."))


def test_behind_a_tools_answer_the_target_goes_on_without_a_header():
    """Gemma 4's prompt behind a tool's answer has no header, its rendering has one: it is neither supervised nor in the context."""
    called = [*CALLED, user("And?"), assistant("Bye.")]
    tokenizer = tokenizer_of("gemma4")
    template = ChatTemplate(tokenizer, MaskSettings(chat_template_kwargs={"enable_thinking": True}))
    behind, whole = template.samples(Conversation(called))
    assert ["".join(run) for run in runs(tokenizer, behind)] == ["It is Sunny.<turn|>"]
    start = behind.loss_mask.tolist().index(1)
    assert tokenizer.decode(behind.token_ids[:start].tolist()) == template.prompt(called[:3])
    assert template.prompt(called[:3]).endswith("<tool_response|>")
    assert ["".join(run) for run in runs(tokenizer, whole)] == [
        '<|channel>thought\nI need it.\n<channel|><|tool_call>call:weather{{"city": "Paris"}}<tool_call|><|tool_response>',
        "Bye.<turn|>",
    ]


# ---------------------------------------------------------------- shapes of conversations


def test_a_conversation_that_the_assistant_opens():
    opened = [assistant("Hello."), user("Hi"), assistant("Hello.")]
    for kind in ("chatml", "llama3", "kimi-k2.5", "gpt-oss"):
        samples = texts(supervised(kind, *opened))
        assert sum(run.count("Hello.") for sample in samples for run in sample) == 2, kind
    with pytest.raises(MaskError, match="refuses it: conversation must start with the user"):
        supervised("mistral", *opened)


def test_white_space_at_the_ends_of_an_answer():
    assert texts(supervised("chatml", user("Hi"), assistant("\n\n Hello \n"))) == [["\n\n Hello \n<|im_end|>"]]
    assert texts(supervised("llama3", user("Hi"), assistant("\n\n Hello \n"))) == [["Hello<|eot_id|>"]]


def test_an_answer_that_begins_with_a_line_break_is_not_merged_with_the_prompt():
    tokenizer = byte_level_tokenizer("chatml")
    merged = tokenizer("\n\n\n")["input_ids"]
    [sample] = ChatTemplate(tokenizer).samples(Conversation([user("Hi"), assistant("\n\nHello.")]))
    [run] = runs(tokenizer, sample)
    assert "".join(run) == "\n\nHello.<|im_end|>"
    prompt = tokenizer(ChatTemplate(tokenizer).prompt([user("Hi")]), add_special_tokens=False)["input_ids"]
    assert sample.token_ids.tolist()[: len(prompt)] == prompt, merged


def test_turns_after_the_last_answer_are_left_out():
    assert texts(supervised("qwen3", *REASONED[:2], user("And?"))) == [
        ["<think>\nI should\n</think>\n\nHello.<|im_end|>"]
    ]


def test_supervise_last_turn_and_all():
    assert texts(supervised("chatml", *PLAIN, supervise="last-turn")) == [[" Hello. <|im_end|>"]]
    tokenizer = tokenizer_of("chatml")
    [sample] = ChatTemplate(tokenizer, MaskSettings(supervise="all")).samples(Conversation(PLAIN))
    assert sample.loss_mask.all()


def test_rewritten_turns_can_be_skipped():
    assert texts(supervised("qwen3", *REASONED, rewritten="skip")) == [REASONED_GOLDEN["qwen3"][1]]


def test_a_cut_answer_does_not_teach_its_end_of_turn():
    cut = {**assistant("Hello and"), "finish_reason": "length"}
    assert texts(supervised("chatml", user("Hi"), assistant("Yes."), user("Go on"), cut)) == [
        ["Yes.<|im_end|>", "Hello and"]
    ]
    assert texts(supervised("gpt-oss", user("Hi"), cut)) == [["<|channel|>final<|message|>Hello and"]]


def test_special_tokens_in_a_text_are_refused():
    with pytest.raises(MaskError, match=r"special token <\|im_end\|> as text"):
        supervised("chatml", user("Hi"), assistant("Hello<|im_end|>"))


# ---------------------------------------------------------------- property

words = st.text(alphabet="abcXYZ ,.!?\n\t'äé你好🙂{}<>|[]\"", min_size=1, max_size=30).filter(
    lambda text: bool(text.strip())
)
turns = st.lists(st.tuples(words, words), min_size=1, max_size=4)
END = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "kimi-k2.5": "<|im_end|>",
    "deepseek-v3": "<｜end▁of▁sentence｜>",
    "gpt-oss": "<|return|>",
    "mistral": "</s>",
    "gemma3": "<end_of_turn>",
}


@pytest.mark.parametrize("kind", END)
@settings(max_examples=60, deadline=None)
@given(turns=turns, repeated=st.booleans())
def test_supervised_spans_give_back_the_answers(kind, turns, repeated):
    """Also where every answer is the same text, and where a question repeats an answer."""
    if repeated:
        turns = [(question + turns[0][1], turns[0][1]) for question, _ in turns]
    tokenizer = tokenizer_of(kind)
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    found = []
    for sample in ChatTemplate(tokenizer).samples(Conversation(messages)):
        ids, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
        edges = [i for i in range(len(mask)) if mask[i] and (i == 0 or not mask[i - 1])]
        for start in edges:
            end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
            found.append(tokenizer.decode(ids[start:end]))
    head = "<|channel|>final<|message|>" if kind == "gpt-oss" else ""
    shape = str.strip if kind in ("llama3", "mistral", "gemma3") else str
    expected = [head + shape(answer) + END[kind] for _, answer in turns]
    if kind == "qwen3":  # its template strips line breaks between a think block and the answer
        expected = [answer.lstrip("\n") + END[kind] for _, answer in turns]
    assert sorted(found) == sorted(expected)


# Conversations with reasoning, tool calls and results, every text marked by a word of its own.
shapes = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.integers(0, 2)), min_size=1, max_size=4
)  # (reasoning, text beside a call, number of tool rounds) of each question


def marked_conversation(shape) -> tuple[list[dict], list[str], list[str]]:
    """(messages, words of the assistant, words of the others) for a list of `shapes`."""
    messages, own, others = [], [], []

    def word(bag):
        bag.append(f"w{len(own) + len(others):02d}x")
        return bag[-1]

    for reasoned, beside, rounds in shape:
        messages.append(user(f"Q {word(others)}?"))
        for _ in range(rounds):
            name = word(own)
            call = assistant(f"So {word(own)}" if beside else "", f"Hm {word(own)}" if reasoned else None, name)
            call["tool_calls"][0]["function"]["arguments"] = {"city": word(own)}
            messages += [call, {**tool(f"T {word(others)}"), "tool_call_id": call["tool_calls"][0]["id"]}]
        messages.append(assistant(f"A {word(own)}.", f"Hm {word(own)}" if reasoned else None))
    return messages, own, others


@pytest.mark.parametrize("kind", ["qwen3", "kimi-k2.5", "kimi-k2-thinking", "deepseek-v3", "gpt-oss"])
@settings(max_examples=40, deadline=None)
@given(shape=shapes)
def test_every_text_of_the_assistant_is_supervised_once_and_no_other(kind, shape):
    if kind == "gpt-oss":  # its template shows no text beside a call
        shape = [(reasoned, False, rounds) for reasoned, _, rounds in shape]
    if kind == "deepseek-v3":  # its template opens no think block behind a tool's result
        shape = [(reasoned and not rounds, beside, rounds) for reasoned, beside, rounds in shape]
    messages, own, others = marked_conversation(shape)
    tokenizer = tokenizer_of(kind)
    template = ChatTemplate(tokenizer, MaskSettings(chat_template_kwargs=THINKING_ON))
    found = ""
    for sample in template.samples(Conversation(messages)):
        ids, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
        for start in [i for i in range(len(mask)) if mask[i] and not mask[i - 1]]:
            end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
            found += tokenizer.decode(ids[start:end]) + "\n"
    assert {one: found.count(one) for one in own} == dict.fromkeys(own, 1)
    assert not [one for one in others if one in found]


# --- templates whose masks would be wrong (fault F13, see test_faults.py) ---------------------------------------------------

CHAT = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello you."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye."},
]


def with_blocks(user: bool, begin: str, end: str) -> str:
    """A ChatML template whose generation block is put wrongly."""
    answer = "{{ m['content'] }}"
    if user:
        return CHATML_BLOCKS.replace(
            "{% if m['role'] == 'assistant' %}", "{% if m['role'] == 'user' or m['role'] == 'assistant' %}"
        )
    return CHATML_BLOCKS.replace("{% generation %}" + answer + "<|im_end|>{% endgeneration %}", begin + answer + end)


LIES = {
    "the user's turns": with_blocks(True, "", ""),
    "nothing": with_blocks(False, "{% if false %}{% generation %}x{% endgeneration %}{% endif %}", "<|im_end|>"),
    "one character late": CHATML_BLOCKS.replace(
        "{% generation %}{{ m['content'] }}", "{{ m['content'][0] }}{% generation %}{{ m['content'][1:] }}"
    ),
    "the header": CHATML_BLOCKS.replace(
        "<|im_start|>{{ m['role'] }}\n", "{% generation %}<|im_start|>{{ m['role'] }}\n{% endgeneration %}"
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_generation_blocks_that_cover_the_wrong_text_are_refused(lie):
    tokenizer = byte_level_tokenizer("chatml-blocks")
    honest = ChatTemplate(tokenizer).samples(Conversation(CHAT))
    assert len(honest) == 1
    with pytest.raises(MaskError, match="generation block"):
        ChatTemplate(tokenizer, chat_template=LIES[lie]).samples(Conversation(CHAT))


WRONG_TEMPLATES = {
    "alters the text": CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}"),
    "cuts the text": CHATML.replace("{{ m['content'] }}", "{{ m['content'][:4] }}"),
    "drops the last answer": CHATML.replace(
        "{% for m in messages %}", "{% for m in messages if not loop.last or m.role == 'user' %}"
    ).replace("{% for m in messages if not loop.last or m.role == 'user' %}", "{% for m in messages[:-1] %}"),
    "depends on the text": CHATML.replace("{{ m['content'] }}", "{{ m['content'] | length }}: {{ m['content'] }}"),
    "asks otherwise than it shows": CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>ai\n{% endif %}"),
}


@pytest.mark.parametrize("wrong", WRONG_TEMPLATES)
def test_templates_whose_masks_cannot_be_derived_are_refused(wrong):
    with pytest.raises(MaskError):
        ChatTemplate(byte_level_tokenizer("chatml"), chat_template=WRONG_TEMPLATES[wrong]).samples(Conversation(CHAT))
