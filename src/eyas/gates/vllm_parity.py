"""Gate 4 on the engine itself: are the stored states those of the model that vLLM runs?

Four kinds of evidence; the first three need no second copy of the model:

1. *Stored final state -> final norm -> head* (the engine's own modules, on what was read back from the store) against the engine's
   own prompt log-probabilities, position by position. Catches a target state after the norm (F6), hidden without residual (F7),
   another layer in its place (F5), rows of another request (F2).
2. *Alone against batched*: the same sample captured by itself. Catches leaks between requests and wrong joins of chunks.
3. *No layer equals another*, at any sample: a layer repeated or swapped.

4. *An independent pass* through transformers, where the model is small enough to fit beside the engine: relative L2 per layer, and the
   nearest reference layer must be the layer itself. Catches a layer early or late (F5) anywhere. For larger models that evidence is
   what `eyas rehearse` and the supported versions stand for; `eyas verify --recompute` gives it after the run, where it fits.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.base.errors import EngineError, ParityError
from eyas.data.dataset import Sample
from eyas.gates.evidence import relative_l2
from eyas.store.format import StoreSpec, write_store_manifest
from eyas.store.reader import open_states

if TYPE_CHECKING:
    from eyas.engines.vllm.engine import VllmEngine
    from eyas.store.reader import States

#: Weights up to this many bytes are loaded a second time, on the CPU, for the independent pass.
REFERENCE_BYTES = 3 * 10**9
#: Largest median difference of a log-probability (natural logarithm) between the rebuilt logits and the engine's own, by dtype.
#: The stored state is rounded once where the engine's fused norm is not, which in bfloat16 moves logits by up to 2^-8 of their size.
MEDIAN_LOGPROB = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.15}
#: Least share of positions at which the most likely next token is the same, near ties (within the median above, tenfold) not counted.
TOP1 = {"float32": 0.999, "float16": 0.98, "bfloat16": 0.95}
#: Largest relative L2 between a sample alone and in a batch. Other kernels for other batch shapes, so not zero.
ALONE = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1e-1}


def engine_parity(engine: VllmEngine, samples: Sequence[Sample]) -> dict[str, Any]:
    """Capture `samples` batched and two of them alone, into a temporary store; judge them. Returns the report for the manifest.

    Raises ParityError naming layer, position and figures.
    """
    own = engine.settings
    info, dtype, random_weights = own.model, own.dtype, own.load_format == "dummy"
    prefix = f".parity-{own.part.name}" if own.shared_folder else "eyas-parity-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=own.shared_folder) as base:
        batched = _captured(engine, samples, Path(base) / "batched")
        ordered = sorted(samples, key=len)
        few = list({one.id: one for one in (ordered[0], ordered[-1])}.values())
        alone = [_captured(engine, [sample], Path(base) / f"alone-{i}") for i, sample in enumerate(few)]
        report: dict[str, Any] = {
            "passed": True,
            "engine": "vllm",
            "samples": len(samples),
            "positions": sum(len(s) for s in samples),
        }
        _refuse_equal_layers(batched, samples)
        # Random tiny or dummy experts are near ties everywhere: in low precision the batch's shape decides which one is taken.
        strict = dtype == "float32" or not info.is_moe
        report["alone_relative_l2"] = _alone_against_batched(batched, alone, few, ALONE[dtype] if strict else None)
        if info.num_layers in engine.layer_ids:
            folder = str(batched.path)
            report |= _final_against_engine(engine, folder, samples, dtype, strict=strict, ranked=not random_weights)
        if 0 < info.weight_bytes <= REFERENCE_BYTES and not random_weights:
            report |= _against_transformers(engine, batched, ordered)
    return report


def _against_transformers(engine: VllmEngine, batched: States, ordered: Sequence[Sample]) -> dict[str, Any]:
    """The independent pass, on the CPU: the GPUs are the engine's."""
    from eyas.engines.transformers import TransformersEngine, TransformersSettings
    from eyas.gates.evidence import judge_parity

    own = engine.settings
    reference = TransformersEngine(
        own.model, TransformersSettings(own.dtype, device="cpu", trust_remote_code=own.trust_remote_code)
    )
    try:
        reference.load(engine.layer_ids)
    except EngineError as error:
        return {"reference": f"transformers does not load this model: {error.what}"}
    try:
        samples = [one for one in ordered if len(one) <= 1024][:3] or ordered[:1]
        found = judge_parity(reference, samples, [batched[batched.index_of(one.id)].hidden for one in samples])
    finally:
        reference.close()
    return {
        "relative_l2": found["relative_l2"],
        "tolerance": found["tolerance"],
        "reference": "transformers on the CPU" + (f" ({found['note']})" if found["note"] else ""),
    }


def _captured(engine: VllmEngine, samples: Sequence[Sample], folder: Path) -> States:
    """A temporary store of `samples`, through the very path that bulk takes."""
    folder.mkdir()
    spec = StoreSpec(
        engine.settings.model.for_manifest(),
        tuple(engine.layer_ids),
        engine.settings.dtype,
        engine.settings.dtype,
        {"hash": "parity"},
    )
    write_store_manifest(folder, spec, "open")
    result = engine.capture(
        [samples], folder, spec, shard_bytes=2**26, done=(), progress=lambda _: None, stop=threading.Event()
    )
    if result.rejected:
        raise ParityError(f"parity: {result.rejected[0][1]}", "the capture path does not work for this model")
    write_store_manifest(folder, spec, "complete", shards=result.shards)
    return open_states(folder)


def _refuse_equal_layers(states: States, samples: Sequence[Sample]) -> None:
    for sample in samples:
        hidden = states[states.index_of(sample.id)].hidden
        for a, b in itertools.combinations(hidden, 2):
            if hidden[a].equal(hidden[b]):
                raise ParityError(
                    f"parity, sample {sample.id}: layers {a} and {b} hold the same states",
                    "one of them was captured twice (fault F5); run again with --trace",
                )


def _alone_against_batched(
    batched: States, alone: Sequence[States], samples: Sequence[Sample], tolerance: float | None
) -> dict[str, float]:
    worst: dict[str, float] = {}
    for states, sample in zip(alone, samples, strict=True):
        mine, other = states[0].hidden, batched[batched.index_of(sample.id)].hidden
        for layer in mine:
            error = relative_l2(other[layer], mine[layer])
            worst[str(layer)] = max(error, worst.get(str(layer), 0.0))
            if tolerance is not None and not error <= tolerance:
                raise ParityError(
                    f"parity, sample {sample.id} ({len(sample)} tokens), layer {layer}: captured in a batch it differs from captured "
                    f"alone by relative L2 {error:.2g}, allowed is {tolerance:.2g}",
                    "states of another request (fault F2), or chunks joined wrongly; run again with --trace",
                )
    return worst


def _agreement(
    theirs: dict[str, list[tuple[int, float]]], mine: dict[str, list[tuple[list[int], list[float]]]]
) -> float:
    """Share of positions at which both have the same most likely next token."""
    same = [best[0] == token for one in theirs for (token, _), (best, _) in zip(theirs[one], mine[one], strict=True)]
    return sum(same) / len(same)


def _final_against_engine(
    engine: VllmEngine, folder: str, samples: Sequence[Sample], dtype: str, *, strict: bool, ranked: bool
) -> dict[str, Any]:
    """Rebuilt next-token distributions against the engine's prompt log-probabilities. Position i predicts token i + 1."""
    import numpy as np

    theirs = engine.prompt_logprobs(samples)
    mine = engine.rebuilt_logprobs(folder, samples)
    differences: list[float] = []
    agree = positions = 0
    first_bad = ""
    slack = 10 * MEDIAN_LOGPROB[dtype]
    for sample in samples:
        for i, (token, logprob) in enumerate(theirs[sample.id]):
            best, values = mine[sample.id][i]
            positions += 1
            if token in best:
                differences.append(abs(values[best.index(token)] - logprob))
            same = best[0] == token or (token in best and values[0] - values[best.index(token)] <= slack)
            agree += same
            if not same and not first_bad:
                first_bad = f"first at sample {sample.id}, position {i}: the engine says token {token} ({logprob:.3f}), the stored state gives {best[0]} ({values[0]:.3f})"
    agreement = agree / positions
    median = float(np.median(differences)) if differences else float("inf")
    report = {
        "top1_agreement": agreement,
        "median_logprob_difference": median,
        "max_logprob_difference": max(differences, default=float("inf")),
        "note": None if strict else f"{dtype} mixture of experts: figures are shown, not judged",
    }
    wrong_rank = ranked and not agreement >= TOP1[dtype]
    if strict and (wrong_rank or not median <= MEDIAN_LOGPROB[dtype]):
        if _agreement(theirs, engine.rebuilt_logprobs(folder, samples, normed=True)) >= TOP1[dtype] > agreement:
            raise ParityError(
                f"parity: the stored final state (layer {engine.settings.model.num_layers}) gives the engine's own next token without the "
                f"final norm, and at {agreement:.1%} of {positions} positions with it: it was taken after the norm (fault F6)",
                "please report the model's architecture and the version of vLLM",
            )
        raise ParityError(
            f"parity: final norm and head on the stored final state (layer {engine.settings.model.num_layers}) give the engine's own next "
            f"token at {agreement:.1%} of {positions} positions (wanted {TOP1[dtype]:.1%}), log-probabilities differ by {median:.3g} in "
            f"the median (allowed {MEDIAN_LOGPROB[dtype]:g}). {first_bad}",
            "the target state was taken without its residual (fault F7), of another layer (F5), or of another request (F2)",
        )
    return report
