"""Who writes into a directory, and what nobody writes any more."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from eyas.base.errors import FolderConflictError, InputError
from eyas.base.locks import abandoned, lock_directory
from eyas.base.part import WHOLE, Part


def begun(folder: Path) -> list[str]:
    """Half-written shards of a whole run and of three parts."""
    names = [f"shard-{part}r000-00000.safetensors.tmp" for part in ("", "s000", "s001", "s002")]
    for name in names:
        (folder / name).touch()
    return names


def test_only_what_no_live_part_writes_is_abandoned(tmp_path: Path) -> None:
    whole, first, second, third = begun(tmp_path)
    assert [path.name for path in abandoned(tmp_path, "shard-*.tmp")] == [whole, first, second, third]
    with lock_directory(tmp_path, Part(1, 3)), lock_directory(tmp_path, Part(2, 3)):
        assert [path.name for path in abandoned(tmp_path, "shard-*.tmp")] == [whole, first]
    with lock_directory(tmp_path, WHOLE):
        assert abandoned(tmp_path, "shard-*.tmp") == []
    assert len(abandoned(tmp_path, "shard-*.tmp")) == 4  # a lock that nobody holds any more says nothing


def test_the_holder_of_a_lock_is_named(tmp_path: Path) -> None:
    with lock_directory(tmp_path):
        with pytest.raises(FolderConflictError, match=f'"pid": {os.getpid()}'), lock_directory(tmp_path):
            pass
        assert json.loads((tmp_path / ".lock").read_text())["parts"] == 1  # asking took nothing away


def test_parts_of_a_dataset_divide_it() -> None:
    ids = [f"{i * 7919:032x}" for i in range(300)]
    held = [[one for one in ids if Part(i, 3).holds(one)] for i in range(3)]
    assert sorted(one for part in held for one in part) == ids
    assert all(WHOLE.holds(one) for one in ids)
    assert (Part.parse("2/8"), Part.parse(None)) == (Part(2, 8), WHOLE)
    for wrong in ("2/2", "-1/2", "a/b", "1", "1/", "/2", ""):
        with pytest.raises(InputError, match="i/n"):
            Part.parse(wrong)
