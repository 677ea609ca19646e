"""What an extraction is asked for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from eyas.base.errors import InputError
from eyas.base.part import Part
from eyas.base.settings import Flag, Settings

#: Settings that one engine alone knows, beside those that both take or that do no harm.
ONE_ENGINES_OWN = {
    "transformers": ("device", "threads"),
    "vllm": (
        "tp_size",
        "pp_size",
        "expert_parallel",
        "distributed_executor_backend",
        "load_format",
        "capture",
        "trace",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ExtractSettings(Settings):
    """Hidden states of chosen layers, of every sample of a dataset, into one store."""

    model_path: str
    """The target: a Hugging Face directory, a hub id, or `smollm2` (embedded)."""
    prepared_data: Annotated[Path, Flag(exists=True)]
    """Token dataset: a directory from `eyas prepare`, or a .jsonl of input_ids and loss_mask."""
    output_dir: Path
    """The state store. Resumed when it holds the same run's states."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What runs the target: transformers (a CPU or one GPU) or vllm (any number of GPUs, a CPU build)."""
    layer_ids: tuple[int | Literal["final"], ...] | None = None
    """Layers to store, or `final`. Left out: 2, N//2, N-3."""
    layer_index: Literal["stream", "output"] = "stream"
    """How --layer-ids count: stream (k = after k layers) or output (0-based layer outputs)."""
    final: bool = True
    """Also store the target state, from which the target's logits are rebuilt."""
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    """Compute dtype; auto is the checkpoint's."""
    store_dtype: Literal["auto", "fp8", "bfloat16", "float32", "float16"] = "auto"
    """auto (as computed) or fp8 (one scale per token and layer)."""
    batch_size: Annotated[int | None, Ge(1)] = None
    """Most samples per forward pass. Left out: no limit."""
    batch_tokens: Annotated[int | None, Ge(1)] = None
    """Most tokens per forward pass. Left out: by device."""
    max_seq_len: Annotated[int | None, Ge(1)] = None
    """Longer samples go to the ledger. Left out: the model's positions."""
    tp_size: Annotated[int, Ge(1)] = 1
    """Tensor parallel ranks (engine vllm)."""
    pp_size: Annotated[int, Ge(1)] = 1
    """Pipeline stages (engine vllm)."""
    expert_parallel: bool = False
    """Split experts over the ranks (engine vllm)."""
    distributed_executor_backend: Literal["mp", "ray"] | None = None
    """mp (one host) or ray (several), passed to vLLM."""
    enforce_eager: bool = False
    """No torch.compile, no CUDA graphs (engine vllm)."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto, or dummy for random weights (engine vllm)."""
    capture: Literal["auto", "aux", "transformers", "hooks", "native"] = "auto"
    """aux (the interface of vLLM's model), transformers (that of its Transformers backend, for any model), hooks (eager) or native (vLLM's own connector). auto: the first of the first three that the model has."""
    trace: bool = False
    """Record every hop of the first steps; see `eyas trace` (engine vllm)."""
    rehearsal: Literal["auto", "always", "never"] = "auto"
    """Gate 2 first: auto (before long loads), always or never (engine vllm)."""
    part: str | None = None
    """i/n: extract the i-th of n parts of the dataset; n runs write into one store side by side."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.9
    """Share of GPU memory for the engine (engine vllm)."""
    shard_size: Annotated[float, Gt(0)] = 256
    """Megabytes aimed at per shard."""
    parity_samples: Annotated[int, Ge(1)] = 4
    """Samples for the parity gate."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 (engine transformers)."""
    threads: Annotated[int | None, Ge(1)] = None
    """CPU threads (engine transformers). Left out: as many as are free."""
    revision: str | None = None
    """Hub revision."""
    trust_remote_code: bool = False
    """Run the model directory's own code."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Part.parse(self.part)
        for own in fields(self):
            value = getattr(self, own.name)
            owner = next((engine for engine, names in ONE_ENGINES_OWN.items() if own.name in names), self.engine)
            if owner != self.engine and value != own.default:  # the engine would pass over it in silence
                flag = f"--{own.name.replace('_', '-')}" + ("" if value is True else f" {value}")
                raise InputError(
                    f"{flag} is for engine {owner}, engine {self.engine} has no use for it",
                    f"--engine {owner}, or leave it out",
                )
        if self.rehearsal == "always" and self.engine != "vllm":
            raise InputError(
                f"--rehearsal always: engine {self.engine} has nothing to rehearse, its load is short", "leave it out"
            )

    @property
    def parts(self) -> Part:
        """`part`, read."""
        return Part.parse(self.part)

    @property
    def shard_bytes(self) -> int:
        return int(self.shard_size * 1e6)
