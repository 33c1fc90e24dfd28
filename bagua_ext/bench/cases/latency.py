"""Time of one small synchronous allreduce, the next one started when it is done."""

from __future__ import annotations

import torch

import bagua_ext.torch as bagua
from bagua_ext.bench.engine import Allreduce, FlatBucket
from bagua_ext.bench.external import External, run_on_rank_zero
from bagua_ext.bench.job import Job
from bagua_ext.bench.measure import Pattern, repeats_within
from bagua_ext.bench.report import Report, Row
from bagua_ext.bench.sizes import format_size
from bagua_ext.bench.ways import averaging, gloo_sum

_REPEATS = 64


def _measure_size(size: int, externals: list[External], job: Job) -> list[Row]:
    count, group = size // 4, format_size(size)
    rounds, repeats = job.rounds(30), repeats_within(_REPEATS, job.size)
    pattern = Pattern(count, job.rank, job.size)
    tensor, raw, peer = (torch.empty(count) for _ in range(3))
    bucket = FlatBucket(f"latency.bucket.{size}", count)
    flat, allreduce = torch.from_numpy(bucket.data), Allreduce(f"latency.raw.{size}", raw.numpy())

    candidates = [
        averaging(
            "bagua, Python",
            group,
            pattern,
            tensor,
            lambda: bagua.allreduce_(tensor, name=f"latency.{size}"),
        ),
        averaging("bagua, C call", group, pattern, raw, allreduce.run),
        averaging("bagua, flat bucket", group, pattern, flat, bucket.exchange),
    ]
    if job.compares("gloo"):
        candidates.append(gloo_sum(group, pattern, peer))
    samples = job.alternate(candidates, rounds, repeats)
    for external in externals:
        samples[external.name] = run_on_rank_zero(external, size, rounds, repeats, job)
    candidates.clear()
    bucket.drop()
    return [Row(group, name, seconds, size) for name, seconds in samples.items()]


def measure(job: Job) -> Report:
    """Samples of every candidate at every size."""
    names = [name for name in job.options.compare if name != "gloo"]
    externals = [External.find(name, job.options) for name in names]
    rows = [row for size in job.options.sizes for row in _measure_size(size, externals, job)]
    notes = ["The C call is made through cffi, which adds about 0.2 us to it."]
    return Report("latency", job.size, job.options.compare, rows, notes)
