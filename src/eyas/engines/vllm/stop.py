"""How vLLM's processes end: at once, when everything they made is on disk.

Left to itself each of them first lets Python collect the garbage of a whole engine, several times over: five seconds for an engine of
more than one rank, until vLLM kills the core. Nothing there is worth the wait: shards are written, memory goes with the process.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import threading
import time
from typing import Any

import psutil

log = logging.getLogger(__name__)

#: Seconds that ranks have to close their shards and leave; the core has `CORE_GRACE` more for what it shares with them.
RANKS_LEAVE = 30.0
CORE_GRACE = 0.5


def end_without_collecting() -> None:
    """For a process that is about to end: what it holds is kept out of every collection still to come. Files and segments are closed as ever.

    Does nothing in a process that vLLM did not start (an engine inside the user's own): that one lives on and wants its memory back.
    """
    if multiprocessing.parent_process() is None:
        return
    gc.disable()
    gc.freeze()
    gc.unfreeze = lambda: None  # the core calls it as it ends


def end_engine(core: Any) -> None:
    """End an engine's processes; `core` is the client of `llm.llm_engine.engine_core`. Returns when all of them are gone.

    The core gets vLLM's own signal, which ends the ranks. Once they have left, only the core's own memory is left to be cleaned up: it is killed.
    """
    manager = getattr(getattr(core, "resources", None), "engine_manager", None)
    pids = [process.pid for process in getattr(manager, "processes", ()) if process.pid]
    cores = [process for process in map(_process, pids) if process is not None]
    ranks = []
    for process in cores:
        with contextlib.suppress(psutil.Error):
            ranks += process.children()
    if ranks:
        threading.Thread(target=_kill_after, args=(cores, ranks), name="eyas-engine-end", daemon=True).start()
    core.shutdown()
    for late in psutil.wait_procs([*cores, *ranks], timeout=5)[1]:
        log.warning("process %d of the engine did not end; killing it", late.pid)
        with contextlib.suppress(psutil.Error):
            late.kill()


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _kill_after(cores: list[psutil.Process], ranks: list[psutil.Process]) -> None:
    if psutil.wait_procs(ranks, timeout=RANKS_LEAVE)[1]:
        return  # vLLM's own limits apply
    time.sleep(CORE_GRACE)
    for core in cores:
        with contextlib.suppress(psutil.Error):
            core.kill()
