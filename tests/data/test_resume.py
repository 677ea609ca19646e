"""A stage that was killed resumes: the same call ends with the files of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from chat_templates import byte_level_tokenizer
from eyas_process import eyas_environment, run_eyas

from eyas.base.errors import DiskFullError, StoreError
from eyas.data import preparation
from eyas.data.dataset import open_dataset
from eyas.data.preparation import prepare

#: prepare with small steps, in a process that ends itself by a signal when a row is reached.
PREPARE = """
import os, sys
from eyas.data import preparation
preparation.CHUNK_ROWS, preparation.CHUNKS_ALONE, preparation.CHECKPOINT_ROWS = 16, 2, 64

if __name__ == "__main__":
    data, model, out, workers, row, number = sys.argv[1:]

    def progress(report):
        if report.rows >= int(row):
            os.kill(os.getpid(), int(number))

    preparation.prepare(data, model, out, workers=int(workers), held_out=0.3, progress=progress)
"""
#: regenerate with a generator that counts, and that ends the process at an answer.
REGENERATE = """
import os, sys
from eyas.data.generators import Answer
from eyas.data.regeneration import regenerate
from eyas.data.settings import RegenerateSettings

class Count:
    description = {"name": "count"}
    asked = 0
    def answer(self, prompts, limits, salt):
        self.asked += 1
        if self.asked == int(sys.argv[4]):
            os.kill(os.getpid(), int(sys.argv[5]))
        return [Answer([sum(prompt) % 200 + 10, 7], "stop") for prompt in prompts]
    def close(self): pass

settings = RegenerateSettings((sys.argv[1],), sys.argv[2], sys.argv[3], window=3, held_out=0.3)
print(regenerate(settings, lambda *_: Count()).resumed)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    byte_level_tokenizer("chatml").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def data(tmp_path) -> Path:
    rng = random.Random(0)
    rows = [
        {"prompt": f"Question {rng.randrange(250)}", "completion": "Yes"} if k % 9 else {"text": k} for k in range(300)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "a.jsonl"


def script(text: str, *arguments) -> subprocess.CompletedProcess[str]:
    path = Path(arguments[2]).with_suffix(".py")
    path.write_text(text)
    command = [sys.executable, str(path), *map(str, arguments)]
    return subprocess.run(command, env=eyas_environment(), capture_output=True, text=True, timeout=120, check=False)


def content(folder: Path) -> dict[str, bytes]:
    """The files of a dataset, but for its manifests' times."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and not file.name.startswith(".lock")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files if file.name != "manifest.json"}


def small_steps(monkeypatch):
    monkeypatch.setattr(preparation, "CHUNK_ROWS", 16)
    monkeypatch.setattr(preparation, "CHECKPOINT_ROWS", 64)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_prepare_resumes(model, data, tmp_path, workers, monkeypatch):
    small_steps(monkeypatch)
    prepare(data, model, tmp_path / "whole", workers=1, held_out=0.3)
    for row, number in ((70, 9), (300, 15)):
        killed = script(PREPARE, data, model, tmp_path / "out", workers, row, number)
        assert killed.returncode == -number, killed.stderr
    with pytest.raises(StoreError, match="`eyas prepare` was interrupted"):
        open_dataset(tmp_path / "out")
    if workers == 1:
        shown = run_eyas("inspect", tmp_path / "out")
        assert shown.returncode == StoreError.exit_code
        assert "rerun the same command to resume" in shown.stderr
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("data-*.parquet")}
    assert prepare(data, model, tmp_path / "out", workers=1, held_out=0.3).resumed == 256
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert len(kept) >= 4
    whole = {
        file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*") if not file.name.startswith(".lock")
    }
    again = prepare(data, model, tmp_path / "out", held_out=0.3)
    assert (again.rows, again.samples) == (300, len(open_dataset(tmp_path / "out")) + again.heldout_samples)
    assert whole == {file: file.stat().st_mtime_ns for file in whole}
    data.write_text(data.read_text() + '{"prompt": "New", "completion": "Yes"}\n')  # another input is not the same
    assert prepare(data, model, tmp_path / "out", held_out=0.3).rows == 301


def test_a_full_disk_is_said_and_resumed(model, data, tmp_path, monkeypatch):
    small_steps(monkeypatch)
    prepare(data, model, tmp_path / "whole", workers=1)

    def fill(report):
        if report.rows > 200:
            raise OSError(28, "No space left on device")

    with pytest.raises(DiskFullError, match="rerun the same command"):
        prepare(data, model, tmp_path / "out", workers=1, progress=fill)
    assert prepare(data, model, tmp_path / "out", workers=1).resumed == 192
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_killed_regenerate_resumes(model, data, tmp_path):
    undisturbed = script(REGENERATE, data, model, tmp_path / "whole", 0, 0)
    assert undisturbed.stdout.strip() == "0", undisturbed.stderr
    killed = script(REGENERATE, data, model, tmp_path / "out", 17, 9)
    assert killed.returncode == -9, killed.stderr
    with open(tmp_path / "out" / "answers.jsonl", "a") as file:
        file.write('{"key": "half a li')
    with pytest.raises(StoreError, match="`eyas regenerate` was interrupted"):
        open_dataset(tmp_path / "out")
    ended = script(REGENERATE, data, model, tmp_path / "out", 0, 0)
    assert ended.stdout.strip() == "48", ended.stderr
    assert os.path.exists(tmp_path / "out" / "manifest.json")
    assert content(tmp_path / "out") == content(tmp_path / "whole")
