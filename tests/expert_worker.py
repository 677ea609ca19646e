"""A capture worker in which vLLM's CPU build can run expert parallelism.

vLLM hands its CPU kernels the router's expert numbers, which count all experts, and weights that hold this rank's experts alone; the map
between the two, which its GPU kernels follow, stops one call above the kernel. Here the numbers are translated before that call, in an
out-of-tree operator (vLLM's own interface for one). Placement of the experts, loading, kernel and the sum over the ranks are vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from eyas.engines.vllm.worker import CaptureWorker


@UnquantizedFusedMoEMethod.register_oot(name="UnquantizedFusedMoEMethod")
class MappedExperts(UnquantizedFusedMoEMethod):
    #: Choices of the router that this rank saw, and those whose expert it holds.
    chosen = computed = 0

    def forward_native(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *shared: Any, **more: Any
    ) -> torch.Tensor:
        local = layer.expert_map[topk_ids.long()].to(topk_ids.dtype)
        here = local >= 0
        MappedExperts.chosen += here.numel()
        MappedExperts.computed += int(here.sum())
        # An expert of another rank: any of ours, with weight 0.
        return super().forward_native(layer, x, topk_weights.where(here, 0.0), local.clamp_min(0), *shared, **more)


class ExpertWorker(CaptureWorker):
    def held_experts(self) -> dict[str, Any]:
        """`layers`: of each mixture on this rank, the numbers of its experts and the widths of their weights; `chosen`, `computed`."""
        layers = []
        for module in self.model_runner.get_model().modules():
            if isinstance(module, RoutedExperts):
                held = (module.expert_map >= 0).nonzero()[:, 0].tolist()
                layers.append((held, list(module.w13_weight.shape), list(module.w2_weight.shape)))
        return {"layers": layers, "chosen": MappedExperts.chosen, "computed": MappedExperts.computed}
