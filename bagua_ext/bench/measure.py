"""Rounds in which the candidates take turns, each result checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

PATTERN = 8191  # prime, so that no chunk of a power of two looks like another
_TOLERANCE = 1e-5  # relative; float32 sums of up to _MAX_GROWTH in value stay far below it
_MAX_GROWTH = 1e28


class WrongResultError(RuntimeError):
    """A candidate computed something else than the reduction asked for."""


@dataclass(frozen=True)
class Candidate:
    """One way to do the operation that is measured.

    ``prepare`` writes this rank's input; ``run`` does the operation once, and where it is in place,
    on its own result when a round repeats it; ``check`` is given how often it ran and raises
    WrongResultError.
    One run is ``operations`` of them in a row, which share its time evenly.
    """

    name: str
    prepare: Callable[[], None]
    run: Callable[[], object]
    check: Callable[[int], None]
    operations: int = 1


def alternate(
    candidates: Sequence[Candidate],
    meet: Callable[[], None],
    *,
    rounds: int,
    warmup: int,
    repeats: int = 1,
) -> dict[str, list[float]]:
    """Seconds of each operation on this rank, by candidate: ``rounds`` times ``repeats`` of them.

    In every round each candidate has its turn, beginning with another one each time. ``meet`` is a
    barrier; all ranks call this with equal arguments.

    Raises:
        WrongResultError: if a check fails, in warm-up rounds too.
    """
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for index in range(warmup + rounds):
        first = index % len(candidates)
        for candidate in [*candidates[first:], *candidates[:first]]:
            candidate.prepare()
            meet()
            taken = _timed(candidate.run, repeats)
            candidate.check(repeats)
            if index >= warmup:
                seconds[candidate.name] += [each / candidate.operations for each in taken]
    return seconds


def _timed(run: Callable[[], object], repeats: int) -> list[float]:
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken


def default_rounds(size: int) -> int:
    """Turns that allreduces of ``size`` bytes get unless the user says how many."""
    return 15 if size >= 16 << 20 else 30


def repeats_within(wanted: int, size: int) -> int:
    """At most ``wanted``, and so few that sums of sums over ``size`` ranks stay finite."""
    growth, repeats = float(max(size, 1)), 1
    while repeats < wanted and growth * size < _MAX_GROWTH:
        growth *= size
        repeats += 1
    return repeats


class Pattern:
    """An input that differs in every rank and from element to element, and its reduction."""

    def __init__(self, count: int, rank: int, size: int) -> None:
        base = (np.arange(count) % PATTERN + 1).astype(np.float32)
        self.input: np.ndarray = base * np.float32(rank + 1)
        self._average = base * np.float32((size + 1) / 2)
        self._size = size

    def check_average(self, name: str, data: ArrayLike) -> None:
        """Raises WrongResultError unless ``data`` is the average over ranks."""
        self._check(name, data, 1.0)

    def check_sum(self, name: str, data: ArrayLike, repeats: int) -> None:
        """Raises WrongResultError unless ``data`` was summed over ranks ``repeats`` times."""
        self._check(name, data, float(self._size) ** repeats)

    def _check(self, name: str, data: ArrayLike, scale: float) -> None:
        got = np.asarray(data)
        wanted = self._average if scale == 1.0 else self._average * np.float32(scale)
        is_right = np.abs(got - wanted) <= _TOLERANCE * wanted  # False for what is no number
        if is_right.all():
            return
        wrong = np.flatnonzero(~is_right)
        index = int(wrong[0])
        raise WrongResultError(
            f"{name}: {len(wrong)} of {len(got)} elements are wrong; element {index} is "
            f"{got[index].item()}, not {wanted[index].item()}"
        )
