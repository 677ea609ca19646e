import json

import numpy as np
import pytest

from eyas.base.errors import InputError, StoreError
from eyas.data.dataset import DatasetWriter, Sample, open_dataset


def test_sample_id_is_a_fixed_function_of_content():
    # A change here would make every existing store look unknown.
    assert Sample.of([1, 2, 3], [0, 1, 1]).id == "510c3397c5d1be6bd98acc370ad517a3"
    assert (
        Sample.of(np.array([1, 2, 3], dtype=np.int64), np.array([False, True, True])).id
        == Sample.of([1, 2, 3], [0, 1, 1]).id
    )
    assert Sample.of([1, 2, 3], [1, 1, 1]).id != Sample.of([1, 2, 3], [0, 1, 1]).id


@pytest.mark.parametrize(
    ("ids", "mask", "says"),
    [
        ([1, 2], [1], "one length"),
        ([], [], "empty"),
        ([[1]], [[1]], "flat lists"),
        ([-1], [1], "0..2"),
        ([2**31], [1], "0..2"),
        ([1.5], [1], "integers"),
        ([1], [2], "only 0 and 1"),
    ],
)
def test_bad_samples(ids, mask, says):
    with pytest.raises(InputError, match=says):
        Sample.of(ids, mask)


def assert_beyond(dataset):
    largest = [int(sample.token_ids.max()) for sample in dataset]
    for size in (max(largest) + 1, max(largest), min(largest)):
        assert list(dataset.beyond(size)) == [(i, token) for i, token in enumerate(largest) if token >= size]


def test_jsonl_file_and_folder(token_rows, tmp_path):
    path = token_rows([5, 9, 3], name="tokenized_data.jsonl")
    for place in (path, tmp_path):
        dataset = open_dataset(place)
        assert dataset.lengths.tolist() == [5, 9, 3]
        assert dataset.tokens == 17
        assert_beyond(dataset)
        assert [s.id for s in dataset] == dataset.ids


def test_bad_line_is_named(token_rows):
    path = token_rows([5])
    for line, says in [
        ("{", "not JSON"),
        ('{"text": "hi"}', r"expected input_ids and loss_mask, found \['text'\]"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "one length"),
        ('{"input_ids": ["a"], "loss_mask": [1]}', "integers"),
        ("[1]", "found list"),
    ]:
        path.write_text(path.read_text().splitlines()[0] + "\n" + line + "\n")
        with pytest.raises(InputError, match=f"tokens.jsonl:2: .*{says}"):
            open_dataset(path)


def test_missing_and_foreign_paths(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        open_dataset(tmp_path / "nothing")
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(InputError, match="no token dataset"):
        open_dataset(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="no samples"):
        open_dataset(tmp_path / "empty.jsonl")


def test_parquet_round_trip_and_hash_ignores_order(tmp_path):
    rng = np.random.default_rng(0)
    samples = [Sample.of(rng.integers(0, 99, n), rng.integers(0, 2, n)) for n in rng.integers(1, 40, 1300)]
    for name, order in (("a", samples), ("b", samples[::-1])):
        writer = DatasetWriter(tmp_path / name, rows_per_file=600)
        for sample in order:
            writer.add(sample)
        writer.close()
    a, b = open_dataset(tmp_path / "a"), open_dataset(tmp_path / "b")
    assert a.hash == b.hash
    unique = {s.id for s in samples}
    assert len(a) == len(unique)
    assert a.repeated == len(samples) - len(unique)
    assert_beyond(a)
    for position in (0, 511, 512, 700, len(a) - 1):
        one = a[position]
        assert one.id == a.ids[position]
        assert len(one) == a.lengths[position]
    assert [s.token_ids.tolist() for s in a][:600] == [
        s.token_ids.tolist() for s in {s.id: s for s in samples}.values()
    ][:600]


def test_changed_dataset_is_noticed(tmp_path):
    writer = DatasetWriter(tmp_path)
    writer.add(Sample.of([1, 2, 3], [1, 1, 1]))
    writer.close()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "hash": "0" * 32}))
    with pytest.raises(StoreError, match="hash"):
        open_dataset(tmp_path)
    for files, says in ((None, "lacks files"), ([{}], "damaged `files`")):
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "files": files}))
        with pytest.raises(StoreError, match=says):
            open_dataset(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / manifest["files"][0]["name"]).write_bytes(b"PAR1 not really")
    with pytest.raises(StoreError, match="not a readable dataset file"):
        open_dataset(tmp_path)
