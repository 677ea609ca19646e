"""Which files are a model's weights: those that transformers loads, or none."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.base.errors import EngineError, InputError
from eyas.target.loading import load_model
from eyas.target.model_files import describe_model
from eyas.target.weights import find_weights


@pytest.fixture
def folder(tiny_model, tmp_path):
    return shutil.copytree(tiny_model("llama_untied"), tmp_path / "model")


def shard(folder, weights):
    """`weights` in two files with an index."""
    names = sorted(weights)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for name, keys in halves.items():
        save_file({key: weights[key] for key in keys}, folder / name, {"format": "pt"})
    index = {key: name for name, keys in halves.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def test_an_older_sharded_save_beside_the_weights_is_refused(folder):
    shard(folder, {k: v + 1 for k, v in load_file(folder / "model.safetensors").items()})
    with pytest.raises(InputError, match=r"two sets of weights: model.safetensors, .* a.safetensors, b.safetensors"):
        describe_model(folder)
    (folder / "model.safetensors").unlink()
    assert [f.name for f in find_weights(folder).files] == ["a.safetensors", "b.safetensors"]


def test_a_copy_beside_the_weights_is_refused(folder):
    shutil.copy(folder / "model.safetensors", folder / "model_backup.safetensors")
    with pytest.raises(InputError, match=r"two sets of weights: .*model_backup.safetensors, which vLLM would load"):
        describe_model(folder)


def test_another_file_that_the_index_leaves_out_is_no_matter(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model_backup.safetensors")
    with pytest.raises(InputError, match=r"neither model\.safetensors nor"):
        describe_model(folder)
    shard(folder, weights)
    assert describe_model(folder).weight_bytes == sum(
        (folder / n).stat().st_size for n in ("a.safetensors", "b.safetensors")
    )


def test_a_tensor_in_two_files_is_refused(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shard(folder, weights)
    again = {**load_file(folder / "b.safetensors"), "lm_head.weight": weights["lm_head.weight"]}
    save_file(again, folder / "b.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lm_head\.weight is stored in"):
        describe_model(folder)


def test_an_adapter_and_codes_without_a_scheme_are_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="holds an adapter"):
        describe_model(folder)
    (folder / "adapter_config.json").unlink()
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = (weights[name] * 10).to(torch.int8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"I8 codes, among them {name}"):
        describe_model(folder)


def test_a_missing_tensor_and_one_of_another_shape_are_refused_by_the_loader(folder):
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, name: weights[name][:, :16].contiguous()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match=rf"among them {name}: \[64, 16\], expected \[64, 32\]"):
        load_model(describe_model(folder), "auto", torch.device("cpu"))
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match=f"1 weights are in no file, among them {name}"):
        load_model(describe_model(folder), "auto", torch.device("cpu"))


def test_a_head_that_the_config_ties_must_be_the_embedding(tiny_model, tmp_path):
    from eyas.target.teacher import load_target_parts

    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(load_target_parts(describe_model(folder)).head, head)
    save_file({**weights, "lm_head.weight": head + 1}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"ties the head to the embedding, but lm_head.weight differs"):
        load_target_parts(describe_model(folder))
