"""Runs with a real vLLM, two tensor-parallel ranks on the CPU: what the ranks say, hanging, killing, stopping, resuming."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from eyas_process import eyas_command, eyas_environment, write_token_rows

from eyas.extraction.rehearse import rehearse
from eyas.runs import run as runs
from eyas.runs import stopping
from eyas.runs.loglines import Wanted, read_lines
from eyas.runs.processes import SHM, Mark, is_alive, processes_of_run, recorded_processes, recorded_shm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc"),
]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EYAS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    return tmp_path / "state"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that vLLM's CPU kernels run (heads of 32)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.08)
    model.save_pretrained(folder)
    return folder


def wait_for(what: Callable[[], object], seconds: float = 180.0) -> object:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s")


def eyas(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        eyas_command(*arguments), capture_output=True, text=True, timeout=400, env=eyas_environment(), check=False
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def in_bulk(run: str) -> runs.RunView | None:
    view = runs.find(run)
    assert not view.ended, eyas("runs", "logs", run)
    return view if view.progress.get("samples", 0) > 0 else None


def everyone(view: runs.RunView) -> list[Mark]:
    return processes_of_run(view.id, view.folder, [view.driver] if view.driver else [])


def rank_mark(view: runs.RunView, rank: int) -> Mark:
    return next(Mark.from_json(record) for record in recorded_processes(view.folder) if record["rank"] == rank)


def segments_left(view: runs.RunView) -> list[str]:
    return [name for name in recorded_shm(view.folder) if (SHM / name).exists()]


def test_hung_rank_reported_then_stopped_then_driver_killed_then_resumed_to_the_end(state, tmp_path, model):
    rows = write_token_rows(tmp_path / "rows.jsonl", [64] * 1500)
    flags = [
        "extract", "--engine", "vllm", "--tp-size", "2", "--model-path", str(model), "--prepared-data", str(rows),
        "--output-dir", str(tmp_path / "out"), "--layer-ids", "1", "2", "--batch-size", "4", "--shard-size", "2",
    ]  # fmt: skip
    first = eyas(*flags, "--detach", "--stall-after", "4", "--log-level", "debug").split()[0]
    view = wait_for(lambda: in_bulk(first))
    # Every process has its own files, by rank; what C++ in a rank prints (gloo) is among it.
    names = {path.name.split("-")[0] for path in (view.folder / "logs").iterdir()}
    assert {"driver", "engine", "rank0", "rank1"} <= names
    assert [line for line in read_lines(view.folder, Wanted(ranks=(1,))) if line.stream == "stdout"]
    assert segments_left(view)

    # A rank that is stopped: the watchdog says so, with the stack of every process, and `stop` still ends everything.
    os.kill(rank_mark(view, 1).pid, signal.SIGSTOP)
    wait_for(lambda: runs.find(first).state == "stalled", 60)

    def stacks_said() -> dict[str, str]:
        return {line.who: line.text for line in read_lines(view.folder, Wanted(grep="^stack"))}

    # Asked of one process after the other, and on a busy machine each takes its time. There, the start may have been called a stall
    # too, so there may be older stacks.
    wait_for(lambda: "state T (stopped)" in stacks_said().get("rank 1", ""), 120)
    wait_for(lambda: stacks_said().keys() >= {"driver", "rank 0", "rank 1"}, 120)
    assert "vllm" in stacks_said()["rank 0"]
    marks = everyone(view)
    assert len(marks) >= 4
    said = eyas("runs", "stop", first, "--grace", "2")
    assert "processes: none lives" in said
    assert "shared memory: no segment left" in said
    assert [mark for mark in marks if is_alive(mark)] == []
    assert segments_left(view) == []
    assert runs.find(first).state == "killed"

    # The driver killed hard: everything else ends by itself, and nothing stays.
    second = eyas("runs", "resume", first, "--detach").split()[0]
    view = wait_for(lambda: in_bulk(second))
    marks = everyone(view)
    os.kill(view.driver.pid, signal.SIGKILL)
    wait_for(lambda: not any(is_alive(mark) for mark in marks), 60)
    assert runs.find(second).state == "lost"
    wait_for(lambda: not segments_left(view), 30)
    eyas("runs", "clean", second, "--yes")
    assert stopping.leftovers([runs.find(second)]) == []
    assert not list((tmp_path / "out").glob("*.tmp"))

    done = eyas("runs", "resume", second)
    assert "1500 of 1500" in done
    view = runs.list_runs()[0]
    assert (view.state, view.record["resumes"]) == ("finished", second)
    wait_for(lambda: not segments_left(view), 30)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["totals"]["samples"] == 1500


def test_a_rehearsal_leaves_out_what_the_run_would(state, tmp_path, model):
    """Samples beyond the model's positions go to the ledger in a run: no reason to refuse it."""
    data = write_token_rows(tmp_path / "tokens.jsonl", [20, 300, 40])
    report = rehearse(
        engine="vllm", model_path=str(model), prepared_data=str(data), output_dir=str(tmp_path / "s"), layer_ids=[2]
    )
    assert (report.samples, report.tokens) == (2, 60)
