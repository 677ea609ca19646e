"""Training end to end on a tiny random target: learning, exact resume, checkpoints, refusals."""

import inspect
import json
import threading

import numpy as np
import pytest
import torch
from damage import flip
from training_work import VOCAB, WIDTH, curve, make_dataset, make_target, options, weights

import eyas
from eyas.base.errors import FolderConflictError, InputError, StoreError
from eyas.base.locks import lock_directory
from eyas.data.dataset import Sample
from eyas.drafts.eagle3.init import choose_vocabulary, derive_config, initialise, measured_scale
from eyas.drafts.eagle3.model import Draft
from eyas.drafts.files import load_draft
from eyas.drafts.settings import DraftInit
from eyas.extraction.extract import extract
from eyas.gates.verification import verify
from eyas.store.reader import open_states
from eyas.target.embedded import resolve_model_path
from eyas.target.model_files import describe_model
from eyas.target.teacher import load_target_parts
from eyas.training.checkpoints import list_checkpoints
from eyas.training.data import plan_epoch, prompt_hash, split_by_prompt, survey
from eyas.training.trainer import train


def test_training_lowers_the_loss_and_raises_simulated_acceptance(work):
    report = train(**options(work, "learns", steps=150, eval_every=50, ttt_warmup_fraction=0.3))
    losses = [line["loss"][0] for line in curve(work / "learns") if "loss" in line]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    assert report.best["acceptance_length"] > report.before["acceptance_length"] + 0.1
    draft, manifest = load_draft(work / "learns", load_target_parts(describe_model(work / "target")).embedding)
    assert manifest["acceptance"]["simulated"] == report.best
    assert manifest["config"]["aux_layer_ids"] == [1, 3, 5]
    assert len(curve(work / "learns")[0]["loss"]) == 1
    assert len([x for x in curve(work / "learns") if "loss" in x][-1]["loss"]) == 3
    assert draft.t2d.sum() == 64


def test_stopped_and_resumed_is_bit_equal_to_undisturbed(work):
    train(**options(work, "whole", accumulate=2))
    stop = threading.Event()

    def stop_at_five(figures):
        if figures["step"] == 5:
            stop.set()

    first = train(**options(work, "parts", accumulate=2), progress=stop_at_five, stop=stop)
    assert first.interrupted
    assert first.steps == 5
    second = train(**options(work, "parts", accumulate=2))
    assert second.steps == 12
    assert curve(work / "whole") == curve(work / "parts")
    last = [list_checkpoints(work / name / "checkpoints")[-1] for name in ("whole", "parts")]
    one, other = (torch.load(p / "optimizer.pt", weights_only=True)["state"] for p in last)
    for key, moments in one.items():
        assert torch.equal(moments["exp_avg_sq"], other[key]["exp_avg_sq"]), key
    for key, value in weights(work / "whole").items():
        assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(weights(work / "parts")[key])), key
    assert len(list_checkpoints(work / "parts" / "checkpoints")) == 2


def test_killed_between_checkpoints_repeats_the_same_curve(work):
    """A crash loses the steps since the checkpoint; doing them again writes the same lines, none twice."""
    train(**options(work, "crashed"))
    whole = curve(work / "crashed")
    newest = list_checkpoints(work / "crashed" / "checkpoints")[-1]
    (newest / "state.json").rename(newest.parent / "gone.json")
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()  # as if the run had died before writing it
    (newest.parent / "gone.json").unlink()
    report = train(**options(work, "crashed"))
    assert report.steps == 12
    assert curve(work / "crashed") == whole


def test_a_run_with_other_settings_is_refused_with_the_field(work):
    train(**options(work, "fixed", steps=2))
    with pytest.raises(FolderConflictError, match=r"settings\.loss: the directory has 'kl', this run wants 'tv'"):
        train(**options(work, "fixed", loss="tv"))


def test_two_at_once_into_one_folder(work):
    train(**options(work, "both", steps=2))
    before = (work / "both" / "metrics.jsonl").read_bytes()
    with lock_directory(work / "both"), pytest.raises(FolderConflictError, match="by another run"):
        train(**options(work, "both", steps=2))
    assert (work / "both" / "metrics.jsonl").read_bytes() == before


def test_stores_that_cannot_train_are_refused(work, tmp_path):
    def store(name, **changes):
        extract(
            **{
                "model_path": str(work / "target"),
                "prepared_data": str(work / "data"),
                "output_dir": str(tmp_path / name),
                "layer_ids": [1, 3, 5],
                "dtype": "float32",
                **changes,
            }
        )
        return tmp_path / name

    unverified = store("unverified")
    manifest = json.loads((unverified / "manifest.json").read_text())
    for mark in ({}, {"verified": {}}, {"verified": True}, {"verified": {"passed": "yes", "time": "now"}}):
        (unverified / "manifest.json").write_text(json.dumps({**manifest, **mark}))
        with pytest.raises(StoreError, match="has not passed `eyas verify`"):
            train(**options(work, "no", states=unverified))
    headless = store("headless", final=False)
    with pytest.raises(StoreError, match=r"not 6 \(final\)"):
        train(**options(work, "no", states=headless, allow_unverified=True))
    with pytest.raises(StoreError, match=r"needs \[2\]"):
        train(**options(work, "no", aux_layers=(1, 2, 5)))
    another = make_target(tmp_path / "another", seed=9)
    with pytest.raises(StoreError, match="weights_hash"):
        train(**options(work, "no", model_path=str(another)))
    with pytest.raises(InputError, match="--loss is 'mse'"):
        train(**options(work, "no", loss="mse"))
    with pytest.raises(InputError, match="--track is "):
        train(**options(work, "no", trackers=("excel",)))
    assert not (work / "no").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("epochs", 0.0),
        ("seconds", -1.0),
        ("eval_every", 0),
        ("eval_samples", -1),
        ("patience", 0),
        ("checkpoint_every", -1),
        ("draft_vocab_size", 0),
        ("warmup", 2.0),
        ("threads", 0),
        ("clip", 0.0),
        ("step_decay", 0.0),
        ("weight_decay", -0.1),
        ("learning_rate", float("nan")),
    ],
)
def test_values_out_of_range_are_refused_before_anything_is_read(tmp_path, name, value):
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} is "):
        train(states=tmp_path / "none", model_path="none", output_dir=tmp_path / "draft", **{name: value})
    assert not (tmp_path / "draft").exists()


def test_starting_from_an_existing_draft_keeps_what_it_knows(work):
    first = train(**options(work, "source", steps=60, eval_every=60))
    report = train(**options(work, "from", steps=1, eval_every=1, learning_rate=1e-6, init_from=work / "source"))
    assert report.before["acceptance_length"] == pytest.approx(first.best["acceptance_length"])
    with pytest.raises(InputError, match=r"intermediate_size: 64, this draft has 128"):
        train(**options(work, "from2", init_from=work / "source", draft={"intermediate_size": 128}))


def test_early_stop_and_the_best_draft_is_kept_not_the_last(work):
    still = train(**options(work, "still", learning_rate=1e-12, steps=40, eval_every=2, patience=2))
    assert (still.steps, still.best_step) == (6, 2)
    # Good steps, then ruinous ones: the folder holds the draft from before the ruin.
    good = train(**options(work, "ruined", steps=60, eval_every=60))
    kept = weights(work / "ruined")
    (work / "ruined" / "settings.json").unlink()
    ruined = train(**options(work, "ruined", steps=80, eval_every=10, learning_rate=5.0, clip=1e9))
    assert ruined.last["acceptance_length"] < good.best["acceptance_length"]
    assert ruined.best == good.best
    assert all(torch.equal(torch.nan_to_num(v), torch.nan_to_num(kept[k])) for k, v in weights(work / "ruined").items())


def test_a_budget_in_seconds_ends_the_run(work):
    report = train(**options(work, "clock", steps=None, seconds=1.0, eval_every=10**6))
    assert report.steps > 3
    assert report.best is not None
    assert report.best_step == report.steps


def test_plan_deals_every_sample_once_and_evenly():
    lengths = np.random.default_rng(0).integers(5, 60, 200)
    positions = np.arange(0, 200, 2)
    for parts in (1, 4, 6):
        steps = plan_epoch(positions, lengths, batch_tokens=150, parts=parts, seed=3, epoch=1)
        assert sorted(int(p) for step in steps for part in step for p in part) == positions.tolist()
        for step in steps:
            loads = [lengths[part].sum() for part in step]
            assert max(loads) - min(loads) <= 60
            assert min(loads) > 0
    assert str(plan_epoch(positions, lengths, batch_tokens=150, parts=2, seed=3, epoch=2)) != str(steps)
    with pytest.raises(InputError, match="cannot feed"):
        plan_epoch(positions[:3], lengths, batch_tokens=150, parts=4, seed=0, epoch=0)


def test_a_window_with_fewer_samples_than_parts_is_joined_to_the_one_before():
    lengths = np.array([100, 10, 10, 100, 100, 10])
    for parts in (2, 3):
        for step in plan_epoch(np.arange(6), lengths, batch_tokens=60, parts=parts, seed=0, epoch=0):
            assert all(len(part) for part in step)


def test_planning_many_samples_takes_no_time_that_grows_with_their_square():
    """40 times the samples cost about 40 times the work: counted in operations on arrays, not by the clock."""
    calls = []

    class Counted(np.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, **options):
            inputs = [x.view(np.ndarray) if isinstance(x, Counted) else x for x in inputs]
            calls.append(max((x.size for x in inputs if isinstance(x, np.ndarray)), default=1))
            return getattr(ufunc, method)(*inputs, **options)

    work = []
    for n in (100, 4000):
        calls.clear()
        plan_epoch(np.arange(n), np.full(n, 10).view(Counted), batch_tokens=20, parts=2, seed=0, epoch=0)
        work.append(sum(calls))
    assert work[1] < 60 * work[0]


def test_split_goes_by_prompt_not_by_order():
    """Three answers to each of 40 prompts: all three fall on one side, the same in any order of the samples."""
    samples = [
        Sample.of([prompt, prompt + 1, 90, answer, 95], [0, 0, 0, 1, 1]) for prompt in range(40) for answer in (7, 8, 9)
    ]

    def held_out(rows, share):
        split = split_by_prompt([r.id for r in rows], [prompt_hash(r.token_ids, r.loss_mask) for r in rows], share)
        assert sorted([*split.train, *split.held_out]) == list(range(len(rows)))
        return {rows[i].id for i in split.held_out}

    chosen = held_out(samples, 0.1)
    assert chosen == held_out(samples[::-1], 0.1)
    assert len(chosen) == 12
    prompts = {int(s.token_ids[0]) for s in samples if s.id in chosen}
    assert chosen == {s.id for s in samples if int(s.token_ids[0]) in prompts}
    # A beginning that all samples share is no prompt: then each sample counts for itself, and so does one without any.
    for mask in ([0, 1, 1], [1, 1, 1]):
        texts = [Sample.of([1, 2, n], mask) for n in range(100)]
        assert len(held_out(texts, 0.1)) == 10


def test_draft_init_can_be_chosen_and_change_what_they_name(work):
    """Each switch gives the weights that it stands for, and training takes it."""
    info = describe_model(work / "target")
    parts, config = load_target_parts(info), derive_config(info, (1, 3), VOCAB)
    vocabulary = choose_vocabulary(np.ones(VOCAB, np.int64), VOCAB, "hash")
    states = [torch.randn(50, 2 * WIDTH) * torch.cat([torch.linspace(1, 2, WIDTH), torch.linspace(50, 90, WIDTH)])]
    rms = torch.cat(states).square().mean(0).sqrt()
    by_layer = torch.cat([half.square().mean().rsqrt().expand(WIDTH) for half in rms.split(WIDTH)])
    torch.testing.assert_close(measured_scale(states, 2), 1 / rms)
    torch.testing.assert_close(measured_scale(states, 2, "layer"), by_layer)
    assert measured_scale(states, 2, "none").eq(1).all()

    def first(**chosen):
        draft = Draft(config)
        initialise(draft, parts, vocabulary, torch.ones(2 * WIDTH), first=DraftInit(**chosen))
        return draft

    def looks_at_itself(draft):
        attention = draft.layers[0].self_attn
        return torch.equal(attention.q_proj.weight[: attention.k_proj.weight.shape[0]], attention.k_proj.weight)

    def passes_last_state(draft):
        return draft.fc.weight[:, WIDTH:].diagonal().min() > 0.5

    def mlp_is_silent(draft):
        return not draft.layers[0].mlp.down_proj.weight.any()

    for name, holds in (
        ("self_attention", looks_at_itself),
        ("logit_lens", passes_last_state),
        ("zero_down", mlp_is_silent),
    ):
        assert holds(first()), name
        assert not holds(first(**{name: False})), name
    with pytest.raises(InputError, match=r"--aux-scale is .some."):
        train(**options(work, "odd", draft_init={"aux_scale": "some"}))


def test_public_name_and_model_path_resolution(work):
    assert eyas.train is train
    assert inspect.signature(train).parameters["ttt_steps"].default == 5
    assert resolve_model_path(str(work / "target")) == work / "target"


def test_a_byte_flipped_after_verify_stops_the_run_before_its_step(work):
    """The thread that reads ahead finds it, at the sample's first use: earlier steps are trained, the damaged one is not."""
    make_dataset(work / "flipped-data", count=160, seed=1)
    extract(
        model_path=str(work / "target"),
        prepared_data=str(work / "flipped-data"),
        output_dir=str(work / "flipped-store"),
        layer_ids=[1, 3, 5],
        dtype="float32",
    )
    assert verify(work / "flipped-store", recompute=0).problems == []
    states = open_states(work / "flipped-store")
    train_on = split_by_prompt(states.ids, survey(states, VOCAB).prompts, 0.2, least=8).train
    steps = plan_epoch(train_on, states.lengths, batch_tokens=200, parts=1, seed=0, epoch=0)
    scaled = set(
        train_on[:: len(train_on) // 64][:64].tolist()
    )  # read before the first step, to measure the states' scale
    late = next(n for n in range(5, len(steps)) if set(steps[n][0].tolist()) - scaled)
    victim = next(p for p in steps[late][0].tolist() if p not in scaled)
    (shard,) = (work / "flipped-store").glob("shard-*.safetensors")
    flip(shard, "hidden.3", row=int(states.lengths[:victim].sum()))
    with pytest.raises(StoreError, match=f"{shard.name}: sample {states.ids[victim]}, hidden.3") as caught:
        train(**options(work, "flipped", states=work / "flipped-store", steps=len(steps), eval_every=1000))
    assert "fill" in [entry.name for entry in caught.traceback]  # the loader's thread
    assert max(line["step"] for line in curve(work / "flipped")) == late
