"""The state store: what is written comes back, what is damaged is named. Format: docs/format.md."""

from __future__ import annotations

import json
import pickle
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import flip
from safetensors import safe_open
from safetensors.torch import save_file

from eyas.base.errors import ContractError, DiskFullError, FolderConflictError, InputError, StoreError
from eyas.data.dataset import Sample
from eyas.store.checksums import row_sums
from eyas.store.format import (
    StoreSpec,
    distinct_samples,
    finished_shards,
    read_shard_header,
    validate_same_states,
    write_store_manifest,
)
from eyas.store.reader import open_states
from eyas.store.writer import ShardWriter, quantise_fp8

H = 16


def make_spec(
    store_dtype: str = "float32", dtype: str = "float32", layer_ids: tuple[int, ...] = (3, 0, 4)
) -> StoreSpec:
    model = {"id": "m", "config_hash": "c", "weights_hash": "w", "num_layers": 4, "hidden_size": H, "vocab_size": 99}
    return StoreSpec(model, layer_ids, dtype, store_dtype, {"hash": "d", "samples": 3, "tokens": 9, "path": "p"})


def make_samples(lengths: list[int], seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [Sample.of(rng.integers(0, 99, n), rng.integers(0, 2, n)) for n in lengths]


def states_of(sample: Sample, layer: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[T, H], different for each sample and layer, the same every time."""
    generator = torch.Generator().manual_seed(int(sample.id[:8], 16) + layer)
    return torch.randn(len(sample), H, generator=generator).to(dtype)


def write_samples(writer: ShardWriter, samples: list[Sample]) -> None:
    for sample in samples:
        slot = writer.reserve(sample)
        for layer, rows in slot.rows.items():
            rows.copy_(states_of(sample, layer, rows.dtype))
        writer.complete(slot)


def write_store(
    folder: Path, samples: list[Sample], spec: StoreSpec | None = None, tokens_per_shard: int = 30
) -> StoreSpec:
    spec = spec or make_spec()
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, spec, shard_bytes=tokens_per_shard * spec.bytes_per_token)
    write_samples(writer, samples)
    writer.close()
    write_store_manifest(folder, spec, "complete", shards=writer.shards)
    return spec


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_written_comes_back(tmp_path, dtype):
    samples = make_samples([10, 1, 19, 30, 70, 5])  # 70 is longer than a shard
    write_store(tmp_path, samples, make_spec(dtype, dtype))
    states = open_states(tmp_path)
    assert len(states) == 6
    assert states.layer_ids == (3, 0, 4)  # the order asked for
    for sample in samples:
        one = states[states.index_of(sample.id)]
        assert one.token_ids.tolist() == sample.token_ids.tolist()
        assert one.loss_mask.tolist() == sample.loss_mask.tolist()
        for layer in (0, 3, 4):
            assert torch.equal(one.hidden[layer], states_of(sample, layer, getattr(torch, dtype)))
    assert states[-1].id == states[5].id
    with pytest.raises(IndexError):
        states[6]


def test_only_wanted_layers_are_read_and_loader_workers_can_open(tmp_path):
    write_store(tmp_path, make_samples([10, 20]))
    states = open_states(tmp_path, layers=[4])
    assert list(states[0].hidden) == [4]
    again = pickle.loads(pickle.dumps(states))
    assert torch.equal(again[1].hidden[4], states[1].hidden[4])
    loader = torch.utils.data.DataLoader(states, batch_size=None, num_workers=1)
    assert [one.id for one in loader] == states.ids
    with pytest.raises(InputError, match="holds layers"):
        open_states(tmp_path, layers=[2])


def test_fp8_keeps_one_scale_per_token_and_layer(tmp_path):
    samples = make_samples([25, 31])
    write_store(tmp_path, samples, make_spec("fp8", "bfloat16"))
    states = open_states(tmp_path)
    for sample in samples:
        one = states[states.index_of(sample.id)]
        for layer, back in one.hidden.items():
            true = states_of(sample, layer, torch.bfloat16).float()
            assert back.dtype == torch.bfloat16
            assert 1e-3 < (back.float() - true).norm() / true.norm() < 0.04
    norms = states.manifest["shards"][0]["norms"]["3"]
    assert 1e-3 < norms["fp8_relative_l2"] < 0.04  # the loss is measured and kept


def test_fp8_scale_follows_each_token():
    rows = torch.randn(4, H) * torch.tensor([1e-3, 1.0, 1e3, 1e5])[:, None]
    quantised, scale, error = quantise_fp8(rows)
    assert quantised.dtype == torch.float8_e4m3fn
    per_row = (quantised.float() * scale[:, None] - rows).norm(dim=1) / rows.norm(dim=1)
    assert (per_row < 0.05).all()
    assert error < 0.05


def test_a_shard_alone_tells_what_it_is(tmp_path):
    spec = write_store(tmp_path, make_samples([10, 20]))
    path = next(tmp_path.glob("shard-*.safetensors"))
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        assert set(file.keys()) == {
            "token_ids",
            "loss_mask",
            "offsets",
            "sample_ids",
            "hidden.0",
            "hidden.3",
            "hidden.4",
        }
        assert file.get_tensor("offsets").tolist() == [0, 10, 30]
        assert file.get_tensor("sample_ids").shape == (2, 2)
    assert json.loads(metadata["layer_ids"]) == [3, 0, 4]
    assert metadata["layer_index"] == "stream"
    assert metadata["dataset_hash"] == "d"
    assert json.loads(metadata["model"]) == spec.model
    assert not list(tmp_path.glob("*.tmp"))


def test_chunks_in_any_order_and_abandoned_samples(tmp_path):
    spec = make_spec()
    writer = ShardWriter(tmp_path, spec, shard_bytes=1000 * spec.bytes_per_token)
    first, lost, last = make_samples([12, 9, 7])
    slots = {s.id: writer.reserve(s) for s in (first, lost, last)}
    for sample in (last, first):
        for layer, rows in slots[sample.id].rows.items():
            whole = states_of(sample, layer)
            rows[5:].copy_(whole[5:])
            rows[:5].copy_(whole[:5])
        writer.complete(slots[sample.id])
    writer.abandon(slots[lost.id])
    assert writer.close() == {"samples": 2, "tokens": 19, "bytes": writer.shards[0]["bytes"], "shards": 1}
    write_store_manifest(tmp_path, spec, "complete", shards=writer.shards)
    states = open_states(tmp_path)
    assert states.ids == [first.id, last.id]
    assert torch.equal(states[1].hidden[3], states_of(last, 3))


def test_a_sample_begun_and_never_completed_is_an_error(tmp_path):
    writer = ShardWriter(tmp_path, make_spec())
    (sample,) = make_samples([5])
    writer.reserve(sample)
    with pytest.raises(StoreError, match=sample.id):
        writer.close()


def test_two_writers_of_one_name_overwrite_nothing(tmp_path):
    """Fault F11: each counts from the shards that it found; the second one's shard must not take the first one's place."""
    writers = [ShardWriter(tmp_path, make_spec()) for _ in range(2)]
    for writer, sample in zip(writers, make_samples([5, 6]), strict=True):
        write_samples(writer, [sample])
    writers[0].close()
    before = (tmp_path / "shard-r000-00000.safetensors").read_bytes()
    with pytest.raises(StoreError, match="another process writes shards of this name"):
        writers[1].close()
    assert (tmp_path / "shard-r000-00000.safetensors").read_bytes() == before


def test_memory_is_bounded_by_the_disk(tmp_path, monkeypatch):
    """A disk that does not answer holds `reserve` back; nothing piles up in RAM."""
    import eyas.store.writer as module

    gate = threading.Event()
    real = module.write_shard_file

    def slow(*arguments):
        assert gate.wait(60)
        real(*arguments)

    monkeypatch.setattr(module, "write_shard_file", slow)
    spec = make_spec()
    writer = ShardWriter(tmp_path, spec, shard_bytes=10 * spec.bytes_per_token, buffers=2)
    samples = make_samples([10] * 8)
    reached = []

    def compute():
        for sample in samples:
            write_samples(writer, [sample])
            reached.append(sample.id)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join(timeout=1.0)
    assert thread.is_alive()
    assert len(reached) == 2  # both buffers are full
    assert len(writer._buffers) == 2
    gate.set()
    thread.join(timeout=60)
    assert writer.close()["samples"] == 8


def test_samples_in_progress_never_deadlock(tmp_path):
    """Every buffer waits for unfinished samples (chunked prefill): one more buffer is made instead of waiting for ever."""
    spec = make_spec()
    writer = ShardWriter(tmp_path, spec, shard_bytes=10 * spec.bytes_per_token, buffers=2)
    samples = make_samples([10] * 4)
    slots = [writer.reserve(sample) for sample in samples]
    for sample, slot in zip(samples, slots, strict=True):
        for layer, rows in slot.rows.items():
            rows.copy_(states_of(sample, layer))
        writer.complete(slot)
    assert writer.close()["samples"] == 4


# --- bad states -----------------------------------------------------------------------------------------------------


def test_zero_states_stop_the_run(tmp_path):
    """F4."""
    writer = ShardWriter(tmp_path, make_spec())
    (sample,) = make_samples([5])
    slot = writer.reserve(sample)
    for layer, rows in slot.rows.items():
        rows.copy_(states_of(sample, layer))
    slot.rows[3][2] = 0
    writer.complete(slot)
    with pytest.raises(ContractError, match=f"layer 3, sample {sample.id}, position 2: .*all zero"):
        writer.close()
    assert not list(tmp_path.glob("shard-*"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_few_samples_with_nan_go_to_the_ledger(tmp_path, value):
    """F9: the sample is left out and named, the others are kept."""
    spec = make_spec()
    writer = ShardWriter(tmp_path, spec)
    samples = make_samples([5, 8, 6])
    for sample in samples:
        slot = writer.reserve(sample)
        for layer, rows in slot.rows.items():
            rows.copy_(states_of(sample, layer))
        if sample is samples[1]:
            slot.rows[0][7, 3] = value
        writer.complete(slot)
    assert writer.close()["samples"] == 2
    assert writer.rejected[0][0] == samples[1].id
    assert "layer 0" in writer.rejected[0][1]
    assert "position 7: not finite" in writer.rejected[0][1]
    write_store_manifest(tmp_path, spec, "incomplete", shards=writer.shards)
    assert torch.equal(open_states(tmp_path)[1].hidden[4], states_of(samples[2], 4))


def test_many_samples_with_nan_stop_the_run(tmp_path):
    writer = ShardWriter(tmp_path, make_spec())
    for sample in make_samples([5] * 6):
        slot = writer.reserve(sample)
        for rows in slot.rows.values():
            rows.fill_(float("nan"))
        writer.complete(slot)
    with pytest.raises(ContractError, match="6 of the last 6 samples"):
        writer.close()


def test_failed_samples_are_counted_over_the_writer_whatever_the_shard_size(tmp_path):
    """With one sample a shard 40 of 40 failed used to be 40 single accidents."""
    spec = make_spec()
    writer = ShardWriter(tmp_path, spec, shard_bytes=5 * spec.bytes_per_token)

    def run():
        for sample in make_samples([5] * 40):
            slot = writer.reserve(sample)
            for rows in slot.rows.values():
                rows.fill_(float("nan"))
            writer.complete(slot)
        writer.close()

    with pytest.raises(ContractError, match="3 of the last 3 samples"):
        run()


def test_samples_that_begin_to_fail_late_stop_the_run(tmp_path, monkeypatch):
    """Thousands of good samples do not excuse that none comes any more: the last ones count."""
    monkeypatch.setattr("eyas.store.writer.RECENT", 100)
    spec = make_spec()
    writer = ShardWriter(tmp_path, spec, shard_bytes=30 * spec.bytes_per_token)
    good, bad = make_samples([3] * 400), make_samples([4] * 40, seed=1)
    write_samples(writer, good)

    def run():
        for sample in bad:
            slot = writer.reserve(sample)
            for rows in slot.rows.values():
                rows.fill_(float("inf"))
            writer.complete(slot)
        writer.close()

    with pytest.raises(ContractError, match=r"of the last 100 samples have states that are not finite"):
        run()
    assert len(distinct_samples(finished_shards(tmp_path))) == 400


def write_from_device(writer, spec, sample, change=lambda slot: None, states=states_of):
    """As a GPU's capture does it: rows, and what the device computed of them."""
    slot = writer.reserve(sample)
    for position, layer in enumerate(spec.layer_ids):
        rows = states(sample, layer)
        slot.rows[layer].copy_(rows)
        slot.norms[position].copy_(rows.norm(dim=1))
        slot.sums[position].copy_(row_sums(rows))
    change(slot)
    writer.complete(slot)


@pytest.mark.parametrize("value", [0.5, float("nan"), float("-inf")])
def test_every_row_of_a_host_copy_is_compared_with_the_device(tmp_path, value):
    """F2: one value in the middle of a sample that is not what the device computed, also one that compares with nothing."""
    spec = make_spec()
    writer = ShardWriter(tmp_path, spec, on_device=True)
    right, wrong = make_samples([5, 5])
    write_from_device(writer, spec, right)

    def change(slot):
        slot.rows[0][3, 7] = value

    write_from_device(writer, spec, wrong, change)
    with pytest.raises(ContractError, match=f"layer 0, sample {wrong.id}, position 3: the host copy .* 1 of .* 5 rows"):
        writer.close()


def test_a_copy_that_never_happened_is_noticed_even_if_nothing_of_it_did(tmp_path):
    """F2: rows, norms and sums of an earlier sample lie in the buffer, and fit each other."""
    spec = make_spec()
    writer = ShardWriter(tmp_path, spec, on_device=True, shard_bytes=5 * spec.bytes_per_token)
    for sample in make_samples([5, 5, 5, 5]):
        write_from_device(writer, spec, sample)
    (late,) = make_samples([5], seed=1)
    writer.complete(writer.reserve(late))
    with pytest.raises(ContractError, match=f"sample {late.id}, position 0: the host copy .* 5 of .* 5 rows"):
        writer.close()


def test_a_sample_that_is_not_finite_on_the_device_either_goes_to_the_ledger(tmp_path):
    spec = make_spec()
    writer = ShardWriter(tmp_path, spec, on_device=True)
    good, bad = make_samples([5, 6])

    def broken(sample, layer):
        rows = states_of(sample, layer)
        rows[2, 1] = float("nan")
        return rows

    write_from_device(writer, spec, good)
    write_from_device(writer, spec, bad, states=broken)
    assert writer.close()["samples"] == 1
    assert [one for one, _ in writer.rejected] == [bad.id]


@pytest.mark.parametrize("width", [16, 6, 5, 7])
def test_row_sums_are_the_sums_of_the_rows_bytes(width):
    rows = torch.randn(3, width).bfloat16()
    words = {16: np.int64, 6: np.int32, 5: np.int16, 7: np.int16}[width]
    raw = rows.view(torch.int16).numpy()
    with np.errstate(over="ignore"):
        assert row_sums(rows).tolist() == [int(row.view(words).sum(dtype=np.int64)) for row in raw]


# --- folders --------------------------------------------------------------------------------------------------------


def test_other_states_are_refused_with_the_differing_fields(tmp_path):
    """F12."""
    spec = write_store(tmp_path, make_samples([5]))
    assert validate_same_states(tmp_path, spec) is not None
    with pytest.raises(FolderConflictError, match=r"layer_ids: the directory has \[3, 0, 4\], this run wants \[2, 4\]"):
        validate_same_states(tmp_path, make_spec(layer_ids=(2, 4)))
    other = StoreSpec(
        {**spec.model, "weights_hash": "z"}, spec.layer_ids, "bfloat16", "bfloat16", {**spec.dataset, "hash": "e"}
    )
    with pytest.raises(FolderConflictError) as caught:
        validate_same_states(tmp_path, other)
    for field in ("model.weights_hash", "dtype", "store_dtype", "dataset.hash"):
        assert field in str(caught.value)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FolderConflictError, match="but no manifest"):
        validate_same_states(tmp_path, spec)


def test_a_shard_of_another_run_among_ours(tmp_path):
    """F12: mixed by hand."""
    write_store(tmp_path / "a", make_samples([5]))
    write_store(tmp_path / "b", make_samples([6], seed=1), make_spec(layer_ids=(1, 2)))
    foreign = next((tmp_path / "b").glob("shard-*"))
    foreign.rename(tmp_path / "a" / "shard-r009-00000.safetensors")
    with pytest.raises(StoreError, match="does not belong"):
        open_states(tmp_path / "a")


def test_missing_shard_unfinished_run_and_doubled_sample(tmp_path):
    samples = make_samples([10, 25, 25])
    spec = write_store(tmp_path, samples)
    shards = sorted(tmp_path.glob("shard-*"))
    content = shards[0].read_bytes()
    shards[0].unlink()
    with pytest.raises(StoreError, match=shards[0].name):
        open_states(tmp_path)
    (tmp_path / "shard-r001-00000.safetensors").write_bytes(content)
    shards[0].write_bytes(content)
    write_store_manifest(tmp_path, spec, "complete", shards=[{"name": p.name} for p in tmp_path.glob("shard-*")])
    with pytest.raises(StoreError, match="stands in two shards"):
        open_states(tmp_path)
    write_store_manifest(tmp_path, spec, "open")
    with pytest.raises(StoreError, match="not finished"):
        open_states(tmp_path)


def test_half_written_shards_do_not_count(tmp_path):
    """F10."""
    samples = make_samples([10, 25])
    write_store(tmp_path, samples)
    whole = sorted(tmp_path.glob("shard-*"))[1]
    whole.rename(whole.with_name(whole.name + ".tmp"))
    assert distinct_samples(finished_shards(tmp_path)) == {samples[0].id}


# --- hostile files --------------------------------------------------------------------------------------------------


def shard_file(folder: Path) -> Path:
    write_store(folder, make_samples([10, 12]), tokens_per_shard=100)
    return next(folder.glob("shard-*.safetensors"))


def rewrite(path: Path, change) -> None:
    """Load a shard, let `change(tensors, metadata)` alter it, save it back."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata())
    change(tensors, metadata)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:5],
        lambda raw: raw[:100],
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0",
        lambda raw: struct.pack("<Q", 2**62) + raw[8:],
        lambda raw: struct.pack("<Q", len(raw)) + raw[8:],
        lambda raw: raw[:8] + b"[" + raw[9:],
        lambda raw: b"",
        lambda raw: raw.replace(b'"I32"', b'"Z99"', 1),
    ],
    ids=[
        "five bytes",
        "cut header",
        "cut data",
        "one byte more",
        "huge header",
        "header as long as the file",
        "no object",
        "empty",
        "unknown dtype",
    ],
)
def test_damaged_file(tmp_path, damage):
    path = shard_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=rf"(?s){path.name} is not a readable shard.*delete this one file"):
        read_shard_header(path)


def test_overlapping_byte_ranges(tmp_path):
    path = shard_file(tmp_path)
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header["hidden.3"]["data_offsets"] = header["hidden.0"]["data_offsets"]
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])
    with pytest.raises(StoreError, match="not a readable shard"):
        read_shard_header(path)


def change_offsets(values):
    def change(tensors, metadata):
        tensors["offsets"] = torch.tensor(values, dtype=torch.int64)

    return change


def drop_metadata(key: str):
    return lambda tensors, metadata: metadata.pop(key)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (change_offsets([0, 12, 10]), "rise strictly"),
        (change_offsets([0, 0, 22]), "rise strictly"),
        (change_offsets([1, 10, 22]), "start at 0"),
        (change_offsets([0, 10, 2**60]), "must be"),
        (change_offsets([0, 10, 23]), "must be"),
        (change_offsets([0, 22]), "sample_ids must be"),
        (lambda t, m: t.pop("hidden.3"), "hidden.3 missing"),
        (lambda t, m: t.update({"hidden.9": t["hidden.3"].clone()}), "hidden.9 missing or unexpected"),
        (lambda t, m: t.update({"hidden.3": t["hidden.3"][:, :8].clone()}), "hidden.3 must be"),
        (lambda t, m: t.update({"hidden.3": t["hidden.3"].half()}), "hidden.3 must be"),
        (lambda t, m: t.update({"sample_ids": t["sample_ids"][[0, 0]]}), "stands twice"),
        (lambda t, m: m.update({"layer_ids": "[3, 0]"}), "do not fit its layer ids"),
        (lambda t, m: m.update({"layer_ids": "nonsense"}), "malformed"),
        (lambda t, m: m.update({"format_version": "99"}), "format version is '99'"),
        (lambda t, m: m.update({"format": "other"}), "format is 'other'"),
        (drop_metadata("checksums"), "malformed"),
        (drop_metadata("sample_checksums"), "malformed"),
        (lambda t, m: m.update({"sample_checksums": "[]"}), "sample_checksums must name hidden.0, hidden.3"),
        (
            lambda t, m: m.update({"sample_checksums": m["sample_checksums"].replace('0": "', '0": "0')}),
            "2 times 16 hex",
        ),
        (lambda t, m: m.clear(), "format is None"),
    ],
)
def test_shards_that_break_a_rule(tmp_path, change, says):
    path = shard_file(tmp_path)
    rewrite(path, change)
    with pytest.raises(StoreError, match=says) as caught:
        read_shard_header(path)
    assert path.name in str(caught.value)


# --- content that changed after it was written ------------------------------------------------------------------------


@pytest.mark.parametrize(("store_dtype", "part"), [("bfloat16", "hidden"), ("fp8", "hidden"), ("fp8", "scale")])
def test_a_sample_is_compared_with_its_checksums_when_it_is_read(tmp_path, store_dtype, part):
    write_store(tmp_path, make_samples([10, 12, 9]), make_spec(store_dtype, "bfloat16"), tokens_per_shard=100)
    (path,) = tmp_path.glob("shard-*.safetensors")
    flip(path, f"{part}.4", row=21)  # the second sample's last token
    states = open_states(tmp_path)
    with pytest.raises(StoreError, match=rf"(?s){path.name}: sample {states.ids[1]}, {part}.4: .*changed.*delete"):
        states[1]
    with pytest.raises(StoreError, match="changed"):
        states[1]  # not only once
    assert [len(states[i]) for i in (0, 2)] == [10, 9]
    assert len(states.tokens(1)[0]) == 12
    assert len(open_states(tmp_path, layers=[3, 0])[1]) == 12  # only what is read is compared
    assert len(open_states(tmp_path, check=False)[1]) == 12


@pytest.mark.parametrize("tensor", ["token_ids", "loss_mask"])
def test_tokens_and_masks_are_compared_with_the_sample_s_id(tmp_path, tensor):
    path = shard_file(tmp_path)
    flip(path, tensor, row=3)
    states = open_states(tmp_path)
    for read in (states.tokens, states.__getitem__):
        with pytest.raises(StoreError, match=rf"{path.name}: sample {states.ids[0]}: the id of its tokens and mask"):
            read(0)
    assert len(states[1]) == 12


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.pop("layer_ids"), "lacks layer_ids"),
        (lambda m: m.pop("status"), "lacks status"),
        (lambda m: m.update(model={"id": "m"}), "malformed"),
        (lambda m: m.update(dataset=[]), "malformed"),
        (lambda m: m.update(shards=[{}]), "malformed"),
    ],
)
def test_a_manifest_that_lost_a_part_is_named(tmp_path, change, says):
    write_store(tmp_path, make_samples([10]))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    change(manifest)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=rf"manifest\.json.*{says}"):
        open_states(tmp_path)


@pytest.mark.parametrize("text", ['{"kind": "eyas.states", "format_ver', "", "[]"])
def test_a_manifest_cut_short_is_named(tmp_path, text):
    write_store(tmp_path, make_samples([10]))
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        open_states(tmp_path)


# --- the disk -------------------------------------------------------------------------------------------------------


def test_full_disk_keeps_what_is_finished(small_disk):
    spec = make_spec()
    writer = ShardWriter(small_disk, spec, shard_bytes=2000 * spec.bytes_per_token)
    samples = make_samples([2000] * 12)

    def run():
        write_samples(writer, samples)
        writer.close()

    with pytest.raises(DiskFullError, match=r"(?s)no space left in .*rerun the same command"):
        run()
    kept = distinct_samples(finished_shards(small_disk))
    assert 1 <= len(kept) < 12
    assert not list(small_disk.glob("*.tmp"))
