"""A capture worker into which faults are planted by RPC, one at a time: the engine, its processes and eyas's path are the real ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from eyas.engines.vllm.capture import Step
from eyas.engines.vllm.worker import CaptureWorker


class FaultyWorker(CaptureWorker):
    """`plant(name)` arms a fault of `shared faults`, `plant("")` disarms."""

    _fault = ""

    def plant(self, fault: str) -> int:
        self._fault = fault
        decoder = self._path[-1][1]
        ids = tuple(self._layer_ids)
        decoder._set_aux_hidden_state_layers(tuple(i - 1 for i in ids) if fault == "one layer early" else ids)
        if fault == "no residual":
            decoder._maybe_add_hidden_state = _without_residual.__get__(decoder)
        else:
            decoder.__dict__.pop("_maybe_add_hidden_state", None)
        return self.rank

    def _step(self, scheduled: Any, computed: dict[str, int]) -> Step:
        step = super()._step(scheduled, computed)
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
            case "after the norm":
                with torch.inference_mode():
                    return replace(step, aux=[*aux[:-1], self._path[-1][1].norm(aux[-1].clone())])
            case "layers swapped":
                return replace(step, aux=[aux[1], aux[0], *aux[2:]])
            case "a layer twice":
                return replace(step, aux=[aux[0], aux[0], *aux[2:]])
        return step

    def _capture_step(self, capture: Any, scheduled: Any, output: Any) -> None:
        if self._fault == "a sample forgotten" and scheduled.scheduled_new_reqs:
            scheduled = replace(scheduled, scheduled_new_reqs=scheduled.scheduled_new_reqs[1:])
        super()._capture_step(capture, scheduled, output)


def _without_residual(self: Any, states: list[torch.Tensor], index: int, hidden: torch.Tensor, _residual: Any) -> Any:
    if index in self.aux_hidden_state_layers:
        states.append(hidden)
    return states
