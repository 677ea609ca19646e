"""The embedded model through the whole main job: the demo's own path, on a few conversations."""

from __future__ import annotations

import json
import shutil

import pytest
from eyas_process import run_eyas

import eyas
from eyas.base.errors import InputError, PreflightError
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


@pytest.fixture(scope="module")
def word_problems(tmp_path_factory):
    """The shortest dataset of the embedded model's tokens."""
    place = tmp_path_factory.mktemp("data") / "d"
    eyas.prepare(data=("word_problems",), model_path="smollm2", output_dir=place, limit=2, workers=1)
    return place


def test_extract_verify_inspect(word_problems, tmp_path):
    eyas.extract(
        model_path="smollm2",
        prepared_data=word_problems,
        output_dir=tmp_path / "s",
        layer_ids=[2, 15, 27, 0],
        dtype="float32",  # many times as fast as bf16 on most CPUs
    )
    states = eyas.open_states(tmp_path / "s")
    assert states.layer_ids == (2, 15, 27, 0, 30)
    assert all(one.hidden[15].shape == (len(one), 576) for one in states)
    report = eyas.verify(tmp_path / "s", recompute=1)
    assert report.problems == []
    assert report.recomputed["samples"] == 1
    assert "The answer is" in run_eyas("inspect", tmp_path / "s").stdout


def test_a_dataset_of_another_tokenizer_is_refused(word_problems, tiny_model, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    other = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a").save_pretrained(other)
    with pytest.raises(PreflightError, match="tokenizer: the dataset was made with the vocabulary of smollm2"):
        eyas.extract(model_path=str(other), prepared_data=word_problems, output_dir=tmp_path / "s", layer_ids=[2])
