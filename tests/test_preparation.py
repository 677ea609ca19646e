"""`prepare`: rows in, dataset and report out."""

from __future__ import annotations

import json

import pytest
from chat_templates import byte_level_tokenizer

from eyas.dataset import open_dataset
from eyas.errors import FolderConflictError, InputError
from eyas.preparation import PACKAGED, PrepareSettings, packaged, prepare


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder with a tokenizer and a ChatML template: all that `prepare` needs of a model."""
    folder = tmp_path_factory.mktemp("model")
    byte_level_tokenizer("chatml").save_pretrained(folder)
    return str(folder)


def rows(path, *lines) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def chat(*turns: str) -> dict:
    return {"messages": [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(turns)]}


def test_good_rows_become_samples_and_bad_rows_are_named(model, tmp_path):
    data = rows(
        tmp_path / "chat.jsonl",
        chat("Hi", "Hello"),
        "not json",
        {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]},
        {"messages": []},
        chat("only a question"),
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    )
    report = prepare(data, model, tmp_path / "out")
    assert (report.rows, report.kept, report.dropped, report.samples) == (6, 3, 3, 3)
    dataset = open_dataset(tmp_path / "out")
    assert len(dataset) == 3
    assert dataset[2].token_ids.tolist() == [5, 6, 7]
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [(one["line"], one["reason"][:8]) for one in rejected] == [(2, "not JSON"), (4, "empty co"), (5, "no assis")]


def test_nothing_usable_is_an_error_and_leaves_no_dataset(model, tmp_path):
    data = rows(tmp_path / "chat.jsonl", chat("only a question"))
    with pytest.raises(InputError, match="no assistant turn"):
        prepare(data, model, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_cut_answer_counts_as_cut(model, tmp_path):
    long = "word " * 200
    data = rows(tmp_path / "chat.jsonl", chat("Hi", long), chat("Hi", "Yes", "More?", long, "And?", "No"))
    report = prepare(data, model, tmp_path / "out", settings=PrepareSettings(max_seq_len=100))
    assert (report.truncated, report.answers, report.answers_cut, report.answers_lost) == (2, 4, 2, 1)
    assert max(open_dataset(tmp_path / "out").lengths) == 100


def test_the_same_call_rebuilds_the_folder_and_another_is_refused(model, tmp_path):
    data = rows(tmp_path / "chat.jsonl", chat("Hi", "Hello"))
    prepare(data, model, tmp_path / "out")
    prepare(data, model, tmp_path / "out")
    with pytest.raises(FolderConflictError, match=r"max_seq_len"):
        prepare(data, model, tmp_path / "out", settings=PrepareSettings(max_seq_len=77))
    prepare(data, model, tmp_path / "out", settings=PrepareSettings(max_seq_len=77), overwrite=True)


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_sets_are_usable_to_the_last_row(model, tmp_path, name):
    report = prepare(name, model, tmp_path / "out", workers=1)
    assert report.dropped == 0
    assert report.duplicates == 0
    assert report.rows == len(packaged(name).read_text().splitlines())


def test_held_out_problems_are_not_among_the_others():
    questions = [
        {json.loads(line)["messages"][0]["content"] for line in packaged(name).read_text().splitlines()}
        for name in ("word_problems", "word_problems_heldout")
    ]
    assert not questions[0] & questions[1]
    assert len(questions[1]) >= 40
