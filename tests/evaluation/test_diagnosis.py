"""A draft's store held against the target: the check that fails names the fault that was planted (F5, F6, F13)."""

import numpy as np
import pytest
import torch
from damage import rewrite
from training_work import VOCAB, make_target

from eyas.data.dataset import DatasetWriter, Sample
from eyas.evaluation.decode import Target
from eyas.evaluation.diagnosis import Comparison, Finding, check_mask, comparable, diagnose, verdict, why_incomparable
from eyas.extraction.extract import extract
from eyas.store.reader import open_states
from eyas.target.model_files import describe_model
from eyas.target.teacher import final_norm, load_target_parts

END = 3


def make_store(root, shift):
    """Answers that end with END, followed by two more tokens; the masks moved by `shift`."""
    rng = np.random.default_rng(0)
    writer = DatasetWriter(root / f"data{shift}")
    for _ in range(12):
        ids = rng.integers(4, VOCAB, 24)
        ids[20] = END
        mask = np.zeros(24, np.uint8)
        mask[6 + shift : 21 + shift] = 1
        writer.add(Sample.of(ids, mask))
    writer.close()
    extract(
        model_path=str(root / "target"),
        prepared_data=str(root / f"data{shift}"),
        output_dir=str(root / f"store{shift}"),
        layer_ids=[1, 3, 5],
        dtype="float32",
    )
    return root / f"store{shift}"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagnosis")
    make_target(folder / "target")
    return folder


def look(root, store):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / "target", dtype=torch.float32).eval()
    info = describe_model(root / "target")
    findings = diagnose(open_states(store), Target(model, range(7)), load_target_parts(info), [END])
    return {f.name: f for f in findings}


def test_a_good_store_passes_every_check(root):
    found = look(root, make_store(root, 0))
    assert [name for name, f in found.items() if not f.ok] == []


@pytest.mark.parametrize(("shift", "side"), [(-1, "early"), (1, "late")])
def test_a_shifted_mask_is_named(root, shift, side):
    found = look(root, make_store(root, shift))["loss mask"]
    assert not found.ok
    assert f"12 of 12 masks stop one token too {side}" in found.text


def test_swapped_layers_are_named(root):
    import shutil

    store = shutil.copytree(make_store(root, 0), root / "swapped")

    def swap(tensors):
        tensors["hidden.1"], tensors["hidden.5"] = tensors["hidden.5"], tensors["hidden.1"]

    rewrite(store, swap)
    found = look(root, store)
    assert not found["layer ids"].ok
    assert "layer 1 holds the states of layer 5" in found["layer ids"].text
    pair = Comparison(1.1, 2.0, 1.0, 1.2, 12)
    assert ": they disagree; the draft was trained on wrong data, this check of its store fails: layer ids" in verdict(
        pair, list(found.values())
    )


def test_a_target_state_after_the_norm_is_named(root):
    import shutil

    store = shutil.copytree(make_store(root, 0), root / "normed")
    parts = load_target_parts(describe_model(root / "target"))

    def normed(tensors):
        tensors["hidden.6"] = final_norm(tensors["hidden.6"], parts)

    rewrite(store, normed)
    found = look(root, store)["final norm and head"]
    assert not found.ok
    assert "stored after the final norm" in found.text


def test_another_norm_is_named(root):
    """Neither the state before the norm nor that after it: gains of another norm, far from one as real ones are."""
    import shutil

    store = shutil.copytree(make_store(root, 0), root / "another-norm")
    parts = load_target_parts(describe_model(root / "target"))
    gains = torch.linspace(-2, 2, 32)

    def normed(tensors):
        tensors["hidden.6"] = final_norm(tensors["hidden.6"], parts) * gains

    rewrite(store, normed)
    found = look(root, store)["final norm and head"]
    assert not found.ok
    assert "not what enters the final norm" in found.text


def test_masks_that_leave_the_end_out_on_purpose_are_not_called_shifted(root):
    """The generation prompt, where there is one, tells choice from fault."""
    rng = np.random.default_rng(1)
    prompt_end = [90, 91]

    def look_at(name, begin, end):
        writer = DatasetWriter(root / f"data-{name}")
        for _ in range(8):
            ids = rng.integers(4, 80, 24)
            ids[4:6] = prompt_end
            ids[18] = END
            mask = np.zeros(24, np.uint8)
            mask[begin:end] = 1
            writer.add(Sample.of(ids, mask))
        writer.close()
        places = {"prepared_data": str(root / f"data-{name}"), "output_dir": str(root / f"store-{name}")}
        extract(model_path=str(root / "target"), layer_ids=[1, 3, 5], dtype="float32", **places)
        return check_mask(open_states(root / f"store-{name}"), [END], prompt_end)

    assert look_at("right", 6, 19) == Finding("loss mask", True, "8 of 8 masks begin with the answer")
    assert look_at("no-end", 6, 18).ok
    assert look_at("newline-too", 6, 20).ok
    assert look_at("everything", 0, 24).ok
    assert "8 of 8 masks begin one token too early" in look_at("early", 5, 18).text
    assert "8 of 8 masks begin one token too late" in look_at("late", 7, 20).text


@pytest.mark.parametrize(
    ("low", "measured", "high", "says"),
    [
        (1.9, 2.0, 2.1, "they agree: the interval holds it; every check of the store passed"),
        (
            2.0,
            2.0,
            2.04,
            "2 % less than simulated, and the interval does not hold it; every check of the store passed; these prompts differ",
        ),
        (
            1.1,
            1.2,
            1.3,
            "they disagree; every check of the store passed; these prompts differ from what the draft was trained on",
        ),
        (
            1.1,
            2.0,
            2.9,
            "the interval holds it, but is too wide to tell: measure more prompts; every check of the store passed",
        ),
        (
            1.1,
            1.5,
            2.1,
            "the interval holds it, but is too wide to tell: measure more prompts; every check of the store passed",
        ),
        (2.2, 2.6, 3.0, "more than simulated; every check of the store passed"),
        (
            None,
            2.05,
            None,
            "one prompt has no interval, so nothing can be said of the difference; every check of the store passed",
        ),
    ],
)
def test_the_verdict_says_what_the_interval_allows(low, measured, high, says):
    good = [Finding("layer ids", True, "fine")]
    pair = Comparison(measured, 2.05, low, high, 1 if low is None else 12)
    spread = "1 prompt" if low is None else f"95 %: {low:.2f} to {high:.2f}, 12 prompts"
    line = f"measured {measured:.2f} ({spread}), simulated while training 2.05: "
    assert verdict(pair, good).startswith(line + says)
    assert ("agree: the interval" in says) == (low is not None and low <= 2.05 <= high and low >= 0.85 * 2.05)


def test_the_verdict_without_figures_or_checks():
    good = [Finding("layer ids", True, "fine")]
    below = Comparison(1.2, 2.05, 1.1, 1.3, 12)
    assert verdict(below, [], "it is gone").endswith("disagree, and the reason is not known: no check ran, it is gone")
    assert (
        verdict(None, good, incomparable="this was sampled")
        == "no comparison: this was sampled; every check of the store passed"
    )


def test_figures_of_different_chains_are_compared_place_by_place():
    report = {
        "settings": {"chain": 2, "temperature": 0.0},
        "simulated": {"acceptance_length": 2.5, "by_position": [0.8, 0.4, 0.2]},
        "simulated_chain": 3,
        "overall": {
            "prompts": 7,
            "acceptance_length": 2.1,
            "interval_95": [2.0, 2.2],
            "by_position": [0.7, 0.4],
            "interval_95_by_chain": [[1.6, 1.8], [2.05, 2.15]],
        },
    }
    pair = comparable(report)
    assert (pair.measured, pair.simulated) == pytest.approx((2.1, 2.2))
    assert (pair.low, pair.high, pair.prompts) == (2.05, 2.15, 7)
    longer = comparable({**report, "simulated_chain": 1})
    assert (longer.measured, longer.simulated, longer.low, longer.high) == pytest.approx((1.7, 1.8, 1.6, 1.8))
    assert comparable({**report, "simulated_chain": 2}) == Comparison(2.1, 2.5, 2.0, 2.2, 7)
    sampled = {**report, "settings": {"chain": 2, "temperature": 1.0}}
    assert comparable(sampled) is None
    assert "this was sampled" in why_incomparable(sampled)
    assert comparable({**report, "simulated": None}) is None
    assert "no simulated acceptance" in why_incomparable({**report, "simulated": None})
