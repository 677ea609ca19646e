"""Gate 4 on a loaded vLLM, at its own tensor parallel size and precision, without a second copy of the model. See `parity`.

Passes: the samples as bulk takes them, a witness in every rank keeping the model's own logits; once more uncompiled, with hooks on the
decoder layers; the shortest and the longest alone. All through the capture path, into temporary stores that are read back.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open

from eyas.base.errors import EngineError, ParityError
from eyas.data.dataset import Sample
from eyas.engines.vllm.capture import owner_of
from eyas.gates.evidence import LIMIT, judge_same_pass, judge_states, judge_target, require_shapes
from eyas.gates.reference import judge_against_reference, length_breaks, spread_positions, why_loose
from eyas.store.format import StoreSpec, write_store_manifest
from eyas.store.reader import open_states
from eyas.target.teacher import final_norm, load_target_parts

if TYPE_CHECKING:
    from eyas.engines.vllm.engine import VllmEngine

#: Weights up to this many bytes are loaded a second time, on the CPU, for the independent pass.
REFERENCE_BYTES = 3 * 10**9
#: Most weight bytes times tokens of the independent pass: minutes of a CPU.
REFERENCE_WORK = REFERENCE_BYTES * 4096

States = list[Mapping[int, torch.Tensor]]


def vllm_parity(engine: VllmEngine, samples: Sequence[Sample]) -> dict[str, Any]:
    """Capture `samples` three ways and judge them. Returns the report for the manifest; raises ParityError."""
    own = engine.settings
    info, dtype, N = own.model, own.dtype, own.model.num_layers
    random_weights = own.load_format == "dummy"
    prefix = f".parity-{own.part.name}" if own.shared_folder else "eyas-parity-"
    samples = _for_every_rank(samples, own.tp_size)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=own.shared_folder) as base:
        positions = spread_positions(samples, info.vocab_size) if N in engine.layer_ids else {}
        with engine.witnessed(Path(base), positions, layers=False) as before:
            batched = _captured(engine, samples, Path(base) / "batched")
        _, as_in_bulk = _read_witness(before, samples) if positions else ([], [])
        with engine.witnessed(Path(base), positions) as ranks:
            seen = _captured(engine, samples, Path(base) / "seen")
        witness, logits = _read_witness(ranks, samples)
        ordered = sorted(samples, key=len)
        few = list({one.id: one for one in (ordered[0], ordered[-1])}.values())
        alone = [_captured(engine, [sample], Path(base) / f"alone-{i}")[0] for i, sample in enumerate(few)]
    for captured in (batched, seen):
        require_shapes(samples, captured, info.hidden_size)
    parts = load_target_parts(info) if N in engine.layer_ids and not random_weights else None
    normed = [None if parts is None else final_norm(one[N].float(), parts) for one in witness]
    checks = judge_same_pass(samples, seen, witness, N, normed)
    report: dict[str, Any] = {
        "passed": True,
        "engine": "vllm",
        "samples": len(samples),
        "positions": sum(len(s) for s in samples),
    }
    if parts is not None:
        quantised = info.quantises_activations()
        for where, states, own_logits in (
            ("the engine's own pass, uncompiled", seen, logits),
            ("the engine's own pass", batched, as_in_bulk),
        ):
            final = torch.cat([one[N][positions[s.id]] for s, one in zip(samples, states, strict=True)])
            kl, agreement, found = judge_target(
                final, torch.cat(own_logits), parts, dtype, quantised=quantised, where=where
            )
            report |= {"target_kl": kl, "top1_agreement": agreement}
            checks |= found
    loose = why_loose(info, dtype)
    strict, proven = loose is None and not random_weights, parts is not None
    report["uncompiled_relative_l2"], found = judge_states(
        samples, batched, witness, N, LIMIT[dtype], strict=strict, by_target=proven, against="an uncompiled pass"
    )
    checks |= found
    by_id = {one.id: states for one, states in zip(samples, batched, strict=True)}
    batch = [by_id[one.id] for one in few]
    report["alone_relative_l2"], found = judge_states(
        few, batch, alone, N, LIMIT[dtype], strict=strict, by_target=proven, against="each sample alone"
    )
    checks |= found
    report["note"] = (
        None
        if strict
        else f"{dtype}, {loose or 'random weights'}: other passes are judged by runners-up, not by the error"
    )
    if 0 < info.weight_bytes <= REFERENCE_BYTES and not random_weights:
        report |= _against_transformers(engine, samples, batched, checks)
    else:
        report["reference"] = "no independent pass: " + (
            "random weights" if random_weights else "the weights are too large for it"
        )
    return {**report, "checks": checks}


def _for_every_rank(samples: Sequence[Sample], ranks: int) -> list[Sample]:
    """The samples, and one of them again under other masks (which give other ids) until each tensor parallel rank writes some."""
    more, writers = list(samples), {owner_of(one.id, ranks) for one in samples}
    base = min((one for one in samples if len(one) >= 16), key=len, default=max(samples, key=len))
    random = np.random.default_rng(0)
    for _ in range(100 * ranks):
        if len(writers) == ranks:
            break
        one = Sample.of(base.token_ids, random.integers(0, 2, len(base)).astype(np.uint8))
        if (writer := owner_of(one.id, ranks)) not in writers:
            writers.add(writer)
            more.append(one)
    return more


def _captured(engine: VllmEngine, samples: Sequence[Sample], folder: Path) -> States:
    """States of `samples` out of a temporary store, made by the very path that bulk takes."""
    folder.mkdir()
    own = engine.settings
    spec = StoreSpec(own.model.for_manifest(), tuple(engine.layer_ids), own.dtype, own.dtype, {"hash": "parity"})
    write_store_manifest(folder, spec, "open")
    result = engine.capture(
        [samples], folder, spec, shard_bytes=2**26, done=(), progress=lambda _: None, stop=threading.Event()
    )
    if result.rejected:
        raise ParityError(
            f"parity: {result.rejected[0][1]}", "the capture path does not work for this model", check="finite"
        )
    write_store_manifest(folder, spec, "complete", shards=result.shards)
    states = open_states(folder)
    return [{i: rows.clone() for i, rows in states[states.index_of(one.id)].hidden.items()} for one in samples]


def _read_witness(ranks: Sequence[Mapping[str, Any]], samples: Sequence[Sample]) -> tuple[States, list[torch.Tensor]]:
    """What the ranks' hooks saw: per sample, id -> [T, H] of the rank that wrote it; and the logits [P, V].

    Raises ParityError where hooks saw nothing, or where a rank saw other numbers than the first.
    """
    problem = next(
        (answer["problem"] for answer in ranks if answer.get("problem") and "no pass" not in answer["problem"]), None
    )
    files = [answer["file"] for answer in ranks if "file" in answer]
    if problem is not None or not files:
        raise ParityError(
            f"parity: hooks on the decoder layers saw nothing: {problem or 'no rank ran a pass'}",
            "this version of vLLM runs the model in a way eyas does not know; please report it with its version",
        )
    streams: list[dict[int, torch.Tensor]] = [{} for _ in samples]
    logits: dict[str, torch.Tensor] = {}
    # The first rank of a stage has all samples, each other one its own: what that one saw replaces the first's.
    for path in files:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            for sample, kept in zip(samples, streams, strict=True):
                for name in (n for n in names if n.startswith(f"{sample.id}.")):
                    what = name.rpartition(".")[2]
                    if what == "logits":
                        logits.setdefault(sample.id, file.get_tensor(name))
                    else:
                        _require_same_rank(kept.get(int(what)), rows := file.get_tensor(name), sample, int(what))
                        kept[int(what)] = rows
    return list(streams), [logits[one.id] for one in samples if one.id in logits]


def _require_same_rank(first: torch.Tensor | None, rows: torch.Tensor, sample: Sample, layer: int) -> None:
    if first is not None and not bool((first.float() - rows.float()).norm() <= 1e-2 * first.float().norm()):
        raise ParityError(
            f"parity, sample {sample.id}, layer {layer}: tensor parallel ranks hold different residual streams",
            "one rank computes other numbers than the first: check its GPU, its weights and NCCL",
            check="ranks agree",
        )


def _against_transformers(
    engine: VllmEngine, samples: Sequence[Sample], batched: States, checks: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """The independent pass, on the CPU: the GPUs are the engine's. Long samples are cut behind the last window that they pass."""
    from eyas.engines.transformers import TransformersEngine, TransformersSettings

    own = engine.settings
    most = REFERENCE_WORK // own.model.weight_bytes
    breaks = [at for at in length_breaks(own.model) if at + at // 16 < most]
    enough = min(max([1024, *(at + max(at // 16, 16) for at in breaks)]), most)
    ordered = sorted(range(len(samples)), key=lambda i: len(samples[i]))
    chosen = list(dict.fromkeys([ordered[0], ordered[-1], *ordered[:2]]))
    cut = [Sample.of(samples[i].token_ids[:enough], samples[i].loss_mask[:enough]) for i in chosen]
    reference = TransformersEngine(
        own.model, TransformersSettings(own.dtype, device="cpu", trust_remote_code=own.trust_remote_code)
    )
    try:
        reference.load(engine.layer_ids)
    except EngineError as error:
        return {"reference": f"transformers does not load this model: {error.what}"}
    try:
        states = [{layer: rows[:enough] for layer, rows in batched[i].items()} for i in chosen]
        found = judge_against_reference(reference, cut, states)
    finally:
        reference.close()
    checks |= {f"{name} (transformers)": figures for name, figures in found["checks"].items()}
    longest = max(len(one) for one in cut)
    return {
        "relative_l2": found["relative_l2"],
        "tolerance": found["tolerance"],
        "reference": f"transformers on the CPU, up to position {longest}"
        + (f" ({found['note']})" if found["note"] else ""),
    }
