"""Small chat templates written in the manner of well-known models, and tiny tokenizers of each family that carry them."""

from __future__ import annotations

from functools import lru_cache

# No generation block, white space kept, end of turn = eos.
CHATML = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

CHATML_BLOCKS = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}
{% else %}{{ m['content'] }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# The end of turn is not eos; texts are trimmed.
LLAMA3 = """{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>

{{ m['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

# Thinking is removed from turns before the last question; without thinking an empty block is inserted; tools.
QWEN3 = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content or '' %}{%- set thought = m.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}
{%- for call in m.tool_calls or [] %}{%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""

# Roles must alternate; the system text moves to the last user turn; a space before the answer; calls as a list.
MISTRAL = """{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}
{%- set ns = namespace(last=0) %}{%- for m in rest %}{%- if m['role'] == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{{- bos_token }}{%- for m in rest %}
{%- if loop.first and m['role'] != 'user' %}{{- raise_exception('conversation must start with the user') }}{%- endif %}
{%- if m['role'] == 'user' %}{{- '[INST] ' }}{%- if system is defined and loop.index0 == ns.last %}{{- system + '\\n\\n' }}{%- endif %}{{- m['content'] + '[/INST]' }}
{%- elif m['tool_calls'] %}{{- '[TOOL_CALLS] [' }}{%- for call in m['tool_calls'] %}{%- if call['id'] | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}{{- '{"name": "' + call['function']['name'] + '", "arguments": ' + (call['function']['arguments'] | tojson) + '}' }}{%- endfor %}{{- ']' + eos_token }}
{%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'] | trim + eos_token }}
{%- elif m['role'] == 'tool' %}{{- '[TOOL_RESULTS] ' + m['content'] + '[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"""

# The role is called model, the system text is put before the first question, a line break follows the end of turn.
GEMMA3 = """{{ bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set prefix = messages[0]['content'] + '\\n\\n' %}{%- set rest = messages[1:] %}{%- else %}{%- set prefix = '' %}{%- set rest = messages %}{%- endif %}
{%- for m in rest %}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' + (prefix if loop.first else '') + m['content'] | trim + '<end_of_turn>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"""

# No line breaks, full-width bars; thinking is closed in every shown turn, and its text never shown; the tools' results need no header.
DEEPSEEK_V3 = """{{ bos_token }}{%- set ns = namespace(tool=false) %}{%- for m in messages %}
{%- if m['role'] == 'system' %}{{- m['content'] }}{%- elif m['role'] == 'user' %}{%- set ns.tool = false %}{{- '<｜User｜>' + m['content'] }}
{%- elif m['role'] == 'tool' %}{%- set ns.tool = true %}{{- '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}
{%- else %}{%- if not ns.tool %}{{- '<｜Assistant｜></think>' }}{%- endif %}{%- set ns.tool = false %}
{%- set content = m['content'] or '' %}{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}{{- content }}
{%- if m['tool_calls'] %}{{- '<｜tool▁calls▁begin｜>' }}{%- for call in m['tool_calls'] %}{{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' + call['function']['arguments'] + '<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}
{{- '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{%- endif %}"""

# The prompt opens a think block that no shown turn has, and what stands before `</think>` in a text is cut off.
DEEPSEEK_R1 = """{{ bos_token }}{%- for m in messages %}{%- if m['role'] == 'system' %}{{- m['content'] }}{%- elif m['role'] == 'user' %}{{- '<｜User｜>' + m['content'] }}
{%- else %}{%- set content = m['content'] %}{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""

# Channels; the last answer ends otherwise than earlier ones; earlier analysis is dropped; the reasoning is called `thinking`.
GPT_OSS = """{{- '<|start|>system<|message|>You are a model.<|end|>' }}{%- if messages[0].role == 'system' %}{{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' }}{%- endif %}
{%- set ns = namespace(tool='') %}
{%- for m in messages %}{%- if m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'assistant' %}{%- if m.tool_calls %}{%- set call = m.tool_calls[0].function %}
{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}{%- set ns.tool = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' + (call.arguments | tojson) + '<|call|>' }}
{%- elif loop.last and not add_generation_prompt %}{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- elif m.role == 'tool' %}{{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

# History shows an empty think block, the prompt opens a full one; only turns after the last plain answer keep their reasoning.
KIMI_K25 = """{%- macro calls(m) %}{%- if m.get('tool_calls') %}<|tool_calls_section_begin|>{%- for call in m['tool_calls'] %}<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>{{ call['function']['arguments'] | tojson }}<|tool_call_end|>{%- endfor %}<|tool_calls_section_end|>{%- endif %}{%- endmacro %}
{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m['role'] == 'assistant' and not m.get('tool_calls') %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif %}
{%- for m in messages %}
{%- if m['role'] == 'assistant' %}<|im_assistant|>assistant<|im_middle|><think>{{ m.get('reasoning_content', '') if loop.index0 > ns.last }}</think>{{ m['content'] }}{{ calls(m) }}<|im_end|>
{%- elif m['role'] == 'user' %}<|im_user|>user<|im_middle|>{{ m['content'] }}<|im_end|>
{%- elif m['role'] == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.get('tool_call_id') }}
{{ m['content'] }}<|im_end|>
{%- else %}<|im_system|>system<|im_middle|>{{ m['content'] }}<|im_end|>{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{%- if thinking is defined and thinking is false %}<think></think>{%- else %}<think>{%- endif %}{%- endif %}"""

# The prompt does not open the think block that the target generates; the rendering shows it empty.
KIMI_K2_THINKING = KIMI_K25.replace(
    "{%- if thinking is defined and thinking is false %}<think></think>{%- else %}<think>{%- endif %}", ""
)

# No end of turn at all: the target stops by beginning the next turn. Thinking sits on a line of its own.
GLM = """[gMASK]<sop>{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|assistant|>\\n<think>' + (m.reasoning_content.strip() if loop.index0 > ns.last and m.reasoning_content else '') + '</think>\\n' + m.content.strip() }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- if m.role == 'user' and enable_thinking is defined and not enable_thinking %}{{- '/nothink' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n<think></think>' }}{%- endif %}{%- endif %}"""

# The tags of a thought are put around texts that have none; earlier turns lose what stands before the closing tag; the prompt opens the block with a line break.
NEMOTRON3 = """{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- set enable_thinking = enable_thinking if enable_thinking is defined else true %}
{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- if m.reasoning_content is string and m.reasoning_content | trim %}{%- set content = '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n' ~ m.content %}
{%- elif '<think>' in m.content or '</think>' in m.content %}{%- set content = m.content %}{%- else %}{%- set content = '<think></think>' ~ m.content %}{%- endif %}
{%- if loop.index0 < ns.last and '</think>' in content %}{%- set content = '<think></think>' ~ content.split('</think>')[-1] %}{%- endif %}
{{- '<|im_start|>assistant\\n' ~ content | trim }}
{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}{%- for name, value in call.function.arguments | items %}{{- '<parameter=' ~ name ~ '>\\n' ~ value ~ '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>\\n<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' if enable_thinking else '<|im_start|>assistant\\n<think></think>' }}{%- endif %}"""

# A call, its results and what follows are one turn of the model: the prompt behind a result has no header, and yet the next answer is shown with one.
GEMMA4 = """{{ bos_token }}{%- set ns = namespace(tool=false) %}{%- for m in messages %}
{%- if m.role == 'tool' %}{%- set ns.tool = true %}{{- 'response:' ~ m.content ~ '<tool_response|>' }}
{%- else %}{%- set ns.tool = false %}{{- '<|turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' }}
{%- if m.tool_calls and m.reasoning_content %}{{- '<|channel>thought\\n' ~ m.reasoning_content ~ '\\n<channel|>' }}{%- endif %}
{%- for call in m.tool_calls or [] %}{%- set ns.tool = true %}{{- '<|tool_call>call:' ~ call.function.name ~ '{' ~ call.function.arguments | tojson ~ '}<tool_call|><|tool_response>' }}{%- endfor %}
{{- m.content | trim }}{%- if not m.tool_calls %}{{- '<turn|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt and not ns.tool %}{{- '<|turn>model\\n' }}{%- if not enable_thinking %}{{- '<|channel>thought\\n<channel|>' }}{%- endif %}{%- endif %}"""

#: kind -> (template, special tokens, other added tokens, bos, eos)
TEMPLATES = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], [], None, "<|im_end|>"),
    "chatml-blocks": (CHATML_BLOCKS, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], [], None, "<|endoftext|>"),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        [],
        "<|begin_of_text|>",
        "<|end_of_text|>",
    ),
    "qwen3": (
        QWEN3,
        ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        ["<think>", "</think>", "<tool_call>", "</tool_call>"],
        None,
        "<|im_end|>",
    ),
    "mistral": (
        MISTRAL,
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        [],
        "<s>",
        "</s>",
    ),
    "gemma3": (GEMMA3, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], [], "<bos>", "<eos>"),
    "deepseek-v3": (
        DEEPSEEK_V3,
        [
            "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
        ],
        ["<think>", "</think>"],
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "gpt-oss": (
        GPT_OSS,
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>"],
        [],
        None,
        "<|return|>",
    ),
    "kimi-k2.5": (
        KIMI_K25,
        [
            "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        ],
        ["<think>", "</think>"],
        "[BOS]",
        "[EOS]",
    ),
    "glm": (GLM, ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"], ["<think>", "</think>"], None, "<|endoftext|>"),
}  # fmt: skip
TEMPLATES["nemotron3"] = (NEMOTRON3, *TEMPLATES["qwen3"][1:])
TEMPLATES["gemma4"] = (
    GEMMA4,
    ["<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"],
    ["<|channel>", "<channel|>"],
    "<bos>",
    "<eos>",
)
TEMPLATES["deepseek-r1"] = (DEEPSEEK_R1, *TEMPLATES["deepseek-v3"][1:])
TEMPLATES["kimi-k2-thinking"] = (KIMI_K2_THINKING, *TEMPLATES["kimi-k2.5"][1:])

TEXT = [
    "The quick brown fox jumps over the lazy dog. Hello there, how are you today? I am fine, thank you. Hello! Hello.",
    "system user assistant tool model You are a helpful assistant. What is the answer to 12 + 30? It is 42. Yes. No.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Let me think about it. I should add the numbers. Sunny. weather city Paris The answer is four.",
] * 4


@lru_cache
def byte_level_tokenizer(kind: str):
    """A fast byte-level BPE tokenizer (GPT-2's family: Llama 3, Qwen, DeepSeek, gpt-oss) with the template of `kind`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=TEMPLATES[kind][1], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrapped(tokenizer, kind)


@lru_cache
def metaspace_tokenizer(kind: str):
    """A fast unigram tokenizer that writes spaces as ▁ and puts one before the text (SentencePiece's family: Mistral, Gemma)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(set("".join(TEXT)) | {chr(c) for c in range(32, 127)} | set("äöüéñ你好▁🙂\t\n"))
    words = ["▁Hello", "Hello", "▁is", "▁It", "▁Sunny", "user", "model", "▁and", "▁the", "▁Yes", "Yes", "\n\n"]
    pieces = [("<unk>", 0.0)] + [(letter, -8.0) for letter in letters] + [(word, -2.0 * len(word)) for word in words]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _wrapped(tokenizer, kind)


def _wrapped(tokenizer, kind: str):
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    template, special, added, bos, eos = TEMPLATES[kind]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        chat_template=template,
        additional_special_tokens=special,
    )


@lru_cache
def slow_byte_tokenizer(kind: str):
    """A tokenizer written in Python, over bytes, without offsets (tiktoken's family: Kimi)."""
    from slow_tokenizer import SlowByteTokenizer
    from transformers import AddedToken

    template, special, added, bos, eos = TEMPLATES[kind]
    tokenizer = SlowByteTokenizer(
        bos_token=bos, eos_token=eos, chat_template=template, additional_special_tokens=special
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    return tokenizer


@lru_cache
def slow_sentencepiece_tokenizer(kind: str):
    """A tokenizer of the sentencepiece library itself: no offsets, a ▁ before every piece of text, line breaks made spaces."""
    import io
    import tempfile

    import sentencepiece
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    class SlowSentencePiece(SentencePieceBackend):
        vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012 - the name is the base class's

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 5),
        model_writer=model,
        vocab_size=120,
        model_type="bpe",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with tempfile.NamedTemporaryFile(suffix=".model") as file:
        file.write(model.getvalue())
        file.flush()
        template, special, _, bos, eos = TEMPLATES[kind]
        return SlowSentencePiece(
            vocab_file=file.name,
            bos_token=bos,
            eos_token=eos,
            unk_token="<unk>",
            chat_template=template,
            additional_special_tokens=special,
        )
