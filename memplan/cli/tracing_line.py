"""A line on a terminal that says what is traced, which takes some seconds, and for how long already."""

import logging
import sys
from threading import Event, Thread
from time import monotonic
from typing import Final

PERIOD_S: Final = 1.0
"""How often the line is written; what takes less time writes none."""


class TracingLine(logging.Handler):
    """Handles the messages of `memplan.tracing.cache.LOGGER`: one when a trace begins, one when it ends."""

    def __init__(self) -> None:
        super().__init__()
        self._ended, self._writer = Event(), Thread()

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("tracing"):
            self._ended = Event()
            self._writer = Thread(target=_write, args=(record.getMessage(), self._ended), daemon=True)
            self._writer.start()
        else:
            self._ended.set()
            self._writer.join()


def show_tracing() -> None:
    """Show the line on stderr."""
    logger = logging.getLogger("memplan.tracing")
    logger.addHandler(TracingLine())
    logger.setLevel(logging.INFO)


def _write(text: str, ended: Event) -> None:
    start = monotonic()
    while not ended.wait(PERIOD_S):
        _print(f"{text} ... {monotonic() - start:.0f} s")
    _print("")


def _print(text: str) -> None:
    """Write a text in the place of the line."""
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
