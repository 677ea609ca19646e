"""A draft's store held against the target: the check that fails names the fault that was planted (F5, F6, F13)."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_training import VOCAB, make_target

from eyas.dataset import DatasetWriter, Sample
from eyas.diagnosis import diagnose, verdict
from eyas.extraction import extract
from eyas.model_files import describe_model
from eyas.speculation import Target
from eyas.store import open_states
from eyas.teacher import final_norm, load_target_parts

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


def rewrite(store, change):
    """Change tensors of a finished store's shards behind its back."""
    for path in store.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata=metadata)


def test_a_good_store_passes_every_check(root):
    found = look(root, make_store(root, 0))
    assert [name for name, f in found.items() if not f.ok] == []
    assert verdict(2.0, 2.05, list(found.values())).endswith("they agree")
    assert "differ from what the draft was trained on" in verdict(1.2, 2.05, list(found.values()))


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
    assert "the draft was trained on wrong states: layer ids" in verdict(1.1, 2.0, list(found.values()))


def test_a_target_state_after_the_norm_is_named(root):
    import shutil

    store = shutil.copytree(make_store(root, 0), root / "normed")
    parts = load_target_parts(describe_model(root / "target"))
    # Gains far from one, as real norms have: normed twice is not normed once.
    gains = torch.linspace(-2, 2, 32)

    def normed(tensors):
        tensors["hidden.6"] = final_norm(tensors["hidden.6"], parts) * gains

    rewrite(store, normed)
    found = look(root, store)["final norm and head"]
    assert not found.ok
    assert "not what enters the final norm" in found.text
