"""Real parts for the tests: tiny random models of several architectures, token datasets, the command line as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Runs that the tests start are not the user's.
os.environ["EYAS_STATE_DIR"] = tempfile.mkdtemp(prefix="eyas-tests-")

from tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model("llama")` -> folder of a tiny random model, made once per session."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_tiny_model(kind, root / kind)
        return made[kind]

    return get


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tests' matrices are tiny, and the machine may be shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_token_rows(path: Path, lengths: list[int], vocab_size: int = 128, seed: int = 0) -> Path:
    """`tokenized_data.jsonl` of random samples; the first third of each is not supervised."""
    rng = np.random.default_rng(seed)
    with open(path, "w", encoding="utf-8") as file:
        for length in lengths:
            ids = rng.integers(0, vocab_size, length).tolist()
            mask = [int(i >= length // 3) for i in range(length)]
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    return path


@pytest.fixture
def token_rows(tmp_path: Path) -> Callable[..., Path]:
    """`token_rows([5, 9, 30])` -> a .jsonl of random samples of these lengths."""

    def make(lengths: list[int], name: str = "tokens.jsonl", **kwargs: Any) -> Path:
        return write_token_rows(tmp_path / name, lengths, **kwargs)

    return make


def run_eyas(*arguments: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process and wait for it."""
    return subprocess.run(
        eyas_command(*arguments),
        capture_output=True,
        text=True,
        timeout=300,
        env=eyas_environment(),
        check=False,
        **kwargs,
    )


def eyas_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "eyas", *map(str, arguments)]


def eyas_environment(**more: str) -> dict[str, str]:
    source = str(Path(__file__).parent.parent / "src")
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}
