"""`eyas eval` end to end on a tiny target: lossless, counted right, refused where it must be."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from training_work import make_target, options

from eyas.base.errors import ContractError, InputError, StoreError
from eyas.data.dataset import open_dataset
from eyas.evaluation.acceptance import compare, evaluate, put_beside
from eyas.evaluation.decode import Trace
from eyas.evaluation.statistics import SetResult, Timing, bootstrap
from eyas.training.simulation import Acceptance
from eyas.training.trainer import train
from eyas.views.acceptance_plot import plot


@pytest.fixture(scope="module")
def draft(work):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w3").save_pretrained(work / "target")
    train(**options(work, "eval-draft", steps=40, eval_every=40))
    return work / "eval-draft"


def test_report_is_lossless_and_adds_up(work, draft, tmp_path):
    report = evaluate(
        draft, str(work / "target"), [f"mine={work / 'data'}"], chain=3, max_new_tokens=16, limit=6, output=tmp_path
    )
    found = report["sets"]["mine"]
    assert (found["prompts"], found["replies_equal_to_plain"], found["ties"]) == (6, 6, [])
    assert found["acceptance_length"] == pytest.approx(found["tokens"] / found["rounds"], abs=1e-4)
    assert found["acceptance_length"] == pytest.approx(1 + sum(found["by_position"]), abs=0.2)
    for figure in ("acceptance_length", "tokens_per_second", "speed_up"):
        low, high = found["interval_95" if figure == "acceptance_length" else f"{figure}_interval_95"]
        assert low <= found[figure] <= high, figure
    assert len(found["by_position_interval_95"]) == 3
    for rate, (low, high) in zip(found["by_position"], found["by_position_interval_95"], strict=True):
        assert 0 <= low <= rate <= high <= 1
    # Tokens of a round are the accepted guesses and the target's own, which a reply's last round may lack.
    assert 0 <= found["accepted_guesses"] + found["rounds"] - found["tokens"] <= found["prompts"]
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


def test_training_goes_on_in_a_folder_that_was_measured(work, draft):
    evaluate(draft, str(work / "target"), [str(work / "data")], chain=2, max_new_tokens=4, limit=1, output=draft)
    assert (draft / "acceptance.svg").exists()
    assert train(**options(work, "eval-draft", steps=40, eval_every=40)).steps == 40


def test_a_draft_of_another_target_is_refused(work, draft, tmp_path):
    another = make_target(tmp_path / "another", seed=4)
    with pytest.raises(StoreError, match="weights_hash"):
        evaluate(draft, str(another), [str(work / "data")])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"chain": 0}, "--chain 0"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"max_new_tokens": 1}, "--max-new-tokens 1"),
        ({"limit": 0}, "--limit 0"),
        ({"temperature": -0.5}, "--temperature -0.5"),
        ({"plain": -1}, "--plain -1"),
        ({"engine": "tgi"}, "unknown engine"),
        ({"device": "abacus"}, "--device abacus cannot be used"),
        ({"engine": "vllm", "temperature": 0.5}, "decodes greedily"),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_is_loaded(tmp_path, wrong, text):
    with pytest.raises(InputError, match=text):
        evaluate(tmp_path / "no-draft", str(tmp_path / "no-target"), ["word_problems_heldout"], **wrong)


def test_sets_of_one_name_do_not_hide_each_other(work, draft):
    with pytest.raises(InputError, match="prompt sets of one name"):
        evaluate(draft, str(work / "target"), [str(work / "data"), str(work / "data")])
    report = evaluate(
        draft, str(work / "target"), [f"a={work / 'data'}", f"b={work / 'data'}"], chain=2, max_new_tokens=4, limit=2
    )
    assert set(report["sets"]) == {"a", "b"}
    assert report["overall"]["rounds"] == 2 * report["sets"]["a"]["rounds"]


def test_replies_of_one_token_give_no_figure_and_no_crash():
    """The end token comes at once: no verification step, so there is nothing to report but the prompts."""
    nothing = SetResult("x", acceptance=[Acceptance(0, 0, np.zeros(2, np.int64))], timings=[Timing(0, 0.0)])
    found = nothing.summary()
    assert (found["acceptance_length"], found["interval_95"], found["tokens_per_second"]) == (None, [None, None], None)
    report = {"settings": {"chain": 2}, "sets": {"x <1>": found}, "overall": found}
    assert "x &lt;1&gt;: draft" in plot(report)


def test_the_plot_shows_vllm_and_every_place(work, draft, tmp_path):
    report = evaluate(draft, str(work / "target"), [f"mine={work / 'data'}"], chain=2, max_new_tokens=6, limit=2)
    report["vllm"] = {"mine": {"acceptance_length": 1.5}}
    drawn = ElementTree.fromstring(plot(report))
    texts = ["".join(node.itertext()) for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert any("mine: draft in vLLM" in text for text in texts)
    assert sum("mine: place" in text for text in texts) == 2


def test_a_changed_reply_is_an_error_and_a_tie_is_named():
    ours, theirs = Trace(tokens=[1, 2, 3], gaps=[1.0, 0.9, 1.0]), Trace(tokens=[1, 5, 3], gaps=[1.0, 0.8, 1.0])
    with pytest.raises(
        ContractError, match=r"prompt 7, token 2 is \[2\] speculatively, \[5\] plainly, with a logit gap of 0\.8"
    ):
        compare(ours, theirs, "set, prompt 7", 0.5)
    theirs.gaps[1] = 0.1
    assert "tie (logit gap 0.1000)" in compare(ours, theirs, "set, prompt 7", 0.5)
    assert compare(ours, ours, "x", 0.0) is None


def test_vllms_figure_is_put_beside_ours_by_both_rules():
    """10 steps, 8 guesses accepted and 2 more behind the ends: 1.7 emitted a step (one reply ended without a bonus), 2.0 as vLLM counts."""
    ours = {"acceptance_length": 1.7, "rounds": 10, "accepted_guesses": 8, "accepted_behind_the_end": 2}
    served = {"acceptance_length": 2.0}
    put_beside(served, ours)
    assert served == {
        "acceptance_length": 2.0,
        "ratio_to_ours": round(2.0 / 1.7, 4),
        "ours_by_its_rule": 2.0,
        "ratio_by_its_rule": 1.0,
    }


def test_one_prompt_has_no_interval():
    alone = SetResult(
        "x", acceptance=[Acceptance(10, 20, np.array([6, 4]))], timings=[Timing(20, 2.0, 20, 4.0)]
    ).summary()
    assert (alone["acceptance_length"], alone["tokens_per_second"], alone["speed_up"]) == (2.0, 10.0, 2.0)
    nothing = [None, None]
    assert alone["interval_95"] == alone["tokens_per_second_interval_95"] == alone["speed_up_interval_95"] == nothing
    assert alone["by_position_interval_95"] == alone["interval_95_by_chain"] == [nothing, nothing]
    two = SetResult(
        "x", acceptance=[Acceptance(10, 20, np.array([6, 4])), Acceptance(10, 12, np.array([2, 0]))]
    ).summary()
    assert two["interval_95_by_chain"] == [[1.2, 1.6], two["interval_95"]] == [[1.2, 1.6], [1.2, 2.0]]


def test_interval_covers_the_spread_of_prompts():
    even = [Acceptance(10, 20, np.zeros(1, np.int64))] * 8
    assert bootstrap(even) == (2.0, 2.0)
    mixed = even + [Acceptance(10, 40, np.zeros(1, np.int64))] * 8
    low, high = bootstrap(mixed)
    assert 2.4 < low < 3.0 < high < 3.6
    assert torch.tensor(low).isfinite()
