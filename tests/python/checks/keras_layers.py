"""SyncBatchNormalization and sparse gradients, against one process with the joined batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from driver import raised, run_checks
from keras_models import (
    ON_TENSORFLOW,
    assert_close,
    assert_same_on_all_ranks,
    values,
)

import bagua_ext.keras as hvd

if ON_TENSORFLOW:
    import tensorflow as tf
else:
    import torch


def rows_of(rank: int) -> int:
    return 2 + 3 * rank  # the ranks' batches differ


def rank_slice() -> slice:
    start = sum(rows_of(r) for r in range(hvd.rank()))
    return slice(start, start + rows_of(hvd.rank()))


def joined(*shape: int, mean: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """The ranks' inputs joined, and weights of the outputs in the loss."""
    rows = sum(rows_of(r) for r in range(hvd.size()))
    generator = np.random.default_rng(5)
    x = mean + generator.normal(size=(rows, *shape)) * np.linspace(0.5, 2.0, shape[-1])
    return x.astype("float32"), generator.normal(size=(rows, *shape)).astype("float32")


def run(layer: Any, x: np.ndarray, weights: np.ndarray, mask: Any = None) -> list[np.ndarray]:
    """Output, gradient of the input, gradients of gamma and beta for sum(weights * output)."""
    options = {"training": True} if mask is None else {"training": True, "mask": mask}
    if ON_TENSORFLOW:
        given = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(given)
            output = layer(given, **options)
            loss = tf.reduce_sum(output * weights)
        found = tape.gradient(loss, [given, *layer.trainable_variables])
        return [np.asarray(tensor) for tensor in (output, *found)]
    given = torch.tensor(x, requires_grad=True)
    for variable in layer.trainable_variables:
        variable.value.grad = None
    if mask is not None:
        options["mask"] = torch.tensor(mask)
    output = layer(given, **options)
    (output * torch.tensor(weights)).sum().backward()
    found = [given.grad, *(variable.value.grad for variable in layer.trainable_variables)]
    return [tensor.detach().numpy() for tensor in (output, *found)]


def compare(x: np.ndarray, weights: np.ndarray, mask: Any = None, **options: Any) -> None:
    plain = keras.layers.BatchNormalization(momentum=0.8, **options)
    sync = hvd.SyncBatchNormalization(momentum=0.8, **options)
    mine = rank_slice()
    for turn in range(2):
        shifted = x + turn
        expected = run(plain, shifted, weights, mask)
        own = run(sync, shifted[mine], weights[mine], None if mask is None else mask[mine])
        scale = max(np.abs(expected[1]).max(), 1.0)
        np.testing.assert_allclose(own[0], expected[0][mine], 2e-4, 2e-5)
        np.testing.assert_allclose(own[1], expected[1][mine], 2e-4, 2e-5 * scale)
        for parameter in (2, 3):  # each rank has its own part of the sum
            total = sum(hvd.allgather_object(own[parameter]))
            np.testing.assert_allclose(total, expected[parameter], 2e-4, 2e-4)
    assert_close(sync.weights, plain.weights, 2e-5)
    assert_same_on_all_ranks(sync.non_trainable_weights)
    to_numpy = keras.ops.convert_to_numpy
    inference = [to_numpy(layer(x, training=False)) for layer in (sync, plain)]
    np.testing.assert_allclose(*inference, 1e-4, 1e-5)


def check_normalisation_equals_that_of_the_joined_batch() -> None:
    compare(*joined(3))
    compare(*joined(4, 5, 3))
    compare(*joined(4, 3), axis=1, epsilon=1e-2)


def check_masked_steps_count_on_no_rank() -> None:
    x, weights = joined(6, 3)
    lengths = np.random.default_rng(2).integers(0, 7, size=len(x))
    lengths[rank_slice().start if hvd.rank() else 0] = 6
    mask = np.arange(6) < np.array(hvd.broadcast_object(lengths, 0))[:, None]
    compare(x, weights * mask[..., None], mask)


def check_a_large_mean_costs_no_digits() -> None:
    x, _ = joined(3, mean=3000.0)
    sync = hvd.SyncBatchNormalization(epsilon=0.0)
    own = np.asarray(keras.ops.convert_to_numpy(sync(x[rank_slice()], training=True)))
    exact = x.astype("float64")
    expected = (exact - exact.mean(0)) / exact.std(0)
    # float32 holds the inputs to 2e-4, a few 1e-4 of their deviation.
    np.testing.assert_allclose(own, expected[rank_slice()], atol=2e-3)


def check_a_rank_without_rows() -> None:
    if hvd.size() == 1:
        return
    x = np.random.default_rng(1).normal(size=(7, 3)).astype("float32")
    sync = hvd.SyncBatchNormalization()
    empty = hvd.rank() == 1
    output = sync(x[:0] if empty else x, training=True)
    assert output.shape[0] == (0 if empty else 7)
    np.testing.assert_allclose(values([sync.moving_mean])[0], 0.01 * x.mean(0), 1e-4, 1e-6)


def check_it_is_saved_as_a_layer_and_infers_without_others() -> None:
    sync = hvd.SyncBatchNormalization(momentum=0.7, name="norm")
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(sync))
    assert type(restored) is hvd.SyncBatchNormalization
    assert restored.get_config() == sync.get_config() and restored.momentum == 0.7
    assert not sync.supports_jit
    for refused in ("synchronized", "fused"):
        raised(ValueError, lambda: hvd.SyncBatchNormalization(**{refused: True}), refused)
    x = np.ones((4, 3), "float32")
    sync(x)
    hvd.shutdown()
    try:
        sync(x, training=False)
        raised(hvd.NotInitializedError, lambda: sync(x, training=True), "init()")
    finally:
        hvd.init()


if __name__ == "__main__":
    run_checks(globals())
