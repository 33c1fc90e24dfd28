"""Candidates of a one-tensor allreduce: input, call and check put together."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from bagua_ext.bench.measure import Candidate, Pattern


def averaging(
    name: str, group: str, pattern: Pattern, data: torch.Tensor, run: Callable[[], object]
) -> Candidate:
    """``run`` replaces ``data`` by its average over ranks."""
    given = torch.from_numpy(pattern.input)
    return Candidate(
        name,
        prepare=lambda: data.copy_(given),
        run=run,
        check=lambda _: pattern.check_average(f"{name}, {group}", data),
    )


def gloo_sum(group: str, pattern: Pattern, data: torch.Tensor) -> Candidate:
    """Gloo cannot average; it is given the sum alone, without a division behind it."""
    given = torch.from_numpy(pattern.input)
    return Candidate(
        "gloo",
        prepare=lambda: data.copy_(given),
        run=lambda: dist.all_reduce(data),
        check=lambda done: pattern.check_sum(f"gloo, {group}", data, done),
    )
