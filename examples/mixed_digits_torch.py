"""Learns scikit-learn's digits in one job with ranks of TensorFlow: the torch part.

bagua-run -np 1 python examples/mixed_digits_torch.py : -np 1 python examples/mixed_digits_tf.py
bagua-run -np 2 python examples/mixed_digits_torch.py : -np 2 python examples/mixed_digits_tf.py

Every rank trains the same net on its own part of each batch. At the end the weights of all ranks
are compared in one layout.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import bagua_ext.torch as bagua
from bagua_ext import interop, objects

# The ranks' weights may differ by so much of a tensor's length: frameworks round differently.
TOLERANCE = 1e-6


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="samples a step and rank")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train on (80 %), then those to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    labels = torch.tensor(digits.target)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(labels)))
    train, test = order.split([len(order) * 4 // 5, len(order) - len(order) * 4 // 5])
    return images[train], labels[train], images[test], labels[test]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def largest_difference(model: nn.Module) -> float:
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


def test_accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of right answers; every rank judges its part."""
    mine = slice(bagua.rank(), None, bagua.size())
    with torch.no_grad():
        right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    total = objects.allreduce_array(right.numpy(), "right", bagua.Sum)
    return float(total) / len(labels)


def main() -> None:
    args = parse_arguments()
    bagua.init()
    torch.set_num_threads(1)  # the net is too small to share out
    torch.manual_seed(args.seed)
    images, labels, test_images, test_labels = load(args.seed)

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = interop.tie(model, optimizer)

    shuffle = np.random.default_rng(args.seed)
    for _ in range(args.steps):
        batch = shuffle.choice(len(labels), args.batch * bagua.size(), replace=False)
        mine = batch[bagua.rank() :: bagua.size()]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()

    difference = largest_difference(model)
    accuracy = test_accuracy(model, test_images, test_labels)
    if bagua.rank() == 0:
        print(f"largest difference {difference:.1e}, test accuracy {100 * accuracy:.1f} %")
    bagua.shutdown()
    if not difference <= TOLERANCE:  # nor is it NaN
        raise SystemExit(f"the ranks' weights differ by {difference:.1e}, more than {TOLERANCE}")


if __name__ == "__main__":
    main()
