"""Settings of a training run, and what is refused before anything is loaded: values out of range, a store that does not fit."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from eyas.base.errors import InputError, StoreError
from eyas.base.manifest import differing_fields
from eyas.drafts.losses import loss_rows
from eyas.gates.mark import read_mark
from eyas.store.reader import States
from eyas.target.layers import default_aux_layers, describe_layer
from eyas.target.model_files import ModelInfo


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of one training run; those marked * may change between stopping and resuming.

    Attributes:
        states: the store. model_path: the target (folder, hub id, or `smollm2`). output_dir: the draft's folder.
        aux_layers: which stored layers feed the draft; None: all but the final one, in the store's order.
        draft_vocab_size: D. draft: DraftConfig fields to override. first_weights: `draft_setup.FirstWeights` to override. plain_rope: not the target's rope kind. init_from: start from this draft folder.
        loss: kl, tv or lk. ttt_steps: K. step_decay: weight of step k is step_decay ** k.
        single_step_share: the first share of the run trains with K = 1, which is several times faster and teaches most of step 0.
        learning_rate, betas, weight_decay, clip, warmup (share of the run), final_rate (share of the rate left at the end, cosine).
        batch_tokens: per rank and micro-batch. accumulate: micro-batches per optimizer step.
        epochs*, steps*, seconds*: the budget, whichever is given (steps before epochs; seconds ends the run by the clock).
        held_out: share of samples set apart, for `chain`-long simulated acceptance every `eval_every`* steps, on at most
            `eval_samples` of them. patience*: stop after so many evaluations without a better one.
        keep*: checkpoints kept. checkpoint_every*: steps, 0 for at evaluations only. dtype: compute dtype (auto: bf16 where fast).
        threads*: CPU threads; None: as many as are free, the same again when resumed.
        trackers*: tensorboard, wandb, mlflow. allow_unverified: take a store that `eyas verify` has not passed.
    """

    states: Path
    model_path: str
    output_dir: Path
    aux_layers: tuple[int, ...] | None = None
    draft_vocab_size: int = 32000
    draft: dict[str, Any] = field(default_factory=dict)
    first_weights: dict[str, Any] = field(default_factory=dict)
    plain_rope: bool = False
    init_from: Path | None = None
    train_head: bool = False
    loss: str = "kl"
    ttt_steps: int = 5
    step_decay: float = 0.8
    single_step_share: float = 0.0
    learning_rate: float = 4e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    warmup: float = 0.03
    final_rate: float = 0.05
    batch_tokens: int = 4096
    accumulate: int = 1
    epochs: float = 1.0
    steps: int | None = None
    seconds: float | None = None
    held_out: float = 0.05
    eval_samples: int = 256
    eval_every: int = 500
    chain: int = 5
    patience: int | None = None
    keep: int = 2
    checkpoint_every: int = 0
    dtype: str = "auto"
    compile: str = "auto"
    threads: int | None = None
    seed: int = 0
    trackers: tuple[str, ...] = ("tensorboard",)
    log_every: int = 10
    allow_unverified: bool = False
    trust_remote_code: bool = False

    #: What may differ between a run and its resumption.
    FREE: ClassVar[tuple[str, ...]] = (
        "epochs",
        "steps",
        "seconds",
        "eval_every",
        "patience",
        "keep",
        "checkpoint_every",
        "trackers",
        "log_every",
        "threads",
        "output_dir",
    )

    def identity(self) -> dict[str, Any]:
        """What must be equal for a run to be resumed, as JSON."""
        fields = {k: v for k, v in asdict(self).items() if k not in self.FREE}
        return json.loads(json.dumps(fields, default=str))


def check_store(
    states: States, info: ModelInfo, aux_layers: tuple[int, ...] | None, *, allow_unverified: bool
) -> tuple[int, ...]:
    """Refuse a store that cannot train a draft for this target; returns the auxiliary layer ids.

    Raises:
        StoreError: not verified, of another model (every differing field), or without `final` or an auxiliary layer.
    """
    manifest = states.manifest
    mark = read_mark(manifest)
    if (mark is None or not mark.passed) and not allow_unverified:
        found = "" if mark is None else "\n  ".join(mark.problems)
        raise StoreError(
            f"{states.path} has not passed `eyas verify`" + (f":\n  {found}" if found else ""),
            f"run `eyas verify {states.path}` first; nothing else tells wrong states from right ones",
        )
    have = {
        k: manifest["model"].get(k) for k in ("config_hash", "weights_hash", "num_layers", "hidden_size", "vocab_size")
    }
    lines = differing_fields(have, {k: getattr(info, k) for k in have})
    if lines:
        raise StoreError(
            f"{states.path} holds states of another model ({manifest['model'].get('id')}) than {info.id}:\n  "
            + "\n  ".join(lines),
            "give --model-path the model that the states were extracted from",
        )
    N = info.num_layers
    if N not in manifest["layer_ids"]:
        raise StoreError(
            f"{states.path} holds layers {manifest['layer_ids']}, but not {describe_layer(N, N)}, from which the target's own "
            "distribution is rebuilt",
            "extract again without --no-final",
        )
    aux = tuple(aux_layers or (i for i in manifest["layer_ids"] if i != N))
    if len(set(aux)) < len(aux):
        raise InputError(f"--aux-layers {list(aux)} names a layer twice", "engines hand each layer's states over once")
    missing = [i for i in aux if i not in manifest["layer_ids"]]
    if missing or not aux:
        raise StoreError(
            f"{states.path} holds layers {manifest['layer_ids']}; the draft needs {missing or default_aux_layers(N)} as well",
            "extract them, or choose stored ones with --aux-layers",
        )
    return aux


#: Sizes among `TrainSettings.draft`, and the flag that sets each.
SIZE_FLAGS = {
    "num_attention_heads": "--heads",
    "num_key_value_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "intermediate_size": "--mlp",
    "num_layers": "--layers",
}


def check_settings(s: TrainSettings) -> None:
    loss_rows(s.loss)
    wrong = [
        (not 1 <= s.ttt_steps <= 16, f"--ttt-steps {s.ttt_steps}", "1 to 16"),
        (not 0 <= s.single_step_share <= 1, f"--single-step-share {s.single_step_share}", "a share between 0 and 1"),
        (s.batch_tokens < 16, f"--batch-tokens {s.batch_tokens}", "at least 16"),
        (s.accumulate < 1, f"--accumulate {s.accumulate}", "at least 1"),
        (not 0 < s.learning_rate < float("inf"), f"--learning-rate {s.learning_rate}", "above 0"),
        (s.dtype not in ("auto", "bfloat16", "float32", "float64"), f"--dtype {s.dtype}", "auto, bfloat16 or float32"),
        (s.chain < 1, f"--chain {s.chain}", "at least 1"),
        (s.keep < 1, f"--keep {s.keep}", "at least 1"),
        (s.draft_vocab_size < 1, f"--draft-vocab-size {s.draft_vocab_size}", "at least 1"),
        (s.epochs <= 0, f"--epochs {s.epochs}", "above 0"),
        (s.steps is not None and s.steps < 1, f"--steps {s.steps}", "at least 1"),
        (s.seconds is not None and s.seconds <= 0, f"--seconds {s.seconds}", "above 0"),
        (s.eval_samples < 0, f"--eval-samples {s.eval_samples}", "0 or more"),
        (s.eval_every < 1, f"--eval-every {s.eval_every}", "at least 1"),
        (s.patience is not None and s.patience < 1, f"--patience {s.patience}", "at least 1"),
        (s.checkpoint_every < 0, f"--checkpoint-every {s.checkpoint_every}", "0 or more"),
        (not 0 <= s.warmup <= 1, f"--warmup {s.warmup}", "a share between 0 and 1"),
        (not s.clip > 0, f"--clip {s.clip}", "above 0 (a large one clips nothing)"),
        (not s.step_decay > 0, f"--step-decay {s.step_decay}", "above 0; 1 weighs all steps alike"),
        (not s.weight_decay >= 0, f"--weight-decay {s.weight_decay}", "0 or more"),
        (s.threads is not None and s.threads < 1, f"--threads {s.threads}", "at least 1"),
    ]
    for field_name, flag in SIZE_FLAGS.items():
        size = s.draft.get(field_name)
        wrong.append((size is not None and size < 1, f"{flag} {size}", "at least 1"))
    for bad, what, want in wrong:
        if bad:
            raise InputError(f"{what} is out of range", f"give {want}")


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 where the machine multiplies it fast (CUDA from Ampere on, CPUs with AMX or AVX-512 bf16), else fp32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
