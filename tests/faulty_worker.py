"""A capture worker into which faults are planted by RPC, one at a time: the engine, its processes and eyas's path are the real ones.

It asks the model for the neighbours of the layers that are captured too, so that a layer early or late is the model's own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eyas.engines.vllm.capture import Step
from eyas.engines.vllm.worker import CaptureWorker, decoder_layers


class FaultyWorker(CaptureWorker):
    """`plant(name)` arms a fault of `shared faults` or of `POWER`, `plant("")` disarms."""

    _fault = _only = ""
    _before: dict[int, torch.Tensor] = {}  # noqa: RUF012 - replaced, never changed

    # -- ids: those captured (`_asked`), and their neighbours beside them

    def _ask_for_states(self) -> None:
        wanted = self.vllm_config.additional_config["eyas"]
        self._asked = sorted(wanted["layer_ids"])
        depth = self.model_config.hf_text_config.num_hidden_layers
        near = {j for i in self._asked for j in (i - 1, i, i + 1) if 0 < j <= depth}
        wanted["layer_ids"] = sorted(near | set(self._asked))
        try:
            super()._ask_for_states()
        finally:
            wanted["layer_ids"] = self._asked

    def eyas_witness(self, settings: dict[str, Any] | None) -> dict[str, Any]:
        held, self._layer_ids = self._layer_ids, self._asked
        try:
            return super().eyas_witness(settings)
        finally:
            self._layer_ids = held

    # -- faults

    def plant(self, fault: str, only: str = "") -> int:
        """`only`: `unwitnessed` (the pass that hooks look at is right) or `last rank` (the others are right)."""
        self._fault, self._only, self._before = fault, only, {}
        decoder = self._path[-1][1]
        if fault == "no residual":
            decoder._maybe_add_hidden_state = _without_residual.__get__(decoder)
        else:
            decoder.__dict__.pop("_maybe_add_hidden_state", None)
        return self.rank

    @torch.inference_mode()
    def _step(self, scheduled: Any, computed: dict[str, int]) -> Step:
        step = super()._step(scheduled, computed)
        held = dict(zip(self._layer_ids, step.aux, strict=True))
        step = replace(step, aux=[held[i] for i in self._asked])
        before, self._before = self._before, {i: rows.clone() for i, rows in held.items()} if self._fault else {}
        if self._only == "unwitnessed" and self._witness is not None and self._witness.ids:
            return step
        if self._only == "last rank" and self.rank != self.parallel_config.world_size - 1:
            return step
        aux = step.aux
        match self._fault:
            case "indexed once too often":
                return replace(step, aux=list(aux[0]))
            case "a layer dropped":
                return replace(step, aux=list(aux)[:-1])
            case "no auxiliary states":
                return replace(step, aux=None)
            case "rows missing":
                return replace(step, aux=[rows[:-1] for rows in aux])
            case "another request's rows":
                return replace(step, requests=step.requests[::-1], scheduled=step.scheduled[::-1])
            case "zeros":
                return replace(step, aux=[aux[0], torch.zeros_like(aux[1]), *aux[2:]])
            case "a NaN":
                spoiled = aux[0].clone()
                spoiled[0, 3] = float("nan")
                return replace(step, aux=[spoiled, *aux[1:]])
            case "one layer early":
                return replace(step, aux=[held[i - 1] for i in self._asked])
            case "one layer late":
                return replace(step, aux=[held[min(i + 1, self._layer_ids[-1])] for i in self._asked])
            case "layers swapped":
                return replace(step, aux=[aux[1], aux[0], *aux[2:]])
            case "a layer twice":
                return replace(step, aux=[aux[0], aux[0], *aux[2:]])
            case "no residual" | "a sample forgotten" | "":
                return step
        what, _, where = self._fault.partition(", ")
        chosen = self._asked[-1] if where == "target" else self._asked[len(self._asked) // 2]
        wrong = self._spoiled(what, chosen, held, before)
        return replace(step, aux=[wrong if i == chosen else held[i] for i in self._asked])

    def _spoiled(
        self, what: str, layer: int, held: dict[int, torch.Tensor], before: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """What is handed out for `layer` in place of its rows [rows, H]."""
        rows = held[layer].clone()
        match what:
            case "early":
                return held[layer - 1]
            case "late":
                return held[layer + 1]
            case "without residual":
                return rows - held[layer - 1]
            case "after the norm":
                return _alone(final_norm_of(self._path[-1][1])(rows))
            case "after another norm":
                return _alone(first_norm_of(decoder_layers(self._path[-1][1])[0])(rows))
            case "neighbours' rows":
                return rows.roll(1, 0)
            case "stale rows":  # every fourth row is still one of the step before
                old = before.get(layer, rows).roll(7, 0)[: len(rows)]
                rows[: len(old)][1::4] = old[1::4]
            case "NaN row":
                rows[len(rows) // 2] = float("nan")
            case "noise":
                noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(len(rows))).to(rows.device)
                size = torch.linalg.vector_norm(rows.float(), dim=1, keepdim=True) / rows.shape[1] ** 0.5
                rows += (0.03 * size * noise).to(rows.dtype)
            case "fp8":
                scale = rows.abs().amax(1, keepdim=True).float() / 448
                rows = ((rows.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(rows.dtype)
            case _:
                raise ValueError(self._fault)
        return rows

    def _capture_step(self, capture: Any, scheduled: Any, output: Any) -> None:
        if self._fault == "a sample forgotten" and scheduled.scheduled_new_reqs:
            scheduled = replace(scheduled, scheduled_new_reqs=scheduled.scheduled_new_reqs[1:])
        super()._capture_step(capture, scheduled, output)

    # -- for random weights made by `--load-format dummy`

    @torch.no_grad()
    def grow_norms(self, grow: float, folder: str) -> int:
        """Let each layer add more than the last one, as in trained models, give norms their gains, and write embedding, norm and head."""
        from safetensors.torch import save_file

        model = self.model_runner.get_model()
        for name, weight in model.state_dict().items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "w2_weight_scale", "w2_weight")):
                layer = next(int(part) for part in name.split(".") if part.isdigit())
                if weight.is_floating_point():
                    weight.mul_(0.5 * grow**layer)
            elif weight.dim() == 1 and "norm" in name and name.endswith("weight"):
                weight.add_(
                    0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))).to(weight)
                )
        found = {name.rpartition("model.")[2]: weight for name, weight in model.state_dict().items()}
        parts = {"model.norm.weight": found["norm.weight"], "model.embed_tokens.weight": found["embed_tokens.weight"]}
        head = next(weight for name, weight in model.state_dict().items() if name.endswith("lm_head.weight"))
        parts = {name: weight.cpu().contiguous() for name, weight in {**parts, "lm_head.weight": head}.items()}
        save_file(parts, Path(folder) / "model.safetensors", {"format": "pt"})
        return self.rank


def _alone(normed: Any) -> torch.Tensor:
    return normed[0] if isinstance(normed, tuple) else normed


def final_norm_of(decoder: Any) -> Any:
    return next(
        getattr(decoder, name) for name in ("norm", "norm_f", "ln_f", "final_layernorm") if hasattr(decoder, name)
    )


def first_norm_of(layer: Any) -> Any:
    return getattr(layer, "input_layernorm", None) or layer.norm


def _without_residual(self: Any, states: list[torch.Tensor], index: int, hidden: torch.Tensor, _residual: Any) -> Any:
    if index in self.aux_hidden_state_layers:
        states.append(hidden)
    return states
