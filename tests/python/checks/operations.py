"""Every operation on every dtype, against values computed from all ranks' inputs."""

from __future__ import annotations

import math
import operator
from functools import reduce

import torch
from driver import raised, run_checks

import bagua_ext.torch as hvd

SHAPES = [(), (0,), (1,), (5,), (3, 7, 11), (1000,), (65537,), (0, 3)]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*INTEGERS, *FLOATS, torch.bool]
OPS = {"Average": hvd.Average, "Sum": hvd.Sum, "Min": hvd.Min, "Max": hvd.Max}
OPS["Product"] = hvd.Product


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers that differ between neighbours and ranks, the same on every rank."""
    count = math.prod(shape)
    raw = (torch.arange(count) * 7 + rank * 5) % 11 % 3 + (torch.arange(count) + rank) % 2
    return (raw % 2 if dtype is torch.bool else raw).to(dtype).reshape(shape)


def everyone(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(rank, shape, dtype) for rank in range(hvd.size())]


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction in wide arithmetic, rounded once."""
    dtype = inputs[0].dtype
    if dtype is torch.bool:
        either = op in ("Sum", "Max")
        return reduce(operator.or_ if either else operator.and_, inputs)
    wide = [x.to(torch.float64 if dtype.is_floating_point else torch.int64) for x in inputs]
    if op in ("Min", "Max"):
        return reduce(torch.minimum if op == "Min" else torch.maximum, wide).to(dtype)
    if op == "Product":
        return reduce(operator.mul, wide).to(dtype)
    total = reduce(operator.add, wide)
    if op == "Sum":
        return total.to(dtype)
    rounding = None if dtype.is_floating_point else "trunc"
    return torch.div(total, len(inputs), rounding_mode=rounding).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    # Average of half-precision values may round once more than the reference.
    torch.testing.assert_close(got, want)


def check_place_in_the_job() -> None:
    assert hvd.is_initialized()
    assert 0 <= hvd.rank() < hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert hvd.global_process_set.ranks == list(range(hvd.size()))
    assert not hvd.mpi_built() and not hvd.gloo_built() and not hvd.nccl_built()


def check_allreduce_of_every_dtype_and_op() -> None:
    for dtype in DTYPES:
        for name, op in OPS.items():
            if dtype is torch.bool and name == "Average":
                continue
            for shape in ((5,), (1000,)):
                got = hvd.allreduce(values(hvd.rank(), shape, dtype), op=op)
                close(got, reduced(everyone(shape, dtype), name))


def check_allreduce_of_every_shape_in_every_form() -> None:
    for shape in SHAPES:
        want = reduced(everyone(shape, torch.float32), "Sum")
        for form in (hvd.allreduce_, hvd.allreduce):
            mine = values(hvd.rank(), shape, torch.float32)
            got = form(mine, name=f"form{shape}", op=hvd.Sum)
            close(got, want)
            assert (got is mine) == (form is hvd.allreduce_)
        for form in (hvd.allreduce_async_, hvd.allreduce_async):
            mine = values(hvd.rank(), shape, torch.float32)
            handle = form(mine, name=f"form{shape}", op=hvd.Sum)
            got = hvd.synchronize(handle)
            assert hvd.poll(handle) and hvd.synchronize(handle) is got
            close(got, want)


def check_allreduce_leaves_its_input_alone() -> None:
    mine = values(hvd.rank(), (100,), torch.float32)
    hvd.allreduce(mine, op=hvd.Sum)
    close(mine, values(hvd.rank(), (100,), torch.float32))


def check_names_in_different_order_on_each_rank() -> None:
    names = [f"t{i}" for i in range(20)]
    order = names[hvd.rank() :] + names[: hvd.rank()]
    for _ in range(3):
        inputs = {n: values(hvd.rank() + int(n[1:]), (64,), torch.float32) for n in order}
        handles = {n: hvd.allreduce_async_(inputs[n], name=n, op=hvd.Sum) for n in order}
        for n, handle in handles.items():
            all_of_it = [values(r + int(n[1:]), (64,), torch.float32) for r in range(hvd.size())]
            close(hvd.synchronize(handle), reduced(all_of_it, "Sum"))


def check_scale_factors() -> None:
    mine = values(hvd.rank(), (50,), torch.float32)
    got = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    close(got, reduced(everyone((50,), torch.float32), "Sum") * 1.5)
    close(hvd.allreduce(mine, average=False), reduced(everyone((50,), torch.float32), "Sum"))
    close(hvd.allreduce(mine, True), reduced(everyone((50,), torch.float32), "Average"))


def check_compression_narrows_on_the_way() -> None:
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        mine = values(hvd.rank(), (50,), torch.float32)
        got = hvd.allreduce(mine, op=hvd.Sum, compression=compression)
        assert got.dtype is torch.float32
        close(got, reduced(everyone((50,), torch.float32), "Sum"))


def check_tensors_that_are_not_contiguous() -> None:
    want = reduced(everyone((6, 4), torch.float32), "Sum")
    mine = values(hvd.rank(), (6, 4), torch.float32)
    transposed = mine.t().contiguous().t()
    assert not transposed.is_contiguous()
    close(hvd.allreduce(transposed, op=hvd.Sum), want)
    close(hvd.allreduce_(transposed, op=hvd.Sum), want)
    close(transposed, want)
    columns = torch.zeros(6, 8)
    columns[:, ::2] = mine
    hvd.synchronize(hvd.allreduce_async_(columns[:, ::2], op=hvd.Sum))
    close(columns[:, ::2], want)
    close(columns[:, 1::2], torch.zeros(6, 4))
    close(hvd.allgather(mine.t().contiguous().t()), torch.cat(everyone((6, 4), torch.float32)))


def check_grouped_allreduce() -> None:
    for dtype in (torch.float32, torch.int32, torch.bfloat16):
        shapes = [(5,), (), (3, 4), (1000,), (0,)]
        mine = [values(hvd.rank(), shape, dtype) for shape in shapes]
        want = [reduced(everyone(shape, dtype), "Sum") for shape in shapes]
        for got, expected in zip(hvd.grouped_allreduce(mine, op=hvd.Sum), want, strict=True):
            close(got, expected)
        hvd.grouped_allreduce_(mine, name="group", op=hvd.Sum)
        for got, expected in zip(mine, want, strict=True):
            close(got, expected)


def check_allgather_of_unequal_rows() -> None:
    for dtype in DTYPES:
        for rows in ([3] * hvd.size(), [r + 1 for r in range(hvd.size())], [0, 2, 0, 5]):
            mine = values(hvd.rank(), (rows[hvd.rank()], 3), dtype)
            want = torch.cat([values(r, (rows[r], 3), dtype) for r in range(hvd.size())])
            close(hvd.allgather(mine), want)
    pair = [values(hvd.rank(), (2,), torch.float32), values(hvd.rank(), (3, 2), torch.float32)]
    got = hvd.grouped_allgather(pair, name="pair")
    close(got[0], torch.cat(everyone((2,), torch.float32)))
    close(got[1], torch.cat(everyone((3, 2), torch.float32)))


def check_broadcast_from_every_root() -> None:
    for dtype in DTYPES:
        for root in range(hvd.size()):
            for shape in ((), (1000,), (0,)):
                want = values(root, shape, dtype)
                mine = values(hvd.rank(), shape, dtype)
                close(hvd.broadcast(mine, root), want)
                close(mine, values(hvd.rank(), shape, dtype))
                close(hvd.synchronize(hvd.broadcast_async(mine, root, "b")), want)
                close(hvd.broadcast_(mine, root), want)
                mine = values(hvd.rank(), shape, dtype)
                assert hvd.synchronize(hvd.broadcast_async_(mine, root, "b")) is mine
                close(mine, want)


def check_reducescatter_of_rows_that_do_not_divide() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in (torch.float32, torch.float16, torch.int64):
        for rows in (size * 2, size * 2 + 1, 1, 1001):
            own = [rows // size + (r < rows % size) for r in range(size)]
            for name in ("Average", "Sum", "Max"):
                mine = values(rank, (rows, 3), dtype)
                want = reduced(everyone((rows, 3), dtype), name)
                got = hvd.reducescatter(mine, op=OPS[name])
                close(got, want[sum(own[:rank]) : sum(own[: rank + 1])])
    pair = [values(rank, (4 * size,), torch.float32)] * 2
    want = reduced(everyone((4 * size,), torch.float32), "Average")
    for got in hvd.grouped_reducescatter(pair, name="pair"):
        close(got, want[rank * 4 : rank * 4 + 4])


def check_alltoall_even_and_with_splits() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in DTYPES:
        mine = values(rank, (2 * size, 3), dtype)
        parts = [values(r, (2 * size, 3), dtype)[2 * rank : 2 * rank + 2] for r in range(size)]
        close(hvd.alltoall(mine), torch.cat(parts))
    # Rank r sends (r + i) % 3 rows to rank i.
    splits = [[(r + i) % 3 for i in range(size)] for r in range(size)]
    mine = values(rank, (sum(splits[rank]), 2), torch.float32)
    got, received = hvd.alltoall(mine, torch.tensor(splits[rank]), name="splits")
    want = [
        values(r, (sum(splits[r]), 2), torch.float32).split(splits[r])[rank] for r in range(size)
    ]
    close(got, torch.cat(want))
    assert received.tolist() == [splits[r][rank] for r in range(size)]


def check_barrier() -> None:
    for _ in range(5):
        hvd.barrier()


def check_tensors_without_elements_and_scalars_everywhere() -> None:
    size, rank = hvd.size(), hvd.rank()
    for shape in ((0,), (0, 3), (3, 0)):
        empty = torch.empty(shape)
        rows = shape[0] // size + (rank < shape[0] % size)
        assert hvd.allreduce(empty).shape == shape
        assert hvd.broadcast(empty, size - 1).shape == shape
        assert hvd.allgather(empty).shape == (shape[0] * size, *shape[1:])
        assert hvd.reducescatter(empty).shape == (rows, *shape[1:])
        assert hvd.grouped_allreduce([empty, empty])[1].shape == shape
    for splits in (None, [0] * size):
        result = hvd.alltoall(torch.empty(0, 3), splits)
        got, received = (result, None) if splits is None else result
        assert got.shape == (0, 3) and (received is None or received.tolist() == splits)
    # A scalar counts as one row.
    gathered = hvd.allgather(torch.tensor(float(rank)))
    close(gathered, torch.arange(float(size)))
    close(hvd.allreduce(torch.tensor(float(rank)), op=hvd.Max), torch.tensor(size - 1.0))
    # Fewer rows than ranks.
    got = hvd.reducescatter(torch.ones(1, 2), op=hvd.Sum)
    close(got, torch.full((int(rank == 0), 2), float(size)))


def check_async_forms_of_the_exchanges() -> None:
    size, rank = hvd.size(), hvd.rank()
    x = values(rank, (2 * size, 3), torch.float32)
    handles = [
        hvd.allgather_async(x, name="a"),
        hvd.reducescatter_async(x, name="b", op=hvd.Sum),
        hvd.alltoall_async(x, name="c"),
        hvd.alltoall_async(x, torch.full((size,), 2), name="d"),
        hvd.grouped_allgather_async([x, x[:1]], name="e"),
        hvd.grouped_reducescatter_async([x, x], name="f"),
        hvd.grouped_allreduce_async([x, x[:1]], name="g", op=hvd.Sum),
    ]
    results = [hvd.synchronize(handle) for handle in reversed(handles)]
    g, f, e, (d, received), c, b, a = results
    assert all(hvd.poll(handle) for handle in handles)
    everything = everyone((2 * size, 3), torch.float32)
    total = reduced(everything, "Sum")
    own = slice(2 * rank, 2 * rank + 2)
    close(a, torch.cat(everything))
    close(b, total[own])
    close(c, torch.cat([part[own] for part in everything]))
    close(d, c)
    assert received.tolist() == [2] * size
    close(e[1], torch.cat([part[:1] for part in everything]))
    close(f[1], (total / size)[own])
    close(g[0], total)


def check_parameters_are_reduced_in_place_without_autograd() -> None:
    rank, size = hvd.rank(), hvd.size()
    parameter = torch.nn.Parameter(torch.full((4, 3), float(rank)))
    mean = (size - 1) / 2
    close(hvd.allreduce_(parameter).detach(), torch.full((4, 3), mean))
    assert parameter.grad_fn is None and parameter.is_leaf
    with torch.no_grad():
        parameter.fill_(rank)
    hvd.synchronize(hvd.broadcast_async_(parameter, size - 1, name="p"))
    close(parameter.detach(), torch.full((4, 3), size - 1.0))
    columns = torch.nn.Parameter(torch.full((4, 3), float(rank)).t())
    hvd.grouped_allreduce_([parameter, columns], name="pair", op=hvd.Sum)
    close(columns.detach(), torch.full((3, 4), size * mean))
    assert not hvd.synchronize(hvd.allreduce_async(parameter, name="copy")).requires_grad


def check_objects() -> None:
    mine = {"rank": hvd.rank(), "text": "x" * (100 * hvd.rank())}
    root = hvd.size() - 1
    assert hvd.broadcast_object(mine, root)["rank"] == root
    assert hvd.broadcast_object(None, root, name="nothing") is None
    big = hvd.broadcast_object({"x": torch.arange(300_000)} if hvd.rank() == root else None, root)
    assert torch.equal(big["x"], torch.arange(300_000))
    assert [item["rank"] for item in hvd.allgather_object(mine)] == list(range(hvd.size()))


def check_gradient_of_allreduce() -> None:
    rank, size = hvd.rank(), hvd.size()
    weight = torch.arange(5.0) + rank
    for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1.0 / size)):
        x = torch.randn(5, requires_grad=True)
        (hvd.allreduce(x, op=op) * weight).sum().backward()
        total = sum(torch.arange(5.0) + r for r in range(size))
        close(x.grad, total * factor)
    x = torch.full((3,), float(rank), requires_grad=True)
    hvd.allreduce(x, op=hvd.Max).sum().backward()
    close(x.grad, torch.full((3,), float(size) if rank == size - 1 else 0.0))


def check_gradients_of_the_other_operations() -> None:
    rank, size = hvd.rank(), hvd.size()
    scale = float(sum(r + 1 for r in range(size)))  # rank r weighs its loss with r + 1
    x = torch.randn(rank + 1, 2, requires_grad=True)
    (hvd.allgather(x, name="g") * (rank + 1)).sum().backward()
    close(x.grad, torch.full((rank + 1, 2), scale))
    x = torch.randn(4, requires_grad=True)
    (hvd.broadcast(x, size - 1) * (rank + 1)).sum().backward()
    close(x.grad, torch.full((4,), scale if rank == size - 1 else 0.0))
    x = torch.randn(size, 2, requires_grad=True)
    (hvd.reducescatter(x, op=hvd.Average) * (rank + 1)).sum().backward()
    close(x.grad, (torch.arange(1.0, size + 1) / size)[:, None].expand(size, 2))
    x = torch.randn(size, requires_grad=True)
    (hvd.alltoall(x) * (rank + 1)).sum().backward()
    close(x.grad, torch.arange(1.0, size + 1))
    pair = [torch.randn(3, requires_grad=True) for _ in range(2)]
    first, second = hvd.grouped_allreduce(pair, op=hvd.Sum)
    (first.sum() + 2 * second.sum()).backward()
    close(pair[1].grad, torch.full((3,), 2.0 * size))


def check_arguments_that_are_wrong_fail_at_the_call() -> None:
    x = torch.ones(3)
    raised(ValueError, lambda: hvd.allreduce(x, True, op=hvd.Sum), "both")
    raised(ValueError, lambda: hvd.allreduce(x, op=hvd.Adasum), "not there yet")
    raised(ValueError, lambda: hvd.allreduce(x, process_set="some"), "global_process_set")
    raised(ValueError, lambda: hvd.allreduce(torch.ones(3, dtype=torch.complex64)), "complex64")
    forms = (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_)
    forms += (hvd.allgather, hvd.allgather_async, hvd.reducescatter, hvd.alltoall)
    forms += (lambda x: hvd.broadcast(x, 0), lambda x: hvd.broadcast_(x, 0))
    forms += (lambda x: hvd.grouped_allreduce([x]), lambda x: hvd.grouped_allgather([x]))
    for form in forms:
        raised(TypeError, lambda form=form: form([1.0]), "list")
        raised(ValueError, lambda form=form: form(x.to_sparse()), "to_dense")
        raised(ValueError, lambda form=form: form(torch.ones(3, device="meta")), "meta")
        raised(ValueError, lambda form=form: form(torch.ones(3, dtype=torch.complex64)), "complex")
    raised(ValueError, lambda: hvd.allreduce(x > 0), "bool", "average")
    raised(ValueError, lambda: hvd.grouped_allreduce([]), "0 tensors")
    for form in (hvd.reducescatter, hvd.alltoall):
        raised(ValueError, lambda form=form: form(torch.tensor(1.0)), "scalar")
    raised(ValueError, lambda: hvd.allreduce(torch.ones([1] * 20)), "20 dimensions")
    raised(ValueError, lambda: hvd.broadcast(x, -1), "-1")
    raised(ValueError, lambda: hvd.alltoall(torch.ones(2), [-1] + [3] * (hvd.size() - 1)), "split")
    raised(ValueError, lambda: hvd.alltoall(x, torch.tensor([7] * hvd.size())), "splits")
    raised(ValueError, lambda: hvd.broadcast(x, 99), "99")
    raised(ValueError, lambda: hvd.init([0, 1]), "not supported")


def check_handles_may_be_dropped() -> None:
    for i in range(20):
        hvd.allreduce_async_(torch.ones(1000), name=f"dropped{i}")
        hvd.allgather_async(torch.ones(10), name=f"dropped gather{i}")
    hvd.barrier()
    close(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(hvd.size())))


def check_counters_count() -> None:
    before = hvd.counters()
    hvd.allreduce(torch.ones(1000))
    after = hvd.counters()
    assert after and all(isinstance(value, int) for value in after.values())
    assert after["operations"] == before["operations"] + 1
    assert {"negotiated_full", "negotiated_cached", "messages_sent", "bytes_sent_shm"} <= set(after)


def check_a_repeated_operation_is_known() -> None:
    """Named and unnamed ones are described once; later they travel as an id."""
    x = torch.ones(10)

    def everything() -> None:
        hvd.allreduce(x, name="known")
        hvd.allreduce(x)
        hvd.allgather(x, name="known gather")
        hvd.broadcast(x, 0, name="known broadcast")
        hvd.grouped_allreduce([x, x], name="known group")

    everything()
    before = hvd.counters()
    for _ in range(5):
        everything()
    after = hvd.counters()
    full = after["negotiated_full"] - before["negotiated_full"]
    cached = after["negotiated_cached"] - before["negotiated_cached"]
    print("negotiated in full:", full, "by id:", cached, flush=True)
    assert full <= 5 and cached >= 20  # unnamed ones move by one number in each round


def check_init_and_shutdown_alternate() -> None:
    import os

    descriptors = []
    for _ in range(5):
        hvd.shutdown()
        hvd.shutdown()
        raised(hvd.NotInitializedError, hvd.rank, "init")
        raised(hvd.NotInitializedError, lambda: hvd.allreduce(torch.ones(2)), "init")
        raised(hvd.NotInitializedError, lambda: hvd.allgather(torch.ones(2)), "init")
        hvd.init()
        close(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(hvd.size())))
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[-1] <= descriptors[1], descriptors


if __name__ == "__main__":
    run_checks(globals())
