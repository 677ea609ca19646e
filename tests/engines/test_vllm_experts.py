"""Expert parallelism through the real vLLM on two ranks, from `extract` to a finished store: see `expert_worker.py` for what the CPU lacks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_models import random_samples, reference_states, worst_error, write_dataset

from eyas.base.errors import PreflightError
from eyas.engines.base import CaptureResult
from eyas.engines.vllm import engine as vllm
from eyas.engines.vllm import start as vllm_start
from eyas.extraction.extract import extract
from eyas.store.format import finished_shards
from eyas.store.reader import open_states
from eyas.target.model_files import describe_model

pytestmark = pytest.mark.vllm
LENGTHS = [5, 1, 200, 17, 64, 299, 33, 80, 12]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Lets `extract` run expert parallelism on the CPU; afterwards, what each rank held and computed."""
    refuse, seen = vllm_start.refuse_impossible, list[dict[str, Any]]()

    class Engine(vllm.VllmEngine):
        def __init__(self, settings: vllm.VllmSettings):
            super().__init__(replace(settings, worker_cls="expert_worker.ExpertWorker"))

        def capture(self, *arguments: Any, **keywords: Any) -> CaptureResult:
            result = super().capture(*arguments, **keywords)
            seen[:] = self._rpc("held_experts")
            return result

    def refuse_the_rest(settings: vllm.VllmSettings, **keywords: Any) -> None:
        refuse(replace(settings, expert_parallel=False), **keywords)

    monkeypatch.setattr(vllm, "VllmEngine", Engine)
    monkeypatch.setattr(vllm, "refuse_impossible", refuse_the_rest)
    return seen


def test_states_of_kimi_where_two_ranks_share_the_experts(
    vllm_model: Callable[[str], Path], tmp_path: Path, ranks: list[dict[str, Any]]
) -> None:
    """Everything at once: a multimodal wrapper, latent attention, id 0, tensor and expert parallelism. Plain experts: see `test_faults.py`."""
    samples, store = random_samples(LENGTHS, seed=21), tmp_path / "store"
    report = extract(
        model_path=str(vllm_model("kimi")),
        prepared_data=str(write_dataset(tmp_path / "samples.jsonl", samples)),
        output_dir=str(store),
        engine="vllm",
        dtype="float32",
        layer_ids=list(range(7)),
        tp_size=2,
        expert_parallel=True,
        batch_tokens=128,
        max_seq_len=300,
        parity_samples=2,
    )
    assert not report.rejected

    # Each rank held half of the experts, whole ones: 2 x 64 rows of gate and up, not 2 x 32.
    mixtures = 5  # the first of six layers is dense
    assert [rank["layers"] for rank in ranks] == [
        [[held, [4, 128, 128], [4, 128, 64]]] * mixtures for held in ([0, 1, 2, 3], [4, 5, 6, 7])
    ]
    # Each saw every token, and computed the choices that fell on its own experts; together that is all of them, 2 a token.
    first, second = ranks
    assert first["chosen"] == second["chosen"] == first["computed"] + second["computed"]
    assert first["chosen"] >= 2 * mixtures * sum(LENGTHS)
    assert min(first["computed"], second["computed"]) > first["chosen"] / 5

    shards = finished_shards(store)
    assert {header.path.name.split("-")[1] for header in shards} == {"r000", "r001"}  # both wrote
    assert sorted(one for header in shards for one in header.sample_ids) == sorted(s.id for s in samples)  # none twice
    states = open_states(store)
    worst = worst_error(states, reference_states(vllm_model("deepseek_v3"), samples, list(range(7))))
    assert max(worst.values()) < 1e-5, worst
    outer = ["KimiK25ForConditionalGeneration", "DeepseekV2ForCausalLM", "DeepseekV2Model"]
    assert states.manifest["engine"]["path"] == outer
    assert (states.manifest["engine"]["expert_parallel"], states.manifest["engine"]["tp_size"]) == (True, 2)
    assert states.manifest["parity"]["passed"]


def test_the_cpu_build_is_refused_with_the_reason(vllm_model: Callable[[str], Path], tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "samples.jsonl", random_samples([10]))
    with pytest.raises(PreflightError, match="leave out the map from all experts to a rank's own"):
        extract(
            model_path=str(vllm_model("qwen3_moe")),
            prepared_data=str(data),
            output_dir=str(tmp_path / "store"),
            engine="vllm",
            layer_ids=[2, 4],
            tp_size=2,
            expert_parallel=True,
        )
    assert not (tmp_path / "store").exists()


def test_vllms_cpu_kernel_leaves_out_the_map() -> None:
    """The reason for the refusal. When this fails, vLLM's CPU build may run expert parallelism: then try it without the refusal."""
    import torch
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    tokens, chosen = torch.randn(8, 64), torch.randint(0, 2, (8, 1), dtype=torch.int32)
    up, down = (cpu_prepack_moe_weight(torch.randn(2, *shape), "vec") for shape in ((128, 64), (64, 64)))
    kernel = SimpleNamespace(_use_zentorch=False, w1_bias=None, w2_bias=None, isa="vec")
    outputs = []
    for held in (None, torch.full((2,), -1, dtype=torch.int32)):  # -1: an expert of another rank, nothing to compute
        out = torch.zeros(8, 64)
        apply: Any = CPUUnquantizedExperts.apply
        apply(
            kernel, out, tokens, up, down, torch.ones(8, 1), chosen, MoEActivation.SILU, 2, held,
            None, None, None, None, None, False,
        )  # fmt: skip
        outputs.append(out)
    assert outputs[0].abs().sum() > 0
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("kind", "alone", "with_experts"),
    [
        ("qwen3_moe", "moe_intermediate_size 63", "crashes vLLM's CPU build"),  # no width is in the way
        ("deepseek_v3", "moe_intermediate_size 63", "width of shared experts 63"),
    ],
)
def test_only_what_is_split_must_divide(
    vllm_model: Callable[[str], Path], tmp_path: Path, kind: str, alone: str, with_experts: str
) -> None:
    folder = shutil.copytree(vllm_model(kind), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 63}))
    two = vllm_start.VllmSettings(describe_model(folder), max_seq_len=300, tp_size=2)
    for settings, message in ((two, alone), (replace(two, expert_parallel=True), with_experts)):
        with pytest.raises(PreflightError, match=message):
            vllm_start.refuse_impossible(settings, gpu=False)


def test_one_rank_has_nothing_to_share(vllm_model: Callable[[str], Path]) -> None:
    one = vllm_start.VllmSettings(describe_model(vllm_model("qwen3_moe")), max_seq_len=300, expert_parallel=True)
    with pytest.raises(PreflightError, match="one rank, which holds every expert"):
        vllm_start.refuse_impossible(one, gpu=True)
