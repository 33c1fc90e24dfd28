"""Candidates of a one-tensor allreduce with TensorFlow: input, call and check put together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from bagua_ext.bench import mwms
from bagua_ext.bench.measure import Candidate, Pattern


class _Result:
    """What a call returned last."""

    def __init__(self, reduce: Callable[[], tf.Tensor]) -> None:
        self._reduce = reduce
        self.value: tf.Tensor | None = None

    def drop(self) -> None:
        self.value = None

    def compute(self) -> None:
        self.value = self._reduce()


def averaging(
    name: str,
    group: str,
    pattern: Pattern,
    reduce: Callable[[], tf.Tensor],
    operations: int = 1,
) -> Candidate:
    """``reduce`` returns the average of the pattern's input over ranks, in ``operations`` steps."""
    result = _Result(reduce)
    return Candidate(
        name,
        prepare=result.drop,
        run=result.compute,
        check=lambda _: pattern.check_average(f"{name}, {group}", result.value),
        operations=operations,
    )


def averaging_array(
    name: str, group: str, pattern: Pattern, data: np.ndarray, run: Callable[[], object]
) -> Candidate:
    """``run`` replaces ``data`` by its average over ranks."""
    return Candidate(
        name,
        prepare=lambda: np.copyto(data, pattern.input),
        run=run,
        check=lambda _: pattern.check_average(f"{name}, {group}", data),
    )


def mwms_sum(
    name: str, group: str, pattern: Pattern, strategy: mwms.Strategy, operations: int = 1
) -> Candidate:
    """The strategy is given the sum alone, without a division behind it."""
    result = _Result(mwms.summing(strategy, tf.constant(pattern.input), operations))
    return Candidate(
        name,
        prepare=result.drop,
        run=result.compute,
        check=lambda _: pattern.check_sum(f"{name}, {group}", result.value, operations),
        operations=operations,
    )
