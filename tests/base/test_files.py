"""Files are written whole or not at all, and a disk that cannot be written is said as such."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import ones

from eyas.base.errors import DiskFullError, InputError
from eyas.base.files import translate_disk_full, write_text
from eyas.store.ledger import read_ledger, write_ledger


def test_a_ledger_on_a_full_disk_keeps_the_old_one(small_disk: Path) -> None:
    write_ledger(small_disk, {"a" * 32: "too long"})
    (small_disk / "filler").write_bytes(bytes(4_100_000))
    with pytest.raises(DiskFullError, match=f"no space left in {small_disk}"):
        write_ledger(small_disk, {f"{i:032x}": "x" * 200 for i in range(5000)})
    assert read_ledger(small_disk) == {"a" * 32: "too long"}
    assert not list(small_disk.glob(".*tmp"))


def test_a_full_disk_is_recognised_in_what_safetensors_says(small_disk: Path) -> None:
    with pytest.raises(DiskFullError), translate_disk_full(small_disk):
        save_file({"a": ones(2_000_000)}, small_disk / "a.safetensors")


def test_errors_about_another_place_are_not_blamed_on_the_directory(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=rf"{tmp_path / 'out'} cannot be written"),
        translate_disk_full(tmp_path / "out"),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "out" / "a.json"))
    with pytest.raises(PermissionError), translate_disk_full(tmp_path / "out"):
        raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere/model.safetensors")


def test_a_block_that_fails_takes_its_half_file_with_it(tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.write_text("begun")
    with pytest.raises(ValueError, match="x"), translate_disk_full(tmp_path, partial=half):
        raise ValueError("x")
    assert not half.exists()
    write_text(half, ["a", "b"])
    assert half.read_text() == "ab"
