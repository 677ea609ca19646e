"""Gate 4's judging on states and logits made by hand, whose right verdict is known; real engines are in test_faults.py and engines/."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from eyas.base.errors import ParityError
from eyas.data.dataset import Sample
from eyas.engines.transformers import TransformersEngine, TransformersSettings
from eyas.gates.evidence import judge_same_pass, judge_states, judge_target, require_shapes
from eyas.gates.parity import check_parity, pick_samples
from eyas.gates.reference import length_breaks
from eyas.target.model_files import describe_model
from eyas.target.teacher import TargetParts, Teacher, final_norm

N, H, V = 6, 64, 256
LENGTHS = (40, 90)


def samples():
    random = np.random.default_rng(0)
    return [Sample.of(random.integers(3, V, n), np.ones(n, np.uint8)) for n in LENGTHS]


def streams(grow=1.3):
    """Per sample, id -> [T, H]: a residual stream that each layer adds to, as in a real model."""
    torch.manual_seed(0)
    result = []
    for n in LENGTHS:
        stream, layers = torch.randn(n, H), {}
        for i in range(N + 1):
            layers[i] = stream
            stream = stream + 0.4 * grow**i * torch.randn(n, H)
        result.append(layers)
    return result


def only(layers, ids=(2, 4, N)):
    return [{i: one[i].clone() for i in ids} for one in layers]


def noisy(layers, size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            i: rows + size * rows.norm(dim=1, keepdim=True) * torch.randn(rows.shape, generator=generator) / H**0.5
            for i, rows in one.items()
        }
        for one in layers
    ]


def judge(states, reference=None, *, strict=True, limit=0.08, **more):
    return judge_states(samples(), states, reference or streams(), N, limit, strict=strict, against="a test", **more)


def test_noise_passes_and_its_margins_are_told():
    medians, checks = judge(noisy(only(streams()), 0.02))
    assert all(0.015 < value < 0.025 for value in medians.values())
    assert checks["median relative error, a test"]["margin"] == pytest.approx(0.08 / max(medians.values()))
    assert checks["nearest layer is its own, a test"]["margin"] > 5


def test_a_few_rows_far_off_are_a_tail_and_no_fault():
    """What random and odd tokens do in low precision: the median judges, and the share of the tail."""
    states = noisy(only(streams()), 0.02)
    states[1][4][10:13] *= 2.0
    judge(states)
    states[1][4][10:40] *= 2.0
    with pytest.raises(ParityError, match=r"(?s)by more than 0\.8"):
        judge(states)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (
            lambda s, full: s.update({2: full[1], 4: full[3], N: full[5]}),
            "layer 2.*nearest to the reference's layer 1.*early, late or swapped",
        ),
        (lambda s, full: s.update({2: full[4], 4: full[2]}), "layer 2.*nearest to the reference's layer 4"),
        (lambda s, full: s.update({4: full[4].roll(1, 0)}), "layer 4.*states of another request"),
        (lambda s, full: s.update({4: full[4] * float("nan")}), "layer 4"),
    ],
)
def test_planted_faults_are_found_without_any_tolerance(plant, says, strict):
    states = only(streams())
    for one, full in zip(states, streams(), strict=True):
        plant(one, full)
    with pytest.raises(ParityError, match=f"(?s){says}"):
        judge(states, strict=strict)


def test_hidden_without_its_residual():
    states = only(streams())
    for one, full in zip(states, streams(), strict=True):
        one[N] = full[N] - full[N - 1]
    with pytest.raises(ParityError, match=r"(?s)final.*differs by a median .*without its residual"):
        judge(states)


def test_the_nearest_layer_must_be_its_own_though_the_error_is_small():
    """Two layers that hardly differ: a state nearer to the other one is refused, however small its error."""
    reference = [{2: one[2], 3: one[2] + 0.01 * one[3]} for one in streams()]
    states = [{2: one[2] + 0.0055 * other[3]} for one, other in zip(reference, streams(), strict=True)]
    with pytest.raises(ParityError, match="nearest to the reference's layer 3"):
        judge(states, reference)


def test_states_of_another_sample():
    states = only(streams())
    states[0][4] = states[1][4][: LENGTHS[0]].clone()
    with pytest.raises(ParityError, match="states of another request"):
        judge(states, strict=False)


def test_what_lies_behind_a_window_is_judged_by_itself_and_the_position_is_told():
    states = noisy(only(streams()), 0.02)
    states[1][4][80:] *= 1.15
    with pytest.raises(
        ParityError,
        match=r"(?s)beyond position 79 .*right up to position 79, wrong from 80 on, where a window or context length of 79 ends",
    ):
        judge(states, breaks=[79])
    judge(states)  # without knowing of the window ten rows of 130 are lost in the median


def test_same_pass_is_bit_for_bit():
    full = streams()
    states = only(full)
    checks = judge_same_pass(samples(), states, full, N, [None, None])
    assert checks["same pass, two mechanisms"]["runner_up"] > 0.1
    states[1][4][50, 3] = torch.nextafter(states[1][4][50, 3], torch.tensor(9.0))
    with pytest.raises(
        ParityError, match="layer 4 is not what a hook on the decoder saw in the same pass, at 1 positions, first 50"
    ):
        judge_same_pass(samples(), states, full, N, [None, None])


def test_fp16_overflow_is_named():
    states = [{2: one[2].half()} for one in streams()]
    states[1][2][7, 1] = float("inf")
    with pytest.raises(ParityError, match=r"(?s)layer 2, position 7: the residual stream overflows float16"):
        require_shapes(samples(), states, H)


def make_parts(**more):
    torch.manual_seed(3)
    head = torch.randn(V, H) / H**0.5 * 3
    return TargetParts(head, 1 + 0.5 * torch.randn(H), None, "rms", 1e-6, head, **more)


def model_logits(final, parts, dtype):
    """As an engine computes them: in the dtype, rounded after each product."""
    normed = final_norm(final, parts).to(dtype)
    return (normed @ parts.head.to(dtype).T).float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_teacher_of_a_right_state_passes(dtype):
    parts, final = make_parts(), torch.cat([one[N] for one in streams()])
    stored = final.to(getattr(torch, dtype))
    kl, agreement, checks = judge_target(
        stored, model_logits(final, parts, stored.dtype), parts, dtype, quantised=False, where="test"
    )
    assert kl < 1e-3
    assert agreement > 0.9
    assert all(one["margin"] > 3 for one in checks.values()), checks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda z: z + 0.5 * torch.randn(V, generator=torch.Generator().manual_seed(5)), "a bias, a scale, a cap"),
        (lambda z: z * 1.3, "a bias, a scale, a cap"),
        (lambda z: 5 * torch.tanh(z / 5), "a bias, a scale, a cap"),
    ],
)
def test_what_the_model_does_behind_the_head_is_found_though_the_argmax_agrees(dtype, change, says):
    parts, final = make_parts(), torch.cat([one[N] for one in streams()])
    stored = final.to(getattr(torch, dtype))
    with pytest.raises(ParityError, match=says):
        judge_target(
            stored, change(model_logits(final, parts, stored.dtype)), parts, dtype, quantised=False, where="test"
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda full, parts: final_norm(full[N], parts), "taken after the final norm"),
        (lambda full, parts: full[N] - full[N - 1], "without its residual or of another layer"),
        (lambda full, parts: full[N - 1], "without its residual or of another layer"),
        (lambda full, parts: full[N].roll(1, 0), "is not the model's own"),
        (lambda full, parts: full[N] * float("nan"), "is not the model's own"),
    ],
)
def test_wrong_target_states_are_found_in_the_distribution(dtype, wrong, says):
    parts = make_parts()
    final = torch.cat([one[N] for one in streams()])
    stored = torch.cat([wrong(one, parts) for one in streams()]).to(getattr(torch, dtype))
    with pytest.raises(ParityError, match=says):
        judge_target(stored, model_logits(final, parts, stored.dtype), parts, dtype, quantised=False, where="test")


def test_a_teacher_with_a_cap_is_the_models(tmp_path):
    parts, final = make_parts(softcap=5.0, logit_scale=0.5), torch.cat([one[N] for one in streams()])
    logits = Teacher(parts, torch.arange(V), "cpu", torch.float32).logits(final)
    kl, _, _ = judge_target(final, logits, parts, "float32", quantised=False, where="test")
    assert kl < 1e-6


def window_model(folder, window):
    make_tiny_model("mistral_window", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
    return folder


def test_a_window_off_by_one_is_found_by_a_long_sample_alone(tmp_path, token_rows):
    """The engine runs the model with a window of 13, the reference (and the config) with 12: nothing differs up to position 11."""
    info = describe_model(window_model(tmp_path / "m", 12))
    assert length_breaks(info) == [12]
    engine = TransformersEngine(info, TransformersSettings("float32", "cpu", 1))
    engine.load([2, 4])
    random = np.random.default_rng(3)
    short, long = (Sample.of(random.integers(3, 120, n), np.ones(n, np.uint8)) for n in (12, 60))
    assert check_parity(engine, [short, long])["passed"]
    real = engine.forward_captured

    def one_more(*arguments):
        engine.model.config.sliding_window = 13
        try:
            return real(*arguments)
        finally:
            engine.model.config.sliding_window = 12

    engine.forward_captured = one_more
    assert check_parity(engine, [short])["passed"]  # this is what short samples show
    with pytest.raises(ParityError, match="wrong from 12 on, where a window or context length of 12 ends"):
        check_parity(engine, [short, long])
    engine.close()


def test_samples_past_every_window_are_picked():
    info = SimpleNamespace(
        text={
            "sliding_window": 100,
            "rope_scaling": {"original_max_position_embeddings": 400},
            "max_position_embeddings": 4000,
        },
        max_position=4000,
    )
    lengths = np.array([50, 30, 405, 2000, 90, 60, 430, 70])
    assert length_breaks(info) == [100, 400]
    picked = pick_samples(lengths, range(8), info, 4)
    assert picked[:2] == [1, 6]  # the shortest, and the shortest with a sixteenth of 400 behind it
    assert len(picked) == 4
    assert pick_samples(lengths[:2], range(2), info, 4) == [1, 0]
    assert pick_samples(np.array([10, 401]), range(2), info, 1)[:2] == [0, 1]


def test_the_head_of_another_checkpoint_is_found(tmp_path):
    """What training reads as the head is not what the model multiplies by: found, where argmaxes alone would mostly agree."""
    folder = make_tiny_model("llama_untied", tmp_path / "m")
    engine = TransformersEngine(describe_model(folder), TransformersSettings("float32", "cpu", 1))
    engine.load([2, 4])
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"] * 1.05
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParityError, match="is not the model's own: KL divergence"):
        check_parity(engine, samples_of(120))
    engine.close()


def samples_of(vocabulary):
    random = np.random.default_rng(4)
    return [Sample.of(random.integers(3, vocabulary, n), np.ones(n, np.uint8)) for n in (20, 35)]
