"""vLLM's own rope tables, made from an exported draft's config: the draft's, of every kind."""

import pytest
import torch
from tiny_drafts import ROPES, config_with
from transformers import LlamaConfig

from eyas.drafts.eagle3.model import Draft
from eyas.exporting.folders import engine_config

pytest.importorskip("vllm")


@pytest.mark.parametrize("name", ROPES)
def test_vllm_rotates_as_the_draft_does(name):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    config = config_with(ROPES[name], head_dim=64)
    llama = LlamaConfig(**engine_config(config, "bfloat16", {"id": "target"}))
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(64, llama.max_position_embeddings, rope_parameters=llama.rope_parameters, dtype=torch.float32)
    places = torch.cat([torch.arange(100), torch.tensor([4097, 120_000])])
    cos, sin = rope.cos_sin_cache[places].chunk(2, -1)
    torch.testing.assert_close(Draft(config).rope(places), (cos, sin), rtol=1e-6, atol=1e-6)
