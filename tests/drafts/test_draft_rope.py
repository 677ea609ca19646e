"""The draft's rope of every kind: transformers' own tables, a whole draft, training against serving, and what engines read."""

import json

import pytest
import torch
from tiny_drafts import ROPES, config_with, gradients_equal_the_reference, packed, random_draft, random_samples
from tiny_models import make_tiny_wrapper
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eyas.base.errors import InputError
from eyas.drafts.eagle3.decoding import DraftDecoder
from eyas.drafts.eagle3.init import derive_config, rope_of
from eyas.drafts.eagle3.model import Draft
from eyas.drafts.module import ROPE_KINDS
from eyas.exporting.folders import engine_config, speculators_config
from eyas.exporting.foreign import same_rope
from eyas.target.model_files import describe_model

#: The same kinds with so few trained positions that a handful of tokens feels them.
SHORT = {
    name: rope
    | {"rope_theta": 50.0}
    | ({"original_max_position_embeddings": 16} if "original_max_position_embeddings" in rope else {})
    for name, rope in ROPES.items()
}


def test_every_kind_is_among_them():
    assert {rope["rope_type"] for rope in ROPES.values()} == set(ROPE_KINDS)


def rotary_of(fields):
    """transformers' rotary embedding for the fields of a config.json."""
    return LlamaRotaryEmbedding(LlamaConfig(**fields))


def fields_of(config, rope):
    return {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": dict(rope),
    }


def assert_same_tables(draft, rotary, places):
    cos, sin = rotary(torch.zeros(1), places.unsqueeze(0))
    half = draft.config.head_dim // 2
    mine = draft.rope(places)
    for have, want in zip(mine, (cos, sin), strict=True):
        torch.testing.assert_close(have, want[0, :, :half], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(have, want[0, :, half:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ROPES)
def test_cos_and_sin_are_those_of_transformers(name):
    config = config_with(ROPES[name], head_dim=64)
    draft = Draft(config)
    places = torch.cat([torch.arange(300), torch.arange(4000, 4200), torch.tensor([8191, 8192, 65535, 131071])])
    assert_same_tables(draft, rotary_of(fields_of(config, ROPES[name])), places)


@pytest.mark.parametrize("name", SHORT)
def test_a_whole_draft_rotates_as_transformers_does(name):
    """Loss and gradients of three steps; the slow reference rotates by transformers' own function."""
    config = config_with(SHORT[name], head_dim=8)
    rotary = rotary_of(fields_of(config, SHORT[name]))

    def rotate(x, position):
        cos, sin = rotary(x, torch.tensor([[position]]))  # [1, 1, D]
        rotated, _ = apply_rotary_pos_emb(x.view(1, 1, 1, -1), x.view(1, 1, 1, -1), cos, sin)
        return rotated.flatten()

    samples = random_samples([9, 7], config)
    # transformers' tables are fp32, whatever it rotates.
    found = gradients_equal_the_reference(random_draft(config), samples, 3, "kl", rotate, rtol=1e-3)
    plain = config_with(SHORT["default"], head_dim=8)
    if name != "default":
        other = gradients_equal_the_reference(random_draft(plain), samples, 3, "kl")
        assert (found - other).abs() > 1e-4, "this kind would pass for plain rope"


class Recorded(Draft):
    """A draft that keeps the positions it rotated by."""

    def __init__(self, config):
        super().__init__(config)
        self.places = []

    def rope(self, positions):
        self.places.append(positions.tolist())
        return super().rope(positions)


@pytest.mark.parametrize("name", SHORT)
def test_training_and_serving_rotate_by_the_same_positions(name):
    """Row i at step k sits at i + 1 + k in both, and both guess the same from it."""
    config, steps = config_with(SHORT[name], head_dim=8), 4
    draft = Recorded(config)
    draft.load_state_dict(random_draft(config).state_dict())
    draft = draft.double()
    draft.compute_dtype = torch.float64
    ((token_ids, mask, aux, final),) = random_samples([14], config, prompt=1)
    row = 6  # its state is the target's last one
    decoder = DraftDecoder(draft, 1, "cpu")
    following = torch.from_numpy(token_ids[1 : row + 2]).long().unsqueeze(0)
    real = torch.ones(1, row + 1, dtype=torch.bool)
    decoder.commit(aux[: row + 1].unsqueeze(0), following, torch.arange(row + 1).unsqueeze(0), real)
    served, _ = decoder.chain(steps, 0.0, None)
    assert draft.places == [[i + 1 for i in range(row + 1)], *[[row + 1 + k] for k in range(1, steps)]]

    draft.places.clear()
    token_ids = token_ids.copy()
    token_ids[row + 2 : row + 2 + steps] = served[0].numpy()  # training reads true tokens: let them be the guesses
    batch = packed([(token_ids, mask, aux, final)], steps, skip_prompts=False)
    assert draft.draft_tokens(batch, steps)[row].tolist() == served[0].tolist()
    assert draft.places == [[i + 1 + k for i in range(14)] for k in range(steps)]


@pytest.mark.parametrize("build", [engine_config, speculators_config])
@pytest.mark.parametrize("name", ROPES)
def test_exported_config_has_rope_in_old_form_and_new(name, build, tmp_path):
    """Each form alone gives the draft's own tables."""
    config = config_with(ROPES[name], head_dim=64)
    draft = Draft(config)
    raw = json.loads(json.dumps(build(config, "bfloat16", {"id": "target"})))
    llama = raw.get("transformer_layer_config", raw)
    places = torch.cat([torch.arange(50), torch.tensor([5000, 120_000])])
    new = {k: v for k, v in llama.items() if k not in ("rope_scaling", "rope_theta")}
    old = {k: v for k, v in llama.items() if k != "rope_parameters"}
    for form in (new, old):
        assert same_rope(config, rope_of(form))
        assert_same_tables(draft, rotary_of(fields_of(config, rope_of(form))), places)
    assert_same_tables(draft, rotary_of(new), places)
    (tmp_path / "config.json").write_text(json.dumps({**old, "model_type": "llama"}))
    assert_same_tables(draft, LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path)), places)
    assert llama["rope_theta"] == ROPES[name]["rope_theta"]
    assert (llama["rope_scaling"] is None) == (ROPES[name]["rope_type"] == "default")


@pytest.mark.parametrize("name", [n for n in ROPES if "yarn" in n])
def test_engines_that_pass_mscale_over_rotate_by_the_same_factor(name):
    """vLLM 0.26 and SGLang: (0.1 ln factor + 1) * attn_factor, whatever else is there."""
    config = config_with(ROPES[name], head_dim=64)
    raw = engine_config(config, "bfloat16", {"id": "target"})
    for form in (raw["rope_scaling"], raw["rope_parameters"]):
        factor = (0.1 * torch.log(torch.tensor(form["factor"])).item() + 1) * form["attn_factor"]
        assert factor == pytest.approx(Draft(config).rope_scale, rel=1e-6)
        assert form["attention_factor"] == pytest.approx(Draft(config).rope_scale, rel=1e-6)


def test_how_rope_is_spelled_does_not_matter_but_what_it_says_does():
    config = config_with(ROPES["yarn as DeepSeek and Kimi have it"], head_dim=64)
    assert same_rope(config, ROPES["yarn as DeepSeek and Kimi have it"] | {"attention_factor": 1.0})
    assert not same_rope(config, ROPES["yarn"])
    assert not same_rope(config, ROPES["yarn"] | {"rope_type": "dynamic"})
    # A target that rotates half of each head still gets a draft that rotates all of it.
    assert "partial_rotary_factor" not in rope_of(
        {"rope_parameters": ROPES["default"] | {"partial_rotary_factor": 0.5}}
    )
    with pytest.raises(InputError, match="dynamic"):
        config_with({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})


def test_a_draft_turns_as_its_target_where_the_config_file_says_nothing(tmp_path):
    """Gemma 3's released wrappers name no base: their class has 1e6, another class's default is 1e4."""
    folder = make_tiny_wrapper(tmp_path / "gemma3")
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_parameters", "rope_theta", "rope_scaling", "rms_norm_eps", "max_position_embeddings"):
        config["text_config"].pop(key, None)
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    info = describe_model(folder)
    resolved = AutoConfig.from_pretrained(folder).get_text_config()
    draft = derive_config(info, (1, 3, 5), 64)
    assert draft.rope == {"rope_type": "default", "rope_theta": 1e6}
    assert draft.rope["rope_theta"] == resolved.rope_parameters["full_attention"]["rope_theta"]
    assert draft.max_position_embeddings == resolved.max_position_embeddings == 131072
    assert draft.rms_norm_eps == resolved.rms_norm_eps
