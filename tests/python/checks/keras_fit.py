"""Compiled training, ``model.fit`` above all, against one process with the joined batch."""

from __future__ import annotations

import keras
import numpy as np
from driver import run_checks
from keras_models import (
    ON_TENSORFLOW,
    apply,
    assert_close,
    assert_same,
    assert_same_on_all_ranks,
    build,
    data,
    part,
    values,
)
from keras_optimizer import LossScaleOptimizer, decaying, optimizers, sgd

import bagua_ext.keras as hvd

if ON_TENSORFLOW:
    import tensorflow as tf


def check_a_mixed_policy_gets_its_loss_scale_inside() -> None:
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = hvd.DistributedOptimizer(sgd())
        assert isinstance(optimizer, LossScaleOptimizer)
        assert isinstance(optimizer.wrapped, LossScaleOptimizer)
        assert isinstance(optimizer.inner_optimizer, optimizers.SGD)
        model = build()
    finally:
        keras.config.set_dtype_policy(previous)
    model.compile(optimizer, "mse")
    assert model.optimizer is optimizer
    x, y = data(8 * hvd.size())
    if hvd.rank() == hvd.size() - 1:
        y[:] = 1e30  # whose square is more than float32 holds
    start = values(model.trainable_variables)
    for _ in range(2):
        model.fit(*part(x, y), batch_size=4, shuffle=False, verbose=0)
    assert float(optimizer.dynamic_scale) == 2.0**15 / 2**4, optimizer.dynamic_scale
    assert_same(model.trainable_variables, start)
    x, y = data(8 * hvd.size())
    model.fit(*part(x, y), batch_size=4, shuffle=False, verbose=0)
    assert int(optimizer.iterations) >= 1
    assert_same_on_all_ranks([*model.trainable_variables, *optimizer.variables])


def check_fit_has_the_curve_of_one_process() -> None:
    x, y = data(24 * hvd.size())
    ways = [{}, {"run_eagerly": True}]
    if ON_TENSORFLOW:
        ways.append({"steps_per_execution": 3})
    for way in ways:
        alone, shared = build(), build()
        alone.compile(decaying(), "mse", **way)
        shared.compile(hvd.DistributedOptimizer(decaying()), "mse", **way)
        options = {"epochs": 2, "shuffle": False, "verbose": 0}
        expected = alone.fit(x, y, batch_size=4 * hvd.size(), **options).history["loss"]
        average = hvd.callbacks.MetricAverageCallback()
        history = shared.fit(*part(x, y), batch_size=4, callbacks=[average], **options)
        np.testing.assert_allclose(history.history["loss"], expected, 1e-5)
        assert_close(shared.weights, alone.weights)
        assert int(shared.optimizer.iterations) == 12


def check_passes_in_a_compiled_step() -> None:
    x, y = data(24 * hvd.size())
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    alone = build()
    alone.compile(sgd(), "mse")
    alone.fit(x, y, batch_size=8 * hvd.size(), epochs=2, shuffle=False, verbose=0)
    for inner in (sgd(), LossScaleOptimizer(sgd(), initial_scale=4.0)):
        shared = build()
        shared.compile(hvd.DistributedOptimizer(inner, **options), "mse")
        shared.fit(*part(x, y), batch_size=4, epochs=2, shuffle=False, verbose=0)
        assert_close(shared.weights, alone.weights)
        assert int(shared.optimizer.iterations) == 12


def check_a_model_with_batch_normalisation_trains_as_one_process() -> None:
    def make(norm: type) -> keras.Model:
        keras.utils.set_random_seed(3)
        dense = keras.layers.Dense
        layers = [keras.Input((5,)), dense(7), norm(), dense(4, "tanh"), norm(), dense(3)]
        return keras.Sequential(layers)

    size = hvd.size()
    generator = np.random.default_rng(0)
    x = generator.normal(size=(24 * size, 5)).astype("float32")
    y = generator.normal(size=(24 * size, 3)).astype("float32")
    alone, shared = make(keras.layers.BatchNormalization), make(hvd.SyncBatchNormalization)
    alone.compile(keras.optimizers.SGD(0.1), "mse")
    shared.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    expected = alone.fit(x, y, batch_size=8 * size, **options).history["loss"]
    history = shared.fit(
        x[hvd.rank() :: size],
        y[hvd.rank() :: size],
        batch_size=8,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
        **options,
    ).history["loss"]
    np.testing.assert_allclose(history, expected, 1e-4)
    assert_close(shared.weights, alone.weights, 1e-4)


def check_embeddings_with_sparse_and_with_dense_gradients() -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(3)
        embedding = keras.layers.Embedding(11, 4)
        layers = [keras.Input((3,), dtype="int32"), embedding, keras.layers.Flatten()]
        return keras.Sequential([*layers, keras.layers.Dense(2)])

    size = hvd.size()
    generator = np.random.default_rng(0)
    x = generator.integers(0, 11, size=(12 * size, 3)).astype("int32")
    y = generator.normal(size=(12 * size, 2)).astype("float32")
    optimizer = keras.optimizers.SGD
    for options in (
        {},
        {"sparse_as_dense": True},
        {"op": hvd.Sum},
        {"backward_passes_per_step": 2},
        {"gradient_predivide_factor": 2.0},
    ):
        passes = options.get("backward_passes_per_step", 1)
        rate = 0.1 / size if "op" in options else 0.1 / passes
        alone, shared = make(), make()
        alone.compile(optimizer(0.1), "mse")
        shared.compile(hvd.DistributedOptimizer(optimizer(rate), **options), "mse")
        alone.fit(x, y, batch_size=4 * size, shuffle=False, verbose=0)
        mine = x[hvd.rank() :: size], y[hvd.rank() :: size]
        shared.fit(*mine, batch_size=4 // passes, shuffle=False, verbose=0)
        assert_close(shared.weights, alone.weights, 1e-5)


def check_a_compiled_loop_builds_the_optimizer_itself() -> None:
    if not ON_TENSORFLOW:
        return
    x = np.random.default_rng(0).normal(size=(4 * hvd.size(), 5)).astype("float32")
    for passes in (1, 2):
        model, alone = build(), build()
        optimizer = hvd.DistributedOptimizer("adam", backward_passes_per_step=passes)
        plain = keras.optimizers.Adam()

        @tf.function
        def one_step(rows: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(rows, training=True)))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        for _ in range(3 * passes):
            one_step(tf.constant(x[hvd.rank() :: hvd.size()]))
        for _ in range(3 if passes == 1 else 0):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(alone(x, training=True)))
            found = tape.gradient(loss, alone.trainable_variables)
            apply(plain, found, alone.trainable_variables)
        assert int(optimizer.iterations) == 3 * passes
        if passes == 1:
            assert_close(model.weights, alone.weights, 1e-5)
        else:
            assert_same_on_all_ranks(model.weights)
            assert (values(model.weights)[0] != values(alone.weights)[0]).any()
        assert_same_on_all_ranks(optimizer.variables)
        assert_same([optimizer.iterations], [np.int64(3 * passes)])


if __name__ == "__main__":
    run_checks(globals())
