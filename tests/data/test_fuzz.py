"""Whatever a row holds, its error is the row's: the good rows around it are kept, and each bad one is named by its line."""

from __future__ import annotations

import copy
import csv
import io
import json
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import TEMPLATES, byte_level_tokenizer
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from eyas.base.errors import InputError
from eyas.data.dataset import open_dataset
from eyas.data.generators import Answer
from eyas.data.preparation import prepare
from eyas.data.prompts import load_prompts
from eyas.data.regeneration import regenerate
from eyas.data.rows import RowMaker
from eyas.data.settings import PrepareSettings, RegenerateSettings
from eyas.data.sources import RawRow

USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
FUNCTION = {"name": "weather", "arguments": {"city": "Paris"}}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
GOOD = {"messages": [USER, REPLY]}
#: One row of every form that is read.
FORMS = [
    {"messages": [USER, REPLY, USER, {**REPLY, "weight": 1, "finish_reason": "length"}], "system": "Be brief."},
    {"messages": [USER, {**REPLY, "content": None, "tool_calls": [CALL], "reasoning_content": "I need it."},
                  {"role": "tool", "content": "Sunny", "tool_call_id": "c1"}, REPLY], "tools": [{"name": "weather"}]},
    {"messages": [USER, {**REPLY, "function_call": FUNCTION}, {"role": "function", "name": "weather", "content": "Sunny"}, REPLY],
     "functions": [{"name": "weather"}]},
    {"messages": [USER, {**REPLY, "content": [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "Hello"}], "train": True}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "<think>\nHm</think>Hello", "weight": 1}], "tools": "[]"},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": json.dumps(FUNCTION)},
                       {"from": "observation", "value": "Sunny"}, {"from": "gpt", "value": "Sunny."}]},
    {"instruction": "Add", "input": "1 2", "output": "3", "history": [["Hi", "Hello"]], "system": "Be brief."},
    {"prompt": "Hi", "completion": "Hello", "label": True},
    {"prompt": [USER], "completion": [REPLY]},
    {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    {"question": "Hi"},
    {"turns": ["Hi", "And?"]},
]  # fmt: skip
#: Stand in a row's JSON for what `json.dumps` does not write.
ENDLESS, BOTTOMLESS = '"@endless@"', '"@bottomless@"'
KEYS = sorted({key for row in FORMS for key in row} | {*CALL, *FUNCTION, "role", "content", "weight", "train", "masked", "loss", "from",
              "value", "thinking", "reasoning", "name", "tool_call_id", "left_out", "stop_reason", "train_detail"})  # fmt: skip


def nested(levels: int, value=1):
    for _ in range(levels):
        value = [value] if levels % 2 else {"a": value}
    return value


texts = st.sampled_from(["", " ", "a", "\ud83d", "x\udc80", "\x00", "é🙂שלום\u2028", "<|im_end|>", "<think>", "</think>x", "[", "{}",
                         '{"name": 3}', "user", "assistant", "tool", "length", "q0Zx0000Yv", "{{ x }}", "9" * 5000, "@brackets@",
                         json.loads(ENDLESS), json.loads(BOTTOMLESS)])  # fmt: skip
numbers = st.sampled_from([0, 1, -1, -100, 2**31, 2**63, 10**4000, 0.5, float("nan"), float("inf"), True, False, None])
values = st.recursive(
    texts | numbers | st.sampled_from([nested(n) for n in (95, 96, 199, 200)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYS, "\ud83d"]), inner, max_size=3),
    max_leaves=4,
)


@st.composite
def spoilt_rows(draw):
    """A row of a usual form with any value in one to three places, or any value alone."""
    row = copy.deepcopy(draw(st.sampled_from(FORMS)))
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        place = row
        while True:
            key = draw(st.sampled_from(KEYS if isinstance(place, dict) and draw(st.integers(0, 4)) == 0 else list(place if isinstance(place, dict) else range(len(place))) or [None]))  # fmt: skip
            inner = place.get(key) if isinstance(place, dict) else place[key] if key is not None else None
            if not isinstance(inner, dict | list) or not inner or draw(st.booleans()):
                break
            place = inner
        if key is not None:
            place[key] = copy.deepcopy(draw(values))
    return row if draw(st.integers(0, 30)) else draw(values)


def as_json(value) -> str:
    return (
        json.dumps(value)
        .replace("@brackets@", "[" * 100_000)
        .replace(ENDLESS, "9" * 5000)
        .replace(BOTTOMLESS, "[" * 100_000 + "]" * 100_000)
    )


@pytest.fixture(scope="module", params=["qwen3", "mistral", "deepseek-v3"])
def maker(request, tmp_path_factory) -> RowMaker:
    folder = tmp_path_factory.mktemp(request.param)
    assert request.param in TEMPLATES
    byte_level_tokenizer(request.param).save_pretrained(folder)
    return RowMaker(PrepareSettings(("conversations",), str(folder), folder / "out"))


@given(spoilt_rows())
@seed(0)
@settings(max_examples=250, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_a_row_gives_samples_or_a_reason(maker, row):
    lines = [json.dumps(GOOD), as_json(row), json.dumps(GOOD)]
    first, spoilt, last = maker([RawRow("a.jsonl", n, line.encode()) for n, line in enumerate(lines, 1)])
    assert first.pieces
    assert last.pieces
    assert bool(spoilt.pieces) != bool(spoilt.reason)
    assert len((spoilt.reason or "").encode()) <= 4000


def written(kind: str, rows: list) -> bytes:
    """The rows as a file of a kind; as a table, what is not text becomes JSON."""
    if kind == "jsonl":
        return "".join(as_json(row) + "\n" for row in rows).encode()
    if kind == "json":
        return ("[" + ",\n".join(map(as_json, rows)) + "]").encode()
    rows = [row if isinstance(row, dict) else {"text": row} for row in rows]
    cells = [{key: value if isinstance(value, str) else as_json(value) for key, value in row.items()} for row in rows]
    names = sorted({name for row in cells for name in row})
    if kind == "csv":
        out = io.StringIO()
        table = csv.DictWriter(out, names)
        table.writeheader()
        table.writerows(cells)
        return out.getvalue().encode("utf-8", "surrogatepass")
    columns = {}
    for name in names:
        column = [row[name].encode("utf-8", "surrogatepass") if name in row else None for row in cells]
        columns[name.encode("utf-8", "replace").decode()] = pa.array(column, pa.binary()).view(pa.string())
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


class Echo:
    description = {"name": "echo"}  # noqa: RUF012

    def answer(self, prompts, limits, salt):
        return [Answer([5, 6, 7], "stop") for _ in prompts]

    def close(self):
        pass


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_good_rows_around_spoilt_ones_are_kept_in_every_stage(maker, tmp_path, kind):
    rows: list = []

    @given(spoilt_rows())
    @seed(1)
    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def draw(row):
        rows.extend([row, {"prompt": f"Question {len(rows)}", "completion": "Yes"}])

    draw()
    source = tmp_path / f"a.{kind}"
    source.write_bytes(written(kind, rows))
    model = maker.settings.model_path
    report = prepare(source, model, tmp_path / "out")
    assert (report.rows, report.broken_sources) == (len(rows), 0)
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert len(rejected) == report.dropped == report.rows - report.kept
    dataset = open_dataset(tmp_path / "out")
    asked = {maker.template.tokenizer.decode(sample.token_ids) for sample in dataset}
    for n in range(0, len(rows), 2):
        assert any(f"Question {n}" in text for text in asked)
    if kind != "csv":  # rows of a table may fill several lines
        assert not [one for one in rejected if one["line"] % 2 == 0]
    answered = regenerate(RegenerateSettings((str(source),), model, tmp_path / "answers"), lambda *_: Echo())
    assert answered.rows == len(rows)
    assert answered.conversations + answered.repeated + answered.rejected == len(rows)
    assert answered.conversations >= len(rows) // 2
    for row in rows[::2]:
        (tmp_path / "one.jsonl").write_text(as_json(row) + "\n")
        with suppress(InputError):
            load_prompts(str(tmp_path / "one.jsonl"), maker.template.tokenizer)
