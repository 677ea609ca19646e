"""torch.compile for the drafts' plain functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def compile_piece(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once: static for the first shape, then once more for any number of rows."""
    # One variant per number of own columns, each static and dynamic; the default limit of 8 would fall back to eager without a word.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(function)
