"""Files are written whole or not at all, and a disk that cannot be written is said as such."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eyas.base.errors import DiskFullError, InputError
from eyas.base.files import translate_disk_full, write_text
from eyas.base.tensors import write_tensors
from eyas.store.ledger import read_ledger, write_ledger


def test_a_ledger_on_a_full_disk_keeps_the_old_one(small_disk: Path) -> None:
    write_ledger(small_disk, {"a" * 32: "too long"})
    (small_disk / "filler").write_bytes(bytes(4_100_000))
    with pytest.raises(DiskFullError, match=f"no space left in {small_disk}"):
        write_ledger(small_disk, {f"{i:032x}": "x" * 200 for i in range(5000)})
    assert read_ledger(small_disk) == {"a" * 32: "too long"}
    assert not list(small_disk.glob(".*tmp"))


def test_tensors_on_a_full_disk_leave_nothing_half_written(small_disk: Path) -> None:
    with pytest.raises(DiskFullError):
        write_tensors(small_disk / "a.safetensors", {"a": torch.ones(2_000_000)}, {})
    assert not list(small_disk.iterdir())


def test_tensors_are_written_as_safetensors_reads_them_and_as_the_umask_says(tmp_path: Path) -> None:
    """safetensors' own files are for one user alone."""
    path = tmp_path / "a.safetensors"
    tensors = {
        "wide": torch.arange(12.0, dtype=torch.float64).view(3, 4).t(),  # not contiguous
        "one": torch.tensor(3.0),
        "none": torch.zeros(0, 5, dtype=torch.bfloat16),
        "marks": torch.tensor([True, False, True]),
        "coded": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    }
    before = os.umask(0o027)
    try:
        write_tensors(path, tensors, {"format": "pt", "made": "here"})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].float(), tensor.float())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "made": "here"}


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
