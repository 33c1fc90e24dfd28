"""Learns scikit-learn's handwritten digits with Keras, on one process or on several.

python examples/keras_digits.py
bagua-run -np 2 python examples/keras_digits.py
KERAS_BACKEND=torch bagua-run -np 2 python examples/keras_digits.py

Each rank trains on its share of the images with batches of its own. N processes together make
batches N times as large, so the learning rate is N times as high, which needs a warmup.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import bagua_ext.keras as bagua

Samples = tuple[np.ndarray, np.ndarray]  # images and labels


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32, help="samples a step, on each rank")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the loss curve there")
    return parser.parse_args()


def load(seed: int) -> tuple[Samples, Samples]:
    """What to train on (80 %), and what to test with."""
    digits = load_digits()
    images = digits.images[..., None].astype("float32") / 16 - 0.5
    order = np.random.default_rng(seed).permutation(len(images))
    train, test = np.split(order, [len(order) * 4 // 5])
    return (images[train], digits.target[train]), (images[test], digits.target[test])


def share(samples: Samples) -> Samples:
    """This rank's part; all parts are equally large, so that all ranks make as many steps."""
    images, labels = samples
    count = len(labels) // bagua.size() * bagua.size()
    mine = slice(bagua.rank(), count, bagua.size())
    return images[mine], labels[mine]


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    args = parse_arguments()
    bagua.init()
    keras.utils.set_random_seed(args.seed + bagua.rank())
    train, test = load(args.seed)
    images, labels = share(train)
    rate = args.rate * bagua.size()

    model = make_model()
    model.compile(
        optimizer=bagua.DistributedOptimizer(keras.optimizers.Adam(rate)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    start = time.perf_counter()
    history = model.fit(
        images,
        labels,
        batch_size=args.batch,
        epochs=args.epochs,
        verbose=2 if bagua.rank() == 0 else 0,
        callbacks=[
            # The ranks' models begin with different weights: all take rank 0's.
            bagua.callbacks.BroadcastGlobalVariablesCallback(0),
            bagua.callbacks.MetricAverageCallback(),
            bagua.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=3),
        ],
    )
    seconds = time.perf_counter() - start

    _, accuracy = model.evaluate(*test, verbose=0)
    if bagua.rank() == 0:
        if args.json:
            curve = {"loss": history.history["loss"], "accuracy": accuracy}
            args.json.write_text(json.dumps(curve) + "\n")
        samples = len(labels) * bagua.size() * args.epochs
        print(f"test accuracy {100 * accuracy:.1f} %, {samples / seconds:.0f} samples/s")
    bagua.shutdown()


if __name__ == "__main__":
    main()
