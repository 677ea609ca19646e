"""`eyas train`: from a verified state store to a draft.

    eyas train --states STORE --model-path TARGET --output-dir DRAFT

What happens: the store is checked against the target (same weights, verified, `final` and the auxiliary layers there), held-out samples
are set apart by their prompts, the draft vocabulary is counted on the rest, the draft gets its first weights, and the loop runs: one optimizer step
reads its micro-batches from the store, K training-time-test steps each. At every evaluation the acceptance length is simulated on the
held-out samples; the best draft by that figure is what the output folder holds in the end.

Runs on one CPU, one GPU, or many (`accelerate launch -m eyas train ...`, DDP or FSDP2). Stopping at any step and starting the same command
again continues from the last checkpoint; on a CPU the result is bit-equal to an undisturbed run (with a step or epoch budget; a budget in
seconds depends on the clock).
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.base.errors import ContractError, FolderConflictError, InputError
from eyas.base.files import translate_disk_full, validate_output_directory, write_json
from eyas.base.locks import only_writer
from eyas.base.manifest import MANIFEST, differing_fields, read_manifest
from eyas.drafts.eagle3.init import (
    FirstWeights,
    choose_vocabulary,
    count_supervised,
    derive_config,
    initialise,
    measured_scale,
)
from eyas.drafts.eagle3.model import Draft, DraftConfig, DraftLoss
from eyas.drafts.files import check_vocabulary, save_draft
from eyas.drafts.packing import Batch, supervised_rows
from eyas.engines.transformers import sensible_threads
from eyas.exporting.foreign import init_from
from eyas.store.reader import States, open_states
from eyas.target.model_files import ModelInfo, describe_model
from eyas.target.teacher import Teacher, load_target_parts
from eyas.training.checkpoints import (
    full_weights,
    list_checkpoints,
    load_checkpoint,
    remove_unfinished,
    save_checkpoint,
)
from eyas.training.data import Reader, Split, plan_epoch, read_batch, split_by_prompt
from eyas.training.launching import begin_accelerate, take_over_launcher
from eyas.training.settings import TrainSettings, check_settings, check_store, compute_dtype
from eyas.training.simulation import Acceptance, has_rounds, simulate
from eyas.training.trackers import check_trackers, end_failed, start_trackers

log = logging.getLogger(__name__)

SETTINGS = "settings.json"
METRICS = "metrics.jsonl"
#: What a training folder may hold; anything else in it is refused.
DRAFT_FILES = {
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


def train(
    *,
    progress: Callable[[dict[str, Any]], None] | None = None,
    stop: threading.Event | None = None,
    **options: Any,
) -> TrainReport:
    """Train a draft (or go on training the one in `output_dir`).

    Args:
        options: the fields of `TrainSettings`.
        progress: called on the main process with figures after every logged step and evaluation.
        stop: when set, a checkpoint is written after the current step and the run ends.

    Raises:
        StoreError, InputError, FolderConflictError: the store, the target, the settings or the folder do not fit together; the message
            names the field. ContractError: the loss stopped being finite.
    """
    known = {f.name for f in fields(TrainSettings)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise InputError(f"unknown option {unknown[0]!r}", f"one of {', '.join(sorted(known))}")
    settings = TrainSettings(
        **{**options, "states": Path(options["states"]), "output_dir": Path(options["output_dir"])}
    )
    check_settings(settings)
    settings = take_over_launcher(settings)
    from accelerate.utils import set_seed

    from eyas.target.embedded import resolve_model_path

    info = describe_model(
        resolve_model_path(settings.model_path), settings.model_path, trust_remote_code=settings.trust_remote_code
    )
    states = open_states(settings.states)
    aux_ids = check_store(states, info, settings.aux_layers, allow_unverified=settings.allow_unverified)
    validate_output_directory(settings.output_dir, {*DRAFT_FILES, ".lock*"})
    trackers = check_trackers(settings.trackers)
    accelerator = begin_accelerate(trackers, settings.output_dir / "tracking")
    set_seed(settings.seed)
    # One rank holds the folder for all.
    held = only_writer(settings.output_dir, DRAFT_FILES) if accelerator.is_main_process else nullcontext()
    with held, translate_disk_full(settings.output_dir):
        if accelerator.is_main_process:
            remove_unfinished(settings.output_dir)
        return _Run(
            settings, info, states, aux_ids, accelerator, progress or (lambda _: None), stop or threading.Event()
        ).go()


class _Run:
    """One training run: the state that its steps share."""

    def __init__(self, settings, info, states, aux_ids, accelerator, progress, stop):  # type: ignore[no-untyped-def]
        self.settings: TrainSettings = settings
        self.info: ModelInfo = info
        self.states: States = states
        self.aux_ids: tuple[int, ...] = aux_ids
        self.accelerator = accelerator
        self.progress, self.stop = progress, stop
        self.device: torch.device = accelerator.device
        self.step, self.tokens, self.trained_seconds = 0, 0, 0.0
        self.agreed_seconds = 0.0
        self.before: dict[str, Any] | None = None
        self.best: dict[str, Any] | None = None
        self.best_step: int | None = None
        self.since_best = 0

    # --- set-up

    def go(self) -> TrainReport:
        s = self.settings
        if self.device.type == "cpu":
            torch.set_num_threads(self._threads())
        masks = [self._mask(i) for i in range(len(self.states))]
        self.masks = [m for _, m in masks]
        self.split: Split = split_by_prompt(self.states.ids, masks, s.held_out, least=min(8, len(self.states) // 4))
        self.held_out = self.split.held_out[: s.eval_samples]
        if not any(len(supervised_rows(self.masks[int(i)], 0)) for i in self.split.train):
            raise InputError(
                f"no sample of {s.states} has a supervised token behind its second one: a draft could learn nothing (fault F13)",
                "run `eyas prepare` again and look at its masks",
            )
        if len(self.held_out) and not any(has_rounds(self.masks[int(i)]) for i in self.held_out):
            log.warning(
                "no held-out answer has a second token: acceptance cannot be simulated, the draft of the last step is kept"
            )
            self.held_out = self.held_out[:0]
        self.dataset_hash: str = self.states.manifest["dataset"]["hash"]
        counts = count_supervised((masks[int(i)] for i in self.split.train), self.info.vocab_size)
        size = min(s.draft_vocab_size, self.info.vocab_size)
        self.vocabulary = choose_vocabulary(counts, size, self.dataset_hash)
        parts = load_target_parts(self.info)
        config = derive_config(self.info, self.aux_ids, size, plain_rope=s.plain_rope, **s.draft)
        draft = self._new_draft(config, parts)
        self.config = draft.config
        self.teacher = Teacher(parts, self.vocabulary.ids, self.device, draft.compute_dtype)
        self.t2d = draft.t2d.to(self.device)
        trained = [p for p in draft.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained,
            lr=s.learning_rate,
            betas=s.betas,
            weight_decay=s.weight_decay,
            fused=self.device.type == "cuda" or None,
        )
        self.model, self.optimizer = self.accelerator.prepare(draft, optimizer)
        self._resume_or_begin(config)
        try:
            return self._train(draft, trained, size)
        except BaseException:
            end_failed(self.accelerator)
            raise

    def _train(self, draft: Draft, trained: list[torch.nn.Parameter], size: int) -> TrainReport:
        log.info(
            "draft of %.1f M parameters (%.1f M trained), vocabulary %d covers %.2f %% of the supervised tokens, "
            "%d samples to train on, %d held out",
            sum(p.numel() for p in draft.parameters()) / 1e6,
            sum(p.numel() for p in trained) / 1e6,
            size,
            100 * self.vocabulary.coverage,
            len(self.split.train),
            len(self.held_out),
        )
        return self._loop()

    def _threads(self) -> int:
        """CPU threads: as asked, else those of the run that is resumed (sums depend on the split), else as many as are free."""
        path = self.settings.output_dir / SETTINGS
        if self.settings.threads is not None:
            return self.settings.threads
        if path.exists():
            return int(json.loads(path.read_text()).get("threads", 1))
        return sensible_threads()

    def _mask(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        token_ids, loss_mask = self.states.tokens(index)
        return token_ids.numpy().copy(), loss_mask.numpy().copy()

    def _new_draft(self, config: DraftConfig, parts: Any) -> Draft:
        s = self.settings
        draft, first = Draft(config), FirstWeights(**s.first_weights)
        # 64 samples tell the scale of each dimension well enough, and reading them takes a second.
        some = self.split.train[:: max(1, len(self.split.train) // 64)][:64]
        scale = measured_scale(
            (torch.cat([sample.hidden[i] for i in self.aux_ids], -1) for sample in (self.states[int(p)] for p in some)),
            len(self.aux_ids),
            first.aux_scale,
        )
        if config.norm_aux:  # the norms take the scale out themselves, and nothing could be folded through them
            scale = torch.ones_like(scale)
        initialise(draft, parts, self.vocabulary, scale, seed=s.seed, first=first)
        if s.init_from:
            for line in init_from(draft, Path(s.init_from), self.info, parts):
                log.info("init-from: %s", line)
        draft.lm_head.weight.requires_grad_(s.train_head)
        draft.compute_dtype = compute_dtype(s.dtype, self.device)
        draft.compiled = s.compile == "on" or (s.compile == "auto" and self.device.type == "cuda")
        return draft

    def _resume_or_begin(self, config: DraftConfig) -> None:
        s, folder = self.settings, self.settings.output_dir
        checkpoints = list_checkpoints(folder / "checkpoints")
        mine = {
            "settings": s.identity(),
            "dataset_hash": self.dataset_hash,
            "weights_hash": self.info.weights_hash,
            "ranks": self.accelerator.num_processes,
        }
        if (folder / SETTINGS).exists():
            have = json.loads((folder / SETTINGS).read_text())
            have.pop("threads", None)
            lines = differing_fields(have, json.loads(json.dumps(mine, default=str)))
            if lines:
                raise FolderConflictError(
                    f"{folder} holds another training run:\n  " + "\n  ".join(lines),
                    "name a new --output-dir, or repeat that run's settings to resume it",
                )
        if (folder / MANIFEST).exists():
            check_vocabulary(folder, read_manifest(folder, "eyas.draft", 1), self.vocabulary)
        if checkpoints:
            state = load_checkpoint(checkpoints[-1], self.model, self.optimizer, self.accelerator)
            self.step, self.tokens, self.trained_seconds = state["step"], state["tokens"], state["seconds"]
            self.before, self.best, self.best_step = state["before"], state["best"], state["best_step"]
            self.since_best = state["since_best"]
            log.info("resuming %s at step %d", folder, self.step)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / SETTINGS).exists():
                write_json(folder / SETTINGS, {**mine, "threads": torch.get_num_threads()})
            self._cut_metrics()
        names = [str(getattr(name, "value", name)) for name in self.accelerator.log_with]
        start_trackers(self.accelerator, names, folder, asdict(s))

    def _cut_metrics(self) -> None:
        # Lines written after the checkpoint that we resume from would appear twice; a run that was killed may leave half a line.
        path = self.settings.output_dir / METRICS
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
            with suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] <= self.step:
                    kept.append(line + "\n")
        if path.exists():
            temporary = path.with_name(f".{METRICS}.{os.getpid()}.tmp")
            temporary.write_text("".join(kept), encoding="utf-8")
            os.replace(temporary, path)

    # --- the loop

    def _loop(self) -> TrainReport:
        s = self.settings
        self.began = time.monotonic() - self.trained_seconds
        parts = self.accelerator.num_processes * s.accumulate
        self.total_steps = self._total_steps(parts)
        if self.step == 0 and len(self.held_out):
            self.before = self._evaluate().summary()
        if self.accelerator.is_main_process:
            vocabulary = {"size": len(self.vocabulary.ids), "coverage": self.vocabulary.coverage}
            self.progress({"step": self.step, "before": self.before, "vocabulary": vocabulary})
        if self.step and self._out_of_time():  # a finished run, asked for again: not a step more
            self.total_steps = self.step
        reader = Reader(
            self.states,
            self._schedule(self.step),
            self.aux_ids,
            self.info.num_layers,
            skip_prompts=self.config.num_layers == 1,
            pin=self.device.type == "cuda",
        )
        window = _Window(s.ttt_steps, self.device)
        last: dict[str, Any] | None = None
        interrupted = False
        self.began = time.monotonic() - self.trained_seconds
        try:
            for batches in reader:
                self._optimizer_step([b.to(self.device) for b in batches], window)
                self.step += 1
                done = self.step >= self.total_steps or self._out_of_time()
                if self.step % s.log_every == 0 or done:
                    self._report(window, reader)
                interrupted = self._any_rank(self.stop.is_set()) and not done
                due = self.step % s.eval_every == 0 or done
                if due and not interrupted and len(self.held_out):
                    last = self._judge()
                if due or interrupted or (s.checkpoint_every and self.step % s.checkpoint_every == 0):
                    self._checkpoint()
                early = s.patience is not None and self.since_best >= s.patience
                if early:
                    log.info("no better simulated acceptance in %d evaluations: stopping early", s.patience)
                if done or interrupted or early:
                    break
        finally:
            reader.close()
        if self.best is None and not interrupted:
            self._save_draft(None)
        if interrupted:
            end_failed(self.accelerator, interrupted=True)
        self.accelerator.end_training()
        return TrainReport(
            s.output_dir,
            self.step,
            self.tokens,
            self._elapsed(),
            self.before,
            self.best,
            last,
            self.best_step,
            interrupted,
        )

    def _total_steps(self, parts: int) -> int:
        s = self.settings
        self._epochs: dict[int, list[list[np.ndarray]]] = {}
        self._parts = parts
        per_epoch = len(self._epoch(0))
        if s.steps is not None:
            return s.steps
        return 10**9 if s.seconds is not None else max(1, round(per_epoch * s.epochs))

    def _epoch(self, epoch: int) -> list[list[np.ndarray]]:
        if epoch not in self._epochs:
            s = self.settings
            self._epochs = {
                epoch: plan_epoch(
                    self.split.train,
                    self.states.lengths,
                    batch_tokens=s.batch_tokens,
                    parts=self._parts,
                    seed=s.seed,
                    epoch=epoch,
                )
            }
        return self._epochs[epoch]

    def _schedule(self, first: int) -> Iterator[tuple[list[np.ndarray], int]]:
        # Epochs differ in their number of steps, so the place of step n is found by walking from the start: cheap, and exact.
        s = self.settings
        mine = slice(self.accelerator.process_index * s.accumulate, (self.accelerator.process_index + 1) * s.accumulate)
        epoch, begin = 0, 0
        for step in range(self.total_steps):
            while step >= begin + len(self._epoch(epoch)):
                begin += len(self._epoch(epoch))
                epoch += 1
            if step >= first:
                # By the clock, K is settled when the step begins, for all ranks alike (`_optimizer_step`).
                k = 1 if not self._by_clock and self._share(step) < s.single_step_share else s.ttt_steps
                yield self._epoch(epoch)[step - begin][mine], k

    def _elapsed(self) -> float:
        return time.monotonic() - self.began

    def _share(self, step: int) -> float:
        """How far the run has come, 0..1: by steps, or by the clock when the budget is in seconds."""
        if self._by_clock:
            return min(1.0, self.agreed_seconds / self.settings.seconds)  # type: ignore[operator]
        return step / self.total_steps

    @property
    def _by_clock(self) -> bool:
        return self.settings.seconds is not None and self.settings.steps is None

    def _out_of_time(self) -> bool:
        return self.settings.seconds is not None and self._any_rank(self._elapsed() >= self.settings.seconds)

    def _any_rank(self, here: bool) -> bool:
        if self.accelerator.num_processes == 1:
            return here
        flag = torch.tensor(float(here), device=self.device)
        return bool(self.accelerator.reduce(flag, "sum").item())

    def _rate(self) -> float:
        s, share = self.settings, self._share(self.step)
        if share < s.warmup:
            return s.learning_rate * (share + 1e-3) / (s.warmup + 1e-3)
        cosine = 0.5 * (1 + math.cos(math.pi * (share - s.warmup) / max(1e-9, 1 - s.warmup)))
        return s.learning_rate * (s.final_rate + (1 - s.final_rate) * cosine)

    def _optimizer_step(self, batches: list[Batch], window: _Window) -> None:
        """Forward and backward of every micro-batch, then one AdamW step. The loss is the mean over supervised rows of all ranks."""
        s, ranks = self.settings, self.accelerator.num_processes
        K = len(batches[0].targets)
        counts = [sum(b.targets[k].count for b in batches) for k in range(K)]
        # One clock for all ranks, the first one's: each by its own would step with another rate, and in time with another K.
        self.agreed_seconds = self._elapsed()
        clock = self.agreed_seconds if self.accelerator.is_main_process else 0.0
        sums = torch.tensor([*counts, clock, sum(b.tokens for b in batches)], dtype=torch.float64, device=self.device)
        if ranks > 1:
            sums = self.accelerator.reduce(sums, "sum")
            self.agreed_seconds = float(sums[K])
            self.tokens += int(sums[-1])
        else:
            self.tokens += sum(b.tokens for b in batches)  # no wait for the device
        if self._by_clock and self._share(self.step) < s.single_step_share:
            K, batches = 1, [replace(b, targets=b.targets[:1]) for b in batches]
        weights = torch.tensor([s.step_decay**k for k in range(K)], device=self.device)
        divisors = sums[:K].float().clamp_min(1) / weights / ranks  # DDP and FSDP average gradients over ranks
        for i, batch in enumerate(batches):
            with self.accelerator.no_sync(self.model) if i + 1 < len(batches) else nullcontext():
                out: DraftLoss = self.model(batch, self.teacher.logits(batch.final[batch.rows]), divisors, loss=s.loss)
                self.accelerator.backward(out.loss)
            window.add(out, batch)
        window.norm = self.accelerator.clip_grad_norm_(self.model.parameters(), s.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _report(self, window: _Window, reader: Reader) -> None:
        figures = window.close(self.accelerator)
        if not figures["loss"]:  # nothing was supervised since the last report
            return
        if not all(math.isfinite(x) for x in figures["loss"]):
            raise ContractError(
                f"the loss is no longer finite at step {self.step}: {figures['loss']}",
                "lower --learning-rate, or look for a damaged sample with `eyas verify`",
            )
        figures = {"step": self.step, "learning_rate": self._rate(), **figures, "data_wait": round(reader.waited, 3)}
        reader.waited = 0.0
        if self.accelerator.is_main_process:
            with open(self.settings.output_dir / METRICS, "a", encoding="utf-8") as file:
                kept = {k: v for k, v in figures.items() if k not in ("tokens_per_second", "data_wait")}
                file.write(json.dumps(kept) + "\n")
            share = max(self._share(self.step), 1e-9)
            self.progress(
                {
                    **figures,
                    "total_steps": self.total_steps,
                    "share": share,
                    "elapsed": self._elapsed(),
                    "best": self.best,
                }
            )
        flat = {"learning_rate": figures["learning_rate"], "tokens_per_second": figures["tokens_per_second"]}
        for name in ("loss", "accuracy", "alpha"):
            flat.update({f"{name}/step{k}": v for k, v in enumerate(figures[name])})
        self.accelerator.log(flat, step=self.step)

    # --- evaluation and saving

    def _evaluate(self) -> Acceptance:
        s = self.settings
        mine = self.held_out[self.accelerator.process_index :: self.accelerator.num_processes]
        groups: list[list[int]] = []
        for position in mine:
            if not groups or (
                groups[-1]
                and sum(self.states.lengths[p] for p in groups[-1]) + self.states.lengths[position] > s.batch_tokens
            ):
                groups.append([])
            groups[-1].append(int(position))
        # FSDP's collectives need the same number of forward passes on every rank: short ranks repeat their first group, uncounted.
        rounds = len(groups) if mine.size else 0
        if self.accelerator.num_processes > 1:
            everywhere = self.accelerator.gather(torch.tensor([rounds], device=self.device))
            groups += [[int(self.held_out[0])]] * (int(everywhere.max()) - rounds)
        self.model.eval()
        total = Acceptance(0, 0, np.zeros(s.chain, np.int64))
        for i, group in enumerate(groups):
            batch = read_batch(
                self.states,
                group,
                self.aux_ids,
                self.info.num_layers,
                s.chain,
                skip_prompts=self.config.num_layers == 1,
            )
            found = simulate(
                self.model, self.teacher, self.t2d, [batch.to(self.device)], [[self.masks[p] for p in group]], s.chain
            )
            if i < rounds:
                total = total + found
        self.model.train()
        if self.accelerator.num_processes > 1:
            flat = torch.tensor(
                [total.rounds, total.emitted, total.sayable, total.targets, *total.accepted],
                dtype=torch.float64,
                device=self.device,
            )
            rounds, emitted, sayable, targets, *accepted = (
                int(x) for x in self.accelerator.reduce(flat, "sum").tolist()
            )
            total = Acceptance(rounds, emitted, np.array(accepted), sayable, targets)
        return total

    def _judge(self) -> dict[str, Any]:
        began = time.monotonic()
        found = self._evaluate().summary()
        length = found["acceptance_length"]
        if self.best is None or length > self.best["acceptance_length"]:
            self.best, self.best_step, self.since_best = found, self.step, 0
            self._save_draft(found)
        else:
            self.since_best += 1
        self.accelerator.log({"acceptance_length": length}, step=self.step)
        if self.accelerator.is_main_process:
            with open(self.settings.output_dir / METRICS, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.step, "simulated": found}) + "\n")
            self.progress({"step": self.step, "simulated": found, "best": self.best, "total_steps": self.total_steps})
        log.info(
            "step %d: simulated acceptance length %.3f (best %.3f)", self.step, length, self.best["acceptance_length"]
        )
        if self.settings.seconds is not None:  # evaluating is not training: it does not use up the budget
            self.began += time.monotonic() - began
        return found

    def _save_draft(self, acceptance: dict[str, Any] | None) -> None:
        weights = full_weights(self.model, self.config)
        if not self.accelerator.is_main_process:
            return
        save_draft(
            self.settings.output_dir,
            self.config,
            weights,
            target=self.info.for_manifest(),
            dataset_hash=self.dataset_hash,
            store={"path": str(Path(self.settings.states).resolve()), "layer_ids": list(self.states.layer_ids)},
            vocabulary={"size": len(self.vocabulary.ids), "coverage": round(self.vocabulary.coverage, 6)},
            training={"settings": self.settings.identity(), "step": self.step, "tokens": self.tokens},
            acceptance={"chain": self.settings.chain, "simulated": acceptance, "before": self.before},
        )

    def _checkpoint(self) -> None:
        state = {
            "tokens": self.tokens,
            "seconds": self._elapsed(),
            "before": self.before,
            "best": self.best,
            "best_step": self.best_step,
            "since_best": self.since_best,
        }
        folder = self.settings.output_dir / "checkpoints"
        save_checkpoint(
            folder, self.step, self.config, self.model, self.optimizer, state, self.settings.keep, self.accelerator
        )


class _Window:
    """Sums since the last report, kept on the device so that no step waits for them."""

    def __init__(self, steps: int, device: torch.device):
        self.sums = torch.zeros(4, steps, dtype=torch.float64, device=device)  # loss, correct, alpha, count
        self.tokens, self.began = 0, time.monotonic()
        self.norm: Any = 0.0

    def add(self, out: DraftLoss, batch: Batch) -> None:
        """Count one micro-batch."""
        K = len(batch.targets)
        counts = torch.tensor([t.count for t in batch.targets], dtype=torch.float64, device=self.sums.device)
        self.sums[:, :K] += torch.stack([out.losses.double(), out.correct.double(), out.alpha.double(), counts])
        self.tokens += batch.tokens

    def close(self, accelerator: Any) -> dict[str, Any]:
        """Means over all ranks since the last close: loss, accuracy and alpha per step, tokens per second, gradient norm."""
        sums = accelerator.reduce(self.sums, "sum") if accelerator.num_processes > 1 else self.sums
        loss, correct, alpha, count = (row.tolist() for row in sums.cpu())
        used = [k for k, n in enumerate(count) if n]
        seconds = time.monotonic() - self.began
        figures = {
            "loss": [loss[k] / count[k] for k in used],
            "accuracy": [correct[k] / count[k] for k in used],
            "alpha": [alpha[k] / count[k] for k in used],
            "gradient_norm": float(self.norm),
            "tokens_per_second": self.tokens * accelerator.num_processes / max(seconds, 1e-9),
        }
        self.sums.zero_()
        self.tokens, self.began = 0, time.monotonic()
        return figures
