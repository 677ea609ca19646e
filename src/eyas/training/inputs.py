"""What a run trains on and begins with: a store that fits the target, samples set apart, the draft vocabulary, a new draft."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from eyas.base.errors import InputError, StoreError
from eyas.base.manifest import differing_fields
from eyas.drafts.eagle3.init import (
    DraftVocabulary,
    choose_vocabulary,
    count_supervised,
    derive_config,
    initialise,
    measured_scale,
)
from eyas.drafts.eagle3.model import Draft
from eyas.exporting.foreign import init_from
from eyas.gates.mark import read_mark
from eyas.store.reader import States
from eyas.target.layers import default_aux_layers, describe_layer
from eyas.target.model_files import ModelInfo
from eyas.target.teacher import TargetParts, load_target_parts
from eyas.training.data import Split, split_by_prompt, survey
from eyas.training.settings import TrainSettings
from eyas.training.simulation import has_rounds

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainInputs:
    """The store, its target, the layers that feed the draft, and what was counted on the store.

    split: `held_out` with those samples only that are evaluated. parts: the target's embedding, norm and head.
    """

    states: States
    info: ModelInfo
    aux_ids: tuple[int, ...]
    split: Split
    vocabulary: DraftVocabulary
    parts: TargetParts


def validate_store(
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


def read_inputs(s: TrainSettings, info: ModelInfo, states: States, aux_ids: tuple[int, ...]) -> TrainInputs:
    """Look at every sample's tokens once, set the held-out ones apart, and count the draft vocabulary on the rest.

    Raises:
        InputError: nothing to learn from, or too few samples.
    """
    seen = survey(states, info.vocab_size)
    split = split_by_prompt(states.ids, seen.prompts, s.held_out, least=min(8, len(states) // 4))
    if not seen.learns[split.train].any():
        raise InputError(
            f"no sample of {s.states} has a supervised token behind its second one: a draft could learn nothing",
            "run `eyas prepare` again and look at its masks",
        )
    held = np.zeros_like(seen.counts)
    for i in split.held_out:
        count_supervised(held, *(x.numpy() for x in states.tokens(int(i))))
    size = min(s.draft_vocab_size, info.vocab_size)
    vocabulary = choose_vocabulary(seen.counts - held, size, states.manifest["dataset"]["hash"])
    held_out = split.held_out[: s.eval_samples]
    if len(held_out) and not any(has_rounds(states.tokens(int(i))[1].numpy()) for i in held_out):
        log.warning(
            "no held-out answer has a second token: acceptance cannot be simulated, the draft of the last step is kept"
        )
        held_out = held_out[:0]
    return TrainInputs(states, info, aux_ids, Split(split.train, held_out), vocabulary, load_target_parts(info))


def new_draft(s: TrainSettings, inputs: TrainInputs, device: torch.device) -> Draft:
    """The draft at step 0, on the CPU; `device` is where it will compute."""
    sizes = {k: v for k, v in vars(s.draft).items() if k != "rope"}
    config = derive_config(
        inputs.info, inputs.aux_ids, len(inputs.vocabulary.ids), plain_rope=s.draft.rope == "default", **sizes
    )
    draft, train = Draft(config), inputs.split.train
    # 64 samples tell the scale of each dimension well enough, and reading them takes a second.
    some = (inputs.states[int(p)] for p in train[:: max(1, len(train) // 64)][:64])
    scale = measured_scale(
        (torch.cat([sample.hidden[i] for i in inputs.aux_ids], -1) for sample in some),
        len(inputs.aux_ids),
        s.draft_init.aux_scale,
    )
    if config.norm_aux:  # the norms take the scale out themselves, and nothing could be folded through them
        scale = torch.ones_like(scale)
    initialise(draft, inputs.parts, inputs.vocabulary, scale, seed=s.seed, first=s.draft_init)
    if s.init_from:
        for line in init_from(draft, s.init_from, inputs.info, inputs.parts):
            log.info("init-from: %s", line)
    draft.lm_head.weight.requires_grad_(s.train_head)
    draft.compute_dtype = compute_dtype(s.dtype, device)
    draft.compiled = s.compile == "on" or (s.compile == "auto" and device.type == "cuda")
    return draft


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 where the machine multiplies it fast (CUDA from Ampere on, CPUs with AMX or AVX-512 bf16), else fp32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":  # older GPUs "support" bf16 by emulation
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
