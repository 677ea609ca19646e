"""`eyas doctor`: what this machine has, what a model and a dataset would need of it, and what earlier runs left behind."""

from __future__ import annotations

from pathlib import Path

from eyas.base.check import Check
from eyas.base.errors import EyasError


def diagnose(
    output_dir: Path | None = None,
    model_path: str | None = None,
    prepared_data: str | None = None,
    tp_size: int = 1,
    quick: bool = False,
) -> list[Check]:
    """The rows of `eyas doctor`.

    Args:
        output_dir: where states would go: its disk is measured. model_path: weights are checked, memory and disk predicted.
        prepared_data: the dataset that the disk is predicted for. tp_size: ranks. quick: no write test.
    """
    from eyas.gates.machine import check_machine

    rows = check_machine(output_dir, tp_size, quick)
    if model_path is not None:
        rows += check_target(model_path, prepared_data, output_dir, tp_size)
    elif prepared_data is not None:
        rows.append(check_dataset(prepared_data))
    return rows


def check_dataset(prepared_data: str) -> Check:
    """Whether a token dataset can be read, without a model to hold it against."""
    from eyas.data.dataset import open_dataset

    try:
        dataset = open_dataset(prepared_data)
    except EyasError as error:
        return Check("dataset", "FAIL", error.what, error.remedy)
    return Check("dataset", "OK", f"{len(dataset)} samples, {dataset.tokens} tokens, longest {dataset.lengths.max()}")


def check_target(model_path: str, prepared_data: str | None, output_dir: Path | None, ranks: int) -> list[Check]:
    """A model's weights (header against file length, no body is read), and its memory and disk on this machine."""
    from eyas.gates import preflight
    from eyas.target.embedded import resolve_model_path
    from eyas.target.fitness import check_teacher
    from eyas.target.model_files import describe_model

    try:
        info = describe_model(resolve_model_path(model_path), model_path)
    except EyasError as error:
        rows = [Check("model", "FAIL", error.what, error.remedy)]
        return rows if prepared_data is None else [*rows, check_dataset(prepared_data)]
    rows = [preflight.check_model(info), check_teacher(info), check_gpu_memory(info.weight_bytes, ranks)]
    if prepared_data is not None:
        from eyas.data.dataset import open_dataset
        from eyas.store.format import StoreSpec
        from eyas.target.layers import resolve_layer_ids

        try:
            dataset = open_dataset(prepared_data)
        except EyasError as error:
            return [*rows, Check("dataset", "FAIL", error.what, error.remedy)]
        layers = resolve_layer_ids(None, info.num_layers, index="stream", with_final=True)
        spec = StoreSpec(info.for_manifest(), tuple(layers), info.dtype, info.dtype, {})
        place = output_dir or Path.cwd()
        max_seq_len = info.max_position or int(dataset.lengths.max())
        rows += [
            *preflight.check_lengths(dataset, info, max_seq_len),
            preflight.check_token_ids(dataset, info, max_seq_len),
        ]
        rows.append(preflight.check_disk(place, spec, dataset.tokens))
    return rows


def check_gpu_memory(weight_bytes: int, ranks: int) -> Check:
    """Weights split over `ranks` GPUs against what the fullest of the first ones has free."""
    from eyas.runs.processes import nvidia_query
    from eyas.target.model_files import human_bytes

    gpus = nvidia_query("gpu", ["memory.free"])
    if not gpus:
        return Check("GPU memory", "OK", f"{human_bytes(weight_bytes / ranks)} of weights per rank; no GPU here")
    free = [float(row[0]) * 2**20 if row[0].replace(".", "").isdigit() else 0.0 for row in gpus]
    if len(free) < ranks:
        return Check("GPU memory", "FAIL", f"{ranks} ranks, {len(free)} GPUs here", f"--tp-size {len(free)}")
    least, need = min(sorted(free, reverse=True)[:ranks]), weight_bytes / ranks
    finding = f"{human_bytes(need)} of weights per rank, {human_bytes(least)} free on the fullest GPU"
    if need > 0.95 * least:
        return Check("GPU memory", "FAIL", finding, "more GPUs (--tp-size), or end what holds their memory")
    return Check(
        "GPU memory", "WARN" if need > 0.8 * least else "OK", finding, "" if need <= 0.8 * least else "little room"
    )
