"""A report as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from bagua_ext.bench.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_matplotlib() -> None:
    """Raises ValueError where there is none, before anything is measured."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")


def save(report: Report, title: str, path: Path) -> None:
    """Writes lines over message sizes where the rows have sizes, bars otherwise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    if len({row.bytes for row in report.rows if row.bytes}) > 1:
        _draw_lines(report, axes)
    else:
        _draw_bars(report, axes)
    axes.set_title(f"{report.case}, {report.size} ranks\n{title}", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_lines(report: Report, axes: Axes) -> None:
    for name in dict.fromkeys(row.candidate for row in report.rows):
        rows = [row for row in report.rows if row.candidate == name]
        sizes = [row.bytes for row in rows]
        axes.plot(sizes, [row.median * 1e3 for row in rows], marker="o", label=name)
        axes.fill_between(
            sizes, [row.median * 1e3 for row in rows], [row.p90 * 1e3 for row in rows], alpha=0.15
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("ms: median, shaded up to p90")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_bars(report: Report, axes: Axes) -> None:
    rows = report.rows[::-1]
    labels = [f"{row.candidate}\n{row.group}" for row in rows]
    medians = [row.median * 1e3 for row in rows]
    above = [max(0.0, row.p90 - row.median) * 1e3 for row in rows]
    axes.barh(range(len(rows)), medians, xerr=[[0.0] * len(rows), above], capsize=3)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.bar_label(axes.containers[-1], fmt="%.3g", padding=6, fontsize=8)
    axes.set_xlabel("ms: median, line up to p90")
