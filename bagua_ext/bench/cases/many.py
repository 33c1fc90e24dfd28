"""Many small tensors: each submitted by itself, all as one group, and packed by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import bagua_ext.torch as bagua
from bagua_ext.bench.job import Job
from bagua_ext.bench.measure import Candidate, Pattern
from bagua_ext.bench.report import Report, Row

PACKED = "gloo, packed by hand"


class _Ways:
    """The ways to reduce the same tensors."""

    def __init__(self, job: Job) -> None:
        tensors, self._numel = job.options.tensors, job.options.numel
        self._pattern = Pattern(tensors * self._numel, job.rank, job.size)
        self._inputs = list(torch.from_numpy(self._pattern.input).split(self._numel))
        self._tensors = [torch.empty(self._numel) for _ in range(tensors)]
        self._names = [f"many.{index}" for index in range(tensors)]

    def one_by_one(self) -> None:
        handles = [
            bagua.allreduce_async_(tensor, name=name)
            for tensor, name in zip(self._tensors, self._names, strict=True)
        ]
        for handle in handles:
            bagua.synchronize(handle)

    def grouped(self) -> None:
        bagua.grouped_allreduce_(self._tensors, name="many")

    def gloo_one_by_one(self) -> None:
        for pending in [dist.all_reduce(tensor, async_op=True) for tensor in self._tensors]:
            pending.wait()

    def gloo_coalesced(self) -> None:
        dist.all_reduce_coalesced(self._tensors)

    def gloo_packed(self) -> None:
        packed = torch.cat(self._tensors)
        dist.all_reduce(packed)
        torch._foreach_copy_(self._tensors, list(packed.split(self._numel)))

    def candidate(self, name: str, run: Callable[[], None]) -> Candidate:
        def check(done: int) -> None:
            result = torch.cat(self._tensors)
            if name.startswith("gloo"):
                self._pattern.check_sum(name, result, done)
            else:
                self._pattern.check_average(name, result)

        return Candidate(
            name,
            prepare=lambda: torch._foreach_copy_(self._tensors, self._inputs),
            run=run,
            check=check,
        )


def measure(job: Job) -> Report:
    """Samples of every way."""
    ways = _Ways(job)
    candidates = [
        ways.candidate("bagua, one by one", ways.one_by_one),
        ways.candidate("bagua, grouped", ways.grouped),
    ]
    if job.compares("gloo"):
        candidates += [
            ways.candidate("gloo, one by one", ways.gloo_one_by_one),
            ways.candidate("gloo, coalesced", ways.gloo_coalesced),
            ways.candidate(PACKED, ways.gloo_packed),
        ]
    samples = job.alternate(candidates, job.rounds(20))
    group = f"{job.options.tensors} x {job.options.numel}"
    rows = [Row(group, name, seconds) for name, seconds in samples.items()]
    return Report("many", job.size, (PACKED,), rows)
