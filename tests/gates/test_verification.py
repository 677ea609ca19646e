"""verify finds what is planted, and says what and where."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import torch
from eyas_process import run_eyas
from safetensors import safe_open
from safetensors.torch import save_file

import eyas
from eyas.base.errors import InputError, StoreError
from eyas.store.checksums import checksum_metadata


@pytest.fixture(scope="module")
def good(tiny_model, tmp_path_factory):
    """A verified store of a tiny model, in several shards. Tests work on copies."""
    from eyas_process import write_token_rows

    folder = tmp_path_factory.mktemp("good")
    data = write_token_rows(folder / "tokens.jsonl", [20, 33, 7, 51, 40, 12, 60, 28])
    store = folder / "store"
    eyas.extract(
        model_path=str(tiny_model("llama")),
        prepared_data=str(data),
        output_dir=str(store),
        layer_ids=[2, 3],
        dtype="float32",
        shard_size=0.04,
        batch_tokens=100,
    )
    return store


@pytest.fixture
def store(good, tmp_path):
    return shutil.copytree(good, tmp_path / "store")


def shards(store):
    return sorted(store.glob("shard-*.safetensors"))


def rewrite(path, change, keep_checksums=False):
    """Alter a shard as a wrong writer would: consistent checksums unless told otherwise."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata())
    change(tensors)
    if not keep_checksums:
        metadata.update(checksum_metadata(tensors))
    save_file(tensors, path, metadata)


def problems(store, **kwargs):
    return eyas.verify(store, **kwargs).problems


def test_a_good_store_passes_and_is_marked(store):
    report = eyas.verify(store, seed=1)
    assert report.problems == []
    assert (report.samples, report.tokens) == (8, 251)
    assert report.shards == len(shards(store)) > 2
    assert max(report.recomputed["relative_l2"].values()) < 1e-5
    mark = json.loads((store / "manifest.json").read_text())["verified"]
    assert mark["passed"]
    assert mark["samples"] == 8


def test_one_flipped_bit(store):
    path = shards(store)[1]
    raw = bytearray(path.read_bytes())
    raw[-1000] ^= 4
    path.write_bytes(raw)
    (problem,) = problems(store)
    assert path.name in problem
    assert "the content changed after it was written" in problem
    assert not json.loads((store / "manifest.json").read_text())["verified"]["passed"]


def test_checksums_of_samples_that_are_not_those_of_the_content(store):
    path = shards(store)[0]
    raw = path.read_bytes()
    at = raw.index(b"sample_checksums") + raw[raw.index(b"sample_checksums") :].index(b"hidden.3") + 14
    path.write_bytes(raw[:at] + (b"0" if raw[at : at + 1] != b"0" else b"1") + raw[at + 1 :])
    (problem,) = problems(store)
    assert f"{path.name}: the header's checksums of single samples of hidden.3" in problem


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t["hidden.3"][2].zero_(), "layer 3, sample .*, position 2: the state is all zero"),
        (
            lambda t: t["hidden.4"][0, 5].fill_(float("nan")),
            "layer 4, sample .*, position 0: the state is not finite",
        ),
        (lambda t: t["hidden.3"].copy_(t["hidden.2"]), "layers 2 and 3 hold the same states"),
        (lambda t: t["token_ids"][0].add_(1), "holds tokens and a mask of another sample"),
        (lambda t: t["loss_mask"].copy_(1 - t["loss_mask"]), "holds tokens and a mask of another sample"),
    ],
)
def test_wrong_content_with_right_checksums(store, change, says):
    import re

    path = shards(store)[0]
    rewrite(path, change)
    (problem,) = problems(store)
    assert path.name in problem
    assert re.search(says.replace("(", r"\(").replace(")", r"\)"), problem)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        # F5, F6, F7 and F2 in a store that is perfect in form: only the model can tell.
        (
            lambda t: t.update({"hidden.2": t["hidden.3"].clone(), "hidden.3": t["hidden.2"].clone()}),
            "layer 2: it is nearest to the reference's layer 3",
        ),
        (
            lambda t: t["hidden.4"].div_(t["hidden.4"].pow(2).mean(-1, keepdim=True).sqrt()),
            r"layer 4 \(final\) differs",
        ),
        (lambda t: t["hidden.3"].copy_(t["hidden.3"].roll(1, 0)), "layer 3: each row is that of its neighbour"),
    ],
)
def test_wrong_states_in_perfect_form(store, change, says):
    import re

    for path in shards(store):
        rewrite(path, change)
    (problem,) = problems(store, recompute=8)
    assert re.search(says, problem), problem
    assert problems(store, recompute=0) == []


def test_missing_foreign_and_doubled_shards(store):
    first = shards(store)[0]
    content = first.read_bytes()
    (store / "shard-r007-00000.safetensors").write_bytes(content)
    found = problems(store)
    assert any("stands in" in p for p in found)
    assert any("is not in the manifest" in p for p in found)
    (store / "shard-r007-00000.safetensors").unlink()
    first.unlink()
    (problem,) = problems(store)
    assert f"{first.name} is missing" in problem
    assert "run the same `eyas extract` again" in problem
    first.write_bytes(content[:-5])
    assert any("not a readable shard" in p for p in problems(store))


def test_another_model_than_the_one_it_is_of(store, tiny_model):
    before = (store / "manifest.json").read_text()
    with pytest.raises(InputError, match="is another model"):
        eyas.verify(store, model_path=str(tiny_model("llama_untied")))
    assert (store / "manifest.json").read_text() == before  # no fault of the store
    with pytest.raises(InputError, match="does not exist"):
        eyas.verify(store, model_path="/nowhere/model")


def test_another_model_under_the_name_that_the_store_names(store, tiny_model):
    path = store / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["model"]["id"] = str(tiny_model("llama_untied"))
    path.write_text(json.dumps(manifest))
    assert any("is another model now" in problem for problem in problems(store))


def test_without_the_model_it_says_so(store):
    path = store / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["model"]["id"] = "/nowhere/model"
    path.write_text(json.dumps(manifest))
    report = eyas.verify(store)
    assert report.problems == []
    assert report.recompute_note.startswith("not recomputed: the target is not here")


def test_no_store_at_all_and_an_unfinished_one(store, tmp_path):
    with pytest.raises(StoreError, match=r"has no manifest\.json"):
        eyas.verify(tmp_path)
    path = store / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "status": "open"}))
    with pytest.raises(StoreError, match="not finished"):
        eyas.verify(store)
    path.write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(StoreError, match="format version 99"):
        eyas.verify(store)
    path.write_text("{")
    with pytest.raises(StoreError, match="not readable JSON"):
        eyas.verify(store)


def test_a_manifest_that_lost_a_part_is_named(store):
    path = store / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["layer_ids"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match="lacks layer_ids"):
        eyas.verify(store)


def test_fp8_store_verifies_within_its_measured_loss(tiny_model, token_rows, tmp_path):
    eyas.extract(
        model_path=str(tiny_model("llama")),
        prepared_data=str(token_rows([40, 50, 30])),
        output_dir=str(tmp_path / "s"),
        layer_ids=[2],
        dtype="bfloat16",
        store_dtype="fp8",
    )
    report = eyas.verify(tmp_path / "s")
    assert report.problems == []
    one = eyas.open_states(tmp_path / "s")[0]
    assert one.hidden[2].dtype == torch.bfloat16


def test_command_line(store):
    done = run_eyas("verify", store)
    assert done.returncode == 0, done.stderr
    assert "the store is whole and its states are the target's" in done.stdout
    shards(store)[0].unlink()
    done = run_eyas("verify", store)
    assert done.returncode == StoreError.exit_code
    assert "is missing" in done.stderr
    done = run_eyas("inspect", store)
    assert done.returncode == StoreError.exit_code
    assert "the manifest names" in done.stderr


def test_a_run_that_writes_while_the_store_is_read_is_not_written_over(store):
    """The mark belongs to what was read; a manifest that a run has opened since stays as it is."""
    manifest = store / "manifest.json"

    def meanwhile(name, done, total):
        told = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**told, "status": "open", "shards": []}))

    report = eyas.verify(store, recompute=0, on_shard=meanwhile)
    assert "while it was read" in report.problems[-1]
    told = json.loads(manifest.read_text())
    assert (told["status"], told["shards"]) == ("open", [])
    assert "verified" not in told


def test_a_store_that_cannot_be_written_is_read_all_the_same(store, small_disk):
    shutil.copytree(store, small_disk / "s")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    report = eyas.verify(small_disk / "s", recompute=0)
    assert report.problems == []
    assert "cannot be written" in report.mark_note
    done = run_eyas("verify", small_disk / "s", "--recompute", "0")
    assert done.returncode == 0
    assert "not marked as verified" in done.stderr


def test_a_file_is_no_store(store):
    with pytest.raises(StoreError, match="is a file"):
        eyas.verify(store / "manifest.json")
