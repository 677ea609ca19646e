"""extract on real tiny models: right states, resumable at any moment, nothing mixed, nothing lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from eyas_process import eyas_command, eyas_environment

import eyas
from eyas.base.errors import (
    EXIT_INTERRUPTED,
    ContractError,
    DiskFullError,
    FolderConflictError,
    InputError,
    PreflightError,
    StoreError,
)
from eyas.base.locks import lock_directory
from eyas.cli.doctor import check_target
from eyas.extraction.batches import plan_batches
from eyas.extraction.plan import plan
from eyas.extraction.settings import ExtractSettings

LENGTHS = [7, 30, 1, 64, 12, 41, 5, 18, 90, 33]


@pytest.fixture
def options(tiny_model, token_rows, tmp_path):
    """Of the usual small extraction, for `eyas.extract`."""
    return {
        "model_path": str(tiny_model("llama")),
        "prepared_data": str(token_rows(LENGTHS)),
        "output_dir": str(tmp_path / "s"),
        "layer_ids": [2],
    }


def reference(folder, sample, dtype=torch.float32):
    """hidden_states of every layer from a plain forward pass of one sample, id N before the final norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    last: list[torch.Tensor] = []
    body = model.model if hasattr(model, "model") else model.transformer
    norm = body.norm if hasattr(body, "norm") else body.ln_f
    norm.register_forward_pre_hook(lambda m, args: last.append(args[0]))
    with torch.no_grad():
        output = model(
            input_ids=torch.from_numpy(sample.token_ids).long()[None], output_hidden_states=True, use_cache=False
        )
    return [*(h[0] for h in output.hidden_states[:-1]), last[0][0]]


def relative(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "llama_untied",
        "llama3",
        "qwen3",
        "qwen3_moe",
        "gemma3",
        "deepseek_v3",
        "mistral_window",
        "gpt_oss",
        "gpt2",
    ],
)
def test_every_layer_equals_an_fp32_reference(tiny_model, token_rows, tmp_path, kind):
    folder, data = tiny_model(kind), token_rows(LENGTHS)
    layers = 6 if kind == "gemma3" else 4
    report = eyas.extract(
        model_path=str(folder),
        prepared_data=str(data),
        output_dir=str(tmp_path / "s"),
        layer_ids=list(range(layers + 1)),
        dtype="float32",
        batch_tokens=130,
    )
    assert report.exit_code == 0
    assert report.parity["relative_l2"].keys() == {str(i) for i in range(layers + 1)}
    states, dataset = eyas.open_states(tmp_path / "s"), eyas.open_dataset(data)
    assert sorted(states.ids) == sorted(dataset.ids)
    for position in (1, 3, 8):
        sample = dataset[position]
        one = states[states.index_of(sample.id)]
        for i, want in enumerate(reference(folder, sample)):
            assert relative(one.hidden[i], want) < 1e-5, f"layer {i}"


def test_text_model_inside_a_multimodal_wrapper(token_rows, tmp_path):
    from tiny_models import make_tiny_wrapper
    from transformers import Gemma3ForConditionalGeneration

    folder, data = make_tiny_wrapper(tmp_path / "m"), token_rows([20, 33, 7, 64], vocab_size=100)
    report = eyas.extract(
        model_path=str(folder),
        prepared_data=str(data),
        output_dir=str(tmp_path / "s"),
        layer_ids=[0, 2, 5],
        dtype="float32",
    )
    assert report.exit_code == 0
    model = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    states = eyas.open_states(tmp_path / "s")
    for one in states:
        with torch.no_grad():
            want = model(input_ids=one.token_ids.long()[None], output_hidden_states=True, use_cache=False).hidden_states
        for i in (0, 2, 5):
            assert relative(one.hidden[i], want[i][0]) < 1e-5
        assert relative(model.model.language_model.norm(one.hidden[6]), want[6][0]) < 1e-5
    assert states.manifest["model"]["architecture"] == "Gemma3ForConditionalGeneration"
    assert states.manifest["model"]["final_norm"]["kind"] == "rms_1p"


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_bf16_is_as_close_to_fp32_as_transformers_own_bf16(tiny_model, token_rows, tmp_path, kind):
    folder, data = tiny_model(kind), token_rows([64, 40, 50, 33, 61, 57])
    eyas.extract(
        model_path=str(folder),
        prepared_data=str(data),
        output_dir=str(tmp_path / "s"),
        layer_ids=[2, 3],
        dtype="bfloat16",
        batch_tokens=150,
    )
    states, dataset = eyas.open_states(tmp_path / "s"), eyas.open_dataset(data)
    for i in states.layer_ids:
        ours = theirs = 0.0
        for sample in dataset:
            true = reference(folder, sample)[i]
            ours += relative(states[states.index_of(sample.id)].hidden[i], true)
            theirs += relative(reference(folder, sample, torch.bfloat16)[i], true)
        assert ours <= 1.1 * theirs


def test_packing_leaks_nothing_between_samples(tiny_model, token_rows, tmp_path):
    """The same samples one by one and all in one row: the same states."""
    folder, data = tiny_model("llama"), token_rows(LENGTHS)
    for name, budget in (("one", 1), ("all", 1000)):
        eyas.extract(
            model_path=str(folder),
            prepared_data=str(data),
            output_dir=str(tmp_path / name),
            layer_ids=[2],
            dtype="float32",
            batch_tokens=budget,
        )
    one, all_ = eyas.open_states(tmp_path / "one"), eyas.open_states(tmp_path / "all")
    for sample in one:
        for i in (2, 4):
            assert relative(all_[all_.index_of(sample.id)].hidden[i], sample.hidden[i]) < 1e-5


def test_plan_keeps_order_and_budget():
    lengths = np.array(LENGTHS)
    batches = plan_batches(lengths, np.arange(len(lengths)), 64, 3)
    assert [i for batch in batches for i in batch] == list(range(len(LENGTHS)))
    for batch in batches:
        assert len(batch) <= 3
        assert lengths[batch].sum() <= 64 or len(batch) == 1


def test_manifest_says_all_of_it(tiny_model, token_rows, tmp_path):
    data = token_rows(LENGTHS)
    eyas.extract(
        model_path=str(tiny_model("llama")),
        prepared_data=str(data),
        output_dir=str(tmp_path / "s"),
        layer_ids=[0, 2],
        layer_index="output",
    )
    m = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert m["layer_ids"] == [1, 3, 4]
    assert m["capture"]["layer_ids_as_asked"] == ["0", "2"]
    assert m["capture"]["layer_index_as_asked"] == "output"
    assert (m["layer_index"], m["status"], m["dtype"]) == ("stream", "complete", "float32")
    assert m["dataset"]["hash"] == eyas.open_dataset(data).hash
    assert m["model"]["final_norm"]["kind"] == "rms"
    assert m["engine"]["name"] == "transformers"
    assert m["totals"] == {"samples": 10, "tokens": sum(LENGTHS), "bytes": m["totals"]["bytes"], "not_written": 0}
    assert m["parity"]["passed"]


# --- stopping and starting again ------------------------------------------------------------------------------------


def test_ctrl_c_finishes_the_open_shard_and_says_how_to_go_on(tiny_model, token_rows, tmp_path):
    data = token_rows([60] * 1500)
    folder = tmp_path / "s"
    command = eyas_command(
        "extract", "--model-path", tiny_model("llama"), "--prepared-data", data, "--output-dir", folder, "--layer-ids", "2",
        "--batch-tokens", "120", "--shard-size", "0.1",
    )  # fmt: skip
    process = subprocess.Popen(
        command, env=eyas_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not list(folder.glob("shard-*.safetensors")):
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_INTERRUPTED
    assert "Rerun the same command to resume" in errors
    kept = json.loads((folder / "manifest.json").read_text())["totals"]["samples"]
    assert 0 < kept < 1500
    assert kept == len(eyas.open_states(folder, allow_open=True))
    subprocess.run(command, env=eyas_environment(), check=True, capture_output=True, timeout=300)
    assert len(eyas.open_states(folder)) == 1500


@pytest.mark.parametrize("written", [True, False])
def test_a_stop_after_the_last_answer(options, written, tmp_path, monkeypatch):
    """All samples were counted when the stop came: what the ranks still wrote decides, not the count."""
    from eyas.engines.base import CaptureResult, Progress
    from eyas.engines.transformers import TransformersEngine

    real = TransformersEngine.capture

    def stopped(self, *arguments, **more):
        if written:
            return replace(real(self, *arguments, **more), interrupted=True)
        more["progress"](Progress(len(LENGTHS), sum(LENGTHS), 1))
        return CaptureResult(interrupted=True)  # the engine's processes ended with the signal, their buffers with them

    with monkeypatch.context() as here:
        here.setattr(TransformersEngine, "capture", stopped)
        report = eyas.extract(**options)
    assert report.exit_code == (0 if written else EXIT_INTERRUPTED)
    assert report.written == (10 if written else 0)
    assert not (tmp_path / "s" / "ledger.jsonl").exists()
    assert eyas.extract(**options).written == 10


@pytest.mark.parametrize("manifest", ["{", "[]", '{"kind": "eyas.states", "format_version": 1, "status": "open"}'])
def test_a_manifest_cut_short_is_no_traceback(options, manifest, tmp_path):
    eyas.extract(**options)
    (tmp_path / "s" / "manifest.json").write_text(manifest)
    with pytest.raises(FolderConflictError, match=r"manifest\.json"):
        eyas.extract(**options)


def test_the_word_for_a_rehearsal_of_our_own_is_no_user_s(options):
    with pytest.raises(InputError, match=r"--rehearsal is 'this'"):
        eyas.extract(**options, rehearsal="this")


def test_parts_that_run_side_by_side_make_one_store(tiny_model, token_rows, tmp_path):
    data, folder = token_rows([60] * 400), tmp_path / "s"
    running = []
    for part in ("0/2", "1/2"):
        command = eyas_command(
            "extract", "--model-path", tiny_model("llama"), "--prepared-data", data, "--output-dir", folder,
            "--layer-ids", "2", "--batch-tokens", "120", "--shard-size", "0.1", "--part", part,
        )  # fmt: skip
        running.append(subprocess.Popen(command, env=eyas_environment(), stderr=subprocess.PIPE, text=True))
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    states = eyas.open_states(folder)
    assert len(states) == 400
    assert states.manifest["status"] == "complete"
    assert {p.name.split("-")[1] for p in folder.glob("shard-*")} == {"s000r000", "s001r000"}


def test_the_disk_must_hold_all_parts(tiny_model, token_rows, tmp_path):
    def disk(**more):
        settings = ExtractSettings(
            model_path=str(tiny_model("llama")),
            prepared_data=str(token_rows([60] * 20)),
            output_dir=str(tmp_path / "s"),
            layer_ids=[2],
            **more,
        )
        (check,) = (check for check in plan(settings).checks if check.name == "disk")
        return check.finding.split(",")[0]

    assert disk(part="1/2") == disk()


@pytest.mark.parametrize("quick_start", [False, True])  # of extract, of rehearse
def test_token_ids_beyond_the_embeddings_are_said_in_preflight(quick_start, tiny_model, token_rows, tmp_path):
    """A tokenizer may have more tokens than the model has rows: no load for that, and the first sample is named."""
    path = token_rows([20, 20, 90])
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"input_ids": [3, 128, 130], "loss_mask": [0, 1, 1]}) + "\n")
    settings = ExtractSettings(
        model_path=str(tiny_model("llama")), prepared_data=str(path), output_dir=str(tmp_path / "s"), layer_ids=[2]
    )
    (check,) = (check for check in plan(settings, quick_start=quick_start).checks if check.name == "token ids")
    assert check.status == "FAIL"
    assert "1 samples" in check.finding
    assert "sample 3 is the first, with token id 130, and the target has 128 rows" in check.finding
    # Samples that are too long are not extracted, whatever they hold.
    too_long = token_rows([20, 20], name="long.jsonl")
    with open(too_long, "a", encoding="utf-8") as file:
        file.write(json.dumps({"input_ids": [500] * 90, "loss_mask": [1] * 90}) + "\n")
    fits = replace(settings, prepared_data=str(too_long), max_seq_len=64)
    assert [check.status for check in plan(fits).checks if check.name == "token ids"] == ["OK"]
    path.write_text('{"input_ids": [3, 49152], "loss_mask": [0, 1]}\n')
    (row,) = (row for row in check_target("smollm2", str(path), tmp_path, 1) if row.name == "token ids")
    assert (row.status, "token id 49152" in row.finding) == ("FAIL", True)


def test_a_finished_store_is_left_alone(options, tmp_path):
    eyas.extract(**options)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "s").glob("shard-*")}
    report = eyas.extract(**options)
    assert (report.new_samples, report.written, report.exit_code) == (0, 10, 0)
    assert report.parity["passed"]
    assert before == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "s").glob("shard-*")}


# --- wrong input ----------------------------------------------------------------------------------------------------


def test_a_folder_with_foreign_files_is_refused(tiny_model, token_rows, tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "thesis.docx").write_text("years of work")
    with pytest.raises(FolderConflictError, match=r"holds something else: thesis\.docx"):
        eyas.extract(
            model_path=str(tiny_model("llama")),
            prepared_data=str(token_rows(LENGTHS)),
            output_dir=str(tmp_path / "t"),
            layer_ids=[2],
        )
    assert (tmp_path / "t" / "thesis.docx").exists()


def test_two_runs_into_one_folder(options, tmp_path):
    (tmp_path / "s").mkdir()
    with lock_directory(tmp_path / "s"), pytest.raises(FolderConflictError, match=f'"pid": {os.getpid()}'):
        eyas.extract(**options)


@pytest.mark.parametrize(
    ("first", "second", "beside"),
    [("0/2", None, False), (None, "0/2", False), ("0/2", "1/3", False), ("0/2", "0/2", False), ("0/2", "1/2", True)],
)
def test_only_parts_of_one_split_write_side_by_side(options, first, second, beside, tmp_path):
    """Any other run would make samples of the part a second time (fault F11)."""
    (tmp_path / "s").mkdir()
    with lock_directory(tmp_path / "s", ExtractSettings(**options, part=first).parts):
        if beside:
            assert eyas.extract(**options, part=second).new_samples > 0
        else:
            with pytest.raises(FolderConflictError, match=f'"pid": {os.getpid()}'):
                eyas.extract(**options, part=second)
    eyas.extract(**options)
    assert sorted(eyas.open_states(tmp_path / "s").lengths) == sorted(LENGTHS)


@pytest.mark.parametrize("layer", [2, 3])
def test_a_run_that_ended_or_began_between_plan_and_lock(layer, tiny_model, token_rows, tmp_path, monkeypatch):
    """What the plan saw is no longer so: samples that are there now are not made twice, other states are refused."""
    options = {
        "model_path": str(tiny_model("llama")),
        "prepared_data": str(token_rows(LENGTHS)),
        "output_dir": str(tmp_path / "s"),
    }
    other: list[int] = []

    def meanwhile(checks):
        if not other:
            other.append(eyas.extract(**options, layer_ids=[2], part="0/2").new_samples)

    if layer == 2:
        report = eyas.extract(**options, layer_ids=[2], on_preflight=meanwhile)
        assert report.new_samples == len(LENGTHS) - other[0]
    else:
        with pytest.raises(FolderConflictError, match="of another run"):
            eyas.extract(**options, layer_ids=[3], part="1/2", on_preflight=meanwhile)
        eyas.extract(**options, layer_ids=[2])
    assert sorted(eyas.open_states(tmp_path / "s").lengths) == sorted(LENGTHS)


def test_a_run_with_nothing_to_do_changes_nothing_that_is_told(options, tmp_path):
    eyas.extract(**options)
    eyas.verify(tmp_path / "s", recompute=0)
    before = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert before["verified"]["passed"]
    report = eyas.extract(**options, batch_tokens=40, threads=1)
    after = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert report.new_samples == 0
    assert {**after, "updated": ""} == {**before, "updated": ""}
    next((tmp_path / "s").glob("shard-*")).unlink()
    eyas.extract(**options)
    assert "verified" not in json.loads((tmp_path / "s" / "manifest.json").read_text())


def test_runs_in_threads_of_one_process(tiny_model, token_rows, tmp_path):
    data, model = str(token_rows(LENGTHS)), str(tiny_model("llama"))

    def one(layer):
        folder = str(tmp_path / str(layer))
        return eyas.extract(model_path=model, prepared_data=data, output_dir=folder, layer_ids=[layer])

    with ThreadPoolExecutor(4) as pool:
        assert [report.exit_code for report in pool.map(one, (0, 1, 2, 3))] == [0, 0, 0, 0]
    for layer in (0, 1, 2, 3):
        assert eyas.verify(tmp_path / str(layer)).problems == []


def test_a_damaged_ledger_is_said_before_the_load(tiny_model, token_rows, tmp_path):
    settings = ExtractSettings(
        model_path=str(tiny_model("llama")),
        prepared_data=str(token_rows(LENGTHS)),
        output_dir=str(tmp_path / "s"),
        layer_ids=[2],
    )
    eyas.extract(**{**settings.__dict__, "max_seq_len": 50})
    (tmp_path / "s" / "ledger.jsonl").write_text("{}\n")
    with pytest.raises(StoreError, match=r"ledger\.jsonl is damaged"):
        plan(settings)


def test_samples_in_two_shards_are_never_a_finished_store(options, tmp_path):
    import shutil

    eyas.extract(**options)
    shutil.copy(tmp_path / "s" / "shard-r000-00000.safetensors", tmp_path / "s" / "shard-s000r000-00000.safetensors")
    with pytest.raises(StoreError, match="in two shards"):
        eyas.extract(**options)


def test_weights_missing_or_cut_short(tiny_model, token_rows, tmp_path):
    import shutil

    data = token_rows(LENGTHS)
    broken = tmp_path / "m"
    shutil.copytree(tiny_model("llama"), broken)
    weights = broken / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    options = {
        "model_path": str(broken),
        "prepared_data": str(data),
        "output_dir": str(tmp_path / "s"),
        "layer_ids": [2],
    }
    with pytest.raises(
        InputError, match=f"should have {len(content)} bytes by its header, it has {len(content) - 100}"
    ):
        eyas.extract(**options)
    weights.unlink()
    with pytest.raises(InputError, match=r"holds neither model\.safetensors nor"):
        eyas.extract(**options)
    (broken / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    with pytest.raises(InputError, match="2 of 2 weights files are missing"):
        eyas.extract(**options)
    (broken / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json"):
        eyas.extract(**options)


def test_weights_of_another_architecture_are_not_filled_with_noise(tiny_model, token_rows, tmp_path):
    import shutil

    from eyas.base.errors import EngineError

    broken = tmp_path / "m"
    shutil.copytree(tiny_model("llama"), broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(EngineError, match="weights are in no file"):
        eyas.extract(
            model_path=str(broken),
            prepared_data=str(token_rows(LENGTHS)),
            output_dir=str(tmp_path / "s"),
            layer_ids=[2],
        )


def test_sharded_weights_with_an_index(tiny_model, token_rows, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny_model("llama")).save_pretrained(tmp_path / "m", max_shard_size="40KB")
    assert (tmp_path / "m" / "model.safetensors.index.json").exists()
    report = eyas.extract(
        model_path=str(tmp_path / "m"),
        prepared_data=str(token_rows(LENGTHS)),
        output_dir=str(tmp_path / "s"),
        layer_ids=[2],
    )
    assert report.exit_code == 0


def test_wrong_tokenizer_wrong_numbers_no_disk(tiny_model, token_rows, tmp_path, monkeypatch):
    model = str(tiny_model("llama"))
    options = {
        "model_path": model,
        "prepared_data": str(token_rows([9], vocab_size=5000)),
        "output_dir": str(tmp_path / "s"),
        "layer_ids": [2],
    }
    with pytest.raises(PreflightError, match=r"token ids: 1 samples hold token ids .* 128 rows"):
        eyas.extract(**options)
    for change, says in [
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"gpu_memory_utilization": 1.5}, "at most 1"),
        ({"engine": "magic"}, "one of transformers, vllm"),
        ({"tp_size": 2}, "--engine vllm"),
        ({"store_dtype": "float32", "dtype": "bfloat16"}, "does not go with"),
        ({"dtype": "int3"}, "int3"),
        ({"device": "cuda:7"}, "no GPU"),
        ({"model_path": str(tmp_path / "nowhere")}, "does not exist"),
    ]:
        with pytest.raises(InputError, match=says):
            eyas.extract(**{**options, **change})
    monkeypatch.setattr("eyas.gates.preflight.free_bytes", lambda folder: 1000)
    with pytest.raises(PreflightError, match=r"disk: .* to write"):
        eyas.extract(**options)
    assert not list(tmp_path.glob("s/shard-*"))


def test_a_disk_that_fills_up_on_the_way(tiny_model, token_rows, small_disk):
    """Finished shards are kept, no half one is left, and with room again the same command completes the store."""
    options = {
        "model_path": str(tiny_model("llama")),
        "prepared_data": str(token_rows([50] * 40)),
        "output_dir": str(small_disk / "s"),
        "layer_ids": [2],
        "batch_tokens": 100,
        "shard_size": 0.06,
    }
    filler = small_disk / "filler"

    def fill(line: str) -> None:
        if line.startswith("extracting"):
            filler.write_bytes(bytes(3_900_000))  # 4.2 MB in all, 0.5 MB of states to come

    with pytest.raises(DiskFullError, match="no space left"):
        eyas.extract(**options, on_stage=fill)
    kept = len(eyas.open_states(small_disk / "s", allow_open=True))
    assert 0 < kept < 40
    assert not list((small_disk / "s").glob("*.tmp"))
    filler.unlink()
    report = eyas.extract(**options)
    assert (report.exit_code, report.written, report.new_samples) == (0, 40, 40 - kept)


def test_a_folder_that_cannot_be_written(tiny_model, token_rows, small_disk):
    options = {"model_path": str(tiny_model("llama")), "prepared_data": str(token_rows(LENGTHS)), "layer_ids": [2]}
    (small_disk / "empty").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for name in ("new", "empty"):
        with pytest.raises(InputError, match="cannot be written: Read-only"):
            eyas.extract(**options, output_dir=str(small_disk / name))


def test_repeated_rows_are_extracted_once(tiny_model, token_rows, tmp_path):
    data = token_rows(LENGTHS)
    data.write_text(data.read_text() * 2)
    seen = []
    report = eyas.extract(
        model_path=str(tiny_model("llama")),
        prepared_data=str(data),
        output_dir=str(tmp_path / "s"),
        layer_ids=[2],
        on_preflight=seen.extend,
    )
    assert report.written == 10
    assert any(c.name == "repeated samples" and c.status == "WARN" for c in seen)


def test_hooks_that_never_fire_are_an_error(tiny_model, token_rows, tmp_path, monkeypatch):
    from eyas.engines import transformers as module

    monkeypatch.setattr(module.Capture, "_take", lambda self, layer_id, stream: None)
    with pytest.raises(ContractError, match=r"states of layers \[\]"):
        eyas.extract(
            model_path=str(tiny_model("llama")),
            prepared_data=str(token_rows(LENGTHS)),
            output_dir=str(tmp_path / "s"),
            layer_ids=[2],
        )


# --- memory ---------------------------------------------------------------------------------------------------------


def test_peak_memory_does_not_grow_with_the_number_of_samples(tiny_model, token_rows, tmp_path):
    program = (
        "import sys, resource, eyas\n"
        "eyas.extract(model_path=sys.argv[1], prepared_data=sys.argv[2], output_dir=sys.argv[3], layer_ids=[1, 2, 3], shard_size=1, threads=1)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    peaks = []
    for number in (300, 3000):
        data = token_rows([100] * number, name=f"{number}.jsonl", seed=number)
        arguments = [str(tiny_model("llama")), str(data), str(tmp_path / f"s{number}")]
        done = subprocess.run(
            [*eyas_command()[:1], "-c", program, *arguments],
            env=eyas_environment(),
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    # 270,000 more tokens are 138 MB of states.
    assert peaks[1] - peaks[0] < 25, peaks
