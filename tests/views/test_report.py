"""The report page: every figure comes from the run's files, nothing is loaded from elsewhere, nothing in a log can break the page."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eyas.base.files import write_json
from eyas.runs import run as runs
from eyas.views.report import layer_rows, ledger_reasons, line_svg, mean_rate, rate_points, render

HOSTILE = "</section><script>alert(1)</script> & \"quoted\" <b onclick='x'>"


class Page(HTMLParser):
    """Collects tags, attributes and text; checks that tags close in order."""

    VOID = frozenset({"meta", "link", "img", "br", "hr", "input", "line", "polygon", "polyline"})

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    @property
    def said(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


@pytest.fixture
def view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> runs.RunView:
    """A finished run with known figures, written file by file."""
    monkeypatch.setenv("EYAS_STATE_DIR", str(tmp_path / "state"))
    output = tmp_path / "out"
    output.mkdir()
    folder = runs.create("extract", ["extract", "--model-path", HOSTILE])
    record = json.loads((folder / "run.json").read_text())
    record |= {
        "status": "incomplete", "exit_code": 20, "ended": "2026-01-01T01:00:00+00:00", "started_at": 1000.0,
        "output_dir": str(output), "versions": {"eyas": "1.2.3", "torch": "9.9"},
        "preflight": [{"name": "disk", "status": "WARN", "finding": "little room", "remedy": "free some"}],
    }  # fmt: skip
    write_json(folder / "run.json", record)
    points = [
        {
            "beat": 1000.0 + 10 * k,
            "stage": "extracting",
            "samples": k,
            "total": 10,
            "tokens": 500 * k,
            "bytes": 4096 * k,
        }
        for k in range(11)
    ]
    (folder / "progress.json").write_text(json.dumps(points[-1]))
    (folder / "history.jsonl").write_text("".join(json.dumps(p) + "\n" for p in points) + '{"torn')
    norms = [{"2": {"mean": 1.0, "min": 0.5, "max": 2.0}, "4": {"mean": 100.0, "min": 50.0, "max": 200.0}},
             {"2": {"mean": 4.0, "min": 0.1, "max": 9.0}, "4": {"mean": 100.0, "min": 50.0, "max": 200.0}}]  # fmt: skip
    manifest = {
        "model": {"num_layers": 4}, "layer_ids": [2, 4], "totals": {"bytes": 5_000_000},
        "shards": [{"tokens": 30, "norms": norms[0]}, {"tokens": 10, "norms": norms[1]}],
        "parity": {"passed": True, "relative_l2": {"2": 1.5e-6, "4": 2.5e-6}, "note": None},
    }  # fmt: skip
    (output / "manifest.json").write_text(json.dumps(manifest))
    ledger = [
        {"sample_id": "a", "reason": "160 tokens, longer than 150"},
        {"sample_id": "b", "reason": "170 tokens, longer than 150"},
    ]
    (output / "ledger.jsonl").write_text("".join(json.dumps(e) + "\n" for e in ledger))
    line = {"time": 1005.0, "role": "rank", "rank": 3, "pid": 9, "level": "warning", "text": HOSTILE}
    (folder / "logs" / "rank3-h-9-1.log.jsonl").write_text((json.dumps(line) + "\n") * 3)
    return runs.load(folder)


def test_the_page_shows_what_the_files_say(view):
    said = Page(render(view)).said
    for text in (
        "incomplete, exit code 20",
        "tokens per second",
        "5.0 MB",
        "10 samples of 10",
        "5,000 tokens",
        "free some",
    ):
        assert text in said, text
    assert "50 tokens/s" in said
    assert "2 … tokens, longer than …" in said
    assert "rank 3 3 ×" in said
    assert "relative l2, layer 4 2.5e-06" in said
    assert "4 (target state) 100 50 200" in said
    assert "1.2.3" in said


def test_the_page_needs_no_network(view):
    html = render(view)
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not [attributes for _, attributes in page.tags if {"src", "href", "srcset", "action"} & set(attributes)]
    assert "http" not in html
    assert "url(" not in html
    assert "@import" not in html


def test_what_is_in_a_log_or_a_command_line_cannot_become_markup(view):
    page = Page(render(view))
    assert "alert(1)" in page.said
    assert not [tag for tag, attributes in page.tags if tag == "script" or "onclick" in attributes]


def test_a_run_that_died_at_once_has_a_page_too(tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_STATE_DIR", str(tmp_path))
    view = runs.load(runs.create("train", ["train"]))
    assert "train" in Page(render(view)).said


def test_norms_are_weighted_by_tokens_and_drawn_on_one_scale(view):
    two, four = layer_rows(json.loads((Path(view.record["output_dir"]) / "manifest.json").read_text()))
    assert two["mean"] == "1.75"  # (30 * 1 + 10 * 4) / 40
    assert (two["min"], two["max"]) == ("0.1", "9")
    assert two["left"] == 0
    assert four["left"] + four["width"] == pytest.approx(100)
    assert two["left"] < two["dot"] < four["dot"]


def test_rates_between_heartbeats_of_one_stage_only():
    history = [
        {"beat": 0.0, "stage": "load"},
        {"beat": 10.0, "stage": "work", "tokens": 0},
        {"beat": 20.0, "stage": "work", "tokens": 100},
        {"beat": 30.0, "stage": "work", "tokens": 400},
    ]
    assert rate_points(history, "tokens", 0.0) == [(20.0, 10.0), (30.0, 30.0)]
    assert mean_rate(history) == pytest.approx(30.0)  # from the first heartbeat with tokens
    assert mean_rate(history[:2]) is None


def test_the_curve_stays_inside_its_frame():
    svg = line_svg([(0.0, 5.0), (1.0, 10.0), (2.0, 0.0)])
    points = re.search(r'polyline class="line" points="([^"]+)"', svg).group(1).split()
    places = [tuple(map(float, point.split(","))) for point in points]
    assert places[1][1] < places[0][1] < places[2][1]
    assert all(0 <= x <= 640 and 0 <= y <= 200 for x, y in places)
    Page(svg)


def test_like_reasons_fall_together(tmp_path):
    reasons = ["12 tokens, too long", "99 tokens, too long", "not finite at layer 3"]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps({"reason": r}) + "\n" for r in reasons))
    assert ledger_reasons(tmp_path) == [("… tokens, too long", 2), ("not finite at layer …", 1)]


@pytest.mark.parametrize(("status", "every"), [("complete", True), ("open", False)])
def test_only_of_a_complete_output_it_says_that_every_sample_was_written(view, status, every):
    output = Path(view.record["output_dir"])
    (output / "ledger.jsonl").unlink()
    manifest = json.loads((output / "manifest.json").read_text())
    write_json(output / "manifest.json", {**manifest, "status": status})
    assert ("Every sample was written" in Page(render(view)).said) == every
