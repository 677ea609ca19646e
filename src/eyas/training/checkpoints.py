"""Checkpoints of a training run: everything that exact resuming needs, written whole or not at all.

    checkpoints/step-00000200/model.safetensors   fp32 master weights
                              optimizer.pt        AdamW's moments, by parameter name
                              state.json          step, seconds trained, best so far
                              rng-<rank>.pt       random states of each rank

A checkpoint is written under `.tmp-...`, flushed and renamed, so a directory with the right name is complete. Full (unsharded) tensors are
stored, gathered over FSDP ranks and kept by rank 0.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from eyas.base.errors import StoreError
from eyas.base.files import fsync_directory, translate_disk_full, write_json
from eyas.base.tensors import write_tensors
from eyas.drafts.eagle3.model import DraftConfig
from eyas.drafts.files import kept_weights
from eyas.training.ranks import Ranks

_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)


def full_weights(model: torch.nn.Module, config: DraftConfig) -> dict[str, torch.Tensor]:
    """All weights and buffers, unsharded, on the CPU (on rank 0; empty elsewhere under FSDP). Every rank must call it."""
    weights: dict[str, Any] = get_model_state_dict(model, options=_GATHERED)
    return kept_weights(config, weights)


def save_checkpoint(
    directory: Path,
    step: int,
    config: DraftConfig,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
    ranks: Ranks,
) -> Path:
    """Write `directory/step-<step>`, then drop the oldest beyond `keep`. Every rank must call it.

    Raises:
        DiskFullError: nothing of this checkpoint is left, those before are.
    """
    weights = full_weights(model, config)
    moments = get_optimizer_state_dict(model, optimizer, options=_GATHERED)
    final = directory / f"step-{step:08d}"
    work = directory / f".tmp-step-{step:08d}"
    need = 3 * sum(x.nbytes for x in weights.values())  # with the two moments
    directory.mkdir(parents=True, exist_ok=True)
    with translate_disk_full(directory, need, work):
        if ranks.main:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            write_tensors(work / "model.safetensors", weights, {"format": "pt"})
            torch.save(moments, work / "optimizer.pt")
        ranks.wait()
        torch.save(_random_states(), work / f"rng-{ranks.rank}.pt")
        ranks.wait()
        if ranks.main:
            write_json(work / "state.json", {**state, "step": step})
            for path in work.iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            shutil.rmtree(final, ignore_errors=True)
            os.rename(work, final)
            fsync_directory(directory)
            for old in list_checkpoints(directory)[:-keep]:
                shutil.rmtree(old)
    ranks.wait()
    return final


def list_checkpoints(directory: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(directory.glob("step-*")) if directory.is_dir() else []


def remove_unfinished(directory: Path) -> None:
    """Remove what a run that was killed while it saved left in a draft's directory. Nobody else may be writing there."""
    for path in (directory / "checkpoints").glob(".tmp-step-*"):
        shutil.rmtree(path)
    for path in directory.glob(".model.safetensors.*.tmp"):
        path.unlink()


def load_checkpoint(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> dict[str, Any]:
    """Restore weights, moments and random states in place; returns the saved state. Every rank must call it.

    Raises:
        StoreError: the checkpoint is damaged or is of a draft of another shape.
    """
    try:
        state = json.loads((path / "state.json").read_text())
        weights: dict[str, Any] = load_file(path / "model.safetensors")
        moments = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(model, weights, options=options)
        set_optimizer_state_dict(model, optimizer, moments, options=options)
        own = path / f"rng-{ranks.rank}.pt"
        if own.exists():
            _restore_random_states(torch.load(own, weights_only=False))
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError, SafetensorError) as error:
        raise StoreError(
            f"checkpoint {path} cannot be restored: {error}", "delete it to resume from the one before"
        ) from None
    return state


def _random_states() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
