"""A tiny target whose next token a tiny draft can learn, a counting language, and the store made of both; the options of a training on it."""

import json

import numpy as np
import pytest
import torch

from eyas.data.dataset import DatasetWriter, Sample
from eyas.drafts.files import load_draft
from eyas.extraction.extract import extract
from eyas.gates.verification import verify
from eyas.training.trainer import train

VOCAB, WIDTH = 96, 32


def make_target(folder, seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).float()
    # Layers that add little: the next token is nearly a function of the last one, which a tiny draft can learn from few samples.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
    model.save_pretrained(folder)
    return folder


def make_dataset(folder, count=48, seed=0):
    rng = np.random.default_rng(seed)
    writer = DatasetWriter(folder)
    for _ in range(count):
        length = int(rng.integers(12, 40))
        # A counting language that a draft can learn: each token is the one before plus a step that the first token names.
        first, stride = rng.integers(0, VOCAB), rng.integers(1, 4)
        ids = (first + stride * np.arange(length)) % VOCAB
        mask = np.zeros(length, np.uint8)
        mask[int(rng.integers(3, 6)) :] = 1
        writer.add(Sample.of(ids, mask))
    writer.close()
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = tmp_path_factory.mktemp("training")
    target, data = make_target(root / "target"), make_dataset(root / "data")
    extract(
        model_path=str(target),
        prepared_data=str(data),
        output_dir=str(root / "store"),
        layer_ids=[1, 3, 5],
        dtype="float32",
    )
    verify(str(root / "store"), model_path=str(target))
    return root


def options(work, name, **changes):
    return {
        "states": work / "store",
        "model_path": str(work / "target"),
        "output_dir": work / name,
        "draft_vocab_size": 64,
        "ttt_steps": 3,
        "batch_tokens": 200,
        "steps": 12,
        "eval_every": 4,
        "log_every": 1,
        "held_out": 0.2,
        "num_speculative_tokens": 3,
        "learning_rate": 3e-3,
        "dtype": "float32",
        "trackers": (),
        **changes,
    }


def curve(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    return load_draft(folder)[0].state_dict()


@pytest.fixture(scope="module")
def evaluated_draft(work):
    """A draft of a target that has a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w3").save_pretrained(work / "target")
    train(**options(work, "eval-draft", steps=40, eval_every=40))
    return work / "eval-draft"
