"""What happens to a training beside its own loop: a launcher with wishes of its own, a second run, a full disk, a kill, data that teaches nothing."""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from test_training_ranks import launch_script
from training_work import VOCAB, curve, options

from eyas.base.errors import DiskFullError, FolderConflictError, InputError, StoreError
from eyas.data.dataset import DatasetWriter, Sample
from eyas.evaluation.acceptance import evaluate
from eyas.exporting.folders import export
from eyas.exporting.foreign import import_draft
from eyas.extraction.extract import extract
from eyas.gates.verification import verify
from eyas.training.checkpoints import list_checkpoints
from eyas.training.trainer import train


def same_weights(a, b):
    return all(torch.equal(torch.nan_to_num(x), torch.nan_to_num(b[key])) for key, x in a.items())


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "--dtype"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2", "--accumulate"),
        ("ACCELERATE_USE_FSDP", "true", "--sharding fsdp"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "--sharding fsdp"),
    ],
)
def test_what_accelerate_s_launcher_asks_for_is_refused_with_eyas_s_own_flag(work, monkeypatch, name, value, flag):
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"accelerate is set to (?s:.)*{flag}"):
        train(**options(work, "refused", steps=4))
    assert not (work / "refused").exists()


def test_accelerate_s_launcher_alone_changes_nothing(work, monkeypatch):
    train(**options(work, "by-itself", steps=2))
    for name, value in (("MIXED_PRECISION", "no"), ("GRADIENT_ACCUMULATION_STEPS", "1"), ("USE_FSDP", "false")):
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    train(**options(work, "launched", steps=2))
    assert curve(work / "launched") == curve(work / "by-itself")


def test_a_finished_run_by_the_clock_is_left_alone(work):
    settings = options(work, "by-the-clock", steps=None, seconds=1.0, eval_every=10**6)
    first = train(**settings)
    again = train(**settings)
    assert (again.steps, again.best) == (first.steps, first.best)
    assert curve(work / "by-the-clock")[-1]["step"] == first.steps


def test_a_second_run_in_the_same_folder_is_refused(work):
    command = [sys.executable, "-m", "eyas", "train", "--track", "none", "--steps", "1000000", "--held-out", "0.2"]
    command += ["--states", work / "store", "--model-path", work / "target", "--output-dir", work / "one-writer"]
    first = subprocess.Popen([*command, "--batch-tokens", "200"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (work / "one-writer" / "metrics.jsonl").exists():
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        with pytest.raises(FolderConflictError, match=rf'written by another run: .*"pid": {first.pid}'):
            train(**options(work, "one-writer"))
    finally:
        first.kill()
        first.wait()
    shutil.rmtree(work / "one-writer")


def test_a_full_disk_is_named_and_leaves_no_half_checkpoint(work, small_disk):
    settings = options(work, "x", output_dir=small_disk / "draft", steps=400, keep=1000, checkpoint_every=1)
    with pytest.raises(DiskFullError, match=r"no space left in (?s:.)*rerun the same command"):
        train(**settings)
    left = os.listdir(small_disk / "draft" / "checkpoints")
    assert left
    assert all(name.startswith("step-") for name in left)
    reached = int(max(left).removeprefix("step-"))
    for old in list_checkpoints(small_disk / "draft" / "checkpoints")[:-1]:
        shutil.rmtree(old)
    report = train(**{**settings, "steps": reached + 2, "keep": 1})
    assert report.steps == reached + 2


def test_what_a_killed_run_left_is_read_over_or_removed(work):
    train(**options(work, "whole", steps=8))
    train(**options(work, "killed", steps=4))
    folder = work / "killed"
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "learning_ra')
    (folder / "checkpoints" / ".tmp-step-00000006").mkdir()
    (folder / "checkpoints" / ".tmp-step-00000006" / "optimizer.pt").write_bytes(b"half")
    (folder / ".model.safetensors.4194304.tmp").write_bytes(b"half")
    train(**options(work, "killed", steps=8))
    assert [line["step"] for line in curve(folder)] == [line["step"] for line in curve(work / "whole")]
    assert not [p for p in folder.rglob("*") if "tmp" in p.name]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json", "rng-0.pt"])
def test_a_cut_checkpoint_is_named_and_the_one_before_goes_on(work, name):
    folder = work / f"cut-{name}"
    train(**options(work, folder.name, steps=8))
    newest = list_checkpoints(folder / "checkpoints")[-1]
    os.truncate(newest / name, (newest / name).stat().st_size // 2)
    with pytest.raises(StoreError, match=rf"{newest.name} cannot be restored(?s:.)*the one before"):
        train(**options(work, folder.name, steps=10))
    shutil.rmtree(newest)
    assert train(**options(work, folder.name, steps=10)).steps == 10


def make_store(work, name, masks):
    rng, writer = np.random.default_rng(0), DatasetWriter(work / f"{name}-data")
    for mask in masks:
        writer.add(Sample.of(rng.integers(0, VOCAB, len(mask)), np.array(mask, np.uint8)))
    writer.close()
    target, store = str(work / "target"), str(work / name)
    extract(
        model_path=target, prepared_data=str(work / f"{name}-data"), output_dir=store, layer_ids=[1, 3], dtype="float32"
    )
    verify(store, model_path=target)
    return work / name


def test_answers_of_one_token_keep_the_last_draft(work):
    store = make_store(work, "one-token", [[0] * 11 + [1]] * 16)
    report = train(**options(work, "one-token-draft", states=store, steps=6, eval_every=2, patience=1))
    assert report.steps == 6
    assert report.best is None
    manifest = json.loads((work / "one-token-draft" / "manifest.json").read_text(), parse_constant=pytest.fail)
    assert manifest["training"]["step"] == 6


def test_data_that_teaches_nothing_is_refused(work):
    # The first guess of a draft is the third token: only a sample's second one is supervised here.
    store = make_store(work, "nothing", [[0, 1] + [0] * 10] * 16)
    with pytest.raises(InputError, match="could learn nothing"):
        train(**options(work, "nothing-draft", states=store))


def test_sizes_below_one_and_a_layer_named_twice_are_refused(work):
    for field, flag in (("num_attention_heads", "--heads"), ("num_layers", "--layers"), ("intermediate_size", "--mlp")):
        with pytest.raises(InputError, match=f"{flag} is 0"):
            train(**options(work, "no-size", draft={field: 0}))
    with pytest.raises(InputError, match="twice"):
        train(**options(work, "twice", aux_layers=(3, 3, 1)))


def test_a_foreign_config_without_sizes_is_named(work):
    train(**options(work, "to-export", steps=1))
    folder = export(work / "to-export", work / "sizeless", "vllm")
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="lacks hidden_size"):
        import_draft(folder, work / "imported", str(work / "target"))
    with pytest.raises(InputError, match="lacks hidden_size"):
        train(**options(work, "from-sizeless", init_from=folder))


def test_a_report_that_could_not_be_written_is_refused_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderConflictError, match="is a file"):
        evaluate(draft=tmp_path / "none", model_path="none", prompts=("none",), output_dir=tmp_path / "file")


CLOCKS = """
import json, sys, time, os
import torch
from eyas.training import trainer as training

# The second rank's clock runs ahead, as clocks of ranks that were started one after the other do, only more.
real, rank = time.monotonic, int(os.environ["RANK"])
class Clock:
    monotonic = staticmethod(lambda: real() * (1.5 if rank else 1.0))
training.time = Clock
ended = training._Run.loop
def loop(self, *arguments):
    report = ended(self, *arguments)
    torch.save(dict(self.model.module.named_parameters()), f"{self.settings.output_dir}-{rank}.pt")
    return report
training._Run.loop = loop
training.train(**json.loads(sys.argv[1])[0])
"""


def test_a_budget_in_seconds_keeps_ranks_equal_whatever_their_clocks(work):
    launch_script(
        CLOCKS,
        options(work, "clocks", steps=None, seconds=3.0, ttt_warmup_fraction=0.5, eval_every=100000, held_out=0.0),
    )
    one, two = (torch.load(f"{work / 'clocks'}-{rank}.pt") for rank in (0, 1))
    assert same_weights(one, two)
    steps = [len(line["loss"]) for line in curve(work / "clocks")]
    assert steps[0] == 1
    assert steps[-1] == 3
