"""`eyas extract`: from a token dataset to a state store, through the gates.

plan (preflight) -> rehearse, before long loads -> load -> parity -> bulk
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from eyas.base.check import Check
from eyas.base.settings import takes
from eyas.engines.base import Progress
from eyas.extraction.bulk import ExtractReport, run
from eyas.extraction.plan import plan
from eyas.extraction.rehearse import rehearse
from eyas.extraction.settings import ExtractSettings
from eyas.gates.preflight import refuse_failures
from eyas.target.model_files import ModelInfo

log = logging.getLogger(__name__)

#: Weights of more bytes are rehearsed first: at 1 GB/s from a disk they load for minutes.
REHEARSE_BYTES = 150 * 10**9


@takes(ExtractSettings)
def extract(
    settings: ExtractSettings,
    *,
    on_preflight: Callable[[list[Check]], None] | None = None,
    on_stage: Callable[[str], None] | None = None,
    on_progress: Callable[[Progress, int, int], None] | None = None,
) -> ExtractReport:
    """Extract hidden states of chosen layers for every sample of a dataset.

    Args:
        on_preflight: called with the preflight table. on_stage: called with a line for each stage that begins.
        on_progress: called with (progress, samples to do, tokens to do) after each batch.

    Returns:
        ExtractReport; `exit_code` tells a complete run (0) from one with samples in the ledger (20) or stopped (130).

    Raises:
        InputError, PreflightError, FolderConflictError, ParityError, ContractError, DiskFullError, EngineError, StoreError:
        each says what was found, where, and what to do. Finished shards are always kept.
    """
    say = on_stage or log.info
    say("preflight")
    job = plan(settings)
    if on_preflight is not None:
        on_preflight(job.checks)
    refuse_failures(job.checks)
    if wants_rehearsal(settings, job.info):
        say("rehearsal")
        rehearsed = rehearse(settings, on_stage=lambda line: say(f"rehearsal: {line}"))
        say(f"rehearsal passed in {rehearsed.seconds:.0f} s: {rehearsed.path}")
    return run(job, on_stage=say, on_progress=on_progress)


def wants_rehearsal(settings: ExtractSettings, info: ModelInfo) -> bool:
    """Whether gate 2 runs before the load: engine `vllm`, and a load that takes longer than the rehearsal by far."""
    if settings.engine != "vllm" or settings.rehearsal == "never" or settings.load_format == "dummy":
        return False
    return settings.rehearsal == "always" or info.weight_bytes > REHEARSE_BYTES
