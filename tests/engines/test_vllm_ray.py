"""vLLM's own Ray executor over two Ray nodes, one rank on each: tensor and pipeline parallel capture without a GPU.

The nodes are real ones (two raylets of this machine), and so is the way between them: prompts, answers and collectives go by TCP, and
where root may mount, no rank sees the driver's temporary folder. What the nodes share is the output folder, as real hosts must.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from eyas_process import eyas_command, eyas_environment
from planting import wait_for_shards
from vllm_models import random_samples, reference_states, worst_error, write_dataset

from eyas.base.errors import PreflightError, StoreError
from eyas.engines.vllm.start import VllmSettings, ray_devices, refuse_impossible, thread_binding
from eyas.runs import run as runs
from eyas.runs.loglines import Wanted, read_lines
from eyas.runs.processes import Mark, is_alive, processes_of_run, recorded_processes
from eyas.store.format import distinct_samples, finished_shards
from eyas.store.reader import open_states
from eyas.target.model_files import describe_model

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'eyas[ray]')")
pytestmark = pytest.mark.vllm
TESTS = Path(__file__).parents[1]
LENGTHS = [5, 1, 200, 17, 64, 299, 33]
#: Runs a command with a temporary folder that no other process sees.
ALONE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$TMPDIR" && exec "$0" "$@"']


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Two Ray nodes with one device each; gives the environment of a run on them."""
    from ray.cluster_utils import Cluster

    site = tmp_path_factory.mktemp("site")
    plugin = site / "ray_platform-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-platform\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[vllm.platform_plugins]\ncpu_with_ray = ray_platform:register\n")
    path = [str(site), str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as here:
        here.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        here.setenv("RAY_USAGE_STATS_ENABLED", "0")
        two = Cluster()
        try:
            for host in range(2):
                # Each host's only rank is its first: without this both would take the first core.
                binding = {"VLLM_CPU_OMP_THREADS_BIND": thread_binding(2, cores[::-1] if host else cores)}
                two.add_node(
                    num_cpus=1, num_gpus=1, include_dashboard=False, object_store_memory=100 * 2**20, env_vars=binding
                )
            yield {"PYTHONPATH": os.environ["PYTHONPATH"], "RAY_ADDRESS": two.address}
        finally:
            two.shutdown()


@pytest.fixture
def start(
    cluster: dict[str, str], vllm_model: Callable[[str], Path], tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start(lengths, *flags)`: `eyas extract` on the cluster, samples of these lengths, into `tmp_path/store`."""
    own, started = tmp_path / "own", []
    own.mkdir()
    # vLLM's sockets lie in the temporary folder unless told otherwise: ranks on the driver's own host must find them.
    environment = {"EYAS_STATE_DIR": str(tmp_path / "state"), "TMPDIR": str(own), "VLLM_RPC_BASE_PATH": "/tmp"}
    mounts = subprocess.run([*ALONE, "true"], env={**os.environ, "TMPDIR": str(own)}, capture_output=True, check=False)

    def start(lengths: list[int], *flags: str) -> subprocess.Popen[str]:
        data = write_dataset(tmp_path / "samples.jsonl", random_samples(lengths, seed=12))
        command = eyas_command(
            "extract", "--engine", "vllm", "--distributed-executor-backend", "ray", "--model-path", vllm_model("llama"),
            "--prepared-data", data, "--output-dir", tmp_path / "store", "--dtype", "float32", "--max-seq-len", "300",
            "--parity-samples", "1", *flags,
        )  # fmt: skip
        run = subprocess.Popen(
            command if mounts.returncode else [*ALONE, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=eyas_environment(**cluster, **environment),
            start_new_session=True,
        )
        started.append(run)
        return run

    yield start
    for run in started:
        run.kill()  # one that hangs; the keeper ends the rest


def writers(store: Path) -> set[str]:
    return {header.path.name.split("-")[1] for header in finished_shards(store)}


def assert_free(cluster: dict[str, str]) -> None:
    """The cluster is as it was before the run: every device free, no actor left."""
    ray.init(address=cluster["RAY_ADDRESS"], logging_level="ERROR", log_to_driver=False)
    try:
        deadline = time.monotonic() + 30
        while ray.available_resources().get("GPU") != 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert ray.available_resources().get("GPU") == 2
        assert ray.util.list_named_actors(all_namespaces=True) == []  # vLLM names each of its actors
    finally:
        ray.shutdown()


def test_two_ray_nodes_write_one_store(
    cluster: dict[str, str],
    start: Callable[..., subprocess.Popen[str]],
    vllm_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = start(LENGTHS, "--tp-size", "2", "--layer-ids", "4", "2", "--batch-tokens", "128")
    _, errors = run.communicate(timeout=400)
    assert run.returncode == 0, errors[-3000:]
    states = open_states(tmp_path / "store")
    samples = random_samples(LENGTHS, seed=12)
    worst = worst_error(states, reference_states(vllm_model("llama"), samples, [4, 2, 6]))
    assert max(worst.values()) < 1e-5, worst
    assert (states.manifest["engine"]["executor"], states.manifest["engine"]["tp_size"]) == ("ray", 2)
    assert writers(tmp_path / "store") == {"r000", "r001"}  # both nodes wrote
    # What the ranks said is in the run's folder, as with any executor.
    monkeypatch.setenv("EYAS_STATE_DIR", str(tmp_path / "state"))
    (view,) = runs.list_runs()
    assert {line.rank for line in read_lines(view.folder, Wanted(ranks=(0, 1)))} == {0, 1}
    assert_free(cluster)


@pytest.mark.timeout(900)
def test_pipeline_stages_on_two_nodes_one_killed_then_resumed(
    cluster: dict[str, str],
    start: Callable[..., subprocess.Popen[str]],
    vllm_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers 0-2 on one node, 3-5 on the other, which writes. Its answers come by TCP: vLLM alone would wait for the dead."""
    monkeypatch.setenv("EYAS_STATE_DIR", str(tmp_path / "state"))
    store, lengths = tmp_path / "store", [*LENGTHS, *[250] * 300]
    flags = ["--pp-size", "2", "--layer-ids", "1", "2", "4", "--batch-tokens", "256", "--shard-size", "1"]
    run = start(lengths, *flags)
    wait_for_shards(store, 1, run)
    (view,) = runs.list_runs()
    marks = {record["rank"]: Mark.from_json(record) for record in recorded_processes(view.folder)}
    everyone = [*marks.values(), *processes_of_run(view.id, view.folder)]
    os.kill(marks[1].pid, signal.SIGKILL)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 10, errors[-3000:]
    assert f"error: rank 1: its process on {socket.gethostname()} is gone" in errors
    deadline = time.monotonic() + 30
    while any(is_alive(mark) for mark in everyone) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [mark for mark in everyone if is_alive(mark)] == []
    assert_free(cluster)
    before = distinct_samples(finished_shards(store))
    assert 0 < len(before) < len(lengths), "too quick: nothing was left to resume"
    with pytest.raises(StoreError):
        open_states(store)  # it does not pass for a finished one

    again = start(lengths, *flags)
    _, errors = again.communicate(timeout=400)
    assert again.returncode == 0, errors[-3000:]
    states, samples = open_states(store), random_samples(lengths, seed=12)
    assert set(states.ids) == {sample.id for sample in samples}
    assert sum(len(header.sample_ids) for header in finished_shards(store)) == len(samples)  # none twice
    worst = worst_error(states, reference_states(vllm_model("llama"), samples, [1, 2, 4, 6]))
    assert max(worst.values()) < 1e-5, worst
    assert (states.manifest["engine"]["executor"], states.manifest["engine"]["pp_size"]) == ("ray", 2)
    assert writers(store) == {"r001"}  # the last stage's node, and it alone
    others = {path.name for path in store.iterdir() if not path.match("shard-*.safetensors")}
    assert others == {"manifest.json", ".lock", ".lock-summary"}  # nothing half-written, nothing of parity
    assert_free(cluster)


def test_waiting_for_a_rank_on_another_host_ends_with_the_executor() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    from eyas.engines.vllm.ray import VERDICT, Answers, RayWorkerProc

    status = RayWorkerProc.ResponseStatus
    rank = MessageQueue(n_reader=1, n_local_reader=0, connect_ip="127.0.0.1")
    asked: list[float] = []
    answers = Answers(MessageQueue.create_from_handle(rank.export_handle(), 0), asked.append)
    ready = threading.Thread(target=rank.wait_until_ready)
    ready.start()
    answers._queue.wait_until_ready()
    ready.join()
    rank.enqueue((status.SUCCESS, "one"))
    assert answers.dequeue() == (status.SUCCESS, "one")
    assert asked == []
    rank.enqueue((status.FAILURE, "two"))
    assert answers.dequeue(timeout=10) == (status.FAILURE, "two")
    assert asked == [VERDICT]
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        answers.dequeue(timeout=1.3)  # longer than one look at the socket
    assert 1.2 < time.monotonic() - begun < 5
    threading.Timer(0.2, answers.shutdown).start()
    with pytest.raises(RuntimeError, match="shut down"):
        answers.dequeue()
    assert time.monotonic() - begun < 10


def test_more_ranks_than_the_cluster_has_devices_are_refused_at_once(
    cluster: dict[str, str], vllm_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself would wait for half an hour."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "ray_device_key", "GPU", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", cluster["RAY_ADDRESS"])
    four = VllmSettings(describe_model(vllm_model("llama")), max_seq_len=300, tp_size=4, executor="ray")
    with pytest.raises(PreflightError, match="needs 4 GPUs, the Ray cluster has 2"):
        refuse_impossible(four, gpu=False)
    refuse_impossible(replace(four, tp_size=2), gpu=False)


def test_an_address_where_no_cluster_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(PreflightError, match="no Ray cluster answers"):
            ray_devices("GPU")
