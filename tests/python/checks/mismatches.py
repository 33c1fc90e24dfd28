"""Ranks that disagree: an error on every rank that names all of it, and a job that lives."""

from __future__ import annotations

import torch
from driver import raised, run_checks

import bagua_ext.torch as hvd


def odd() -> bool:
    """True on the one rank that differs."""
    return hvd.rank() == 1


def job_is_usable() -> None:
    got = hvd.allreduce(torch.ones(4), name="still usable", op=hvd.Sum)
    assert torch.equal(got, torch.full((4,), float(hvd.size())))


def check_shapes() -> None:
    for _ in range(3):
        x = torch.ones(64 if odd() else 128)
        call = lambda x=x: hvd.allreduce(x, name="layer.bias")  # noqa: E731
        raised(hvd.MismatchError, call, "layer.bias", "rank 1", "rank 0", "64", "128")
        job_is_usable()


def check_shapes_of_a_name_that_is_cached() -> None:
    for count in (8, 8, 8):
        hvd.allreduce(torch.ones(count), name="cached")
    x = torch.ones(9 if odd() else 8)
    call = lambda: hvd.allreduce(x, name="cached")  # noqa: E731
    raised(hvd.MismatchError, call, "cached", "rank 1", "[9]", "[8]")
    hvd.allreduce(torch.ones(8), name="cached")
    job_is_usable()


def check_dtypes() -> None:
    x = torch.ones(3, dtype=torch.float64 if odd() else torch.float32)
    call = lambda: hvd.allreduce(x, name="weight")  # noqa: E731
    raised(hvd.MismatchError, call, "weight", "rank 1", "float64", "float32")
    job_is_usable()


def check_reductions_and_factors() -> None:
    op = hvd.Max if odd() else hvd.Sum
    call = lambda: hvd.allreduce(torch.ones(3), name="reduced", op=op)  # noqa: E731
    raised(hvd.MismatchError, call, "reduced", "rank 1")
    factor = 2.0 if odd() else 1.0
    call = lambda: hvd.allreduce(torch.ones(3), name="scaled", prescale_factor=factor)  # noqa: E731
    raised(hvd.MismatchError, call, "scaled", "rank 1", "2")
    job_is_usable()


def check_operations() -> None:
    form = hvd.allgather if odd() else hvd.allreduce
    call = lambda: form(torch.ones(3), name="differs")  # noqa: E731
    raised(hvd.MismatchError, call, "differs", "rank 1", "allgather", "allreduce")
    job_is_usable()


def check_roots() -> None:
    call = lambda: hvd.broadcast(torch.ones(3), 1 if odd() else 0, name="rooted")  # noqa: E731
    raised(hvd.MismatchError, call, "rooted", "rank 1")
    job_is_usable()


def check_inner_dimensions() -> None:
    x = torch.ones(2, 3 if odd() else 4)
    for form, rows in ((hvd.allgather, x), (hvd.alltoall, x[:0])):
        call = lambda form=form, rows=rows: form(rows, name="rows")  # noqa: E731
        raised(hvd.MismatchError, call, "rows", "rank 1")
    job_is_usable()


def check_groups_of_different_length() -> None:
    tensors = [torch.ones(3)] * (2 if odd() else 3)
    call = lambda: hvd.grouped_allreduce(tensors, name="group")  # noqa: E731
    raised(hvd.MismatchError, call, "group", "rank 1")
    job_is_usable()


def check_a_name_that_is_in_flight() -> None:
    hvd.barrier()
    first = hvd.allreduce_async_(torch.ones(3), name="twice") if odd() else None
    if odd():
        raised(ValueError, lambda: hvd.allreduce_async_(torch.ones(3), name="twice"), "twice")
    hvd.barrier()
    hvd.synchronize(first or hvd.allreduce_async_(torch.ones(3), name="twice"))
    job_is_usable()


if __name__ == "__main__":
    run_checks(globals())
