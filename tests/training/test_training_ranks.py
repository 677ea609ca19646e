"""Several ranks train what one rank trains: DDP and FSDP2 over gloo, on the CPU."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from training_work import curve, options

from eyas.base.errors import InputError
from eyas.training.checkpoints import list_checkpoints
from eyas.training.trainer import train

KINDS = ("ddp", "fsdp")
SCRIPT = """
import json, sys
from eyas.training.trainer import train

if __name__ == "__main__":
    for settings in json.loads(sys.argv[1]):
        train(**settings)
"""


def launch_script(script, *settings, ranks=2):
    """Run `script` on every rank, with a list of trainings' settings as JSON."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", script, json.dumps(settings, default=str)]
    base = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
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


@pytest.fixture(scope="module")
def trained(work):
    """One rank, and two under DDP and FSDP, which then resume: launched once."""
    common = {"steps": 6, "eval_every": 3, "ttt_warmup_fraction": 0.4}
    train(**options(work, "one-rank", accumulate=2, **common))
    two = [options(work, kind, sharding=kind, **{**common, "steps": steps}) for kind in KINDS for steps in (6, 8)]
    launch_script(SCRIPT, *two)
    return work


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one_with_two_micro_batches(trained, kind):
    one, two = curve(trained / "one-rank"), curve(trained / kind)
    assert [line["step"] for line in one] == [line["step"] for line in two if line["step"] <= 6]
    for a, b in zip(one, two, strict=False):
        if "loss" in a:
            torch.testing.assert_close(torch.tensor(a["loss"]), torch.tensor(b["loss"]), rtol=1e-4, atol=1e-5)
        else:
            assert a["simulated"]["rounds"] == pytest.approx(b["simulated"]["rounds"], abs=2)
    weights = [
        load_file(trained / name / "checkpoints" / "step-00000006" / "model.safetensors") for name in ("one-rank", kind)
    ]
    for key, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][key], rtol=1e-2, atol=1e-3, msg=key)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_two_ranks_holds_whole_tensors_and_is_resumed(trained, kind):
    checkpoint = list_checkpoints(trained / kind / "checkpoints")[-1]
    files = {"model.safetensors", "optimizer.pt", "state.json", "rng-0.pt", "rng-1.pt"}
    assert {p.name for p in checkpoint.iterdir()} == files
    assert checkpoint.name == "step-00000008"
    assert curve(trained / kind)[-1]["step"] == 8


def test_more_ranks_than_samples_can_feed_are_refused(work, monkeypatch):
    with pytest.raises(InputError, match="cannot feed"):
        train(**options(work, "too-many", accumulate=1000))
