"""Tiny random models of real architectures, saved as Hugging Face folders.

Weights are drawn wide enough that layers do something, and norms are not left at one: a final norm of ones hides fault F6.
"""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 128
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def draw_weights(model) -> None:
    """Draw a fresh model's weights as this module's opening says."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("ln_f.weight", "ln_1.weight", "ln_2.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.15)


def make_tiny_wrapper(folder: Path, seed: int = 0) -> Path:
    """A text model inside a multimodal wrapper: `Gemma3ForConditionalGeneration` with a tiny vision tower."""
    import torch
    import transformers as t

    torch.manual_seed(seed)
    text = tiny_config("gemma3").to_dict()
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 6,  # as many as the decoder has: the wrong stack of layers would fit by its length
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = t.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=120,
        boi_token_index=121,
        eoi_token_index=122,
    )
    model = t.Gemma3ForConditionalGeneration(config)
    draw_weights(model)
    model.save_pretrained(folder)
    return folder


def make_vision_wrapper(kind: str, folder: Path, seed: int = 0) -> Path:
    """`mistral3`, `qwen3_vl`, `aya` (Cohere 2 with windows) or `llama4` (attention within chunks): a text model of 4 layers inside a wrapper that only reads images besides."""
    import torch
    import transformers as t

    torch.manual_seed(seed)
    text = {**COMMON, "head_dim": 8}
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower |= {"image_size": 28, "patch_size": 14}
    model: torch.nn.Module
    if kind == "mistral3":
        vision = {**tower, "model_type": "pixtral"}
        config = t.Mistral3Config(
            text_config=t.MistralConfig(**text).to_dict(), vision_config=vision, image_token_index=120
        )
        model = t.Mistral3ForConditionalGeneration(config)
    elif kind == "llama4":
        own = {"intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": 8}
        vision = {**tower, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
        config = t.Llama4Config(
            text_config=t.Llama4TextConfig(**text, **own).to_dict(), vision_config=vision, image_token_index=120
        )
        model = t.Llama4ForConditionalGeneration(config)
    elif kind == "aya":
        vision = {**tower, "model_type": "siglip_vision_model"}
        cohere = t.Cohere2Config(**text, sliding_window=12).to_dict()
        model = t.AyaVisionForConditionalGeneration(
            t.AyaVisionConfig(vision_config=vision, text_config=cohere, image_token_index=120)
        )
    else:
        rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 10000.0}
        vision = {"hidden_size": 16, "intermediate_size": 32, "depth": 2, "num_heads": 2, "out_hidden_size": 32}
        special = {
            "image_token_id": 120,
            "video_token_id": 121,
            "vision_start_token_id": 122,
            "vision_end_token_id": 123,
        }
        config = t.Qwen3VLConfig(
            text_config={**text, "rope_parameters": rope},
            vision_config={**vision, "deepstack_visual_indexes": [0]},
            **special,
        )
        model = t.Qwen3VLForConditionalGeneration(config)
    draw_weights(model)
    model.save_pretrained(folder)
    return folder


def make_tiny_model(kind: str, folder: Path, seed: int = 0, dtype: str = "float32") -> Path:
    """Make `llama`, `llama_untied`, `llama3`, `qwen3`, `qwen3_moe`, `gemma2`, `gemma3`, `deepseek_v3`, `gpt2`, `gpt_oss` or `mistral_window`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind))
    draw_weights(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def tiny_config(kind: str):
    """The config of one kind: 4 layers (6 for gemma3), H 32."""
    import transformers as t

    common = COMMON
    if kind == "llama":
        return t.LlamaConfig(**common)
    if kind == "llama_untied":
        return t.LlamaConfig(**{**common, "tie_word_embeddings": False})
    if kind == "llama3":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return t.LlamaConfig(**common, rope_parameters=rope)
    if kind == "qwen3":
        return t.Qwen3Config(**common, head_dim=8)
    if kind == "qwen3_moe":
        return t.Qwen3MoeConfig(
            **common,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            decoder_sparse_step=1,
            norm_topk_prob=True,
        )
    if kind == "gemma3":
        return t.Gemma3TextConfig(
            **{**common, "num_hidden_layers": 6}, head_dim=8, sliding_window=16, query_pre_attn_scalar=8
        )
    if kind == "gemma2":  # soft caps low enough that leaving one out changes the argmax
        return t.Gemma2Config(
            **common,
            head_dim=8,
            query_pre_attn_scalar=1,
            attn_logit_softcapping=1.0,
            final_logit_softcapping=5.0,
            sliding_window=16,
        )
    if kind == "mistral_window":
        return t.MistralConfig(**common, sliding_window=12)
    if kind == "gpt2":
        return t.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
        )
    if kind == "gpt_oss":
        return t.GptOssConfig(
            **{**common, "tie_word_embeddings": False},
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=16,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    if kind == "deepseek_v3":
        return t.DeepseekV3Config(
            **{**common, "num_key_value_heads": 4, "tie_word_embeddings": False},
            moe_intermediate_size=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
        )
    raise ValueError(f"no tiny model of kind {kind!r}")
