"""Draft folders: eyas's own, and reading those of vLLM, SGLang and speculators to start from.

    <folder>/manifest.json       kind `eyas.draft`: sizes, target, dataset hash, vocabulary hash, how it was trained, its acceptance
             model.safetensors   weights under the names of `eagle3/model.py`, fp32, with `d2t`, `t2d` and `aux_scale`

The vocabulary lives inside the weights and its dataset's hash inside the manifest, so that neither can be taken without the other: a
map made for another dataset is refused by name (`validate_vocabulary`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eyas.base.errors import FolderConflictError, StoreError
from eyas.base.files import content_hash, write_json
from eyas.base.manifest import MANIFEST, made_by, now, read_manifest
from eyas.base.tensors import write_tensors
from eyas.drafts.eagle3.init import DraftVocabulary
from eyas.drafts.eagle3.model import Draft, DraftConfig

KIND = "eyas.draft"
FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
NEEDS = ("config", "target", "vocabulary")
#: What a draft's directory holds that was imported or exported, not trained.
DRAFT_FILES = {MANIFEST, WEIGHTS, ".*.tmp", "acceptance.*"}


def draft_weights(draft: Draft) -> dict[str, Tensor]:
    """The tensors of a draft directory, on the CPU."""
    return kept_weights(draft.config, {k: v.detach().cpu() for k, v in draft.state_dict().items()})


def kept_weights(config: DraftConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What of a draft's state belongs into its files: not the frozen embedding, where it is the target's own (known by its hash)."""
    return {k: v.contiguous() for k, v in weights.items() if config.own_embedding or k != "embed_tokens.weight"}


def save_draft(folder: Path, config: DraftConfig, weights: dict[str, Tensor], **fields: Any) -> dict[str, Any]:
    """Write a draft directory: weights first, under a temporary name, then the manifest. Returns the manifest.

    `fields` should give `target`, `dataset_hash`, `vocabulary`, `training` and `acceptance`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, weights, {"format": "pt", "kind": KIND})
    manifest = {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "created": now(),
        "made_by": made_by(),
        "config": {**asdict(config), "aux_layer_ids": list(config.aux_layer_ids)},
        "layer_index": "stream",
        **fields,
        "vocabulary": {**fields.get("vocabulary", {}), "hash": vocabulary_hash(weights["d2t"])},
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def read_draft_config(manifest: dict[str, Any]) -> DraftConfig:
    """The DraftConfig in a draft directory's manifest. Raises StoreError where it is damaged."""
    config = manifest["config"]
    try:
        return DraftConfig(**{**config, "aux_layer_ids": tuple(config["aux_layer_ids"])})
    except (KeyError, TypeError) as error:
        raise StoreError(
            f"the draft's {MANIFEST} has a damaged `config`: {error}", "train or import it again"
        ) from None


def load_draft(folder: str | Path, embedding: Tensor | None = None) -> tuple[Draft, dict[str, Any]]:
    """Load an eyas draft directory.

    Args:
        embedding: [V, H], the target's, for drafts that have none of their own; without it `embed_tokens` stays NaN (enough for export,
            not for running).

    Returns:
        the draft (fp32) and its manifest.

    Raises:
        StoreError: not a draft directory, weights missing, of other shapes, or a vocabulary that is not the one the manifest names.
    """
    folder = Path(folder)
    manifest = read_draft_manifest(folder)
    draft = Draft(read_draft_config(manifest))
    try:
        weights = load_file(folder / WEIGHTS)
        missing, unexpected = draft.load_state_dict(weights, strict=False)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise StoreError(
            f"{folder / WEIGHTS} does not fit its manifest: {error}", "the draft is damaged; train it again"
        ) from None
    missing = [key for key in missing if key != "embed_tokens.weight" or draft.config.own_embedding]
    if missing or unexpected:
        raise StoreError(f"{folder / WEIGHTS}: missing {missing[:5]}, unknown {unexpected[:5]}", "the draft is damaged")
    validate_map(folder, manifest, draft.d2t)
    if embedding is not None:
        if not draft.config.own_embedding:
            with torch.no_grad():
                draft.embed_tokens.weight.copy_(embedding)
        draft.check_filled()
    return draft, manifest


def read_draft_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an eyas draft. Raises StoreError for anything else, an engine's directory by its name."""
    if (folder / "config.json").exists() and not (folder / MANIFEST).exists():
        raise StoreError(
            f"{folder} is a draft directory of an engine, not of eyas",
            "make it one of eyas's: eyas import --source DIRECTORY --model-path TARGET --output-dir NEW",
        )
    return read_manifest(folder, KIND, FORMAT_VERSION, NEEDS)


def vocabulary_hash(d2t: Tensor) -> str:
    """Content hash of the target ids that a map [D] names."""
    return content_hash((d2t + torch.arange(len(d2t))).numpy().astype("<i8").tobytes())


def validate_map(folder: Path, manifest: dict[str, Any], d2t: Tensor) -> None:
    """Raise StoreError when the weights' vocabulary map is not the one that the manifest names."""
    found, named = vocabulary_hash(d2t), manifest["vocabulary"]["hash"]
    if found != named:
        raise StoreError(
            f"{folder}: the weights' vocabulary map ({found}) is not the one the manifest names ({named})",
            "weights and manifest are of two trainings; train again",
        )


def vocabulary_ids(draft: Draft) -> Tensor:
    """[D] int64 target ids of a draft's vocabulary."""
    return draft.d2t.cpu() + torch.arange(len(draft.d2t))


def validate_vocabulary(folder: Path, manifest: dict[str, Any], vocabulary: DraftVocabulary) -> None:
    """Refuse a directory whose draft vocabulary was counted on another dataset.

    Raises:
        FolderConflictError: naming both hashes.
    """
    have = {"dataset": manifest.get("dataset_hash"), "vocabulary": manifest["vocabulary"]["hash"]}
    want = {"dataset": vocabulary.dataset_hash, "vocabulary": vocabulary.hash}
    if have != want:
        differing = "\n  ".join(
            f"{k} hash: the directory has {have[k]}, this run has {want[k]}" for k in have if have[k] != want[k]
        )
        raise FolderConflictError(
            f"{folder} holds a draft with the vocabulary of other data:\n  {differing}",
            "name a new --output-dir, or start from that draft with --init-from, which makes the vocabulary anew",
        )


def refuse_other_draft(
    folder: Path, training: Any = None, imported_from: str | None = None, aux_layer_ids: Sequence[int] = ()
) -> None:
    """Raise FolderConflictError when the folder holds a draft that is not the one about to be written again."""
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder, KIND, FORMAT_VERSION, NEEDS)
        have = manifest.get("training") or {}
        same = have == (training or {})
        if imported_from is not None:
            same = have.get("imported_from") == imported_from
            same = same and manifest["config"]["aux_layer_ids"] == list(aux_layer_ids)
        if not same:
            raise FolderConflictError(f"{folder} holds another draft", "name a new --output-dir")
