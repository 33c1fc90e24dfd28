"""Learns scikit-learn's digits in one job with ranks of PyTorch: the TensorFlow part.

bagua-run -np 1 python examples/mixed_digits_torch.py : -np 1 python examples/mixed_digits_tf.py
bagua-run -np 2 python examples/mixed_digits_torch.py : -np 2 python examples/mixed_digits_tf.py

Every rank trains the same net on its own part of each batch. At the end the weights of all ranks
are compared in one layout.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import bagua_ext.keras as bagua
from bagua_ext import interop, objects

# The ranks' weights may differ by so much of a tensor's length: frameworks round differently.
TOLERANCE = 1e-6


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="samples a step and rank")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels to train on (80 %), then those to test with."""
    digits = load_digits()
    images = digits.images[..., None].astype("float32") / 16 - 0.5
    labels = digits.target
    order = np.random.default_rng(seed).permutation(len(labels))
    train, test = np.split(order, [len(order) * 4 // 5])
    return images[train], labels[train], images[test], labels[test]


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def largest_difference(model: keras.Model) -> float:
    """Between this rank's and another's tensor of weights, relative to its length."""
    own = interop.weights(model)
    others = objects.allgather_object(own)
    return float(
        np.max(
            [
                np.linalg.norm(other[name] - value) / np.linalg.norm(value)
                for other in others
                for name, value in own.items()
            ]
        )
    )


def test_accuracy(model: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """Share of right answers; every rank judges its part."""
    mine = slice(bagua.rank(), None, bagua.size())
    answers = np.argmax(model(images[mine], training=False), axis=1)
    right = np.sum(answers == labels[mine])
    total = objects.allreduce_array(right, "right", bagua.Sum)
    return float(total) / len(labels)


def main() -> None:
    args = parse_arguments()
    bagua.init()
    keras.utils.set_random_seed(args.seed)
    images, labels, test_images, test_labels = load(args.seed)

    model = make_model()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer = interop.tie(model, optimizer)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    shuffle = np.random.default_rng(args.seed)
    for _ in range(args.steps):
        batch = shuffle.choice(len(labels), args.batch * bagua.size(), replace=False)
        mine = batch[bagua.rank() :: bagua.size()]
        step(tf.constant(images[mine]), tf.constant(labels[mine]))

    difference = largest_difference(model)
    accuracy = test_accuracy(model, test_images, test_labels)
    if bagua.rank() == 0:
        print(f"largest difference {difference:.1e}, test accuracy {100 * accuracy:.1f} %")
    bagua.shutdown()
    if not difference <= TOLERANCE:  # nor is it NaN
        raise SystemExit(f"the ranks' weights differ by {difference:.1e}, more than {TOLERANCE}")


if __name__ == "__main__":
    main()
