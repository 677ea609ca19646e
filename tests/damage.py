"""Damage to a finished shard."""

import json
import struct
from pathlib import Path


def flip(path: Path, tensor: str, row: int) -> None:
    """Flip one bit in a tensor's row on the disk."""
    raw = bytearray(path.read_bytes())
    length = struct.unpack("<Q", raw[:8])[0]
    entry = json.loads(raw[8 : 8 + length])[tensor]
    begin, end = entry["data_offsets"]
    raw[8 + length + begin + row * (end - begin) // entry["shape"][0]] ^= 4
    path.write_bytes(raw)
