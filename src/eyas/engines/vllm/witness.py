"""A second look at the residual stream, inside the very pass that is captured: hooks on the decoder layers, and the model's own logits.

The auxiliary interface and a hook read one tensor by two ways, so in one pass they must agree bit for bit; and the logits that the model
computes in that pass belong to the target state of that pass, however its experts route. A compiled model calls no hooks: while a witness
looks at layers, the model runs uncompiled. Only gate 4 pays for it, with one more pass over its few samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eyas.engines.vllm.capture import owner_of

#: Decoders that return a pair whose first item already is the residual stream: adding the second would count it twice.
RETURNS_STREAM = {"CohereModel", "StableLMEpochModel", "GraniteMoeHybridModel", "Exaone4Model"}


def stream_hooks(decoder: Any, layers: Any, ids: Iterable[int], sink: Callable[[int, torch.Tensor], None]) -> list[Any]:
    """Hooks that hand `sink(id, hidden + residual)` what enters decoder layer `id`, or for id N what leaves the last one. Returns handles."""
    whole_already = type(decoder).__name__ in RETURNS_STREAM

    def give(layer: int, hidden: Any, residual: Any) -> None:
        if hidden.dim() == 3:  # a layer of transformers' own: one row, nothing apart from it
            hidden, residual = hidden[0], None
        sink(layer, hidden if residual is None or whole_already else hidden + residual)

    def entering(layer: int) -> Any:
        def hook(module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states = [a for a in arguments if _is_states(a)]
            hidden, residual = keywords.get("hidden_states"), keywords.get("residual")
            if hidden is None:
                hidden, *states = states
            give(layer, hidden, states[0] if residual is None and states else residual)

        return hook

    def leaving(layer: int) -> Any:
        def hook(module: torch.nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            pair = output if isinstance(output, (tuple, list)) else (output, None)
            give(layer, pair[0], pair[1] if len(pair) > 1 and _is_states(pair[1]) else None)

        return hook

    return [
        layers[i].register_forward_pre_hook(entering(i), with_kwargs=True)
        if i < len(layers)
        else layers[i - 1].register_forward_hook(leaving(i), with_kwargs=True)
        for i in ids
    ]


def _is_states(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() in (2, 3)


class Witness:
    """On one rank, from `__init__` to `close`: keeps streams and logits of whole samples, then writes them to a file.

    Args:
        model, decoder, layers: the loaded model, its decoder and the decoder's layers. ids: layer ids to keep, of this pipeline stage;
            without any the model runs as it does in bulk, and only its logits are kept.
        positions: sample id -> positions whose logits are kept. file: where they go.
        owner, owners: as in `Capture`; a rank that is not the first keeps the samples that it owns, the first keeps all.
        logits: whether this rank's stage has the head.
    """

    def __init__(
        self,
        model: Any,
        decoder: Any,
        layers: Any,
        *,
        ids: Sequence[int],
        positions: Mapping[str, Sequence[int]],
        file: Path,
        owner: int,
        owners: int,
        logits: bool,
    ):
        self.model, self.ids, self.positions, self.file = model, list(ids), positions, file
        self.owner, self.owners, self.logits = owner, owners, logits
        self.problem = ""
        self._kept: dict[tuple[str, str], list[torch.Tensor]] = {}
        self._samples: dict[str, tuple[str, int]] = {}
        self._caught: dict[int, torch.Tensor] = {}
        self._handles = stream_hooks(decoder, layers, self.ids, self._catch)
        self._compiled = [m for m in model.modules() if self.ids and getattr(m, "do_not_compile", True) is False]
        for module in self._compiled:
            module.do_not_compile = True

    def _catch(self, layer: int, stream: torch.Tensor) -> None:
        if layer in self._caught:
            self.problem = f"layer {layer} ran twice in one pass"
        self._caught[layer] = stream.clone()

    def begin_step(self) -> None:
        self._caught.clear()

    def step(
        self,
        new: Iterable[Any],
        requests: Sequence[str],
        counts: Sequence[int],
        computed: Mapping[str, int],
        hidden: Any,
    ) -> None:
        """Keep one engine step. `new`: vLLM's new requests of it; `requests[i]` has `counts[i]` rows, see `capture.Step`; `hidden`: [rows, H]
        what the model hands to its head, None without one."""
        for one in new:
            extra = (one.sampling_params.extra_args or {}).get("eyas") if one.sampling_params is not None else None
            if extra is not None:
                self._samples[one.req_id] = (extra["id"], len(one.prompt_token_ids))
        if any(i not in self._caught for i in self.ids):
            self.problem = self.problem or "the decoder's layers called no hooks"
            return
        asked: list[int] = []  # rows of this step whose logits are wanted
        whose: list[str] = []
        row = 0
        for request, count in zip(requests, counts, strict=True):
            if request in self._samples:
                sample, length = self._samples[request]
                at = computed[request]
                rows = slice(row, row + min(count, length - at))
                for i, stream in self._caught.items():
                    self._keep(sample, str(i), stream[rows], at)
                wanted = [p for p in self.positions.get(sample, ()) if at <= p < at + rows.stop - rows.start]
                asked += [row + p - at for p in wanted]
                whose += [sample] * len(wanted)
            row += count
        if not self.logits or not asked:
            return
        # Every tensor parallel rank is here with the same rows: the head is split over them.
        with torch.inference_mode():
            logits = self.model.compute_logits(hidden[torch.tensor(asked, device=hidden.device)])
        if logits is not None:
            for sample in dict.fromkeys(whose):
                chosen = [k for k, one in enumerate(whose) if one == sample]
                self._keep(sample, "logits", logits[chosen], None)

    def _keep(self, sample: str, name: str, rows: torch.Tensor, at: int | None) -> None:
        if self.owner == 0 or owner_of(sample, self.owners) == self.owner:
            if at == 0:  # begun, or begun anew
                self._kept.pop((sample, name), None)
                self._kept.pop((sample, "logits"), None)
            self._kept.setdefault((sample, name), []).append(rows.to("cpu", copy=True))

    def close(self) -> dict[str, Any]:
        """Take the hooks off, write the file. Returns its name, or what kept the witness from seeing."""
        for handle in self._handles:
            handle.remove()
        for module in self._compiled:
            module.do_not_compile = False
        if self.problem or not self._kept:
            return {"problem": self.problem or "no pass was seen"}
        save_file({f"{one}.{name}": torch.cat(rows) for (one, name), rows in self._kept.items()}, self.file)
        return {"file": str(self.file), "owner": self.owner}
