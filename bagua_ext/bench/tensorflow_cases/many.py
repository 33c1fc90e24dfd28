"""Many small tensors: each reduced by itself, and all in one operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

import bagua_ext.tensorflow as bagua
from bagua_ext.bench import mwms
from bagua_ext.bench.job import Job
from bagua_ext.bench.measure import Candidate, Pattern
from bagua_ext.bench.report import Report, Row

PEER = "mwms"
_Tensors = Sequence[tf.Tensor]


class _Ways:
    """The ways to reduce the same tensors."""

    def __init__(self, job: Job) -> None:
        tensors, numel = job.options.tensors, job.options.numel
        self._pattern = Pattern(tensors * numel, job.rank, job.size)
        self.given = [tf.constant(part) for part in self._pattern.input.reshape(tensors, numel)]
        self._names = [f"many.{index}" for index in range(tensors)]

    def one_by_one(self) -> _Tensors:
        return [
            bagua.allreduce(tensor, name=name)
            for tensor, name in zip(self.given, self._names, strict=True)
        ]

    def grouped(self) -> _Tensors:
        return bagua.grouped_allreduce(self.given, name="many")

    def candidate(self, name: str, reduce: Callable[[], _Tensors]) -> Candidate:
        results: list[tf.Tensor] = []

        def run() -> None:
            results[:] = reduce()

        def check(done: int) -> None:
            joined = tf.concat(results, axis=0)
            if name == PEER:
                self._pattern.check_sum(name, joined, done)
            else:
                self._pattern.check_average(name, joined)

        return Candidate(name, prepare=results.clear, run=run, check=check)


def _traced(reduce: Callable[[], _Tensors]) -> Callable[[], _Tensors]:
    return tf.function(reduce, autograph=False)


def measure(job: Job) -> Report:
    """Samples of every way."""
    ways = _Ways(job)
    candidates = [
        ways.candidate("bagua, one by one", ways.one_by_one),
        ways.candidate("bagua, one by one in a tf.function", _traced(ways.one_by_one)),
        ways.candidate("bagua, grouped", ways.grouped),
        ways.candidate("bagua, grouped in a tf.function", _traced(ways.grouped)),
    ]
    notes = []
    if job.compares("mwms"):
        candidates.append(ways.candidate(PEER, mwms.summing(job.strategy, ways.given)))
        notes.append("mwms sums all tensors in one call of a tf.function and packs them itself.")
    samples = job.alternate(candidates, job.rounds(20))
    group = f"{job.options.tensors} x {job.options.numel}"
    rows = [Row(group, name, seconds) for name, seconds in samples.items()]
    return Report("many", job.size, (PEER,), rows, notes)
