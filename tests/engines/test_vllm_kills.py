"""`kill -9` of one process after another and Ctrl-C, then the run is finished: nothing is lost, nothing is written twice, nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from vllm_models import eyas_process, random_samples, write_dataset

from eyas.store import done_samples, finished_shards
from eyas.verification import verify

pytestmark = pytest.mark.vllm


def descendants(driver: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """Live processes below the driver whose title or command line holds `name`."""
    found = []
    for process in psutil.Process(driver.pid).children(recursive=True):
        try:
            if name in " ".join([process.name(), *process.cmdline()]):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for_shards(folder: Path, more_than: int, driver: subprocess.Popen[str]) -> int:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        count = len(list(folder.glob("shard-*.safetensors")))
        if count > more_than:
            return count
        if driver.poll() is not None:
            raise AssertionError(f"the run ended early: {driver.communicate()[1][-2000:]}")
        time.sleep(0.02)
    raise AssertionError("no shard came")


def test_killed_rank_engine_core_and_driver_then_resumed(vllm_model: Callable[[str], Path], tmp_path: Path) -> None:
    samples = random_samples([250] * 800, seed=11)
    data, store = write_dataset(tmp_path / "samples.jsonl", samples), tmp_path / "store"
    flags = ["extract", "--model-path", vllm_model("llama"), "--prepared-data", data, "--output-dir", store]
    flags += ["--engine", "vllm", "--layer-ids", "2", "4", "--shard-size", "1", "--batch-tokens", "256"]
    flags += ["--parity-samples", "1"]
    shards = 0
    for victim in ("Worker", "EngineCore", "driver", "Ctrl-C"):
        run = eyas_process(*flags)
        shards = wait_for_shards(store, shards, run)
        family = psutil.Process(run.pid).children(recursive=True)
        if victim == "Ctrl-C":
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does: every process of the group
        else:
            os.kill(run.pid if victim == "driver" else descendants(run, victim)[0].pid, signal.SIGKILL)
        _, errors = run.communicate(timeout=120)
        if victim == "driver":
            assert run.returncode == -signal.SIGKILL
        elif victim == "Ctrl-C":
            assert run.returncode == 130, errors[-2000:]
        else:
            assert run.returncode == 10, errors[-2000:]
            assert "the engine died" in errors
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], f"left behind after killing {victim}"
        assert len(done_samples(store)) < len(samples), "too quick: nothing was left to resume"
    last = eyas_process(*flags)
    _, errors = last.communicate(timeout=240)
    assert last.returncode == 0, errors[-2000:]
    written = [one for header in finished_shards(store) for one in header.sample_ids]
    assert len(written) == len(set(written))
    assert set(written) == {s.id for s in samples}
    assert not verify(store, recompute=0).problems
    assert not list(store.glob("*.tmp"))
