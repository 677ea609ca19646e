"""The target's distribution rebuilt from its state before the final norm equals the model's own logits."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.base.errors import InputError
from eyas.drafts.eagle3.init import choose_vocabulary, count_supervised, derive_config, rope_of
from eyas.target.decoder import find_decoder
from eyas.target.model_files import describe_model
from eyas.target.teacher import Teacher, full_logits, load_target_parts

SIZES = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}


def build(kind, folder, **changes):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_f" in name or parameter.ndim == 1:  # gains that differ from one, biases from zero
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"tie_word_embeddings": False}),
        ("Qwen3", {"head_dim": 8}),
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 5.0}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Granite", {"logits_scaling": 4.0}),
        ("HyperCLOVAX", {"logits_scaling": 4.0}),  # multiplies, under Granite's name for a divisor
        ("MiniCPM3", {"dim_model_base": 8, **MLA}),  # divides the state
        ("Phi", {"partial_rotary_factor": 0.5}),  # a bias in the head
        ("GPTJ", {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "n_positions": 64}),
        ("Ernie4_5_Moe", {"use_bias": True, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
        ("Phimoe", {"num_local_experts": 4}),  # a layer norm with `rms_norm_eps`
        ("Nemotron", {"head_dim": 8}),  # a layer norm that adds one to its weight
        ("Olmo", {}),  # a norm without weight
        ("NemotronH", {"layers_block_type": ["attention", "moe", "attention"], "head_dim": 8, **EXPERTS}),  # `norm_f`
    ],
)
def test_logits_equal_the_models_own(kind, changes, tmp_path):
    model = build(kind, tmp_path, **changes)
    info = describe_model(tmp_path)
    taken = {}
    norm = find_decoder(model, info.num_layers).norm
    norm.register_forward_pre_hook(lambda _, args: taken.update(state=args[0]))
    with torch.no_grad():
        logits = model(torch.arange(20).unsqueeze(0)).logits[0]
    parts = load_target_parts(info)
    assert info.readout.tried
    torch.testing.assert_close(full_logits(taken["state"][0], parts), logits, rtol=1e-4, atol=1e-5)
    chosen = torch.tensor([1, 5, 40, 79])
    teacher = Teacher(parts, chosen, "cpu", torch.float32)
    torch.testing.assert_close(teacher.logits(taken["state"][0]), logits[:, chosen], rtol=1e-4, atol=1e-5)
    assert torch.equal(teacher.argmax(taken["state"][0]), logits.argmax(-1))
    torch.testing.assert_close(parts.embedding, model.get_input_embeddings().weight.detach())


def test_parts_of_a_wrapper_an_fp8_head_and_a_refused_one(tmp_path):
    build("Llama", tmp_path, tie_word_embeddings=False)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights.pop("lm_head.weight")
    renamed = {"language_model." + k: v for k, v in weights.items()}
    renamed["vision_tower.embed_tokens.weight"] = torch.zeros(3, 3)
    scale = head.abs().amax() / 448
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {
            **renamed,
            "language_model.lm_head.weight": (head / scale).to(torch.float8_e4m3fn),
            "language_model.lm_head.weight_scale_inv": scale.reshape(1, 1),
        },
        tmp_path / "model.safetensors",
    )
    parts = load_target_parts(describe_model(tmp_path))
    torch.testing.assert_close(parts.head.float(), head, rtol=0.08, atol=0.01)
    assert parts.embedding.shape == (80, 32)
    save_file(
        {**renamed, "language_model.lm_head.qweight": torch.zeros(4, 4, dtype=torch.int32)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(InputError, match="qweight, a quantised format"):
        load_target_parts(describe_model(tmp_path))


def test_derived_sizes_are_bounded(tmp_path):
    build("Llama", tmp_path)
    config = derive_config(describe_model(tmp_path), (0, 1, 2), 64)
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (4, 4, 64)
    wide = describe_model(tmp_path)
    moe = type(wide)(**{**wide.__dict__, "is_moe": True, "hidden_size": 7168, "num_heads": 64, "num_kv_heads": 64})
    kimi = derive_config(moe, (2, 30, 58), 32000)
    assert kimi.intermediate_size == 14336
    assert kimi.num_attention_heads * kimi.head_dim == 7168
    assert derive_config(moe, (2, 30, 58), 32000, intermediate_size=18432).intermediate_size == 18432
    with pytest.raises(InputError, match="larger than the target"):
        derive_config(moe, (2, 30, 58), 32, vocab_size=10)


def test_rope_settings_old_and_new_form():
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    new = {"rope_parameters": {**llama3, "rope_theta": 5e5}}
    old = {"rope_scaling": llama3, "rope_theta": 5e5}
    assert rope_of(new) == rope_of(old) == {**llama3, "rope_theta": 5e5}
    assert rope_of({"rope_scaling": {"type": "linear", "factor": 2.0}}) == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 1e4,
    }
    assert (
        rope_of({"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [1]}})["rope_type"] == "default"
    )


def test_vocabulary_is_the_most_frequent_supervised_tokens():
    counts = np.zeros(12, np.int64)
    for token_ids, loss_mask in (([3, 3, 9, 4, 4, 4], [1, 1, 0, 1, 1, 0]), ([7, 9], [1, 0])):
        count_supervised(counts, np.array(token_ids), np.array(loss_mask))
    assert counts.tolist() == [0, 0, 0, 2, 2, 0, 0, 1, 0, 0, 0, 0]
    vocabulary = choose_vocabulary(counts, 2, "hash")
    assert vocabulary.ids.tolist() == [3, 4]
    assert vocabulary.coverage == 0.8
    assert vocabulary.d2t().tolist() == [3, 3]
    assert vocabulary.t2d(12).nonzero().flatten().tolist() == [3, 4]
    with pytest.raises(InputError, match="no token in the store is supervised"):
        choose_vocabulary(counts * 0, 2, "hash")
