"""`eyas eval` end to end on a tiny target: lossless, counted right, refused where it must be."""

import json

import numpy as np
import pytest
import torch
from test_training import make_target, options, work  # noqa: F401  the fixture that makes target, data and store

from eyas.acceptance import bootstrap, compare, evaluate
from eyas.dataset import open_dataset
from eyas.errors import ContractError, StoreError
from eyas.simulation import Acceptance
from eyas.speculation import Trace
from eyas.training import train


@pytest.fixture(scope="module")
def draft(work):  # noqa: F811
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w3").save_pretrained(work / "target")
    train(**options(work, "eval-draft", steps=40, eval_every=40))
    return work / "eval-draft"


def test_report_is_lossless_and_adds_up(work, draft, tmp_path):  # noqa: F811
    report = evaluate(
        draft, str(work / "target"), [f"mine={work / 'data'}"], chain=3, max_new_tokens=16, limit=6, output=tmp_path
    )
    found = report["sets"]["mine"]
    assert (found["prompts"], found["replies_equal_to_plain"], found["ties"]) == (6, 6, [])
    assert found["acceptance_length"] == pytest.approx(found["tokens"] / found["rounds"], abs=1e-4)
    assert found["acceptance_length"] == pytest.approx(1 + sum(found["by_position"]), abs=0.2)
    assert found["interval_95"][0] <= found["acceptance_length"] <= found["interval_95"][1]
    assert set(found["baselines"]) == {"prompt lookup", "n-gram", "lookup, then n-gram"}
    assert json.loads((tmp_path / "acceptance.json").read_text())["sets"]["mine"] == found
    assert "mine: draft" in (tmp_path / "acceptance.svg").read_text()
    together = evaluate(
        draft,
        str(work / "target"),
        [str(work / "data")],
        chain=3,
        max_new_tokens=16,
        limit=6,
        batch_size=4,
        plain=False,
    )
    assert together["overall"]["rounds"] == found["rounds"]
    # Checked by reading the replies instead of decoding again.
    assert (together["overall"]["replies_equal_to_plain"], together["overall"]["plain_tokens_per_second"]) == (6, None)
    assert len(open_dataset(work / "data")) > 6


def test_a_draft_of_another_target_is_refused(work, draft, tmp_path):  # noqa: F811
    another = make_target(tmp_path / "another", seed=4)
    with pytest.raises(StoreError, match="weights_hash"):
        evaluate(draft, str(another), [str(work / "data")])


def test_a_changed_reply_is_an_error_and_a_tie_is_named():
    ours, theirs = Trace(tokens=[1, 2, 3], gaps=[1.0, 0.9, 1.0]), Trace(tokens=[1, 5, 3], gaps=[1.0, 0.8, 1.0])
    with pytest.raises(
        ContractError, match=r"prompt 7, token 2 is \[2\] speculatively, \[5\] plainly, with a logit gap of 0\.8"
    ):
        compare(ours, theirs, "set, prompt 7", 0.5)
    theirs.gaps[1] = 0.1
    assert "tie (logit gap 0.1000)" in compare(ours, theirs, "set, prompt 7", 0.5)
    assert compare(ours, ours, "x", 0.0) is None


def test_interval_covers_the_spread_of_prompts():
    even = [Acceptance(10, 20, np.zeros(1, np.int64))] * 8
    assert bootstrap(even) == (2.0, 2.0)
    mixed = even + [Acceptance(10, 40, np.zeros(1, np.int64))] * 8
    low, high = bootstrap(mixed)
    assert 2.4 < low < 3.0 < high < 3.6
    assert torch.tensor(low).isfinite()
