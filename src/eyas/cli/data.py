"""The commands about data; `cli.py` registers them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from eyas.base.errors import EXIT_INCOMPLETE, InputError


def _json_option(name: str, text: str) -> dict[str, Any]:
    """A flag that takes a JSON object."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InputError(
            f"{name}: not JSON ({error})", f"for example {name} '{{\"enable_thinking\": false}}'"
        ) from None
    if not isinstance(value, dict):
        raise InputError(f"{name}: expected a JSON object, found {value!r}")
    return value


def _text_of(name: str, path: Path | None) -> str | None:
    """The text of a file that a flag names."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name} {path}: {error}") from None


def _pairs(name: str, values: list[str]) -> dict[str, str]:
    """A repeated flag of the form NAME=VALUE."""
    for value in values:
        if "=" not in value:
            raise InputError(f"{name} {value}: expected NAME=VALUE")
    return dict(value.split("=", 1) for value in values)


def prepare(
    data: Annotated[list[str], typer.Option(help="File, folder, packaged set, or a name for `datasets`. Repeatable.")],
    model_path: Annotated[
        str, typer.Option(help="The target: its tokenizer and chat template are used. `smollm2` is embedded.")
    ],
    output_dir: Annotated[Path, typer.Option(help="Folder of the token dataset.")],
    max_seq_len: Annotated[int, typer.Option(min=1, help="Longest sample, in tokens.")] = 2048,
    on_long: Annotated[
        Literal["truncate", "drop", "split"], typer.Option(help="What becomes of longer samples.")
    ] = "truncate",
    supervise: Annotated[
        Literal["assistant", "last-turn", "all"], typer.Option(help="Which tokens the draft learns to predict.")
    ] = "assistant",
    rewritten: Annotated[
        Literal["unroll", "skip"],
        typer.Option(
            help="An earlier turn that the template shows otherwise than generated: a sample of its own, or not supervised."
        ),
    ] = "unroll",
    reasoning: Annotated[
        Literal["keep", "drop"], typer.Option(help="Whether the reasoning in the data is kept.")
    ] = "keep",
    chat_template_kwargs: Annotated[
        str, typer.Option(help="JSON for the template, e.g. '{\"enable_thinking\": false}'.")
    ] = "",
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file to use instead of the tokenizer's template.")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="WHAT=COLUMN, where columns have unusual names. Repeatable.")
    ] = None,
    data_config: Annotated[
        str | None, typer.Option(help="Configuration, for a data set that `datasets` loads.")
    ] = None,
    data_split: Annotated[str, typer.Option(help="Split, for a data set that `datasets` loads.")] = "train",
    duplicates: Annotated[
        Literal["once", "keep"], typer.Option(help="Equal samples: written once with their count, or kept.")
    ] = "once",
    heldout: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share kept apart in OUTPUT_DIR/heldout, chosen by a hash of the prompt."),
    ] = 0.0,
    trust_masks: Annotated[
        bool, typer.Option(help="Take the masks of tokenised rows without a look at their borders.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first rows.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Tokenising processes; default one per core.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a dataset in OUTPUT_DIR that was made otherwise.")] = False,
    strict: Annotated[bool, typer.Option(help="End with exit code 20 when any row was rejected.")] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Run tokenizer code that comes with the model.")] = False,
) -> None:
    """Chat data -> token dataset: the target's chat template, and a loss mask on what the assistant generates."""
    from rich.console import Console

    from eyas.data.chat_template import MaskSettings
    from eyas.data.preparation import PrepareReport
    from eyas.data.preparation import prepare as run
    from eyas.data.rows import PrepareSettings
    from eyas.views.dataset_view import print_report

    mask = MaskSettings(supervise, rewritten, reasoning, _json_option("--chat-template-kwargs", chat_template_kwargs))
    settings = PrepareSettings(max_seq_len, on_long, mask, duplicates, heldout, trust_masks)
    console = Console(stderr=True, highlight=False)
    with console.status("preparing") as status:

        def show(so_far: PrepareReport) -> None:
            rate = f"{so_far.tokens_per_second:,.0f} tokens/s"
            status.update(f"{so_far.rows:,} rows, {so_far.dropped:,} dropped, {so_far.tokens:,} tokens, {rate}")

        report = run(
            list(data),
            model_path,
            output_dir,
            progress=show,
            settings=settings,
            columns=_pairs("--column", column or []),
            data_config=data_config,
            data_split=data_split,
            chat_template=_text_of("--chat-template", chat_template),
            trust_remote_code=trust_remote_code,
            limit=limit,
            workers=workers,
            overwrite=overwrite,
        )
    print_report(report)
    if report.broken_sources or (strict and report.dropped):
        raise typer.Exit(EXIT_INCOMPLETE)


def regenerate(
    data: Annotated[list[str], typer.Option(help="File, folder, packaged set, or a name for `datasets`. Repeatable.")],
    model_path: Annotated[str, typer.Option(help="The target, which answers the prompts.")],
    output_dir: Annotated[
        Path, typer.Option(help="Folder of the token dataset. Resumed when it holds the same run's answers.")
    ],
    engine: Annotated[
        Literal["transformers", "vllm"], typer.Option(help="Who generates, without --endpoint.")
    ] = "transformers",
    endpoint: Annotated[
        str | None, typer.Option(help="A server that speaks OpenAI's protocol, e.g. http://localhost:8000.")
    ] = None,
    endpoint_model: Annotated[str | None, typer.Option(help="The model's name there; default the only one.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key for the endpoint.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit for one answer.")] = 1024,
    max_seq_len: Annotated[int, typer.Option(min=1, help="Limit for prompt and answer together.")] = 2048,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Nucleus, for temperatures above 0.")] = 1.0,
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Prompts at once (transformers), requests at once (endpoint).")
    ] = 16,
    chat_template_kwargs: Annotated[
        str, typer.Option(help="JSON for the template, e.g. '{\"enable_thinking\": false}'.")
    ] = "",
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file to use instead of the tokenizer's template.")
    ] = None,
    column: Annotated[list[str] | None, typer.Option(help="WHAT=COLUMN. Repeatable.")] = None,
    data_config: Annotated[
        str | None, typer.Option(help="Configuration, for a data set that `datasets` loads.")
    ] = None,
    data_split: Annotated[str, typer.Option(help="Split, for a data set that `datasets` loads.")] = "train",
    heldout: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share kept apart in OUTPUT_DIR/heldout, chosen by a hash of the prompt."),
    ] = 0.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first rows.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0, help="Ask no more after so long; the dataset holds what was answered, the same command goes on."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    tp_size: Annotated[int, typer.Option(min=1, help="Tensor parallel ranks (engine vllm).")] = 1,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0, max=1, help="Share of GPU memory (engine vllm).")
    ] = 0.9,
    strict: Annotated[bool, typer.Option(help="End with exit code 20 when any row was rejected.")] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False,
) -> None:
    """Let the target answer the prompts itself: its answers, token by token as generated, become the dataset."""
    from eyas.data.chat_template import ChatTemplate
    from eyas.data.generators import Generator, Sampling
    from eyas.data.regeneration import RegenerateReport, RegenerateSettings
    from eyas.data.regeneration import regenerate as run
    from eyas.engines.endpoint import EndpointGenerator
    from eyas.engines.generation import TransformersGenerator, VllmGenerator
    from eyas.runs.run import report_progress
    from eyas.target.tokenizer import token_lookup
    from eyas.views.dataset_view import print_regenerated

    sampling = Sampling(max_new_tokens, temperature, top_p, seed)

    def generator(template: ChatTemplate, stop: list[int]) -> Generator:
        if endpoint:
            return EndpointGenerator(
                endpoint,
                endpoint_model,
                sampling,
                stop,
                token_of_bytes=token_lookup(template.tokenizer),
                end_id=template.end_of_turn_id(),
                concurrency=batch_size,
                api_key=api_key,
            )
        if engine == "vllm":
            return VllmGenerator(
                model_path,
                sampling,
                stop,
                max_seq_len=max_seq_len,
                tp_size=tp_size,
                gpu_memory_utilization=gpu_memory_utilization,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
        return TransformersGenerator(
            model_path, sampling, stop, batch_size=batch_size, dtype=dtype, trust_remote_code=trust_remote_code
        )

    def heartbeat(so_far: RegenerateReport) -> None:
        report_progress(samples=so_far.resumed + so_far.conversations, tokens=so_far.generated_tokens)

    kwargs = _json_option("--chat-template-kwargs", chat_template_kwargs)
    report = run(
        list(data),
        model_path,
        output_dir,
        generator,
        settings=RegenerateSettings(max_seq_len, sampling, kwargs, heldout),
        columns=_pairs("--column", column or []),
        data_config=data_config,
        data_split=data_split,
        chat_template=_text_of("--chat-template", chat_template),
        trust_remote_code=trust_remote_code,
        limit=limit,
        window=max(4 * batch_size, 64) if engine == "transformers" or endpoint else 4096,
        seconds=seconds,
        progress=heartbeat,
    )
    print_regenerated(report)
    if report.broken_sources or (strict and report.rejected):
        raise typer.Exit(EXIT_INCOMPLETE)
