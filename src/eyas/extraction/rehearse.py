"""Gate 2, `eyas rehearse`: the whole way of `eyas extract` with random weights and few layers, before the real load.

Same engine, ranks, flags and widths; a copy of the model's config with just enough layers to tell the wanted ids apart; a handful of
samples of the dataset; every check that bulk makes, hops traced, and a temporary store that `verify` accepts. What a 23-minute load
would have shown in its last second shows here in the first one.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eyas.base.check import Check
from eyas.base.errors import InputError, StoreError
from eyas.base.settings import takes
from eyas.data.dataset import TokenDataset, open_dataset
from eyas.engines.contract import Hop, read_hops
from eyas.extraction.bulk import run
from eyas.extraction.plan import plan
from eyas.extraction.settings import ExtractSettings
from eyas.gates.preflight import refuse_failures
from eyas.gates.verification import verify
from eyas.store.format import read_store_manifest
from eyas.target.embedded import resolve_model_path
from eyas.target.layers import resolve_layer_ids
from eyas.target.model_files import ModelInfo, describe_model

log = logging.getLogger(__name__)

#: Names that a config may give its depth, and its count of leading dense layers before the experts.
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
DENSE = "first_k_dense_replace"
#: Files that hold weights, left out of the copy.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.safetensors.index.json", "*.bin.index.json")


@dataclass(frozen=True)
class RehearsalReport:
    """What a rehearsal showed. `layer_map`: asked id -> id in the shallow copy. `path`: outer class to decoder, as the engine loaded it."""

    seconds: float
    load_seconds: float
    path: str
    layer_map: dict[int, int]
    num_layers: int
    samples: int
    tokens: int
    hops: tuple[Hop, ...]


def shallow_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[dict[int, int], int]:
    """Map ids of a deep model to a model of few layers, keeping order: 0 stays 0, N becomes its last.

    Returns: asked id -> shallow id, and the shallow model's number of layers (2 at least: a dense and an expert layer).
    """
    inner = sorted({i for i in layer_ids if 0 < i < num_layers})
    depth = min(num_layers, max(len(inner) + 1, 2))
    mapped = {i: position for position, i in enumerate(inner, 1)}
    return {i: 0 if i == 0 else depth if i == num_layers else mapped[i] for i in layer_ids}, depth


def shallow_config(config: dict[str, Any], depth: int) -> dict[str, Any]:
    """A model's `config.json` with `depth` layers: per-layer lists are cut, at most one leading dense layer stays."""
    copy = json.loads(json.dumps(config))
    text = copy.get("text_config") or copy
    names = [name for name in DEPTHS if isinstance(text.get(name), int)]
    if not names:
        raise InputError(f"config.json names no depth ({', '.join(DEPTHS)})", "this architecture cannot be rehearsed")
    deep = text[names[0]]
    for name in names:
        text[name] = depth
    for name, value in text.items():
        if isinstance(value, list) and len(value) == deep:
            text[name] = _cut(value, depth)
    if isinstance(text.get(DENSE), int):
        text[DENSE] = min(text[DENSE], 1)
    return copy


def _cut(values: list[Any], depth: int) -> list[Any]:
    """The first `depth` entries; kinds that stand only later replace the last ones, so that each kind of layer is there if it fits."""
    kept = values[:depth]
    missing = [v for v in dict.fromkeys(map(json.dumps, values)) if v not in set(map(json.dumps, kept))]
    for place, value in enumerate(missing[: depth - 1], 1):
        kept[-place] = json.loads(value)
    return kept


def shallow_copy(folder: Path, target: Path, depth: int) -> Path:
    """A model folder of `depth` layers without weights: the config rewritten, everything else linked."""
    target.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(shallow_config(config, depth), indent=1), encoding="utf-8")
    for file in folder.iterdir():
        if file.is_file() and file.name != "config.json" and not any(file.match(pattern) for pattern in WEIGHTS):
            (target / file.name).symlink_to(file.resolve())
    return target


def few_samples(dataset: TokenDataset, target: Path, *, max_seq_len: int | None, count: int, most_tokens: int) -> int:
    """Write the shortest, the longest and others between them as a `.jsonl`. Returns how many."""
    fitting = [
        i
        for i in np.argsort(dataset.lengths, kind="stable")
        if max_seq_len is None or dataset.lengths[i] <= max_seq_len
    ]
    if not fitting:
        raise InputError(
            f"no sample has at most --max-seq-len {max_seq_len} tokens", "raise it, or prepare shorter samples"
        )
    spread = [fitting[k] for k in np.unique(np.linspace(0, len(fitting) - 1, count).astype(int))]
    written = tokens = 0
    with open(target, "w", encoding="utf-8") as file:
        for i in [spread[-1], *spread[:-1]]:  # the longest first: it must be there
            if written and tokens + int(dataset.lengths[i]) > most_tokens:
                break
            sample = dataset[int(i)]
            file.write(
                json.dumps({"input_ids": sample.token_ids.tolist(), "loss_mask": sample.loss_mask.tolist()}) + "\n"
            )
            written += 1
            tokens += len(sample)
    return written


def _shallow(
    settings: ExtractSettings, info: ModelInfo, base: Path, layer_ids: tuple[int, ...], depth: int, samples: int
) -> ExtractSettings:
    """The settings of the run that is made instead: a shallow model, a few samples and a store in `base`."""
    few_samples(
        open_dataset(settings.prepared_data),
        base / "samples.jsonl",
        max_seq_len=settings.max_seq_len or info.max_position,  # longer ones go to the ledger in the run too
        count=samples,
        most_tokens=16384,
    )
    return replace(
        settings,
        model_path=str(shallow_copy(info.path, base / "model", depth)),
        revision=None,
        prepared_data=base / "samples.jsonl",
        output_dir=base / "store",
        layer_ids=layer_ids,
        layer_index="stream",
        final=False,
        load_format="dummy",
        trace=True,
        part=None,
    )


def _first_existing(directory: Path) -> Path:
    return directory if directory.is_dir() else _first_existing(directory.parent)


@takes(ExtractSettings)
def rehearse(
    settings: ExtractSettings,
    *,
    samples: int = 12,
    on_preflight: Callable[[list[Check]], None] | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> RehearsalReport:
    """Rehearse an extraction; `output_dir` is not touched.

    What it writes is temporary; with ranks on several hosts (Ray) it stands beside `output_dir`, where every host sees it.

    Args:
        samples: how many of the dataset's samples take part.
        on_preflight: called with the preflight table. on_stage: called with a line for each stage.

    Raises:
        What `eyas.extract` and `eyas.verify` would: the same checks run. InputError for engine `transformers`, whose load is short.
    """
    if settings.engine != "vllm":
        raise InputError(
            f"engine {settings.engine} has nothing to rehearse: its load is short",
            "run `eyas extract`; its parity gate comes first",
        )
    say = on_stage or log.info
    begun = time.monotonic()
    info = describe_model(
        resolve_model_path(settings.model_path, settings.revision),
        trust_remote_code=settings.trust_remote_code,
        need_weights=False,
    )
    asked = resolve_layer_ids(
        settings.layer_ids, info.num_layers, index=settings.layer_index, with_final=settings.final
    )
    layer_map, depth = shallow_ids(asked, info.num_layers)
    shared = settings.distributed_executor_backend == "ray"
    beside = _first_existing(settings.output_dir.resolve().parent) if shared else None
    with tempfile.TemporaryDirectory(prefix="eyas-rehearsal-", dir=beside) as base:
        shallow = _shallow(settings, info, Path(base), tuple(layer_map.values()), depth, samples)
        store = shallow.output_dir
        say(
            f"rehearsing with {depth} of {info.num_layers} layers, random weights: ids {asked} as {list(layer_map.values())}"
        )
        job = plan(shallow, quick_start=True)
        if on_preflight is not None:
            on_preflight(job.checks)
        refuse_failures(job.checks)
        report = run(job, on_stage=say)
        if report.rejected:
            one, why = report.rejected[0]
            raise StoreError(
                f"rehearsal: {len(report.rejected)} samples were not written, the first ({one}): {why}", "see the trace"
            )
        checked = verify(store, recompute=0)
        if checked.problems:
            raise StoreError(
                "rehearsal: the store does not verify:\n  " + "\n  ".join(checked.problems[:5]), "please report it"
            )
        made = read_store_manifest(store)["engine"]
        return RehearsalReport(
            time.monotonic() - begun,
            made.get("load_seconds", 0.0),
            f"{' -> '.join(made.get('path', ['?']))}, {made.get('num_layers', '?')} layers",
            layer_map,
            depth,
            report.written,
            report.tokens,
            tuple(read_hops(store)),
        )
