"""bagua-run: starts the processes of a job, labels their output and ends them together.

Importing this package loads nothing of it; ``main_entry`` and ``run`` load what they need.
"""

from __future__ import annotations

from typing import Any

__all__ = ["main_entry", "run"]


def main_entry() -> int:
    """Runs ``bagua-run`` with ``sys.argv`` and returns its exit code."""
    from bagua_ext.runner.cli import main

    return main()


def __getattr__(name: str) -> Any:
    if name == "run":
        from bagua_ext.runner.api import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
