"""What `eyas doctor` and preflight find out about a machine: each row shown to change when the machine does."""

import os
import struct
import subprocess
from pathlib import Path

import pytest
from eyas_process import eyas_command, eyas_environment

from eyas.base.check import Check
from eyas.cli.doctor import check_target
from eyas.gates import machine


def tool(folder: Path, name: str, script: str) -> Path:
    """An executable that stands on PATH for one that this machine lacks."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return path


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """A stand-in for nvidia-smi that says what it says on a machine with two GPUs, the second nearly full."""
    tool(
        tmp_path / "bin",
        "nvidia-smi",
        'case "$1" in\n'
        "--query-gpu=memory.free*) echo 80000; echo 1000;;\n"
        '--query-gpu*) echo "0, GPU-a, NVIDIA H200, 580.10, 81000, 80000"; echo "1, GPU-b, NVIDIA H200, 580.10, 81000, 1000";;\n'
        f'--query-compute-apps*) echo "GPU-b, {os.getpid()}, 79000";;\n'
        'esac\n',
    )  # fmt: skip
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def by_name(rows: list[Check]) -> dict[str, Check]:
    return {row.name: row for row in rows}


def test_a_gpu_that_somebody_holds_is_shown_with_who(two_gpus):
    rows = by_name(machine.check_gpus())
    assert rows["GPU 0"].status == "OK"
    assert rows["GPU 1"].status == "WARN"
    assert f"pid {os.getpid()}" in rows["GPU 1"].finding
    assert "79000 MiB" in rows["GPU 1"].finding


def test_without_a_driver_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (row,) = machine.check_gpus()
    assert "no NVIDIA driver" in row.finding


def test_weights_that_do_not_fit_the_gpus_that_are_free(two_gpus):
    from eyas.cli.doctor import check_gpu_memory

    assert check_gpu_memory(60 * 2**30, ranks=1).status == "OK"
    assert check_gpu_memory(60 * 2**30, ranks=2).status == "FAIL"
    assert "--tp-size 2" in check_gpu_memory(2**20, ranks=4).remedy


def test_a_toolkit_that_does_not_fit_torch(monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    tool(tmp_path / "bin", "nvcc", 'echo "Cuda compilation tools, release 12.4, V12.4.131"\n')
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    rows = by_name(machine.check_cuda_toolkit())
    assert rows["nvcc"].status == "WARN"
    assert "12.4" in rows["nvcc"].finding
    assert "13.0" in rows["nvcc"].remedy
    tool(tmp_path / "bin", "nvcc", 'echo "Cuda compilation tools, release 13.1, V13.1.1"\n')
    assert by_name(machine.check_cuda_toolkit())["nvcc"].status == "OK"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    assert by_name(machine.check_cuda_toolkit())["CUDA_HOME"].status == "WARN"


def test_versions_outside_the_supported_range(monkeypatch):
    monkeypatch.setitem(machine.SUPPORTED, "transformers", ("99", "100", False))
    monkeypatch.setitem(machine.SUPPORTED, "no-such-package", ("1", "2", False))
    rows = by_name(machine.check_packages())
    assert rows["transformers"].status == "WARN"
    assert rows["no-such-package"].status == "FAIL"
    assert rows["torch"].status == "OK"


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("0.33.0rc1", (0, 33, 0)), ("12.4", (12, 4))]
)
def test_versions_are_compared_by_their_numbers(text, numbers):
    assert machine.version_tuple(text) == numbers


def test_the_open_file_limit(monkeypatch):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert machine.check_open_files().status == "WARN"
        assert "1024" in machine.check_open_files().finding
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_shared_memory_wanted_by_ranks():
    assert machine.check_shared_memory(1).status == "OK"
    assert machine.check_shared_memory(10**6).status == "FAIL"


def test_the_write_rate_is_measured_and_nothing_stays(tmp_path):
    row = machine.check_disk_rate(tmp_path, size=2**24)
    assert row.status == "OK"
    assert "/s" in row.finding
    assert list(tmp_path.iterdir()) == []


def test_weights_are_checked_by_header_against_file_length_without_reading_bodies(tmp_path, tiny_model):
    import shutil

    whole = tiny_model("llama")
    assert by_name(check_target(str(whole), None, None, 1))["model"].status == "OK"
    folder = tmp_path / "cut"
    shutil.copytree(whole, folder)
    weights = next(folder.glob("*.safetensors"))
    with open(weights, "r+b") as file:
        file.truncate(weights.stat().st_size - 1000)
    row = by_name(check_target(str(folder), None, None, 1))["model"]
    assert row.status == "FAIL"
    assert weights.name in row.finding
    assert "again" in row.remedy
    # A sparse file of 600 GB with a true header: only a check that does not read bodies ends in the test's time.
    header = f'{{"w":{{"dtype":"BF16","shape":[300000000000],"data_offsets":[0,{600 * 10**9}]}}}}'.encode()
    with open(weights, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 600 * 10**9)
    assert by_name(check_target(str(folder), None, None, 1))["model"].status == "OK"


def test_a_dataset_is_looked_at_without_a_model_too(tmp_path, token_rows):
    from eyas.cli.doctor import diagnose

    missing = str(tmp_path / "none")
    assert by_name(diagnose(prepared_data=missing, quick=True))["dataset"].status == "FAIL"
    both = by_name(diagnose(model_path=missing, prepared_data=missing, quick=True))
    assert (both["model"].status, both["dataset"].status) == ("FAIL", "FAIL")
    row = by_name(diagnose(prepared_data=str(token_rows([9, 30])), quick=True))["dataset"]
    assert (row.status, row.finding) == ("OK", "2 samples, 39 tokens, longest 30")


def test_the_command_shows_all_rows_and_fails_when_a_row_does(tmp_path, token_rows):
    done = subprocess.run(
        eyas_command("doctor", "--quick", "--model-path", str(tmp_path / "none"), "--output-dir", str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=200,
        env=eyas_environment(),
        check=False,
    )
    assert done.returncode == 4
    for name in ("system", "CPU", "GPUs", "torch", "transformers", "/dev/shm", "open files", "leftovers", "model"):
        assert name in done.stdout
    assert "not fit for a run: model" in done.stderr
