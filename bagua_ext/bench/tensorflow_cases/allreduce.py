"""Allreduce of one tensor over message sizes: eager, in a tf.function, and from C."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

import bagua_ext.tensorflow as bagua
from bagua_ext.bench.engine import Allreduce
from bagua_ext.bench.job import Job
from bagua_ext.bench.measure import Candidate, Pattern, default_rounds, repeats_within
from bagua_ext.bench.report import Report, Row
from bagua_ext.bench.sizes import format_size
from bagua_ext.bench.tensorflow_cases.ways import averaging, averaging_array, mwms_sum

EAGER, GRAPH, C_CALL = "bagua, eager", "bagua, tf.function", "bagua, C call"
PEER, PEER_GRAPH = "mwms, call", "mwms, tf.function"
# Seconds that an operation of ours may take longer than the C call.
_AIMS = {EAGER: 30e-6, GRAPH: 15e-6}


def _traced(given: tf.Tensor, chain: int, name: str) -> Callable[[], tf.Tensor]:
    @tf.function(autograph=False)
    def average() -> tf.Tensor:
        value = given
        for index in range(chain):
            value = bagua.allreduce(value, name=f"{name}.{index}")
        return value

    return average


def _candidates(size: int, chain: int, job: Job) -> list[Candidate]:
    """The ways to reduce ``size`` bytes; ``chain`` operations in a traced function."""
    count, group = size // 4, format_size(size)
    pattern = Pattern(count, job.rank, job.size)
    given, data = tf.constant(pattern.input), np.empty(count, np.float32)
    traced = _traced(given, chain, f"bench.graph.{size}")
    raw = Allreduce(f"bench.raw.{size}", data)

    candidates = [
        averaging(
            EAGER,
            group,
            pattern,
            lambda: bagua.allreduce(given, name=f"bench.eager.{size}"),
        ),
        averaging(GRAPH, group, pattern, traced, chain),
        averaging_array(C_CALL, group, pattern, data, raw.run),
    ]
    if job.compares("mwms"):
        for name, operations in ((PEER, 1), (PEER_GRAPH, chain)):
            candidates.append(mwms_sum(name, group, pattern, job.strategy, operations))
    return candidates


def _chain_of(size: int, ranks: int) -> int:
    """Operations of a traced function: enough for its call to weigh little, and finite sums."""
    return repeats_within(32 if size < 1 << 20 else 4, ranks)


def _measure_size(size: int, job: Job) -> list[Row]:
    chain = _chain_of(size, job.size)
    repeats = 1 if size >= 1 << 20 else 16
    candidates = _candidates(size, chain, job)
    samples = job.alternate(candidates, job.rounds(default_rounds(size)), repeats)
    group = format_size(size)
    return [Row(group, name, seconds, size) for name, seconds in samples.items()]


def _overhead(size: int, rows: Sequence[Row]) -> str:
    """How much longer than the C call our operations take at ``size``."""
    medians = {row.candidate: row.median for row in rows if row.group == format_size(size)}
    texts = [
        f"{name} {(medians[name] - medians[C_CALL]) * 1e6:.1f} us (aim: at most {aim * 1e6:.0f})"
        for name, aim in _AIMS.items()
    ]
    return f"Over the C call at {format_size(size)}: {', '.join(texts)}."


def measure(job: Job) -> Report:
    """Samples of every candidate at every size."""
    sizes = job.options.sizes
    rows = [row for size in sizes for row in _measure_size(size, job)]
    chains = sorted({_chain_of(size, job.size) for size in sizes})
    notes = [
        f"tf.function: {' or '.join(map(str, chains))} operations in one traced function, each on "
        "the result of the one before; the time is that of one.",
        _overhead(min(sizes), rows),
    ]
    if job.compares("mwms"):
        notes.append(
            "mwms sums, in a traced function always; call: with one operation in it. Its threads "
            "slow the small operations beside it: --compare none measures without them."
        )
    references = (PEER, PEER_GRAPH) if job.compares("mwms") else (C_CALL,)
    return Report("allreduce", job.size, references, rows, notes)
