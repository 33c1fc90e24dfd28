"""Allreduce of one tensor over message sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

import bagua_ext.torch as bagua
from bagua_ext.bench.engine import FlatBucket
from bagua_ext.bench.external import External, run_on_rank_zero
from bagua_ext.bench.job import Job
from bagua_ext.bench.measure import Candidate, Pattern, default_rounds, repeats_within
from bagua_ext.bench.report import Report, Row
from bagua_ext.bench.shared import SharedMemory
from bagua_ext.bench.sizes import format_size
from bagua_ext.bench.ways import averaging, gloo_sum

_BLOCK = 64 << 10  # elements: 256 KiB of each of two buffers stay in a second-level cache
_BLOCKS = 3  # turns of a library that has to be launched by itself
BARE = "bare loop"


class BareLoop:
    """What the memory allows: each rank averages its share of all ranks' shared buffers in place.

    Element by element it reads every buffer once and writes every buffer once, nothing else.
    """

    def __init__(self, count: int, job: Job) -> None:
        memory = SharedMemory(4 * count * job.size)
        views = [memory.floats(4 * count * rank, count) for rank in range(job.size)]
        buffers = list(map(torch.from_numpy, views))
        first, last = count * job.rank // job.size, count * (job.rank + 1) // job.size
        shares = [buffer[first:last].split(_BLOCK) for buffer in buffers]
        self._blocks = list(zip(*shares, strict=True)) if last > first else []
        self._meet = job.meet
        self._average = self._average_two if job.size == 2 else self._average_any
        self.data = buffers[job.rank]

    def exchange(self) -> None:
        """Every rank's ``data`` becomes the average."""
        for blocks in self._blocks:
            self._average(blocks)
        self._meet()

    @staticmethod
    def _average_two(blocks: tuple[torch.Tensor, ...]) -> None:
        torch.lerp(blocks[0], blocks[1], 0.5, out=blocks[0])
        blocks[1].copy_(blocks[0])

    @staticmethod
    def _average_any(blocks: tuple[torch.Tensor, ...]) -> None:
        first, *others = blocks
        for other in others:
            first.add_(other)
        first.div_(len(blocks))
        for other in others:
            other.copy_(first)


@contextlib.contextmanager
def _candidates(size: int, job: Job) -> Iterator[list[Candidate]]:
    """The ways that run inside these processes."""
    count, group = size // 4, format_size(size)
    pattern = Pattern(count, job.rank, job.size)
    bucket = FlatBucket(f"bench.bucket.{size}", count)
    flat, bare = torch.from_numpy(bucket.data), BareLoop(count, job)
    tensor, peer = torch.empty(count), torch.empty(count)

    candidates = [
        averaging("bagua, flat bucket", group, pattern, flat, bucket.exchange),
        averaging(
            "bagua, tensor",
            group,
            pattern,
            tensor,
            lambda: bagua.allreduce_(tensor, name=f"bench.tensor.{size}"),
        ),
        averaging(BARE, group, pattern, bare.data, bare.exchange),
    ]
    if job.compares("gloo"):
        candidates.append(gloo_sum(group, pattern, peer))
    yield candidates
    candidates.clear()
    bucket.drop()


def _measure_size(size: int, externals: list[External], job: Job) -> list[Row]:
    rounds = job.rounds(default_rounds(size))
    repeats = repeats_within(1 if size >= 1 << 20 else 16, job.size)
    blocks = min(_BLOCKS, rounds) if externals else 1
    samples: dict[str, list[float]] = {}
    with _candidates(size, job) as candidates:
        for block in range(blocks):
            part = rounds * (block + 1) // blocks - rounds * block // blocks
            measured = job.alternate(candidates, part, repeats)
            for external in externals:
                measured[external.name] = run_on_rank_zero(external, size, part, repeats, job)
            for name, seconds in measured.items():
                samples.setdefault(name, []).extend(seconds)
    return [Row(format_size(size), name, seconds, size) for name, seconds in samples.items()]


def measure(job: Job) -> Report:
    """Samples of every candidate at every size."""
    names = [name for name in job.options.compare if name != "gloo"]
    externals = [External.find(name, job.options) for name in names]
    rows = [row for size in job.options.sizes for row in _measure_size(size, externals, job)]
    notes = ["Gloo, MPI and Horovod sum; the others average. x N: times as fast as N."]
    notes += [f"{external.name} runs in processes of its own, in turns." for external in externals]
    return Report("allreduce", job.size, (*job.options.compare, BARE), rows, notes)
