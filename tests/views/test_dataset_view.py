"""`eyas inspect DATASET`: what is shown is what is in the dataset."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser

import pytest
from chat_templates import byte_level_tokenizer
from eyas_process import run_eyas
from rich.console import Console

from eyas.base.errors import InputError
from eyas.data.dataset import is_dataset, open_dataset
from eyas.data.preparation import prepare
from eyas.views.dataset_view import inspect_dataset

ODD = "<script>alert(1)</script> & <b>bold</b>\n\tdone"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(dataset folder, tokenizer): 30 good rows of which one holds HTML, two bad ones, three held out or so."""
    root = tmp_path_factory.mktemp("view")
    tokenizer = byte_level_tokenizer("chatml")
    tokenizer.save_pretrained(root / "model")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Hi {k}"},
                {"role": "assistant", "content": ODD if k == 0 else "word " * k},
            ]
        }
        for k in range(30)
    ]
    rows[1]["messages"][1]["content"] = "One."
    lines = [json.dumps(row) for row in rows] + ["broken", '{"messages": []}']
    (root / "chat.jsonl").write_text("\n".join(lines) + "\n")
    prepare(root / "chat.jsonl", str(root / "model"), root / "out", max_seq_len=60)
    return root / "out", tokenizer


def seen(folder, **kwargs) -> tuple[str, object]:
    stream = io.StringIO()
    summary = inspect_dataset(folder, console=Console(file=stream, width=200, highlight=False), **kwargs)
    return stream.getvalue(), summary


def test_the_terminal_view_states_what_the_dataset_holds(made):
    folder, tokenizer = made
    text, summary = seen(folder, sample=0)
    dataset = open_dataset(folder)
    facts = dict(summary.facts)
    assert facts["samples"] == "30"
    assert facts["tokens"] == f"{dataset.tokens:,}"
    supervised = sum(int(sample.loss_mask.sum()) for sample in dataset)
    assert facts["supervised"].startswith(f"{supervised:,} ")
    assert sum(summary.histogram.values()) == 30
    assert facts["rows truncated"] == str(sum(len(sample) == 60 for sample in dataset))
    assert "not JSON" in text
    assert "empty conversation" in text
    [shown] = summary.shown
    spelled = "".join(piece for piece, flag in zip(shown.pieces, shown.mask, strict=True) if flag)
    assert spelled == ODD + "<|im_end|>"
    [border] = shown.borders
    begin = shown.mask.index(1)
    assert border.startswith(f"{begin}-{len(shown.mask) - 2}: after '\\n' ({tokenizer.encode(chr(10))[0]}) begins '<'")
    assert f"ends '<|im_end|>' ({tokenizer.eos_token_id}), then '\\n'" in border


class Page(HTMLParser):
    """Collects tags, and the text of <b> and <i> inside the tokens."""

    def __init__(self):
        super().__init__()
        self.tags: set[str] = set()
        self.supervised = ""
        self._open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self._open.append("token-b" if tag == "b" and dict(attrs).get("title") else tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop().removeprefix("token-") != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1] == "token-b":
            self.supervised += data


def test_the_page_is_self_contained_and_runs_nothing_of_the_data(made, tmp_path):
    folder, _ = made
    seen(folder, sample=0, html=tmp_path / "view.html")
    text = (tmp_path / "view.html").read_text()
    page = Page()
    page.feed(text)
    assert page.supervised.replace("⏎\n", "\n").replace("⇥", "\t") == ODD + "<|im_end|>"
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?://|url\(", text)
    assert 'name="viewport"' in text


def test_a_bare_jsonl_and_missing_tokenizer_are_shown_as_ids(tmp_path):
    (tmp_path / "tokens.jsonl").write_text('{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}\n')
    text, _ = seen(tmp_path / "tokens.jsonl")
    assert "5 6 7" in text
    assert is_dataset(tmp_path / "tokens.jsonl")
    assert not is_dataset(tmp_path)


def test_of_a_very_long_sample_only_the_beginning_is_shown(tmp_path):
    row = {"input_ids": [7] * 5000, "loss_mask": [0, 1] * 2500}
    (tmp_path / "tokens.jsonl").write_text(json.dumps(row) + "\n")
    text, _ = seen(tmp_path / "tokens.jsonl", html=tmp_path / "x.html")
    assert "904 more tokens" in text
    page = (tmp_path / "x.html").read_text()
    assert "904 more tokens" in page
    assert page.count("<i title") + page.count("<b title") == 4096


def test_a_sample_that_is_not_there(made):
    with pytest.raises(InputError, match="holds 30 samples"):
        seen(made[0], sample=30)


def test_the_command_lines(made, tmp_path):
    folder, _ = made
    shown = run_eyas("inspect", folder, "--samples", "1", "--html", tmp_path / "x.html")
    assert shown.returncode == 0, shown.stderr
    assert "supervised" in shown.stdout
    assert (tmp_path / "x.html").exists()
    data = str(folder.parent / "chat.jsonl")
    common = ["prepare", "--data", data, "--model-path", str(folder.parent / "model")]
    strict = run_eyas(*common, "--output-dir", tmp_path / "a", "--strict")
    assert strict.returncode == 20, strict.stderr
    assert "2 of 32 rows were not used" in strict.stdout
    (tmp_path / "cut.jsonl").write_bytes((folder.parent / "chat.jsonl").read_bytes() + b'{"messages": [')
    cut = run_eyas("prepare", "--data", tmp_path / "cut.jsonl", *common[3:], "--output-dir", tmp_path / "d")
    assert cut.returncode == 20, cut.stderr
    assert "files that break off" in cut.stdout
    lax = run_eyas(
        *common, "--output-dir", tmp_path / "b", "--chat-template-kwargs", "{}", "--column", "messages=messages"
    )
    assert lax.returncode == 0, lax.stderr
    bad = run_eyas(*common, "--output-dir", tmp_path / "c", "--chat-template-kwargs", "[1]")
    assert bad.returncode == 3
    assert "expected a JSON object" in bad.stderr
