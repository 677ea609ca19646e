"""vLLM's CPU collectives without its shared memory, in which ranks of one machine meet: through torch.distributed, as between hosts."""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class ByNetwork(CpuCommunicator):
    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False
