"""Settings of `eyas eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from eyas.base.errors import FolderConflictError, InputError
from eyas.base.settings import Flag, Settings
from eyas.data.prompts import find_prompts


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings):
    draft: Annotated[Path, Flag(exists=True)]
    """A draft directory from `eyas train`."""
    model_path: str
    """Its target."""
    prompts: tuple[str, ...] = ("word_problems_heldout",)
    """Prompt sets: packaged names, files, directories, hf:OWNER/NAME:CONFIG:SPLIT; NAME=... names one."""
    chain: Annotated[int, Ge(1)] = 5
    """Draft tokens per verification step (vLLM's num_speculative_tokens)."""
    max_new_tokens: Annotated[int, Ge(2)] = 256
    """Longest reply. Its first token comes from the prefill."""
    batch_size: Annotated[int, Ge(1)] = 1
    """Prompts decoded together."""
    limit: Annotated[int | None, Ge(1)] = None
    """At most so many prompts per set."""
    temperature: Annotated[float, Ge(0), Lt(float("inf"))] = 0.0
    """0 is greedy; above, rejection sampling."""
    seed: int = 0
    """Of sampling and of the intervals."""
    dtype: Literal["auto", "bfloat16", "float32"] = "float32"
    """float32 is exactly lossless."""
    device: str = "auto"
    """auto, cpu, cuda ..."""
    plain: Annotated[int | None, Ge(0)] = None
    """How many prompts per set are also decoded without the draft (speed, lossless check); the other greedy replies are checked by one forward pass each. All when left out."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """vllm: also serve the exported draft by real vLLM, greedily, and put its acceptance beside ours."""
    ngram_data: Annotated[Path | None, Flag(exists=True)] = None
    """Store or dataset the n-gram baseline is counted on; the draft's own store when left out."""
    output_dir: Path | None = None
    """Where acceptance.json and acceptance.svg go; the draft's directory when left out."""
    diagnose: bool = True
    """Compare the store that the draft was trained on, where it still exists, with the target."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == "vllm" and self.temperature > 0:
            raise InputError(
                f"--engine vllm decodes greedily, --temperature {self.temperature} would not be comparable",
                "leave --temperature at 0, or --engine out",
            )
        if self.output.exists() and not self.output.is_dir():
            raise FolderConflictError(f"{self.output} is a file, expected a directory", "name another --output-dir")
        if not self.prompts:
            raise InputError("--prompts names no set", "leave it out, or name one")
        names = [find_prompts(spec)[0] for spec in self.prompts]
        if twice := [spec for spec, name in zip(self.prompts, names, strict=True) if names.count(name) > 1]:
            raise InputError(
                f"prompt sets of one name: {', '.join(twice)}", "name them: --prompts gsm8k=PATH mtbench=PATH"
            )

    @property
    def output(self) -> Path:
        return self.output_dir or self.draft
