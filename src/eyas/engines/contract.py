"""Hops: every place a layer's states pass on their way to the disk, with the shape, dtype and meaning they must have there.

    model output -> split by request -> host copy -> shard

The contract of each hop is checked always. Records are kept for the first batches of a traced run (`--trace`), one JSON object a
line in `trace-<rank>.jsonl` beside the store, and whenever a contract breaks: then the run stops and the table of hops is printed
with the first bad one marked. `eyas trace DIR` shows a trace again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.base.errors import ContractError, InputError
from eyas.base.files import translate_disk_full

MODEL_OUTPUT, SPLIT, HOST_COPY, SHARD = "model output", "split by request", "host copy", "shard"
#: In the order that a state passes them.
HOPS = (MODEL_OUTPUT, SPLIT, HOST_COPY, SHARD)


@dataclass(frozen=True)
class Hop:
    """One layer's states at one hop.

    `where` is a module path, a request or a file; `shape` as found, `expected` as it must be; `norm` the mean L2 norm of the rows
    where it was taken; `fault` says what is wrong, None when all is as it must be.
    """

    hop: str
    layer: int
    rank: int
    where: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    step: int
    sample: str | None = None
    norm: float | None = None
    expected: str | None = None
    fault: str | None = None


def write_hops(path: Path, hops: Iterable[Hop]) -> None:
    """Append records to a trace file, one JSON object a line. Raises DiskFullError or InputError."""
    with translate_disk_full(path.parent), open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(hop)) + "\n" for hop in hops)


def read_hops(path: str | Path) -> list[Hop]:
    """Read a trace file, or all `trace-*.jsonl` of a directory, ordered by step, sample, layer and hop.

    Raises InputError: no trace in it, or a line that is not a record (file and line are named).
    """
    path = Path(path)
    files = sorted(path.rglob("trace-*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise InputError(
            f"{path} holds no trace", "run `eyas extract ... --trace` first; trace-*.jsonl is in its output directory"
        )
    hops: list[Hop] = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                hops.append(Hop(**{**record, "shape": tuple(record["shape"])}))
            except (json.JSONDecodeError, TypeError, KeyError) as error:
                raise InputError(
                    f"{file}:{number}: not a trace record ({error})", "the file is damaged; trace again"
                ) from None
    return sorted(
        hops, key=lambda h: (h.step, h.rank, h.sample or "", h.layer, HOPS.index(h.hop) if h.hop in HOPS else 9)
    )


def first_bad(hops: Sequence[Hop]) -> Hop | None:
    """The first hop, in the order given, whose contract does not hold."""
    return next((hop for hop in hops if hop.fault), None)


def hop_table(hops: Sequence[Hop]) -> str:
    """The hops as plain text for 80 columns, a row for each layer; `>>` marks the first bad one. What is wrong stands below its row.

    Above the rows: step, rank and sample, then each hop with its place.
    """
    bad = first_bad(hops)
    groups: dict[tuple[int, int, str | None], dict[tuple[str, str], list[Hop]]] = {}
    for hop in hops:
        groups.setdefault((hop.step, hop.rank, hop.sample), {}).setdefault((hop.hop, hop.where), []).append(hop)

    def cells(hop: Hop) -> tuple[str, ...]:
        layer = "all layers" if hop.layer < 0 else f"layer {hop.layer}"
        norm = "" if hop.norm is None else f"norm {hop.norm:.4g}"
        return layer, str(list(hop.shape)), hop.dtype, hop.device, norm, "BAD" if hop.fault else "ok"

    widths = [max(map(len, column)) for column in zip(*map(cells, hops), strict=True)]
    lines = []
    for (step, rank, sample), places in groups.items():
        lines.append(f"step {step}, rank {rank}" + (f", sample {sample}" if sample else ""))
        for (name, where), group in places.items():
            lines.append(f"    {name}: {where}")
            for hop in group:
                row = "  ".join(f"{cell:<{width}}" for cell, width in zip(cells(hop), widths, strict=True))
                lines.append(f"{'>>' if hop is bad else '':<8}{row}")
                if hop.fault:
                    lines.append(f"        {hop.fault}" + (f" (expected {hop.expected})" if hop.expected else ""))
    return "\n".join(lines)


def require_sound(hops: Sequence[Hop], remedy: str) -> None:
    """Raise ContractError with the table of hops when one of them broke its contract."""
    bad = first_bad(hops)
    if bad is not None:
        layer = "" if bad.layer < 0 else f", layer {bad.layer}"
        raise ContractError(
            f"hop `{bad.hop}` at {bad.where}{layer}, rank {bad.rank}: {bad.fault}\n{hop_table(hops)}", remedy
        )


def describe_output(output: Any) -> tuple[tuple[int, ...], str, str]:
    """Shape, dtype and device of whatever an engine returned where a tensor was expected."""
    if hasattr(output, "shape") and hasattr(output, "dtype"):
        return tuple(output.shape), str(output.dtype).removeprefix("torch."), str(output.device)
    length = (len(output),) if hasattr(output, "__len__") else ()
    return length, type(output).__name__, "-"


def check_model_output(
    aux: Any,
    *,
    ascending_ids: Sequence[int],
    tokens: int,
    hidden_size: int,
    dtype: str,
    where: str,
    rank: int,
    step: int,
) -> list[Hop]:
    """The contract of the model's auxiliary output: one tensor [>= tokens, H] per layer id, ascending, in the run's dtype.

    Returns the hops, bad ones marked (`require_sound` raises). What breaks it: nothing at all (a compiled model of a run without
    capture, hooks that never fired), a list of rows instead of layers, one layer too few, fewer rows than tokens.
    """
    fault: str | None
    wanted = f"{len(ascending_ids)} tensors [>={tokens}, {hidden_size}] {dtype}"
    if not isinstance(aux, (list, tuple)) or len(aux) != len(ascending_ids):
        shape, kind, device = describe_output(aux)
        if aux is None or (isinstance(aux, (list, tuple)) and not aux):
            fault = "the model returned no auxiliary states: a compiled model of a run without capture, or hooks that never fired"
        elif isinstance(aux, (list, tuple)) and len(aux) < len(ascending_ids):
            fault = f"a layer is missing: {len(aux)} came, {len(ascending_ids)} were asked for"
        elif isinstance(aux, (list, tuple)):
            inner = describe_output(aux[0])[0]
            fault = f"{len(aux)} items of shape {list(inner)} came instead of {len(ascending_ids)} layers: indexed once too often"
        else:
            fault = f"a {type(aux).__name__} of shape {list(shape)} came instead of a list of layers: indexed once too often"
        return [Hop(MODEL_OUTPUT, -1, rank, where, shape, kind, device, step, expected=wanted, fault=fault)]
    hops = []
    expected = f"[>={tokens}, {hidden_size}] {dtype}"
    for layer, tensor in zip(ascending_ids, aux, strict=True):
        shape, kind, device = describe_output(tensor)
        fault = None
        if len(shape) != 2 or shape[1] != hidden_size:
            fault = f"shape {list(shape)} is not [tokens, {hidden_size}]: indexed once too often"
        elif shape[0] < tokens:
            fault = f"{shape[0]} rows for {tokens} tokens: states are missing, or the layer is sharded by token"
        elif kind != dtype:
            fault = f"dtype {kind}"
        hops.append(Hop(MODEL_OUTPUT, layer, rank, where, shape, kind, device, step, expected=expected, fault=fault))
    return hops
