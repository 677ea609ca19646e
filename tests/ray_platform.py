"""vLLM's CPU platform with a Ray resource, as an out-of-tree platform: what vLLM's own Ray executor misses on a CPU.

Ray counts what it is told, so a host "with one GPU" is a host for one rank. The hosts of these tests are Ray nodes of one machine, so
ranks are told to meet by the network (gloo, TCP), as they would between hosts. Everything else is vLLM's: executor, actors, queues.
"""

from vllm.platforms.cpu import CpuPlatform


class CpuWithRay(CpuPlatform):
    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "ray_network.ByNetwork"


def register() -> str:
    """Entry point `vllm.platform_plugins`."""
    return "ray_platform.CpuWithRay"
