"""Drafts that others wrote: a vLLM, SGLang or speculators EAGLE-3 directory read into eyas, by `eyas import` and `eyas train --init-from`.

What is read is all of it. Every tensor of such a directory is kept, or compared with the target's own and found equal; every key of its
`config.json` that changes what the weights compute is carried over or refused by name. Nothing is replaced in silence:

| in the directory | |
|---|---|
| `embed_tokens` | the target's own: left to the target. Another one: kept (`DraftConfig.own_embedding`) |
| `lm_head` | kept; without one, as engines do, the target's |
| `d2t`, `t2d` | either is enough; both must say the same tokens |
| `verifier_*` (the target's head and norm, kept by speculators) | must be the target's |
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eyas.base.errors import InputError
from eyas.base.files import content_hash, validate_output_directory
from eyas.base.manifest import MANIFEST
from eyas.base.settings import takes
from eyas.drafts.eagle3.init import rope_of
from eyas.drafts.eagle3.model import Draft, DraftConfig
from eyas.drafts.files import (
    DRAFT_FILES,
    KIND,
    draft_weights,
    load_draft,
    refuse_other_draft,
    save_draft,
    vocabulary_ids,
)
from eyas.drafts.module import ROPE_KINDS, rope_frequencies
from eyas.exporting.settings import ImportSettings
from eyas.target.embedded import resolve_model_path
from eyas.target.layers import from_sglang, resolve_layer_ids
from eyas.target.model_files import ModelInfo, describe_model
from eyas.target.teacher import TargetParts, load_target_parts
from eyas.target.weights import find_weights


@dataclass(frozen=True)
class ForeignDraft:
    """An engine's directory. weights: under eyas's names, without the vocabulary, embedding and what is the target's; fp32.

    ids: [D] int64 target ids of the draft vocabulary. embedding: [V, H] as stored, if the directory holds one. verifier: the target's
    own tensors beside the draft's. config: `config.json`; llama: the part of it with the sizes.
    """

    path: Path
    config: dict[str, Any]
    llama: dict[str, Any]
    weights: dict[str, Tensor]
    ids: Tensor
    embedding: Tensor | None
    verifier: dict[str, Tensor]

    def shape(
        self, target_layers: int, layer_ids: Sequence[int] | None = None, architecture: str | None = None
    ) -> DraftConfig:
        """Its DraftConfig, the layers ascending: engines hand states over in this order, whatever the config's.

        layer_ids: our ids, for directories that name none. architecture: the target's, which SGLang's numbering depends on.

        Raises:
            LookupError: no layer ids in either numbering, and none given. InputError: a shape or rope that no draft of ours can have.
        """
        raw, llama = self.config, self.llama
        nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        aux = layer_ids or raw.get("eagle_aux_hidden_state_layer_ids") or (nested and from_sglang(nested, architecture))
        if not aux:
            raise LookupError("no layer ids")
        return DraftConfig(
            hidden_size=llama["hidden_size"],
            intermediate_size=llama["intermediate_size"],
            num_attention_heads=llama["num_attention_heads"],
            num_key_value_heads=llama.get("num_key_value_heads") or llama["num_attention_heads"],
            head_dim=llama.get("head_dim") or llama["hidden_size"] // llama["num_attention_heads"],
            vocab_size=llama["vocab_size"],
            draft_vocab_size=len(self.ids),
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


def read_foreign_draft(path: Path) -> ForeignDraft:
    """Read an engine's directory.

    Raises:
        InputError: not readable, not an EAGLE-3 draft, a vocabulary that contradicts itself, or a key of its config that eyas's draft
            cannot follow (each is named).
    """
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        tensors = {k: v for file in find_weights(path).files for k, v in load_file(file).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(
            f"{path} is not a readable draft directory: {error}", "name a directory with config.json and *.safetensors"
        ) from None
    llama = config.get("transformer_layer_config") or config
    if lacking := [
        k for k in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size") if not llama.get(k)
    ]:
        raise InputError(
            f"the draft's config.json lacks {', '.join(lacking)}",
            "give it the config.json that it was trained or served with",
        )
    refuse_what_eyas_would_not_follow(path, config, llama)
    weights = {k.removeprefix("model.").replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
    weights = {k.replace("fc_norm.", "aux_norms."): v for k, v in weights.items()}
    if "fc.weight" not in weights:
        raise InputError(
            f"{path} holds {', '.join(sorted(tensors)[:6]) or 'no weights'}: not an EAGLE-3 draft (no fc.weight)",
            "name the draft's directory, not its target's",
        )
    # The norm of later layers is called `hidden_norm` in SGLang, `input_layernorm` elsewhere; our exports hold it under both names.
    for name in [n for n in weights if n.endswith("hidden_norm.weight") and not n.startswith("layers.0.")]:
        norm, other = weights.pop(name), name.replace("hidden_norm", "input_layernorm")
        if not torch.equal(weights.setdefault(other, norm), norm):
            raise InputError(f"{path}: {name} and {other} differ, and only one of them can be the layer's norm")
    verifier = {name: weights.pop(name) for name in list(weights) if name.startswith("verifier_")}
    embedding = weights.pop("embed_tokens.weight", None)
    ids = _vocabulary(path, config, llama["vocab_size"], weights)
    weights = {k: v.float() if v.is_floating_point() else v for k, v in weights.items()}
    return ForeignDraft(path, config, llama, weights, ids, embedding, verifier)


def refuse_what_eyas_would_not_follow(path: Path, config: dict[str, Any], llama: dict[str, Any]) -> None:
    """Raise InputError naming the first setting of a draft's config that changes its arithmetic and has no counterpart in DraftConfig."""
    eagle = config.get("eagle_config") or {}
    rope = llama.get("rope_parameters") or {}
    turned = rope.get("partial_rotary_factor", llama.get("partial_rotary_factor"))
    settings = {
        "speculators_model_type": (config.get("speculators_model_type"), (None, "eagle3")),
        "norm_before_fc": (bool(eagle.get("norm_before_fc") or config.get("norm_before_fc")), (False,)),
        "use_aux_hidden_state": (eagle.get("use_aux_hidden_state", True), (True,)),
        "logit_scale": (config.get("logit_scale"), (None, 1)),
        "hidden_act": (llama.get("hidden_act"), (None, "silu")),
        "partial_rotary_factor": (turned, (None, 1)),
        "target_hidden_size": (config.get("target_hidden_size"), (None, llama["hidden_size"])),
        "layer_types": ("sliding_attention" in (llama.get("layer_types") or ()), (False,)),
    }
    for name, (found, known) in settings.items():
        if found not in known:
            raise InputError(
                f"{path}: config.json sets {name} to {llama.get(name, found)!r}, which a draft of eyas does not compute",
                f"only drafts with {name} {' or '.join(map(repr, known))} can be read",
            )


def _vocabulary(path: Path, config: dict[str, Any], vocab_size: int, weights: dict[str, Tensor]) -> Tensor:
    """[D] int64 target ids, from `d2t` or `t2d`, which are taken out of `weights`."""
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    head = weights.get("lm_head.weight")
    said = None if t2d is None else t2d.nonzero().flatten()
    if d2t is not None:
        ids = d2t.to(torch.int64) + torch.arange(len(d2t))
    elif said is not None:
        ids = said
    else:
        ids = torch.arange(vocab_size)
    size = config.get("draft_vocab_size") or len(ids)
    if head is None and len(ids) != vocab_size:
        raise InputError(f"{path} has a draft vocabulary and no lm_head.weight", "name the whole draft's directory")
    wrong = None
    if (head is not None and len(head) != len(ids)) or size != len(ids):
        rows = "no" if head is None else len(head)
        wrong = f"lm_head has {rows} rows, d2t or t2d {len(ids)} tokens, config.json says {size}"
    elif len(ids.unique()) != len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        wrong = (
            f"d2t gives ids from {int(ids.min())} to {int(ids.max())}, {len(ids.unique())} different ones of {len(ids)}"
        )
    elif len(ids) == vocab_size and not torch.equal(ids, torch.arange(vocab_size)):
        wrong = "it names every token, in another order than the target's"
    elif said is not None and (len(t2d) != vocab_size or not torch.equal(said, ids.sort().values)):  # type: ignore[arg-type]
        wrong = f"t2d marks {len(said)} of {len(t2d)} tokens, not those of d2t"  # type: ignore[arg-type]
    if wrong:
        raise InputError(f"{path}: its vocabulary contradicts itself: {wrong} (the target has {vocab_size})")
    return ids


def own_embedding(found: ForeignDraft, embedding: Tensor) -> Tensor | None:
    """The directory's embedding if it is not the target's ([V, H]), else None. Equal means: to the last bit of the dtype it is stored in.

    Raises:
        InputError: of another shape.
    """
    own = found.embedding
    if own is None:
        return None
    if own.shape != embedding.shape:
        raise InputError(
            f"{found.path}: embed_tokens.weight is {list(own.shape)}, the target's {list(embedding.shape)}",
            "give --model-path the draft's own target",
        )
    return None if torch.equal(own, embedding.to(own.dtype)) else own


def check_verifier(found: ForeignDraft, parts: TargetParts) -> None:
    """Raise InputError where the target's own tensors that speculators keeps beside a draft are not this target's."""
    for name, tensor in found.verifier.items():
        heads = (parts.head, parts.head[found.ids])
        norms = (parts.norm, parts.norm - 1)  # as stored by a target that multiplies by 1 + weight
        ours = {"verifier_lm_head.weight": heads, "verifier_norm.weight": norms}.get(name, ())
        if not any(tensor.shape == one.shape and torch.equal(tensor, one.to(tensor.dtype)) for one in ours):
            raise InputError(
                f"{found.path}: {name} is not this target's: the draft was trained for another one",
                "give --model-path the draft's own target",
            )


# --- eyas import ----------------------------------------------------------------------------------------------------


@takes(ImportSettings)
def import_draft(settings: ImportSettings) -> Path:
    """Read a vLLM, SGLang or speculators EAGLE-3 directory into an eyas draft directory, which is returned.

    Args:
        settings: an `ImportSettings`, or its fields in order or by name.

    Raises:
        InputError: not an EAGLE-3 draft, weights unknown or missing (each named), or the layer ids not to be found.
        FolderConflictError: the output directory holds something else, another draft included.
    """
    source, output_dir, layer_ids = settings.source, settings.output_dir, settings.layer_ids
    model_path = settings.model_path
    _refuse_own_directory(source)
    validate_output_directory(output_dir, DRAFT_FILES)
    info = describe_model(resolve_model_path(model_path), model_path)
    found = read_foreign_draft(source)
    try:
        config = found.shape(info.num_layers, layer_ids, info.architecture)
    except LookupError:
        raise InputError(
            f"{source}: config.json names no layers that feed the draft",
            "give them with --layer-ids (eyas's numbering)",
        ) from None
    named = found.config.get("eagle_aux_hidden_state_layer_ids")
    if layer_ids and named and sorted(layer_ids) != sorted(named):
        raise InputError(
            f"{source}: config.json names layers {sorted(named)}, --layer-ids {sorted(layer_ids)}",
            "leave --layer-ids out, or correct the config",
        )
    resolve_layer_ids(config.aux_layer_ids, info.num_layers, with_final=False)  # in range, none twice
    refuse_other_draft(output_dir, imported_from=str(source), aux_layer_ids=config.aux_layer_ids)
    if config.vocab_size != info.vocab_size or config.hidden_size != info.hidden_size:
        raise InputError(
            f"{source} is a draft for vocabulary {config.vocab_size} and width {config.hidden_size}; {model_path} has "
            f"{info.vocab_size} and {info.hidden_size}",
            "give --model-path the draft's own target",
        )
    parts = load_target_parts(info)
    check_verifier(found, parts)
    embedding = own_embedding(found, parts.embedding)
    config = replace(config, own_embedding=embedding is not None)
    weights = {
        "lm_head.weight": parts.head.float(),  # a draft without a head of its own shares the target's
        **found.weights,
        "d2t": found.ids - torch.arange(len(found.ids)),
        "t2d": torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, found.ids, True),
        "aux_scale": torch.ones(len(config.aux_layer_ids) * config.hidden_size),
    }
    if embedding is not None:
        weights["embed_tokens.weight"] = embedding.float()
    draft = Draft(config)
    _require_fitting(source, weights, draft)
    draft.load_state_dict(weights, strict=False)
    save_draft(
        output_dir,
        config,
        draft_weights(draft),
        target=info.for_manifest(),
        dataset_hash=None,
        training={
            "imported_from": str(source),
            "config_hash": content_hash(json.dumps(found.config, sort_keys=True).encode()),
        },
    )
    return output_dir


def _refuse_own_directory(source: Path) -> None:
    """Raises InputError for a directory of eyas itself, and says which kind it is."""
    try:
        kind = json.loads((source / MANIFEST).read_text(encoding="utf-8"))["kind"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    if kind == KIND:
        raise InputError(
            f"{source} is eyas's own draft directory already", "use it as it is, or copy it: eyas export --format eyas"
        )
    if str(kind).startswith("eyas."):
        what = {"eyas.dataset": "a token dataset", "eyas.states": "a state store"}.get(
            kind, f"a directory of kind {kind}"
        )
        raise InputError(
            f"{source} is {what} of eyas's, not a draft", "give --source a vLLM, SGLang or speculators directory"
        )


def _require_fitting(source: Path, weights: dict[str, Tensor], draft: Draft) -> None:
    """Raise InputError naming weights that the draft lacks, has not, or has in another shape. Its embedding may come from the target."""
    want = draft.state_dict()
    missing = sorted(want.keys() - weights.keys() - {"embed_tokens.weight"})
    unknown = sorted(weights.keys() - want.keys())
    shapes = [
        f"{k}: {list(weights[k].shape)}, this draft has {list(v.shape)}"
        for k, v in want.items()
        if k in weights and weights[k].shape != v.shape
    ]
    if missing or unknown or shapes:
        lines = [f"weights missing {missing[:5]}, unknown {unknown[:5]}"] if missing or unknown else []
        raise InputError(
            f"{source} does not fit this draft:\n  " + "\n  ".join([*lines, *shapes[:8]]),
            "eyas reads EAGLE-3 drafts of Llama's kind; --init-from needs the sizes of that draft, set by flags",
        )


# --- eyas train --init-from -----------------------------------------------------------------------------------------

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


def same_rope(config: DraftConfig, rope: dict[str, Any]) -> bool:
    """Whether a draft of this shape rotates alike with `rope`, however the settings are spelled."""
    if rope.get("rope_type", "default") not in ROPE_KINDS:
        return False
    ours, theirs = rope_frequencies(config), rope_frequencies(replace(config, rope=rope))
    return torch.allclose(ours[0], theirs[0], rtol=1e-6, atol=0) and math.isclose(ours[1], theirs[1], rel_tol=1e-6)


def _refuse_other_shape(source: Path, theirs: DraftConfig, ours: DraftConfig) -> None:
    # Several of these leave every tensor's shape as it is: the weights would load, and mean something else.
    differing = {
        k: (getattr(theirs, k), getattr(ours, k)) for k in SHAPE_FLAGS if getattr(theirs, k) != getattr(ours, k)
    }
    if differing:
        lines = [f"{k}: {has}, this draft has {wants}" for k, (has, wants) in differing.items()]
        raise InputError(
            f"{source} is of another shape than this draft:\n  " + "\n  ".join(lines),
            f"set {', '.join(SHAPE_FLAGS[k] for k in differing)} to what that draft has",
        )
    if not same_rope(ours, theirs.rope):
        raise InputError(
            f"{source} was trained with rope {theirs.rope}, this draft would use {ours.rope}",
            "give the same rope with --rope, or train from scratch",
        )


@torch.no_grad()
def init_from(draft: Draft, source: Path, info: ModelInfo | None = None, parts: TargetParts | None = None) -> list[str]:
    """Start a freshly initialised draft from an existing one (an eyas, vLLM, SGLang or speculators directory), in place.

    The draft keeps its own vocabulary, counted on the present data: head rows of tokens that both know are taken over, the others keep
    the target's. An embedding that is not the target's is taken over too, and stays with the draft (`DraftConfig.own_embedding`). A
    foreign draft's `fc` expects unscaled states, so the measured scale is divided out of it.

    Args:
        info, parts: of the target, for SGLang's numbering of layers and to tell a draft of another target.

    Returns:
        lines that say what was taken over, and what was not.

    Raises:
        InputError: shape, layer ids, norms or rope differ (each is named), or the directory is not an EAGLE-3 draft's.
    """
    ours, lines = draft.config, []
    if (source / MANIFEST).exists():
        other, manifest = load_draft(source)
        theirs, weights, ids = other.config, draft_weights(other), vocabulary_ids(other)
        scale, embedding = weights.pop("aux_scale"), weights.pop("embed_tokens.weight", None)
        del weights["d2t"], weights["t2d"]
        trained_for = (manifest.get("target") or {}).get("weights_hash")
        if embedding is None and info is not None and trained_for not in (None, info.weights_hash):
            lines.append("it was trained for other weights of the target: its embedding is now this target's")
    else:
        found = read_foreign_draft(source)
        weights, ids, scale = found.weights, found.ids, torch.ones_like(draft.aux_scale)
        architecture = None if info is None else info.architecture
        try:
            theirs = found.shape(ours.target_layers, None, architecture)
        except LookupError:
            theirs = found.shape(ours.target_layers, ours.aux_layer_ids)
        if parts is not None:
            check_verifier(found, parts)
        embedding = own_embedding(found, draft.embed_tokens.weight.cpu())
    _refuse_other_shape(source, theirs, ours)
    head = weights.pop("lm_head.weight", draft.lm_head.weight.new_zeros(0, ours.hidden_size)).float()
    own_head, kept = (
        draft.lm_head.weight,
        {k: v for k, v in draft.state_dict().items() if k in ("d2t", "t2d", "aux_scale")},
    )
    _require_fitting(source, {**weights, **kept, "lm_head.weight": own_head}, draft)
    parameters = dict(draft.named_parameters())
    for key, tensor in weights.items():
        parameters[key].copy_(tensor.float())
    draft.fc.weight.mul_((scale / draft.aux_scale.cpu()).to(draft.fc.weight))
    if embedding is not None:
        draft.embed_tokens.weight.copy_(embedding)
        draft.config = replace(ours, own_embedding=True)
        lines.append("its embedding is not the target's: taken over, and kept with the draft")
    place = {int(t): j for j, t in enumerate(ids.tolist()) if j < len(head)}
    vocabulary = vocabulary_ids(draft).tolist()
    shared = [(j, place[t]) for j, t in enumerate(vocabulary) if t in place]
    if shared:
        to, of = (torch.tensor(side) for side in zip(*shared, strict=True))
        own_head[to] = head[of].to(own_head)
    return [
        f"{len(weights)} tensors from {source}",
        f"head rows taken over: {len(shared)} of {len(vocabulary)}, the others are the target's",
        *lines,
    ]
