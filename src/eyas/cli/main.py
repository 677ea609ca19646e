"""From a large language model to a trained draft: hidden states of chosen layers, proven right, at prefill speed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from eyas.base.errors import EXIT_INTERRUPTED, EyasError
from eyas.cli import command
from eyas.cli.config_file import expand_config

if TYPE_CHECKING:
    from eyas.runs.settings import LogOptions

#: Every command: where its function is, and its line in `eyas --help`. Only the one that is called is imported.
COMMANDS = {
    "prepare": ("eyas.cli.data:prepare", "Chat data -> token dataset: the target's chat template, and a loss mask on what the assistant generates."),
    "regenerate": ("eyas.cli.data:regenerate", "Let the target answer the prompts itself: its answers, token by token as generated, become the dataset."),
    "extract": ("eyas.cli.states:extract", "Extract hidden states of chosen layers into a state store, through the gates: preflight, parity, bulk."),
    "rehearse": ("eyas.cli.states:rehearse", "The whole of `extract` with random weights and few layers, all ranks, into a temporary store (engine vllm)."),
    "trace": ("eyas.cli.states:trace", "Show the hops that traced states took: model output, split by request, host copy, shard; the first bad one marked."),
    "verify": ("eyas.cli.states:verify", "Check every byte of a store, then recompute a few samples by an independent forward pass."),
    "inspect": ("eyas.cli.states:inspect", "Show what a directory holds; of stores and datasets also samples' tokens with the loss mask in colour."),
    "train": ("eyas.cli.drafts:train", "Train a draft on a state store; the best one by simulated acceptance length is kept."),
    "eval": ("eyas.cli.drafts:evaluate", "Measure a draft: real speculative decoding, lossless or an error, beside model-free baselines."),
    "export": ("eyas.cli.drafts:export", "Write a draft as vLLM, SGLang or speculators load it, with the serving command in its README."),
    "import": ("eyas.cli.drafts:import_draft", "Read an engine's draft directory into an eyas draft directory."),
    "runs list": ("eyas.cli.runs:list_", "The runs of this machine, newest first: state, progress, rate."),
    "runs show": ("eyas.cli.runs:show", "One run: its command, state, progress and directory, and what went wrong first."),
    "runs logs": ("eyas.cli.runs:logs", "What every process of a run said, merged by time."),
    "runs stop": ("eyas.cli.runs:stop", "End a run: gently (shard finished, resumable), then firmly; then prove that nothing of it is left."),
    "runs resume": ("eyas.cli.runs:resume", "Rerun an interrupted run's command in its own directory; what is finished is kept."),
    "runs clean": ("eyas.cli.runs:clean", "Remove what runs that are over left behind (processes, shared memory, half shards): only eyas's own, after showing it."),
    "doctor": ("eyas.cli.runs:doctor", "What this machine has against what a run needs, and what earlier runs left behind."),
    "report": ("eyas.cli.runs:report", "Write one self-contained HTML page of a run: what ran, where, rates, norms, parity, what was not written, warnings."),
    "demo": ("eyas.cli.demo:demo", "The whole pipeline on the embedded model: minutes on a laptop CPU, no network."),
}  # fmt: skip
#: Commands that make a run: a directory with the logs of every process.
RUNS = ("prepare", "regenerate", "extract", "rehearse", "train", "eval")

#: What `run.json` says of a run's input and output.
FACTS = ("output_dir", "model_path", "prepared_data")
GROUPS = {"runs": "Runs: list, follow, stop, resume them; clear up after them."}
EPILOG = "Any command takes --config FILE.yaml: flags without their dashes, and values; what is typed wins."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an EyasError becomes its message on stderr and its own exit code."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # Before torch is loaded: on a shared machine, OpenMP threads that spin while they wait made two threads up to eight times
    # slower than one (measured); sleeping ones cost next to nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)) or 0)
    except EyasError as error:
        print_error(f"error: {error}", "red")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print_error("stopped: what is finished is kept; rerun the same command to resume", "yellow")
        sys.exit(EXIT_INTERRUPTED)


def run(arguments: list[str]) -> int:
    """Parse and carry out one command line; returns its exit code. Raises UsageError, and what the command raises."""
    if arguments[:1] == ["--log-level"]:  # before the command as well as behind it
        arguments = [*arguments[2:], *arguments[:2]]
    called = next((name for name in COMMANDS if arguments[: len(name.split())] == name.split()), None)
    app = command.app_of(
        {name: text for name, (_, text) in COMMANDS.items()}, GROUPS, help=__doc__, help_epilogue=EPILOG
    )
    if called is None:
        command.parse(app, arguments)
        return 0
    from eyas.runs.settings import LogOptions, RunOptions

    function, kind = command.load(COMMANDS[called][0]), RunOptions if called in RUNS else LogOptions
    inputs = [*command.inputs_of(function), *command.fields_of(kind, ("options",))]
    words = called.split()
    typed = [*words, *expand_config(arguments[len(words) :], {one.setting.flag for one in inputs})]
    command.add(app, words, COMMANDS[called][1], inputs)
    given = command.parse(app, typed)
    if given is None:  # --help
        return 0
    options = command.arguments_of({"options": kind}, inputs, given)["options"]
    return begin(
        words[-1], typed, options, lambda: command.arguments_of(get_type_hints(function), inputs, given), function
    )


def begin(
    name: str,
    typed: list[str],
    options: LogOptions,
    arguments: Callable[[], dict[str, Any]],
    function: Callable[..., int | None],
) -> int:
    """Call a command; one that takes a run's flags as a run, here or on another host, where its values are then checked."""
    from eyas.cli import runs
    from eyas.runs import log_records as records
    from eyas.runs.settings import RunOptions

    runs.typed[:] = typed
    records.log_to_terminal(
        records.level_number(options.log_level or os.environ.get(records.LEVEL_VARIABLE) or "warning")
    )
    if not isinstance(options, RunOptions):
        if options.log_level:
            os.environ[records.LEVEL_VARIABLE] = options.log_level
        return function(**arguments()) or 0
    values = {} if options.host else arguments()
    facts = {key: value for one in values.values() for key in FACTS if (value := getattr(one, key, None))}
    chosen = {one.name: getattr(options, one.name) for one in fields(options)}
    runs.start_run(name, partial(function, **values), facts, **chosen)
    return 0


def print_error(text: str, style: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)
