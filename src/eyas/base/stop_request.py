"""The first Ctrl-C or SIGTERM asks for an ordered stop, the second one does not wait."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)


class StopRequest(threading.Event):
    """Set when the user asked for an ordered stop. `in_bulk`: there are open shards to finish."""

    in_bulk = False


@contextmanager
def stoppable() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM during bulk into an ordered stop; a second one, or one before bulk, stops at once."""
    stop = StopRequest()

    def on_signal(number: int, _frame: Any) -> None:
        if stop.is_set() or not stop.in_bulk:
            raise KeyboardInterrupt
        log.warning("%s: finishing the open shard; once more stops at once", signal.Signals(number).name)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
