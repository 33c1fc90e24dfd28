"""Starts the ranks of a bench and brings back what they measured."""

from __future__ import annotations

import bagua_ext
from bagua_ext.bench.options import Options
from bagua_ext.bench.report import Report


def measure_on_ranks(options: Options) -> Report:
    """Runs the case on ``options.np`` new processes; the report is rank 0's.

    Raises:
        RuntimeError: if a rank fails, a wrong result included; the text has its traceback.
    """
    report: Report = bagua_ext.run(_work, (options,), np=options.np)[0]
    return report


def _work(options: Options) -> Report:
    """Imported by name in a rank; torch is loaded there and not in the parent."""
    from bagua_ext.bench.job import work

    return work(options)
