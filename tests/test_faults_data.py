"""Planted faults of masks and lengths (F13, F14): each must be caught before a dataset is made."""

from __future__ import annotations

import json

import numpy as np
import pytest
from chat_templates import CHATML, CHATML_BLOCKS, byte_level_tokenizer

from eyas.conversations import Conversation
from eyas.dataset import open_dataset
from eyas.errors import InputError
from eyas.masks import ChatTemplate, MaskError
from eyas.preparation import prepare
from eyas.row_samples import PrepareSettings

CHAT = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello you."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye."},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    byte_level_tokenizer("chatml").save_pretrained(folder)
    return str(folder)


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
def test_f13_generation_blocks_that_cover_the_wrong_text_are_refused(lie):
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
def test_f13_templates_whose_masks_cannot_be_derived_are_refused(wrong):
    with pytest.raises(MaskError):
        ChatTemplate(byte_level_tokenizer("chatml"), chat_template=WRONG_TEMPLATES[wrong]).samples(Conversation(CHAT))


def test_f13_no_dataset_is_made_with_such_a_template(model, tmp_path):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    with pytest.raises(InputError, match="not one of 1 rows"):
        prepare(tmp_path / "chat.jsonl", model, tmp_path / "out", chat_template=WRONG_TEMPLATES["alters the text"])
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("shifted right", "behind the generation prompt"),
        ("shifted left", "covers the generation prompt"),
        ("the user's turns", "covers the generation prompt"),
        ("nothing", "no assistant token"),
    ],
)
def test_f13_wrong_masks_of_tokenised_rows_are_refused(model, tmp_path, fault, reason):
    [good] = ChatTemplate(byte_level_tokenizer("chatml")).samples(Conversation(CHAT))
    mask = good.loss_mask.tolist()
    wrong = {
        "shifted right": [0, *mask[:-1]],
        "shifted left": [*mask[1:], 0],
        "the user's turns": [1] * len(mask),
        "nothing": [0] * len(mask),
    }[fault]
    ids = good.token_ids.tolist()
    rows = [{"input_ids": ids, "loss_mask": mask}, {"input_ids": [*ids, 9], "loss_mask": [*wrong, 0]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = prepare(tmp_path / "rows.jsonl", model, tmp_path / "out")
    assert (report.kept, report.dropped) == (1, 1)
    assert reason in report.rejected[0]["reason"]
    assert report.rejected[0]["line"] == 2
    assert np.array_equal(open_dataset(tmp_path / "out")[0].loss_mask, good.loss_mask)


def long_rows(tmp_path, n=20):
    """Seven of twenty answers are too long for 64 tokens."""
    rows = [
        {
            "messages": [
                CHAT[0],
                {"role": "assistant", "content": " ".join(f"word{k}x{i}" for i in range(60 if k % 3 == 0 else 3))},
            ]
        }
        for k in range(n)
    ]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_f14_truncated_answers_are_counted_and_marked_everywhere(model, tmp_path):
    report = prepare(long_rows(tmp_path), model, tmp_path / "out", settings=PrepareSettings(max_seq_len=64))
    assert (report.rows, report.samples, report.truncated, report.answers_cut) == (20, 20, 7, 7)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["counts"]["truncated"], manifest["counts"]["answers_cut"]) == (7, 7)
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "out" / "data-00000.parquet").to_pylist()
    assert [row["truncated"] for row in table] == [k % 3 == 0 for k in range(20)]
    for row in table:
        assert len(row["input_ids"]) == len(row["loss_mask"]) == row["n_tokens"] <= 64


def test_f14_long_rows_dropped_or_split_are_counted_too(model, tmp_path):
    dropped = prepare(
        long_rows(tmp_path), model, tmp_path / "a", settings=PrepareSettings(max_seq_len=64, on_long="drop")
    )
    assert (dropped.kept, dropped.dropped, dropped.samples) == (13, 7, 13)
    assert all("longer than --max-seq-len 64" in one["reason"] for one in dropped.rejected)
    split = prepare(
        long_rows(tmp_path), model, tmp_path / "b", settings=PrepareSettings(max_seq_len=64, on_long="split")
    )
    whole = prepare(long_rows(tmp_path), model, tmp_path / "c")
    assert split.supervised_tokens == whole.supervised_tokens  # no supervised token is lost
    assert split.answers_cut >= 7
    assert split.answers_lost == 0


def test_f14_an_answer_cut_at_its_generation_is_marked(model, tmp_path):
    cut = {**CHAT[1], "finish_reason": "length"}
    (tmp_path / "cut.jsonl").write_text(json.dumps({"messages": [CHAT[0], cut]}) + "\n")
    report = prepare(tmp_path / "cut.jsonl", model, tmp_path / "out")
    assert report.answers_unfinished == 1
    [sample] = open_dataset(tmp_path / "out")
    tokenizer = byte_level_tokenizer("chatml")
    assert tokenizer.decode(sample.token_ids[sample.loss_mask == 1].tolist()) == "Hello you."
