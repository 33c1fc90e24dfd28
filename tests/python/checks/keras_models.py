"""Models, data and steps that the checks of the Keras layer share, for either backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import bagua_ext.keras as hvd

FEATURES, OUTPUTS = 5, 3
ON_TENSORFLOW = keras.config.backend() == "tensorflow"

if ON_TENSORFLOW:
    import tensorflow as tf
else:
    import torch

MakeOptimizer = Callable[[], keras.optimizers.Optimizer]


def build(seed: int = 3, **options: Any) -> keras.Sequential:
    """Two dense layers; the same values on every rank."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    inputs = keras.Input((FEATURES,))
    return keras.Sequential(
        [inputs, layers.Dense(7, "tanh", **options), layers.Dense(OUTPUTS, **options)]
    )


def data(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of all ranks together."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, FEATURES)).astype("float32")
    return x, generator.normal(size=(rows, OUTPUTS)).astype("float32")


def part(*arrays: np.ndarray) -> list[np.ndarray]:
    """This rank's rows."""
    return [array[hvd.rank() :: hvd.size()] for array in arrays]


def gradients(
    model: keras.Model, x: np.ndarray, y: np.ndarray, variables: Sequence[Any] | None = None
) -> list[Any]:
    """Gradients of the mean square error, scaled as the model's optimizer wants it."""
    variables = model.trainable_variables if variables is None else variables
    optimizer = getattr(model, "optimizer", None)
    scale = optimizer.scale_loss if optimizer is not None else lambda loss: loss

    def loss() -> Any:
        difference = keras.ops.subtract(model(x, training=True), y)
        return scale(keras.ops.mean(keras.ops.square(difference)))

    if ON_TENSORFLOW:
        with tf.GradientTape() as tape:
            value = loss()
        return tape.gradient(value, list(variables))
    for variable in model.trainable_variables:
        variable.value.grad = None
    loss().backward()
    return [variable.value.grad for variable in variables]


def apply(optimizer: Any, given: Sequence[Any], variables: Sequence[Any]) -> None:
    """Applies gradients; PyTorch must not differentiate that."""
    with contextlib.nullcontext() if ON_TENSORFLOW else torch.no_grad():
        optimizer.apply_gradients(zip(given, variables, strict=True))


def step(model: keras.Model, optimizer: Any, x: np.ndarray, y: np.ndarray) -> None:
    """One step of a loop of one's own."""
    model.optimizer = optimizer
    apply(optimizer, gradients(model, x, y), model.trainable_variables)


def values(variables: Sequence[Any]) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def assert_close(own: Sequence[Any], expected: Sequence[Any], tolerance: float = 2e-6) -> None:
    """Both are lists of variables or arrays."""
    assert len(own) == len(expected), (len(own), len(expected))
    for i, (mine, other) in enumerate(zip(values(own), values(expected), strict=True)):
        np.testing.assert_allclose(mine, other, tolerance, tolerance, err_msg=f"number {i}")


def assert_same(own: Sequence[Any], expected: Sequence[Any]) -> None:
    """As ``assert_close``, in every bit."""
    for mine, other in zip(values(own), values(expected), strict=True):
        np.testing.assert_array_equal(mine, other)


def differ(own: Sequence[Any], others: Sequence[Any]) -> bool:
    """True if any element does."""
    return any((a != b).any() for a, b in zip(values(own), values(others), strict=True))


def assert_same_on_all_ranks(variables: Sequence[Any]) -> None:
    for other in hvd.allgather_object(values(variables)):
        assert_same(variables, other)


class Pair:
    """A model trained alone on the joined batches, and one trained on this rank's part of them."""

    def __init__(self, make: MakeOptimizer, build: Callable[[], Any] = build, **options: Any):
        self.alone, self.shared = build(), build()
        self.plain, self.distributed = make(), hvd.DistributedOptimizer(make(), **options)

    def train(self, steps: int = 4, seed: int = 0) -> Pair:
        for number in range(steps):
            x, y = data(4 * hvd.size(), seed + number)
            step(self.alone, self.plain, x, y)
            step(self.shared, self.distributed, *part(x, y))
        return self

    def check(self, tolerance: float = 2e-6) -> None:
        """Weights, slots, iterations and learning rate agree."""
        assert_close(self.shared.weights, self.alone.weights, tolerance)
        assert_close(self.distributed.variables, self.plain.variables, tolerance)
        assert_close([self.distributed.learning_rate], [self.plain.learning_rate])
        assert int(self.distributed.iterations) == int(self.plain.iterations)
