"""vLLM's hidden-states connector for machines without CUDA: its events and pinned memory replaced by plain copies.

Imported by vLLM in its own processes (`kv_connector_module_path`).
"""

from __future__ import annotations

import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Same files, written in the worker's own thread as soon as a request ends."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero or self._kv_cache is None:
            return
        blocks = torch.tensor(pending.block_ids)
        offsets = torch.arange(self._block_size)
        slots = (blocks[:, None] * self._block_size + offsets[None]).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).clone()
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        half = pending.filename + ".half"
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids}, half)
        os.replace(half, pending.filename)
        self._req_copy_events[pending.req_id] = _Done()


class _Done:
    """An event that has happened."""

    def query(self) -> bool:
        return True
