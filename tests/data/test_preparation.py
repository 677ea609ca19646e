"""`prepare`: rows in, dataset and report out."""

from __future__ import annotations

import json
import random
from typing import ClassVar

import pyarrow.parquet as pq
import pytest
from chat_templates import byte_level_tokenizer
from test_conversations import BAD

from eyas.base.errors import FolderConflictError, InputError
from eyas.base.locks import lock_directory
from eyas.data.dataset import open_dataset
from eyas.data.generators import Answer
from eyas.data.preparation import CHUNK_ROWS, CHUNKS_ALONE, PACKAGED, packaged, predicted_bytes, prepare
from eyas.data.prompts import load_prompts
from eyas.data.regeneration import regenerate
from eyas.data.settings import RegenerateSettings


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


def test_tokens_that_the_model_has_no_embedding_for_reject_their_row(tmp_path):
    """A tokenizer may have more tokens than the model has rows of embeddings."""
    tokenizer = byte_level_tokenizer("chatml")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    shape = {"model_type": "llama", "vocab_size": len(tokenizer) - 1, "hidden_size": 32, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    lines = (chat("Hi", "Hello"), chat("Hi", "say <new>"), {"input_ids": [5, len(tokenizer) - 1], "loss_mask": [0, 1]})
    data = rows(tmp_path / "chat.jsonl", *lines)
    report = prepare(data, str(tmp_path), tmp_path / "out")
    assert (report.kept, [one["line"] for one in report.rejected]) == (1, [2, 3])
    assert all(f"the target has {len(tokenizer) - 1} rows of embeddings" in one["reason"] for one in report.rejected)
    asked = rows(tmp_path / "asked.jsonl", chat("say <new>"))
    with pytest.raises(InputError, match=rf"asked.jsonl:1: token id {len(tokenizer) - 1}, and the target has"):
        load_prompts(asked, tokenizer, rows=len(tokenizer) - 1)
    asked = rows(tmp_path / "asked.jsonl", chat("Hi <new>"), chat("Hi"))

    class Echo:
        description: ClassVar = {"name": "echo"}

        def answer(self, prompts, limits, salt):
            return [Answer([5, tokenizer.eos_token_id], "stop") for _ in prompts]

        def close(self):
            pass

    settings = RegenerateSettings((asked,), str(tmp_path), tmp_path / "answers")
    answered = regenerate(settings, lambda *_: Echo())
    assert (answered.conversations, answered.rejected) == (1, 1)
    assert "rows of embeddings" in (tmp_path / "answers" / "rejected.jsonl").read_text()


def test_nothing_usable_is_an_error_and_leaves_no_dataset(model, tmp_path):
    data = rows(tmp_path / "chat.jsonl", chat("only a question"))
    with pytest.raises(InputError, match="no assistant turn"):
        prepare(data, model, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_file_that_breaks_off_is_counted_and_the_rest_is_made(model, tmp_path):
    good = json.dumps(chat("Hi", "Hello"))
    (tmp_path / "a.json").write_text(f"[{good}]\n[{good}]")
    (tmp_path / "b.jsonl").write_text(good.replace("Hi", "Yes?") + "\n")
    (tmp_path / "c.txt").write_text("x")
    report = prepare(tmp_path, model, tmp_path / "out")
    assert (report.samples, report.dropped, report.broken_sources) == (2, 1, 1)
    assert report.files_passed_over == ["c.txt"]
    assert f"{len(good) + 2} bytes from there on were not read" in report.rejected[0]["reason"]
    counts = json.loads((tmp_path / "out" / "manifest.json").read_text())["counts"]
    assert (counts["broken_sources"], counts["files_passed_over"]) == (1, ["c.txt"])


def test_answers_marked_as_not_to_be_trained_on_are_counted(model, tmp_path):
    row = chat("Hi", "Hello there", "And?", "Bye", "And?", " ")
    row["messages"][1]["weight"] = 0
    data = rows(tmp_path / "a.jsonl", row, chat("Hi", "Hello there", "And?", "Bye"))
    report = prepare(data, model, tmp_path / "out")
    assert (report.kept, report.answers, report.answers_left_out) == (2, 3, 1)
    left, whole = open_dataset(tmp_path / "out")
    tokenizer = byte_level_tokenizer("chatml")
    assert tokenizer.decode(left.token_ids[left.loss_mask == 1]) == "Bye<|im_end|>"
    assert left.token_ids.tolist() == whole.token_ids.tolist()
    assert tokenizer.decode(whole.token_ids[whole.loss_mask == 1]) == "Hello there<|im_end|>Bye<|im_end|>"


def test_a_supervised_token_that_nothing_stands_before_is_not_counted(model, tmp_path):
    data = rows(
        tmp_path / "a.jsonl", {"input_ids": [5], "loss_mask": [1]}, {"input_ids": [5, 6], "loss_mask": [1, 0]}, chat("Hi", "a")
    )  # fmt: skip
    report = prepare(data, model, tmp_path / "out")
    assert (report.kept, report.dropped) == (1, 2)
    assert all("no supervised token but the first" in one["reason"] for one in report.rejected)


def test_a_cut_answer_counts_as_cut(model, tmp_path):
    long = "word " * 200
    data = rows(tmp_path / "chat.jsonl", chat("Hi", long), chat("Hi", "Yes", "More?", long, "And?", "No"))
    report = prepare(data, model, tmp_path / "out", max_seq_len=100)
    assert (report.truncated, report.answers, report.answers_cut, report.answers_lost) == (2, 4, 2, 1)
    assert max(open_dataset(tmp_path / "out").lengths) == 100


def test_the_same_call_rebuilds_the_folder_and_another_is_refused(model, tmp_path):
    data = rows(tmp_path / "chat.jsonl", chat("Hi", "Hello"))
    prepare(data, model, tmp_path / "out")
    prepare(data, model, tmp_path / "out")
    with pytest.raises(FolderConflictError, match=r"max_seq_len"):
        prepare(data, model, tmp_path / "out", max_seq_len=77)
    prepare(data, model, tmp_path / "out", max_seq_len=77, overwrite=True)


def test_two_at_once_into_one_folder(model, tmp_path):
    data = rows(tmp_path / "chat.jsonl", chat("Hi", "Hello"))
    prepare(data, model, tmp_path / "out")
    with lock_directory(tmp_path / "out"), pytest.raises(FolderConflictError, match="by another run"):
        prepare(data, model, tmp_path / "out", overwrite=True)
    assert len(open_dataset(tmp_path / "out")) == 1


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


def test_two_hundred_malformed_rows_are_each_reported_and_good_rows_unharmed(model, tmp_path):
    rng = random.Random(3)
    kinds = list(BAD)
    lines, expected, good = [], {}, []
    while len(expected) < 200:
        if rng.random() < 0.5:
            good.append(chat(f"Question {len(good)}", f"Answer {len(good)}"))
            lines.append(json.dumps(good[-1]).encode())
        else:
            row, reason = BAD[rng.choice(kinds)]
            lines.append(row if isinstance(row, bytes) else json.dumps(row).encode())
            expected[len(lines)] = reason
    (tmp_path / "mixed.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    report = prepare(tmp_path / "mixed.jsonl", model, tmp_path / "out")
    assert (report.rows, report.dropped, report.kept) == (len(lines), 200, len(good))
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert {one["line"] for one in rejected} == set(expected)
    for one in rejected:
        assert expected[one["line"]] in one["reason"]
        assert one["file"].endswith("mixed.jsonl")
    alone = tmp_path / "good.jsonl"
    rows(alone, *good)
    prepare(alone, model, tmp_path / "clean")
    assert open_dataset(tmp_path / "out").ids == open_dataset(tmp_path / "clean").ids


def test_duplicates_are_written_once_with_their_count_or_kept(model, tmp_path):
    data = rows(tmp_path / "a.jsonl", chat("Hi", "Hello"), chat("Yes?", "No"), chat("Hi", "Hello"), chat("Hi", "Hello"))
    once = prepare(data, model, tmp_path / "once")
    assert (once.samples, once.duplicates) == (2, 2)
    assert pq.read_table(tmp_path / "once" / "data-00000.parquet")["count"].to_pylist() == [3, 1]
    assert len(open_dataset(tmp_path / "once")) == 2
    kept = prepare(data, model, tmp_path / "kept", duplicates="keep")
    assert (kept.samples, kept.duplicates) == (4, 2)
    assert pq.read_table(tmp_path / "kept" / "data-00000.parquet")["count"].to_pylist() == [1, 1, 1, 1]


def split_of(folder) -> tuple[set[str], set[str]]:
    """Sources of the samples of the training part and of the held-out part."""
    parts = (folder, folder / "heldout")
    return tuple(set(pq.read_table(part / "data-00000.parquet")["source"].to_pylist()) for part in parts)


def test_the_held_out_split_depends_on_content_alone(model, tmp_path):
    conversations = [chat(f"Question {k}", f"Answer {k}", "And?", "More " * (k % 40) + ".") for k in range(300)]
    data = rows(tmp_path / "a.jsonl", *conversations)
    first = prepare(data, model, tmp_path / "a", held_out=0.1)
    train, heldout = split_of(tmp_path / "a")
    assert not train & heldout
    assert len(heldout) == first.heldout_samples
    assert 12 <= len(heldout) <= 50
    # Another order, another length limit, other answers, more rows: every question stays on its side.
    again = [chat(row["messages"][0]["content"], "Quite another answer") for row in conversations]
    random.Random(1).shuffle(again)
    rows(tmp_path / "b.jsonl", *again, *(chat(f"New {k}", "Yes") for k in range(100)))
    prepare(tmp_path / "b.jsonl", model, tmp_path / "b", held_out=0.1, max_seq_len=40)
    _, heldout_again = split_of(tmp_path / "b")
    question = lambda row: row["messages"][0]["content"]  # noqa: E731
    asked = {question(conversations[int(source.rsplit(":", 1)[1]) - 1]) for source in heldout}
    asked_again = {question(again[line - 1]) for s in heldout_again if (line := int(s.rsplit(":", 1)[1])) <= len(again)}
    assert asked == asked_again
    # The training folder alone is what extraction reads; the held-out part is a dataset of its own.
    assert len(open_dataset(tmp_path / "a")) == len(train)
    assert not set(open_dataset(tmp_path / "a").ids) & set(open_dataset(tmp_path / "a" / "heldout").ids)
    # A larger share holds what a smaller one held.
    prepare(data, model, tmp_path / "c", held_out=0.3)
    assert heldout < split_of(tmp_path / "c")[1]


def test_an_equal_sample_stays_on_its_side(model, tmp_path):
    """The same conversation as chat and as tokens: the split's hashes differ, the sample is one."""
    conversations = [chat(f"Question {k}", f"Answer {k}") for k in range(60)]
    prepare(rows(tmp_path / "a.jsonl", *conversations), model, tmp_path / "plain")
    tokens = [
        {"input_ids": s.token_ids.tolist(), "loss_mask": s.loss_mask.tolist()} for s in open_dataset(tmp_path / "plain")
    ]
    both = rows(tmp_path / "b.jsonl", *conversations, *tokens)
    report = prepare(both, model, tmp_path / "out", held_out=0.3, duplicates="keep")
    assert report.duplicates == 60
    train, heldout = (set(open_dataset(folder).ids) for folder in (tmp_path / "out", tmp_path / "out" / "heldout"))
    assert len(train) + len(heldout) == 60
    assert not train & heldout


def test_worker_processes_give_the_same_dataset(model, tmp_path):
    n = CHUNK_ROWS * CHUNKS_ALONE + 300
    data = rows(tmp_path / "a.jsonl", *(chat(f"Question {k}", f"Answer {k}") if k % 50 else "broken" for k in range(n)))
    alone = prepare(data, model, tmp_path / "alone", workers=1)
    several = prepare(data, model, tmp_path / "several", workers=2)
    assert alone.samples == several.samples == n - alone.dropped
    for name in ("data-00000.parquet", "rejected.jsonl"):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "several" / name).read_bytes(), name


def test_a_length_limit_that_no_answer_reaches_names_itself(model, tmp_path):
    data = rows(tmp_path / "a.jsonl", chat("word " * 100, "Hello"))
    with pytest.raises(InputError, match="no assistant token within --max-seq-len 32"):
        prepare(data, model, tmp_path / "out", max_seq_len=32)


def test_long_samples_close_row_groups_early(model, tmp_path, monkeypatch):
    import eyas.data.dataset

    monkeypatch.setattr(eyas.data.dataset, "TOKENS_PER_GROUP", 200)
    data = rows(tmp_path / "a.jsonl", *(chat(f"Hi {k}", "word " * 10 * k) for k in range(1, 9)))
    prepare(data, model, tmp_path / "out")
    file = pq.ParquetFile(tmp_path / "out" / "data-00000.parquet")
    assert file.num_row_groups > 2
    assert [len(sample) for sample in open_dataset(tmp_path / "out")] == file.read()["n_tokens"].to_pylist()


def test_tokens_of_another_model_are_refused(model, tmp_path):
    data = rows(
        tmp_path / "a.jsonl", {"input_ids": [1, 9_999], "loss_mask": [0, 1]}, {"input_ids": [1, 2], "loss_mask": [0, 1]}
    )
    report = prepare(data, model, tmp_path / "out")
    assert (report.kept, report.dropped) == (1, 1)
    assert "token id 9999" in report.rejected[0]["reason"]


def test_predicted_bytes():
    # Kimi-K2.5: four states of 7168 values in bf16 are 57,344 bytes a token.
    assert predicted_bytes(1, 7168) == 57_344 + 5
    assert predicted_bytes(1000, 576, layers=3, bytes_per_value=4) == 1000 * (3 * 576 * 4 + 5)


def long_rows(tmp_path, n=20):
    """Seven of twenty answers are too long for 64 tokens."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Hi there"},
                {"role": "assistant", "content": " ".join(f"word{k}x{i}" for i in range(60 if k % 3 == 0 else 3))},
            ]
        }
        for k in range(n)
    ]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_long_rows_dropped_or_split_are_counted(model, tmp_path):
    dropped = prepare(long_rows(tmp_path), model, tmp_path / "a", max_seq_len=64, on_long="drop")
    assert (dropped.kept, dropped.dropped, dropped.samples) == (13, 7, 13)
    assert all("longer than --max-seq-len 64" in one["reason"] for one in dropped.rejected)
    split = prepare(long_rows(tmp_path), model, tmp_path / "b", max_seq_len=64, on_long="split")
    whole = prepare(long_rows(tmp_path), model, tmp_path / "c")
    assert split.supervised_tokens == whole.supervised_tokens  # no supervised token is lost
    assert split.answers_cut >= 7
    assert split.answers_lost == 0
