"""The twenty faults that states, masks and runs have had in real tools, planted one by one into the real path.

Each must stop the run before or during the gates, or be impossible, and whatever is said of it names the fault by its number
(docs/faults.md). Faults of an engine are planted into both engines: a real vLLM whose worker lies on request (`faulty_worker.py`; one
engine serves all of them, a broken contract ends a capture and leaves the engine running), and `transformers`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import CHATML, byte_level_tokenizer
from eyas_process import eyas_command, eyas_environment, run_eyas, write_token_rows
from planting import DYING, VICTIMS, Kills, killed_and_resumed, plant, planted, spoiled
from vllm_models import capture, random_samples, reference_states, running, worst_error

import eyas
from eyas.base.errors import EXIT_INCOMPLETE, ContractError, FolderConflictError, InputError, ParityError, StoreError
from eyas.data.chat_template import ChatTemplate
from eyas.data.conversations import Conversation
from eyas.data.dataset import Sample, open_dataset
from eyas.data.preparation import prepare
from eyas.engines.transformers import TransformersEngine, TransformersSettings
from eyas.engines.vllm.engine import VllmEngine, VllmSettings
from eyas.engines.vllm.start import engine_arguments
from eyas.gates import reference
from eyas.gates.parity import check_parity
from eyas.runs import run as runs
from eyas.runs.loglines import Wanted, first_causes, read_lines
from eyas.runs.processes import processes_of_run
from eyas.store.format import distinct_samples, finished_shards
from eyas.store.reader import open_states
from eyas.target.model_files import describe_model
from eyas.target.teacher import load_target_parts

LENGTHS = [7, 30, 1, 64, 12, 41, 5, 18, 90, 33]
LAYERS = [4, 2, 6]  # of the model that vLLM runs, in an order that is not ascending; 6 is the target state


#: What a message says of a fault: sentences, no numbers of ours.
SAYS = {
    1: "indexed once too often",
    2: "states of another request",
    3: "states are missing|skipped [0-9]+ tokens",
    4: "all zero",
    5: "early, late or swapped|same states|captured twice",
    6: "after the (final )?norm|already normed",
    7: "without its residual|hidden \\+ residual",
    8: "were asked for|layer is missing",
    9: "not finite",
    10: "cut short or damaged|half-written",
    11: "in two shards|stands in .* too",
    12: "of another run",
    13: "loss_mask (covers|begins)|no assistant token",
    16: "some are lost|no states came|without computing all its tokens",
    20: "compiled model of a run without capture",
}


def names(fault: int) -> str:
    """Pattern of a message that names this fault."""
    return rf"\bF{fault}\b|{SAYS.get(fault, 'F')}"


def test_all_twenty_are_here_in_order_and_explained() -> None:
    numbers = [int(n) for n in re.findall(r"^def test_f(\d+)_", Path(__file__).read_text(), re.MULTILINE)]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(1, 21))
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    assert [int(n) for n in re.findall(r"^\| F(\d+) \|", page, re.MULTILINE)] == list(range(1, 21))


# --- the two engines ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm(vllm_model: Callable[[str], Path]) -> Iterator[VllmEngine]:
    """Prefix caching is on, against eyas's own setting, so that F3 is a real cache hit; prompts share nothing otherwise."""
    extra = {"enable_prefix_caching": True, "block_size": 32}
    worker = "faulty_worker.FaultyWorker"
    with running(
        vllm_model("qwen3_moe"), LAYERS, batch_size=4, trace_steps=2, worker_cls=worker, extra=extra
    ) as started:
        yield started


def assert_capture_stops(vllm: VllmEngine, planting: str, fault: int, folder: Path) -> str:
    """The planted fault ends the capture: no sample counts as written. Gives the message."""
    with planted(vllm, planting), pytest.raises(ContractError, match=names(fault)) as caught:
        capture(vllm, random_samples([60, 30, 50], seed=100 + fault), folder)
    assert distinct_samples(finished_shards(folder)) == set()
    assert not list(folder.glob("fault-*"))
    return str(caught.value)


def assert_parity_fails(vllm: VllmEngine, planting: str, fault: int) -> None:
    """Gate 4 finds it, before bulk."""
    with planted(vllm, planting), pytest.raises(ParityError, match=names(fault)):
        check_parity(vllm, random_samples([31, 25], seed=len(planting)))  # no full cache block


@pytest.fixture
def engine(tiny_model: Callable[[str], Path]) -> Iterator[TransformersEngine]:
    made = TransformersEngine(describe_model(tiny_model("llama")), TransformersSettings("float32", "cpu", 1))
    made.load([0, 2, 3, 4])
    yield made
    made.close()


@pytest.fixture
def samples(token_rows: Callable[..., Path]) -> list[Sample]:
    return list(open_dataset(token_rows([20, 35, 11])))


@pytest.mark.vllm
def test_nothing_planted_vllm_is_right(vllm: VllmEngine, vllm_model: Callable[[str], Path], tmp_path: Path) -> None:
    """The control: with the same engine and no fault, states are right, in the order asked, and parity passes."""
    samples = random_samples([5, 1, 200, 17, 64, 299, 33, 40, 40], seed=1)  # chunks, mixed lengths, longer than a step
    result = capture(vllm, samples, tmp_path / "store")
    states = open_states(tmp_path / "store")
    assert states.layer_ids == (4, 2, 6)
    assert set(states.ids) == {s.id for s in samples}
    assert not result.rejected
    for sample in samples:
        read = states[states.index_of(sample.id)]
        assert read.token_ids.tolist() == sample.token_ids.tolist()
        assert read.loss_mask.tolist() == sample.loss_mask.tolist()
        assert list(read.hidden) == [4, 2, 6]
    worst = worst_error(states, reference_states(vllm_model("qwen3_moe"), samples, LAYERS))
    assert max(worst.values()) < 1e-5, worst
    report = check_parity(vllm, random_samples([31, 20, 1], seed=6))
    assert report["passed"]
    assert report["top1_agreement"] > 0.999
    assert max(report["relative_l2"].values()) < 1e-5
    assert max(report["alone_relative_l2"].values()) < 1e-5


def test_nothing_planted_transformers_passes_parity(engine: TransformersEngine, samples: list[Sample]) -> None:
    assert check_parity(engine, samples)["passed"]


# --- F1: indexed once too often, rows where layers should be ---------------------------------------------------------


@pytest.mark.vllm
def test_f1_vllm(vllm: VllmEngine, tmp_path: Path) -> None:
    assert_capture_stops(vllm, "indexed once too often", 1, tmp_path / "store")


def test_f1_transformers(engine: TransformersEngine, samples: list[Sample]) -> None:
    """The stream arrives as [H] rows instead of [1, T, H]."""
    engine.decoder.layers[2].register_forward_pre_hook(lambda m, args: (args[0][0, 0],), prepend=True)
    with pytest.raises(
        ContractError,
        match=r"layer 2: the residual stream should be \[1, 66, 32\], it is \[32\].*(F1\b|indexed once too often)",
    ):
        check_parity(engine, samples)


# --- F2: states of another request -----------------------------------------------------------------------------------


@pytest.mark.vllm
def test_f2_vllm(vllm: VllmEngine, tmp_path: Path) -> None:
    assert_capture_stops(vllm, "another request's rows", 2, tmp_path / "store")


def test_f2_transformers(engine: TransformersEngine, samples: list[Sample]) -> None:
    def swap(i: int, stream: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, list[int]]:
        a, b = lengths[0], lengths[1]
        stream[:a] = stream[a : a + a].clone() if b >= a else stream[:a]
        return stream, lengths

    plant(engine, swap)
    with pytest.raises(ParityError, match=names(2)):
        check_parity(engine, samples)


# --- F3: fewer states than tokens ------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_f3_vllm_rows_missing_and_the_hop_table_marks_where(vllm: VllmEngine, tmp_path: Path) -> None:
    message = assert_capture_stops(vllm, "rows missing", 3, tmp_path / "store")
    lines = message.splitlines()
    (at,) = [i for i, line in enumerate(lines) if ">>" in line]
    assert "model output:" in lines[at - 1]  # the first layer's row, right below the hop's name
    assert re.search(r"(\d+) rows for (\d+) tokens", lines[at + 1])


@pytest.mark.vllm
def test_f3_vllm_a_real_prefix_cache_hit(vllm: VllmEngine, tmp_path: Path) -> None:
    first, second = random_samples([100, 100], seed=3)
    tokens = second.token_ids.copy()
    tokens[:64] = first.token_ids[:64]
    sharing = Sample.of(tokens, second.loss_mask)
    capture(vllm, [first], tmp_path / "first")
    with pytest.raises(ContractError, match=r"skipped 64 tokens"):
        capture(vllm, [sharing], tmp_path / "second")


@pytest.mark.vllm
def test_f3_vllm_preempted_requests_are_captured_once_and_whole(
    vllm: VllmEngine, vllm_model: Callable[[str], Path], tmp_path: Path
) -> None:
    samples = random_samples([299, 280, 290, 150], seed=9)  # each takes several steps
    preempted = []

    def progress(done: Any) -> None:
        if done.samples in (1, 2):
            preempted.append(vllm._llm.llm_engine.reset_prefix_cache(reset_running_requests=True))

    result = capture(vllm, samples, tmp_path / "store", progress=progress)
    assert preempted == [True, True]
    assert not result.rejected
    states = open_states(tmp_path / "store")
    worst = worst_error(states, reference_states(vllm_model("qwen3_moe"), samples, LAYERS))
    assert max(worst.values()) < 1e-5, worst


def test_f3_transformers(engine: TransformersEngine, samples: list[Sample]) -> None:
    plant(engine, lambda i, stream, lengths: (stream[4:], [lengths[0] - 4, *lengths[1:]]))
    with pytest.raises(ParityError, match=r"has shape .*states are missing"):
        check_parity(engine, samples)


# --- F4: all-zero states ---------------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_f4_vllm(vllm: VllmEngine, tmp_path: Path) -> None:
    assert_capture_stops(vllm, "zeros", 4, tmp_path / "store")


@pytest.fixture
def bulk(tiny_model: Callable[[str], Path], token_rows: Callable[..., Path], tmp_path: Path) -> dict[str, Any]:
    """Options of an extraction whose bulk is one batch."""
    return {
        "model_path": str(tiny_model("llama")),
        "prepared_data": str(token_rows(LENGTHS * 3)),
        "output_dir": str(tmp_path / "s"),
        "layer_ids": [2],
        "batch_tokens": 1000,
        "parity_samples": 2,
    }


def test_f4_transformers_in_the_bulk(bulk: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformersEngine, "forward_captured", spoiled(0.0))
    with pytest.raises(ContractError, match=names(4)):
        eyas.extract(**bulk)
    assert not list(Path(bulk["output_dir"]).glob("shard-*"))


# --- F5: one layer early or late -------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize("planting", ["one layer early", "layers swapped", "a layer twice"])
def test_f5_vllm(vllm: VllmEngine, planting: str) -> None:
    assert_parity_fails(vllm, planting, 5)


@pytest.mark.parametrize(("wrong", "given"), [(2, 3), (3, 2)])
def test_f5_transformers(engine: TransformersEngine, samples: list[Sample], wrong: int, given: int) -> None:
    """What is handed on as layer `wrong` is layer `given`."""
    real = engine.forward_captured

    def forward(samples: Any, sink: Any) -> Any:
        streams = {}
        result = real(samples, lambda i, stream, lengths: streams.update({i: stream.clone()}))
        for i in streams:
            sink(i, streams[given if i == wrong else i], [len(s) for s in samples])
        return result

    engine.forward_captured = forward
    with pytest.raises(
        ParityError, match=rf"layer {wrong}: it is nearest to the reference's layer {given} .*early, late or swapped"
    ):
        check_parity(engine, samples)


# --- F6: the target state after the final norm, or used without it ---------------------------------------------------


@pytest.mark.vllm
def test_f6_vllm(vllm: VllmEngine) -> None:
    assert_parity_fails(vllm, "after the norm, target", 6)


def test_f6_transformers(engine: TransformersEngine, samples: list[Sample]) -> None:
    plant(engine, lambda i, s, n: (engine.decoder.norm.forward(s) if i == 4 else s, n))
    with pytest.raises(ParityError, match=names(6)):
        check_parity(engine, samples)


# --- F7: hidden instead of hidden + residual -------------------------------------------------------------------------


@pytest.mark.vllm
def test_f7_vllm(vllm: VllmEngine) -> None:
    assert_parity_fails(vllm, "no residual", 7)


def test_f7_transformers(engine: TransformersEngine, samples: list[Sample]) -> None:
    streams = {}

    def lose(i: int, stream: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, list[int]]:
        streams[i] = stream
        return (stream - streams[3] if i == 4 else stream), lengths

    plant(engine, lose)
    with pytest.raises(ParityError, match=r"(?s)layer 4 \(final\).*without its residual"):
        check_parity(engine, samples)


def test_f7_transformers_or_the_wrong_kind_of_norm(
    engine: TransformersEngine, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = replace(load_target_parts(engine.info), norm_kind="rms_1p")
    monkeypatch.setattr(reference, "load_target_parts", lambda _info: parts)
    with pytest.raises(ParityError, match=r"(?s)rms_1p norm .*another kind of norm, or hidden without its residual"):
        check_parity(engine, samples)


# --- F8: the last layer is dropped -----------------------------------------------------------------------------------


@pytest.mark.vllm
def test_f8_vllm(vllm: VllmEngine, tmp_path: Path) -> None:
    assert_capture_stops(vllm, "a layer dropped", 8, tmp_path / "store")


def test_f8_transformers(engine: TransformersEngine, samples: list[Sample]) -> None:
    engine.hooks._handles[-1].remove()
    with pytest.raises(ContractError, match=r"states of layers \[0, 2, 3\], \[0, 2, 3, 4\] were asked for"):
        check_parity(engine, samples)


# --- F9: NaN or Inf in a few samples ---------------------------------------------------------------------------------


@pytest.mark.vllm
def test_f9_vllm_goes_to_the_ledger(vllm: VllmEngine, tmp_path: Path) -> None:
    (sample,) = random_samples([100], seed=4)
    with planted(vllm, "a NaN"):
        ((one, why),) = capture(vllm, [sample], tmp_path / "store").rejected
    assert one == sample.id
    assert re.search(names(9), why)


def test_f9_transformers_goes_to_the_ledger_and_is_tried_again(
    bulk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as here:
        here.setattr(TransformersEngine, "forward_captured", spoiled(float("nan")))
        report = eyas.extract(**bulk)
    assert report.exit_code == EXIT_INCOMPLETE
    ((_, why),) = report.rejected
    assert re.search(names(9), why)
    again = eyas.extract(**bulk)
    assert (again.exit_code, again.new_samples) == (0, 1)
    assert not (again.folder / "ledger.jsonl").exists()
    assert eyas.verify(again.folder).problems == []


# --- F10: an interrupted write is taken for a finished sample --------------------------------------------------------


@pytest.fixture(scope="module")
def kills(vllm_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Kills:
    return killed_and_resumed(vllm_model("llama"), tmp_path_factory.mktemp("kills"))


@pytest.mark.vllm
def test_f10_vllm_killed_rank_core_and_driver(kills: Kills) -> None:
    """Half a store passes neither for a finished store nor for finished samples."""
    expected = {"Worker": 10, "EngineCore": 10, "driver": -signal.SIGKILL, "Ctrl-C": 130}
    assert {victim: kills.codes[victim] for victim in VICTIMS} == expected, kills.said
    assert "the engine died" in kills.said["Worker"]
    assert "the engine died" in kills.said["EngineCore"]
    assert not kills.readable
    counts = list(kills.done.values())
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert counts[-1] < len(kills.samples), "too quick: nothing was left to resume"
    assert not list(kills.store.glob("*.tmp"))
    assert eyas.verify(kills.store, recompute=0).problems == []


def content(folder: Path) -> dict[str, dict[int, torch.Tensor]]:
    return {one.id: {i: t.clone() for i, t in one.hidden.items()} for one in open_states(folder)}


def test_f10_transformers_killed_at_many_moments_ends_with_the_same_bytes(
    tiny_model: Callable[[str], Path], token_rows: Callable[..., Path], tmp_path: Path
) -> None:
    data = token_rows(np.random.default_rng(3).integers(20, 120, 600).tolist())

    def command(folder: Path) -> list[str]:
        return eyas_command(
            "extract", "--model-path", tiny_model("qwen3"), "--prepared-data", data, "--output-dir", folder, "--layer-ids", "2",
            "--dtype", "bfloat16", "--batch-tokens", "200", "--shard-size", "0.2", "--threads", "1",
        )  # fmt: skip

    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    subprocess.run(command(quiet), env=eyas_environment(), check=True, capture_output=True, timeout=300)
    for shards in (1, 4, 9):
        process = subprocess.Popen(
            command(killed), env=eyas_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and len(list(killed.glob("shard-*.safetensors"))) < shards:
            time.sleep(0.002)
        time.sleep(0.003 * shards)
        assert process.poll() is None, "too quick to be killed"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(StoreError):
            open_states(killed)  # an unfinished store does not pass for a finished one
    (killed / "shard-r000-00099.safetensors.tmp").write_bytes(b"half")
    # Parity's own store lies here where ranks are on several hosts.
    (killed / ".parity-abc" / "batched").mkdir(parents=True)
    done = subprocess.run(command(killed), env=eyas_environment(), check=True, capture_output=True, timeout=300)
    assert re.search(names(10), (done.stdout + done.stderr).decode())  # told what was removed
    one, other = content(quiet), content(killed)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k][i], other[k][i]) for k in one for i in one[k])
    assert not [*killed.glob("*.tmp"), *killed.glob(".parity-*")]
    assert eyas.verify(killed, recompute=2).problems == []


@pytest.fixture(scope="module")
def made(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of an extraction that has been made, into several shards."""
    root = tmp_path_factory.mktemp("made")
    options = {
        "model_path": str(tiny_model("llama")),
        "prepared_data": str(write_token_rows(root / "tokens.jsonl", LENGTHS * 3)),
        "output_dir": str(root / "s"),
        "layer_ids": [2],
        "shard_size": 0.02,
    }
    eyas.extract(**options, batch_tokens=70)
    return options


@pytest.fixture
def again(made: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The same options with a copy of the store."""
    return {**made, "output_dir": str(shutil.copytree(made["output_dir"], tmp_path / "copy"))}


def shards_of(options: dict[str, Any]) -> list[Path]:
    return sorted(Path(options["output_dir"]).glob("shard-*.safetensors"))


def test_f10_a_shard_cut_short_stops_whoever_reads_it(again: dict[str, Any]) -> None:
    path = shards_of(again)[0]
    path.write_bytes(path.read_bytes()[:-5])
    for read in (lambda: open_states(again["output_dir"]), lambda: eyas.extract(**again)):
        with pytest.raises(StoreError, match=rf"{path.name} is not a readable shard, cut short or damaged"):
            read()
    assert re.search(names(10), eyas.verify(again["output_dir"]).problems[0])


# --- F11: resuming with another batch size or worker count skips or repeats samples ----------------------------------


@pytest.mark.vllm
def test_f11_vllm_every_resume_with_other_batches_and_the_last_with_other_ranks(kills: Kills) -> None:
    written = [one for header in finished_shards(kills.store) for one in header.sample_ids]
    assert len(written) == len(set(written))
    assert set(written) == {s.id for s in kills.samples}
    assert {header.path.name.split("-")[1] for header in finished_shards(kills.store)} == {"r000", "r001"}


@pytest.mark.vllm
def test_f11_vllm_resumed_in_another_order(vllm: VllmEngine, tmp_path: Path) -> None:
    samples = random_samples([30] * 60, seed=8)
    stop = threading.Event()

    def progress(done: Any) -> None:
        if done.samples == 3:
            stop.set()

    first = capture(vllm, samples, tmp_path / "store", progress=progress, stop=stop)
    assert first.interrupted
    done = distinct_samples(finished_shards(tmp_path / "store"))
    assert 3 <= len(done) < 60
    second = capture(vllm, samples[::-1], tmp_path / "store", done=done)
    assert not second.rejected
    assert sum(shard["samples"] for shard in first.shards + second.shards) == 60
    assert distinct_samples(finished_shards(tmp_path / "store")) == {s.id for s in samples}


def test_f11_transformers(again: dict[str, Any]) -> None:
    whole = set(open_states(again["output_dir"]).ids)
    for path in shards_of(again)[::2]:
        path.unlink()
    report = eyas.extract(**again, batch_tokens=300, batch_size=4)
    assert 0 < report.new_samples < len(whole)
    states = open_states(again["output_dir"])
    assert set(states.ids) == whole
    assert len(states.ids) == len(whole)


def test_f11_a_sample_written_twice_is_found(again: dict[str, Any]) -> None:
    shutil.copy(shards_of(again)[0], Path(again["output_dir"]) / "shard-r007-00000.safetensors")
    assert any(re.search(names(11), problem) for problem in eyas.verify(again["output_dir"]).problems)


# --- F12: states of an older run with other layers lie in the output folder ------------------------------------------


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_f12_the_same_folder_used_twice(
    made: dict[str, Any], tiny_model: Callable[[str], Path], token_rows: Callable[..., Path], engine: str
) -> None:
    """Refused before anything is loaded, whatever the engine."""
    before = [path.stat().st_mtime_ns for path in shards_of(made)]
    for change, differing in [
        ({"layer_ids": [1]}, "layer_ids"),
        ({"model_path": str(tiny_model("llama3"))}, "config_hash"),
        ({"prepared_data": str(token_rows([5, 6], name="other.jsonl"))}, "dataset.hash"),
        ({"dtype": "bfloat16"}, "dtype"),
    ]:
        with pytest.raises(FolderConflictError, match=rf"(?s)of another run.*{differing}"):
            eyas.extract(**{**made, "engine": engine, **change})
    assert before == [path.stat().st_mtime_ns for path in shards_of(made)]


def test_f12_a_foreign_shard_among_ours(again: dict[str, Any], tmp_path: Path) -> None:
    eyas.extract(**{**again, "layer_ids": [1], "output_dir": str(tmp_path / "other")})
    shutil.copy(next((tmp_path / "other").glob("shard-*")), Path(again["output_dir"]) / "shard-r009-00000.safetensors")
    with pytest.raises(StoreError, match=names(12)):
        open_states(again["output_dir"])
    assert any(re.search(names(12), problem) for problem in eyas.verify(again["output_dir"]).problems)


# --- F13: the loss mask covers the user's turns, or nothing, or is shifted by one ------------------------------------

CHAT = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello you."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye."},
]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    byte_level_tokenizer("chatml").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("planting", ["shifted right", "shifted left", "the user's turns", "nothing"])
def test_f13_wrong_masks_of_tokenised_rows(chat_model: str, tmp_path: Path, planting: str) -> None:
    [good] = ChatTemplate(byte_level_tokenizer("chatml")).samples(Conversation(CHAT))
    mask = good.loss_mask.tolist()
    wrong = {
        "shifted right": [0, *mask[:-1]],
        "shifted left": [*mask[1:], 0],
        "the user's turns": [1] * len(mask),
        "nothing": [0] * len(mask),
    }[planting]
    ids = good.token_ids.tolist()
    rows = [{"input_ids": ids, "loss_mask": mask}, {"input_ids": [*ids, 9], "loss_mask": [*wrong, 0]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = prepare(tmp_path / "rows.jsonl", chat_model, tmp_path / "out")
    assert (report.kept, report.dropped) == (1, 1)
    assert report.rejected[0]["line"] == 2
    assert re.search(names(13), report.rejected[0]["reason"])
    assert np.array_equal(open_dataset(tmp_path / "out")[0].loss_mask, good.loss_mask)


def test_f13_a_template_that_alters_the_text_makes_no_dataset(chat_model: str, tmp_path: Path) -> None:
    """More such templates in test_masks.py."""
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    shouting = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}")
    with pytest.raises(InputError, match=r"(?s)not one of 1 rows"):
        prepare(tmp_path / "chat.jsonl", chat_model, tmp_path / "out", chat_template=shouting)
    assert not (tmp_path / "out" / "manifest.json").exists()


# --- F14: a truncated answer counts as a whole one -------------------------------------------------------------------


def test_f14_truncated_answers_are_counted_marked_and_told(chat_model: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    answers = [" ".join(f"word{k}x{i}" for i in range(60 if k % 3 == 0 else 3)) for k in range(20)]  # 7 of 20 too long
    rows = [{"messages": [CHAT[0], {"role": "assistant", "content": answer}]} for answer in answers]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--data", tmp_path / "long.jsonl", "--model-path", chat_model, "--output-dir", tmp_path / "out"]
    done = run_eyas("prepare", *flags, "--max-seq-len", "64")
    assert done.returncode == 0, done.stderr
    assert re.search(r"cut by the limit\W+7\W", done.stdout + done.stderr)
    counts = json.loads((tmp_path / "out" / "manifest.json").read_text())["counts"]
    assert (counts["truncated"], counts["answers_cut"]) == (7, 7)
    table = pq.read_table(tmp_path / "out" / "data-00000.parquet").to_pylist()
    assert [row["truncated"] for row in table] == [k % 3 == 0 for k in range(20)]
    for row in table:
        assert len(row["input_ids"]) == len(row["loss_mask"]) == row["n_tokens"] <= 64


def test_f14_an_answer_cut_when_it_was_generated_does_not_teach_an_end(chat_model: str, tmp_path: Path) -> None:
    cut = {**CHAT[1], "finish_reason": "length"}
    (tmp_path / "cut.jsonl").write_text(json.dumps({"messages": [CHAT[0], cut]}) + "\n")
    report = prepare(tmp_path / "cut.jsonl", chat_model, tmp_path / "out")
    assert report.answers_unfinished == 1
    [sample] = open_dataset(tmp_path / "out")
    tokenizer = byte_level_tokenizer("chatml")
    assert tokenizer.decode(sample.token_ids[sample.loss_mask == 1].tolist()) == "Hello you."


# --- F15: a stale vocabulary map from an earlier dataset is picked up ------------------------------------------------


def test_f15_a_draft_folder_with_the_vocabulary_of_other_data(
    tiny_model: Callable[[str], Path], token_rows: Callable[..., Path], tmp_path: Path
) -> None:
    model = str(tiny_model("llama"))

    def store(seed: int) -> Path:
        data = token_rows([20] * 12, name=f"{seed}.jsonl", seed=seed)
        folder = tmp_path / f"store{seed}"
        eyas.extract(model_path=model, prepared_data=str(data), output_dir=str(folder), layer_ids=[1, 2, 3])
        eyas.verify(folder, model_path=model)
        return folder

    options = {"model_path": model, "output_dir": tmp_path / "draft", "draft_vocab_size": 64, "steps": 1}
    options |= {"held_out": 0.2, "trackers": (), "batch_tokens": 100}
    eyas.train(states=store(1), **options)
    (tmp_path / "draft" / "settings.json").unlink()  # which would refuse it first
    with pytest.raises(FolderConflictError, match=r"(?s)vocabulary of other data"):
        eyas.train(states=store(2), **options)


# --- F16: failed samples are skipped and the exit status is 0 --------------------------------------------------------


@pytest.mark.vllm
def test_f16_vllm_a_sample_the_capture_forgot(vllm: VllmEngine, tmp_path: Path) -> None:
    samples = random_samples([50], seed=5)
    with planted(vllm, "a sample forgotten"):
        ((one, why),) = capture(vllm, samples, tmp_path / "store").rejected
    assert one == samples[0].id
    assert re.search(names(16), why)


@pytest.mark.vllm
def test_f16_vllm_a_sample_too_long_is_in_the_ledger_and_the_exit_status(kills: Kills) -> None:
    assert kills.codes["last"] == EXIT_INCOMPLETE, kills.said["last"][-2000:]
    (line,) = map(json.loads, (kills.store / "ledger.jsonl").read_text().splitlines())
    assert kills.too_long.id in line.values()
    assert line["reason"] == "310 tokens, longer than --max-seq-len 300"


def test_f16_transformers(tiny_model: Callable[[str], Path], token_rows: Callable[..., Path], tmp_path: Path) -> None:
    flags = [
        "--model-path",
        tiny_model("llama"),
        "--prepared-data",
        token_rows(LENGTHS),
        "--output-dir",
        tmp_path / "s",
    ]
    done = run_eyas("extract", *flags, "--layer-ids", "2", "--max-seq-len", "41")
    assert done.returncode == EXIT_INCOMPLETE, done.stderr
    ledger = [json.loads(line) for line in (tmp_path / "s" / "ledger.jsonl").read_text().splitlines()]
    assert sorted(line["reason"] for line in ledger) == [
        "64 tokens, longer than --max-seq-len 41",
        "90 tokens, longer than --max-seq-len 41",
    ]
    assert len(open_states(tmp_path / "s")) == 8
    assert eyas.verify(tmp_path / "s").problems == []


def test_f16_a_sample_in_no_shard_and_not_in_the_ledger(again: dict[str, Any]) -> None:
    path = Path(again["output_dir"]) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["dataset"]["samples"] += 1
    path.write_text(json.dumps(manifest))
    (problem,) = eyas.verify(again["output_dir"]).problems
    assert re.search(names(16), problem)


# --- F17: two layer ids that are equal, silently made one ------------------------------------------------------------


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("ids", [[2, 2], ["final", 4], [1, 3, 1]])
def test_f17_equal_layer_ids_are_refused_before_any_load(
    made: dict[str, Any], tmp_path: Path, engine: str, ids: list[Any]
) -> None:
    with pytest.raises(InputError, match=r"is given twice"):
        eyas.extract(**{**made, "engine": engine, "layer_ids": ids, "output_dir": str(tmp_path / "s")})
    assert not (tmp_path / "s").exists()


# --- F18: log lines of a worker are below the level, or go to a stdout that nobody keeps -----------------------------


@pytest.mark.vllm
def test_f18_vllm_last_words_of_ranks_that_die_hard_and_the_first_cause_on_the_terminal(
    vllm_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # the library's own level, above what is to be kept
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    path = os.pathsep.join([str(Path(__file__).parents[1]), eyas_environment()["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, str(script), str(vllm_model("llama"))],
        capture_output=True,
        text=True,
        timeout=400,
        env=eyas_environment(PYTHONPATH=path),
        check=False,
    )
    assert done.returncode != 0
    (view,) = runs.list_runs()
    assert view.state == "failed"
    (line,) = read_lines(view.folder, Wanted(ranks=(1,), grep="last words of rank"))
    assert (line.text, line.level, line.stream) == ("last words of rank 1", "debug", "log")
    (line,) = read_lines(view.folder, Wanted(ranks=(1,), grep="last words in C"))
    assert (line.text, line.stream) == ("last words in C of 1, no newline", "stdout")
    assert "first cause, rank 0" in done.stderr
    assert "Segmentation fault" in done.stderr
    assert "dying_worker.py" in done.stderr  # Python's stack, though the engine has a handler of its own
    assert first_causes(view.folder)[0].who == "rank 0"
    deadline = time.monotonic() + 30
    while processes_of_run(view.id, view.folder, [view.driver]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of_run(view.id, view.folder, [view.driver]) == []


# --- F19: a stopped run leaves processes, GPU memory or shared-memory segments behind --------------------------------


@pytest.mark.vllm
def test_f19_vllm_nothing_is_left_of_a_killed_rank_core_driver_or_of_ctrl_c(kills: Kills) -> None:
    """Stopped and hung ranks, `runs stop` and `runs clean`, GPU memory: test_runs.py and engines/test_vllm_runs.py."""
    assert kills.alive == {victim: [] for victim in VICTIMS}
    assert kills.segments == {victim: [] for victim in VICTIMS}


# --- F20: a compiled model from an earlier run's cache returns no auxiliary states -----------------------------------


@pytest.mark.vllm
def test_f20_vllm(vllm: VllmEngine, tmp_path: Path) -> None:
    assert_capture_stops(vllm, "no auxiliary states", 20, tmp_path / "store")


@pytest.mark.vllm
def test_f20_vllm_the_compile_cache_knows_the_layers(vllm_model: Callable[[str], Path], tmp_path: Path) -> None:
    """vLLM keys compiled models by the hash of its configuration; other layers, or none, must give another."""
    from vllm.engine.arg_utils import EngineArgs

    def key(layer_ids: list[int], **settings: Any) -> str:
        chosen = VllmSettings(describe_model(vllm_model("llama")), dtype="float32", max_seq_len=300, **settings)
        arguments = engine_arguments(chosen, layer_ids, tmp_path, gpu=False)
        return EngineArgs(**arguments).create_engine_config().compute_hash()

    assert key([2, 6]) == key([6, 2])
    assert len({key([2, 6]), key([3, 6]), key([2, 6], capture="none")}) == 3
