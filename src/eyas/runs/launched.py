"""Ranks that a launcher started (torchrun, `accelerate launch`: whatever sets RANK and WORLD_SIZE) are one run: rank 0 is its driver,
the others join it."""

from __future__ import annotations

import os

#: Seconds that a rank waits for rank 0 to begin the run: as long as imports on a cold disk may differ.
PATIENCE = 120.0


def own_rank() -> int | None:
    """This process's rank; None where no launcher started several."""
    return int(os.environ["RANK"]) if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1 else None


def launch_key() -> str | None:
    """The same for all ranks of a launch and for no other launch that is going on (it names the port where they meet)."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return None if own_rank() is None else " ".join(os.environ.get(name, "-") for name in names)
