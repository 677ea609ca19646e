"""`eyas train`: from a verified state store to a draft.

    eyas train --states STORE --model-path TARGET --output-dir DRAFT

What happens: the store is checked against the target (same weights, verified, `final` and the auxiliary layers there), held-out samples
are set apart by their prompts, the draft vocabulary is counted on the rest, the draft gets its first weights, and the loop runs: one
optimizer step reads its micro-batches from the store, K training-time-test steps each. At every evaluation the acceptance length is
simulated on the held-out samples; the best draft by that figure is what the output directory holds in the end.

Runs on one CPU, one GPU, or many (`torchrun --nproc-per-node N -m eyas train ...`, DDP or FSDP2). Stopping at any step and rerunning the
same command resumes from the last checkpoint; on a CPU the result is bit-equal to an undisturbed run (with a step or epoch budget; a
budget in seconds depends on the clock).
"""

from __future__ import annotations

import json
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.base.errors import ContractError, FolderConflictError
from eyas.base.files import translate_disk_full, validate_output_directory, write_json
from eyas.base.locks import only_writer
from eyas.base.manifest import MANIFEST, differing_fields
from eyas.base.settings import takes
from eyas.drafts.files import read_draft_manifest, save_draft, validate_vocabulary
from eyas.drafts.module import DraftLoss
from eyas.drafts.packing import Batch
from eyas.engines.transformers import sensible_threads
from eyas.gates.mark import read_mark
from eyas.store.reader import open_states
from eyas.target.embedded import resolve_model_path
from eyas.target.model_files import describe_model
from eyas.target.teacher import Teacher
from eyas.training.checkpoints import (
    full_weights,
    list_checkpoints,
    load_checkpoint,
    remove_unfinished,
    save_checkpoint,
)
from eyas.training.data import Reader, plan_epoch, planned_steps
from eyas.training.figures import METRICS, Figures, append_metrics, cut_metrics
from eyas.training.inputs import TrainInputs, new_draft, read_inputs, validate_store
from eyas.training.ranks import Ranks, join_ranks
from eyas.training.settings import TrainSettings
from eyas.training.simulation import HeldOut
from eyas.training.trackers import Trackers, check_trackers

log = logging.getLogger(__name__)

SETTINGS = "settings.json"
#: What a training directory may hold; anything else in it is refused.
TRAINING_FILES = {
    MANIFEST,
    "model.safetensors",
    ".*.tmp",
    SETTINGS,
    METRICS,
    "acceptance.*",  # what `eyas eval` leaves beside the draft
    "checkpoints",
    "tracking",
    ".manifest.json.*",
    "run*",
    "logs",
}

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainReport:
    """What a run did. best, last: simulated acceptance on held-out samples (None without a held-out split); before: untrained."""

    output_dir: Path
    steps: int
    tokens: int
    seconds: float
    before: dict[str, Any] | None
    best: dict[str, Any] | None
    last: dict[str, Any] | None
    best_step: int | None
    interrupted: bool


@takes(TrainSettings)
def train(
    settings: TrainSettings, *, progress: Progress | None = None, stop: threading.Event | None = None
) -> TrainReport:
    """Train a draft, or resume the one in `output_dir`.

    Args:
        settings: a `TrainSettings`, or its fields by name.
        progress: called on the main process with figures after every logged step and evaluation.
        stop: when set, a checkpoint is written after the current step and the run ends.

    Raises:
        StoreError, InputError, FolderConflictError: the store, the target, the settings or the directory do not fit together; the
            message names the field. ContractError: the loss stopped being finite.
    """
    s = settings
    info = describe_model(resolve_model_path(s.model_path), s.model_path, trust_remote_code=s.trust_remote_code)
    states = open_states(s.states)
    aux_ids = validate_store(states, info, s.aux_layers, allow_unverified=s.allow_unverified)
    validate_output_directory(s.output_dir, {*TRAINING_FILES, ".lock*"})
    trackers = check_trackers(s.trackers)
    ranks = join_ranks()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(s.seed)
    # One rank holds the directory for all.
    held = only_writer(s.output_dir, TRAINING_FILES) if ranks.main else nullcontext()
    with held, translate_disk_full(s.output_dir):
        if ranks.main:
            remove_unfinished(s.output_dir)
        if ranks.device.type == "cpu":
            torch.set_num_threads(_threads(s))
        run = _Run(s, read_inputs(s, info, states, aux_ids), ranks, progress or (lambda _: None))
        run.resume()
        kept = Trackers(trackers if ranks.main else [], s.output_dir, asdict(s))
        try:
            report = run.loop(kept, stop or threading.Event())
        except BaseException:
            kept.end("failed")
            raise
        kept.end("stopped" if report.interrupted else "finished")
        return report


def _threads(s: TrainSettings) -> int:
    """CPU threads: as asked, else those of the run that is resumed (sums depend on the split), else as many as are free."""
    path = s.output_dir / SETTINGS
    if s.threads is not None:
        return s.threads
    if path.exists():
        return int(json.loads(path.read_text()).get("threads", 1))
    return sensible_threads()


@dataclass
class _State:
    """How far a run has come: what a checkpoint keeps beside weights. seconds: trained, by the clock."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    before: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    best_step: int | None = None
    since_best: int = 0


class _Run:
    """One training run: the state that its steps share."""

    def __init__(self, settings: TrainSettings, inputs: TrainInputs, ranks: Ranks, progress: Progress):
        s = self.settings = settings
        self.inputs, self.ranks, self.progress, self.state = inputs, ranks, progress, _State()
        draft = new_draft(s, inputs, ranks.device)
        self.config = draft.config
        self.teacher = Teacher(inputs.parts, inputs.vocabulary.ids, ranks.device, draft.compute_dtype)
        self.t2d = draft.t2d.to(ranks.device)
        log.info(
            "draft of %.1f M parameters (%.1f M trained), vocabulary %d covers %.2f %% of the supervised tokens, "
            "%d samples to train on, %d held out",
            sum(p.numel() for p in draft.parameters()) / 1e6,
            sum(p.numel() for p in draft.parameters() if p.requires_grad) / 1e6,
            len(inputs.vocabulary.ids),
            100 * inputs.vocabulary.coverage,
            len(inputs.split.train),
            len(inputs.split.held_out),
        )
        self.model = ranks.wrap(draft, s.sharding)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=s.learning_rate,
            betas=s.betas,
            weight_decay=s.weight_decay,
            fused=ranks.device.type == "cuda" or None,
        )
        final_id, alone = inputs.info.num_layers, self.config.num_layers == 1
        self.held_out = HeldOut(
            inputs.states,
            inputs.split.held_out,
            inputs.aux_ids,
            final_id,
            ranks,
            num_speculative_tokens=s.num_speculative_tokens,
            batch_tokens=s.batch_tokens,
            skip_prompts=alone,
        )
        self.figures = Figures(s.ttt_steps, ranks.device)
        self.agreed_seconds = 0.0  # one clock for all ranks, the main one's
        per_epoch = len(self._plan(0))
        #: None: the clock says when the run ends.
        self.total_steps = None if s.by_clock else s.steps or max(1, round(per_epoch * s.epochs))

    # --- where the run stands

    def resume(self) -> None:
        """Take the last checkpoint up, or begin.

        Raises:
            FolderConflictError: the directory holds another run, or a draft with the vocabulary of other data.
        """
        s, directory, state = self.settings, self.settings.output_dir, self.state
        ours = {
            "settings": s.identity(),
            "dataset_hash": self.inputs.vocabulary.dataset_hash,
            "weights_hash": self.inputs.info.weights_hash,
            "ranks": self.ranks.count,
        }
        if (directory / SETTINGS).exists():
            have = json.loads((directory / SETTINGS).read_text())
            have.pop("threads", None)
            if lines := differing_fields(have, ours):
                raise FolderConflictError(
                    f"{directory} holds another training run:\n  " + "\n  ".join(lines),
                    "name a new --output-dir, or repeat that run's settings to resume it",
                )
        if (directory / MANIFEST).exists():
            validate_vocabulary(directory, read_draft_manifest(directory), self.inputs.vocabulary)
        if checkpoints := list_checkpoints(directory / "checkpoints"):
            kept = load_checkpoint(checkpoints[-1], self.model, self.optimizer, self.ranks)
            self.state = state = _State(**{k: kept[k] for k in vars(state)})
            log.info("resuming %s at step %d", directory, state.step)
        self.ranks.wait()
        if self.ranks.main:
            if not (directory / SETTINGS).exists():
                write_json(directory / SETTINGS, {**ours, "threads": torch.get_num_threads()})
            cut_metrics(directory, state.step)

    def _elapsed(self) -> float:
        return time.monotonic() - self.began

    def _out_of_time(self) -> bool:
        seconds = self.settings.seconds
        return seconds is not None and self.ranks.any(self._elapsed() >= seconds)

    def _share(self, step: int) -> float:
        """How far the run has come, 0..1: by steps, or by the clock when the budget is in seconds."""
        if self.total_steps is None:
            return min(1.0, self.agreed_seconds / self.settings.seconds)  # type: ignore[operator]
        return step / self.total_steps

    def _rate(self) -> float:
        s, share = self.settings, self._share(self.state.step)
        if share < s.warmup:
            return s.learning_rate * (share + 1e-3) / (s.warmup + 1e-3)
        cosine = 0.5 * (1 + math.cos(math.pi * (share - s.warmup) / max(1e-9, 1 - s.warmup)))
        return s.learning_rate * (s.min_lr_ratio + (1 - s.min_lr_ratio) * cosine)

    def _plan(self, epoch: int) -> list[list[np.ndarray]]:
        s = self.settings
        return plan_epoch(
            self.inputs.split.train,
            self.inputs.states.lengths,
            batch_tokens=s.batch_tokens,
            parts=self.ranks.count * s.accumulate,
            seed=s.seed,
            epoch=epoch,
        )

    def _schedule(self) -> Iterator[tuple[list[np.ndarray], int]]:
        """This rank's micro-batches and K of each step from here on."""
        s, first = self.settings, self.state.step
        own = slice(self.ranks.rank * s.accumulate, (self.ranks.rank + 1) * s.accumulate)
        for step, parts in enumerate(planned_steps(first, self._plan), first):
            if self.total_steps is not None and step >= self.total_steps:
                return
            # By the clock, K is settled when the step begins, for all ranks alike (`_optimizer_step`).
            single = self.total_steps is not None and self._share(step) < s.ttt_warmup_fraction
            yield parts[own], 1 if single else s.ttt_steps

    # --- the loop

    def loop(self, trackers: Trackers, stop: threading.Event) -> TrainReport:
        """Train to the end of the budget, or until stopped."""
        s, state, ranks = self.settings, self.state, self.ranks
        self.trackers = trackers
        if state.step == 0 and len(self.held_out):
            state.before = self.held_out.simulate(self.model, self.teacher, self.t2d).summary()
        if ranks.main:
            vocabulary = {"size": len(self.inputs.vocabulary.ids), "coverage": self.inputs.vocabulary.coverage}
            mark = read_mark(self.inputs.states.manifest)
            proven = "not verified" if mark is None else mark.text
            self.progress({"step": state.step, "before": state.before, "vocabulary": vocabulary, "states": proven})
        self.began = time.monotonic() - state.seconds
        if state.step and self._out_of_time():  # a finished run, asked for again: not a step more
            self.total_steps = state.step
        reader = Reader(
            self.inputs.states,
            self._schedule(),
            self.inputs.aux_ids,
            self.inputs.info.num_layers,
            skip_prompts=self.config.num_layers == 1,
            pin=ranks.device.type == "cuda",
        )
        last: dict[str, Any] | None = None
        interrupted = False
        try:
            for batches in reader:
                self._optimizer_step([b.to(ranks.device) for b in batches])
                state.step += 1
                done = state.step == self.total_steps or self._out_of_time()
                if state.step % s.log_every == 0 or done:
                    self._report(reader)
                interrupted = ranks.any(stop.is_set()) and not done
                due = state.step % s.eval_every == 0 or done
                with self.figures.paused():
                    if due and not interrupted and len(self.held_out):
                        last = self._judge()
                    if due or interrupted or (s.checkpoint_every and state.step % s.checkpoint_every == 0):
                        self._checkpoint()
                early = s.patience is not None and state.since_best >= s.patience
                if early:
                    log.info("no better simulated acceptance in %d evaluations: stopping early", s.patience)
                if done or interrupted or early:
                    break
        finally:
            reader.close()
        if state.best is None and not interrupted:
            self._save_draft(None)
        return TrainReport(
            s.output_dir,
            state.step,
            state.tokens,
            self._elapsed(),
            state.before,
            state.best,
            last,
            state.best_step,
            interrupted,
        )

    def _optimizer_step(self, batches: list[Batch]) -> None:
        """Forward and backward of every micro-batch, then one AdamW step. The loss is the mean over supervised rows of all ranks."""
        s, ranks = self.settings, self.ranks
        K = len(batches[0].targets)
        counts = [sum(b.targets[k].count for b in batches) for k in range(K)]
        clock = (
            self._elapsed() if ranks.main else 0.0
        )  # each by its own would step with another rate, and in time another K
        *counts, self.agreed_seconds, tokens = ranks.sum([*counts, clock, sum(b.tokens for b in batches)])  # type: ignore[assignment]
        self.state.tokens += int(tokens)
        if self.total_steps is None and self._share(self.state.step) < s.ttt_warmup_fraction:
            K, batches = 1, [replace(b, targets=b.targets[:1]) for b in batches]
        weights = torch.tensor([s.step_decay**k for k in range(K)])
        # [K]; gradients are averaged over ranks. Copied without a wait for the device.
        divisors = torch.tensor(counts[:K], dtype=torch.float32).clamp_min(1) / weights / ranks.count
        if ranks.device.type == "cuda":
            divisors = divisors.pin_memory().to(ranks.device, non_blocking=True)
        for i, batch in enumerate(batches):
            with ranks.synchronised(self.model, last=i + 1 == len(batches)):
                out: DraftLoss = self.model(batch, self.teacher.logits(batch.final[batch.rows]), divisors, loss=s.loss)
                out.loss.backward()
            self.figures.add(out, batch)
        self.figures.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _report(self, reader: Reader) -> None:
        figures = self.figures.close(self.ranks)
        if not figures["loss"]:  # nothing was supervised since the last report
            return
        step = self.state.step
        if not all(math.isfinite(x) for x in figures["loss"]):
            raise ContractError(
                f"the loss is no longer finite at step {step}: {figures['loss']}",
                "lower --learning-rate, or look for a damaged sample with `eyas verify`",
            )
        figures = {"step": step, "learning_rate": self._rate(), **figures, "data_wait": round(reader.waited, 3)}
        reader.waited = 0.0
        if self.ranks.main:
            unkept = ("tokens_per_second", "data_wait")
            append_metrics(self.settings.output_dir, {k: v for k, v in figures.items() if k not in unkept})
            where = {"total_steps": self.total_steps, "share": max(self._share(step), 1e-9), "elapsed": self._elapsed()}
            self.progress({**figures, **where, "best": self.state.best})
        flat = {"learning_rate": figures["learning_rate"], "tokens_per_second": figures["tokens_per_second"]}
        for name in ("loss", "accuracy", "alpha"):
            flat.update({f"{name}/step{k}": v for k, v in enumerate(figures[name])})
        self.trackers.log(flat, step)

    # --- evaluation and saving

    def _judge(self) -> dict[str, Any]:
        began, state = time.monotonic(), self.state
        found = self.held_out.simulate(self.model, self.teacher, self.t2d).summary()
        length = found["acceptance_length"]
        if state.best is None or length > state.best["acceptance_length"]:
            state.best, state.best_step, state.since_best = found, state.step, 0
            self._save_draft(found)
        else:
            state.since_best += 1
        self.trackers.log({"acceptance_length": length}, state.step)
        best: dict[str, Any] = state.best  # type: ignore[assignment]
        if self.ranks.main:
            append_metrics(self.settings.output_dir, {"step": state.step, "simulated": found})
            self.progress({"step": state.step, "simulated": found, "best": best, "total_steps": self.total_steps})
        log.info("step %d: simulated acceptance length %.3f (best %.3f)", state.step, length, best["acceptance_length"])
        if self.settings.seconds is not None:  # evaluating is not training: it does not use up the budget
            self.began += time.monotonic() - began
        return found

    def _save_draft(self, acceptance: dict[str, Any] | None) -> None:
        weights = full_weights(self.model, self.config)
        if not self.ranks.main:
            return
        s, inputs = self.settings, self.inputs
        save_draft(
            s.output_dir,
            self.config,
            weights,
            target=inputs.info.for_manifest(),
            dataset_hash=inputs.vocabulary.dataset_hash,
            store={"path": str(s.states.resolve()), "layer_ids": list(inputs.states.layer_ids)},
            vocabulary={"size": len(inputs.vocabulary.ids), "coverage": round(inputs.vocabulary.coverage, 6)},
            training={"settings": s.identity(), "step": self.state.step, "tokens": self.state.tokens},
            acceptance={"chain": s.num_speculative_tokens, "simulated": acceptance, "before": self.state.before},
        )

    def _checkpoint(self) -> None:
        self.state.seconds = self._elapsed()
        state = {k: v for k, v in vars(self.state).items() if k != "step"}
        directory, keep = self.settings.output_dir / "checkpoints", self.settings.keep
        save_checkpoint(directory, self.state.step, self.config, self.model, self.optimizer, state, keep, self.ranks)
