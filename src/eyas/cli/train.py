"""The commands about drafts; `cli.py` registers them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from eyas.base.errors import EXIT_INTERRUPTED, StoreError


def train(
    states: Annotated[Path, typer.Option(help="The state store, verified.")],
    model_path: Annotated[str, typer.Option(help="The target that the states are of: folder, hub id, or `smollm2`.")],
    output_dir: Annotated[Path, typer.Option(help="The draft's folder. Resumed when it holds the same run.")],
    aux_layers: Annotated[
        list[int] | None, typer.Option(help="Stored layers that feed the draft. Default: all but the final one.")
    ] = None,
    draft_vocab_size: Annotated[
        int, typer.Option(help="Most frequent supervised tokens that the draft can say.")
    ] = 32000,
    init_from: Annotated[
        Path | None, typer.Option(help="Start from this draft: an eyas, vLLM, SGLang or speculators folder.")
    ] = None,
    loss: Annotated[
        Literal["kl", "tv", "lk"], typer.Option(help="kl, tv (total variation) or lk (both, adaptive).")
    ] = "kl",
    ttt_steps: Annotated[int, typer.Option(help="Training-time-test steps, K.")] = 5,
    step_decay: Annotated[float, typer.Option(help="Weight of step k is this to the power k.")] = 0.8,
    ttt_warmup_fraction: Annotated[
        float, typer.Option(help="Share of the run, at its start, that trains with K = 1 (several times faster).")
    ] = 0.0,
    learning_rate: Annotated[float, typer.Option(help="AdamW's rate after warm-up.")] = 4e-4,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per rank and micro-batch.")] = 4096,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 1,
    epochs: Annotated[float, typer.Option(help="Budget in passes over the data.")] = 1.0,
    steps: Annotated[int | None, typer.Option(help="Budget in optimizer steps instead.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Budget by the clock instead.")] = None,
    held_out: Annotated[float, typer.Option(help="Share of samples set apart for simulated acceptance.")] = 0.05,
    eval_samples: Annotated[int, typer.Option(help="Most held-out samples per evaluation.")] = 256,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 500,
    chain: Annotated[int, typer.Option(help="Guesses per verification step in the simulation.")] = 5,
    patience: Annotated[int | None, typer.Option(help="Stop after so many evaluations without a better one.")] = None,
    keep: Annotated[int, typer.Option(help="Checkpoints kept.")] = 2,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: at evaluations.")] = 0,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], typer.Option(help="Compute dtype; masters are fp32.")
    ] = "auto",
    sharding: Annotated[
        Literal["ddp", "fsdp"], typer.Option(help="How several ranks (torchrun) share the weights: DDP or FSDP2.")
    ] = "ddp",
    compile: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(
            help="torch.compile; auto: on a GPU (a minute or more before the first steps; off suits runs of minutes)."
        ),
    ] = "auto",
    heads: Annotated[int | None, typer.Option(help="Attention heads. Default: derived from the target.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key-value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head.")] = None,
    mlp: Annotated[int | None, typer.Option(help="Width of the MLP.")] = None,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 1,
    rope: Annotated[Literal["target", "default"], typer.Option(help="The target's rope, or plain rope.")] = "target",
    norm_aux: Annotated[
        bool, typer.Option("--norm-aux", help="Norm each auxiliary state before fc (EAGLE-3.1).")
    ] = False,
    norm_before_residual: Annotated[
        bool, typer.Option("--norm-before-residual", help="The residual starts normed.")
    ] = False,
    norm_output: Annotated[
        bool, typer.Option("--norm-output", help="Carry the normed state between steps (EAGLE-3.1).")
    ] = False,
    train_head: Annotated[
        bool, typer.Option("--train-head", help="Also train the head (it starts as the target's rows).")
    ] = False,
    weight_decay: Annotated[float, typer.Option(help="AdamW's weight decay.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Largest gradient norm.")] = 1.0,
    warmup: Annotated[float, typer.Option(help="Share of the run that warms up.")] = 0.03,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: as many as are free.")] = None,
    seed: Annotated[int, typer.Option(help="Order of the data and first weights.")] = 0,
    track: Annotated[
        list[str] | None, typer.Option(help="tensorboard, wandb, mlflow; repeatable; `none` for none.")
    ] = None,
    allow_unverified: Annotated[
        bool, typer.Option("--allow-unverified", help="Take a store `eyas verify` has not passed.")
    ] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the model folder's own code.")] = False,
) -> None:
    """Train an EAGLE-3 draft on a state store; the best one by simulated acceptance length is kept."""
    from eyas.base.stop_request import stoppable
    from eyas.drafts.settings import DraftShape
    from eyas.runs.run import report_progress
    from eyas.training.settings import TrainSettings
    from eyas.training.trainer import train as run
    from eyas.views.train_console import TrainDisplay, show_train_report

    sizes: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": mlp,
        "num_layers": layers,
        "norm_aux": norm_aux,
        "norm_before_residual": norm_before_residual,
        "norm_output": norm_output,
    }
    display = TrainDisplay()

    def show(figures: dict[str, Any]) -> None:
        display.update(figures)
        if "loss" in figures:
            total = figures["total_steps"] if seconds is None else None
            report_progress(stage="train", unit="steps", samples=figures["step"], total=total, loss=figures["loss"][0])

    with stoppable() as stop:
        stop.in_bulk = True  # from here on an ordered stop writes a checkpoint
        try:
            settings = TrainSettings(
                states=states,
                model_path=model_path,
                output_dir=output_dir,
                aux_layers=tuple(aux_layers) if aux_layers else None,
                draft_vocab_size=draft_vocab_size,
                draft=DraftShape(**sizes, rope=rope),
                init_from=init_from,
                loss=loss,
                ttt_steps=ttt_steps,
                step_decay=step_decay,
                ttt_warmup_fraction=ttt_warmup_fraction,
                learning_rate=learning_rate,
                weight_decay=weight_decay,
                clip=clip,
                warmup=warmup,
                batch_tokens=batch_tokens,
                accumulate=accumulate,
                epochs=epochs,
                steps=steps,
                seconds=seconds,
                held_out=held_out,
                eval_samples=eval_samples,
                eval_every=eval_every,
                num_speculative_tokens=chain,
                patience=patience,
                keep=keep,
                checkpoint_every=checkpoint_every,
                dtype=dtype,
                sharding=sharding,
                compile=compile,
                train_head=train_head,
                threads=threads,
                seed=seed,
                trackers=tuple(track or ["tensorboard"]),  # type: ignore[arg-type]
                allow_unverified=allow_unverified,
                trust_remote_code=trust_remote_code,
            )
            report = run(settings, progress=show, stop=stop)
        finally:
            display.close()
    if os.environ.get("RANK", "0") == "0":
        show_train_report(report)
    if report.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def evaluate(
    draft: Annotated[Path, typer.Option(help="A draft folder from `eyas train`.")],
    model_path: Annotated[str, typer.Option(help="Its target.")],
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompt sets: packaged names, files, folders, hf:OWNER/NAME:CONFIG:SPLIT; NAME=... names one; several after one flag."
        ),
    ] = None,
    chain: Annotated[int, typer.Option(min=1, help="Guesses per verification step.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest reply.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many prompts per set.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy; above, rejection sampling.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling and of the intervals.")] = 0,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], typer.Option(help="float32 is exactly lossless.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
    plain: Annotated[
        int | None,
        typer.Option(
            min=0, help="How many prompts per set to decode plainly too (speed, lossless check). Default: all."
        ),
    ] = None,
    engine: Annotated[
        Literal["transformers", "vllm"],
        typer.Option(help="vllm: also serve the exported draft by real vLLM and put its acceptance beside ours."),
    ] = "transformers",
    ngram_data: Annotated[Path | None, typer.Option(help="Store or dataset the n-gram baseline is counted on.")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Where acceptance.json and acceptance.svg go.")] = None,
    diagnose: Annotated[
        bool,
        typer.Option(help="Compare the store that the draft was trained on, where it still exists, with the target."),
    ] = True,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the model folder's own code.")] = False,
) -> None:
    """Measure a draft: real speculative decoding, lossless or an error, beside guessers without a network."""
    from eyas.evaluation.settings import EvalSettings

    settings = EvalSettings(
        draft=draft,
        model_path=model_path,
        prompts=tuple(prompts or ["word_problems_heldout"]),
        chain=chain,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        limit=limit,
        temperature=temperature,
        seed=seed,
        dtype=dtype,
        device=device,
        plain=plain,
        engine=engine,
        ngram_data=ngram_data,
        output_dir=output_dir,
        diagnose=diagnose,
        trust_remote_code=trust_remote_code,
    )
    # These import torch: after the inputs were looked at.
    from eyas.evaluation.acceptance import evaluate as run
    from eyas.views.train_console import EvalDisplay, show_acceptance

    display = EvalDisplay()
    try:
        report = run(settings, progress=display.update)
    finally:
        display.close()
    show_acceptance(report)
    if not all(check["ok"] for check in report["diagnosis"]["checks"]):
        # The figures are printed and kept, but no script may take them for a healthy draft's.
        raise typer.Exit(StoreError.exit_code)


def export(
    draft: Annotated[Path, typer.Option(help="A draft folder from `eyas train`.")],
    output_dir: Annotated[Path, typer.Option(help="The folder for the engine.")],
    format: Annotated[
        Literal["vllm", "sglang", "speculators", "eyas"], typer.Option(help="Which engine loads it.")
    ] = "vllm",
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Of the weights.")] = "bfloat16",
    embedding: Annotated[bool, typer.Option("--embedding", help="Also write the target's embedding.")] = False,
) -> None:
    """Write a draft as vLLM, SGLang or speculators load it, with the serving command in its README."""
    from eyas.exporting.folders import export as run
    from eyas.views.console import out

    folder = run(draft, output_dir, format, dtype=dtype, embedding=embedding)
    text = (folder / "README.md").read_text() if (folder / "README.md").exists() else str(folder)
    out.print(text, soft_wrap=True, markup=False, highlight=False)  # the command in it is to be copied whole


def import_draft(
    source: Annotated[Path, typer.Option(help="A vLLM, SGLang or speculators EAGLE-3 folder.")],
    model_path: Annotated[str, typer.Option(help="The draft's target.")],
    output_dir: Annotated[Path, typer.Option(help="The eyas draft folder to make.")],
    layer_ids: Annotated[
        list[int] | None, typer.Option(help="Layers that feed it, if its config does not say.")
    ] = None,
) -> None:
    """Read an engine's draft folder into an eyas draft folder."""
    from eyas.exporting.foreign import import_draft as run
    from eyas.views.console import out

    out.print(str(run(source, output_dir, model_path, layer_ids=tuple(layer_ids) if layer_ids else None)))
