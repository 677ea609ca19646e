"""Drafts really trained on wrong stores, then measured by `eyas eval`: it names the check that fails, and none on a right store (F5, F6, F13)."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from damage import flip, rewrite
from training_work import VOCAB, make_target, options

from eyas.base.errors import StoreError
from eyas.data.dataset import DatasetWriter, Sample
from eyas.evaluation.acceptance import evaluate
from eyas.evaluation.baselines import load_baselines
from eyas.evaluation.decode import Target, decode
from eyas.extraction.extract import extract
from eyas.store.reader import open_states
from eyas.target.model_files import describe_model
from eyas.target.teacher import final_norm, load_target_parts
from eyas.training.trainer import train
from eyas.views.draft_view import describe_draft

USER, ANSWER = 1, 2  # the template: USER question ANSWER
REPLY = 24


def questions(count, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(8, VOCAB, int(n)).tolist() for n in rng.integers(4, 9, count)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny chat model whose own greedy replies, most of which end with its end token, are the data. `root/heldout.jsonl`: further questions."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("wrong-stores")
    target = make_target(root / "target")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():  # gains of one would make a state that is normed twice equal one that is normed once
        model.model.norm.weight.copy_(torch.linspace(0.1, 3.0, model.config.hidden_size)[torch.randperm(32)])
    prompts = [[USER, *question, ANSWER] for question in questions(72, 0)]
    traces, _ = decode(Target(model, ()), None, prompts, k=0, max_new_tokens=REPLY, end_ids=[])
    replies = [trace.tokens for trace in traces]
    # Whatever token comes late in most replies becomes the end token.
    shares = {t: sum(t in reply[6:] and t not in reply[:6] for reply in replies) for t in range(8, VOCAB)}
    end = max(shares, key=lambda t: shares[t])
    model.generation_config.eos_token_id = model.config.eos_token_id = end
    model.save_pretrained(target)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{end}")
    tokenizer.chat_template = (
        "{% for m in messages %}w1 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
    )
    tokenizer.save_pretrained(target)
    samples = []
    for prompt, reply in zip(prompts, replies, strict=True):
        if end in reply[1:]:
            samples.append((prompt, reply[: reply.index(end) + 1]))
    assert len(samples) >= 24
    with open(root / "heldout.jsonl", "w") as file:
        for question in questions(12, 1):
            file.write(json.dumps({"question": " ".join(f"w{t}" for t in question)}) + "\n")
    return root, samples


def make_store(root, samples, name, shift=0):
    """Extract the answers, each followed by the next question's first token; the masks moved by `shift`."""
    writer = DatasetWriter(root / f"{name}-data")
    for prompt, reply in samples:
        mask = np.zeros(len(prompt) + len(reply) + 1, np.uint8)
        mask[len(prompt) + shift : len(prompt) + len(reply) + shift] = 1
        writer.add(Sample.of([*prompt, *reply, USER], mask))
    writer.close()
    extract(
        model_path=str(root / "target"),
        prepared_data=str(root / f"{name}-data"),
        output_dir=str(root / f"{name}-store"),
        layer_ids=[0, 1, 2, 3, 4, 5],
        dtype="float32",
    )
    return root / f"{name}-store"


def train_draft(root, name):
    train(
        **options(
            root,
            f"{name}-draft",
            states=root / f"{name}-store",
            aux_layers=(1, 3, 5),
            steps=40,
            eval_every=40,
            allow_unverified=True,  # `eyas verify` finds the faults of the states: this is about drafts that were trained all the same
        )
    )
    return root / f"{name}-draft"


def measure(root, draft):
    return evaluate(
        draft=draft,
        model_path=str(root / "target"),
        prompts=(str(root / "heldout.jsonl"),),
        chain=3,
        max_new_tokens=REPLY,
        output_dir=root / "measured",
    )


def one_layer_early(tensors, _):
    for i in (1, 3, 5):
        tensors[f"hidden.{i}"] = tensors[f"hidden.{i - 1}"].clone()


def after_the_norm(tensors, parts):
    tensors["hidden.6"] = final_norm(tensors["hidden.6"], parts)


def test_a_draft_of_a_right_store_raises_no_alarm(world):
    root, samples = world
    make_store(root, samples, "right")
    report = measure(root, train_draft(root, "right"))
    assert [check for check in report["diagnosis"]["checks"] if not check["ok"]] == []
    assert len(report["diagnosis"]["checks"]) == 4
    assert report["diagnosis"]["verdict"].endswith("every check of the store passed")
    low, high = report["overall"]["interval_95"]
    simulated = report["simulated"]["acceptance_length"]
    assert (report["diagnosis"]["agree"] is True) == (low >= 0.85 * simulated and high >= simulated)
    assert report["overall"]["acceptance_length"] > 1.2
    assert dict(describe_draft(root / "right-draft"))["measured"] == "not yet: `eyas eval`"
    prompts = [str(root / "heldout.jsonl")]
    report = evaluate(
        draft=root / "right-draft",
        model_path=str(root / "target"),
        prompts=prompts,
        chain=3,
        max_new_tokens=8,
        limit=4,
    )
    shown = dict(describe_draft(root / "right-draft"))["measured"]
    assert f"chain of 3: acceptance length {report['overall']['acceptance_length']:.2f} (95 %" in shown
    assert "on 4 prompts of heldout" in shown


@pytest.mark.parametrize(
    ("name", "shift", "change", "check", "text"),
    [
        ("layers", 0, one_layer_early, "layer ids", "layer 3 holds the states of layer 2"),
        ("norm", 0, after_the_norm, "final norm and head", "stored after the final norm"),
        ("early", -1, None, "loss mask", "begin one token too early"),
        ("late", 1, None, "loss mask", "begin one token too late"),
    ],
)
def test_a_draft_of_a_wrong_store_is_recognised(world, name, shift, change, check, text):
    root, samples = world
    store = make_store(root, samples, name, shift)
    if change is not None:
        parts = load_target_parts(describe_model(root / "target"))
        rewrite(store, lambda tensors: change(tensors, parts))
    report = measure(root, train_draft(root, name))
    failed = [found for found in report["diagnosis"]["checks"] if not found["ok"]]
    assert [found["name"] for found in failed] == [check]
    assert text in failed[0]["text"]
    assert f"this check of its store fails: {check}" in report["diagnosis"]["verdict"]


@pytest.mark.parametrize("tensor", ["hidden.3", "token_ids"])
def test_a_store_that_was_damaged_since_is_named_and_the_draft_is_measured_all_the_same(world, tensor):
    root, samples = world
    store = make_store(root, samples, f"damaged-{tensor}")
    draft = train_draft(root, f"damaged-{tensor}")
    (shard,) = store.glob("shard-*.safetensors")
    flip(shard, tensor, row=0)
    report = measure(root, draft)
    (check,) = report["diagnosis"]["checks"]
    assert (check["name"], check["ok"]) == ("content", False)
    assert f"{shard.name}: sample {open_states(store).ids[0]}" in check["text"]
    assert "its store is damaged now, this check of its store fails: content" in report["diagnosis"]["verdict"]
    assert report["overall"]["acceptance_length"] >= 1
    assert ("n-gram" in report["overall"]["baselines"]) == (tensor == "hidden.3")
    if tensor == "token_ids":  # asked for by name, it is an error
        with pytest.raises(StoreError, match=shard.name):
            load_baselines(store, None)


def test_the_command_says_so(world, tmp_path):
    """As a user meets it: the failed check in the output of `eyas eval`, and in acceptance.json; a store that is gone is said to be gone."""
    root, samples = world
    make_store(root, samples, "shown", shift=1)
    draft = train_draft(root, "shown")

    def run(exit_code):
        command = [sys.executable, "-m", "eyas", "eval", "--draft", draft, "--model-path", root / "target"]
        command += ["--prompts", root / "heldout.jsonl", "--max-new-tokens", 8, "--limit", 2, "--chain", 3]
        environment = {**os.environ, "EYAS_STATE_DIR": str(tmp_path), "COLUMNS": "250"}
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == exit_code, done.stderr[-2000:]
        return done.stdout

    assert "FAIL loss mask" in run(exit_code=7)
    (root / "shown-store").rename(root / "moved-store")
    assert "no check ran, its store" in run(exit_code=0)
