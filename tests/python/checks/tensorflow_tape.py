"""Tapes and TF1-style optimizers against one process that trains on the joined batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from driver import raised, run_checks

import bagua_ext.tensorflow as hvd

v1 = tf.compat.v1
ROWS, FEATURES, STEPS = 4, 6, 3


def data_of(step: int, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the joined batch of a step, the same on every rank."""
    x = np.random.default_rng(step).normal(size=(ROWS * hvd.size(), FEATURES)).astype(np.float32)
    return x[rows], x.sum(axis=1, keepdims=True)[rows]


def batch(step: int, rows: slice = slice(None)) -> tuple[tf.Tensor, tf.Tensor]:
    x, y = data_of(step, rows)
    return tf.constant(x), tf.constant(y)


def own_rows() -> slice:
    return slice(ROWS * hvd.rank(), ROWS * (hvd.rank() + 1))


class Net:
    """Two layers and a scale, with the same start on every rank."""

    def __init__(self, dtype: tf.DType = tf.float32) -> None:
        generator = np.random.default_rng(7)
        shapes = [(FEATURES, 8), (8,), (8, 1), ()]
        self.variables = [tf.Variable(generator.normal(size=s) * 0.3, dtype=dtype) for s in shapes]

    def loss(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        weight, bias, out, scale = (tf.cast(v, tf.float32) for v in self.variables)
        return tf.reduce_mean(tf.square(tf.tanh(x @ weight + bias) @ out * scale - y))

    def numpy(self) -> list[np.ndarray]:
        return [variable.numpy().astype(np.float64) for variable in self.variables]


def descend(variables: list[tf.Variable], gradients: list[Any], rate: float = 0.1) -> None:
    for variable, gradient in zip(variables, gradients, strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            variable.scatter_sub(tf.IndexedSlices(rate * gradient.values, gradient.indices))
        elif gradient is not None:
            variable.assign_sub(rate * gradient)


def train_alone(net: Any, data: Callable[[int], Any] = batch, steps: int = STEPS) -> None:
    for step in range(steps):
        with tf.GradientTape() as tape:
            loss = net.loss(*data(step))
        descend(net.variables, tape.gradient(loss, net.variables))


def train(
    net: Any,
    graph: bool,
    data: Callable[[int], Any] | None = None,
    steps: int = STEPS,
    **options: Any,
) -> None:
    def step(*inputs: tf.Tensor) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = net.loss(*inputs)
        descend(net.variables, tape.gradient(loss, net.variables))

    run = tf.function(step) if graph else step
    for number in range(steps):
        run(*(data(number) if data else batch(number, own_rows())))


def equal(got: Any, want: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for own, other in zip(got.numpy(), want.numpy(), strict=True):
        np.testing.assert_allclose(own, other, rtol=rtol, atol=atol)


def compare(rtol: float = 1e-5, **options: Any) -> None:
    for graph in (False, True):
        alone, shared = Net(), Net()
        train_alone(alone)
        train(shared, graph, **options)
        equal(shared, alone, rtol)


# ---- Values -------------------------------------------------------------------------------------


def check_training_equals_one_process_on_the_joined_batch() -> None:
    compare()


def check_options_that_change_the_way_and_not_the_result() -> None:
    compare(gradient_predivide_factor=4.0)
    compare(num_groups=2)
    compare(bucket_bytes=16)
    compare(rtol=3e-2, compression=hvd.Compression.fp16)
    compare(rtol=3e-2, compression=hvd.Compression.bf16)


def check_groups_of_variables() -> None:
    for graph in (False, True):
        alone, shared = Net(), Net()
        train_alone(alone)
        first, second, third, fourth = shared.variables
        train(shared, graph, groups=[[first, fourth], [second, third]])
        equal(shared, alone)
    variable = tf.Variable(1.0)
    twice = lambda: hvd.DistributedGradientTape(tf.GradientTape(), groups=[[variable], [variable]])  # noqa: E731
    raised(ValueError, twice, "more than once")


def check_sums() -> None:
    net = Net()
    x, y = batch(0, own_rows())
    with tf.GradientTape() as tape:
        loss = net.loss(x, y)
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    got = tape.gradient(loss, net.variables)
    with tf.GradientTape() as joined:
        loss = net.loss(*batch(0))
    for own, want in zip(got, joined.gradient(loss, net.variables), strict=True):
        np.testing.assert_allclose(own, hvd.size() * want, rtol=1e-4, atol=1e-6)


def check_structures_of_sources_and_a_single_one() -> None:
    net = Net()
    named = dict(zip("abcd", net.variables, strict=True))
    with tf.GradientTape(persistent=True) as recorded:
        loss = net.loss(*batch(0, own_rows()))
    tape = hvd.DistributedGradientTape(recorded)
    assert isinstance(tape, tf.GradientTape) and tape.watched_variables()
    whole = tape.gradient(loss, named)
    assert sorted(whole) == list("abcd")
    np.testing.assert_array_equal(tape.gradient(loss, net.variables[1]), whole["b"])


def check_variables_of_several_dtypes() -> None:
    kinds = [tf.float32, tf.float64, tf.bfloat16, tf.float32]
    for graph in (False, True):
        nets = [Net(), Net()]
        for net in nets:
            net.variables = [
                tf.Variable(tf.cast(variable, kind))
                for variable, kind in zip(net.variables, kinds, strict=True)
            ]
        train_alone(nets[0])
        train(nets[1], graph)
        equal(nets[1], nets[0], rtol=3e-2, atol=3e-3)


def check_a_function_is_traced_again_for_another_batch() -> None:
    alone, shared = Net(), Net()
    cuts = (ROWS, 1, 2, ROWS)

    def cut(step: int) -> slice:
        return slice(ROWS * hvd.rank(), ROWS * hvd.rank() + cuts[step])

    rows = lambda step: np.concatenate(  # noqa: E731
        [np.arange(ROWS * r, ROWS * r + cuts[step]) for r in range(hvd.size())]
    )
    plans = hvd.counters()["plan_buckets"]
    train_alone(alone, lambda step: [tf.gather(t, rows(step)) for t in batch(step)], len(cuts))
    train(shared, True, lambda step: batch(step, cut(step)), len(cuts))
    equal(shared, alone)
    assert plans <= hvd.counters()["plan_buckets"]


# ---- Gradients that are not there, or sparse ----------------------------------------------------


class Branches(Net):
    """Its second layer is used by some ranks only, its scale by none."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.uses = uses

    def loss(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        weight, bias, out, _ = self.variables
        hidden = tf.tanh(x @ weight + (bias if self.uses else 0.0))
        return tf.reduce_mean(tf.square(hidden @ out - y))


def check_variables_that_only_some_ranks_use() -> None:
    def gradients(net: Net, graph: bool) -> list[Any]:
        def compute() -> list[Any]:
            with tf.GradientTape() as tape:
                loss = net.loss(*batch(0, own_rows()))
            return hvd.DistributedGradientTape(tape).gradient(loss, net.variables)

        return (tf.function(compute) if graph else compute)()

    for graph in (False, True):
        got = gradients(Branches(hvd.rank() == 0), graph)
        users = [Branches(rank == 0) for rank in range(hvd.size())]
        total = 0.0
        for rank, net in enumerate(users[:1]):
            rows = slice(ROWS * rank, ROWS * (rank + 1))
            with tf.GradientTape() as tape:
                loss = net.loss(*batch(0, rows))
            total = tape.gradient(loss, net.variables)[1].numpy()
        np.testing.assert_allclose(got[1], total / hvd.size(), rtol=1e-5)
        assert got[3] is None


class Table(Net):
    """An embedding, whose gradient is sparse, and a dense layer."""

    def __init__(self) -> None:
        generator = np.random.default_rng(3)
        self.variables = [
            tf.Variable(generator.normal(size=s), dtype=tf.float32) for s in ((9, 2), (2,))
        ]

    def loss(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(tf.gather(self.variables[0], rows) + self.variables[1]))


def check_sparse_gradients() -> None:
    def rows(step: int, rank: int) -> np.ndarray:
        return (np.arange(3) * (rank + 2) + step) % 9

    def joined(step: int) -> list[tf.Tensor]:
        return [tf.constant(np.concatenate([rows(step, r) for r in range(hvd.size())]))]

    own = lambda step: [tf.constant(rows(step, hvd.rank()))]  # noqa: E731
    for graph in (False, True):
        for options in ({}, {"sparse_as_dense": True}, {"gradient_predivide_factor": 2.0}):
            alone, shared = Table(), Table()
            train_alone(alone, joined)
            train(shared, graph, own, **options)
            equal(shared, alone)


def check_a_sparse_gradient_that_one_rank_does_not_have() -> None:
    table, other = tf.Variable(tf.ones((4, 2))), tf.Variable(tf.ones((2,)))
    last = hvd.rank() == hvd.size() - 1
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(
                other * (1.0 if last and hvd.size() > 1 else tf.gather(table, [1, 2]))
            )
        sparse, dense = hvd.DistributedGradientTape(tape).gradient(loss, [table, other])
        users = max(hvd.size() - 1, 1)
        want = np.zeros((4, 2))
        want[1:3] = users / hvd.size()
        np.testing.assert_allclose(tf.convert_to_tensor(sparse), want, rtol=1e-6)
        assert dense is not None


def check_tensors_of_unknown_shape() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, FEATURES])])
    def slope(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x * x)
        return hvd.DistributedGradientTape(tape).gradient(loss, x)

    inputs = [batch(0, slice(ROWS * r, ROWS * (r + 1)))[0].numpy() for r in range(hvd.size())]
    np.testing.assert_allclose(
        slope(batch(0, own_rows())[0]), 2 * np.mean(inputs, axis=0), rtol=1e-5
    )


def check_local_layers_are_left_to_each_rank() -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    model.build((None, FEATURES))
    x, y = batch(0, own_rows())
    for scales in (True, False):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        own = tape.gradient(loss, model.trainable_variables)
        partial = hvd.PartialDistributedGradientTape(
            tape, local_layers=model.layers[0], scale_local_gradients=scales
        )
        got = partial.gradient(loss, model.trainable_variables)
        for i, (result, local) in enumerate(zip(got, own, strict=True)):
            mean = np.mean(hvd.allgather(local[None]), axis=0)
            want = mean if i >= 2 else local / (hvd.size() if scales else 1)
            np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-7)


def check_sources_that_are_no_floating_point_numbers() -> None:
    whole, weight = tf.Variable([1, 2]), tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * (hvd.rank() + 1.0))
    none, got = hvd.DistributedGradientTape(tape).gradient(loss, [whole, weight])
    assert none is None
    np.testing.assert_allclose(got, np.full(2, (hvd.size() + 1) / 2), rtol=1e-6)


def check_gradients_of_reduced_gradients() -> None:
    def compute() -> tf.Tensor:
        weight = shared.read_value()
        with tf.GradientTape() as outer:
            outer.watch(weight)
            with tf.GradientTape() as inner:
                inner.watch(weight)
                loss = tf.reduce_sum(weight**3)
            total = tf.reduce_sum(hvd.DistributedGradientTape(inner).gradient(loss, weight) ** 2)
        return outer.gradient(total, weight)

    starts = [np.arange(1.0, 4.0) * (rank + 1) for rank in range(hvd.size())]
    shared = tf.Variable(starts[hvd.rank()], dtype=tf.float32)
    # g = mean of 3 w**2; the sum of g**2 over all ranks' copies of g, by this rank's w.
    mean = np.mean([3 * start**2 for start in starts], axis=0)
    want = hvd.size() * 2 * mean * 6 * starts[hvd.rank()] / hvd.size()
    for form in (compute, tf.function(compute)):
        np.testing.assert_allclose(form(), want, rtol=1e-5)


# ---- Life ---------------------------------------------------------------------------------------


def negotiated() -> int:
    return sum(hvd.counters()[name] for name in ("negotiated_full", "negotiated_cached"))


def check_a_step_negotiates_nothing() -> None:
    net = Net()
    train(net, True, steps=1)
    before = negotiated()
    train(net, True, steps=5)
    assert negotiated() == before


def check_graphs_end_with_the_job_that_they_were_built_in() -> None:
    alone, shared = Net(), Net()

    def compute(x: tf.Tensor, y: tf.Tensor) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = shared.loss(x, y)
        descend(shared.variables, tape.gradient(loss, shared.variables))

    graph = tf.function(compute)
    graph(*batch(0, own_rows()))
    second = batch(1, own_rows())
    again = lambda: graph(*second)  # noqa: E731
    several = hvd.size() > 1  # alone nothing is reduced
    hvd.shutdown()
    if hvd.is_initialized():
        raise AssertionError("initialised after shutdown")
    if several:
        raised(tf.errors.FailedPreconditionError, again, "NotInitializedError", "init()")
    hvd.init()
    if several:
        raised(tf.errors.FailedPreconditionError, again, "another tf.function")
    compute(*second)
    tf.function(compute)(*batch(2, own_rows()))
    train_alone(alone)
    equal(shared, alone)


def check_a_step_that_fails_after_gradients_were_handed_over_is_told() -> None:
    net = Net()
    fails = tf.Variable(False)

    @tf.function
    def compute(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = net.loss(x, y)
            late = tf.debugging.assert_equal(fails.read_value(), False)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, net.variables)
        with tf.control_dependencies([late]):
            return [tf.identity(gradient) for gradient in gradients]

    compute(*batch(0, own_rows()))
    fails.assign(True)  # on all ranks: nobody waits for anybody
    raised(tf.errors.InvalidArgumentError, lambda: compute(*batch(0, own_rows())))
    fails.assign(False)
    hvd.barrier()


def check_a_gradient_of_a_wrong_shape_leaves_the_step_alone() -> None:
    if hvd.size() == 1:
        return  # nothing is handed over

    @tf.custom_gradient
    def odd(x: tf.Tensor) -> Any:
        return tf.reduce_sum(x), lambda upstream: upstream * tf.ones((4,))

    first, second = tf.Variable(tf.ones(3)), tf.Variable(tf.ones(2))
    for bad in (True, False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(second) + (odd(first) if bad else tf.reduce_sum(first))
        compute = lambda tape=tape, loss=loss: hvd.DistributedGradientTape(tape).gradient(  # noqa: E731
            loss, [first, second]
        )
        if bad:
            raised(ValueError, compute, "0.Variable", "[4]", "[3]")
        else:
            np.testing.assert_array_equal(compute()[0], np.ones(3))


def check_variables_that_differ_are_told_on_every_rank() -> None:
    if hvd.size() == 1:
        return
    variable = tf.Variable(tf.ones((22 if hvd.rank() == 1 else 33,)), name="odd")

    def compute() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        return hvd.DistributedGradientTape(tape).gradient(loss, [variable])

    for form in (compute, tf.function(compute)):
        raised(hvd.MismatchError, form, "0.odd", "float32[22]", "float32[33]")


def check_arguments() -> None:
    tape = tf.GradientTape()
    raised(ValueError, lambda: hvd.DistributedGradientTape(tape, algorithm="bytegrad"), "bytegrad")
    raised(ValueError, lambda: hvd.DistributedGradientTape(tape, op=hvd.Min), "Average or op=Sum")
    raised(ValueError, lambda: hvd.DistributedGradientTape(tape, num_groups=-1), "num_groups is -1")
    own = type("Own", (hvd.Compression.none.__base__,), {})
    raised(ValueError, lambda: hvd.DistributedGradientTape(tape, compression=own), "Own", "fp16")
    raised(ValueError, lambda: hvd.DistributedOptimizer(object()), "Keras optimizer", "object")


# ---- TF1-style optimizers -----------------------------------------------------------------------


def session_training(make: Callable[[Any], Any], rows: Any, steps: int) -> list[np.ndarray]:
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, FEATURES])
        y = v1.placeholder(tf.float32, [None, 1])
        generator = np.random.default_rng(7)
        weight = v1.Variable(generator.normal(size=(FEATURES, 1)), dtype=tf.float32, name="w")
        bias = v1.Variable([0.5], name="b")
        loss = tf.reduce_mean(tf.square(x @ weight + bias - y))
        step = make(v1.train.MomentumOptimizer(0.05, 0.9)).minimize(loss)
        session.run(v1.global_variables_initializer())
        for number in range(steps):
            inputs = data_of(number, rows)
            session.run(step, {x: inputs[0], y: inputs[1]})
        return session.run([weight, bias])


def check_a_session_trains_as_one_process() -> None:
    want = session_training(lambda optimizer: optimizer, slice(None), 4)
    got = session_training(hvd.DistributedOptimizer, own_rows(), 4)
    for own, other in zip(got, want, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


def check_two_optimizers_in_one_run_of_a_session() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        steps, weights = [], []
        for name in "ab":
            weight = v1.Variable(np.full(1000, hvd.rank() + 1.0), dtype=tf.float32, name=name)
            optimizer = v1.train.GradientDescentOptimizer(0.5)
            loss = tf.reduce_sum(weight**2) / 2.0
            steps.append(hvd.DistributedOptimizer(optimizer).minimize(loss))
            weights.append(weight)
        session.run(v1.global_variables_initializer())
        for _ in range(5):
            session.run(steps)
        own, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2
        for _ in range(5):
            own, mean = own - 0.5 * mean, 0.5 * mean
        for value in session.run(weights):
            np.testing.assert_allclose(value, np.full(1000, own), rtol=1e-5)


def check_several_passes_make_a_step_of_a_session() -> None:
    def passes(averages: bool) -> list[np.ndarray]:
        make = lambda optimizer: hvd.DistributedOptimizer(  # noqa: E731
            optimizer, backward_passes_per_step=2, average_aggregated_gradients=averages
        )
        return session_training(make, own_rows(), 4)

    def by_hand(averages: bool) -> list[np.ndarray]:
        weight = np.random.default_rng(7).normal(size=(FEATURES, 1))
        bias, moments = np.array([0.5]), [0.0, 0.0]
        for step in range(2):
            sums = [0.0, 0.0]
            for part in range(2):
                x, y = data_of(2 * step + part, slice(None))
                error = 2 * (x @ weight + bias - y) / len(x)
                sums = [sums[0] + x.T @ error, sums[1] + error.sum(axis=0)]
            sums = [s / (2 if averages else 1) for s in sums]
            moments = [0.9 * m + s for m, s in zip(moments, sums, strict=True)]
            weight, bias = weight - 0.05 * moments[0], bias - 0.05 * moments[1]
        return [weight, bias]

    for averages in (False, True):
        for own, other in zip(passes(averages), by_hand(averages), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    run_checks(globals())
