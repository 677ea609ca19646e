"""The embedded model through the whole main job: the demo's own path, on a few conversations."""

from __future__ import annotations

import json

import pytest
from eyas_process import run_eyas

import eyas
from eyas.base.errors import InputError
from eyas.target.embedded import resolve_model_path

pytestmark = pytest.mark.smollm2


def test_it_is_an_ordinary_model_folder_and_found_again():
    folder = resolve_model_path("smollm2")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder / name).exists()
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["hidden_size"], config["num_hidden_layers"]) == (576, 30)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model_path("smollm2") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_paths_that_are_no_model(tmp_path):
    for name, says in [
        (str(tmp_path), "no config.json"),
        ("/nowhere/at/all", "does not exist"),
        ("no-such-thing", "does not exist"),
    ]:
        with pytest.raises(InputError, match=says):
            resolve_model_path(name)
    with pytest.raises(InputError, match="the hub did not give it"):
        resolve_model_path("nobody/nothing-here")


def test_prepare_extract_verify_inspect(tmp_path):
    done = run_eyas(
        "prepare", "--data", "word_problems", "--model-path", "smollm2", "--output-dir", tmp_path / "d", "--limit", "12"
    )
    assert done.returncode == 0, done.stderr
    done = run_eyas(
        "extract",
        "--model-path",
        "smollm2",
        "--prepared-data",
        tmp_path / "d",
        "--output-dir",
        tmp_path / "s",
        "--layer-ids",
        "2",
        "15",
        "27",
        "0",
    )
    assert done.returncode == 0, done.stderr
    states = eyas.open_states(tmp_path / "s")
    assert states.layer_ids == (2, 15, 27, 0, 30)
    assert all(one.hidden[15].shape == (len(one), 576) for one in states)
    done = run_eyas("verify", tmp_path / "s")
    assert done.returncode == 0, done.stderr
    assert "4 random samples recomputed" in done.stdout
    done = run_eyas("inspect", tmp_path / "s")
    assert "The answer is" in done.stdout


def test_a_dataset_of_another_tokenizer_is_refused(tiny_model, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    run_eyas(
        "prepare", "--data", "word_problems", "--model-path", "smollm2", "--output-dir", tmp_path / "d", "--limit", "3"
    )
    import shutil

    other = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a").save_pretrained(other)
    done = run_eyas(
        "extract",
        "--model-path",
        other,
        "--prepared-data",
        tmp_path / "d",
        "--output-dir",
        tmp_path / "s",
        "--layer-ids",
        "2",
    )
    assert done.returncode == 4
    assert "tokenizer: the dataset was made with the vocabulary of smollm2" in done.stderr
