"""`eyas export` and `eyas import`: draft directories as engines load them, and back.

    eyas export --draft DRAFT --format vllm --output-dir OUT

One set of weights, three readers; what differs is `config.json`:

| | layer ids | names |
|---|---|---|
| vllm | top-level `eagle_aux_hidden_state_layer_ids`, our numbering; without it vLLM falls back to its default, silently | `midlayer.*` |
| sglang | nested `eagle_config.eagle_aux_hidden_state_layer_ids`, mostly our id minus one (`layers.to_sglang`); unknown names are skipped, silently | `midlayer.*` |
| speculators | top-level, our numbering; sizes inside `transformer_layer_config` | `layers.0.*`, `embed_tokens` |

The vllm and sglang directories carry both keys, so either engine loads either, as far as SGLang can run the draft (`sglang_refuses`). All three
hand the auxiliary states over in the order of the layers, so `fc` is written in that order. The measured scale of those states is folded into
it. Later layers of a draft of several take their norm from `input_layernorm` in vLLM and speculators, from `hidden_norm` in SGLang: the
directories for vLLM and SGLang hold it under both names. A draft whose vocabulary is the target's has no map. speculators
needs the embedding in the file (without it, 0.9.0 runs on memory that nobody filled); the two engines share the target's.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.base.errors import InputError
from eyas.base.files import validate_output_directory, write_json
from eyas.base.settings import takes
from eyas.base.tensors import write_tensors
from eyas.drafts.eagle3.model import Draft, DraftConfig
from eyas.drafts.files import DRAFT_FILES, draft_weights, load_draft, refuse_other_draft, save_draft
from eyas.drafts.module import rope_frequencies
from eyas.exporting.settings import ExportSettings
from eyas.target.embedded import EMBEDDED_NAME, resolve_model_path
from eyas.target.layers import to_sglang
from eyas.target.model_files import describe_model
from eyas.target.teacher import load_target_parts

#: What an earlier export may have left: anything else is refused, an eyas draft's manifest where an engine's directory is to go above all.
ENGINE_FILES = {"config.json", "model.safetensors", "README.md", ".*.tmp"}


@takes(ExportSettings)
def export(settings: ExportSettings) -> Path:
    """Write a draft as an engine loads it; returns the directory.

    Args:
        settings: an `ExportSettings`, or its fields in order or by name.

    Raises:
        InputError: a draft that SGLang cannot run, for SGLang; the target's embedding wanted, but the target gone or changed.
        StoreError: not a draft directory. FolderConflictError: the output directory holds something else.
    """
    directory, format, dtype = settings.output_dir, settings.format, settings.dtype
    if directory.resolve() == settings.draft.resolve():
        raise InputError(f"{directory} is the draft itself", "name another --output-dir")
    validate_output_directory(directory, DRAFT_FILES if format == "eyas" else ENGINE_FILES)
    model, manifest = load_draft(settings.draft)
    if format == "eyas":
        kept = {
            k: manifest[k]
            for k in ("target", "dataset_hash", "store", "vocabulary", "training", "acceptance")
            if k in manifest
        }
        refuse_other_draft(directory, training=manifest.get("training"))
        save_draft(directory, model.config, draft_weights(model), **kept)
        return directory
    target = manifest.get("target", {})
    refusal = sglang_refuses(model.config, target.get("architecture"))
    if format == "sglang" and refusal is not None:
        raise refusal
    config, weights = in_layer_order(model.config, engine_weights(model))
    if format != "speculators":
        weights = engine_names(weights, config.num_layers)
    if (settings.embedding or format == "speculators") and not config.own_embedding:
        weights["embed_tokens.weight"] = _embedding(manifest)
    kind = getattr(torch, dtype)
    weights = {k: (v.to(kind) if v.is_floating_point() else v).contiguous() for k, v in weights.items()}
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / "model.safetensors", weights, {"format": "pt"})
    build = speculators_config if format == "speculators" else engine_config
    write_json(directory / "config.json", build(config, dtype, target))
    (directory / "README.md").write_text(readme(format, directory, config, manifest, refusal), encoding="utf-8")
    return directory


def engine_weights(draft: Draft) -> dict[str, Tensor]:
    """Weights under speculators' names, fp32: the scale folded into `fc`, `aux_norms` called `fc_norm`."""
    weights = draft_weights(draft)
    scale = weights.pop("aux_scale")
    if draft.config.norm_aux and not bool((scale == 1).all()):
        raise InputError(
            "a draft with norm_aux and a scale before it cannot be folded", "train it again with this version"
        )
    weights["fc.weight"] = weights["fc.weight"] * scale
    # A draft whose vocabulary is the target's has no map: vLLM and speculators take one for an unknown weight.
    if draft.config.draft_vocab_size == draft.config.vocab_size:
        del weights["d2t"], weights["t2d"]
    return {key.replace("aux_norms.", "fc_norm."): tensor for key, tensor in weights.items()}


def in_layer_order(config: DraftConfig, weights: dict[str, Tensor]) -> tuple[DraftConfig, dict[str, Tensor]]:
    """The same draft with its auxiliary layers ascending, as engines hand their states over: blocks of `fc` and the norms before it move along."""
    order = sorted(range(len(config.aux_layer_ids)), key=lambda place: config.aux_layer_ids[place])
    blocks = weights["fc.weight"].split(config.hidden_size, dim=1)
    norms = {
        f"fc_norm.{new}.weight": weights[f"fc_norm.{old}.weight"] for new, old in enumerate(order) if config.norm_aux
    }
    ids = tuple(config.aux_layer_ids[place] for place in order)
    return replace(config, aux_layer_ids=ids), {
        **weights,
        **norms,
        "fc.weight": torch.cat([blocks[i] for i in order], 1),
    }


def engine_names(weights: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Names that vLLM and SGLang both read: one layer is `midlayer`, the norm of later ones stands under both engines' names."""
    if num_layers == 1:
        return {key.replace("layers.0.", "midlayer."): tensor for key, tensor in weights.items()}
    norms = [f"layers.{i}.input_layernorm.weight" for i in range(1, num_layers)]
    return weights | {key.replace("input_layernorm", "hidden_norm"): weights[key].clone() for key in norms}


def sglang_refuses(config: DraftConfig, architecture: str | None) -> InputError | None:
    """Why SGLang (0.5.23) cannot run a draft for a target of this architecture; None where it can."""
    if config.own_embedding:
        return InputError(
            "SGLang gives every draft its target's embedding, this draft has another one of its own",
            "serve it with vLLM, or train one without --init-from",
        )
    if config.norm_before_residual:
        return InputError(
            "SGLang starts the residual from the state before its norm, this draft was trained with norm_before_residual",
            "train without --norm-before-residual for SGLang",
        )
    try:
        to_sglang(config.aux_layer_ids, architecture, config.target_layers)
    except InputError as error:
        return error
    return None


def rope_fields(config: DraftConfig) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and the scaling (None for plain rope) with yarn's factor on cos and sin spelled out.

    Readers differ in what they make of `mscale` and `mscale_all_dim`, which DeepSeek and Kimi targets have: transformers and vLLM 0.32 derive
    the factor from them (1 for those targets); vLLM 0.26 and SGLang pass them over and would multiply cos and sin by 1.4. Those two read
    `attn_factor`, on top of their own 0.1 ln(factor) + 1; the others `attention_factor`, which is the factor itself. So both are written.
    """
    rope = dict(config.rope)
    theta = float(rope.pop("rope_theta"))
    if rope.get("rope_type", "default") == "default":
        return theta, None
    if rope["rope_type"] == "yarn":
        _, scale = rope_frequencies(config)
        own = 0.1 * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0
        rope = {k: v for k, v in rope.items() if k not in ("mscale", "mscale_all_dim")}
        rope |= {"attention_factor": scale, "attn_factor": scale / own}
        rope.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    return theta, rope


def llama_fields(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """The Llama part of a config, rope in the old form (`rope_theta`, `rope_scaling`) and the new one (`rope_parameters`)."""
    theta, scaling = rope_fields(config)
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta},
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def engine_config(config: DraftConfig, dtype: str, target: dict[str, Any]) -> dict[str, Any]:
    """`config.json` for vLLM and SGLang: the layer ids twice, in each one's numbering."""
    ids = list(config.aux_layer_ids)
    architecture = target.get("architecture")
    nested: dict[str, Any] = {"use_aux_hidden_state": True}
    if sglang_refuses(config, architecture) is None:
        nested["eagle_aux_hidden_state_layer_ids"] = to_sglang(ids, architecture, config.target_layers)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_fields(config, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "num_aux_hidden_states": len(ids),
        "eagle_aux_hidden_state_layer_ids": ids,  # vLLM: what enters layer k, our numbering
        "eagle_config": nested,  # SGLang's numbering
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "fc_norm": config.norm_aux,
    }


def speculators_config(config: DraftConfig, dtype: str, target: dict[str, Any]) -> dict[str, Any]:
    """`config.json` for speculators (and for vLLM, which reads that format too)."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": target.get("id"), "architectures": [target.get("architecture")]},
        },
        "transformer_layer_config": llama_fields(config, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": config.norm_aux,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _embedding(manifest: dict[str, Any]) -> Tensor:
    """[V, H] fp32 of the target that the draft was trained for. Raises InputError where the model of its name has other weights by now."""
    target = manifest.get("target") or {}
    name = target.get("id", "")
    info = describe_model(resolve_model_path(name), name)
    if info.weights_hash != target.get("weights_hash"):
        raise InputError(
            f"{name} has other weights (hash {info.weights_hash}) than the draft's target had ({target.get('weights_hash')})",
            "the draft's files need the embedding that it was trained with: bring that model back to its place",
        )
    return load_target_parts(info).embedding.float()


def readme(
    format: str, directory: Path, config: DraftConfig, manifest: dict[str, Any], refusal: InputError | None
) -> str:
    """How to serve the directory, and what is known of it. refusal: why SGLang cannot run the draft, if so."""
    target = manifest.get("target", {})
    name = target.get("id", "TARGET")
    if name == EMBEDDED_NAME:  # engines know no such name
        name = str(resolve_model_path(name))
    simulated = (manifest.get("acceptance") or {}).get("simulated") or {}
    settings = json.dumps({"method": "eagle3", "model": str(directory.resolve()), "num_speculative_tokens": 3})
    sglang = (
        f"python -m sglang.launch_server --model-path {name} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {directory.resolve()} --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )
    command = sglang if format == "sglang" else f"vllm serve {name} --speculative-config '{settings}'"
    ids = list(config.aux_layer_ids)
    lines = [
        f"# EAGLE-3 draft for {name}",
        "",
        f"    {command}",
        "",
        f"- layers that feed it: {ids} (what enters layer k; top-level key of config.json)",
    ]
    if format != "speculators":
        architecture = target.get("architecture")
        named = None if refusal else to_sglang(ids, architecture, config.target_layers)
        lines.append(
            f"- SGLang cannot run it: {refusal}" if refusal else f"- the same for SGLang: {named} (in `eagle_config`)"
        )
    lines += [
        f"- draft vocabulary: {config.draft_vocab_size} of {config.vocab_size}",
        f"- target: config hash {target.get('config_hash')}, weights hash {target.get('weights_hash')}",
    ]
    if simulated:
        chain = manifest["acceptance"].get("chain")
        lines.append(
            f"- acceptance length, simulated on held-out samples, {chain} draft tokens a step, bonus included: {simulated['acceptance_length']}"
        )
    return "\n".join(lines) + "\n"
