"""A process that uses both frameworks. Even ranks import torch first, odd ones last."""

from __future__ import annotations

import os

import numpy as np

if int(os.environ["BAGUA_RANK"]) % 2 == 0:
    import torch

    import bagua_ext.torch as first  # isort: skip
    import tensorflow as tf

    import bagua_ext.tensorflow as second  # isort: skip
else:
    import tensorflow as tf

    import bagua_ext.tensorflow as second  # isort: skip
    import torch

    import bagua_ext.torch as first  # isort: skip


def train_torch(inputs: np.ndarray) -> np.ndarray:
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = first.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.from_numpy(inputs)).square().mean().backward()
        optimizer.step()
    return model.weight.detach().numpy()[0]


def train_tensorflow(inputs: np.ndarray) -> np.ndarray:
    weight = tf.Variable(tf.ones((3, 1)))

    @tf.function
    def step() -> None:
        with second.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(tf.square(tf.constant(inputs) @ weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    for _ in range(3):
        step()
    return weight.numpy()[:, 0]


def train_alone(inputs: np.ndarray) -> np.ndarray:
    weight = np.ones((3, 1))
    for _ in range(3):
        weight = weight - 0.1 * 2 * inputs.T @ (inputs @ weight) / len(inputs)
    return weight[:, 0]


def main() -> None:
    second.init()
    assert first.is_initialized() and first.rank() == second.rank()
    rank, size = first.rank(), first.size()
    rows = np.random.default_rng(3).normal(size=(size, 4, 3)).astype(np.float32)
    # One operation whose ends are a torch and a TensorFlow tensor.
    if rank % 2 == 0:
        got = first.allreduce(torch.from_numpy(rows[rank]), name="meeting").numpy()
    else:
        got = second.allreduce(tf.constant(rows[rank]), name="meeting").numpy()
    np.testing.assert_allclose(got, rows.mean(axis=0), rtol=1e-6)
    want = train_alone(rows.reshape(-1, 3).astype(np.float64))
    np.testing.assert_allclose(train_torch(rows[rank]), want, rtol=1e-5)
    np.testing.assert_allclose(train_tensorflow(rows[rank]), want, rtol=1e-5)
    first.shutdown()
    assert not second.is_initialized()
    print(f"rank {rank} used both", flush=True)


if __name__ == "__main__":
    main()
