"""Learns scikit-learn's handwritten digits in a loop of one's own, on one process or on several.

python examples/tf_digits.py
bagua-run -np 2 python examples/tf_digits.py

Each global batch is cut by rank, so N processes together see exactly the batches that one process
sees, and the loss curve is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from progress import Progress
from sklearn.datasets import load_digits

import bagua_ext.tensorflow as bagua


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64, help="samples a step, all ranks together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the loss curve there")
    return parser.parse_args()


def load(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels to train on (80 %), then those to test with."""
    digits = load_digits()
    images = digits.images.astype(np.float32)[..., None] / 16 - 0.5
    order = np.random.default_rng(seed).permutation(len(images))
    train, test = np.split(order, [len(order) * 4 // 5])
    return images[train], digits.target[train], images[test], digits.target[test]


def make_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def test_accuracy(model: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """Share of right answers; every rank judges its part."""
    mine = slice(bagua.rank(), None, bagua.size())
    answers = tf.argmax(model(images[mine]), axis=1).numpy()
    right = tf.constant(int((answers == labels[mine]).sum()))
    return int(bagua.allreduce(right, op=bagua.Sum)) / len(labels)


def main() -> None:
    args = parse_arguments()
    bagua.init()
    keras.utils.set_random_seed(args.seed)
    images, labels, test_images, test_labels = load(args.seed)

    model = make_model()
    steps = -(-len(labels) // args.batch) * args.epochs
    schedule = keras.optimizers.schedules.CosineDecay(0.01, steps, 0.0, "", 0.1, steps // 5)
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
    optimizer.build(model.trainable_variables)
    bagua.broadcast_variables(model.variables + optimizer.variables, root_rank=0)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    @tf.function(reduce_retracing=True)
    def step(x: tf.Tensor, y: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        # The average over ranks of (sum of my losses * ranks / batch) is the batch's mean loss,
        # also when the ranks' parts are not equally long.
        with bagua.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(y, model(x, training=True)) * share
        gradients = tape.gradient(loss, model.trainable_variables)  # reduced as they come
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    progress = Progress(steps, enabled=bagua.rank() == 0)
    shuffle = np.random.default_rng(args.seed)
    curve: list[float] = []
    start = time.perf_counter()
    for epoch in range(args.epochs):
        losses = []
        order = shuffle.permutation(len(labels))
        for begin in range(0, len(order), args.batch):
            batch = order[begin : begin + args.batch]
            mine = batch[bagua.rank() :: bagua.size()]
            share = tf.constant(bagua.size() / len(batch), tf.float32)
            losses.append(step(tf.constant(images[mine]), tf.constant(labels[mine]), share))
            progress.advance(f"epoch {epoch + 1}/{args.epochs}  loss {float(losses[-1]):.4f}")
        curve += bagua.allreduce(tf.stack(losses)).numpy().tolist()
    seconds = time.perf_counter() - start
    progress.close()

    accuracy = test_accuracy(model, test_images, test_labels)
    if bagua.rank() == 0:
        if args.json:
            args.json.write_text(json.dumps({"loss": curve, "accuracy": accuracy}) + "\n")
        rate = len(labels) * args.epochs / seconds
        print(f"test accuracy {100 * accuracy:.1f} %, {rate:.0f} samples/s")
    bagua.shutdown()


if __name__ == "__main__":
    main()
