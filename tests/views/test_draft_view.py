"""`eyas inspect DRAFT`: what is shown is what the draft is and what its run did."""

import json
import re
import shutil
import threading

import pytest
from eyas_process import run_eyas
from training_work import make_dataset, make_target, options

import eyas
from eyas.base.errors import StoreError
from eyas.drafts.files import load_draft
from eyas.exporting.folders import export
from eyas.exporting.foreign import import_draft
from eyas.extraction.extract import extract
from eyas.training.trainer import train
from eyas.views.draft_view import describe_draft


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = tmp_path_factory.mktemp("draft-view")
    target, data = make_target(root / "target"), make_dataset(root / "data")
    places = {"model_path": str(target), "prepared_data": str(data), "output_dir": str(root / "store")}
    extract(layer_ids=[1, 3, 5], dtype="float32", **places)
    eyas.verify(root / "store", recompute=0)
    return root


@pytest.fixture(scope="module")
def trained(work):
    return train(**options(work, "draft", steps=14, eval_every=4, aux_layers=(5, 1), init_from=None))


def test_a_trained_draft(work, trained):
    shown = dict(describe_draft(work / "draft"))
    draft, manifest = load_draft(work / "draft")
    assert shown["target"] == f"{work / 'target'}, LlamaForCausalLM, 6 layers, H 32"
    assert shown["layer ids"].startswith("5, 1 of the target's 0..6")
    assert shown["shape"] == "1 layer, H 32, 4 heads (4 key-value) of 8, MLP 64"
    count = sum(p.numel() for name, p in draft.named_parameters() if name != "embed_tokens.weight")
    assert f"{count / 1e6:.2f} M parameters" in shown["weights"]
    assert shown["vocabulary"].startswith("64 of the target's 96 tokens")
    assert f"covers {100 * manifest['vocabulary']['coverage']:.2f} %" in shown["vocabulary"]
    assert str(work / "store") in shown["trained on"]
    assert manifest["dataset_hash"] in shown["trained on"]
    assert shown["steps"].startswith(f"14; the draft is that of step {trained.best_step}, after ")
    assert f"{trained.best['acceptance_length']:.3f}" in shown[f"best (step {trained.best_step})"]
    assert f"{trained.before['acceptance_length']:.3f}" in shown["untrained"]
    assert shown["checkpoints"].startswith("step 12, step 14 (")
    assert "loss kl, K 3, rate 0.003, 200 tokens x 1 a step, seed 0" in shown["settings"]
    done = run_eyas("inspect", work / "draft")
    assert done.returncode == 0, done.stderr
    for name, text in shown.items():
        assert re.search(rf"(?m)^{re.escape(name)} +{re.escape(text)}$", done.stdout), name


def test_a_store_that_is_gone_or_holds_other_samples(work, trained):
    manifest = json.loads((work / "store" / "manifest.json").read_text())
    other = {**manifest, "dataset": {**manifest["dataset"], "hash": "0"}}
    (work / "store" / "manifest.json").write_text(json.dumps(other))
    assert dict(describe_draft(work / "draft"))["trained on"].endswith("; it holds other samples now")
    (work / "store" / "manifest.json").unlink()
    assert dict(describe_draft(work / "draft"))["trained on"].endswith("; it is not there any more")
    (work / "store" / "manifest.json").write_text(json.dumps(manifest))


def test_a_training_that_has_saved_no_draft_yet(work):
    stop = threading.Event()
    stop.set()
    train(**options(work, "begun", steps=14), stop=stop)
    shown = dict(describe_draft(work / "begun"))
    assert "none yet" in shown["draft"]
    assert shown["trained on"] == str(work / "store")
    assert shown["steps"] == "1"
    assert shown["checkpoints"].startswith("step 1 (")


def test_an_engine_s_folder_and_one_made_from_it(work, trained):
    export(work / "draft", work / "vllm", "vllm")
    with pytest.raises(StoreError, match=r"is a draft directory of an engine(?s:.)*eyas import"):
        describe_draft(work / "vllm")
    import_draft(work / "vllm", work / "imported", str(work / "target"))
    shown = dict(describe_draft(work / "imported"))
    assert shown["imported from"] == str(work / "vllm")
    assert shown["layer ids"].startswith("1, 5 of")  # engines hand states over in ascending order


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.pop("config"), "lacks config"),
        (lambda m: m.pop("vocabulary"), "lacks vocabulary"),
        (lambda m: m.pop("target"), "lacks target"),
        (lambda m: m["config"].pop("aux_layer_ids"), "aux_layer_ids"),
        (lambda m: m["config"].pop("hidden_size"), "hidden_size"),
    ],
)
def test_a_manifest_that_lost_a_part_is_named(work, trained, tmp_path, change, says):
    manifest = json.loads((work / "draft" / "manifest.json").read_text())
    change(manifest)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for read in (describe_draft, load_draft):
        with pytest.raises(StoreError, match=rf"manifest\.json.*{says}"):
            read(tmp_path)


def test_weights_that_are_missing_or_of_another_vocabulary(work, trained, tmp_path):
    folder = shutil.copytree(work / "draft", tmp_path / "draft")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["vocabulary"]["hash"] = "0"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match="is not the one the manifest names"):
        describe_draft(folder)
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(StoreError, match=r"model\.safetensors cannot be read"):
        describe_draft(folder)
