"""vLLM's own way of extracting hidden states (`--capture native`): a cross-check of ours, and a fallback.

The states go through a layer of the KV cache and come out of a connector as one file per request, layers in *ascending* order
whatever was asked. Here: the arguments that switch it on, the reading of its files, and a connector for machines without CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.base.errors import ContractError, EngineError
from eyas.data.dataset import Sample
from eyas.store.format import StoreSpec
from eyas.store.writer import ShardWriter

CPU_CONNECTOR = "eyas.engines.vllm.native_cpu"


def native_arguments(ascending_ids: Sequence[int], folder: Path, *, gpu: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for the `extract_hidden_states` method writing to `folder`."""
    transfer: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder), "use_synchronization_lock": False},
    }
    if not gpu:
        transfer |= {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": CPU_CONNECTOR}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(ascending_ids)}},
        },
        "kv_transfer_config": transfer,
    }


class NativeCapture:
    """Takes each request's states from the connector's file and writes them here, in the driver's process."""

    def __init__(self, folder: Path, directory: Path, name: str):
        """`folder`: where the connector puts its files. `directory`, `name`: of the shards."""
        self.folder, self.directory, self.name = folder, directory, name

    def open(self, spec: StoreSpec, shard_bytes: int) -> None:
        self.writer = ShardWriter(self.directory, spec, self.name, shard_bytes=shard_bytes)

    def take(self, sample: Sample, output: Any) -> None:
        """Store one sample and remove its file. Raises as `read_native`."""
        path = Path((output.kv_transfer_params or {}).get("hidden_states_path", self.folder / "nowhere"))
        spec = self.writer.spec
        states = read_native(path, sample, sorted(spec.layer_ids), spec.hidden_size)
        slot = self.writer.reserve(sample)
        for layer, rows in slot.rows.items():
            rows.copy_(states[layer])
        self.writer.complete(slot)
        path.unlink()

    def close(self) -> list[dict[str, Any]]:
        """Totals of the one writer. Raises as `ShardWriter.close`."""
        return [{**self.writer.close(), "entries": self.writer.shards, "rejected": self.writer.rejected}]

    def give_up(self) -> None:
        """After an error: finished shards stay."""
        self.writer.give_up(EngineError("the capture failed"))


def read_native(
    path: Path, sample: Sample, ascending_ids: Sequence[int], hidden_size: int, *, timeout: float = 60
) -> dict[int, torch.Tensor]:
    """One request's file -> layer id -> [T, H]. Waits for the writing thread of the worker.

    Raises:
        EngineError: the file did not come.
        ContractError: its tokens are not the sample's, or its shape is not [T, L, H].
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    deadline = time.monotonic() + timeout
    while True:
        try:
            tensors = load_file(path)
            break
        except (FileNotFoundError, SafetensorError):  # not there yet, or half written
            if time.monotonic() > deadline:
                raise EngineError(
                    f"vLLM's connector did not write {path} within {timeout:.0f} s", "see the engine's log"
                ) from None
            time.sleep(0.005)
    states, tokens = tensors["hidden_states"], tensors["token_ids"]
    wanted = (len(sample), len(ascending_ids), hidden_size)
    if tuple(states.shape) != wanted:
        raise ContractError(
            f"vLLM's connector gave states of shape {list(states.shape)} for sample {sample.id}, expected [T, L, H] = {list(wanted)}",
            "use --capture aux",
        )
    if not torch.equal(tokens.int(), torch.from_numpy(sample.token_ids)):
        raise ContractError(f"{path} holds states of another request than sample {sample.id}", "use --capture aux")
    return {layer: states[:, position] for position, layer in enumerate(ascending_ids)}
