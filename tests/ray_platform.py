"""vLLM's CPU platform with a Ray resource, as an out-of-tree platform: what vLLM's own Ray executor misses on a CPU.

Ray counts what it is told, so a host "with one GPU" is a host for one rank. Everything else is vLLM's: executor, actors, queues.
"""

from vllm.platforms.cpu import CpuPlatform


class CpuWithRay(CpuPlatform):
    ray_device_key = "GPU"


def register() -> str:
    """Entry point `vllm.platform_plugins`."""
    return "ray_platform.CpuWithRay"
