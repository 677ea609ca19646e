"""Exported folders read by the engines' own rules: no weight unused or missing, the same draft logits.

SGLang's rules are written down here from its source (0.5.23: `models/llama_eagle3.py`, `spec_aux_hidden_state.py`); its classes need packages
that fit no CPU test. speculators is the real one where it is installed (`pip install --no-deps speculators hs-connectors loguru
pydantic-settings`). vLLM is in `engines/test_acceptance_vllm.py`.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sglang_rules import sglang_captures
from torch.nn import functional as F
from training_work import VOCAB, make_target

from eyas.base.errors import InputError
from eyas.drafts.eagle3.init import choose_vocabulary, derive_config, initialise
from eyas.drafts.eagle3.model import Draft
from eyas.drafts.files import draft_weights, load_draft, save_draft
from eyas.drafts.packing import pack
from eyas.drafts.settings import DraftInit
from eyas.exporting.folders import export
from eyas.exporting.foreign import import_draft
from eyas.target.model_files import describe_model
from eyas.target.teacher import load_target_parts

T, LAYERS = 20, 6
VARIANTS = {
    "plain": {},
    "norm_aux": {"norm_aux": True},
    "norm_output": {"norm_output": True},
    "two_layers": {"num_layers": 2},
    "order": {"aux": (5, 1, 3, 2)},  # engines hand the states over in the order of the layers
    "order_norm_aux": {"aux": (5, 1, 3), "norm_aux": True},
    "every_token": {"size": VOCAB},  # no map: engines that know no smaller vocabulary take one for an unknown weight
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine-folders")
    make_target(folder / "target")
    return folder


def make_draft(root, name, aux=(1, 3, 5), size=82, **options):
    """A random draft that uses everything it has: no norm of ones, an MLP that is not zero, a scale to fold."""
    info = describe_model(root / "target")
    counts = np.ones(VOCAB, np.int64)
    counts[::7] = 0  # with 82 of 96, some tokens the draft cannot say
    draft = Draft(derive_config(info, aux, size, **options))
    torch.manual_seed(0)
    scale = torch.ones(len(aux) * 32) if options.get("norm_aux") else 0.5 + torch.rand(len(aux) * 32)
    vocabulary = choose_vocabulary(counts, size, "hash")
    initialise(draft, load_target_parts(info), vocabulary, scale, first=DraftInit(zero_down=False))
    with torch.no_grad():
        for key, parameter in draft.named_parameters():
            if "norm" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
    save_draft(root / name, draft.config, draft_weights(draft), target=info.for_manifest(), dataset_hash="hash")
    return root / name


def inputs(aux_ids, steps=1):
    """Random states of every layer, tokens, and what the draft is trained on: the packed batch."""
    generator = torch.Generator().manual_seed(1)
    states = {i: 2 * torch.randn(T, 32, generator=generator) for i in range(LAYERS + 1)}
    ids = torch.randint(1, VOCAB, (T,), generator=generator)
    aux = torch.cat([states[i] for i in aux_ids], -1)
    batch = pack([ids.numpy()], [np.ones(T, np.uint8)], [aux], [torch.zeros(T, 32)], steps, skip_prompts=False)
    return states, ids, batch


def our_logits(folder, root, steps=1):
    draft, _ = load_draft(folder, load_target_parts(describe_model(root / "target")).embedding)
    states, ids, batch = inputs(draft.config.aux_layer_ids, steps)
    with torch.no_grad():
        return draft, states, ids, [x @ draft.lm_head.weight.T for x in draft.ttt_rows(batch, steps)]


def sglang_load(folder):
    """Parameter name -> tensor as `LlamaForCausalLMEagle3.load_weights` fills them, the hot token ids, and the names that it would skip."""
    config = json.loads((folder / "config.json").read_text())
    H, D = config["hidden_size"], config["head_dim"]
    wanted = {"fc.weight": (H, H * config["num_aux_hidden_states"]), "norm.weight": (H,)}
    wanted["lm_head.weight"] = (config["draft_vocab_size"], H)
    for i in range(config["num_hidden_layers"]):
        layer, width = f"layers.{i}.", 2 * H if i == 0 else H
        wanted |= {layer + n + ".weight": (H,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}
        wanted |= {f"{layer}self_attn.{p}_proj.weight": (config[key] * D, width) for p, key in heads.items()}
        wanted[layer + "self_attn.o_proj.weight"] = (H, config["num_attention_heads"] * D)
        wanted |= {f"{layer}mlp.{p}_proj.weight": (config["intermediate_size"], H) for p in ("gate", "up")}
        wanted[layer + "mlp.down_proj.weight"] = (H, config["intermediate_size"])
    if config.get("fc_norm"):
        wanted |= {f"fc_norm.{i}.weight": (H,) for i in range(config["num_aux_hidden_states"])}
    loaded, skipped, hot = {}, [], None
    for key, tensor in load_file(folder / "model.safetensors").items():
        name = key.replace("midlayer", "layers.0")
        if "d2t" in name:
            hot = tensor + torch.arange(len(tensor))
        elif name in wanted:
            assert tuple(tensor.shape) == wanted[name], name
            loaded[name] = tensor
        elif "t2d" not in name:
            skipped.append(name)
    assert set(loaded) == set(wanted), "weights missing"
    assert skipped == []
    return config, loaded, hot


def norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x, positions, theta):
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def sglang_logits(config, w, states, ids, embedding):
    """The first step over T tokens, as SGLang's draft runs it on the states that its target captures."""
    eps, D, theta = config["rms_norm_eps"], config["head_dim"], config["rope_parameters"]["rope_theta"]
    captured = sglang_captures(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], "LlamaForCausalLM", LAYERS)
    aux = [states[i] for i in captured]
    if config["fc_norm"]:
        aux = [norm(x, w[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(aux)]
    h = torch.cat(aux, -1) @ w["fc.weight"].T
    positions = torch.arange(1, T + 1).float()
    for i in range(config["num_hidden_layers"]):
        layer = {k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        x = norm(h, layer["hidden_norm.weight"], eps)
        if i == 0:
            x = torch.cat([norm(embedding[ids.roll(-1)], layer["input_layernorm.weight"], eps), x], -1)
        q, k, v = ((x @ layer[f"self_attn.{p}_proj.weight"].T).view(T, -1, D) for p in "qkv")
        q, k = rotated(q, positions, theta), rotated(k, positions, theta)
        q, k, v = (y.transpose(0, 1) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = h + mixed.transpose(0, 1).reshape(T, -1) @ layer["self_attn.o_proj.weight"].T
        x = norm(h, layer["post_attention_layernorm.weight"], eps)
        gate = F.silu(x @ layer["mlp.gate_proj.weight"].T)
        h = h + (gate * (x @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return norm(h, w["norm.weight"], eps) @ w["lm_head.weight"].T


@pytest.mark.parametrize("format", ["sglang", "vllm"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_read_by_sglangs_rules(root, tmp_path, variant, format):
    folder = make_draft(root, f"{variant}-{format}", **VARIANTS[variant])
    draft, states, ids, (ours,) = our_logits(folder, root)
    config, weights, hot = sglang_load(export(folder, tmp_path / "out", format, dtype="float32"))
    if variant == "every_token":
        assert hot is None
    else:
        assert hot.tolist() == draft.target_ids(torch.arange(82)).tolist()
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    theirs = sglang_logits(config, weights, states, ids, draft.embed_tokens.weight)
    torch.testing.assert_close(theirs[: T - 1], ours[: T - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("format", ["vllm", "sglang", "speculators"])
def test_every_variant_comes_back(root, tmp_path, variant, format):
    folder = make_draft(root, f"{variant}-{format}-back", **VARIANTS[variant])
    back = import_draft(
        export(folder, tmp_path / "out", format, dtype="float32"), tmp_path / "back", str(root / "target")
    )
    again, _, _, theirs = our_logits(back, root, 3)
    assert list(again.config.aux_layer_ids) == sorted(load_draft(folder)[0].config.aux_layer_ids)
    torch.testing.assert_close(theirs, our_logits(folder, root, 3)[3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"aux": (0, 1, 3)}, "captures neither the embeddings"),
        ({"aux": (1, 3, 6)}, "captures neither the embeddings"),
    ],
)
def test_drafts_that_sglang_cannot_run_are_refused_and_named(root, tmp_path, options, text):
    folder = make_draft(root, text.replace(" ", "-") + str(options.get("aux", "")), **options)
    with pytest.raises(InputError, match=text):
        export(folder, tmp_path / "sglang", "sglang")
    out = export(folder, tmp_path / "vllm", "vllm")
    assert "SGLang cannot run it" in (out / "README.md").read_text()
    # Silence would be taken for SGLang's default layers: nothing there may look like an answer.
    assert "eagle_aux_hidden_state_layer_ids" not in json.loads((out / "config.json").read_text())["eagle_config"]


def test_only_sglangs_ids_are_read_by_the_targets_rule(root, tmp_path):
    out = export(make_draft(root, "nested", aux=(5, 1, 3)), tmp_path / "out", "sglang", dtype="float32")
    config = json.loads((out / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (out / "config.json").write_text(json.dumps(config))
    back = import_draft(out, tmp_path / "back", str(root / "target"))
    assert load_draft(back)[0].config.aux_layer_ids == (1, 3, 5)


@pytest.mark.parametrize("variant", [*VARIANTS, "norm_before_residual"])
def test_speculators_itself_loads_the_folder(root, tmp_path, variant):
    """speculators' own class: every weight used, none missing but the target's, draft logits equal over three steps."""
    pytest.importorskip("speculators")
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    options = VARIANTS.get(variant, {"norm_before_residual": True})
    folder = make_draft(root, f"{variant}-real", **options)
    out = export(folder, tmp_path / "out", "speculators", dtype="float32")
    config = Eagle3SpeculatorConfig.from_pretrained(str(out))
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(str(out), config=config).eval()
    have, file = model.state_dict(), load_file(out / "model.safetensors")
    assert set(have) - set(file) == {"verifier_lm_head.weight", "verifier_norm.weight"}
    assert all(torch.equal(have[key], tensor) for key, tensor in file.items())
    draft, states, ids, ours = our_logits(folder, root, 3)
    assert model.target_layer_ids == sorted(draft.config.aux_layer_ids)
    seen = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    aux = torch.cat([states[i] for i in model.target_layer_ids], -1)
    with torch.no_grad():
        model(
            hidden_states=aux[None],
            input_ids=ids.roll(-1)[None],  # its row i pairs the state of token i with token i + 1
            document_ids=torch.zeros(1, T, dtype=torch.long),
            ttt_steps=3,
        )
    for theirs, mine in zip(seen, ours, strict=True):
        torch.testing.assert_close(theirs[: T - 4], mine[: T - 4], rtol=1e-4, atol=1e-4)
