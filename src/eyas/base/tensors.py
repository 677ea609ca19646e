"""Tensors on disk in the safetensors format, and their bytes.

`safetensors.torch.save_file` (0.8) is as quick, but its files may be read by one user alone whatever the umask says, and a killed run
leaves a hidden one behind whose name does not say whose it is.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eyas.base.files import fsync_directory, translate_disk_full

_NAMES = {
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes, its own memory where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], *, temporary: Path | None = None
) -> None:
    """Write CPU tensors straight from their memory, so that a reader sees the old file or all of the new one.

    Args:
        temporary: written, then renamed. Default: a hidden name with the process's id.

    Raises:
        DiskFullError, InputError: as `translate_disk_full`; nothing half-written is left.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    work = temporary or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with translate_disk_full(path.parent, partial=work), open(work, "wb", buffering=0) as file:
        _write_all(file, memoryview(struct.pack("<Q", len(text)) + text))
        for _, tensor in ordered:
            _write_all(file, bytes_of(tensor))
        os.fsync(file.fileno())
    os.replace(work, path)
    fsync_directory(path.parent)


def _write_all(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data[: 2**26]) :]
