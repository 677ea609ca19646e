"""`eyas eval` end to end on a tiny target: lossless, counted right, refused where it must be."""

import gc
import itertools
import json
import subprocess
import sys
from collections import Counter, defaultdict
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from training_work import make_target, options

from eyas.base.errors import ContractError, InputError, StoreError
from eyas.data.dataset import open_dataset
from eyas.evaluation.acceptance import compare, evaluate
from eyas.evaluation.baselines import NgramTable, load_baselines
from eyas.evaluation.decode import Trace
from eyas.evaluation.plot import plot
from eyas.evaluation.statistics import SetResult, Timing, bootstrap
from eyas.evaluation.vllm import put_beside
from eyas.training.simulation import Acceptance
from eyas.training.trainer import train


@pytest.fixture(scope="module")
def draft(evaluated_draft):
    return evaluated_draft


def measured(work, draft, *prompts, **changes):
    """The report of `evaluate` on the token dataset, or on `prompts`."""
    given = {"draft": draft, "model_path": str(work / "target"), "prompts": prompts or (str(work / "data"),)}
    return evaluate(**given | {"output_dir": work / "measured"} | changes)


def test_report_is_lossless_and_adds_up(work, draft, tmp_path):
    report = measured(work, draft, f"mine={work / 'data'}", chain=3, max_new_tokens=16, limit=6, output_dir=tmp_path)
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
    together = measured(work, draft, chain=3, max_new_tokens=16, limit=6, batch_size=4, plain=0)
    assert together["overall"]["rounds"] == found["rounds"]
    # Checked by reading the replies instead of decoding again.
    assert (together["overall"]["replies_equal_to_plain"], together["overall"]["plain_tokens_per_second"]) == (6, None)
    assert len(open_dataset(work / "data")) > 6


def test_training_goes_on_in_a_folder_that_was_measured(work, draft):
    measured(work, draft, chain=2, max_new_tokens=4, limit=1, output_dir=None)
    assert (draft / "acceptance.svg").exists()
    assert train(**options(work, "eval-draft", steps=40, eval_every=40)).steps == 40


def test_a_draft_of_another_target_is_refused(work, draft, tmp_path):
    another = make_target(tmp_path / "another", seed=4)
    with pytest.raises(StoreError, match="weights_hash"):
        measured(work, draft, model_path=str(another))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"chain": 0}, "--chain is 0"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"max_new_tokens": 1}, "--max-new-tokens is 1"),
        ({"limit": 0}, "--limit is 0"),
        ({"temperature": -0.5}, "--temperature is -0.5"),
        ({"temperature": float("inf")}, "--temperature is inf"),
        ({"plain": -1}, "--plain is -1"),
        ({"engine": "tgi"}, "--engine is 'tgi'"),
        ({"device": "abacus"}, "--device abacus cannot be used"),
        ({"engine": "vllm", "temperature": 0.5}, "decodes greedily"),
        ({"prompts": ("no-such-set",)}, "--prompts no-such-set: no such file"),
        ({"prompts": ("a=word_problems", "a=conversations")}, "prompt sets of one name"),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_is_loaded(tmp_path, wrong, text):
    with pytest.raises(InputError, match=text):
        evaluate(draft=tmp_path / "no-draft", model_path=str(tmp_path / "no-target"), **wrong)


def test_inputs_are_looked_at_before_torch_is_imported(tmp_path):
    """A prompt file that is missing is told at once, not after torch, the target and the draft were loaded."""
    code = (
        "import sys\nfrom eyas.base.errors import InputError\nfrom eyas.evaluation.settings import EvalSettings\n"
        "try:\n    EvalSettings(draft='d', model_path='m', prompts=('none.jsonl',))\n"
        "except InputError:\n    assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules)\nelse:\n    raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_two_sets_are_reported_apart_and_together(work, draft):
    report = measured(work, draft, f"a={work / 'data'}", f"b={work / 'data'}", chain=2, max_new_tokens=4, limit=2)
    assert set(report["sets"]) == {"a", "b"}
    assert report["overall"]["rounds"] == 2 * report["sets"]["a"]["rounds"]


def test_the_target_is_let_go_before_vllm_starts(work, draft, monkeypatch):
    """On one GPU the fp32 target and vLLM do not fit side by side. Where the exported draft cannot be written vLLM is not started, and
    what is alive then is what would be alive beside it."""
    pytest.importorskip("vllm")
    from transformers import PreTrainedModel

    def models():
        return sum(isinstance(one, PreTrainedModel) for one in gc.get_objects())

    gc.collect()
    before = models()
    monkeypatch.setattr("tempfile.tempdir", str(work / "no-such-directory"))
    with pytest.raises(FileNotFoundError) as stopped:
        measured(work, draft, engine="vllm", chain=2, max_new_tokens=4, limit=1)
    assert "measure_vllm" in [entry.name for entry in stopped.traceback]  # its callers' variables are alive here
    assert models() == before


def test_the_ngram_table_reads_no_more_than_its_cap():
    """A store of 100 M tokens would take tens of gigabytes otherwise."""
    rng = np.random.default_rng(0)
    read = 0

    def samples():
        nonlocal read
        while True:
            read += 1
            yield rng.integers(0, 150_000, 1000), np.ones(1000, np.uint8)

    table = NgramTable(samples(), most_tokens=20_000)
    assert (read, table.tokens) == (20, 20_000)
    held = sum(part.nbytes for one in table.tables for part in one)
    assert held <= 3 * 12 * table.tokens


def test_the_ngram_table_gives_what_counting_gives():
    """Against the definition, by counting: the most frequent follower, the first seen among equals; the longest context that is known."""
    rng = np.random.default_rng(1)
    samples = [(rng.integers(0, 6, 40), (rng.random(40) < 0.7).astype(np.uint8)) for _ in range(12)]
    counts = [defaultdict(Counter) for _ in range(3)]
    for ids, mask in samples:
        for at in np.flatnonzero(mask):
            for n in (1, 2, 3):
                if at >= n:
                    counts[n - 1][tuple(ids[at - n : at].tolist())][int(ids[at])] += 1
    table = NgramTable(iter(samples))
    for context in itertools.product(range(7), repeat=3):
        known = next((counts[n - 1][context[-n:]] for n in (3, 2, 1) if context[-n:] in counts[n - 1]), None)
        got = table(context, 1)
        if known is None:
            assert got == []
        else:
            assert known[got[0]] == max(known.values())
    assert NgramTable(iter([]))([1, 2], 3) == []


def test_baselines_without_a_store_or_with_a_damaged_one(work, tmp_path):
    assert list(load_baselines(None, None).by_name) == ["prompt lookup"]
    (tmp_path / "manifest.json").write_text("{}")
    assert load_baselines(None, tmp_path).damage
    with pytest.raises(StoreError):
        load_baselines(tmp_path, None)
    assert load_baselines(None, work / "store").tokens == int(open_dataset(work / "data").lengths.sum())


def test_replies_of_one_token_give_no_figure_and_no_crash():
    """The end token comes at once: no verification step, so there is nothing to report but the prompts."""
    nothing = SetResult("x", acceptance=[Acceptance(0, 0, np.zeros(2, np.int64))], timings=[Timing(0, 0.0)])
    found = nothing.summary()
    assert (found["acceptance_length"], found["interval_95"], found["tokens_per_second"]) == (None, [None, None], None)
    report = {"settings": {"chain": 2}, "sets": {"x <1>": found}, "overall": found}
    assert "x &lt;1&gt;: draft" in plot(report)


def test_the_plot_shows_vllm_and_every_place(work, draft, tmp_path):
    report = measured(work, draft, f"mine={work / 'data'}", chain=2, max_new_tokens=6, limit=2)
    report["vllm"] = {"mine": {"acceptance_length": 1.5}}
    drawn = ElementTree.fromstring(plot(report))
    texts = ["".join(node.itertext()) for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert any("mine: draft in vLLM" in text for text in texts)
    assert sum("mine: position" in text for text in texts) == 2


def test_a_changed_reply_is_an_error_and_a_tie_is_named():
    ours, theirs = Trace(tokens=[1, 2, 3], gaps=[1.0, 0.9, 1.0]), Trace(tokens=[1, 5, 3], gaps=[1.0, 0.8, 1.0])
    with pytest.raises(
        ContractError, match=r"prompt 7, token 2 is \[2\] with the draft, \[5\] without, with a logit gap of 0\.8"
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
