"""A line on the terminal that shows the progress of a tool."""

import sys
import threading
import time
from typing import Any, TextIO

from keras_mp.support import text_tables

# Seconds until the line is shown, and between updates.
_PATIENCE, _PERIOD = 5.0, 1.0


class Progress:
    """Shows the progress of a tool on stderr, if that is a terminal.

    The line appears after five seconds. The tool's work is done inside of this context manager, and
    calls `begin` for each of its parts.

    Args:
        tool: str. The name of the tool, with which the line begins.
        parts: int. The number of parts of the work; None if it is unknown.

    Example:

    >>> from keras_mp.support.progress import Progress
    >>> with Progress("compare", parts=2) as progress:
    ...     progress.begin("in float32")
    ...     progress.text()
    'compare: in float32 (1 of 2), 0 s'
    """

    def __init__(self, tool: str, parts: int | None) -> None:
        self._tool, self._parts = tool, parts
        self._part, self._number = "", 0
        self._started = time.monotonic()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, part: str) -> None:
        """Begins the next part.

        Args:
            part: str. Its name.
        """
        self._part, self._number = part, self._number + 1

    def text(self) -> str:
        """Returns the line as of now."""
        seconds = time.monotonic() - self._started
        total = "" if self._parts is None else f" of {self._parts}"
        return f"{self._tool}: {self._part} ({self._number}{total}), {seconds:.0f} s"

    def __enter__(self) -> "Progress":
        if sys.stderr is not None and sys.stderr.isatty():
            self._thread = threading.Thread(target=self._show, args=(sys.stderr,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self, terminal: TextIO) -> None:
        wait = _PATIENCE
        while not self._stopped.wait(wait):
            terminal.write(f"\r{self.text()[: text_tables.WIDTH]:{text_tables.WIDTH}}")
            terminal.flush()
            wait = _PERIOD
        if wait == _PERIOD:
            terminal.write(f"\r{'':{text_tables.WIDTH}}\r")
            terminal.flush()
