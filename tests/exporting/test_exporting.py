"""Exported drafts: what each engine reads is there, in its own numbering, and the draft that comes back is the same function."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from training_work import options

from eyas.base.errors import FolderConflictError, InputError, StoreError
from eyas.drafts.eagle3.init import choose_vocabulary, derive_config, initialise
from eyas.drafts.eagle3.model import Draft
from eyas.drafts.files import draft_weights, load_draft, save_draft
from eyas.drafts.settings import DraftInit
from eyas.exporting.folders import export
from eyas.exporting.foreign import import_draft, init_from
from eyas.store.reader import open_states
from eyas.target.model_files import describe_model
from eyas.target.teacher import load_target_parts
from eyas.training.data import read_batch
from eyas.training.trainer import train

LAYER = {
    *(f"self_attn.{p}_proj.weight" for p in "qkvo"),
    *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
    *(f"{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
}
OTHERS = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}


@pytest.fixture(scope="module")
def draft(work):
    train(**options(work, "to-export", steps=5, eval_every=5))
    return work / "to-export"


def rows(folder, work):
    """The draft's output rows over two samples of the store."""
    model, _ = load_draft(folder, load_target_parts(describe_model(work / "target")).embedding)
    batch = read_batch(open_states(work / "store"), [0, 1], model.config.aux_layer_ids, 6, 3)
    with torch.no_grad():
        return [x @ model.lm_head.weight.T for x in model.ttt_rows(batch, 3)], model


@pytest.mark.parametrize(
    ("format", "prefix"), [("vllm", "midlayer."), ("sglang", "midlayer."), ("speculators", "layers.0.")]
)
def test_round_trip_through_each_format(work, draft, tmp_path, format, prefix):
    out = export(draft, tmp_path / "out", format, dtype="float32")
    weights, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    # speculators runs on memory that nobody filled when the embedding is not in the file.
    more = {"embed_tokens.weight"} if format == "speculators" else set()
    assert set(weights) == OTHERS | more | {prefix + name for name in LAYER}
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    if format != "speculators":
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["rope_parameters"]["rope_theta"] == config["rope_theta"]
    assert weights["d2t"].dtype == torch.int64
    assert weights["t2d"].dtype == torch.bool
    target_ids = weights["d2t"] + torch.arange(64)
    assert weights["t2d"].nonzero().flatten().tolist() == target_ids.tolist()
    back = import_draft(out, tmp_path / "back", str(work / "target"))
    before, model = rows(draft, work)
    after, again = rows(back, work)
    assert again.config == model.config
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert "vllm serve" in (out / "README.md").read_text() or format == "sglang"


def test_the_folded_scale_is_the_same_function(work, draft, tmp_path):
    """fc on raw states, as engines apply it, against scale then fc."""
    weights = load_file(export(draft, tmp_path / "out", dtype="float32") / "model.safetensors")
    model, _ = load_draft(draft)
    assert not torch.allclose(model.aux_scale, torch.ones_like(model.aux_scale))
    sample = open_states(work / "store")[0]
    aux = torch.cat([sample.hidden[i] for i in (1, 3, 5)], -1)
    torch.testing.assert_close(aux @ weights["fc.weight"].T, model.combine_aux(aux).detach(), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_right_is_refused(work, draft, tmp_path):
    out = export(draft, tmp_path / "out")
    with pytest.raises(StoreError, match="draft directory of an engine"):
        load_draft(out)
    assert load_file(out / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    with pytest.raises(InputError, match="--format is 'tgi'"):
        export(draft, tmp_path / "out", "tgi")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FolderConflictError, match=r"notes\.txt"):
        export(draft, tmp_path / "other")
    with pytest.raises(InputError, match="is the draft itself"):
        export(draft, draft, "eyas")
    with pytest.raises(InputError, match="own draft directory already"):
        import_draft(draft, tmp_path / "back", str(work / "target"))
    (tmp_path / "other" / "manifest.json").write_text('{"kind": "eyas.dataset"}')
    with pytest.raises(InputError, match="is a token dataset"):
        import_draft(tmp_path / "other", tmp_path / "back", str(work / "target"))
    # An import may be repeated, but neither an import nor an export takes the place of another draft.
    mine = import_draft(out, tmp_path / "mine", str(work / "target"))
    import_draft(out, mine, str(work / "target"))
    with pytest.raises(FolderConflictError, match=r"manifest\.json"):
        export(draft, mine, "vllm")
    with pytest.raises(FolderConflictError, match="holds another draft"):
        export(draft, mine, "eyas")
    with pytest.raises(FolderConflictError, match="holds another draft"):
        import_draft(export(draft, tmp_path / "out2"), mine, str(work / "target"))
    with pytest.raises(FolderConflictError, match=r"notes\.txt"):
        import_draft(out, tmp_path / "other", str(work / "target"))
    weights = load_file(out / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if "up_proj" not in k} | {"surprise": torch.zeros(1)},
        out / "model.safetensors",
    )
    with pytest.raises(InputError, match=r"missing \['layers\.0\.mlp\.up_proj\.weight'\], unknown \['surprise'\]"):
        import_draft(out, tmp_path / "back", str(work / "target"))
    config = json.loads((out / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="names no layers"):
        import_draft(out, tmp_path / "back", str(work / "target"))


def test_layers_given_to_import_are_held_against_the_config(work, draft, tmp_path):
    out, target = export(draft, tmp_path / "out"), str(work / "target")
    with pytest.raises(InputError, match=r"config\.json names layers"):
        import_draft(out, tmp_path / "other", target, layer_ids=[1, 2, 3])
    config = json.loads((out / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]
    (out / "config.json").write_text(json.dumps(config))
    for wrong in ([1, 3, 99], [1, 3, 3]):
        with pytest.raises(InputError, match=r"out of range|given twice"):
            import_draft(out, tmp_path / "other", target, layer_ids=wrong)
    import_draft(out, tmp_path / "other", target, layer_ids=[1, 3, 5])
    with pytest.raises(FolderConflictError, match="another draft"):
        import_draft(out, tmp_path / "other", target, layer_ids=[1, 3, 4])


def test_with_the_embedding_and_as_eyas_folder(work, draft, tmp_path):
    weights = load_file(export(draft, tmp_path / "with", embedding=True) / "model.safetensors")
    assert weights["embed_tokens.weight"].shape == (96, 32)
    before, _ = rows(draft, work)
    after, _ = rows(export(draft, tmp_path / "copy", "eyas"), work)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


SHAPES = {
    "EAGLE-3.1": {"norm_aux": True, "norm_before_residual": True, "norm_output": True},
    "EAGLE-3.1 without the residual's": {"norm_aux": True, "norm_output": True},
    "grouped heads": {"num_key_value_heads": 2},
    "two layers": {"num_layers": 2},
    "yarn": {
        "rope": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.0,
                 "mscale_all_dim": 1.0},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "format"),
    [
        (shape, format)
        for shape in SHAPES
        for format in ("vllm", "sglang", "speculators", "eyas")
        if (shape, format) != ("EAGLE-3.1", "sglang")  # SGLang has no norm before the residual: refused
    ],
)
def test_every_shape_starts_again_from_each_format(work, tmp_path, shape, format):
    """Saved, exported, read by --init-from into a draft with other first weights and another scale: the same function."""
    info = describe_model(work / "target")
    parts = load_target_parts(info)
    config = derive_config(info, (1, 3, 5), 64, **SHAPES[shape])
    vocabulary = choose_vocabulary(np.arange(96)[::-1].copy() + 1, 64, "hash")

    def begun(seed, scale):
        made = Draft(config)
        initialise(made, parts, vocabulary, torch.full((3 * 32,), scale), seed=seed, first=DraftInit(zero_down=False))
        for norm in [p for n, p in made.named_parameters() if "norm" in n]:
            norm.data += 0.1 * torch.randn(norm.shape, generator=torch.Generator().manual_seed(seed))
        return made

    source = begun(1, 1.0 if config.norm_aux else 0.5)  # nothing can be folded through the norms
    fields = {"target": info.for_manifest(), "dataset_hash": "hash"}
    save_draft(tmp_path / "draft", config, draft_weights(source), **fields)
    out = export(tmp_path / "draft", tmp_path / "out", format, dtype="float32")
    again = begun(2, 1.0 if config.norm_aux else 0.25)
    init_from(again, out)
    batch = read_batch(open_states(work / "store"), [0, 1], (1, 3, 5), 6, 3, skip_prompts=config.num_layers == 1)
    with torch.no_grad():
        want, other, have = (d.ttt_rows(batch, 3) for d in (source, begun(2, 1.0), again))
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
    assert (other[0] - want[0]).abs().max() > 1e-2, "the drafts did not differ to begin with"


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"num_attention_heads": 8, "head_dim": 4, "num_key_value_heads": 8}, "--heads, --kv-heads, --head-dim"),
        ({"norm_output": True}, "--norm-output"),
        ({"norm_before_residual": True}, "--norm-before-residual"),
        ({"norm_aux": True}, "--norm-aux"),
        ({"aux_layer_ids": (1, 3, 4)}, "--aux-layers"),
        ({"rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "--rope"),
    ],
)
@pytest.mark.parametrize("format", ["vllm", "eyas"])
def test_what_would_load_but_mean_something_else_is_refused(work, draft, tmp_path, change, flag, format):
    """Most of these change no tensor's shape."""
    out = export(draft, tmp_path / "out", format)
    config = load_draft(draft)[0].config
    with pytest.raises(InputError) as refused:
        init_from(Draft(replace(config, **change)), out)
    assert flag in refused.value.remedy


@pytest.mark.parametrize("format", ["vllm", "sglang", "speculators"])
def test_training_goes_on_from_an_engines_folder(work, draft, tmp_path, format):
    """The folded scale comes out again: the draft starts with the acceptance it had."""
    out = export(draft, tmp_path / "out", format, dtype="float32")
    report = train(**options(work, f"from-{format}", steps=1, eval_every=1, learning_rate=1e-7, init_from=out))
    original = train(**options(work, f"from-eyas-{format}", steps=1, eval_every=1, learning_rate=1e-7, init_from=draft))
    assert report.before == original.before


def test_command_line_from_store_to_engine_folder(work, tmp_path):
    """train, eval and export as a user types them."""
    import os
    import subprocess
    import sys

    def eyas(*arguments):
        environment = {**os.environ, "EYAS_STATE_DIR": str(tmp_path / "runs"), "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, "-m", "eyas", *map(str, arguments)],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    target, store = work / "target", work / "store"
    said = eyas(
        "train", "--states", store, "--model-path", target, "--output-dir", tmp_path / "draft", "--aux-layers", 1, 3, 5,
        "--draft-vocab-size", 64, "--ttt-steps", 2, "--steps", 4, "--eval-every", 2, "--batch-tokens", 200, "--held-out", 0.2,
        "--mlp", 64, "--dtype", "float32", "--track", "none",
    )  # fmt: skip
    assert "draft vocabulary of 64 tokens covers" in said
    assert re.search(r"states: passed \S+: bytes, parity", said)
    assert "simulated acceptance length" in said
    assert load_draft(tmp_path / "draft")[0].config.intermediate_size == 64
    assert "vllm serve" in eyas("export", "--draft", tmp_path / "draft", "--output-dir", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()
