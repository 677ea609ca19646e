"""Several processes that train one draft: `torchrun` starts them, DDP or FSDP2 holds their weights together.

Two ways to talk. Weights, gradients and sums of figures go over the devices (NCCL) and no host waits for them. What the hosts decide by
(counts, the clock, whether to stop) goes over gloo from host to host, so that no step waits for its device.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from eyas.base.errors import InputError


@dataclass(frozen=True)
class Ranks:
    """This process among `count`. host: the group that hosts talk over; None for a single process."""

    rank: int
    count: int
    device: torch.device
    host: Any = None

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and talks to trackers."""
        return self.rank == 0

    def wrap(self, draft: torch.nn.Module, sharding: str) -> torch.nn.Module:
        """The draft on this rank's device, held equal over ranks (`ddp`) or spread over them (`fsdp`). Gradients are averaged."""
        draft.to(self.device)
        if self.count == 1:
            return draft
        if sharding == "ddp":
            devices = [self.device] if self.device.type == "cuda" else None
            return DistributedDataParallel(draft, device_ids=devices)  # type: ignore[arg-type]
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # One unit: the draft prepares its layers' weights together, and reads its norms' without running them as modules.
        mesh = init_device_mesh(self.device.type, (self.count,))
        return fully_shard(draft, mesh=mesh, reshard_after_forward=True)  # type: ignore[call-overload, return-value]

    def synchronised(self, model: torch.nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around a backward pass: gradients are averaged over ranks in the step's last one only."""
        if self.count == 1:
            return nullcontext()
        if isinstance(model, DistributedDataParallel):
            return nullcontext() if last else model.no_sync()
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each of these host numbers summed over ranks; the device is not waited for."""
        if self.count == 1:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(total, group=self.host)
        return total.tolist()

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        return self.sum([here])[0] > 0

    def sum_on_device(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor of the device summed over ranks, in place."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Until every rank is here."""
        if self.count > 1:
            dist.barrier(group=self.host)


def join_ranks() -> Ranks:
    """Meet the other ranks that `torchrun` (or `accelerate launch`) started, or be the only one. They stay together to the process's end.

    Raises:
        InputError: more ranks than GPUs on this machine; `accelerate launch` with settings of its own.
    """
    refuse_settings_of_accelerate()
    count, rank, local = (int(os.environ.get(k, d)) for k, d in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    cuda = torch.cuda.is_available()
    if cuda and local >= torch.cuda.device_count():
        raise InputError(
            f"rank {rank} is process {local} of this machine, which shows {torch.cuda.device_count()} GPUs",
            "torchrun --nproc-per-node takes the number of GPUs",
        )
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if count == 1:
        return Ranks(rank, count, device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
        atexit.register(dist.destroy_process_group)
    return Ranks(dist.get_rank(), dist.get_world_size(), device, dist.new_group(backend="gloo"))


def refuse_settings_of_accelerate() -> None:
    """`accelerate launch` starts ranks as torchrun does; what its flags or config file ask for besides is eyas's own to say.

    Raises:
        InputError: naming the setting, and the flag of `eyas train` for it.
    """
    asked = {k.removeprefix("ACCELERATE_"): v.lower() for k, v in os.environ.items() if k.startswith("ACCELERATE_")}
    for name, neutral, instead in (
        ("MIXED_PRECISION", ("no",), "--dtype bfloat16 or float32"),
        ("GRADIENT_ACCUMULATION_STEPS", ("1",), "--accumulate"),
        ("USE_FSDP", ("false", "0"), "--sharding fsdp"),
        ("USE_DEEPSPEED", ("false", "0"), "--sharding fsdp"),
        ("USE_MEGATRON_LM", ("false", "0"), "--sharding fsdp"),
    ):
        if asked.get(name, neutral[0]) not in neutral:
            raise InputError(
                f"accelerate is set to {name.lower()} {asked[name]}, which eyas does not read from it",
                f"take it out of accelerate's flags or config file, and give `eyas train` {instead}; torchrun is enough to launch it",
            )
