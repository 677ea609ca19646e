"""vLLM's own Ray executor over two Ray nodes, one rank on each: tensor parallel capture without a GPU.

The nodes are real ones (two raylets of this machine), and so is the way between them: prompts and answers go by TCP, the states never do.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_models import eyas_process, random_samples, reference_states, worst_error, write_dataset

from eyas import runs
from eyas.engines.vllm_start import VllmSettings, ray_devices, refuse_impossible, thread_binding
from eyas.errors import PreflightError
from eyas.loglines import Wanted, read_lines
from eyas.model_files import describe_model
from eyas.store import open_states

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'eyas[ray]')")
pytestmark = pytest.mark.vllm
TESTS = Path(__file__).parents[1]


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


def extract(model: Path, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    samples = random_samples([5, 1, 200, 17, 64, 299, 33], seed=12)
    data = write_dataset(folder / "samples.jsonl", samples)
    run = eyas_process(
        "extract", "--engine", "vllm", "--distributed-executor-backend", "ray", "--tp-size", "2", "--model-path", model,
        "--prepared-data", data, "--output-dir", folder / "store", "--layer-ids", "4", "2", "--dtype", "float32",
        "--batch-tokens", "128", "--max-seq-len", "300", "--parity-samples", "1", EYAS_STATE_DIR=str(folder / "state"), **environment,
    )  # fmt: skip
    _, errors = run.communicate(timeout=400)
    return run.returncode, errors


def test_two_ray_nodes_write_one_store(
    cluster: dict[str, str], vllm_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, errors = extract(vllm_model("llama"), tmp_path, cluster)
    assert code == 0, errors[-3000:]
    states = open_states(tmp_path / "store")
    samples = random_samples([5, 1, 200, 17, 64, 299, 33], seed=12)
    worst = worst_error(states, reference_states(vllm_model("llama"), samples, [4, 2, 6]))
    assert max(worst.values()) < 1e-5, worst
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert (manifest["engine"]["executor"], manifest["engine"]["tp_size"]) == ("ray", 2)
    assert {entry["name"].split("-")[1] for entry in manifest["shards"]} == {"r000", "r001"}  # both nodes wrote
    # What the ranks said is in the run's folder, as with any executor.
    monkeypatch.setenv("EYAS_STATE_DIR", str(tmp_path / "state"))
    (view,) = runs.list_runs()
    assert {line.rank for line in read_lines(view.folder, Wanted(ranks=(0, 1)))} == {0, 1}
    # And the cluster is as free as it was.
    ray.init(address=cluster["RAY_ADDRESS"], logging_level="ERROR", log_to_driver=False)
    try:
        deadline = time.monotonic() + 30
        while ray.available_resources().get("GPU") != 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert ray.available_resources().get("GPU") == 2
    finally:
        ray.shutdown()


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
