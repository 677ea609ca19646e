"""Layer ids, one numbering everywhere, and the translation of others at the edge.

**Layer id k** is the residual stream after k decoder layers, k = 0..N: id 0 is the embedding output, id N (also written
`final`) the output of the last layer *before* the final norm. Id k is what enters 0-based decoder layer k. This is vLLM's
numbering (`eagle_aux_hidden_state_layer_ids`) and Hugging Face's `hidden_states[k]` for k < N; `hidden_states[N]` there is
*after* the final norm and is not id N.

Other numberings count 0-based layer *outputs* (SGLang's explicit ids, many hook scripts): output j is our id j + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from eyas.base.errors import InputError

#: `stream`: our ids. `output`: 0-based layer outputs (also SGLang's explicit ids), translated by adding one.
LayerIndex = Literal["stream", "output"]


def default_aux_layers(num_layers: int) -> list[int]:
    """The three ids that feed an EAGLE-3 draft by default: 2, N//2, N-3 (vLLM's and SGLang's default as well).

    Raises InputError for models too shallow to have three distinct ones.
    """
    ids = [2, num_layers // 2, num_layers - 3]
    if num_layers < 3 or len(set(ids)) != 3 or min(ids) < 0:
        raise InputError(
            f"the default layers 2, N//2, N-3 are {ids} for a model of {num_layers} layers: not three different ones",
            "name the layers with --layer-ids",
        )
    return ids


def resolve_layer_ids(
    requested: Sequence[int | str] | None,
    num_layers: int,
    *,
    index: LayerIndex = "stream",
    with_final: bool = True,
) -> list[int]:
    """Turn what the user typed into our ids, in the order given, the target state last unless it was named.

    Args:
        requested: ids as numbers or numerals, or the word `final`; None for `default_aux_layers`.
        num_layers: N of the target.
        index: how `requested` counts; `output` ids are translated here and never travel further.
        with_final: append id N when it was not asked for.

    Raises:
        InputError: an id that is not a number, out of range, or given twice. Two equal ids are never made one silently.
    """
    if index not in get_args(LayerIndex):
        raise InputError(f"layer index {index!r} is not known", f"--layer-index is {' or '.join(get_args(LayerIndex))}")
    if requested is None:
        ids = default_aux_layers(num_layers)
    else:
        shift = 1 if index == "output" else 0
        ids = []
        for item in requested:
            if isinstance(item, str) and item.strip().lower() == "final":
                ids.append(num_layers)
                continue
            try:
                number = int(item)
            except (TypeError, ValueError):
                raise InputError(
                    f"layer id {item!r} is not a number or `final`", "for example --layer-ids 2 30 58 final"
                ) from None
            if not 0 <= number + shift <= num_layers or number < 0:
                highest = num_layers - shift
                meaning = (
                    f"id j is the output of 0-based layer j ({highest} = final)"
                    if index == "output"
                    else f"id k is the residual stream after k layers (0 = embeddings, {num_layers} = final); "
                    "use --layer-index output if yours count 0-based layer outputs"
                )
                raise InputError(
                    f"layer id {number} is out of range: the model has {num_layers} layers, so --layer-index {index} ids go from 0 to {highest}",
                    meaning,
                )
            ids.append(number + shift)
    if not ids and not with_final:
        raise InputError("no layer was asked for", "give --layer-ids, or leave the target state (`final`) on")
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise InputError(
            f"layer id {twice[0]} is given twice in {list(requested or ids)}"
            + (" (`final` is that id)" if twice[0] == num_layers else "")
            + "",
            "each id once; the order is kept",
        )
    if with_final and num_layers not in ids:
        ids.append(num_layers)
    return ids


def describe_layer(layer_id: int, num_layers: int) -> str:
    """A human name: `0 (embeddings)`, `30 (final)` or just the number."""
    if layer_id == 0:
        return "0 (embeddings)"
    return f"{layer_id} (final)" if layer_id == num_layers else str(layer_id)


#: Targets whose explicit ids SGLang takes as ours, unless the first of them is 1 (then as outputs, like everywhere else): the classes that
#: share `DeepseekV2ForCausalLM.set_eagle3_layers_to_capture`, by the architecture in the target's config (read in SGLang 0.5.23).
SGLANG_STREAM_IDS = (
    "Deepseek",
    "KimiK25",
    "GlmMoeDsa",
    "Glm4MoeLite",
    "MistralLarge3",
)


def to_sglang(ids: Sequence[int], architecture: str | None, num_layers: int) -> list[int]:
    """Our ids as `eagle_config.eagle_aux_hidden_state_layer_ids` must name them for SGLang to capture exactly these layers.

    SGLang adds one to each; for a DeepSeek-like target only if the first is 1. It captures in the order of the layers, so the order here
    is free where it helps to keep a 1 from the first place.

    Raises:
        InputError: an id that SGLang cannot capture: 0 (the embeddings) and N (behind the last layer).
    """
    wrong = [i for i in ids if not 0 < i < num_layers]
    if wrong:
        raise InputError(
            f"the draft reads layers {list(ids)}, and SGLang captures neither the embeddings (0) nor the last layer's output ({num_layers})",
            "train with other --aux-layers for SGLang",
        )
    ascending = sorted(ids)
    if not (architecture or "").startswith(SGLANG_STREAM_IDS) or ascending[0] == 2:
        return [i - 1 for i in ascending]
    if ascending == [1]:
        raise InputError(
            f"SGLang cannot capture layer 1 alone of a {architecture}",
            "train with other --aux-layers for SGLang",
        )
    return [*ascending[1:], 1] if ascending[0] == 1 else ascending


def from_sglang(named: Sequence[int], architecture: str | None) -> list[int]:
    """The layers, ascending and in our ids, that SGLang captures for these ids in `eagle_config` (see `to_sglang`)."""
    as_ours = (architecture or "").startswith(SGLANG_STREAM_IDS) and named[0] != 1
    return sorted(i if as_ours else i + 1 for i in named)
