"""Faults planted into the real path of the vLLM engine, one by one; each must stop the run, or be in the ledger, and be named.

One engine serves all of them: a broken contract ends the capture and leaves the engine running. It is started with prefix caching on,
against eyas's own setting, so that fault F3 is a real cache hit; the other tests use prompts that share nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_models import capture, random_samples, reference_states, worst_error

from eyas.engines.vllm import VllmEngine, VllmSettings
from eyas.errors import ContractError, ParityError
from eyas.model_files import describe_model
from eyas.store import done_samples, open_states

pytestmark = pytest.mark.vllm

LAYERS = [4, 2, 6]  # in an order that is not ascending, 6 is the target state


@pytest.fixture(scope="module")
def engine(vllm_model: Callable[[str], Path]) -> Iterator[VllmEngine]:
    settings = VllmSettings(
        describe_model(vllm_model("llama")),
        dtype="float32",
        max_seq_len=300,
        batch_size=4,
        step_tokens=128,
        worker_cls="faulty_worker.FaultyWorker",
        trace_steps=2,
        extra={"enable_prefix_caching": True, "block_size": 32},
    )
    started = VllmEngine(settings)
    started.load(LAYERS)
    yield started
    started.close()


@pytest.fixture
def plant(engine: VllmEngine) -> Iterator[Callable[[str], None]]:
    yield lambda fault: engine._rpc("plant", fault)
    engine._rpc("plant", "")


def test_without_a_fault_states_are_right_and_in_the_order_asked(
    engine: VllmEngine, vllm_model: Callable[[str], Path], tmp_path: Path
) -> None:
    samples = random_samples([5, 1, 200, 17, 64, 299, 33, 40, 40], seed=1)  # chunks, mixed lengths, longer than a step
    result = capture(engine, samples, tmp_path / "store")
    states = open_states(tmp_path / "store")
    assert states.layer_ids == (4, 2, 6)
    assert set(states.ids) == {s.id for s in samples}
    assert not result.rejected
    for sample in samples:
        read = states[states.index_of(sample.id)]
        assert read.token_ids.tolist() == sample.token_ids.tolist()
        assert read.loss_mask.tolist() == sample.loss_mask.tolist()
        assert list(read.hidden) == [4, 2, 6]
    worst = worst_error(states, reference_states(vllm_model("llama"), samples, LAYERS))
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("indexed once too often", "F1"),
        ("another request's rows", "F2"),
        ("rows missing", "F3"),
        ("zeros", "F4"),
        ("a layer dropped", "F8"),
        ("no auxiliary states", "F20"),
    ],
)
def test_a_broken_contract_stops_the_capture(
    engine: VllmEngine, plant: Callable[[str], None], tmp_path: Path, fault: str, named: str
) -> None:
    plant(fault)
    with pytest.raises(ContractError, match=named):
        capture(engine, random_samples([60, 30, 50], seed=100 + int(named[1:])), tmp_path / "store")
    assert done_samples(tmp_path / "store") == set()
    assert not list((tmp_path / "store").glob("fault-*"))


def test_the_hop_table_marks_the_first_bad_hop(
    engine: VllmEngine, plant: Callable[[str], None], tmp_path: Path
) -> None:
    plant("rows missing")
    with pytest.raises(ContractError) as caught:
        capture(engine, random_samples([60, 30], seed=7), tmp_path / "store")
    lines = [line for line in str(caught.value).splitlines() if ">>" in line]
    assert len(lines) == 1
    assert "model output" in lines[0]
    assert re.search(r"(\d+) rows for (\d+) tokens", lines[0])


def test_a_prefix_cache_hit_is_found(engine: VllmEngine, tmp_path: Path) -> None:
    first, second = random_samples([100, 100], seed=3)
    tokens = second.token_ids.copy()
    tokens[:64] = first.token_ids[:64]
    sharing = type(first).of(tokens, second.loss_mask)
    capture(engine, [first], tmp_path / "first")
    with pytest.raises(ContractError, match=r"skipped 64 tokens .*F3"):
        capture(engine, [sharing], tmp_path / "second")


def test_a_sample_with_nan_goes_to_the_ledger(engine: VllmEngine, plant: Callable[[str], None], tmp_path: Path) -> None:
    plant("a NaN")
    samples = random_samples([100, 90], seed=4)  # two steps: the planted row is in the first sample of each
    result = capture(engine, samples[:1], tmp_path / "store")
    assert [one for one, _ in result.rejected] == [samples[0].id]
    assert "F9" in result.rejected[0][1]


def test_a_lost_sample_is_not_passed_over(engine: VllmEngine, plant: Callable[[str], None], tmp_path: Path) -> None:
    plant("a sample forgotten")
    samples = random_samples([50], seed=5)
    result = capture(engine, samples, tmp_path / "store")
    assert [one for one, _ in result.rejected] == [samples[0].id]


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("after the norm", "F6"),
        ("no residual", "F7"),
        ("one layer early", "F5"),
        ("layers swapped", "F5"),
        ("a layer twice", "F5"),
    ],
)
def test_parity_finds_states_of_another_kind(
    engine: VllmEngine, plant: Callable[[str], None], fault: str, named: str
) -> None:
    plant(fault)
    with pytest.raises(ParityError, match=named):
        engine.parity(random_samples([31, 25], seed=len(fault)))  # no full cache block


def test_parity_passes_without_a_fault(engine: VllmEngine) -> None:
    report = engine.parity(random_samples([31, 20, 1], seed=6))
    assert report["passed"]
    assert report["top1_agreement"] > 0.999
    assert max(report["relative_l2"].values()) < 1e-5
    assert max(report["alone_relative_l2"].values()) < 1e-5


def test_resuming_with_other_batches_neither_skips_nor_repeats(engine: VllmEngine, tmp_path: Path) -> None:
    samples = random_samples([30] * 60, seed=8)
    stop, seen = threading.Event(), []

    def progress(done: Any) -> None:
        seen.append(done)
        if done.samples == 3:
            stop.set()

    first = capture(engine, samples, tmp_path / "store", progress=progress, stop=stop)
    assert first.interrupted
    done = done_samples(tmp_path / "store")
    assert 3 <= len(done) < 60
    second = capture(engine, samples[::-1], tmp_path / "store", done=done)
    assert not second.rejected
    written = [shard["samples"] for shard in first.shards + second.shards]
    assert sum(written) == 60
    assert done_samples(tmp_path / "store") == {s.id for s in samples}


def test_preempted_requests_are_captured_once_and_right(
    engine: VllmEngine, vllm_model: Callable[[str], Path], tmp_path: Path
) -> None:
    samples = random_samples([299, 280, 290, 150], seed=9)  # each takes several steps
    preempted = []

    def progress(done: Any) -> None:
        if done.samples in (1, 2):
            preempted.append(engine._llm.llm_engine.reset_prefix_cache(reset_running_requests=True))

    result = capture(engine, samples, tmp_path / "store", progress=progress)
    assert preempted == [True, True]
    assert not result.rejected
    states = open_states(tmp_path / "store")
    worst = worst_error(states, reference_states(vllm_model("llama"), samples, LAYERS))
    assert max(worst.values()) < 1e-5, worst
