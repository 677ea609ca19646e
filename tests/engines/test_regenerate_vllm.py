"""`eyas regenerate` through a real vLLM: in the process, and over HTTP from its server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from vllm_models import vllm_within

from eyas.data.settings import Sampling
from eyas.engines.regenerate import regenerate

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.smollm2]

TESTS = Path(__file__).parents[1]
QUESTIONS = ["Answer with one word: what is the capital of France?", "Say hello.", "Write a long story about a fox."]
COMMON = ["--max-new-tokens", "24", "--max-seq-len", "256"]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]))
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {
        **os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The embedded model with a generation config that servers obey where a request leaves something open."""
    from eyas.target.embedded import embedded_model

    folder = tmp_path_factory.mktemp("model")
    for file in embedded_model().iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "generation_config.json"
    own = json.loads(config.read_text())
    config.unlink()
    penalties = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    config.write_text(json.dumps(own | penalties | {"do_sample": True, "temperature": 0.9, "top_k": 5, "min_p": 0.3}))
    return folder


def regenerated(folder: Path, data: Path, model: Path, *flags: str) -> list[dict]:
    """The lines of answers.jsonl that a real `eyas regenerate` made."""
    command = [
        sys.executable,
        "-m",
        "eyas",
        "regenerate",
        "--data",
        str(data),
        "--model-path",
        str(model),
        "--output-dir",
        str(folder),
        *COMMON,
        *flags,
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return answers(folder)


def answers(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def check(lines: list[dict]) -> None:
    """Greedy answers of the model itself: each token the argmax of a forward pass, near ties (bf16) aside; reasons and ends fit."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from eyas.target.embedded import embedded_model

    tokenizer = AutoTokenizer.from_pretrained(embedded_model())
    target = AutoModelForCausalLM.from_pretrained(embedded_model(), dtype=torch.float32).eval()
    end = tokenizer.eos_token_id
    turns = [turn for line in lines for turn in line["turns"]]
    assert {turn["finish_reason"] for turn in turns} == {"stop", "length"}
    for turn in turns:
        ids = torch.tensor([[*turn["prompt"], *turn["answer"]]])
        with torch.inference_mode():
            logits = target(ids).logits[0, len(turn["prompt"]) - 1 : -1]
        chosen = logits.gather(1, ids[0, len(turn["prompt"]) :, None])[:, 0]
        assert float((logits.max(-1).values - chosen).max()) < 0.5
        assert (turn["answer"][-1] == end) == (turn["finish_reason"] == "stop")
        assert end not in turn["answer"][:-1]


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [{"messages": [{"role": "user", "content": q}]} for q in QUESTIONS]
    rows[1]["messages"] += [
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "And in French, one word?"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_vllm_engine(data, model, tmp_path):
    with vllm_within():
        regenerate(
            data=[data],
            model_path=str(model),
            output_dir=tmp_path / "out",
            engine="vllm",
            sampling=Sampling(max_new_tokens=24),
            max_seq_len=256,
        )
    lines = answers(tmp_path / "out")
    assert sorted(len(line["turns"]) for line in lines)[0] == 1
    check(lines)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["regeneration"]["engine"]["name"] == "vllm"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_real_server(data, model, tmp_path):
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "target", "--port", str(port),
        "--host", "127.0.0.1", "--max-model-len", "256", "--enforce-eager", "--max-num-seqs", "8",
    ]  # fmt: skip
    with open(tmp_path / "server.log", "wb") as log:
        server = subprocess.Popen(command, env=environment(), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while True:
            assert server.poll() is None, (tmp_path / "server.log").read_text()[-3000:]
            assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    break
            except OSError:
                time.sleep(1)
        lines = regenerated(tmp_path / "out", data, model, "--endpoint", f"http://127.0.0.1:{port}/v1")
        check(lines)
    finally:
        for how in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(server.pid, how)
                server.wait(30)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
