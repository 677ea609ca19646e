"""How the faults of test_faults.py are planted: into vLLM's worker by RPC, into what transformers' hooks give, and by SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from vllm_models import eyas_process, random_samples, write_dataset

from eyas.base.errors import StoreError
from eyas.data.dataset import Sample
from eyas.engines.transformers import TransformersEngine
from eyas.engines.vllm.engine import VllmEngine
from eyas.runs.processes import SHM, recorded_shm
from eyas.store.format import distinct_samples, finished_shards
from eyas.store.reader import open_states


@contextlib.contextmanager
def planted(vllm: VllmEngine, fault: str) -> Iterator[None]:
    vllm._rpc("plant", fault)
    yield
    vllm._rpc("plant", "")


def plant(engine: TransformersEngine, change: Callable[..., Any]) -> None:
    """Let `change(layer, stream, lengths)` alter what the hooks give before anyone sees it."""
    real = engine.forward_captured
    engine.forward_captured = lambda samples, sink: real(samples, lambda i, s, n: sink(i, *change(i, s.clone(), n)))


def spoiled(value: float) -> Callable[..., Any]:
    """A forward pass whose first row of layer 2 is `value`; parity's small batch is left alone, so it happens in the bulk."""
    real = TransformersEngine.forward_captured

    def forward(self: TransformersEngine, samples: Any, sink: Any) -> Any:
        def spoil(i: int, stream: torch.Tensor, lengths: list[int]) -> None:
            stream = stream.clone()
            if len(samples) > 2 and i == 2:
                stream[:1] = value
            sink(i, stream, lengths)

        return real(self, samples, spoil)

    return forward


@dataclass
class Kills:
    """`eyas extract --engine vllm`, killed again and again and then let through, each time with other batches."""

    store: Path
    samples: list[Sample]
    too_long: Sample
    codes: dict[str, int] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    #: After each kill: samples that count as written, processes still alive, shared-memory segments still there, was it readable?
    done: dict[str, int] = field(default_factory=dict)
    alive: dict[str, list[psutil.Process]] = field(default_factory=dict)
    segments: dict[str, list[str]] = field(default_factory=dict)
    readable: dict[str, bool] = field(default_factory=dict)


VICTIMS = {
    "Worker": ["--batch-tokens", "256"],
    "EngineCore": ["--batch-tokens", "512", "--batch-size", "2"],
    "driver": ["--batch-tokens", "256", "--batch-size", "8"],
    "Ctrl-C": ["--batch-tokens", "300"],
}


def wait_for_shards(folder: Path, more_than: int, driver: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if len(list(folder.glob("shard-*.safetensors"))) > more_than:
            return
        if driver.poll() is not None:
            raise AssertionError(f"the run ended early: {driver.communicate()[1][-2000:]}")
        time.sleep(0.02)
    raise AssertionError("no shard came")


def below(driver: subprocess.Popen[str], name: str) -> psutil.Process:
    """The live process below the driver whose title or command line holds `name`."""
    for process in psutil.Process(driver.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if name in " ".join([process.name(), *process.cmdline()]):
                return process
    raise AssertionError(f"no {name}")


def killed_and_resumed(model: Path, root: Path) -> Kills:
    """Kill one process after another, press Ctrl-C, then let the run finish; what was seen on the way."""
    *samples, too_long = random_samples([250] * 800 + [310], seed=11)
    data = write_dataset(root / "samples.jsonl", [*samples, too_long])
    seen = Kills(root / "store", samples, too_long)
    flags = ["extract", "--model-path", model, "--prepared-data", data, "--output-dir", seen.store]
    flags += ["--engine", "vllm", "--layer-ids", "2", "4", "--shard-size", "1", "--parity-samples", "1"]
    flags += ["--max-seq-len", "300"]
    for victim, batches in VICTIMS.items():
        before = len(finished_shards(seen.store))
        run = eyas_process(*flags, *batches, EYAS_STATE_DIR=str(root / victim))
        wait_for_shards(seen.store, before, run)
        family = psutil.Process(run.pid).children(recursive=True)
        if victim == "Ctrl-C":
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does: every process of the group
        else:
            os.kill(run.pid if victim == "driver" else below(run, victim).pid, signal.SIGKILL)
        _, seen.said[victim] = run.communicate(timeout=120)
        seen.codes[victim] = run.returncode
        _, alive = psutil.wait_procs(family, timeout=60)
        seen.alive[victim] = [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
        (folder,) = (root / victim / "runs").iterdir()
        assert recorded_shm(folder), "no segment was ever seen: nothing to find left behind"
        deadline = time.monotonic() + 30  # the keeper of a killed driver takes its time
        while (left := [n for n in recorded_shm(folder) if (SHM / n).exists()]) and time.monotonic() < deadline:
            time.sleep(0.1)
        seen.segments[victim] = left
        seen.done[victim] = len(distinct_samples(finished_shards(seen.store)))
        with contextlib.suppress(StoreError):
            open_states(seen.store)
            seen.readable[victim] = True
    last = eyas_process(*flags, "--batch-tokens", "1000", "--tp-size", "2", EYAS_STATE_DIR=str(root / "last"))
    _, seen.said["last"] = last.communicate(timeout=240)
    seen.codes["last"] = last.returncode
    return seen


#: Loads an engine with two ranks inside a run, then lets both die.
DYING = """
import sys
from pathlib import Path
from eyas.runs import run as runs
from eyas.engines.vllm.engine import VllmEngine, VllmSettings
from eyas.target.model_files import describe_model

if __name__ == "__main__":
    with runs.start("extract", log_level="debug"):
        settings = VllmSettings(
            describe_model(Path(sys.argv[1])), dtype="float32", tp_size=2, max_seq_len=64, worker_cls="dying_worker.DyingWorker"
        )
        engine = VllmEngine(settings)
        try:
            engine.load([1, 2])
            engine._rpc("die")
        finally:
            engine.close()
"""
