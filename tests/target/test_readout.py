"""What follows the last layer, found by running the class; and what a target is refused for before anything is loaded."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers

from eyas.base.errors import EngineError, InputError
from eyas.drafts.eagle3.init import derive_config, rope_of
from eyas.engines.transformers import TransformersEngine, TransformersSettings
from eyas.target.embedded import resolve_model_path
from eyas.target.fitness import check_streams, check_teacher
from eyas.target.loading import load_model, right_attention
from eyas.target.model_files import describe_model
from eyas.target.readout import try_readout
from eyas.target.teacher import load_target_parts


def test_several_streams_side_by_side_are_named():
    config = transformers.Gemma3nTextConfig(
        vocab_size=80, vocab_size_per_layer_input=80, hidden_size=32, num_hidden_layers=5, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, hidden_size_per_layer_input=8, laurel_rank=4,
        num_kv_shared_layers=0, layer_types=["sliding_attention"] * 4 + ["full_attention"],
        activation_sparsity_pattern=[0.0] * 5,
    )  # fmt: skip
    readout = try_readout(config)
    assert (readout.tried, readout.problem, readout.streams, readout.softcap) == (True, None, 4, 30.0)
    row = check_streams(SimpleNamespace(readout=readout, architecture="Gemma3nForCausalLM"))
    assert row.status == "FAIL"
    assert "4 residual streams side by side" in row.finding


def test_a_head_that_is_not_the_formula_is_refused_by_name(tiny_model, monkeypatch):
    def odd(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        out.logits = out.logits + out.logits.square()
        return out

    plain = transformers.LlamaForCausalLM.forward
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", odd)
    info = describe_model(tiny_model("llama3"))
    monkeypatch.setattr("eyas.target.readout._tried", {})
    row = check_teacher(info)
    assert row.status == "FAIL"
    assert "LlamaForCausalLM: after the head the logits are changed otherwise" in row.finding
    assert check_teacher(info, needed=False).status == "WARN"
    with pytest.raises(InputError, match="cannot be rebuilt"):
        load_target_parts(info)


def test_the_wrappers_rope_base_is_the_classs_default(tmp_path):
    """Gemma 3's released wrappers name no `rope_theta`: the class's default for full attention is 1e6."""
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {**text, "model_type": "gemma3_text", "intermediate_size": 128, "sliding_window": 16},
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = describe_model(tmp_path, need_weights=False)
    assert rope_of(info.text)["rope_theta"] == 1e6
    assert derive_config(info, (1, 3, 5), 64).rope == {"rope_type": "default", "rope_theta": 1e6}
    assert info.final_norm == {"kind": "rms_1p", "eps": 1e-6}


def test_rope_that_engines_do_not_draft_with_becomes_plain():
    assert rope_of({"rope_parameters": {"rope_type": "longrope", "rope_theta": 5e4, "long_factor": [1.0]}}) == {
        "rope_type": "default",
        "rope_theta": 5e4,
    }


@pytest.mark.parametrize("mark", ["speculators_config", "eagle_config", "draft_vocab_size"])
def test_a_drafts_directory_is_no_target(tiny_model, tmp_path, mark):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, mark: {"verifier": "other"}}))
    with pytest.raises(InputError, match=f"is a draft's directory .`{mark}`"):
        describe_model(folder)


def test_a_model_whose_tokens_see_those_after_them_is_no_target(tmp_path):
    """PaliGemma, and Gemma as an embedding model: a prefix that grows changes the states before it."""
    text = transformers.GemmaConfig(num_hidden_layers=2, hidden_size=32, use_bidirectional_attention=True)
    text.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="use_bidirectional_attention"):
        describe_model(tmp_path, need_weights=False)


def test_attention_with_a_soft_cap_is_not_left_to_sdpa(tmp_path):
    config = transformers.Gemma2Config(
        vocab_size=80, hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attn_logit_softcapping=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.Gemma2ForCausalLM(config)
    for parameter in made.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    made.save_pretrained(tmp_path)
    model = load_model(describe_model(tmp_path), "float32", torch.device("cpu"))
    assert right_attention(model) == "eager"
    ids = torch.arange(20)[None]
    made.set_attn_implementation("eager")
    with torch.no_grad():
        own = made.eval()(ids).logits
        torch.testing.assert_close(model(ids).logits, own)
        made.set_attn_implementation("sdpa")
        assert (made(ids).logits - own).abs().max() > 1e-2  # so that the test can fail


def test_a_wrapper_loads_as_everywhere(tmp_path):
    """Mistral 3: not in transformers' table of causal LMs."""
    config = transformers.Mistral3Config(
        text_config={
            "model_type": "mistral", "vocab_size": 80, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        },
        vision_config={
            "model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        image_token_index=70,
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.Mistral3ForConditionalGeneration(config)
    made.save_pretrained(tmp_path)
    info = describe_model(tmp_path)
    model = load_model(info, "auto", torch.device("cpu"))
    torch.testing.assert_close(load_target_parts(info).head, made.lm_head.weight.detach())
    assert type(model) is type(made)
    assert check_teacher(info).status == "OK"


def test_what_the_loader_says_is_not_buried_by_close(tiny_model):
    info = describe_model(tiny_model("llama"))
    engine = TransformersEngine(dataclasses.replace(info, num_layers=9), TransformersSettings(device="cpu"))
    with pytest.raises(EngineError, match=r"no decoder of 9 layers with a final norm .stacks of 4 layers were found"):
        engine.load([1])
    engine.close()
    assert engine.model is None


def test_a_hub_id_without_a_network_is_told_at_once(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    tried = []
    monkeypatch.setattr("huggingface_hub.hf_api.HfApi.repo_info", lambda *a, **k: tried.append(a))
    with pytest.raises(InputError, match="nobody/nothing is not a local directory, and the hub did not give it"):
        resolve_model_path("nobody/nothing")
    assert not tried
