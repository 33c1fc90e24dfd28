"""Every TensorFlow operation, eagerly and in a tf.function, against numpy on all ranks' inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from driver import raised, run_checks

import bagua_ext.tensorflow as hvd

SHAPES = [(), (0,), (1,), (5,), (3, 7, 11), (1000,), (65537,), (0, 3)]
INTEGERS = [tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64]
FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
OPS = {"Average": hvd.Average, "Sum": hvd.Sum, "Min": hvd.Min, "Max": hvd.Max}
OPS["Product"] = hvd.Product
REDUCE = {"Sum": np.add, "Min": np.minimum, "Max": np.maximum, "Product": np.multiply}


def values(rank: int, shape: tuple[int, ...], dtype: tf.DType = tf.float32) -> np.ndarray:
    """Small whole numbers that differ between neighbours and ranks, the same on every rank."""
    count = int(np.prod(shape, dtype=int))
    raw = (np.arange(count) * 7 + rank * 5) % 11 % 3 + (np.arange(count) + rank) % 2
    return (raw % 2 if dtype is tf.bool else raw).astype(dtype.as_numpy_dtype).reshape(shape)


def mine(shape: tuple[int, ...], dtype: tf.DType = tf.float32) -> tf.Tensor:
    return tf.constant(values(hvd.rank(), shape, dtype))


def everyone(shape: tuple[int, ...], dtype: tf.DType = tf.float32) -> list[np.ndarray]:
    return [values(rank, shape, dtype) for rank in range(hvd.size())]


def reduced(inputs: list[np.ndarray], op: str) -> np.ndarray:
    """The reduction in wide arithmetic, rounded once."""
    dtype = inputs[0].dtype
    if dtype.kind == "b":
        return (np.logical_or if op in ("Sum", "Max") else np.logical_and).reduce(inputs)
    whole = np.issubdtype(dtype, np.integer)
    wide = [x.astype(np.int64 if whole else np.float64) for x in inputs]
    if op != "Average":
        return REDUCE[op].reduce(wide).astype(dtype)
    total = np.add.reduce(wide)
    return (np.trunc(total / len(inputs)) if whole else total / len(inputs)).astype(dtype)


def close(got: Any, want: np.ndarray) -> None:
    got = got.numpy()
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, got.shape, want.shape)
    loose = got.dtype.itemsize == 2 and got.dtype.kind not in "iu"
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), rtol=1e-2 if loose else 1e-6
    )


def both_ways(call: Callable[..., Any]) -> list[Callable[..., Any]]:
    return [call, tf.function(call)]


# ---- Operations ---------------------------------------------------------------------------------


def check_place_in_the_job() -> None:
    want = [hvd.size(), hvd.rank(), hvd.local_size(), hvd.local_rank(), 1]

    def ask() -> tf.Tensor:
        ops = [hvd.size_op(), hvd.rank_op(), hvd.local_size_op(), hvd.local_rank_op()]
        return tf.stack([*ops, hvd.process_set_included_op()])

    for call in both_ways(ask):
        assert call().numpy().tolist() == want


def check_allreduce_of_every_dtype_and_op() -> None:
    for dtype in (*INTEGERS, *FLOATS, tf.bool):
        for name, op in OPS.items():
            if dtype is tf.bool and name == "Average":
                continue
            want = [reduced(everyone(shape, dtype), name) for shape in ((5,), (1000,))]

            def call(*tensors: tf.Tensor, op: int = op) -> list[tf.Tensor]:
                return [hvd.allreduce(tensor, op=op) for tensor in tensors]

            for form in both_ways(call):
                for got, expected in zip(
                    form(mine((5,), dtype), mine((1000,), dtype)), want, strict=True
                ):
                    close(got, expected)


def check_every_shape() -> None:
    for shape in SHAPES:
        tensor = mine(shape)
        close(hvd.allreduce(tensor, op=hvd.Sum), reduced(everyone(shape), "Sum"))
        close(hvd.broadcast(tensor, hvd.size() - 1), everyone(shape)[-1])
        close(tensor, values(hvd.rank(), shape))  # inputs are left alone
        if shape:
            close(hvd.allgather(tensor), np.concatenate(everyone(shape)))


def check_shapes_that_are_known_when_a_graph_is_built() -> None:
    shapes: list[list[int | None]] = []

    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        gathered = hvd.allgather(x)
        rows, received = hvd.alltoall(x, splits=[1] * hvd.size())
        for result in (hvd.allreduce(x), gathered, hvd.broadcast(x, 0), hvd.reducescatter(x), rows):
            shapes.append(result.shape.as_list())
        shapes.append(received.shape.as_list())
        return tf.reduce_sum(gathered) + tf.reduce_sum(rows)

    call(mine((hvd.size(), 3)))
    assert shapes == [[hvd.size(), 3], [None, 3], [hvd.size(), 3], [None, 3], [None, 3], [None]]


def check_scale_factors_and_compression() -> None:
    got = hvd.allreduce(mine((50,)), op=hvd.Sum, prescale_factor=1 / 3, postscale_factor=3.0)
    close(got, reduced(everyone((50,)), "Sum"))
    close(hvd.allreduce(mine((50,)), average=False), reduced(everyone((50,)), "Sum"))
    close(hvd.allreduce(mine((50,)), True), reduced(everyone((50,)), "Average"))
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        got = hvd.allreduce(mine((50,)), op=hvd.Sum, compression=compression)
        close(got, reduced(everyone((50,)), "Sum"))
    both = (f"average={True}", "op=Sum")
    raised(ValueError, lambda: hvd.allreduce(mine((1,)), average=True, op=hvd.Sum), *both)


def check_groups_of_several_dtypes() -> None:
    kinds = [((3,), tf.float32), ((2, 5), tf.int64), ((), tf.float64), ((7,), tf.bfloat16)]

    def call() -> list[tf.Tensor]:
        return hvd.grouped_allreduce([mine(*kind) for kind in kinds], op=hvd.Sum, name="group")

    for form in both_ways(call):
        for got, kind in zip(form(), kinds, strict=True):
            close(got, reduced(everyone(*kind), "Sum"))
    gathered = hvd.grouped_allgather([mine(kind[0] or (1,), kind[1]) for kind in kinds])
    for got, (shape, dtype) in zip(gathered, kinds, strict=True):
        close(got, np.concatenate(everyone(shape or (1,), dtype)))
    scattered = hvd.grouped_reducescatter([mine((8, 2)), mine((5,))], op=hvd.Sum)
    for got, shape in zip(scattered, ((8, 2), (5,)), strict=True):
        close(got, np.array_split(reduced(everyone(shape), "Sum"), hvd.size())[hvd.rank()])
    assert hvd.grouped_allreduce([]) == [] == hvd.grouped_allgather([])


def check_gathering_unequal_rows() -> None:
    def rows(rank: int) -> np.ndarray:
        return values(rank, (rank + 1, 3)) + rank

    for call in both_ways(lambda x: hvd.allgather(x, name="rows")):
        close(
            call(tf.constant(rows(hvd.rank()))), np.concatenate(list(map(rows, range(hvd.size()))))
        )


def check_indexed_slices_are_gathered() -> None:
    def slices(rank: int) -> tuple[np.ndarray, np.ndarray]:
        return values(rank, (rank + 1, 2)), np.arange(rank + 1) + rank

    own, indices = slices(hvd.rank())
    shape = tf.constant([10, 2], tf.int64)
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, hvd.size())):
        got = hvd.allreduce(tf.IndexedSlices(own, indices, shape), op=op)
        want = np.zeros((10, 2))
        for rank in range(hvd.size()):
            np.add.at(want, slices(rank)[1], slices(rank)[0] / divisor)
        np.testing.assert_allclose(tf.convert_to_tensor(got).numpy(), want, rtol=1e-6)


def check_alltoall() -> None:
    n = hvd.size()

    def sent(sender: int) -> np.ndarray:
        return np.concatenate([np.full((sender + to + 1, 2), 10 * sender + to) for to in range(n)])

    splits = [hvd.rank() + to + 1 for to in range(n)]
    want = np.concatenate(
        [np.full((sender + hvd.rank() + 1, 2), 10 * sender + hvd.rank()) for sender in range(n)]
    )
    for call in both_ways(lambda x: hvd.alltoall(x, splits=splits, name="a2a")):
        rows, received = call(tf.constant(sent(hvd.rank())))
        close(rows, want)
        assert received.dtype is tf.int32
        assert received.numpy().tolist() == [sender + hvd.rank() + 1 for sender in range(n)]
    even = hvd.alltoall(tf.range(2 * n) + 100 * hvd.rank())
    parts = [np.arange(2 * n)[2 * hvd.rank() : 2 * hvd.rank() + 2] + 100 * r for r in range(n)]
    close(even, np.concatenate(parts).astype(np.int32))
    wrong = lambda: hvd.alltoall(tf.range(n), splits=[1] * (n + 1))  # noqa: E731
    raised(ValueError, wrong, "splits", f"{n} ranks")


def check_variables_in_place() -> None:
    root = hvd.size() - 1
    made = [(3, 2), (), (5,)]
    variables = [tf.Variable(mine(shape)) for shape in made]
    variables.append(tf.Variable(hvd.rank(), dtype=tf.int64))
    before = variables[0].read_value()
    assert hvd.broadcast_variables(variables, root) is None
    for variable, shape in zip(variables, made, strict=False):
        close(variable, everyone(shape)[root])
    assert int(variables[-1]) == root
    close(before, values(hvd.rank(), made[0]))  # what was read before is left alone
    one = tf.Variable(mine((4,)))
    assert hvd.broadcast_(one, 0) is one
    close(one, everyone((4,))[0])

    two = tf.Variable(mine((4,)) + 1)

    @tf.function
    def call() -> tf.Tensor:
        hvd.broadcast_variables([two], root)
        return two + 0

    close(call(), everyone((4,))[root] + 1)
    hvd.broadcast_variables([], 0)


def check_variables_that_differ_are_told() -> None:
    if hvd.size() == 1:
        return
    shape = (2,) if hvd.rank() == 1 else (3,)
    variable = tf.Variable(tf.ones(shape), name="w")
    call = lambda: hvd.broadcast_variables([variable], 0)  # noqa: E731
    raised(hvd.MismatchError, call, "'w:0', float32[2], on rank 1", "float32[3], on rank 0")
    variables = [variable] * (hvd.rank() + 1)
    raised(hvd.MismatchError, lambda: hvd.broadcast_variables(variables, 0), "rank 1 gave 2")


def check_objects() -> None:
    own = {"rank": hvd.rank(), "text": "x" * (100 * hvd.rank())}
    root = hvd.size() - 1
    want = {"rank": root, "text": "x" * (100 * root)}
    assert hvd.broadcast_object(own, root) == want
    assert hvd.broadcast_object_fn(root)(own) == want
    assert [each["rank"] for each in hvd.allgather_object(own)] == list(range(hvd.size()))


def check_names_in_different_order_on_each_rank() -> None:
    names = [f"t{i}" for i in range(6)]
    order = names[hvd.rank() :] + names[: hvd.rank()]

    # Without a function's order of the program all of them are in flight at once.
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        outputs = {
            name: hvd.allreduce(tf.constant(values(hvd.rank() + int(name[1:]), (64,))), name=name)
            for name in order
        }
        for _ in range(3):
            for name, got in session.run(outputs).items():
                inputs = [values(rank + int(name[1:]), (64,)) for rank in range(hvd.size())]
                np.testing.assert_allclose(got, reduced(inputs, "Average"), rtol=1e-6)


def check_disagreement_is_an_error_and_the_job_goes_on() -> None:
    if hvd.size() == 1:
        return
    shape = (2,) if hvd.rank() == 1 else (3,)
    call = lambda: hvd.allreduce(tf.ones(shape), name="odd")  # noqa: E731
    raised(hvd.MismatchError, call, "'odd'", "rank 1 sent float32[2]", "rank 0 sent float32[3]")
    graph = tf.function(call)
    for _ in range(2):
        error = raised(tf.errors.InvalidArgumentError, graph, "MismatchError: ", "'odd'")
        assert "rank 1 sent float32[2]" in str(error)
    close(hvd.allreduce(mine((3,))), reduced(everyone((3,)), "Average"))


def check_a_barrier_and_a_join() -> None:
    assert hvd.barrier() is None
    tf.function(hvd.barrier)()
    assert 0 <= hvd.join() < hvd.size()


def check_what_is_refused() -> None:
    raised(ValueError, lambda: hvd.allreduce(mine((1,)), op=99), "op=99")
    raised(ValueError, lambda: hvd.allreduce(mine((1,)), process_set="all"), "'all'")
    compiled = tf.function(lambda x: hvd.allreduce(x), jit_compile=True)
    raised(ValueError, lambda: compiled(mine((1,))), "XLA", "jit_compile=False")


if __name__ == "__main__":
    run_checks(globals())
