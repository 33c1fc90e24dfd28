"""The same models, optimizers and steps in torch and in Keras, by the words of no framework.

INTEROP_FRAMEWORK chooses: torch, or keras on the backend that KERAS_BACKEND names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

FRAMEWORK = os.environ["INTEROP_FRAMEWORK"]
SEED = 1 + int(os.environ["BAGUA_RANK"])
CLASSES = 7
SENTENCE = 6

Batch = tuple[np.ndarray, np.ndarray]

if FRAMEWORK == "torch":
    import torch
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(1)
    torch.manual_seed(SEED)

    class ToFeatures(nn.Module):
        """Images to channels first."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.movedim(-1, 1)

    class Last(nn.Module):
        """The last output of a recurrent layer."""

        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0][:, -1]

    class Every(Last):
        """All outputs of a recurrent layer."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0]

    def conv_net(filters: int = 5, bias: bool = True) -> nn.Module:
        return nn.Sequential(
            *(ToFeatures(), nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(4, filters, 3), nn.Tanh(), nn.Flatten()),
            nn.Linear(4 * filters, CLASSES, bias=bias),
        )

    def norm_net(epsilon: float = 1e-3) -> nn.Module:
        return nn.Sequential(
            *(ToFeatures(), nn.Conv2d(1, 4, 3, padding=1, bias=False)),
            *(nn.BatchNorm2d(4, eps=epsilon, momentum=0.1), nn.Flatten()),
            nn.Linear(256, CLASSES),
        )

    def text_net() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(9, 6),
            Every(nn.LSTM(6, 5, batch_first=True)),
            Last(nn.GRU(5, 4, batch_first=True)),
            nn.Linear(4, CLASSES),
        )

    def unknown_net() -> nn.Module:
        return nn.Sequential(ToFeatures(), nn.Flatten(), nn.Linear(64, CLASSES), nn.PReLU())

    def two_heads(order: Sequence[str]) -> nn.Module:
        """Two layers, registered in an ``order``; the second's output is used."""

        class Heads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.flatten = nn.Sequential(ToFeatures(), nn.Flatten())
                for name in order:
                    inputs, outputs = {"first": (64, 5), "second": (5, CLASSES)}[name]
                    setattr(self, name, nn.Linear(inputs, outputs))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.second(self.first(self.flatten(x)).tanh())

        return Heads()

    def train_one_bias(net: nn.Module) -> None:
        """Leaves the second of an LSTM's biases alone, as tie() does."""
        for module in net.modules():
            if isinstance(module, nn.LSTM):
                module.bias_hh_l0.requires_grad_(False)

    def double(make: Callable[[], nn.Module]) -> nn.Module:
        return make().double()

    def freeze_first(net: nn.Module) -> None:
        next(net.parameters()).requires_grad_(False)

    def sgd(net: nn.Module, rate: float = 0.1, **settings: Any) -> Any:
        return torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, **settings)

    def adam(net: nn.Module, epsilon: float = 1e-12) -> Any:
        return torch.optim.Adam(net.parameters(), lr=0.01, eps=epsilon)

    def train(net: nn.Module, optimizer: Any, batches: Sequence[Batch], passes: int = 1) -> None:
        for number, (x, y) in enumerate(batches, start=1):
            loss = functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(y))
            loss.backward()
            if number % passes == 0:
                optimizer.step()
                optimizer.zero_grad()

else:
    import keras
    from keras import layers as kl

    keras.utils.set_random_seed(SEED)

    def conv_net(filters: int = 5, bias: bool = True) -> Any:
        return keras.Sequential(
            [
                *(keras.Input((8, 8, 1)), kl.Conv2D(4, 3, padding="same", activation="tanh")),
                *(kl.AveragePooling2D(2), kl.Conv2D(filters, 3, activation="tanh")),
                *(kl.Flatten(), kl.Dense(CLASSES, use_bias=bias)),
            ]
        )

    def norm_net(epsilon: float = 1e-3) -> Any:
        return keras.Sequential(
            [
                *(keras.Input((8, 8, 1)), kl.Conv2D(4, 3, padding="same", use_bias=False)),
                *(kl.BatchNormalization(epsilon=epsilon, momentum=0.9), kl.Flatten()),
                kl.Dense(CLASSES),
            ]
        )

    def text_net() -> Any:
        return keras.Sequential(
            [
                *(keras.Input((SENTENCE,), dtype="int32"), kl.Embedding(9, 6)),
                *(kl.LSTM(5, return_sequences=True), kl.GRU(4), kl.Dense(CLASSES)),
            ]
        )

    def unknown_net() -> Any:
        image = keras.Input((8, 8, 1))
        return keras.Sequential([image, kl.Flatten(), kl.Dense(CLASSES), kl.PReLU()])

    def two_heads(order: Sequence[str]) -> Any:
        """Two layers, assigned in an ``order``; the second's output is used."""

        class Heads(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.flatten = kl.Flatten()
                for name in order:
                    setattr(self, name, kl.Dense(5 if name == "first" else CLASSES, name=name))

            def call(self, x: Any) -> Any:
                return self.second(keras.ops.tanh(self.first(self.flatten(x))))

        net = Heads()
        net(np.zeros((1, 8, 8, 1), "float32"))
        return net

    def train_one_bias(net: Any) -> None:
        """Keras's LSTM has one bias."""

    def double(make: Callable[[], Any]) -> Any:
        keras.config.set_dtype_policy("float64")
        try:
            return make()
        finally:
            keras.config.set_dtype_policy("float32")

    def freeze_first(net: Any) -> None:
        # Of the first layer's variables, which are frozen together.
        net.layers[0].trainable = False

    def sgd(net: Any, rate: float = 0.1, **settings: Any) -> Any:
        return keras.optimizers.SGD(rate, momentum=0.9, **settings)

    def adam(net: Any, epsilon: float = 1e-12) -> Any:
        return keras.optimizers.Adam(0.01, epsilon=epsilon)

    def train(net: Any, optimizer: Any, batches: Sequence[Batch], passes: int = 1) -> None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(optimizer=optimizer, loss=loss)
        for x, y in batches:
            net.train_on_batch(x, y)


def images(steps: int, part: int, rows: int = 4) -> list[Batch]:
    """Batches of one rank."""
    generator = np.random.default_rng(100 + part)
    return [
        (
            generator.uniform(-1, 1, (rows, 8, 8, 1)).astype("float32"),
            generator.integers(0, CLASSES, rows),
        )
        for _ in range(steps)
    ]


def sentences(steps: int, part: int, rows: int = 4) -> list[Batch]:
    """Batches of one rank."""
    generator = np.random.default_rng(200 + part)
    return [
        (generator.integers(0, 9, (rows, SENTENCE)), generator.integers(0, CLASSES, rows))
        for _ in range(steps)
    ]


def joined(parts: Sequence[Sequence[Batch]]) -> list[Batch]:
    """The batches that one process would see."""
    return [
        tuple(np.concatenate(pieces) for pieces in zip(*batches, strict=True))
        for batches in zip(*parts, strict=True)
    ]
