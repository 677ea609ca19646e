"""Reading rows in every usual form, and saying what is wrong with the others."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import eyas
from eyas.base.errors import InputError
from eyas.data.conversations import (
    Conversation,
    RowError,
    TokenRow,
    check_columns,
    parse_row,
)
from eyas.data.preparation import prepare
from eyas.data.sources import DataSource, RawRow, Unreadable, files_of, read_rows


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


def test_the_older_form_of_function_calls():
    """OpenAI's `function_call` beside `functions`: the call is rendered, and its result knows which call it answers."""
    row = {
        "functions": [{"name": "weather"}],
        "messages": [
            USER,
            {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Paris"}'}},
            {"role": "function", "name": "weather", "content": "Sunny"},
            {"role": "assistant", "content": "Sunny."},
        ],
    }  # fmt: skip
    conversation = parsed(row)
    [call] = conversation.messages[1]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert conversation.messages[2] == {
        "role": "tool", "name": "weather", "content": "Sunny", "tool_call_id": call["id"],
    }  # fmt: skip
    assert conversation.tools == [{"type": "function", "function": {"name": "weather"}}]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"training": False}, {"loss": 0.0}])
def test_answers_that_the_data_mark_are_left_out(mark):
    row = {"messages": [USER, {**REPLY, **mark}, USER, {**REPLY, **dict.fromkeys(mark, 1)}]}
    assert [message.get("left_out") for message in parsed(row).messages] == [
        None,
        "marked as not to be trained on",
        None,
        None,
    ]
    first, second = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
    row = {"conversations": [first, {**second, **mark}, first, second]}
    assert [("left_out" in message) for message in parsed(row).messages] == [False, True, False, False]


def test_other_ways_to_say_that_an_answer_is_not_to_be_learnt():
    row = {"messages": [USER, {**REPLY, "masked": True}, USER, {**REPLY, "trainable": 1}]}
    assert [("left_out" in message) for message in parsed(row).messages] == [False, True, False, False]
    for mark in ({"weight": 0}, {"train": False}, {"label": False}):  # of a whole row; the last: preference data
        with pytest.raises(RowError, match="the row is marked as not to be trained on"):
            parsed({"prompt": "Hi", "completion": "Hello", **mark})
        assert parse_row(RawRow("a", 1, {"prompt": "Hi", "completion": "Hello", **mark}), need_answer=False)


@pytest.mark.parametrize(
    "said_so", [{"finish_reason": "length"}, {"stop_reason": "max_tokens"}, {"finish_reason": "MAX_TOKENS"}]
)
def test_a_cut_answer_is_known_by_any_of_the_words_for_it(said_so):
    for row in ({"messages": [USER, {**REPLY, **said_so}]}, {"messages": [USER, REPLY], **said_so}):
        assert parsed(row).messages[-1]["finish_reason"] == "length"


def test_ids_that_are_numbers_join_calls_and_results():
    calls = [{"id": n, "function": {"name": "f", "arguments": None}} for n in (1, 2)]
    results = [{"role": "tool", "content": "a", "tool_call_id": n} for n in (2, 1)]
    messages = parsed({"messages": [USER, {**REPLY, "tool_calls": calls}, *results, REPLY]}).messages
    assert [message["tool_call_id"] for message in messages[2:4]] == ["2", "1"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_an_empty_answer_is_context():
    row = {"messages": [USER, {"role": "assistant", "content": " \n"}, USER, REPLY]}
    assert [message.get("left_out") for message in parsed(row).messages] == [None, "empty", None, None]


def test_a_mapped_column_that_is_not_there_is_named():
    with pytest.raises(RowError, match=r"no column 'dialogue' \(--column messages=dialogue\): found text"):
        parsed({"text": "Hi"}, messages="dialogue")


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
    "an empty answer": ({"messages": [USER, {"role": "assistant", "content": " "}]}, "every one is empty"),
    "all answers left out": ({"messages": [USER, {**REPLY, "weight": 0}]}, "marked as not to be trained on"),
    "half a weight": ({"messages": [USER, {**REPLY, "weight": 0.5}]}, "learnt (1) or not (0)"),
    "parts to train on": ({"messages": [USER, {**REPLY, "train_detail": [{"begin_offset": 0}]}]}, "only whole messages"),
    "half a character": (rb'{"messages": [{"role": "user", "content": "Hi \ud83d"}, {"role": "assistant", "content": "a"}]}', "U+D83D"),
    "half a character as a role": (rb'{"messages": [{"role": "\ud83d", "content": "Hi"}]}', "unknown role"),
    "half a character as a column": (rb'{"\ud83d": 1}', "no known columns"),
    "half a character in a tool": (rb'{"prompt": "a", "completion": "b", "tools": [{"name": "\udc00"}]}', "U+DC00"),
    "an endless number": (b'{"prompt": "a", "completion": "b", "n": ' + b"9" * 5000 + b"}", "a number that cannot be read"),
    "an endless number as text": ({"prompt": "a", "completion": "b", "tools": "9" * 5000}, "tools is a string that is not JSON"),
    "deep JSON": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "deep JSON in a string": ({"messages": "[" * 100_000}, "messages is a string that is not JSON"),
    "deep arguments": ({"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": json.loads('{"a":' * 300 + "1" + "}" * 300)}]}]}, "levels deep"),
    "history a number": ({"instruction": "a", "output": "b", "history": 5}, "list of [question, answer] pairs"),
    "history of numbers": ({"instruction": "a", "output": "b", "history": [5]}, "list of [question, answer] pairs"),
    "an empty instruction": ({"instruction": [], "input": "x", "output": "b"}, "instruction is a list beside an input"),
    "a system of numbers": ({"messages": [USER, REPLY], "system": [5]}, "system is a list"),
    "a scalar mask": ({"input_ids": [1, 2], "loss_mask": 0, "labels": [1, 2]}, "loss_mask must be a flat list"),
    "a call that is text": ({"messages": [USER, {"role": "assistant", "content": None, "function_call": "auto"}]}, "must be a list, found a string"),
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
    packed = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    packed["zst"] = lambda data: pa.compress(data, "zstd", asbytes=True)
    for ending, compress in packed.items():
        (tmp_path / f"d.jsonl.{ending}").write_bytes(compress(lines.encode()) * 2)
    (tmp_path / "f.json.zst").write_bytes(packed["zst"](json.dumps(rows).encode()))
    (tmp_path / "sub").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sub" / "e.parquet")
    (tmp_path / "notes.txt").write_text("not data")
    for ending in packed:
        assert [said(row.data) for row in rows_of(tmp_path / f"d.jsonl.{ending}")] == [said(row) for row in rows * 2]
    for name in ("a.jsonl", "b.json", "c.json", "f.json.zst", "sub/e.parquet"):
        assert [said(row.data) for row in rows_of(tmp_path / name)] == [said(row) for row in rows], name
    assert [row.line for row in rows_of(tmp_path / "a.jsonl")] == [1, 3, 5, 7, 9]
    assert len(rows_of(tmp_path)) == 65


def test_messages_from_parquet_have_no_null_keys(tmp_path):
    messages = [[USER, {**REPLY, "reasoning_content": "Hm"}], [USER, REPLY]]
    pq.write_table(
        pa.table({"messages": messages, "tools": pa.array([None, None], pa.string())}), tmp_path / "a.parquet"
    )
    first, second = (parsed(row.data) for row in rows_of(tmp_path / "a.parquet"))
    assert first.messages[1]["reasoning_content"] == "Hm"
    assert second.messages == [USER, REPLY]


GOOD = b'{"prompt": "a", "completion": "b"}'
#: A file that breaks off behind one good row -> what is said, with the number of bytes or rows that were not read.
BREAKS_OFF = {
    "an array cut in a row": ("a.json", b"[" + GOOD + b', {"prompt": ', "in the middle of row 2; 11 bytes"),
    "an array cut in a string": ("a.json", b"[" + GOOD + b', {"prompt": "a [', "in the middle of row 2; 15 bytes"),
    "an array cut behind a row": ("a.json", b"[" + GOOD, "behind row 1 without its closing bracket; 0 bytes"),
    "an array cut behind a comma": ("a.json", b"[" + GOOD + b",\n", "behind row 1 without its closing bracket; 0 bytes"),
    "joined arrays": ("a.json", b"[" + GOOD + b"]\n[" + GOOD + b"]\n", "text behind the end of the JSON array of 1 rows; 37 bytes"),
    "text behind an array": ("a.json", b"[" + GOOD + b"] x", "text behind the end of the JSON array of 1 rows; 1 bytes"),
    "an array without a comma": ("a.json", b"[" + GOOD + GOOD + b"]", "neither a comma nor its closing bracket; 35 bytes"),
    "an array with crossed brackets": ("a.json", b"[" + GOOD + b', {"a": [}]', "brackets do not match"),
    "lines cut in a row": ("a.jsonl", GOOD + b'\n{"prompt": "a", "com', "ends in the middle of a row (20 bytes"),
    "a cut gzip": ("a.jsonl.gz", gzip.compress(GOOD + b"\n" + bytes(range(256)) * 99)[:-400], "cut or damaged behind row"),
    "a false gzip": ("a.jsonl.gz", GOOD + b"\n", "incorrect header check"),
    "a cut zstd": ("a.jsonl.zst", pa.compress((GOOD + b"\n") * 9000, "zstd", asbytes=True)[:-9], "cut or damaged behind row"),
    "a cut xz": ("a.json.xz", lzma.compress(GOOD + b"\n")[:-9], "cut or damaged behind row"),
    "a cut bz2": ("a.jsonl.bz2", bz2.compress(GOOD + b"\n")[:-9], "cut or damaged behind row"),
    "a table cut in a quotation": ("a.csv", b'prompt,completion\na,b\na,"b', "not readable as a table from line 3 on"),
    "a second bz2 that is none": ("a.jsonl.bz2", bz2.compress(GOOD + b"\n") + b"BZx", "cut or damaged behind row 1"),
    "a second xz that is none": ("a.jsonl.xz", lzma.compress(GOOD + b"\n") + b"x", "cut or damaged behind row 1"),
    "an empty gzip": ("a.jsonl.gz", b"", "the file is empty"),
    "an empty array": ("a.json", b"", "the file is empty"),
    "a table cut in its header": ("a.csv", b"prompt,compl", "ends within its header"),
    "a table cut in a row": ("a.csv", b"prompt,completion\na,b\na", "in the middle of a row (line 3: 1 of 2 values)"),
    "a column named twice": ("a.csv", b"prompt,completion,prompt\na,b,c\n", "names prompt more than once"),
    "no Parquet": ("a.parquet", b"PAR1 nothing", "not a readable Parquet file"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BREAKS_OFF)
def test_files_that_break_off_are_reported_with_what_was_not_read(tmp_path, fault):
    name, content, reason = BREAKS_OFF[fault]
    (tmp_path / name).write_bytes(content)
    *good, last = rows_of(tmp_path / name)
    assert isinstance(last.data, Unreadable)
    assert reason in last.data
    if "json" in name and content and not name.endswith(("gz", "xz", "bz2", "zst")):
        assert [said(row.data) for row in good] == [[("user", "a"), ("assistant", "b")]]
    with pytest.raises(RowError, match=re.escape(str(last.data))):
        parse_row(last)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a_compressed_file_may_be_cut_anywhere(tmp_path, kind, compress):
    """Every cut is told, what stands before it is read as it was, and files behind one another are read to the end."""
    rows = [{"prompt": f"Question {k}", "completion": f"{k * 7919}"} for k in range(30)]
    table = "prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in rows)
    lines = [json.dumps(row) + "\n" for row in rows]
    text = {"jsonl": "".join(lines), "json": json.dumps(rows), "csv": table}[kind].encode()
    path = tmp_path / f"a.{kind}.{ {gzip.compress: 'gz', bz2.compress: 'bz2', lzma.compress: 'xz'}[compress] }"
    whole = compress(text[: len(text) // 2]) + b"\0" * 8 + compress(text[len(text) // 2 :])
    path.write_bytes(whole)
    expected = [said(row.data) for row in rows_of(path)]
    assert len(expected) == 30
    for cut in range(0, len(whole) - 1, 5):
        path.write_bytes(whole[:cut])
        *good, last = rows_of(path)
        if not isinstance(
            last.data, Unreadable
        ):  # just between the two files, where no gap shows: a row is cut or the array open
            assert cut in range(
                len(compress(text[: len(text) // 2])), len(whole) - len(compress(text[len(text) // 2 :])) + 1
            )
        assert [said(row.data) for row in good] == expected[: len(good)]


def test_a_parquet_value_that_is_not_text_is_its_rows_error(tmp_path):
    prompts = pa.array([b"Hi", b"caf\xe9", b"Hi"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": prompts, "completion": ["Hello"] * 3}), tmp_path / "a.parquet")
    first, bad, last = rows_of(tmp_path / "a.parquet")
    assert said(first.data) == said(last.data) == ASKED
    with pytest.raises(RowError, match="a value that cannot be read"):
        parse_row(bad)


def test_links_are_not_passed_over_in_silence(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_bytes(GOOD + b"\n")
    (tmp_path / "data" / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "data" / "more").symlink_to(tmp_path, target_is_directory=True)
    assert files_of(DataSource(str(tmp_path / "data")))[1] == ["more"]
    assert [isinstance(row.data, Unreadable) for row in rows_of(tmp_path / "data")] == [False, True]


def test_a_parquet_file_that_is_damaged_in_its_middle_counts_its_rows(tmp_path):
    table = pa.table({"prompt": [f"{k} " * 50 for k in range(2000)], "completion": ["b"] * 2000})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=500, compression="zstd", use_dictionary=False)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    third = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(2).column(0).data_page_offset
    content[third : third + 400] = b"\0" * 400
    (tmp_path / "a.parquet").write_bytes(content)
    *good, last = rows_of(tmp_path / "a.parquet")
    assert f"{2000 - len(good):,} of its 2,000 rows were not read" in last.data
    assert 0 < len(good) <= 1000


def test_what_is_wrong_in_one_row_of_an_array_is_that_rows_error(tmp_path):
    """Latin-1, an endless number, half a character, bottomless nesting, in the middle of an array: the others are read."""
    bad = [b'{"prompt": "caf\xe9", "completion": "b"}', b'{"n": ' + b"9" * 5000 + b"}", b'{"n": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
           rb'{"prompt": "\ud83d", "completion": "b"}', b'{"prompt": "a" "b"}', b"3", b'"x"', b"null"]  # fmt: skip
    (tmp_path / "a.json").write_bytes(b"[" + b",".join(one for row in bad for one in (row, GOOD)) + b"]")
    found = []
    for row in rows_of(tmp_path / "a.json"):
        try:
            parse_row(row)
            found.append("good")
        except RowError as error:
            found.append(str(error))
    assert found[1::2] == ["good"] * len(bad)
    for reason, expected in zip(
        found[::2],
        ["not UTF-8", "a number that", "too deeply", "U+D83D", "not JSON", "a number", "a string", "null"],
        strict=True,
    ):
        assert expected in reason


@pytest.mark.parametrize("stage", [prepare, eyas.regenerate])
def test_a_file_that_is_not_there_is_told_before_the_tokenizer_is_loaded(stage, tmp_path):
    with pytest.raises(InputError, match="no such file"):
        stage(data=str(tmp_path / "none.jsonl"), model_path=str(tmp_path / "no-model"), output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_of_other_formats_are_named(tmp_path):
    for name in ("a.jsonl", "sub/b.txt", "c.arrow", ".hidden.jsonl", ".git/x.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(GOOD + b"\n")
    files, others = files_of(DataSource(str(tmp_path)))
    assert [file.name for file in files] == ["a.jsonl"]
    assert others == ["c.arrow", "sub/b.txt"]


def test_tables(tmp_path):
    (tmp_path / "a.csv").write_bytes(
        b'\xef\xbb\xbfprompt,completion,system\r\n"Hi, ""you""\nthere",Hello,\r\nHi\r\ncaf\xe9,b,\r\nHi,Hello,Brief\r\n'
    )
    first, short, latin, last = rows_of(tmp_path / "a.csv")
    assert said(first.data) == [("user", 'Hi, "you"\nthere'), ("assistant", "Hello")]
    assert said(last.data)[0] == ("system", "Brief")
    assert [row.line for row in (first, short, latin, last)] == [2, 4, 5, 6]
    for row, reason in ((short, "1 values under a header of 3"), (latin, "a byte that is not UTF-8")):
        with pytest.raises(RowError, match=reason):
            parse_row(row)
    (tmp_path / "a.tsv").write_text("prompt\tcompletion\nHi\tHello, you\n")
    assert said(rows_of(tmp_path / "a.tsv")[0].data) == [("user", "Hi"), ("assistant", "Hello, you")]


def test_splits_of_a_saved_data_set_are_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list([{"messages": [USER, REPLY]}])
    datasets.DatasetDict({"train_sft": one, "test": one}).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match="holds the splits test, train_sft"):
        rows_of(tmp_path / "saved")
    assert [said(row.data) for row in rows_of(tmp_path / "saved", split="test")] == [ASKED]


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
