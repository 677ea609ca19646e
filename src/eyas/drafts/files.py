"""Draft folders: eyas's own, and reading those of vLLM, SGLang and speculators to start from.

    <folder>/manifest.json       kind `eyas.draft`: sizes, target, dataset hash, vocabulary hash, how it was trained, its acceptance
             model.safetensors   weights under the names of `draft.py`, fp32, with `d2t`, `t2d` and `aux_scale`

The vocabulary lives inside the weights and its dataset's hash inside the manifest, so that neither can be taken without the other: a
map made for another dataset is refused by name (`check_vocabulary`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.base.disk_full import disk_full_named
from eyas.base.errors import FolderConflictError, InputError, StoreError
from eyas.base.manifest import MANIFEST, content_hash, made_by, now, read_manifest, write_json
from eyas.drafts.eagle3.init import DraftVocabulary, rope_of
from eyas.drafts.eagle3.model import ROPE_KINDS, Draft, DraftConfig, rope_frequencies
from eyas.target.layers import from_sglang

KIND = "eyas.draft"
FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"


def draft_weights(draft: Draft) -> dict[str, Tensor]:
    """The tensors of a draft folder, on the CPU. The frozen embedding is left out: it is the target's own, by hash."""
    return {k: v.detach().cpu().contiguous() for k, v in draft.state_dict().items() if k != "embed_tokens.weight"}


def save_draft(folder: Path, config: DraftConfig, weights: dict[str, Tensor], **fields: Any) -> dict[str, Any]:
    """Write a draft folder: weights first, under a temporary name, then the manifest. Returns the manifest.

    `fields` should give `target`, `dataset_hash`, `vocabulary`, `training` and `acceptance`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{WEIGHTS}.{os.getpid()}.tmp"
    with disk_full_named(folder, sum(x.nbytes for x in weights.values()), temporary):
        save_file(weights, temporary, metadata={"format": "pt", "kind": KIND})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, folder / WEIGHTS)
    ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    manifest = {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "created": now(),
        "made_by": made_by(),
        "config": {**asdict(config), "aux_layer_ids": list(config.aux_layer_ids)},
        "layer_index": "stream",
        **fields,
        "vocabulary": {**fields.get("vocabulary", {}), "hash": content_hash(ids.numpy().astype("<i8").tobytes())},
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def read_draft_config(manifest: dict[str, Any]) -> DraftConfig:
    """The DraftConfig in a draft folder's manifest."""
    config = manifest["config"]
    return DraftConfig(**{**config, "aux_layer_ids": tuple(config["aux_layer_ids"])})


def load_draft(folder: str | Path, embedding: Tensor | None = None) -> tuple[Draft, dict[str, Any]]:
    """Load an eyas draft folder.

    Args:
        embedding: [V, H], the target's; without it `embed_tokens` stays NaN (enough for export, not for running).

    Returns:
        the draft (fp32) and the folder's manifest.

    Raises:
        StoreError: not a draft folder, weights missing, of other shapes, or a vocabulary that is not the one the manifest names.
    """
    folder = Path(folder)
    if (folder / "config.json").exists() and not (folder / MANIFEST).exists():
        raise StoreError(
            f"{folder} is a draft folder of an engine, not of eyas",
            "make it one of eyas's: eyas import --source FOLDER --model-path TARGET --output-dir NEW",
        )
    manifest = read_manifest(folder, KIND, FORMAT_VERSION)
    draft = Draft(read_draft_config(manifest))
    try:
        weights = load_file(folder / WEIGHTS)
        missing, unexpected = draft.load_state_dict(weights, strict=False)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise StoreError(
            f"{folder / WEIGHTS} does not fit its manifest: {error}", "the draft is damaged; train it again"
        ) from None
    missing = [key for key in missing if key != "embed_tokens.weight"]
    if missing or unexpected:
        raise StoreError(f"{folder / WEIGHTS}: missing {missing[:5]}, unknown {unexpected[:5]}", "the draft is damaged")
    found = content_hash(vocabulary_ids(draft).numpy().astype("<i8").tobytes())
    if found != manifest["vocabulary"]["hash"]:
        raise StoreError(
            f"{folder}: the weights' vocabulary map ({found}) is not the one the manifest names ({manifest['vocabulary']['hash']})",
            "weights and manifest are of two trainings; train again",
        )
    if embedding is not None:
        with torch.no_grad():
            draft.embed_tokens.weight.copy_(embedding)
        draft.check_filled()
    return draft, manifest


def vocabulary_ids(draft: Draft) -> Tensor:
    """[D] int64 target ids of a draft's vocabulary."""
    return draft.d2t.cpu() + torch.arange(len(draft.d2t))


def check_vocabulary(folder: Path, manifest: dict[str, Any], vocabulary: DraftVocabulary) -> None:
    """Refuse a folder whose draft vocabulary was counted on another dataset (F15).

    Raises:
        FolderConflictError: naming both hashes.
    """
    have = {"dataset": manifest.get("dataset_hash"), "vocabulary": manifest["vocabulary"]["hash"]}
    want = {"dataset": vocabulary.dataset_hash, "vocabulary": vocabulary.hash}
    if have != want:
        differing = "\n  ".join(
            f"{k} hash: the folder has {have[k]}, this run has {want[k]}" for k in have if have[k] != want[k]
        )
        raise FolderConflictError(
            f"{folder} holds a draft with the vocabulary of other data (fault F15):\n  {differing}",
            "name a new --output-dir, or start from that draft with --init-from, which makes the vocabulary anew",
        )


def same_rope(config: DraftConfig, rope: dict[str, Any]) -> bool:
    """Whether a draft of this shape rotates alike with `rope`, however the settings are spelled."""
    if rope.get("rope_type", "default") not in ROPE_KINDS:
        return False
    mine, theirs = rope_frequencies(config), rope_frequencies(replace(config, rope=rope))
    return torch.allclose(mine[0], theirs[0], rtol=1e-6, atol=0) and math.isclose(mine[1], theirs[1], rel_tol=1e-6)


# --- starting from a draft that exists ------------------------------------------------------------------------------


def read_foreign_draft(folder: Path) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """Weights of a vLLM, SGLang or speculators EAGLE-3 folder under eyas's names, its vocabulary's target ids [D], and its config.

    Raises:
        InputError: no readable folder, or weights that are no EAGLE-3 draft's (unknown names are listed, never skipped).
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        weights = {k: v for file in files for k, v in load_file(file).items()}
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        raise InputError(
            f"{folder} is no readable draft folder: {error}", "name a folder with config.json and *.safetensors"
        ) from None
    renamed: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        name = key.removeprefix("model.").replace("midlayer.", "layers.0.")
        if name.startswith("verifier_"):
            continue  # speculators keeps the target's head beside the draft's
        renamed[name.replace("fc_norm.", "aux_norms.")] = tensor
    # The norm of later layers is called `hidden_norm` in SGLang, `input_layernorm` elsewhere; our folders hold it under both names.
    for name in [n for n in renamed if n.endswith("hidden_norm.weight") and not n.startswith("layers.0.")]:
        renamed.setdefault(name.replace("hidden_norm", "input_layernorm"), renamed[name])
        del renamed[name]
    d2t = renamed.pop("d2t", None)
    renamed.pop("t2d", None)
    renamed.pop("embed_tokens.weight", None)
    if "lm_head.weight" not in renamed or "fc.weight" not in renamed:
        raise InputError(
            f"{folder} holds {', '.join(sorted(weights)[:6]) or 'no weights'}: no EAGLE-3 draft (fc.weight and lm_head.weight are needed)",
            "name the draft's folder, not its target's",
        )
    size = renamed["lm_head.weight"].shape[0]
    ids = torch.arange(size) + (d2t.to(torch.int64) if d2t is not None else 0)
    return renamed, ids, config


def foreign_config(
    raw: dict[str, Any],
    draft_vocab_size: int,
    target_layers: int,
    layer_ids: Sequence[int] | None = None,
    architecture: str | None = None,
) -> DraftConfig:
    """The shape of a foreign draft from its `config.json`, its layers ascending: engines hand states over in this order, whatever the config's.

    layer_ids: our ids, for folders that name none. architecture: the target's, which SGLang's numbering depends on.

    Raises:
        LookupError: no layer ids in either numbering, and none given. InputError: a shape or rope that no draft of ours can have.
    """
    llama = raw.get("transformer_layer_config") or raw
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    aux = layer_ids or raw.get("eagle_aux_hidden_state_layer_ids") or (nested and from_sglang(nested, architecture))
    if not aux:
        raise LookupError("no layer ids")
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    lacking = [key for key in needed if llama.get(key) is None]
    if lacking:
        raise InputError(
            f"the draft's config.json lacks {', '.join(lacking)}",
            "give it the config.json that it was trained or served with",
        )
    return DraftConfig(
        hidden_size=llama["hidden_size"],
        intermediate_size=llama["intermediate_size"],
        num_attention_heads=llama["num_attention_heads"],
        num_key_value_heads=llama.get("num_key_value_heads") or llama["num_attention_heads"],
        head_dim=llama.get("head_dim") or llama["hidden_size"] // llama["num_attention_heads"],
        vocab_size=llama["vocab_size"],
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=tuple(sorted(aux)),
        target_layers=target_layers,
        num_layers=llama.get("num_hidden_layers", 1),
        rms_norm_eps=llama.get("rms_norm_eps", 1e-6),
        rope=rope_of(llama),
        max_position_embeddings=llama.get("max_position_embeddings", 4096),
        norm_aux=bool(raw.get("fc_norm", False)),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_output=bool(raw.get("norm_output", False)),
    )


#: Parts of a draft's shape that change what its weights mean, and the flag that sets each.
SHAPE_FLAGS = {
    "num_attention_heads": "--heads",
    "num_key_value_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "intermediate_size": "--mlp",
    "num_layers": "--layers",
    "aux_layer_ids": "--aux-layers",
    "norm_aux": "--norm-aux",
    "norm_before_residual": "--norm-before-residual",
    "norm_output": "--norm-output",
}


def _refuse_other_shape(folder: Path, theirs: DraftConfig, mine: DraftConfig) -> None:
    # Several of these leave every tensor's shape as it is: the weights would load, and mean something else.
    differing = {
        k: (getattr(theirs, k), getattr(mine, k)) for k in SHAPE_FLAGS if getattr(theirs, k) != getattr(mine, k)
    }
    if differing:
        lines = [f"{k}: {there}, this draft has {here}" for k, (there, here) in differing.items()]
        raise InputError(
            f"{folder} is of another shape than this draft:\n  " + "\n  ".join(lines),
            f"set {', '.join(SHAPE_FLAGS[k] for k in differing)} to what that draft has",
        )
    if not same_rope(mine, theirs.rope):
        raise InputError(
            f"{folder} was trained with rope {theirs.rope}, this draft would use {mine.rope}",
            "give the same rope with --rope, or train from scratch",
        )


@torch.no_grad()
def init_from(draft: Draft, folder: Path, architecture: str | None = None) -> list[str]:
    """Start a freshly initialised draft from an existing one (eyas, vLLM, SGLang or speculators folder), in place.

    The draft keeps its own vocabulary, counted on the present data: head rows of tokens that both know are taken over, the others keep
    the target's. A foreign draft's `fc` expects unscaled states, so the measured scale is divided out of it.
    architecture: the target's, for SGLang's numbering of layers.

    Returns:
        lines that say what was taken over.

    Raises:
        InputError: shape, layer ids, norms or rope differ (each is named), or the folder is no EAGLE-3 draft.
    """
    if (folder / MANIFEST).exists():
        other, _ = load_draft(folder)
        theirs, weights, ids = other.config, draft_weights(other), vocabulary_ids(other)
        scale = weights.pop("aux_scale")
        weights.pop("d2t")
        weights.pop("t2d")
    else:
        weights, ids, raw = read_foreign_draft(folder)
        scale = torch.ones_like(draft.aux_scale)
        try:
            theirs = foreign_config(raw, len(ids), draft.config.target_layers, None, architecture)
        except LookupError:
            theirs = foreign_config(raw, len(ids), draft.config.target_layers, draft.config.aux_layer_ids)
    _refuse_other_shape(folder, theirs, draft.config)
    mine = dict(draft.named_parameters())
    head = weights.pop("lm_head.weight").float()
    wrong = [f"{k}: not of this draft" for k in weights if k not in mine]
    wrong += [
        f"{k}: {list(weights[k].shape) if k in weights else 'missing'}, this draft has {list(p.shape)}"
        for k, p in mine.items()
        if k not in ("embed_tokens.weight", "lm_head.weight") and (k not in weights or weights[k].shape != p.shape)
    ]
    if wrong or head.shape[1] != draft.config.hidden_size:
        raise InputError(
            f"{folder} does not fit this draft:\n  " + "\n  ".join(wrong[:8]),
            "set the sizes by flags to those of the draft",
        )
    for key, tensor in weights.items():
        mine[key].copy_(tensor.float())
    draft.fc.weight.mul_((scale / draft.aux_scale.cpu()).to(draft.fc.weight))
    place = {int(t): j for j, t in enumerate(ids.tolist())}
    own = vocabulary_ids(draft).tolist()
    shared = [(j, place[t]) for j, t in enumerate(own) if t in place]
    if shared:
        here, there = (torch.tensor(side) for side in zip(*shared, strict=True))
        draft.lm_head.weight[here] = head[there].to(draft.lm_head.weight)
    return [
        f"{len(weights)} tensors from {folder}",
        f"head rows taken over: {len(shared)} of {len(own)}, the others are the target's",
    ]
