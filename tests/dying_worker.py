"""A capture worker that dies hard on request, right after its last words in Python's logging and in C."""

from __future__ import annotations

import ctypes
import logging
import os
import time

from eyas.engines.vllm.worker import CaptureWorker


class DyingWorker(CaptureWorker):
    def die(self) -> None:
        """Rank 1 leaves by `os._exit` after its last words; rank 0 crashes in native code a moment later."""
        if self.rank == 1:
            ctypes.CDLL(None).printf(b"last words in C of %d, no newline", self.rank)
            logging.getLogger("eyas.engines.dying").debug("last words of rank %d", self.rank)
            os._exit(1)
        time.sleep(0.2)
        ctypes.string_at(0)
