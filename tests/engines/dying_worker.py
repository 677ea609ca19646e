"""A capture worker that dies hard on request, right after its last words: in Python's logging, in C, on stdout."""

from __future__ import annotations

import ctypes
import logging
import os

from eyas.engines.vllm_worker import CaptureWorker


class DyingWorker(CaptureWorker):
    def die(self, rank: int) -> int:
        if self.rank == rank:
            ctypes.CDLL(None).printf(b"last words in C of %d, no newline", rank)
            logging.getLogger("eyas.engines.dying").debug("last words of rank %d", rank)
            os._exit(1)
        return self.rank

    def crash(self, rank: int) -> int:
        if self.rank == rank:
            ctypes.string_at(0)
        return self.rank
