"""vLLM's Ray executor, with an end to its waiting: named to vLLM as its `distributed_executor_backend`, no file of vLLM is changed.

It is the newer of vLLM's two, in which ranks are started like any other: the older one calls the model runner behind the worker's
back, and nothing would be captured. It runs in the engine's process on the driver's host and starts one Ray actor per rank. When a rank dies, vLLM (0.32) notes it at
once, ends the other ranks and then goes on waiting for an answer: of ranks on its own host it waits in shared memory and can be woken,
of ranks on other hosts on a socket, where nothing wakes it (five minutes for an engine step, for ever for an RPC).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from vllm.config import VllmConfig
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

#: Seconds that Ray may take to say which rank died, after another rank has failed because of it.
VERDICT = 3.0


class RayExecutor(RayExecutorV2):
    """One Ray actor per rank. A rank that dies ends the engine within seconds, and the driver is told which one it was."""

    response_mqs: list[Any]

    def __init__(self, vllm_config: VllmConfig):
        # vLLM asks in many places, also in the ranks, whether this is "ray"; only the choice of the class needed the class.
        vllm_config.parallel_config.distributed_executor_backend = "ray"
        super().__init__(vllm_config)

    def _init_executor(self) -> None:
        super()._init_executor()
        self.response_mqs = [Answers(queue, self._name_the_dead) for queue in self.response_mqs]

    def shutdown(self) -> None:
        try:
            if self.is_failed and not self.shutting_down:
                self._name_the_dead(0)
        finally:
            super().shutdown()

    def _name_the_dead(self, seconds: float) -> None:
        """Leave an error for each rank that has ended where the driver looks when its engine has died (`VllmEngine._explained`)."""
        ranks = {handle.run_ref: handle for handle in self.ray_worker_handles}
        ray.wait(list(ranks), num_returns=1, timeout=seconds)
        ended, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=0)
        hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()} if ended else {}
        for reference in ended:
            handle = ranks[reference]
            record = {
                "class": "EngineError",
                "what": f"its process on {hosts.get(handle.node_id, 'a lost host')} {_how_it_ended(reference)}",
                "remedy": "finished shards are kept and the same command resumes; `ray status` shows which hosts are there",
                "rank": handle.rank,
            }
            file = Path(os.environ["EYAS_FAULT_DIR"]) / f"fault-r{handle.rank:03d}.json"
            temporary = file.with_suffix(f".{time.monotonic_ns()}")  # two threads may come here at once
            temporary.write_text(json.dumps(record), encoding="utf-8")
            os.replace(temporary, file)


def _how_it_ended(reference: Any) -> str:
    try:
        ray.get(reference)
    except ray.exceptions.RayActorError:
        return "is gone (killed, out of memory, or the host is down)"
    except ray.exceptions.RayError as error:
        return f"failed: {str(error).strip().splitlines()[-1]}"
    return "ended too early"


class Answers:
    """The queue of one rank's answers; waiting for one ends with the executor, on whichever host the rank is.

    Args: vLLM's queue; what to do about an answer that is a failure, within so many seconds, before anyone hears of it.
    """

    def __init__(self, queue: Any, failed: Callable[[float], None]):
        self._queue, self._failed = queue, failed
        self._closed = False

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next answer, (status, result). Raises TimeoutError after `timeout` seconds, RuntimeError when the executor was shut down."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._closed:
            left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
            try:
                answer = self._queue.dequeue(max(0.0, left), indefinite)
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                continue
            if answer[0] == RayWorkerProc.ResponseStatus.FAILURE:
                self._failed(VERDICT)
            return answer
        raise RuntimeError("a rank has died, its executor is shut down")

    def shutdown(self) -> None:
        """End every wait, at once for a rank of this host, else within a second."""
        self._closed = True
        self._queue.shutdown()
