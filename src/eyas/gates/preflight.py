"""Gate 1: what can be known before anything is loaded, in seconds and without a GPU.

A table of OK / WARN / FAIL, each row with what was found and what to do. A FAIL stops the run before the load; every row is
computed even when an earlier one failed, so that one look shows all that is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eyas.base.check import Check
from eyas.base.errors import InputError, PreflightError
from eyas.base.locks import abandoned
from eyas.base.manifest import package_version
from eyas.data.dataset import TokenDataset
from eyas.store.format import StoreSpec
from eyas.target.model_files import ModelInfo, free_bytes, human_bytes


def check_model(info: ModelInfo) -> Check:
    """Weights were read and found whole by `describe_model`; this says what they are."""
    quantised = f", {info.quantization}" if info.quantization else ""
    return Check(
        "model",
        "OK",
        f"{info.architecture}, {info.num_layers} layers, H {info.hidden_size}, V {info.vocab_size}{quantised}; "
        + (f"weights complete, {human_bytes(info.weight_bytes)}" if info.weight_bytes else "random weights, as asked"),
    )


def check_lengths(dataset: TokenDataset, info: ModelInfo, max_seq_len: int) -> list[Check]:
    """Sample lengths against the model's positions and `--max-seq-len`; repeated samples."""
    longest = int(dataset.lengths.max())
    over = int((dataset.lengths > max_seq_len).sum())
    rows = [Check("dataset", "OK", f"{len(dataset)} samples, {dataset.tokens} tokens, longest {longest}")]
    if dataset.repeated:
        rows.append(
            Check(
                "repeated samples", "WARN", f"{dataset.repeated} rows repeat an earlier sample; each is extracted once"
            )
        )
    if over == len(dataset):
        rows.append(
            Check(
                "lengths",
                "FAIL",
                f"every sample is longer than {max_seq_len} tokens",
                "raise --max-seq-len, or prepare shorter samples",
            )
        )
    elif over:
        rows.append(
            Check(
                "lengths",
                "WARN",
                f"{over} samples are longer than {max_seq_len} tokens and go to the ledger (exit code 20)",
                "raise --max-seq-len, or run `eyas prepare` with this --max-seq-len",
            )
        )
    return rows


def check_token_ids(dataset: TokenDataset, info: ModelInfo, max_seq_len: int) -> Check:
    """Every token id of a sample that will be extracted against the target's rows of embeddings: tokenizers may have more tokens."""
    found = [(i, token) for i, token in dataset.beyond(info.vocab_size) if dataset.lengths[i] <= max_seq_len]
    if not found:
        return Check("token ids", "OK", f"all below {info.vocab_size}, the target's rows of embeddings")
    position, token = found[0]
    return Check(
        "token ids",
        "FAIL",
        f"{len(found)} samples hold token ids that the target has no row of embeddings for: "
        f"sample {position} is the first, with token id {token}, and the target has {info.vocab_size} rows",
        "run `eyas prepare` with this --model-path: it rejects such rows, each with its line; or leave the samples out",
    )


def check_tokenizer(dataset: TokenDataset, info: ModelInfo, trust_remote_code: bool) -> Check:
    """The vocabulary that made the dataset against the target's own: the same ids must mean the same tokens."""
    from eyas.target.tokenizer import load_tokenizer, vocabulary_hash

    made_with = (dataset.manifest or {}).get("tokenizer")
    if made_with is None:
        return Check(
            "tokenizer",
            "WARN",
            "the dataset does not say which tokenizer made it",
            "make it with `eyas prepare` to have this checked",
        )
    try:
        own = vocabulary_hash(load_tokenizer(str(info.path), trust_remote_code))
    except InputError:
        return Check("tokenizer", "WARN", f"{info.id} has no tokenizer to compare with the dataset's")
    if own != made_with["vocab_hash"]:
        finding = f"the dataset was made with the vocabulary of {made_with['model_path']}, which is not {info.id}'s"
        return Check("tokenizer", "FAIL", finding, "run `eyas prepare` with this --model-path")
    return Check("tokenizer", "OK", f"the dataset was made with this vocabulary ({made_with['vocab_size']} tokens)")


def check_disk(folder: Path, spec: StoreSpec, tokens: int) -> Check:
    """Free disk against the predicted bytes of what is still to be written."""
    need = tokens * spec.bytes_per_token + 2**20
    free = free_bytes(folder)
    finding = f"{human_bytes(need)} to write ({spec.bytes_per_token} B a token), {human_bytes(free)} free at {folder}"
    if need > free:
        return Check(
            "disk",
            "FAIL",
            finding,
            "free some space, name another --output-dir, fewer --layer-ids, or --store-dtype fp8",
        )
    return Check(
        "disk", "WARN" if need > 0.9 * free else "OK", finding, "little will be left" if need > 0.9 * free else ""
    )


def check_leftovers(folder: Path) -> Check:
    """Half-written shards of an earlier run (not of parts that are being written); a run removes its own."""
    half = abandoned(folder, "shard-*.tmp")
    if half:
        return Check(
            "leftovers", "WARN", f"{len(half)} half-written shards of a killed run are removed, their samples made anew"
        )
    return Check("leftovers", "OK", "no half-written shards")


def check_versions() -> Check:
    """torch and transformers as installed."""
    found = ", ".join(f"{name} {package_version(name)}" for name in ("torch", "transformers", "safetensors"))
    return Check("versions", "OK", found)


def refuse_failures(checks: Sequence[Check]) -> None:
    """Raise PreflightError naming every FAIL row."""
    failed = [c for c in checks if c.status == "FAIL"]
    if failed:
        lines = "\n  ".join(f"{c.name}: {c.finding}" + (f" -> {c.remedy}" if c.remedy else "") for c in failed)
        raise PreflightError(f"preflight failed, nothing was loaded or written:\n  {lines}")
