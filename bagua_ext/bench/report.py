"""What was measured: samples, the figures made of them, and the table that shows these."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """The samples of one candidate in one group of rows that are compared with each other.

    ``samples`` are seconds: of each operation, on the rank that took longest. ``bytes`` is the
    message of an allreduce, where a bandwidth makes sense.
    """

    group: str
    candidate: str
    samples: list[float]
    bytes: int | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def p90(self) -> float:
        """The smallest sample that nine tenths of all do not exceed."""
        return sorted(self.samples)[math.ceil(0.9 * len(self.samples)) - 1]

    def algorithm_bandwidth(self) -> float | None:
        """Message bytes per second at the median."""
        return self.bytes / self.median if self.bytes and self.median else None

    def bus_bandwidth(self, size: int) -> float | None:
        """Bytes that every rank has to move at least, per second; comparable across ``size``."""
        algorithm = self.algorithm_bandwidth()
        return None if algorithm is None else algorithm * 2 * (size - 1) / size


@dataclass(frozen=True)
class Report:
    """Rows of one case. Each is compared with the candidates in ``references``."""

    case: str
    size: int  # ranks
    references: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def speed(self, row: Row, reference: str) -> float | None:
        """How many times as fast as ``reference`` of its group ``row`` is; None without one."""
        for other in self.rows:
            if (other.group, other.candidate) == (row.group, reference) and row.median:
                return other.median / row.median
        return None

    def as_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "size": self.size,
            "notes": self.notes,
            "rows": [self._row_as_json(row) for row in self.rows],
        }

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        speeds = {reference: self.speed(row, reference) for reference in self.references}
        return {
            "group": row.group,
            "candidate": row.candidate,
            "bytes": row.bytes,
            "median_ms": row.median * 1e3,
            "p90_ms": row.p90 * 1e3,
            "algorithm_GBps": _giga(row.algorithm_bandwidth()),
            "bus_GBps": _giga(row.bus_bandwidth(self.size)),
            "speed": {name: speed for name, speed in speeds.items() if speed is not None},
            "note": row.note,
            "samples_ms": [sample * 1e3 for sample in row.samples],
        }

    def table(self) -> str:
        """The rows as text, one line each, columns that hold nothing left out."""
        speeds = [f"x {reference}" for reference in self.references]
        header = [self.case, "candidate", "median ms", "p90 ms", "alg GB/s", "bus GB/s"]
        lines = [[*header, *speeds, "rounds", "note"]]
        lines += [self._cells(row) for row in self.rows]
        return "\n".join([_aligned(lines), *self.notes])

    def _cells(self, row: Row) -> list[str]:
        bandwidths = [row.algorithm_bandwidth(), row.bus_bandwidth(self.size)]
        speeds = [self.speed(row, reference) for reference in self.references]
        return [
            row.group,
            row.candidate,
            f"{row.median * 1e3:.4g}",
            f"{row.p90 * 1e3:.4g}",
            *("" if value is None else f"{value / 1e9:.3g}" for value in bandwidths),
            *("" if value is None else f"{value:.3g}" for value in speeds),
            str(len(row.samples)),
            row.note,
        ]


def _giga(value: float | None) -> float | None:
    return None if value is None else value / 1e9


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns side by side: text to the left, figures to the right."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    padded = []
    for column in columns:
        width = max(map(len, column))
        is_text = column[0] == "note" or columns.index(column) < 2
        padded.append([cell.ljust(width) if is_text else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*padded, strict=True))
