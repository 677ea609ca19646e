"""Several ranks train what one rank trains: DDP and FSDP2 over gloo, on the CPU."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from training_work import curve, options

from eyas.drafts.files import load_draft
from eyas.training.checkpoints import list_checkpoints
from eyas.training.trainer import train

SCRIPT = """
import json, sys
from eyas.training.trainer import train

if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
"""


def launch(settings, ranks=2, **environment):
    launch_script(SCRIPT, settings, ranks=ranks, **environment)


def launch_script(script, settings, *arguments, ranks=2, **environment):
    """Run `script` on every rank, with the settings as JSON and what else it takes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain = {k: str(v) if k in ("states", "output_dir") else v for k, v in settings.items()}
    command = [sys.executable, "-c", script, json.dumps(plain), *arguments]
    base = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    workers = [
        subprocess.Popen(command, env={**base, "RANK": str(r), "LOCAL_RANK": str(r)}, stderr=subprocess.PIPE, text=True)
        for r in range(ranks)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=180)
            assert worker.returncode == 0, errors[-3000:]
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_equal_one_with_two_micro_batches(work, kind):
    common = {"steps": 6, "eval_every": 3, "ttt_warmup_fraction": 0.4}
    if not (work / "one-rank").exists():
        train(**options(work, "one-rank", accumulate=2, **common))
    settings = options(work, kind, sharding=kind, **common)
    launch(settings)
    one, two = curve(work / "one-rank"), curve(work / kind)
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for a, b in zip(one, two, strict=True):
        if "loss" in a:
            torch.testing.assert_close(torch.tensor(a["loss"]), torch.tensor(b["loss"]), rtol=1e-4, atol=1e-5)
        else:
            assert a["simulated"]["rounds"] == pytest.approx(b["simulated"]["rounds"], abs=2)
    weights = [load_draft(work / name)[0].state_dict() for name in ("one-rank", kind)]
    for key, value in weights[0].items():
        torch.testing.assert_close(
            torch.nan_to_num(value), torch.nan_to_num(weights[1][key]), rtol=1e-2, atol=1e-3, msg=key
        )
    # A checkpoint of two ranks holds whole tensors, and two ranks resume from it.
    checkpoint = list_checkpoints(work / kind / "checkpoints")[-1]
    assert {p.name for p in checkpoint.iterdir()} == {
        "model.safetensors",
        "optimizer.pt",
        "state.json",
        "rng-0.pt",
        "rng-1.pt",
    }
    launch({**settings, "steps": 8})
    assert curve(work / kind)[-1]["step"] == 8
