"""Compares what the ranks of a job are about to train, before they do. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from bagua_ext.interop.listing import Listing

_MOST_ROWS = 40
_RELATIVE = 1e-6  # of settings: some are stored as float32
NOTHING = "nothing"


@dataclass(frozen=True)
class Described:
    """One tensor as a rank has it."""

    own: str
    dtype: str
    shape: tuple[int, ...]  # in the model's own layout
    torch_shape: tuple[int, ...]
    trainable: bool


@dataclass(frozen=True)
class Report:
    """What one rank tells the others. ``framework`` is "torch", "keras on tensorflow", ..."""

    framework: str
    tensors: dict[str, Described] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # compared where both ranks know them
    problems: list[str] = field(default_factory=list)  # with a rank of another framework
    error: str = ""  # the rank cannot take part at all
    tied: int = 0  # optimizers that the rank has tied so far


def report_of(framework: str, listing: Listing, optimizer: dict[str, Any]) -> Report:
    """Returns the report of a rank with these tensors and optimizer settings."""
    tensors = {
        entry.name: Described(
            entry.own, entry.dtype, entry.own_shape, entry.layout.shape, entry.trainable
        )
        for entry in listing.entries
    }
    settings = listing.settings | optimizer
    return Report(framework, tensors, settings, listing.facts, listing.problems)


def torch_is_canonical(reports: Iterable[Report]) -> bool:
    """True if the job's tensors lie as torch's: as soon as one rank is a plain torch model."""
    return any(report.framework == "torch" for report in reports)


def is_mixed(reports: Sequence[Report]) -> bool:
    """True if torch's and Keras's models are in one job."""
    return len({report.framework == "torch" for report in reports}) > 1


# ---- Differences --------------------------------------------------------------------------------

Row = tuple[str, list[str]]  # what is compared, and how each rank has it


def differences(reports: Sequence[Report], allow: Iterable[str] = ()) -> list[Row]:
    """Returns what is not the same on all ranks, but for names that a pattern of ``allow`` fits."""
    torchs = torch_is_canonical(reports)
    bare, labelled = (
        [{n: _shown(t, torchs, own) for n, t in r.tensors.items()} for r in reports]
        for own in (False, True)
    )
    rows = _compared(bare, labelled, needed=True)
    settings = [report.settings for report in reports]
    rows += _compared(settings, settings, needed=True)
    facts = [report.facts for report in reports]
    rows += _compared(facts, facts, needed=False)
    allow = list(allow)
    return [row for row in rows if not any(fnmatchcase(row[0], pattern) for pattern in allow)]


def _shown(tensor: Described, torchs: bool, with_own: bool) -> str:
    shape = tensor.torch_shape if torchs else tensor.shape
    text = f"{tensor.dtype}[{', '.join(map(str, shape))}]"
    text += "" if tensor.trainable else " not trained"
    return f"{text} ({tensor.own})" if with_own else text


def _compared(
    values: Sequence[dict[str, Any]], labels: Sequence[dict[str, Any]], needed: bool
) -> list[Row]:
    """Returns rows of ``labels`` where ``values`` differ; ``needed``: or where one is missing."""
    rows: list[Row] = []
    for name in sorted({name for own in values for name in own}):
        known = [own[name] for own in values if name in own]
        if needed and len(known) < len(values) or not all(_same(known[0], v) for v in known):
            rows.append((name, [_text(own[name]) if name in own else NOTHING for own in labels]))
    return rows


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        numbers = (int, float)
        return (
            isinstance(a, numbers)
            and isinstance(b, numbers)
            and math.isclose(a, b, rel_tol=_RELATIVE)
        )
    return a == b


def _text(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)


# ---- The table ----------------------------------------------------------------------------------


def table(rows: Sequence[Row], reports: Sequence[Report], ranks: Sequence[int]) -> str:
    """Returns ``rows`` as text; ranks of one framework that agree on all rows share a column."""
    columns: dict[tuple[str, ...], list[int]] = {}
    for place, report in enumerate(reports):
        cells = tuple(values[place] for _, values in rows)
        columns.setdefault((report.framework, *cells), []).append(ranks[place])
    heads = [f"{_ranks(members)} ({key[0]})" for key, members in columns.items()]
    lines = [["", *heads]]
    for number, (name, _) in enumerate(rows[:_MOST_ROWS]):
        lines.append([name, *(key[number + 1] for key in columns)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    if len(rows) > _MOST_ROWS:
        text.append(f"and {len(rows) - _MOST_ROWS} more")
    return "\n".join(line.rstrip() for line in text)


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def complaint(reports: Sequence[Report], ranks: Sequence[int], allow: Iterable[str] = ()) -> str:
    """Returns why the ranks cannot train together; "" if they can. The same text on every rank."""
    errors = [(rank, r) for rank, r in zip(ranks, reports, strict=True) if r.error]
    if errors:
        lines = [f"rank {rank} ({report.framework}): {report.error}" for rank, report in errors]
        return "interop.tie failed on some ranks.\n" + "\n".join(lines)
    unknown = [(rank, p) for rank, r in zip(ranks, reports, strict=True) for p in r.problems]
    if is_mixed(reports) and unknown:
        lines = [f"rank {rank}: {problem}" for rank, problem in unknown]
        return "interop.tie: torch and Keras cannot share these layers.\n" + "\n".join(lines)
    rows = differences(reports, allow)
    if not rows:
        return ""
    return (
        "interop.tie: the ranks' models or optimizers differ.\n"
        f"{table(rows, reports, ranks)}\n"
        "Build the same model and optimizer on all ranks. names= pairs layers that are named "
        "differently, allow= lets a difference pass, e.g. allow=['*.padding']."
    )
