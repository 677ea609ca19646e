"""Where training figures go besides the terminal and `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow, through accelerate.

Everything local lies under the draft's `tracking` folder, whatever the working folder is, unless the tracker's own variables say
otherwise (`WANDB_DIR`, `MLFLOW_TRACKING_URI`; `WANDB_MODE=offline` needs no account). `tracking/runs.json` keeps each tracker's run id, so
that a resumed training goes on in the same run.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.base.errors import InputError
from eyas.base.files import write_json
from eyas.base.manifest import package_version

log = logging.getLogger(__name__)

PROJECT = "eyas"
RUNS = "runs.json"
#: Tracker -> the distributions that bring it. Not asked by `find_spec`: a folder `wandb` in the working folder, as wandb itself leaves it,
#: looks like a package.
PACKAGES = {"tensorboard": ("tensorboard",), "wandb": ("wandb",), "mlflow": ("mlflow", "mlflow-skinny")}


def check_trackers(names: tuple[str, ...]) -> list[str]:
    """The trackers that can run. TensorBoard, the default, is left out where it is not installed; the others must be there.

    Raises:
        InputError: an unknown tracker, or one whose package is missing.
    """
    kept = []
    for name in names:
        if name not in PACKAGES:
            raise InputError(f"unknown tracker {name!r}", "--track is tensorboard, wandb, mlflow or none")
        if any(package_version(package) for package in PACKAGES[name]):
            kept.append(name)
        elif name != "tensorboard":
            raise InputError(f"--track {name}: the package is not installed", f"pip install 'eyas[{name}]'")
    return kept


def start_trackers(accelerator: Any, names: list[str], folder: Path, config: dict[str, Any]) -> None:
    """Begin (or, where `folder` has been tracked before, go on in) a run of each tracker.

    Args:
        names: from `check_trackers`. folder: the draft's. config: the run's settings, stored with a run that begins.

    Raises:
        InputError: a tracker refuses (no account, no such run any more, its server out of reach), with what it says.
    """
    if not names:
        return
    place = (folder / "tracking").resolve()
    known: dict[str, str] = json.loads((place / RUNS).read_text()) if (place / RUNS).exists() else {}
    options: dict[str, dict[str, Any]] = {}
    if accelerator.is_main_process:
        place.mkdir(parents=True, exist_ok=True)
        if "wandb" in names:
            options["wandb"] = _wandb_options(place, folder.name, known.get("wandb"))
        if "mlflow" in names:
            options["mlflow"] = _mlflow_options(place, folder.name, known.get("mlflow"))
    plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in config.items()}
    with _refusals(place / RUNS if known else None):
        accelerator.init_trackers(PROJECT, init_kwargs=options)
        for tracker in accelerator.trackers:
            if tracker.name not in known:  # a resumed run keeps the settings it began with; MLflow refuses changed ones
                tracker.store_init_configuration(plain)
    if accelerator.is_main_process:
        ids = {"tensorboard": "events"} if "tensorboard" in names else {}
        for tracker in accelerator.trackers:
            if tracker.name == "wandb":
                ids["wandb"] = tracker.run.id
                log.info("wandb run %s in %s", tracker.run.id, tracker.run.dir)
            elif tracker.name == "mlflow":
                ids["mlflow"] = tracker.active_run.info.run_id
                log.info("mlflow run %s at %s", ids["mlflow"], _mlflow_place(place))
        write_json(place / RUNS, known | ids)


def end_failed(accelerator: Any, interrupted: bool = False) -> None:
    """Close the trackers' runs as failed, or as stopped on request; `accelerator.end_training` closes those that came to their end."""
    if not accelerator.is_main_process:
        return
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            tracker.run.finish(exit_code=130 if interrupted else 1)
        elif tracker.name == "mlflow":
            import mlflow

            mlflow.end_run("KILLED" if interrupted else "FAILED")


def _wandb_options(place: Path, name: str, run: str | None) -> dict[str, Any]:
    import wandb

    # Output stays ours: eyas keeps every process's, and wandb's summary would tear the progress display.
    options: dict[str, Any] = {"name": name, "settings": wandb.Settings(console="off", silent=True)}
    if "WANDB_DIR" not in os.environ:
        options["dir"] = str(place)
    return options | ({"id": run, "resume": "allow"} if run else {})


def _mlflow_place(place: Path) -> str:
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{place / 'mlflow.db'}"


def _mlflow_options(place: Path, name: str, run: str | None) -> dict[str, Any]:
    import mlflow

    mlflow.set_tracking_uri(_mlflow_place(place))
    options: dict[str, Any] = {"run_name": name} | ({"run_id": run} if run else {})
    if "MLFLOW_TRACKING_URI" not in os.environ:
        options["logging_dir"] = (place / "mlartifacts").as_uri()
    return options


@contextmanager
def _refusals(known: Path | None) -> Iterator[None]:
    """A tracker's own errors as one that says what to change. known: the file of run ids, when an earlier run is gone on with."""
    kinds: list[type[Exception]] = []
    try:
        from wandb.errors import Error

        kinds.append(Error)
    except ImportError:
        pass
    try:
        from mlflow.exceptions import MlflowException

        kinds.append(MlflowException)
    except ImportError:
        pass
    try:
        yield
    except tuple(kinds) as error:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        whose = "wandb" if type(error).__module__.startswith("wandb") else "mlflow"
        remedy = {
            "wandb": "`wandb login`, or WANDB_MODE=offline",
            "mlflow": "check MLFLOW_TRACKING_URI; without it the run goes to the draft's own folder",
        }[whose]
        remedy += f"; or delete {known} for a new run" if known else ""
        raise InputError(f"--track {whose}: {said}", remedy) from None
