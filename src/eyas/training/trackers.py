"""Where training figures go besides the terminal and `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow.

Everything local lies under the draft's `tracking` directory, whatever the working directory is, unless the tracker's own variables say
otherwise (`WANDB_DIR`, `MLFLOW_TRACKING_URI`; `WANDB_MODE=offline` needs no account). `tracking/runs.json` keeps each tracker's run id, so
that a resumed training continues the same run.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from eyas.base.errors import InputError
from eyas.base.files import write_json
from eyas.base.manifest import package_version

log = logging.getLogger(__name__)

PROJECT = "eyas"
RUNS = "runs.json"
#: Tracker -> the distributions that bring it. Not asked by `find_spec`: a directory `wandb` in the working directory, as wandb itself
#: leaves it, looks like a package.
PACKAGES = {"tensorboard": ("tensorboard",), "wandb": ("wandb",), "mlflow": ("mlflow", "mlflow-skinny")}
Ended = Literal["finished", "stopped", "failed"]


def check_trackers(names: Sequence[str]) -> list[str]:
    """The trackers that can run. TensorBoard, the default, is left out where it is not installed; the others must be there.

    Raises:
        InputError: the package of one is missing.
    """
    kept = []
    for name in names:
        if name == "none":
            continue
        if any(package_version(package) for package in PACKAGES[name]):
            kept.append(name)
        elif name != "tensorboard":
            raise InputError(f"--track {name}: the package is not installed", f"pip install 'eyas[{name}]'")
    return kept


class Trackers:
    """A run of each tracker, begun, or continued where the directory has been tracked before.

    Args:
        names: from `check_trackers`; on ranks other than the main one none. directory: the draft's. config: the run's settings, stored
            with a run that begins.

    Raises:
        InputError: a tracker refuses (no account, no such run any more, its server out of reach), with what it says.
    """

    def __init__(self, names: Sequence[str], directory: Path, config: dict[str, Any]):
        self._tensorboard = self._wandb = self._mlflow = None
        if not names:
            return
        place = (directory / "tracking").resolve()
        known: dict[str, str] = json.loads((place / RUNS).read_text()) if (place / RUNS).exists() else {}
        place.mkdir(parents=True, exist_ok=True)
        plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in config.items()}
        ids = dict(known)
        with _refusals(place / RUNS if known else None):
            if "tensorboard" in names:
                from torch.utils.tensorboard import SummaryWriter

                self._tensorboard, ids["tensorboard"] = SummaryWriter(str(place / PROJECT)), "events"
                if "tensorboard" not in known:
                    self._tensorboard.add_text("settings", "\n".join(f"    {k}: {v}" for k, v in plain.items()))
            if "wandb" in names:
                self._wandb = _begin_wandb(place, directory.name, known.get("wandb"), plain)
                ids["wandb"] = self._wandb.id
            if "mlflow" in names:
                self._mlflow = _begin_mlflow(place, directory.name, known.get("mlflow"), plain)
                ids["mlflow"] = self._mlflow.info.run_id
        write_json(place / RUNS, ids)

    def log(self, figures: dict[str, float], step: int) -> None:
        """Scalars of one step."""
        if self._tensorboard:
            for name, value in figures.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb:
            self._wandb.log(figures, step=step)
        if self._mlflow:
            import mlflow

            mlflow.log_metrics(figures, step=step)

    def end(self, ended: Ended) -> None:
        """Close every run as finished, stopped on request, or failed."""
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish(exit_code={"finished": 0, "stopped": 130, "failed": 1}[ended])
        if self._mlflow:
            import mlflow

            mlflow.end_run({"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[ended])


def _begin_wandb(place: Path, name: str, run: str | None, config: dict[str, Any]) -> Any:
    import wandb

    # Output stays ours: eyas keeps every process's, and wandb's summary would tear the progress display.
    options: dict[str, Any] = {"name": name, "settings": wandb.Settings(console="off", silent=True)}
    if "WANDB_DIR" not in os.environ:
        options["dir"] = str(place)
    options |= {"id": run, "resume": "allow"} if run else {"config": config}
    begun = wandb.init(project=PROJECT, **options)
    log.info("wandb run %s in %s", begun.id, begun.dir)
    return begun


def _begin_mlflow(place: Path, name: str, run: str | None, config: dict[str, Any]) -> Any:
    import mlflow

    own = "MLFLOW_TRACKING_URI" not in os.environ
    uri = f"sqlite:///{place / 'mlflow.db'}" if own else os.environ["MLFLOW_TRACKING_URI"]
    mlflow.set_tracking_uri(uri)
    project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    found = mlflow.get_experiment_by_name(project)
    artifacts = (place / "mlartifacts").as_uri() if own else None
    experiment = found.experiment_id if found else mlflow.create_experiment(project, artifact_location=artifacts)
    begun = mlflow.start_run(run_id=run, experiment_id=experiment, run_name=name)
    if run is None:  # a resumed run keeps the settings it began with; MLflow refuses changed ones
        mlflow.log_params({k: str(v)[:500] for k, v in config.items()})
    log.info("mlflow run %s at %s", begun.info.run_id, uri)
    return begun


@contextmanager
def _refusals(known: Path | None) -> Iterator[None]:
    """A tracker's own errors as one that says what to change. known: the file of run ids, when an earlier run is continued."""
    try:
        yield
    except Exception as error:
        whose = type(error).__module__.split(".")[0]
        remedy = {
            "wandb": "`wandb login`, or WANDB_MODE=offline",
            "mlflow": "check MLFLOW_TRACKING_URI; without it the run goes to the draft's own directory",
        }.get(whose)
        if remedy is None:
            raise
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy += f"; or delete {known} for a new run" if known else ""
        raise InputError(f"--track {whose}: {said}", remedy) from None
