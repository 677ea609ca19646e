"""Settings of `eyas prepare` and `eyas regenerate`, each stated once."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from eyas.base.errors import InputError
from eyas.base.settings import Flag, Settings


@dataclass(frozen=True)
class MaskSettings(Settings):
    """How tokens and masks are made."""

    supervise: Literal["assistant", "last-turn", "all"] = "assistant"
    """Which tokens the draft learns to predict: every assistant turn, only the last one, or every token."""
    rewritten: Literal["unroll", "skip"] = "unroll"
    """An earlier turn that the template shows otherwise than generated: a sample of its own, or not supervised."""
    reasoning: Literal["keep", "drop"] = "keep"
    """Whether the reasoning in the data is kept."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON for the template, as serving would pass it, e.g. '{"enable_thinking": false}'."""


@dataclass(frozen=True)
class SourceSettings(Settings):
    """What is read, by whose tokenizer, and where the dataset goes."""

    data: tuple[str, ...]
    """Files, directories, packaged sets, or names for `datasets`; several are read one after another."""
    model_path: str
    """The target: its tokenizer and chat template are used. `smollm2` is embedded."""
    output_dir: Path
    """Directory of the token dataset."""
    _: KW_ONLY
    max_seq_len: Annotated[int, Ge(2)] = 2048
    """Longest sample, in tokens."""
    columns: Annotated[dict[str, str], Flag("column")] = field(default_factory=dict)
    """WHAT=COLUMN, where columns have unusual names."""
    data_config: str | None = None
    """Configuration, for a data set that `datasets` loads."""
    data_split: str = "train"
    """Split, for a data set that `datasets` loads."""
    chat_template: str | None = None
    """Jinja file to use instead of the tokenizer's template (from Python also its text)."""
    held_out: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Fraction kept apart in OUTPUT_DIR/heldout, chosen by a hash of the prompt."""
    limit: Annotated[int | None, Ge(1)] = None
    """Read only the first rows."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""

    def template_text(self) -> str | None:
        """The text of `chat_template`. Raises InputError for a file that cannot be read."""
        if self.chat_template is None or "{" in self.chat_template:
            return self.chat_template
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--chat-template {self.chat_template}: {error}") from None


@dataclass(frozen=True)
class PrepareSettings(SourceSettings):
    _: KW_ONLY
    on_long: Literal["truncate", "drop", "split"] = "truncate"
    """What becomes of longer samples."""
    mask: MaskSettings = field(default_factory=MaskSettings)
    duplicates: Literal["once", "keep"] = "once"
    """Equal samples: written once with their count, or kept."""
    trust_masks: bool = False
    """Take the masks of tokenised rows without a look at their borders."""
    workers: Annotated[int | None, Ge(1)] = None
    """Tokenising processes. Default: one per core, and none for small inputs."""
    overwrite: bool = False
    """Replace a dataset in OUTPUT_DIR that was made otherwise."""

    def content(self) -> dict[str, Any]:
        """What decides the content of the dataset, as its manifest has it."""
        names = ("max_seq_len", "on_long", "duplicates", "trust_masks")
        return {name: getattr(self, name) for name in names} | {"heldout": self.held_out, "mask": asdict(self.mask)}


@dataclass(frozen=True)
class Sampling(Settings):
    """How answers are drawn, and nothing else decides: no penalty, no top-k, whatever the model's generation_config.json says."""

    max_new_tokens: Annotated[int, Ge(1)] = 1024
    """Limit for one answer."""
    temperature: Annotated[float, Ge(0)] = 0.0
    """0 is greedy: each token the argmax of the model's own distribution."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus, for temperatures above 0."""
    seed: int = 0
    """For temperatures above 0."""


@dataclass(frozen=True)
class RegenerateSettings(SourceSettings):
    _: KW_ONLY
    sampling: Sampling = field(default_factory=Sampling)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON for the template, e.g. '{"enable_thinking": false}'."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What generates, without --endpoint."""
    endpoint: str | None = None
    """A server that speaks OpenAI's protocol, e.g. http://localhost:8000."""
    endpoint_model: str | None = None
    """The model's name there. Default: the only one."""
    api_key: Annotated[str | None, Flag(env="OPENAI_API_KEY")] = None
    """Key for the endpoint."""
    batch_size: Annotated[int, Ge(1)] = 16
    """Prompts at once (transformers), requests at once (endpoint)."""
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    """Compute dtype; auto is the checkpoint's."""
    device: str = "auto"
    """auto, cpu, cuda ... (engine transformers)."""
    tp_size: Annotated[int, Ge(1)] = 1
    """Tensor parallel ranks (engine vllm)."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.9
    """Fraction of GPU memory (engine vllm)."""
    window: Annotated[int | None, Ge(1)] = None
    """Conversations that are answered together, their turns in step. Default: by engine."""
    seconds: Annotated[float | None, Ge(0)] = None
    """Ask no more after so long: the dataset holds what was answered; rerun the same command to resume."""

    def content(self) -> dict[str, Any]:
        """What decides the answers, as the manifest has it."""
        names = ("max_seq_len", "chat_template_kwargs")
        return {n: getattr(self, n) for n in names} | {"heldout": self.held_out, "sampling": asdict(self.sampling)}

    @property
    def conversations_at_once(self) -> int:
        """How many are answered together."""
        if self.window is not None:
            return self.window
        return max(4 * self.batch_size, 64) if self.engine == "transformers" or self.endpoint else 4096
