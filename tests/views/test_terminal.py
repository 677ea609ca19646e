"""What commands look like on a terminal of 80 columns: figures stay in their lines, ids, paths and commands can be copied whole."""

import time

import pytest
from eyas_process import in_terminal, run_eyas

from eyas.engines.contract import HOST_COPY, MODEL_OUTPUT, SHARD, SPLIT, Hop, hop_table
from eyas.runs import run as runs
from eyas.views import console
from eyas.views.run_table import table


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_STATE_DIR", str(tmp_path / "state"))


def test_eval(work, evaluated_draft, state, tmp_path):
    sets = [f"word_problems_heldout={work / 'data'}", f"conversations={work / 'data'}"]
    flags = [
        "eval",
        "--draft",
        evaluated_draft,
        "--model-path",
        work / "target",
        "--limit",
        "2",
        "--max-new-tokens",
        "16",
    ]
    flags += ["--output-dir", tmp_path / "out", "--no-diagnose", "--prompts", *sets]
    lines = in_terminal(*flags)
    assert max(map(len, lines)) <= 80
    for name in ("word_problems_heldout", "conversations", "overall"):
        first, second = [line.split("│") for line in lines if line.split("│")[0].strip() == name and "│" in line]
        assert [len(first), len(second)] == [5, 7], "a row for each table, each in one line"
        assert float(first[2]) >= 1 <= float(second[1])
    head = next(line for line in lines if line.startswith("set") and "lookup" in line)
    assert head.split() == [
        "set",
        "┃",
        "lookup",
        "┃",
        "n-gram",
        "┃",
        "both",
        "┃",
        "draft",
        "tok/s",
        "┃",
        "plain",
        "┃",
        "speed-up",
    ]
    # Without a terminal a sentence is one line, which a log can be searched for.
    assert any(
        line.startswith("measured") and line.endswith("not to be checked")
        for line in run_eyas(*flags).stdout.splitlines()
    )


def test_train_and_runs(work, state, tmp_path):
    flags = [
        "train", "--states", work / "store", "--model-path", work / "target", "--draft-vocab-size", "64", "--steps", "12",
        "--eval-every", "6", "--batch-tokens", "200", "--held-out", "0.2", "--dtype", "float32", "--track", "none", "--output-dir",
        tmp_path / "draft",
    ]  # fmt: skip
    lines = in_terminal(*flags)
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80  # a path is never broken
    (view,) = runs.list_runs()
    shown = in_terminal("runs", "show", view.id)
    assert any(line.split() == ["run", view.id] for line in shown)
    command = next(line for line in shown if line.startswith("command"))
    assert command.endswith(" ".join(["eyas", *map(str, flags)]))  # longer than a line, and whole
    assert any(line.endswith(str(view.folder)) for line in shown)
    listed = in_terminal("runs", "list")
    assert max(map(len, listed)) <= 80
    assert any(line.startswith(view.id) and line.endswith("train 100%") for line in listed)
    # Without a terminal a sentence is one line, and so it is in the run's log.
    done = run_eyas(*flags[:-1], tmp_path / "another")
    for said in (done.stdout, run_eyas("runs", "logs", "last").stdout):
        found = [line for line in said.splitlines() if "untrained: simulated acceptance length" in line]
        assert len(found) == 1
        assert found[0].endswith("%")


def test_preflight_says_each_remedy_below_its_finding(work, state, tmp_path):
    lines = in_terminal(
        *("extract", "--model-path", work / "target", "--prepared-data", work / "data", "--output-dir", tmp_path / "s"),
        *("--layer-ids", "1", "3", "5"),
    )
    at = next(i for i, line in enumerate(lines) if line.startswith("WARN"))
    assert lines[at].split(None, 2)[1] == "tokenizer"
    assert lines[at + 1].split() == ["->", "make", "it", "with", "`eyas", "prepare`", "to", "have", "this", "checked"]
    assert max(len(line) for line in lines if str(tmp_path) not in line and str(work) not in line) <= 80


def test_a_busy_day_of_runs_fits_in_80_columns(tmp_path):
    now = time.time()
    progress = {
        "stage": "extracting",
        "samples": 123_456,
        "total": 1_200_000,
        "tokens_per_s": 19_844.0,
        "eta_s": 75_123.0,
    }
    kinds = [("extract", "running", 3), ("regenerate", "incomplete", 90_000), ("train", "finished", 7_300)]
    views = [
        runs.RunView(f"20261130-222711-{name}-83e9da", tmp_path, state, {"created_at": now - age}, progress, {})
        for name, state, age in kinds
    ]
    head, *lines = table(views, 80)
    assert head.split() == ["run", "state", "age", "progress"]
    assert max(len(line) for line in lines) <= 80 + len("\x1b[32m\x1b[0m")  # colours
    assert lines[0].endswith("  3s  extracting 10%, 20h to go")
    assert lines[1].endswith("  1d  extracting 10%")
    assert lines[2].endswith("  2h  extracting 10%")
    for view, line in zip(views, lines, strict=True):
        assert line.startswith(view.id + " ")
    assert table(views, 120)[1].endswith("extracting 123,456/1,200,000 (10%)  19,844 tok/s  20:52:03 to go")


def test_hops_fit_in_80_columns_and_keep_the_sample_s_id():
    sample, path = "0123456789abcdef" * 2, "language_model.model"
    both = [
        Hop(
            kind,
            layer,
            3,
            place,
            (8192, 7168),
            "bfloat16",
            "cuda:3",
            17,
            sample=one,
            norm=233.123,
            expected="[8192, 7168]",
            fault=fault,
        )
        for layer, fault in ((2, None), (58, "8191 rows for 8192 tokens"))
        for kind, place, one in (
            (MODEL_OUTPUT, path, None),
            (SPLIT, "rows 113:8305 = tokens 0:8192", sample),
            (HOST_COPY, "r003 buffer, tokens 0:8192", sample),
            (SHARD, "shard-r003-00012.safetensors", None),
        )
    ]
    lines = hop_table(both).splitlines()
    assert max(map(len, lines)) <= 80
    assert f"step 17, rank 3, sample {sample}" in lines
    for place in (
        f"model output: {path}",
        "host copy: r003 buffer, tokens 0:8192",
        "shard: shard-r003-00012.safetensors",
    ):
        assert f"    {place}" in lines
    (at,) = [i for i, line in enumerate(lines) if line.startswith(">>")]
    assert lines[at].split() == [">>", "layer", "58", "[8192,", "7168]", "bfloat16", "cuda:3", "norm", "233.1", "BAD"]
    assert lines[at - 1].split() == ["layer", "2", "[8192,", "7168]", "bfloat16", "cuda:3", "norm", "233.1", "ok"]
    assert lines[at + 1].strip() == "8191 rows for 8192 tokens (expected [8192, 7168])"
    assert sum("8191 rows" in line for line in lines) == 4


def test_wrapping_breaks_no_word(monkeypatch):
    path = "/scratch/" + "long-folder-name/" * 6 + "draft"
    text = f"the draft lies in {path}\nand its store beside it"
    monkeypatch.setattr(console, "out", console.Console(force_terminal=True, width=40))
    assert console.wrapped(text, 4).split("\n    ") == ["the draft lies in", path, "and its store beside it"]
    monkeypatch.setattr(console, "out", console.Console(force_terminal=False, width=40))
    assert console.wrapped(text) == text
