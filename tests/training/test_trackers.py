"""Weights & Biases, MLflow and TensorBoard really run: what they keep, where, and that a resumed training goes on in the same run."""

import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from training_work import curve, options

from eyas.base.errors import ContractError, InputError
from eyas.base.manifest import package_version
from eyas.training.trackers import check_trackers
from eyas.training.trainer import train

FIGURES = {
    "learning_rate",
    "tokens_per_second",
    *(f"{n}/step{k}" for n in ("loss", "accuracy", "alpha") for k in range(3)),
}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working folder of its own, which is to stay empty, and none of the trackers' variables."""
    for name in (
        "WANDB_DIR",
        "WANDB_MODE",
        "WANDB_API_KEY",
        "MLFLOW_TRACKING_URI",
        "MLFLOW_RUN_ID",
        "MLFLOW_EXPERIMENT_NAME",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no account of whoever runs the tests
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cwd"


def stopped_after(work, name, step, **changes):
    """Train until `step`, then stop as Ctrl-C does."""
    stop = threading.Event()

    def watch(figures):
        if figures.get("step") == step and "loss" in figures:
            stop.set()

    assert train(**options(work, name, **changes), progress=watch, stop=stop).interrupted


def runs(folder):
    return json.loads((folder / "tracking" / "runs.json").read_text())


def test_packages_are_asked_not_folders(elsewhere):
    """wandb leaves a folder `wandb` in the working folder, which Python takes for a package without a file."""
    assert check_trackers(("none",)) == []
    for name in ("wandb", "mlflow"):
        (elsewhere / name).mkdir()
        if package_version(name) is None:
            with pytest.raises(InputError, match=rf"--track {name}: the package is not installed"):
                check_trackers((name,))
        else:
            assert check_trackers((name,)) == [name]


def test_tensorboard_keeps_what_the_metrics_file_has(work, elsewhere):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(**options(work, "with-tensorboard", trackers=("tensorboard",)))
    events = EventAccumulator(str(work / "with-tensorboard" / "tracking" / "eyas"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= FIGURES | {"acceptance_length"}
    have = {e.step: e.value for e in events.Scalars("loss/step0")}
    want = {line["step"]: line["loss"][0] for line in curve(work / "with-tensorboard") if "loss" in line}
    assert have == pytest.approx(want, rel=1e-6)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("store", ["own", "files"])
def test_mlflow_keeps_figures_settings_and_status(work, elsewhere, monkeypatch, store):
    """In the draft's folder, or where MLFLOW_TRACKING_URI says (a local file store)."""
    mlflow = pytest.importorskip("mlflow")
    name = f"with-mlflow-{store}"
    tracking = (work / name / "tracking").resolve()
    uri = f"sqlite:///{tracking / 'mlflow.db'}"
    if store == "files":
        uri = (elsewhere.parent / "mlruns").as_uri()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions want to be asked for it
    stopped_after(work, name, 5, trackers=("mlflow",))
    client = mlflow.MlflowClient(uri)
    run = runs(work / name)["mlflow"]
    assert client.get_run(run).info.status == "KILLED"
    train(**options(work, name, trackers=("mlflow",), eval_every=2))
    assert runs(work / name)["mlflow"] == run
    found = client.get_run(run)
    assert (found.info.status, found.data.params["learning_rate"]) == ("FINISHED", "0.003")
    assert found.data.params["eval_every"] == "4", "the settings that it began with"
    assert set(found.data.metrics) == FIGURES | {"acceptance_length"}
    have = {m.step: m.value for m in client.get_metric_history(run, "loss/step1")}
    assert have == pytest.approx({r["step"]: r["loss"][1] for r in curve(work / name) if "loss" in r})
    assert sorted(have) == list(range(1, 13))
    assert not list(elsewhere.iterdir())


def test_mlflow_marks_a_run_that_fails(work, elsewhere):
    mlflow = pytest.importorskip("mlflow")
    with pytest.raises(ContractError, match="finite"):
        train(**options(work, "mlflow-fails", trackers=("mlflow",), learning_rate=1e30, clip=1e30))
    client = mlflow.MlflowClient(f"sqlite:///{(work / 'mlflow-fails' / 'tracking').resolve() / 'mlflow.db'}")
    assert client.get_run(runs(work / "mlflow-fails")["mlflow"]).info.status == "FAILED"
    path = work / "mlflow-fails" / "tracking" / "runs.json"
    path.write_text(json.dumps({"mlflow": "0" * 32}))
    with pytest.raises(InputError, match=r"--track mlflow: .*0000"):
        train(**options(work, "mlflow-fails", trackers=("mlflow",), learning_rate=1e30, clip=1e30))


def records(file: Path) -> list[bytes]:
    """The records of a LevelDB log, as wandb writes them behind seven bytes of its own: blocks of 32 KiB, parts with a header each."""
    data, at, found, part = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part = (part if kind in (3, 4) else b"") + data[at + 7 : at + 7 + length]
        if kind in (1, 4):
            found.append(part)
        at += 7 + length
    return found


def wandb_history(folder: Path) -> list[dict[str, float]]:
    """What every offline run below a folder logged, a dict for each step."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for file in folder.rglob("run-*.wandb"):
        for record in map(Record.FromString, records(file)):
            if record.WhichOneof("record_type") == "history":
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    return rows


def eyas_train(work, name, *more, **variables):
    """`eyas train` as a user types it: wandb reads its variables once in the life of a process."""
    known = options(work, name)
    return subprocess.run(
        [
            sys.executable, "-m", "eyas", "train", "--states", str(known["states"]), "--model-path", known["model_path"],
            "--output-dir", str(known["output_dir"]), "--draft-vocab-size", "64", "--ttt-steps", "3", "--batch-tokens", "200",
            "--eval-every", "4", "--held-out", "0.2", "--dtype", "float32", "--track", "wandb", *more,
        ],
        env={**os.environ, "EYAS_STATE_DIR": str(work / "runs"), **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_wandb_offline_keeps_figures_and_goes_on_in_the_same_run(work, elsewhere):
    pytest.importorskip("wandb")
    folder, seen = work / "with-wandb", []
    for steps in ("20", "40"):
        done = eyas_train(work, "with-wandb", "--steps", steps, WANDB_MODE="offline")
        assert done.returncode == 0, done.stderr[-2000:]
        assert "wandb: " not in done.stdout + done.stderr, "its summary would tear the progress display"
        seen.append(runs(folder)["wandb"])
    assert seen[0] == seen[1]
    files = list((folder / "tracking").rglob("run-*.wandb"))
    assert [file.name for file in files] == [f"run-{seen[0]}.wandb"] * 2
    rows = wandb_history(folder / "tracking")
    assert set().union(*rows) >= FIGURES | {"acceptance_length"}
    have = {row["_step"]: row["loss/step0"] for row in rows if "loss/step0" in row}
    assert have == pytest.approx({r["step"]: r["loss"][0] for r in curve(folder) if "loss" in r})
    assert not list(elsewhere.iterdir())


def test_wandb_without_an_account_says_what_to_do(work, elsewhere):
    pytest.importorskip("wandb")
    done = eyas_train(work, "wandb-no-account", "--steps", "5")
    said = " ".join(done.stderr.split())
    assert done.returncode == 3, said
    assert "--track wandb: No API key" in said
    assert "WANDB_MODE=offline" in said
    assert "Traceback" not in said
