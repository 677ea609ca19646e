"""One rank's capture, fed by hand with engine steps: splitting, chunks, preemption, ownership, what is refused. No engine needed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from eyas.base.errors import ContractError, InputError
from eyas.base.part import Part
from eyas.data.dataset import Sample
from eyas.engines.contract import HOPS, first_bad, hop_table, read_hops
from eyas.engines.vllm.capture import Capture, Step, owner_of, pack_mask, unpack_mask
from eyas.engines.vllm.start import (
    VllmSettings,
    engine_arguments,
    engine_environment,
    thread_binding,
    writer_settings,
)
from eyas.extraction.rehearse import shallow_config, shallow_ids
from eyas.extraction.settings import ExtractSettings
from eyas.store.format import StoreSpec, write_store_manifest
from eyas.store.reader import open_states
from eyas.store.writer import ShardWriter

H = 8
LAYERS = (3, 1)
SPEC = StoreSpec({"hidden_size": H, "num_layers": 4}, LAYERS, "float32", "float32", {"hash": "x"})


def sample(length: int, seed: int) -> Sample:
    random = np.random.default_rng(seed)
    return Sample.of(random.integers(1, 1000, length), (random.random(length) > 0.5).astype(int))


def states_of(token_ids: np.ndarray, layer: int) -> torch.Tensor:
    """A state that tells its token, position and layer: what is written can be compared with what it must be."""
    rows = torch.from_numpy(token_ids.astype(np.float32))[:, None] * torch.arange(1, H + 1) + layer * 0.5
    return rows + torch.arange(len(token_ids))[:, None] * 1e-3


class Engine:
    """Schedules by hand: `run([(sample, from, to), ...])` is one engine step with these rows in this order."""

    def __init__(self, folder: Path, owner: int = 0, owners: int = 1, trace: Path | None = None):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        writer = ShardWriter(folder, SPEC, f"r{owner:03d}", shard_bytes=2**14)
        self.capture = Capture(
            writer,
            rank=owner,
            owner=owner,
            owners=owners,
            device=torch.device("cpu"),
            where="model",
            trace=trace,
            trace_steps=2,
        )
        writer._on_shard = self.capture.record_shard
        self.begun: set[str] = set()

    def run(self, parts: list[tuple[Sample, int, int]], padding: int = 3, ids_of: list[Sample] | None = None) -> None:
        for one, _, _ in parts:
            if one.id not in self.begun:
                extra = {"id": one.id, "mask": pack_mask(one.loss_mask)}
                self.capture.begin(one.id, one.token_ids.tolist(), extra)
                self.begun.add(one.id)
        aux = [torch.cat([states_of(one.token_ids, k)[a:b] for one, a, b in parts]) for k in sorted(LAYERS)]
        aux = [torch.cat([rows, torch.full((padding, H), float("nan"))]) for rows in aux]
        shown = [(ids_of[i] if ids_of else one, a, b) for i, (one, a, b) in enumerate(parts)]
        ids = torch.cat([torch.from_numpy(one.token_ids[a:b]) for one, a, b in shown])
        self.capture.step(
            Step([p[0].id for p in parts], [b - a for _, a, b in parts], {p[0].id: p[1] for p in parts}, aux, ids)
        )

    def finish(self) -> dict[str, int]:
        totals = self.capture.close()
        write_store_manifest(self.folder, SPEC, "complete", shards=self.capture.writer.shards)
        return totals


def assert_right(folder: Path, samples: list[Sample]) -> None:
    states = open_states(folder)
    assert sorted(states.ids) == sorted(s.id for s in samples)
    for one in samples:
        read = states[states.index_of(one.id)]
        assert read.loss_mask.tolist() == one.loss_mask.tolist()
        for layer in LAYERS:
            assert torch.equal(read.hidden[layer], states_of(one.token_ids, layer))


def test_chunks_batches_and_padding(tmp_path: Path) -> None:
    a, b, c = sample(10, 1), sample(7, 2), sample(1, 3)
    engine = Engine(tmp_path / "s")
    engine.run([(a, 0, 4)])
    engine.run([(b, 0, 2), (c, 0, 1), (a, 4, 9)])
    engine.run([(a, 9, 10), (b, 2, 7)])
    assert engine.finish()["samples"] == 3
    assert_right(tmp_path / "s", [a, b, c])


def test_a_preempted_request_begins_anew(tmp_path: Path) -> None:
    a, b = sample(10, 1), sample(6, 2)
    engine = Engine(tmp_path / "s")
    engine.run([(a, 0, 6)])
    engine.run([(b, 0, 6), (a, 0, 3)])  # a lost what it had
    engine.run([(a, 3, 10)])
    engine.finish()
    assert_right(tmp_path / "s", [a, b])


def test_an_aborted_request_leaves_no_trace(tmp_path: Path) -> None:
    a, b = sample(10, 1), sample(6, 2)
    engine = Engine(tmp_path / "s")
    engine.run([(a, 0, 6), (b, 0, 6)])
    engine.capture.finish([a.id])
    engine.finish()
    assert_right(tmp_path / "s", [b])


def test_every_sample_has_one_owner(tmp_path: Path) -> None:
    samples = [sample(5, seed) for seed in range(40)]
    for rank in range(3):
        engine = Engine(tmp_path / f"r{rank}", rank, 3)
        for one in samples:
            engine.run([(one, 0, 5)])
        engine.finish()
        assert_right(tmp_path / f"r{rank}", [s for s in samples if owner_of(s.id, 3) == rank])
    assert {owner_of(s.id, 3) for s in samples} == {0, 1, 2}


def test_skipped_tokens_are_refused(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "s")
    with pytest.raises(ContractError, match=r"skipped 4 tokens"):
        engine.run([(sample(10, 1), 4, 10)])


def test_rows_of_another_request_are_refused(tmp_path: Path) -> None:
    a, b = sample(6, 1), sample(6, 2)
    engine = Engine(tmp_path / "s")
    with pytest.raises(ContractError, match="states of another request"):
        engine.run([(a, 0, 6), (b, 0, 6)], ids_of=[b, a])


def test_a_prompt_that_changed_on_the_way_is_refused(tmp_path: Path) -> None:
    one = sample(6, 1)
    engine = Engine(tmp_path / "s")
    with pytest.raises(ContractError, match="hash to"):
        engine.capture.begin("r", one.token_ids[::-1].tolist(), {"id": one.id, "mask": pack_mask(one.loss_mask)})


def test_trace_has_every_hop_of_every_layer_and_names_no_fault(tmp_path: Path) -> None:
    one = sample(6, 1)
    engine = Engine(tmp_path / "s", trace=tmp_path / "s" / "trace-r000.jsonl")
    engine.run([(one, 0, 6)])
    engine.finish()
    hops = read_hops(tmp_path / "s")
    assert {(h.hop, h.layer) for h in hops} == {(hop, layer) for hop in HOPS for layer in LAYERS}
    assert first_bad(hops) is None
    norms = {h.norm for h in hops if h.layer == 3}
    assert max(norms) == pytest.approx(min(norms))
    assert ">>" not in hop_table(hops)


def test_read_hops_names_the_bad_line(tmp_path: Path) -> None:
    (tmp_path / "trace-r000.jsonl").write_text(json.dumps({"hop": "shard"}) + "\n")
    with pytest.raises(InputError, match=r"trace-r000.jsonl:1"):
        read_hops(tmp_path)


def test_masks_travel_as_bits() -> None:
    random = np.random.default_rng(0)
    for length in (1, 2, 17, 300):
        mask = (random.random(length) > 0.5).astype(np.uint8)
        assert unpack_mask(pack_mask(mask), length).tolist() == mask.tolist()


def test_thread_binding_gives_every_rank_a_core() -> None:
    assert thread_binding(1, [0, 1]) == "0,1"
    assert thread_binding(2, [0, 1]) == "0|1"
    assert thread_binding(3, [0, 1]) == "0|1|0"
    assert thread_binding(2, [4, 5, 6]) == "4,6|5"


def test_shares_divide_a_dataset_and_ranks_divide_each_share() -> None:
    ids = [sample(4, seed).id for seed in range(200)]
    assert sum(Part(part, 2).holds(one) for one in ids for part in range(2)) == len(ids)
    mine = [one for one in ids if Part(0, 2).holds(one)]
    assert min(sum(owner_of(one, 2) == rank for one in mine) for rank in range(2)) > len(mine) // 4
    with pytest.raises(InputError, match="i/n"):
        _ = ExtractSettings(model_path="m", prepared_data="d", output_dir="o", part="2/2").parts


def test_the_engine_is_told_the_layers_in_its_hashed_configuration(tiny_model, tmp_path: Path) -> None:
    from eyas.target.model_files import describe_model

    settings = VllmSettings(describe_model(tiny_model("llama")))
    one, other = (engine_arguments(settings, ids, tmp_path, gpu=True) for ids in ([2, 4], [1, 4]))
    assert one["additional_config"] != other["additional_config"]
    assert one["enable_prefix_caching"] is False
    assert one["enforce_eager"] is False  # compile and CUDA graphs stay on
    assert one["compilation_config"]["cudagraph_capture_sizes"][-1] == 512
    short = engine_arguments(replace(settings, step_tokens=100), [2], tmp_path, gpu=True)
    assert short["compilation_config"]["cudagraph_capture_sizes"][-1] == 64
    assert "compilation_config" not in engine_arguments(replace(settings, eager=True), [2], tmp_path, gpu=True)


def test_a_rehearsal_on_gpus_starts_quickly_and_a_run_safely(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.target.model_files import describe_model

    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    run = VllmSettings(describe_model(tiny_model("llama")))
    rehearsal = replace(run, quick_start=True)

    def method(settings: VllmSettings, *, gpu: bool = True, first: bool = True) -> str:
        return engine_environment(settings, tmp_path, gpu=gpu, first=first)["VLLM_WORKER_MULTIPROC_METHOD"]

    assert method(rehearsal) == "fork"
    # Torch has threads after a first engine; CPU builds and runs for good always spawn.
    assert {method(rehearsal, first=False), method(rehearsal, gpu=False), method(run)} == {"spawn"}
    quick, usual = (engine_arguments(one, [2], tmp_path, gpu=True)["compilation_config"] for one in (rehearsal, run))
    assert quick == {**usual, "backend": "eager"}  # the same graphs
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    assert method(rehearsal) == "spawn"  # what the user set stays


def test_an_engine_that_generates_counts_as_a_first_engine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.data.settings import Sampling
    from eyas.engines.generation import VllmGenerator
    from eyas.engines.vllm import start as vllm_start

    monkeypatch.setattr(vllm_start, "_starts", count())
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match="needs vLLM"):
        VllmGenerator("smollm2", Sampling(max_new_tokens=1), [0], max_seq_len=8)
    assert not vllm_start.first_engine_here()


def test_a_core_is_not_waited_for_once_its_ranks_have_left(tmp_path: Path) -> None:
    """A core that lingers after its ranks, as vLLM's does while Python collects its garbage."""
    from eyas.engines.vllm.stop import end_engine

    lingers = "import subprocess, sys, time, signal, pathlib\n"
    lingers += "rank = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    lingers += (
        "def stop(*_):\n    rank.terminate(); rank.wait()\n    pathlib.Path(sys.argv[1]).touch(); time.sleep(600)\n"
    )
    lingers += "signal.signal(signal.SIGTERM, stop)\nprint('up', flush=True)\ntime.sleep(600)\n"
    process = subprocess.Popen([sys.executable, "-c", lingers, str(tmp_path / "left")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    (rank,) = psutil.Process(process.pid).children()

    class Client:
        resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[process]))

        def shutdown(self) -> None:
            process.terminate()
            process.wait(60)  # raises where the core was left to linger

    end_engine(Client())
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "left").exists()  # not before the rank was gone
    assert not rank.is_running()


def test_a_shallow_copy_tells_the_ids_apart() -> None:
    assert shallow_ids([2, 30, 58, 60, 61], 61) == ({2: 1, 30: 2, 58: 3, 60: 4, 61: 5}, 5)
    assert shallow_ids([0, 4], 4) == ({0: 0, 4: 2}, 2)
    deep = {
        "num_hidden_layers": 6,
        "layer_types": ["a", "a", "a", "a", "a", "b"],
        "first_k_dense_replace": 3,
        "hidden_size": 8,
    }
    shallow = shallow_config({"text_config": deep, "vision_config": {"num_hidden_layers": 9}}, 3)
    assert shallow["text_config"] == {
        "num_hidden_layers": 3,
        "layer_types": ["a", "a", "b"],
        "first_k_dense_replace": 1,
        "hidden_size": 8,
    }
    assert shallow["vision_config"] == {"num_hidden_layers": 9}


def test_host_memory_holds_three_steps_whatever_the_shard_size(tiny_model) -> None:
    from eyas.target.model_files import describe_model

    settings = VllmSettings(describe_model(tiny_model("llama")), step_tokens=1000)
    assert writer_settings(settings, 32_000, 8_000_000, gpu=True)["buffers"] * 8_000_000 >= 3 * 1000 * 32_000
    assert writer_settings(settings, 32_000, 10**9, gpu=True)["buffers"] == 4
    shared = writer_settings(replace(settings, tp_size=4), 32_000, 8_000_000, gpu=True)
    assert 3 * 1000 * 32_000 // 4 < shared["buffers"] * 8_000_000 < 3 * 1000 * 32_000
    assert writer_settings(replace(settings, buffers=7, writer_threads=3), 1, 1, gpu=True) == {
        "buffers": 7,
        "threads": 3,
    }
