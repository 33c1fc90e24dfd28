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


def check_backwards_per_step() -> None:
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=2 if odd() else 1,
    )

    def step() -> None:
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    parts = ("backward_passes_per_step=2", "backward_passes_per_step=1", "rank 1", "rank 0")
    raised(hvd.MismatchError, step, *parts)
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


def check_a_handle_tells_and_leaves_its_tensor() -> None:
    x = torch.full((64 if odd() else 128,), 7.0)
    handle = hvd.allreduce_async_(x, name="in place")
    raised(hvd.MismatchError, lambda: hvd.synchronize(handle), "in place", "[64]", "[128]")
    assert torch.equal(x, torch.full_like(x, 7.0))
    assert hvd.poll(handle)
    job_is_usable()


def check_the_texts_are_the_same_everywhere() -> None:
    call = lambda: hvd.allreduce(torch.ones(2 + hvd.rank()), name="text")  # noqa: E731
    texts = hvd.allgather_object(str(raised(hvd.MismatchError, call, "text")))
    assert len(set(texts)) == 1, texts
    assert issubclass(hvd.MismatchError, hvd.HorovodInternalError)


def check_other_operations_in_flight_are_not_touched() -> None:
    good = [hvd.allreduce_async(torch.ones(100), name=f"good{i}", op=hvd.Sum) for i in range(5)]
    bad = hvd.allreduce_async(torch.ones(3 if odd() else 4), name="bad")
    good += [hvd.allreduce_async(torch.ones(9), name=f"good{i}", op=hvd.Sum) for i in range(5, 9)]
    raised(hvd.MismatchError, lambda: hvd.synchronize(bad), "bad")
    for handle in good:
        assert hvd.synchronize(handle).eq(hvd.size()).all()


def check_objects_and_parameters() -> None:
    call = lambda: hvd.broadcast_object(1, 1 if odd() else 0, name="object")  # noqa: E731
    raised(hvd.MismatchError, call, "object")
    job_is_usable()


def check_optimizer_arguments() -> None:
    sums, halves = {"op": hvd.Sum}, {"compression": hvd.Compression.bf16}
    for options, word in ((sums, "sum"), (halves, "bf16")):
        model = torch.nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, **(options if odd() else {}))
        error = raised(hvd.MismatchError, model(torch.ones(1, 3)).sum().backward, "rank 1")
        assert word in str(error).lower(), error
        del optimizer
    job_is_usable()


def check_layouts_of_parameters() -> None:
    model = torch.nn.Conv2d(3, 4, 3)
    model.to(memory_format=torch.channels_last if odd() else torch.contiguous_format)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    raised(hvd.MismatchError, model(torch.ones(1, 3, 4, 4)).sum().backward, "strides", "rank 1")
    del optimizer
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
