"""The settings of a training run, each stated once."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from eyas.base.settings import Flag, Settings
from eyas.drafts.settings import DraftInit, DraftShape

Count = Annotated[int, Ge(1)]
OptionalCount = Annotated[int | None, Ge(1)]
Share = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """Settings of one training run. Those in `FREE` may change between stopping and resuming."""

    states: Annotated[Path, Flag(exists=True)]
    """The state store, verified."""
    model_path: str
    """The target that the states are of: a directory, hub id, or `smollm2`."""
    output_dir: Path
    """The draft's directory. Resumed when it holds the same run."""
    aux_layers: tuple[int, ...] | None = None
    """Stored layers that feed the draft. Default: all but the final one."""
    draft_vocab_size: Count = 32000
    """Size of the draft vocabulary: the most frequent supervised tokens."""
    draft: DraftShape = field(default_factory=DraftShape)
    draft_init: DraftInit = field(default_factory=DraftInit)
    init_from: Annotated[Path | None, Flag(exists=True)] = None
    """Start from this draft: an eyas, vLLM, SGLang or speculators directory."""
    train_head: bool = False
    """Also train the head (it starts as the target's rows)."""
    loss: Literal["kl", "tv", "lk"] = "kl"
    """kl, tv (total variation) or lk (both, adaptive)."""
    ttt_steps: Annotated[int, Ge(1), Le(16)] = 5
    """Training-time-test steps, K."""
    step_decay: Annotated[float, Gt(0)] = 0.8
    """Weight of step k is this to the power k; 1 weighs all steps alike."""
    ttt_warmup_fraction: Share = 0.0
    """Fraction of the run, at its start, that trains with K = 1 (several times faster)."""
    learning_rate: Annotated[float, Gt(0), Lt(float("inf"))] = 4e-4
    """AdamW's rate after warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """AdamW's weight decay."""
    clip: Annotated[float, Gt(0)] = 1.0
    """Largest gradient norm."""
    warmup: Share = 0.03
    """Fraction of the run that warms up."""
    min_lr_ratio: Share = 0.05
    """Fraction of the learning rate that the cosine decay ends at."""
    batch_tokens: Annotated[int, Ge(16)] = 4096
    """Tokens per rank and micro-batch."""
    accumulate: Count = 1
    """Micro-batches per optimizer step."""
    epochs: Annotated[float, Gt(0)] = 1.0
    """Budget in passes over the data."""
    steps: OptionalCount = None
    """Budget in optimizer steps instead."""
    seconds: Annotated[float | None, Gt(0)] = None
    """Budget by the clock instead."""
    held_out: Annotated[float, Ge(0), Le(0.5)] = 0.05
    """Fraction of the samples set apart for simulated acceptance."""
    eval_samples: Annotated[int, Ge(0)] = 256
    """Most held-out samples per evaluation."""
    eval_every: Count = 500
    """Steps between evaluations."""
    num_speculative_tokens: Annotated[int, Ge(1), Flag("chain")] = 5
    """Draft tokens per verification step in the simulation."""
    patience: OptionalCount = None
    """Stop after so many evaluations without a better one."""
    keep: Count = 2
    """Checkpoints kept."""
    checkpoint_every: Annotated[int, Ge(0)] = 0
    """Steps between checkpoints; 0: at evaluations."""
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Compute dtype; auto: bf16 where the machine multiplies it fast. Master weights are fp32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto: on a GPU (a minute or more before the first steps; off suits runs of minutes)."""
    sharding: Literal["ddp", "fsdp"] = "ddp"
    """How several ranks (torchrun) share the weights: each a copy (DDP), or a part (FSDP2)."""
    threads: OptionalCount = None
    """CPU threads. Default: as many as are free."""
    seed: int = 0
    """Order of the data and first weights."""
    trackers: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "none"], ...], Flag("track")] = ("tensorboard",)
    """Where figures go besides the terminal; `none` for nowhere."""
    log_every: Count = 10
    """Steps between figures."""
    allow_unverified: bool = False
    """Take a store that `eyas verify` has not passed."""
    trust_remote_code: bool = False
    """Run the model directory's own code."""

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
        "sharding",
    )

    def __post_init__(self) -> None:
        for name, kind in (("draft", DraftShape), ("draft_init", DraftInit)):  # from Python, `draft={"num_layers": 2}`
            if isinstance(given := getattr(self, name), dict):
                object.__setattr__(self, name, kind(**given))
        super().__post_init__()

    @property
    def by_clock(self) -> bool:
        """Whether the budget is in seconds: then schedules follow the clock."""
        return self.seconds is not None and self.steps is None

    def identity(self) -> dict[str, Any]:
        """What must be equal for a run to be resumed, as JSON."""
        fields = {k: v for k, v in asdict(self).items() if k not in self.FREE}
        return json.loads(json.dumps(fields, default=str))
