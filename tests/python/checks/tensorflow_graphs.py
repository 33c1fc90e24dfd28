"""Graphs: tf.functions traced again, loops, branches, replicas, TF1-style sessions, gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from driver import raised, run_checks
from tensorflow_operations import both_ways, close, everyone, mine, reduced, values

import bagua_ext.tensorflow as hvd

v1 = tf.compat.v1

# ---- tf.function --------------------------------------------------------------------------------


def check_a_function_is_traced_again() -> None:
    traces = []

    @tf.function
    def total(x: tf.Tensor) -> tf.Tensor:
        traces.append(x.shape)
        return hvd.allreduce(x, op=hvd.Sum)

    for shape in ((3,), (4, 2), (3,), (1,)):
        close(total(mine(shape)), reduced(everyone(shape), "Sum"))
    assert len(traces) == 3


def check_loops_and_branches() -> None:
    @tf.function
    def repeated(x: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        for i in tf.range(count):
            x = hvd.allreduce(x + tf.cast(i, x.dtype))
            if tf.equal(i % 2, 1):
                x = x + hvd.broadcast(x, 0)
        return x

    want = np.mean(everyone((6,)), axis=0)
    for i in range(1, 5):
        want = (want + i) * (2 if i % 2 else 1)
    close(repeated(mine((6,)), tf.constant(5)), want.astype(np.float32))


def check_operations_whose_result_is_not_used_run_on_all_ranks() -> None:
    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        total = hvd.allreduce(x, op=hvd.Sum, name="maybe")
        return total if hvd.rank() == 0 else x

    for _ in range(3):
        got = call(mine((4,)))
        close(got, reduced(everyone((4,)), "Sum") if hvd.rank() == 0 else values(hvd.rank(), (4,)))


def check_constants_are_reduced_anew_by_each_step() -> None:
    call = tf.function(lambda: hvd.allreduce(tf.constant(values(hvd.rank(), (4,)))))
    before = hvd.counters()["operations"]
    for _ in range(4):
        close(call(), reduced(everyone((4,)), "Average"))
    assert hvd.counters()["operations"] == before + 4


def check_replicas_in_one_graph() -> None:
    def tower(x: tf.Tensor, weight: float) -> tf.Tensor:
        return hvd.allreduce(x * weight, name="tower")

    @tf.function
    def inner(x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x * weight)

    @tf.function
    def outer(x: tf.Tensor) -> list[tf.Tensor]:
        same_name = [tower(x, weight) for weight in (1.0, 2.0, 3.0)]
        return same_name + [inner(x, tf.constant(weight)) for weight in (1.0, 2.0, 3.0)]

    for _ in range(3):
        for got, weight in zip(outer(mine((6,))), (1.0, 2.0, 3.0) * 2, strict=True):
            close(got, reduced([weight * x for x in everyone((6,))], "Average"))


def check_broadcasts_of_two_lists_in_one_function() -> None:
    first, second = ([tf.Variable(mine((500,)) + k) for _ in range(4)] for k in (0.0, 10.0))

    @tf.function
    def call(x: tf.Tensor) -> None:
        for variable in first + second:
            variable.assign(x + (0.0 if any(variable is v for v in first) else 10.0))
        hvd.broadcast_variables(first, 0)
        hvd.broadcast_variables(second, 0)

    for _ in range(5):
        call(mine((500,)))
        for variables, offset in ((first, 0.0), (second, 10.0)):
            for variable in variables:
                close(variable, (values(0, (500,)) + offset).astype(np.float32))


def check_functions_in_a_function_run_in_the_order_of_the_program() -> None:
    weights = [tf.Variable(mine((4,)) + k) for k in (0.0, 100.0)]

    def inner(weight: tf.Variable) -> Callable[[], tf.Tensor]:
        @tf.function
        def step() -> tf.Tensor:
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(weight**2) / 2.0
            return tape.gradient(loss, weight)

        return step

    steps = [inner(weight) for weight in weights]
    outer = tf.function(lambda: [step() for step in steps])
    for _ in range(10):
        for got, offset in zip(outer(), (0.0, 100.0), strict=True):
            close(got, (reduced(everyone((4,)), "Average") + offset).astype(np.float32))


def check_many_small_operations_in_one_function() -> None:
    tensors = [mine((i + 1,)) for i in range(60)]
    call = tf.function(lambda: [hvd.allreduce(x, op=hvd.Sum) for x in tensors])
    for _ in range(2):
        for i, got in enumerate(call()):
            close(got, reduced(everyone((i + 1,)), "Sum"))


def check_a_function_lives_on_after_a_new_start() -> None:
    call = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    close(call(mine((3,))), reduced(everyone((3,)), "Sum"))
    hvd.shutdown()
    raised(hvd.NotInitializedError, lambda: hvd.allreduce(tf.ones(3)), "init()")
    raised(tf.errors.FailedPreconditionError, lambda: call(tf.ones(3)), "NotInitializedError")
    if hvd.is_initialized():
        raise AssertionError("initialised after shutdown")
    hvd.init()


def check_a_step_that_fails_does_not_wait_for_the_others() -> None:
    if hvd.size() == 1:
        return
    sent = hvd.counters()["messages_sent"]

    def once_it_is_in_flight(index: np.ndarray) -> np.ndarray:
        while hvd.counters()["messages_sent"] == sent:
            os.sched_yield()
        return index

    @tf.function
    def call(x: tf.Tensor, index: tf.Tensor) -> list[tf.Tensor]:
        total = hvd.allreduce(x, op=hvd.Sum, name="in flight")
        index = tf.numpy_function(once_it_is_in_flight, [index], tf.int32, stateful=False)
        return [total, tf.gather(x, index)]

    last = hvd.size() - 1
    if hvd.rank() == last:
        # The others come once this has failed; then the operation in flight ends, unheard.
        failing = lambda: call(mine((4,)), tf.constant(99))  # noqa: E731
        raised(tf.errors.InvalidArgumentError, failing, "99")
        again = lambda: hvd.allreduce(mine((4,)), op=hvd.Sum, name="in flight")  # noqa: E731
        raised(ValueError, again, "in flight")
    hvd.broadcast(tf.ones(1), last, name="the last rank failed")
    want = reduced(everyone((4,)), "Sum")
    if hvd.rank() != last:
        close(hvd.allreduce(mine((4,)), op=hvd.Sum, name="in flight"), want)
    hvd.barrier()
    close(hvd.allreduce(mine((4,)), op=hvd.Sum, name="in flight"), want)


# ---- TF1-style ----------------------------------------------------------------------------------


def check_a_graph_with_a_session() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None])
        weights = [
            v1.Variable(tf.constant(values(hvd.rank(), (3,)) + k), name=f"w{k}") for k in (0, 1)
        ]
        total = hvd.allreduce(x, op=hvd.Sum)
        towers = [hvd.allreduce(x * k, op=hvd.Sum) for k in (2.0, 3.0)]
        start = hvd.broadcast_global_variables(0)
        session.run(v1.global_variables_initializer())
        session.run(start)
        for k, value in enumerate(session.run(weights)):
            np.testing.assert_array_equal(value, values(0, (3,)) + k)
        for shape in ((2,), (5,)):
            got = session.run([total, *towers], {x: values(hvd.rank(), shape)})
            for factor, result in zip((1, 2, 3), got, strict=True):
                np.testing.assert_allclose(result, factor * reduced(everyone(shape), "Sum"))
    raised(RuntimeError, lambda: hvd.broadcast_global_variables(0), "broadcast_variables")


def check_the_hook_of_monitored_sessions() -> None:
    with tf.Graph().as_default():
        weight = v1.get_variable("w", initializer=values(hvd.rank(), (4,)))
        v1.train.get_or_create_global_step()
        hook = hvd.BroadcastGlobalVariablesHook(hvd.size() - 1)
        with v1.train.MonitoredSession(hooks=[hook]) as session:
            np.testing.assert_array_equal(session.run(weight), values(hvd.size() - 1, (4,)))


# ---- Gradients ----------------------------------------------------------------------------------


def gradient_of(call: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor, weights: Any) -> list[Any]:
    """The gradient of sum(weights * call(x)), eagerly and in a function."""

    def compute(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            target = tf.reduce_sum(call(x) * tf.constant(weights, tf.float32))
        return tape.gradient(target, x)

    return [form(x) for form in both_ways(compute)]


def slopes(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Each rank's weights of its result."""
    return [values(rank + 3, shape) + rank + 1 for rank in range(hvd.size())]


def check_gradient_of_allreduce() -> None:
    shape = (4, 3)
    for op, scale in ((hvd.Sum, 1.0), (hvd.Average, 1 / hvd.size())):
        call = lambda x, op=op: hvd.allreduce(  # noqa: E731
            x, op=op, prescale_factor=0.5, postscale_factor=3.0, name="g"
        )
        for got in gradient_of(call, mine(shape), slopes(shape)[hvd.rank()]):
            close(got, (1.5 * scale * np.sum(slopes(shape), axis=0)).astype(np.float32))


def check_gradient_of_extremes() -> None:
    inputs = np.stack(everyone((30,)))
    for op, extreme in ((hvd.Max, inputs.max(0)), (hvd.Min, inputs.min(0))):
        holds = (inputs == extreme).astype(np.float64)
        want = np.sum(slopes((30,)), axis=0) * holds[hvd.rank()] / holds.sum(0)
        call = lambda x, op=op: hvd.allreduce(x, op=op)  # noqa: E731
        for got in gradient_of(call, mine((30,)), slopes((30,))[hvd.rank()]):
            close(got, want.astype(np.float32))
    scaled = lambda x: hvd.allreduce(x, op=hvd.Max, prescale_factor=0.1, postscale_factor=3.0)  # noqa: E731
    holds = (inputs == inputs.max(0)).astype(np.float64)
    want = 0.1 * 3.0 * np.sum(slopes((30,)), axis=0) * holds[hvd.rank()] / holds.sum(0)
    for got in gradient_of(scaled, mine((30,)), slopes((30,))[hvd.rank()]):
        close(got, want.astype(np.float32))
    product = lambda: gradient_of(lambda x: hvd.allreduce(x, op=hvd.Product), mine((3,)), 1.0)  # noqa: E731
    raised(hvd.BaguaError, product, "no gradient for op=Product")


def check_gradient_of_a_group() -> None:
    shapes = [(3,), (2, 2)]

    def compute() -> list[tf.Tensor]:
        tensors = [mine(shape) for shape in shapes]
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
            weighted = [
                tf.reduce_sum(r * slopes(s)[hvd.rank()])
                for r, s in zip(results, shapes, strict=True)
            ]
        return tape.gradient(weighted, tensors)

    for form in both_ways(compute):
        for got, shape in zip(form(), shapes, strict=True):
            close(got, np.sum(slopes(shape), axis=0).astype(np.float32))


def check_gradient_of_broadcast() -> None:
    root = hvd.size() - 1
    want = np.sum(slopes((5,)), axis=0) * (hvd.rank() == root)
    call = lambda x: hvd.broadcast(x, root, name="gb")  # noqa: E731
    for got in gradient_of(call, mine((5,)), slopes((5,))[hvd.rank()]):
        close(got, want.astype(np.float32))


def check_gradient_of_allgather() -> None:
    rows = [rank + 1 for rank in range(hvd.size())]
    begin = sum(rows[: hvd.rank()])
    weights = slopes((sum(rows), 2))
    want = np.sum(weights, axis=0)[begin : begin + rows[hvd.rank()]]
    x = mine((rows[hvd.rank()], 2))
    for got in gradient_of(lambda x: hvd.allgather(x), x, weights[hvd.rank()]):
        close(got, want.astype(np.float32))


def check_gradient_of_reducescatter() -> None:
    rows, n = 2 * hvd.size() + 1, hvd.size()
    own = [len(part) for part in np.array_split(np.arange(rows), n)]
    weights = [values(rank, (own[rank], 2)) + rank + 1 for rank in range(n)]
    for op, scale in ((hvd.Sum, 1.0), (hvd.Average, 1 / n)):
        call = lambda x, op=op: hvd.reducescatter(x, op=op, prescale_factor=2.0)  # noqa: E731
        for got in gradient_of(call, mine((rows, 2)), weights[hvd.rank()]):
            close(got, (2.0 * scale * np.concatenate(weights)).astype(np.float32))


def check_gradient_of_alltoall() -> None:
    n, rank = hvd.size(), hvd.rank()
    splits = [[sender + to + 1 for to in range(n)] for sender in range(n)]
    received = [[splits[sender][to] for sender in range(n)] for to in range(n)]
    weights = [values(to + 1, (sum(received[to]), 2)) + to for to in range(n)]
    parts = []
    for to in range(n):
        begin = sum(received[to][:rank])
        parts.append(weights[to][begin : begin + splits[rank][to]])
    call = lambda x: hvd.alltoall(x, splits=splits[rank])[0]  # noqa: E731
    for got in gradient_of(call, mine((sum(splits[rank]), 2)), weights[rank]):
        close(got, np.concatenate(parts).astype(np.float32))


def check_gradients_of_gradients() -> None:
    def compute(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                target = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) ** 3)
            first = inner.gradient(target, x)
            total = tf.reduce_sum(first)
        return outer.gradient(total, x)

    # f(x) = sum over ranks of S**3 with S = sum of x: twice derived, n * 6 S summed over n ranks.
    n, total = hvd.size(), reduced(everyone((4,)), "Sum")
    for form in both_ways(compute):
        close(form(mine((4,))), (6.0 * n * n * total).astype(np.float32))


if __name__ == "__main__":
    run_checks(globals())
