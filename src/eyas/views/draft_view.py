"""`eyas inspect DRAFT`: what a draft's folder says of the draft and of the run that trains it. Weights are not loaded, only their header is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eyas.base.errors import StoreError
from eyas.base.manifest import MANIFEST
from eyas.drafts.files import KIND, WEIGHTS, read_draft_config, read_draft_manifest, validate_map
from eyas.evaluation.statistics import interval_text
from eyas.runs.run import read_json
from eyas.target.layers import describe_layer
from eyas.target.model_files import human_bytes
from eyas.training.checkpoints import list_checkpoints
from eyas.training.figures import read_metrics
from eyas.training.trainer import SETTINGS
from eyas.views.train_console import describe


def is_draft(folder: Path) -> bool:
    """Whether a folder is a draft's: of eyas (also one whose training has not saved a draft yet), or of an engine."""
    if (folder / MANIFEST).exists():
        return read_json(folder / MANIFEST).get("kind") == KIND
    return (folder / SETTINGS).exists() or "draft_vocab_size" in read_json(folder / "config.json")


def inspect_draft(folder: Path) -> None:
    """Print `describe_draft`. Raises as that."""
    from eyas.views.console import show_rows

    show_rows(describe_draft(folder))


def describe_draft(folder: Path) -> list[tuple[str, str]]:
    """(name, what) of everything that a draft's folder says.

    Raises:
        StoreError: an engine's folder, no readable manifest, weights missing or damaged, or of another vocabulary than the manifest's.
    """
    if not (folder / MANIFEST).exists():
        if not (folder / SETTINGS).exists():
            read_draft_manifest(folder)  # raises
        settings = read_json(folder / SETTINGS).get("settings", {})
        return [
            ("draft", f"{folder}: none yet, the first evaluation of its training saves one"),
            ("target", str(settings.get("model_path"))),
            ("trained on", str(settings.get("states"))),
            *_run(folder, settings, None),
        ]
    manifest = read_draft_manifest(folder)
    config, target, training = read_draft_config(manifest), manifest["target"], manifest.get("training") or {}
    parameters, size = _weights(folder, manifest)
    N = config.target_layers
    norms = [name for name in ("norm_aux", "norm_before_residual", "norm_output") if getattr(config, name)]
    heads = f"{config.num_attention_heads} heads ({config.num_key_value_heads} key-value) of {config.head_dim}"
    vocabulary = f"{config.draft_vocab_size:,} of the target's {config.vocab_size:,} tokens"
    if "coverage" in manifest["vocabulary"]:
        covered = 100 * manifest["vocabulary"]["coverage"]
        vocabulary += f", covers {covered:.2f} % of the supervised tokens that it was trained on"
    rows = [
        ("draft", f"{folder} (format {manifest['format_version']}, saved {manifest['created']})"),
        ("target", f"{target['id']}, {target['architecture']}, {N} layers, H {target['hidden_size']}"),
        (
            "shape",
            f"{config.num_layers} {_plural(config.num_layers, 'layer')}, H {config.hidden_size}, {heads}, MLP {config.intermediate_size}",
        ),
        ("rope", f"{config.rope.get('rope_type', 'default')}, base {config.rope['rope_theta']:g}"),
        ("norms", ", ".join(norms) or "plain EAGLE-3"),
        ("weights", f"{parameters / 1e6:,.2f} M parameters without the embedding, {human_bytes(size)}"),
        (
            "layer ids",
            f"{', '.join(describe_layer(i, N) for i in config.aux_layer_ids)} of the target's 0..{N}, side by side in this order",
        ),
        ("vocabulary", vocabulary),
    ]
    if "imported_from" in training:
        return [*rows, ("imported from", training["imported_from"]), *_measured(folder)]
    settings = training.get("settings", {})
    rows.append(("trained on", _store(manifest)))
    rows += _run(folder, settings, training)
    acceptance = manifest.get("acceptance") or {}
    chain = f"chain of {acceptance.get('chain')}: "
    best = acceptance.get("simulated")
    rows.append(
        (
            f"best (step {training.get('step')})",
            chain + describe(best) if best else "not evaluated: nothing was held out",
        )
    )
    if acceptance.get("before"):
        rows.append(("untrained", chain + describe(acceptance["before"])))
    return [*rows, *_measured(folder)]


def _weights(folder: Path, manifest: dict[str, Any]) -> tuple[int, int]:
    """Parameters and bytes of the weights, whose vocabulary must be the manifest's."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            d2t = file.get_tensor("d2t")
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path} cannot be read: {error}", "the draft is damaged; train it again") from None
    validate_map(folder, manifest, d2t)
    no_weights = ("d2t", "t2d", "aux_scale", "embed_tokens.weight")
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in no_weights), path.stat().st_size


def _store(manifest: dict[str, Any]) -> str:
    """The store, its layers, and whether it still is what the draft was trained on."""
    store, dataset = manifest.get("store") or {}, manifest.get("dataset_hash")
    text = f"{store.get('path')} (layers {', '.join(map(str, store.get('layer_ids', [])))}), dataset {dataset}"
    there = read_json(Path(store.get("path") or "") / MANIFEST)
    if not there:
        return text + "; it is not there any more"
    return text if there.get("dataset", {}).get("hash") == dataset else text + "; it holds other samples now"


def _run(folder: Path, settings: dict[str, Any], saved: dict[str, Any] | None) -> list[tuple[str, str]]:
    """How it was trained, how far, and the checkpoints.

    saved: step and tokens of the draft that was saved, if one was.
    """
    rows = []
    if settings:
        parts = [f"loss {settings['loss']}", f"K {settings['ttt_steps']}", f"rate {settings['learning_rate']:g}"]
        parts += [f"{settings['batch_tokens']:,} tokens x {settings['accumulate']} a step", f"seed {settings['seed']}"]
        parts += [f"begun from {settings['init_from']}"] if settings.get("init_from") else []
        rows.append(("settings", ", ".join(parts)))
    last = max((line["step"] for line in read_metrics(folder)), default=0)  # a training that wrote none stands at 0
    steps = f"{max(last, (saved or {}).get('step', 0)):,}"
    if saved:
        steps += f"; the draft is that of step {saved['step']:,}, after {saved['tokens']:,} tokens"
    rows.append(("steps", steps))
    checkpoints = list_checkpoints(folder / "checkpoints")
    kept = [f"step {int(path.name.split('-')[1]):,}" for path in checkpoints]
    size = sum(file.stat().st_size for path in checkpoints for file in path.iterdir())
    rows.append(("checkpoints", f"{', '.join(kept)} ({human_bytes(size)})" if kept else "none"))
    return rows


def _measured(folder: Path) -> list[tuple[str, str]]:
    """What `eyas eval` left beside the draft."""
    report = read_json(folder / "acceptance.json")
    overall = report.get("overall") or {}
    if overall.get("acceptance_length") is None:
        return [("measured", "not yet: `eyas eval`")]
    spread = interval_text(overall["interval_95"], " to ")
    figures = f"acceptance length {overall['acceptance_length']:.2f} (95 %: {spread})"
    chain, sets = report["settings"]["chain"], ", ".join(report["sets"])
    return [("measured", f"chain of {chain}: {figures} on {overall['prompts']} prompts of {sets}, {report['created']}")]


def _plural(count: int, word: str) -> str:
    return word if count == 1 else word + "s"
