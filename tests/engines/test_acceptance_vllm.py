"""A draft exported for vLLM, loaded and drafting in a real vLLM on the CPU: its acceptance is ours."""

import numpy as np
import pytest
from vllm_models import vllm_within

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm]
#: What vLLM has to read right for a draft of each kind: one plain, one with everything that engines know.
VARIANTS = {
    "plain": ((1, 3, 5), {}),
    "everything": (
        (5, 1, 3),
        {"num_layers": 2, "norm_aux": True, "norm_output": True, "norm_before_residual": True},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_vllm_accepts_what_our_loop_accepts(tmp_path, variant):
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from eyas.data.prompts import PromptSet
    from eyas.drafts.eagle3.init import choose_vocabulary, derive_config, initialise
    from eyas.drafts.eagle3.model import Draft
    from eyas.drafts.files import draft_weights, save_draft
    from eyas.drafts.settings import DraftInit
    from eyas.evaluation.decode import Target, decode
    from eyas.evaluation.settings import EvalSettings
    from eyas.evaluation.vllm import measure_vllm
    from eyas.target.model_files import describe_model
    from eyas.target.teacher import load_target_parts

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=256, initializer_range=0.2, eos_token_id=127, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
    target = tmp_path / "target"
    model.save_pretrained(target)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w127").save_pretrained(target)
    info = describe_model(target)
    parts = load_target_parts(info)
    counts = np.ones(128, np.int64)
    counts[::9] = 0
    aux, options = VARIANTS[variant]
    draft = Draft(derive_config(info, aux, 112, **options))
    # A scale that is not one, so that the folded fc is put to the test (norms of the auxiliary states leave nothing to fold).
    scale = torch.ones(3 * 128) if "norm_aux" in options else 0.5 + torch.rand(3 * 128)
    initialise(draft, parts, choose_vocabulary(counts, 112, "hash"), scale, first=DraftInit(zero_down=False))
    save_draft(tmp_path / "draft", draft.config, draft_weights(draft), target=info.for_manifest(), dataset_hash="hash")

    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 120, int(n)).tolist() for n in rng.integers(4, 12, 12)]
    traces, _ = decode(Target(model, aux), draft, prompts, k=3, max_new_tokens=96, end_ids=[127])
    rounds = sum(len(t.emitted) for t in traces)
    length = sum(sum(t.emitted) for t in traces) / rounds

    sets = [PromptSet("together", prompts), *(PromptSet(str(i), [prompt]) for i, prompt in enumerate(prompts))]
    settings = EvalSettings(draft=tmp_path / "draft", model_path=str(target), chain=3, max_new_tokens=96)
    with vllm_within():
        found = measure_vllm(settings, target, sets, [127], dtype="float32")
    together = found.pop("together")
    assert together["replies"] == [t.tokens for t in traces]
    assert 1.05 < length < 3.9
    # The bar: within 2 % of each other as both are reported.
    assert together["acceptance_length"] == pytest.approx(length, rel=0.02)
    # Served one at a time vLLM accepts guess for guess what we do, those behind the end of a reply included, which it also counts.
    # (In a batch its drafts of some variants differ in a few rounds of a hundred: ours give the same in any batch, and in fp64.)
    for i, trace in enumerate(traces):
        served = found[str(i)]
        assert served["replies"] == [trace.tokens]
        assert served["rounds"] == len(trace.emitted), i
        guesses = (served["acceptance_length"] - 1) * served["rounds"]
        assert guesses == pytest.approx(sum(trace.accepted) + trace.behind, abs=0.1), i
