"""Tiny random models in shapes that vLLM's CPU build runs, and what the vLLM tests share."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from eyas.base.files import content_hash
from eyas.data.dataset import Sample
from eyas.engines.base import CaptureResult
from eyas.engines.vllm.engine import VllmEngine
from eyas.engines.vllm.start import VllmSettings
from eyas.store.format import StoreSpec, write_store_manifest
from eyas.target.model_files import describe_model

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
#: Latent rank and rope width as in the originals: the CPU kernels know no others.
MLA = {"kv_lora_rank": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
EXPERTS = {"moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}


def tiny_config(kind: str) -> Any:
    """`llama`, `gemma3` (no auxiliary-state interface in vLLM), `qwen3_moe`, `deepseek_v3` or `gpt2` (no auxiliary-state interface in vLLM)."""
    import transformers as t

    if kind == "llama":
        return t.LlamaConfig(**COMMON)
    if kind == "gemma3":
        return t.Gemma3TextConfig(**COMMON, head_dim=32, sliding_window=32, query_pre_attn_scalar=32)
    if kind == "qwen3_moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        return t.Qwen3MoeConfig(**COMMON, head_dim=32, decoder_sparse_step=1, **experts)
    if kind == "deepseek_v3":
        config = t.DeepseekV3Config(
            **{**COMMON, "num_key_value_heads": 4}, **MLA, **EXPERTS, n_group=2, topk_group=1, first_k_dense_replace=1
        )
        # transformers knows no other way and leaves these out; without them vLLM routes by softmax.
        config.topk_method, config.scoring_func = "noaux_tc", "sigmoid"
        return config
    if kind == "gpt2":
        return t.GPT2Config(vocab_size=VOCABULARY, n_positions=512, n_embd=128, n_layer=4, n_head=4)
    raise ValueError(kind)


def make_model(kind: str, folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder in fp32; norms are not left at one, so that states before and after them differ."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.08)
    model.float().save_pretrained(folder)
    return folder


def make_quantised(folder: Path, plain: Path, kind: str) -> Path:
    """A Llama in compressed-tensors, `int4` (groups of 32, weights only) or `fp8` (rows, activations per token), and in `plain` the same
    numbers as bfloat16."""
    import shutil

    import torch
    from compressed_tensors.compressors import pack_to_int32
    from safetensors.torch import load_file, save_file

    make_model("llama", plain)
    shutil.copytree(plain, folder)
    stored, same = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        stored[name] = same[name] = weight.bfloat16()
        base = name.removesuffix("weight")
        if "proj" not in name:
            continue
        if kind == "int4":
            groups = weight.unflatten(1, (-1, 32))
            scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
            rounded = (groups / scale).round().clamp(-8, 7)
            del stored[name]
            stored[base + "weight_packed"] = pack_to_int32(rounded.flatten(1).to(torch.int8), 4)
            stored[base + "weight_scale"] = scale[..., 0].bfloat16()
            stored[base + "weight_shape"] = torch.tensor(weight.shape)
            same[name] = (rounded * scale).flatten(1).bfloat16()
        else:
            scale = weight.abs().amax(-1, keepdim=True) / 448
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[base + "weight_scale"] = scale
            same[name] = (stored[name].float() * scale).bfloat16()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(same, plain / "model.safetensors", {"format": "pt"})
    config = {**json.loads((folder / "config.json").read_text()), "dtype": "bfloat16"}
    (plain / "config.json").write_text(json.dumps(config))
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    inputs = None
    if kind == "fp8":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if kind == "int4" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_kimi(folder: Path, language_model: Path) -> Path:
    """`KimiK25ForConditionalGeneration` around a DeepSeek-V3 folder: the wrapper's config and its own weight names."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    text = json.loads((language_model / "config.json").read_text())
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_hidden_layers": 1,
            "mm_hidden_size": 64,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    media = {"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 1024, "patch_limit_on_one_side": 32}
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": media}))
    weights = load_file(language_model / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def random_samples(lengths: list[int], seed: int = 0, vocabulary: int = VOCABULARY) -> list[Sample]:
    random = np.random.default_rng(seed)
    return [
        Sample.of(random.integers(3, vocabulary, n).astype(np.int32), (random.random(n) > 0.5).astype(np.uint8))
        for n in lengths
    ]


def write_dataset(path: Path, samples: list[Sample]) -> Path:
    with open(path, "w", encoding="utf-8") as file:
        for sample in samples:
            row = {"input_ids": sample.token_ids.tolist(), "loss_mask": sample.loss_mask.tolist()}
            file.write(json.dumps(row) + "\n")
    return path


def reference_states(model_folder: Path, samples: list[Sample], layer_ids: list[int]) -> dict[str, dict[int, Any]]:
    """Sample id -> layer id -> [T, H] by transformers in fp32, one sample at a time; id N is taken at the final norm's door."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    decoder = model.get_decoder()
    norm = decoder.norm if hasattr(decoder, "norm") else decoder.ln_f
    kept: list[Any] = []
    norm.register_forward_pre_hook(lambda _module, args: kept.append(args[0]))
    depth = model.config.get_text_config().num_hidden_layers
    states = {}
    for sample in samples:
        kept.clear()
        with torch.no_grad():
            out = model(torch.from_numpy(sample.token_ids).long()[None], output_hidden_states=True, use_cache=False)
        states[sample.id] = {i: (kept[0] if i == depth else out.hidden_states[i])[0] for i in layer_ids}
    return states


def worst_error(states: Any, reference: dict[str, dict[int, Any]]) -> dict[int, float]:
    """Layer id -> largest relative L2 over the samples, of a store against `reference`."""
    worst: dict[int, float] = {}
    for one, layers in reference.items():
        sample = states[states.index_of(one)]
        for layer, want in layers.items():
            have = sample.hidden[layer].float()
            assert have.shape == want.shape
            worst[layer] = max(worst.get(layer, 0.0), float((have - want).norm() / want.norm()))
    return worst


def capture(
    engine: Any, samples: Sequence[Sample], folder: Path, layer_ids: Sequence[int] | None = None, **more: Any
) -> CaptureResult:
    """Run the engine's capture into a new store and close its manifest."""
    folder.mkdir(exist_ok=True)
    ids = tuple(layer_ids or engine.layer_ids)
    dtype = engine.settings.dtype
    identity = {"hash": content_hash("".join(sorted(s.id for s in samples)).encode())}
    spec = StoreSpec(engine.settings.model.for_manifest(), ids, dtype, dtype, identity, engine.description)
    write_store_manifest(folder, spec, "open")
    options = {"shard_bytes": 2**18, "done": (), "progress": lambda _: None, "stop": threading.Event(), **more}
    result = engine.capture([samples], folder, spec, **options)
    write_store_manifest(folder, spec, "complete", shards=result.shards)
    return result


@contextlib.contextmanager
def vllm_within() -> Iterator[None]:
    """vLLM with one rank starts within this process, in four seconds; processes that each import it need thirty. What it changes here is put back."""
    import torch
    from llvmlite.binding import ffi
    from vllm.envs import disable_envs_cache

    # vLLM asks every object in every module for its __dict__, and llvmlite's library calls whatever it is asked for a function.
    function_of = ffi._lib_wrapper.__getattr__

    def attribute(library: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return function_of(library, name)

    with (
        mock.patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
        mock.patch.object(torch, "set_num_threads", torch.set_num_threads),
        mock.patch.object(ffi._lib_wrapper, "__getattr__", attribute),
    ):
        disable_envs_cache()  # filled as an engine starts
        yield
    disable_envs_cache()


@contextlib.contextmanager
def running(model: Path, layer_ids: list[int], *, processes: bool = False, **settings: Any) -> Iterator[VllmEngine]:
    """A loaded engine; one of several ranks, or with `processes`, has processes of its own, as a user's has."""
    usual = {"dtype": "float32", "max_seq_len": 300, "step_tokens": 128, "batch_size": 8}
    chosen = VllmSettings(describe_model(model), **{**usual, **settings})
    alone = chosen.tp_size * chosen.pp_size == 1 and not processes
    engine = VllmEngine(chosen)
    try:
        with vllm_within() if alone else contextlib.nullcontext():
            engine.load(layer_ids)
        yield engine
    finally:
        engine.close()


def eyas_process(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    """The command line as a process of its own session, output to pipes."""
    source = str(Path(__file__).parents[1] / "src")
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", "eyas", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment},
        start_new_session=True,
    )
