"""How far a run is: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

SECONDS_PER_LINE = 5.0


class Progress:
    """Shows the steps that are done, and a line about the last of them.

    Args:
        first: Number of steps that were done before.
        total: Number of steps at the end of the run.
        shown: Whether to show anything; True on one rank.
    """

    def __init__(self, first: int, total: int, shown: bool) -> None:
        self._total = total
        self._bar: tqdm[None] | None = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=first, unit="step", dynamic_ncols=True)
        self._prints = shown and self._bar is None
        self._printed = time.monotonic()

    def advance(self, step: int, state: str) -> None:
        """Show that ``step`` steps are done, with the text ``state``."""
        if self._bar is not None:
            self._bar.set_postfix_str(state)
            self._bar.update(step - self._bar.n)
        elif self._prints and time.monotonic() - self._printed >= SECONDS_PER_LINE:
            self.say(f"step {step:5d} of {self._total}   {state}")
            self._printed = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(line)
        elif self._prints:
            print(line, flush=True)

    def close(self) -> None:
        """Close the bar, which stays on the terminal."""
        if self._bar is not None:
            self._bar.close()
