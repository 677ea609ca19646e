"""States of the real vLLM against transformers in fp32: architectures, tensor parallel sizes, wrappers, the other ways of capturing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_models import (
    capture,
    eyas_process,
    make_quantised,
    random_samples,
    reference_states,
    running,
    vllm_within,
    worst_error,
    write_dataset,
)

from eyas.base.errors import ContractError, PreflightError
from eyas.engines.contract import HOPS, read_hops
from eyas.engines.vllm.interface import capture_for, has_interface
from eyas.engines.vllm.start import VllmSettings, refuse_impossible
from eyas.extraction.extract import extract
from eyas.gates.verification import verify
from eyas.store.format import read_store_manifest
from eyas.store.reader import open_states
from eyas.target.model_files import describe_model

pytestmark = pytest.mark.vllm

LENGTHS = [5, 1, 200, 17, 64, 299, 33]


NO_INT4 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's INT4 kernel for CPUs wants AVX-512, which this processor lacks"
)


@pytest.mark.parametrize(
    ("kind", "parts", "allowed"),
    [pytest.param("int4", [None], 0.03, marks=NO_INT4), ("fp8", ["0/2", "1/2"], 0.2)],
)
def test_quantised_targets_and_parts_that_make_one_store(
    tmp_path: Path, kind: str, parts: list[str | None], allowed: float
) -> None:
    """INT4 weights are only rounded once, FP8 activations anew in every product: held against the same numbers, unquantised."""
    folder, samples = make_quantised(tmp_path / "m", tmp_path / "plain", kind), random_samples(LENGTHS, seed=11)
    data = write_dataset(tmp_path / "samples.jsonl", samples)
    statuses = []
    for part in parts:
        with vllm_within():
            report = extract(
                model_path=str(folder),
                prepared_data=str(data),
                output_dir=str(tmp_path / "store"),
                engine="vllm",
                layer_ids=[2, 4],
                batch_tokens=128,
                parity_samples=len(samples),
                part=part,
            )
        assert not report.rejected
        assert report.parity is not None
        assert report.parity["passed"]
        assert ("quantised activations" in report.parity["reference"]) == (kind == "fp8")
        statuses.append(json.loads((tmp_path / "store" / "manifest.json").read_text())["status"])
    assert statuses == ["open", "complete"][-len(parts) :]
    states = open_states(tmp_path / "store")
    assert set(states.ids) == {s.id for s in samples}
    worst = worst_error(states, reference_states(tmp_path / "plain", samples, [2, 4, 6]))
    assert max(worst.values()) < allowed, worst


@pytest.mark.smollm2
@pytest.mark.timeout(900)
def test_smollm2_through_the_command_line_with_three_ranks(tmp_path: Path) -> None:
    samples = random_samples([40, 7, 130, 64, 1, 90, 33, 12], seed=3, vocabulary=49000)
    data = write_dataset(tmp_path / "samples.jsonl", samples)
    flags = ["--model-path", "smollm2", "--prepared-data", str(data), "--engine", "vllm", "--dtype", "float32"]
    flags += ["--layer-ids", "2", "15", "27", "--max-seq-len", "256", "--parity-samples", "2", "--tp-size", "3"]
    done = eyas_process("extract", *flags, "--output-dir", tmp_path / "store", "--trace")
    # Ranks of vLLM's CPU build spin while they wait: three on two cores need a minute, and once needed five.
    _, errors = done.communicate(timeout=700)
    assert done.returncode == 0, errors[-3000:]
    states = open_states(tmp_path / "store")
    assert set(states.ids) == {s.id for s in samples}
    assert states.manifest["engine"]["path"] == ["LlamaForCausalLM", "LlamaModel"]
    assert states.manifest["parity"]["passed"]
    assert {hop.hop for hop in read_hops(tmp_path / "store")} == set(HOPS)
    report = verify(tmp_path / "store", recompute=len(samples), seed=0)  # by transformers
    assert not report.problems
    assert report.recomputed is not None
    assert set(report.recomputed["relative_l2"]) == {"2", "15", "27", "30"}
    assert max(report.recomputed["relative_l2"].values()) < 1e-5


def test_heads_that_do_not_divide_are_refused_before_any_load(
    vllm_model: Callable[[str], Path], tmp_path: Path
) -> None:
    data = write_dataset(tmp_path / "samples.jsonl", random_samples([10]))
    with pytest.raises(PreflightError, match="4 attention heads do not divide by 3"):
        extract(
            model_path=str(vllm_model("llama")),
            prepared_data=str(data),
            output_dir=str(tmp_path / "store"),
            engine="vllm",
            layer_ids=[2, 4],
            tp_size=3,
        )
    assert not (tmp_path / "store").exists()


def test_a_model_without_the_interface_says_so_and_hooks_work(
    vllm_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, samples = vllm_model("gpt2"), random_samples(LENGTHS, seed=5)
    # What a rank meets while it loads crosses two processes and vLLM's own error.
    with pytest.raises(ContractError, match="--capture auto") as caught, running(model, [1, 2, 4], processes=True):
        pass
    assert "GPT2LMHeadModel" in str(caught.value)
    assert capture_for(describe_model(model)) == "hooks"
    with running(model, [1, 2, 4], capture="hooks") as engine:
        result = capture(engine, samples, tmp_path / "store")
    assert not result.rejected
    worst = worst_error(open_states(tmp_path / "store"), reference_states(model, samples, [1, 2, 4]))
    assert max(worst.values()) < 1e-5, worst


def test_a_model_without_the_interface_is_run_by_vllms_transformers_backend(
    vllm_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two ranks, sliding windows, id 0, and gate 4: the command line chooses the way."""
    model, samples = vllm_model("gemma3"), random_samples(LENGTHS, seed=8)
    options = ["--engine", "vllm", "--tp-size", "2", "--layer-ids", "0,2,5", "--model-path", model]
    rows = write_dataset(tmp_path / "rows.jsonl", samples)
    run = eyas_process("extract", *options, "--prepared-data", rows, "--output-dir", tmp_path / "store")
    said, errors = run.communicate(timeout=300)
    assert run.returncode == 0, said + errors
    assert read_store_manifest(tmp_path / "store")["engine"]["path"] == ["TransformersForCausalLM", "Gemma3TextModel"]
    worst = worst_error(open_states(tmp_path / "store"), reference_states(model, samples, [0, 2, 5, 6]))
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize(
    ("architecture", "found"),
    [
        ("LlamaForCausalLM", True),
        ("DeepseekV3ForCausalLM", True),  # from a class of its own module
        ("KimiK25ForConditionalGeneration", True),
        ("GptOssForCausalLM", True),
        ("Gemma2ForCausalLM", False),
        ("Glm4MoeForCausalLM", False),
        ("MixtralForCausalLM", False),
        ("NobodysModel", None),
    ],
)
def test_the_interface_is_found_in_vllms_source(architecture: str, found: bool | None) -> None:
    assert has_interface(architecture) is found
    if found is not None:
        from vllm.model_executor.models.registry import ModelRegistry

        loaded = ModelRegistry.models[architecture].load_model_cls()
        assert hasattr(loaded, "set_aux_hidden_state_layers") is found


def test_vllms_own_connector_gives_the_same_states(vllm_model: Callable[[str], Path], tmp_path: Path) -> None:
    model, samples = vllm_model("llama"), random_samples([5, 64, 100, 33], seed=6)
    with running(model, [4, 2, 6], capture="native", processes=True) as engine:  # its files come while the driver waits
        result = capture(engine, samples, tmp_path / "store")
        assert not list(engine.native_folder.rglob("*.safetensors"))  # taken away as they are read
    assert not result.rejected
    worst = worst_error(open_states(tmp_path / "store"), reference_states(model, samples, [4, 2, 6]))
    assert max(worst.values()) < 1e-5, worst


def test_two_pipeline_stages(vllm_model: Callable[[str], Path], tmp_path: Path) -> None:
    model, samples, layer_ids = vllm_model("llama"), random_samples(LENGTHS, seed=9), [0, 2, 4, 6]  # stages 0-2 and 3-5
    with running(model, layer_ids, pp_size=2) as engine:
        assert engine.path == "LlamaForCausalLM -> LlamaModel, 6 layers"
        result = capture(engine, samples, tmp_path / "store")
    assert {entry["name"].split("-")[1] for entry in result.shards} == {"r001"}  # the last stage writes
    worst = worst_error(open_states(tmp_path / "store"), reference_states(model, samples, layer_ids))
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"executor": "ray"}, "no Ray executor|Ray is not installed"),
        ({"pp_size": 2, "capture": "hooks"}, "one pipeline stage"),
        ({"tp_size": 3}, "4 attention heads do not divide by 3"),
        ({"max_seq_len": 1000}, "more than the model's 512 positions"),
    ],
)
def test_what_cannot_work_is_refused_before_any_load(
    vllm_model: Callable[[str], Path], settings: dict[str, Any], message: str
) -> None:
    chosen = VllmSettings(describe_model(vllm_model("llama")), **settings)
    with pytest.raises(PreflightError, match=message):
        refuse_impossible(chosen, gpu=False)
