"""Progress of a training run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

_LINES = 20  # how many lines a run prints where there is no terminal
_WIDTH = 30


class Progress:
    """Counts ``total`` steps; silent where ``enabled`` is false, so every rank can call it."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._total = total
        self._done = 0
        self._enabled = enabled
        self._terminal = enabled and sys.stderr.isatty()
        self._bar = tqdm(total=total, unit="step") if self._terminal and tqdm else None

    def advance(self, text: str) -> None:
        """Ends one step; ``text`` stands behind the bar."""
        self._done += 1
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif self._terminal:
            print(f"\r{self._line(text)}", end="", file=sys.stderr, flush=True)
        elif self._done * _LINES // self._total != (self._done - 1) * _LINES // self._total:
            print(self._line(text), flush=True)

    def close(self) -> None:
        """Leaves the bar as it is and ends its line."""
        if self._bar is not None:
            self._bar.close()
        elif self._terminal:
            print(file=sys.stderr, flush=True)

    def _line(self, text: str) -> str:
        bar = "#" * (self._done * _WIDTH // self._total)
        return f"[{bar:<{_WIDTH}}] {self._done}/{self._total}  {text}"
