"""Damage to a finished shard."""

import json
import struct
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eyas.store.checksums import checksum_metadata


def flip(path: Path, tensor: str, row: int) -> None:
    """Flip one bit in a tensor's row on the disk."""
    raw = bytearray(path.read_bytes())
    length = struct.unpack("<Q", raw[:8])[0]
    entry = json.loads(raw[8 : 8 + length])[tensor]
    begin, end = entry["data_offsets"]
    raw[8 + length + begin + row * (end - begin) // entry["shape"][0]] ^= 4
    path.write_bytes(raw)


def rewrite(store, change):
    """Change tensors of a finished store's shards as a wrong writer would have written them: with the checksums of what it wrote."""
    for path in store.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={**metadata, **checksum_metadata(tensors)})
