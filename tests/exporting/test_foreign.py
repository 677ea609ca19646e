"""Drafts of others: no tensor and no setting of theirs is lost or replaced on the way in, nor on the way out again."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_engine_folders import VARIANTS, make_draft, root  # noqa: F401  the fixture that makes a target
from training_work import VOCAB, options

from eyas.base.errors import InputError
from eyas.drafts.files import load_draft
from eyas.exporting.folders import export
from eyas.exporting.foreign import import_draft
from eyas.target.model_files import describe_model
from eyas.target.teacher import load_target_parts
from eyas.training.trainer import train

FORMATS = ("vllm", "sglang", "speculators")


def changed(folder, to, weights=None, config=None, without=()):
    """A copy of an engine's directory with other tensors or other settings."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors") | (weights or {})
    save_file({k: v for k, v in tensors.items() if k not in without}, to / "model.safetensors")
    old = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({k: v for k, v in (old | (config or {})).items() if k not in without}))
    return to


def parts(root):  # noqa: F811
    return load_target_parts(describe_model(root / "target"))


@pytest.fixture(scope="module")
def foreign(root):  # noqa: F811
    """`foreign("vllm")` -> an exported draft, fp32."""
    folder = make_draft(root, "source")
    made = {}

    def get(format):
        if format not in made:
            made[format] = export(folder, root / f"source-{format}", format, dtype="float32")
        return made[format]

    return get


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("format", FORMATS)
def test_out_and_in_and_out_again_is_the_same_to_the_bit(root, tmp_path, variant, format):  # noqa: F811
    out = export(make_draft(root, f"{variant}-{format}-bits", **VARIANTS[variant]), tmp_path / "out", format)
    back = import_draft(out, tmp_path / "back", str(root / "target"))
    again = export(back, tmp_path / "again", format)
    one, two = load_file(out / "model.safetensors"), load_file(again / "model.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert json.loads((out / "config.json").read_text()) == json.loads((again / "config.json").read_text())


@pytest.mark.parametrize("format", FORMATS)
def test_an_embedding_of_its_own_stays_with_the_draft(root, foreign, tmp_path, format):  # noqa: F811
    target, own = parts(root).embedding, torch.randn(VOCAB, 32)
    out = changed(foreign(format), tmp_path / "own", {"embed_tokens.weight": own})
    back = import_draft(out, tmp_path / "back", str(root / "target"))
    draft, manifest = load_draft(back, target)
    assert manifest["config"]["own_embedding"]
    assert torch.equal(draft.embed_tokens.weight, own)
    copy = export(back, tmp_path / "copy", "eyas")
    assert torch.equal(load_draft(copy, target)[0].embed_tokens.weight, own)
    for again in ("vllm", "speculators"):
        weights = load_file(export(back, tmp_path / again, again, dtype="float32") / "model.safetensors")
        assert torch.equal(weights["embed_tokens.weight"], own)
    with pytest.raises(InputError, match="SGLang gives every draft its target's embedding"):
        export(back, tmp_path / "sglang", "sglang")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_target_s_own_embedding_is_left_to_the_target(root, foreign, tmp_path, dtype):  # noqa: F811
    same = parts(root).embedding.to(getattr(torch, dtype))
    out = changed(foreign("vllm"), tmp_path / "same", {"embed_tokens.weight": same})
    back = import_draft(out, tmp_path / "back", str(root / "target"))
    assert not load_draft(back)[1]["config"]["own_embedding"]
    assert "embed_tokens.weight" not in load_file(back / "model.safetensors")


def test_a_training_begun_from_it_keeps_it_too(work, tmp_path):
    """Through checkpoints, a resumption, the saved draft and a second --init-from."""
    common = {"ttt_steps": 2, "eval_every": 2, "draft": {"intermediate_size": 64}}
    train(**options(work, "plain-source", steps=2, **common))
    own = 3 * torch.randn(VOCAB, 32)
    out = export(work / "plain-source", tmp_path / "out", dtype="float32")
    out = changed(out, tmp_path / "own", {"embed_tokens.weight": own})
    settings = options(work, "from-own", init_from=out, **common)
    first = train(**{**settings, "steps": 2})
    train(**{**settings, "steps": 4})
    other = train(**options(work, "not-from-own", steps=2, init_from=work / "plain-source", **common))
    assert first.before != other.before, "the embedding changes nothing here"
    checkpoint = work / "from-own" / "checkpoints" / "step-00000004" / "model.safetensors"
    for path in (work / "from-own" / "model.safetensors", checkpoint):
        assert torch.equal(load_file(path)["embed_tokens.weight"], own)
    train(**options(work, "from-from-own", steps=2, init_from=work / "from-own", **common))
    assert torch.equal(load_file(work / "from-from-own" / "model.safetensors")["embed_tokens.weight"], own)


def test_a_draft_without_a_head_has_the_target_s(root, tmp_path):  # noqa: F811
    out = export(make_draft(root, "whole", size=VOCAB), tmp_path / "out", dtype="float32")
    out = changed(out, tmp_path / "headless", without=("lm_head.weight", "draft_vocab_size"))
    draft, _ = load_draft(import_draft(out, tmp_path / "back", str(root / "target")))
    assert torch.equal(draft.lm_head.weight, parts(root).head.float())
    partly = changed(
        export(make_draft(root, "partly"), tmp_path / "partly"), tmp_path / "b", without=("lm_head.weight",)
    )
    with pytest.raises(InputError, match=r"a draft vocabulary and no lm_head\.weight"):
        import_draft(partly, tmp_path / "no", str(root / "target"))


def test_a_vocabulary_is_read_from_either_map_and_both_must_agree(root, foreign, tmp_path):  # noqa: F811
    out, target = foreign("vllm"), str(root / "target")
    whole, _ = load_draft(import_draft(out, tmp_path / "whole", target))
    for name in ("d2t", "t2d"):
        half = changed(out, tmp_path / f"no-{name}", without=(name,))
        assert torch.equal(load_draft(import_draft(half, tmp_path / f"back-{name}", target))[0].d2t, whole.d2t)
    d2t, t2d = whole.d2t.clone(), whole.t2d.clone()
    wrong = {
        "not those of d2t": ({"t2d": ~t2d}, {}, ()),
        "lm_head has 82 rows, d2t or t2d 96 tokens": ({}, {}, ("d2t", "t2d")),
        "different ones": ({"d2t": torch.zeros_like(d2t).index_fill(0, torch.tensor([1]), -1)}, {}, ("t2d",)),
        "ids from .* to 9999": ({"d2t": d2t.index_fill(0, torch.tensor([81]), 9999 - 81)}, {}, ("t2d",)),
        "config.json says 80": ({}, {"draft_vocab_size": 80}, ()),
    }
    for number, (text, (weights, config, without)) in enumerate(wrong.items()):
        with pytest.raises(InputError, match=text):
            import_draft(changed(out, tmp_path / f"wrong-{number}", weights, config, without), tmp_path / "no", target)


def test_tensors_that_contradict_each_other_or_the_target_are_refused(root, foreign, tmp_path):  # noqa: F811
    target, ours = str(root / "target"), parts(root)
    ids = load_draft(root / "source")[0].target_ids(torch.arange(82))
    good = {"verifier_lm_head.weight": ours.head[ids].bfloat16(), "verifier_norm.weight": ours.norm.clone()}
    import_draft(changed(foreign("speculators"), tmp_path / "good", good), tmp_path / "taken", target)
    for name, tensor in good.items():
        out = changed(foreign("speculators"), tmp_path / f"bad-{name}", good | {name: tensor + 1})
        with pytest.raises(InputError, match=f"{name} is not this target's"):
            import_draft(out, tmp_path / "no", target)
    deep = export(make_draft(root, "deep", num_layers=2), tmp_path / "deep", dtype="float32")
    out = changed(deep, tmp_path / "norms", {"layers.1.hidden_norm.weight": torch.ones(32)})
    with pytest.raises(InputError, match=r"hidden_norm\.weight and .*input_layernorm\.weight differ"):
        import_draft(out, tmp_path / "no", target)
    out = changed(foreign("vllm"), tmp_path / "shape", {"embed_tokens.weight": torch.ones(VOCAB + 1, 32)})
    with pytest.raises(InputError, match=r"embed_tokens\.weight is \[97, 32\], the target's \[96, 32\]"):
        import_draft(out, tmp_path / "no", target)
    out = changed(foreign("vllm"), tmp_path / "narrow", {"fc.weight": torch.ones(32, 64)})
    with pytest.raises(InputError, match=r"fc\.weight: \[32, 64\], this draft has \[32, 96\]"):
        import_draft(out, tmp_path / "no", target)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}, "norm_before_fc"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": None}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"target_hidden_size": 64}, "target_hidden_size"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type"),
    ],
)
def test_a_setting_that_eyas_does_not_compute_is_refused_by_name(root, foreign, tmp_path, config, name):  # noqa: F811
    out = changed(foreign("vllm"), tmp_path / "out", config=config)
    with pytest.raises(InputError, match=f"sets {name} to "):
        import_draft(out, tmp_path / "no", str(root / "target"))


def test_an_embedding_is_not_written_from_a_model_that_changed(tmp_path):
    from training_work import make_target

    make_target(tmp_path / "target")
    folder = make_draft(tmp_path, "draft")
    make_target(tmp_path / "target", seed=5)
    for format, embedding in (("speculators", False), ("vllm", True)):
        with pytest.raises(InputError, match="has other weights"):
            export(folder, tmp_path / format, format, embedding=embedding)
    export(folder, tmp_path / "without", "vllm")


def test_a_draft_of_another_target_is_told_from_ours(work, tmp_path):
    from training_work import make_target

    from eyas.drafts.eagle3.init import choose_vocabulary, derive_config, initialise
    from eyas.drafts.eagle3.model import Draft
    from eyas.exporting.foreign import init_from

    make_target(tmp_path / "target", seed=5)
    folder, info = make_draft(tmp_path, "draft"), describe_model(work / "target")
    draft = Draft(derive_config(info, (1, 3, 5), 82))
    initialise(draft, load_target_parts(info), choose_vocabulary(np.ones(VOCAB), 82, "hash"), torch.ones(96))
    assert any("other weights of the target" in line for line in init_from(draft, folder, info))
