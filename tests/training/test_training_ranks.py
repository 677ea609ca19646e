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
import accelerate, torch
from eyas.training.trainer import train

if sys.argv[2] == "fsdp2":
    # On the CPU accelerate's `prepare` leaves FSDP out. What it does on GPUs, done here with its own plugin, made from the environment
    # of `accelerate launch --use_fsdp --fsdp_version 2`, and its own sharding.
    import os
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import FSDPModule

    os.environ.update(FSDP_VERSION="2", FSDP_CPU_RAM_EFFICIENT_LOADING="true", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP")
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    real = accelerate.Accelerator.__init__

    def begin(self, *args, **options):
        self.plugin = FullyShardedDataParallelPlugin()
        del os.environ["ACCELERATE_USE_FSDP"]
        real(self, *args, **options)

    def prepare(self, model, optimizer):
        self.state.fsdp_plugin = self.plugin
        fsdp2_prepare_model(self, model)
        self.state.fsdp_plugin = None
        assert isinstance(model, FSDPModule)
        trained = [p for p in model.parameters() if p.requires_grad]
        group = optimizer.param_groups[0]
        return model, torch.optim.AdamW(trained, lr=group["lr"], betas=group["betas"], weight_decay=group["weight_decay"])

    accelerate.Accelerator.__init__, accelerate.Accelerator.prepare = begin, prepare
train(**json.loads(sys.argv[1]))
"""


def launch(settings, kind, ranks=2):
    launch_script(SCRIPT, settings, kind, ranks=ranks)


def launch_script(script, settings, *arguments, ranks=2):
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
        "ACCELERATE_USE_CPU": "true",
    }
    base["OMP_NUM_THREADS"] = "1"
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


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_equal_one_with_two_micro_batches(work, kind):
    common = {"steps": 6, "eval_every": 3, "single_step_share": 0.4}
    if not (work / "one-rank").exists():
        train(**options(work, "one-rank", accumulate=2, **common))
    settings = options(work, kind, **common)
    launch(settings, kind)
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
    launch({**settings, "steps": 8}, kind)
    assert curve(work / kind)[-1]["step"] == 8
