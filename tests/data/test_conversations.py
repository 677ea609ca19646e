"""Reading rows in every usual form, and saying what is wrong with the others."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas.base.errors import InputError
from eyas.data.conversations import (
    Conversation,
    DataSource,
    RawRow,
    RowError,
    TokenRow,
    check_columns,
    parse_row,
    read_rows,
)


def parsed(row, **columns) -> Conversation | TokenRow:
    return parse_row(RawRow("file", 1, row if isinstance(row, bytes) else json.dumps(row).encode()), columns)


def said(row, **columns) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in parsed(row, **columns).messages]


ASKED = [("user", "Hi"), ("assistant", "Hello")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, ASKED),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, ASKED),
        ({"conversation": [{"role": "User", "content": "Hi"}, {"role": "ChatGPT", "content": "Hello"}]}, ASKED),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "Be brief."},
         [("system", "Be brief."), *ASKED]),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, ASKED),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, [("user", "Add\n\n1 2"), ("assistant", "3")]),
        ({"instruction": "And?", "output": "Yes", "history": [["Hi", "Hello"]]}, [*ASKED, ("user", "And?"), ("assistant", "Yes")]),
        ({"prompt": "Hi", "completion": "Hello"}, ASKED),
        ({"prompt": "Hi", "response": "Hello"}, ASKED),
        ({"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Hello"}]}, ASKED),
        ({"messages": [{"role": "user", "content": ["Hi"]}, {"role": "assistant", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]}, ASKED),
        ({"messages": json.dumps([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])}, ASKED),
    ],
)  # fmt: skip
def test_usual_forms(row, expected):
    assert said(row) == expected


def test_columns_can_be_mapped():
    assert said({"q": "Hi", "a": "Hello"}, prompt="q", completion="a") == ASKED
    with pytest.raises(InputError, match="knows no question"):
        check_columns({"question": "q"})


def test_tools_calls_results_and_reasoning():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    row = {
        "tools": json.dumps([{"name": "weather"}]),
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "I need it."},
            {"role": "tool", "content": "Sunny", "tool_call_id": "c1"},
            {"role": "assistant", "content": "Sunny.", "reasoning_content": "So it is."},
        ],
    }
    conversation = parsed(row)
    assert conversation.tools == [{"type": "function", "function": {"name": "weather"}}]
    asked, result, answer = conversation.messages[1:]
    assert asked["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert asked["reasoning_content"] == "I need it."
    assert result == {"role": "tool", "content": "Sunny", "tool_call_id": "c1"}
    assert answer["reasoning_content"] == "So it is."


def test_sharegpt_function_calls():
    row = {
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
            {"from": "observation", "value": "Sunny"},
            {"from": "gpt", "value": "Sunny."},
        ]
    }
    messages = parsed(row).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"]["name"] == "weather"


def test_tokenised_rows_with_masks_or_labels():
    assert parsed({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}) == TokenRow([1, 2, 3], [0, 1, 1])
    assert parsed({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}) == TokenRow([1, 2, 3], [0, 1, 1])
    assert parsed({"input_ids": [1, 2], "loss_mask": [False, True]}) == TokenRow([1, 2], [0, 1])


USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
BAD = {
    "broken json": (b'{"messages": [', "not JSON"),
    "not utf-8": (b'{"messages": "\xff\xfe"}', "not UTF-8"),
    "a list": ([1, 2], "expected a JSON object, found a list"),
    "a number": (b"3", "expected a JSON object, found a number"),
    "no known column": ({"text": "Hi"}, "no known columns: found text"),
    "empty conversation": ({"messages": []}, "empty conversation"),
    "messages no list": ({"messages": 5}, "messages must be a list, found a number"),
    "message no object": ({"messages": ["Hi"]}, "message 1 is a string"),
    "no role": ({"messages": [{"content": "Hi"}, REPLY]}, "message 1 has no role"),
    "unknown role": ({"messages": [{"role": "alien", "content": "Hi"}, REPLY]}, "unknown role 'alien'"),
    "null content": ({"messages": [{"role": "user", "content": None}, REPLY]}, "has no content"),
    "content a number": ({"messages": [{"role": "user", "content": 7}, REPLY]}, "a number as content"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, REPLY]}, "not text (image)"),
    "no answer": ({"messages": [USER]}, "no assistant turn"),
    "an empty answer": ({"messages": [USER, {"role": "assistant", "content": " "}]}, "assistant message 2 is empty"),
    "half a pair": ({"instruction": "Hi"}, "output is missing"),
    "a call without a name": ({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{}]}]}, "without a function name"),
    "ids without mask": ({"input_ids": [1, 2]}, "without loss_mask"),
    "mask too short": ({"input_ids": [1, 2], "loss_mask": [1]}, "2 input_ids but 1 mask values"),
    "a negative id": ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "must lie in 0..2^31-1"),
    "ids as text": ({"input_ids": ["a"], "loss_mask": [1]}, "flat list of integers"),
    "mask of twos": ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "only 0 and 1"),
    "tools no json": ({"messages": [USER, REPLY], "tools": "x"}, "tools is a string that is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_what_is_wrong_is_said(fault):
    row, reason = BAD[fault]
    with pytest.raises(RowError) as error:
        parsed(row)
    assert reason in str(error.value)


# ---------------------------------------------------------------- files


def rows_of(path, **kwargs):
    return list(read_rows(DataSource(str(path), **kwargs)))


def test_files_and_folders_of_every_kind(tmp_path):
    rows = [{"prompt": f"Hi {k}", "completion": "Hello"} for k in range(5)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.replace("\n", "\n\n").encode())
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "c.json").write_text(lines)
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write(lines)
    (tmp_path / "sub").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sub" / "e.parquet")
    (tmp_path / "notes.txt").write_text("not data")
    for name in ("a.jsonl", "b.json", "c.json", "d.jsonl.gz", "sub/e.parquet"):
        assert [said(row.data) for row in rows_of(tmp_path / name)] == [said(row) for row in rows], name
    assert [row.line for row in rows_of(tmp_path / "a.jsonl")] == [1, 3, 5, 7, 9]
    assert len(rows_of(tmp_path)) == 25


def test_messages_from_parquet_have_no_null_keys(tmp_path):
    messages = [[USER, {**REPLY, "reasoning_content": "Hm"}], [USER, REPLY]]
    pq.write_table(
        pa.table({"messages": messages, "tools": pa.array([None, None], pa.string())}), tmp_path / "a.parquet"
    )
    first, second = (parsed(row.data) for row in rows_of(tmp_path / "a.parquet"))
    assert first.messages[1]["reasoning_content"] == "Hm"
    assert second.messages == [USER, REPLY]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b'[{"prompt": "a", "completion": "b"}, {"prompt": ', "not JSON from here on"),
        ("a.json", b'[{"prompt": "a", "completion": "b"}', "without its closing bracket"),
        ("a.parquet", b"PAR1 nothing", "not a readable Parquet file"),
    ],
)
def test_files_that_break_off_are_reported(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    *good, broken = rows_of(tmp_path / name)
    assert len(good) == (name == "a.json")
    with pytest.raises(RowError, match=reason):
        parse_row(broken)


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "some words", "empty", "notes.txt"])
def test_sources_that_are_not_there(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError):
        rows_of(name)


@pytest.mark.parametrize("name", ["big.jsonl", "big.json"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    row = json.dumps({"prompt": "Hi", "completion": "word " * 2000})
    with open(tmp_path / name, "w") as file:
        file.write("[" if name == "big.json" else "")
        for k in range(4000):  # 40 MB
            file.write(row + (("," if k < 3999 else "]") if name == "big.json" else "\n"))
    tracemalloc.start()
    count = sum(1 for _ in read_rows(DataSource(str(tmp_path / name))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4000
    assert peak < 8e6


def test_data_sets_of_the_datasets_library(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [USER, REPLY]}, {"messages": [USER, REPLY]}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert [said(row.data) for row in rows_of(tmp_path / "saved")] == [ASKED, ASKED]
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "test.jsonl").write_text(json.dumps(rows[0]) + "\n")
    [row] = rows_of(f"hf:{tmp_path / 'repo'}", split="test")
    assert said(row.data) == ASKED
    assert row.source.endswith("repo[test]:1")
    with pytest.raises(InputError, match="could not load it"):
        rows_of("hf:nobody/nothing-of-this-name")
