"""Each layer that torch and Keras share computes the same in both, given the same weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import torch
from keras import layers as kl
from torch import nn

from bagua_ext import interop
from bagua_ext.interop import _keras_side, _torch_side, handshake
from bagua_ext.interop.wire import Wire

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
ON_TENSORFLOW = keras.config.backend() == "tensorflow"

Case = tuple[Any, nn.Module, tuple[int, ...]]
Model = Callable[[], Case]


class Recurrent(nn.Module):
    """The outputs of a recurrent layer without its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class ToChannelsLast(nn.Module):
    """Flattens as Keras does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.movedim(1, -1).flatten(1)


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def forward(self, outcome: Any) -> torch.Tensor:
        return outcome[0][:, -1]


def sequences(cell: Any, units: int, **options: Any) -> Any:
    return cell(units, return_sequences=True, **options)


def batch_norm(form: Any, channels: int) -> nn.Module:
    return form(channels, eps=1e-3, momentum=0.01)


# Keras layers, the torch model, and the shape of one Keras sample.
CASES: dict[str, Model] = {
    "dense": lambda: ([kl.Dense(3)], nn.Linear(5, 3), (5,)),
    "dense without bias": lambda: (
        [kl.Dense(3, use_bias=False)],
        nn.Linear(5, 3, bias=False),
        (5,),
    ),
    "conv1d strided": lambda: ([kl.Conv1D(4, 3, strides=2)], nn.Conv1d(3, 4, 3, 2), (9, 3)),
    "conv1d causal": lambda: (
        [kl.Conv1D(4, 3, padding="causal", dilation_rate=2)],
        nn.Sequential(nn.ZeroPad1d((4, 0)), nn.Conv1d(3, 4, 3, dilation=2)),
        (9, 3),
    ),
    "conv2d same": lambda: (
        [kl.Conv2D(4, (3, 2), padding="same")],
        nn.Conv2d(3, 4, (3, 2), padding="same"),
        (6, 5, 3),
    ),
    "conv2d padded by itself": lambda: (
        [kl.ZeroPadding2D(((1, 2), (3, 0))), kl.Conv2D(4, 3)],
        nn.Sequential(nn.ZeroPad2d((3, 0, 1, 2)), nn.Conv2d(3, 4, 3)),
        (6, 5, 3),
    ),
    "conv2d same strided": lambda: (
        [kl.Conv2D(4, 3, strides=2, padding="same")],
        nn.Sequential(nn.ZeroPad2d((1, 1, 0, 1)), nn.Conv2d(3, 4, 3, 2)),
        (6, 5, 3),
    ),
    "conv3d": lambda: (
        [kl.Conv3D(4, (3, 1, 2))],
        nn.Conv3d(2, 4, (3, 1, 2)),
        (4, 3, 5, 2),
    ),
    "conv1d transpose": lambda: (
        [kl.Conv1DTranspose(4, 4, strides=2, padding="same")],
        nn.ConvTranspose1d(3, 4, 4, 2, padding=1),
        (5, 3),
    ),
    "conv2d transpose": lambda: (
        [kl.Conv2DTranspose(4, (3, 2), strides=(2, 2))],
        nn.ConvTranspose2d(3, 4, (3, 2), 2),
        (5, 4, 3),
    ),
    "conv2d transpose wide strides": lambda: (
        [kl.Conv2DTranspose(4, 2, strides=3)],
        nn.ConvTranspose2d(3, 4, 2, 3, output_padding=1),
        (5, 4, 3),
    ),
    "conv3d transpose": lambda: (
        [kl.Conv3DTranspose(4, (3, 1, 2))],
        nn.ConvTranspose3d(2, 4, (3, 1, 2)),
        (4, 3, 5, 2),
    ),
    "depthwise conv1d": lambda: (
        [kl.DepthwiseConv1D(3, depth_multiplier=2)],
        nn.Conv1d(4, 8, 3, groups=4),
        (9, 4),
    ),
    "depthwise conv2d": lambda: (
        [kl.DepthwiseConv2D((3, 2), depth_multiplier=2)],
        nn.Conv2d(4, 8, (3, 2), groups=4),
        (6, 5, 4),
    ),
    "batch norm 1d": lambda: ([kl.BatchNormalization()], batch_norm(nn.BatchNorm1d, 5), (5,)),
    "batch norm 2d": lambda: ([kl.BatchNormalization()], batch_norm(nn.BatchNorm2d, 5), (3, 4, 5)),
    "batch norm 3d": lambda: (
        [kl.BatchNormalization()],
        batch_norm(nn.BatchNorm3d, 5),
        (3, 4, 2, 5),
    ),
    "layer norm": lambda: ([kl.LayerNormalization()], nn.LayerNorm(5, eps=1e-3), (5,)),
    "layer norm of images": lambda: (
        [kl.LayerNormalization(axis=(1, 2, 3))],
        nn.LayerNorm((5, 3, 4), eps=1e-3),
        (3, 4, 5),
    ),
    "group norm": lambda: (
        [kl.GroupNormalization(3)],
        nn.GroupNorm(3, 6, eps=1e-3),
        (4, 5, 6),
    ),
    "embedding": lambda: ([kl.Embedding(7, 4)], nn.Embedding(7, 4), (5,)),
    "simple rnn": lambda: (
        [sequences(kl.SimpleRNN, 6)],
        Recurrent(nn.RNN(4, 6, batch_first=True)),
        (5, 4),
    ),
    "lstm": lambda: (
        [sequences(kl.LSTM, 6)],
        Recurrent(nn.LSTM(4, 6, batch_first=True)),
        (5, 4),
    ),
    "gru": lambda: ([sequences(kl.GRU, 6)], Recurrent(nn.GRU(4, 6, batch_first=True)), (5, 4)),
    "gru without bias": lambda: (
        [sequences(kl.GRU, 6, use_bias=False)],
        Recurrent(nn.GRU(4, 6, bias=False, batch_first=True)),
        (5, 4),
    ),
    "stacked lstm": lambda: (
        [sequences(kl.LSTM, 6), sequences(kl.LSTM, 6)],
        Recurrent(nn.LSTM(4, 6, num_layers=2, batch_first=True)),
        (5, 4),
    ),
    "flatten behind conv1d": lambda: (
        [kl.Conv1D(3, 2), kl.Flatten(), kl.Dense(4)],
        nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(15, 4)),
        (6, 2),
    ),
    "flatten behind conv2d": lambda: (
        [kl.Conv2D(3, 2), kl.BatchNormalization(), kl.ReLU(), kl.MaxPooling2D(), kl.Dropout(0.5)]
        + [kl.Flatten(), kl.Activation("tanh"), kl.BatchNormalization(), kl.Dense(4)],
        nn.Sequential(
            *(nn.Conv2d(2, 3, 2), batch_norm(nn.BatchNorm2d, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Tanh(), batch_norm(nn.BatchNorm1d, 18), nn.Linear(18, 4)),
        ),
        (7, 5, 2),
    ),
    "flatten behind conv3d": lambda: (
        [kl.Conv3D(3, 2), kl.Reshape((-1,)), kl.Dense(4), kl.Dense(4)],
        nn.Sequential(nn.Conv3d(2, 3, 2), nn.Flatten(), nn.Linear(72, 4), nn.Linear(4, 4)),
        (4, 3, 5, 2),
    ),
    "flatten of images": lambda: (
        [kl.Flatten(), kl.LayerNormalization(), kl.Dense(4)],
        nn.Sequential(nn.Flatten(), nn.LayerNorm(24, eps=1e-3), nn.Linear(24, 4)),
        (4, 3, 2),
    ),
    "flatten of permuted images": lambda: (
        [kl.Permute((3, 1, 2)), kl.Flatten(), kl.Dense(4)],
        nn.Sequential(nn.Flatten(), nn.Linear(24, 4)),
        (4, 3, 2),
    ),
    "flatten of channels put last": lambda: (
        [kl.Permute((3, 1, 2)), kl.Flatten(data_format="channels_first"), kl.Dense(4)],
        nn.Sequential(nn.Flatten(), nn.Linear(24, 4)),
        (4, 3, 2),
    ),
    "images made of features": lambda: (
        [kl.Dense(24), kl.BatchNormalization(), kl.ReLU(), kl.Reshape((4, 3, 2))]
        + [kl.Conv2DTranspose(3, 2), kl.Flatten(), kl.Dense(4)],
        nn.Sequential(
            *(nn.Linear(5, 24), batch_norm(nn.BatchNorm1d, 24), nn.ReLU()),
            *(nn.Unflatten(1, (2, 4, 3)), nn.ConvTranspose2d(2, 3, 2)),
            *(nn.Flatten(), nn.Linear(60, 4)),
        ),
        (5,),
    ),
    "signals made of features": lambda: (
        [kl.Dense(12), kl.Reshape((6, 2)), kl.Conv1D(3, 2), kl.Flatten()],
        nn.Sequential(
            *(nn.Linear(5, 12), nn.Unflatten(1, (2, 6)), nn.Conv1d(2, 3, 2)),
            ToChannelsLast(),
        ),
        (5,),
    ),
    "sequences made of features": lambda: (
        [kl.Dense(12), kl.Reshape((6, 2)), kl.LSTM(3)],
        nn.Sequential(
            *(nn.Linear(5, 12), nn.Unflatten(1, (6, 2)), nn.LSTM(2, 3, batch_first=True), Last()),
        ),
        (5,),
    ),
    "no flatten behind pooling": lambda: (
        [kl.Conv2D(3, 2), kl.GlobalAveragePooling2D(), kl.Flatten(), kl.Dense(4)],
        nn.Sequential(
            *(nn.Conv2d(2, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)),
        ),
        (7, 5, 2),
    ),
}


if ON_TENSORFLOW:  # Keras imports it anyway to make a Bidirectional
    CASES["stacked bidirectional gru"] = lambda: (
        [kl.Bidirectional(sequences(kl.GRU, 6)), kl.Bidirectional(sequences(kl.GRU, 6))],
        Recurrent(nn.GRU(4, 6, num_layers=2, batch_first=True, bidirectional=True)),
        (5, 4),
    )
else:  # TensorFlow convolves channels first on GPUs alone
    first = {"data_format": "channels_first"}
    CASES["channels first"] = lambda: (
        [kl.Conv2D(3, 2, **first), kl.MaxPooling2D(2, **first), kl.Flatten(), kl.Dense(4)],
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 4)),
        (2, 7, 5),
    )
    CASES["channels first, flattened last"] = lambda: (
        [kl.Conv2D(3, 2, strides=2, padding="same", **first), kl.Flatten(**first), kl.Dense(4)],
        nn.Sequential(
            *(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(2, 3, 2, stride=2)),
            *(nn.Flatten(), nn.Linear(36, 4)),
        ),
        (2, 7, 5),
    )


def is_sequence(name: str) -> bool:
    """True where torch's axes are Keras's: no channels to be moved."""
    words = ("rnn", "lstm", "gru", "embedding", "channels first")
    return any(word in name for word in words)


def randomize(model: keras.Model, generator: np.random.Generator) -> None:
    for variable in model.weights:
        low = 0.5 if "variance" in variable.path else -0.5
        value = generator.uniform(low, 1.0, variable.shape).astype("float32")
        variable.assign(value)


def to_torch(value: np.ndarray, moves: bool) -> torch.Tensor:
    axes = (0, value.ndim - 1, *range(1, value.ndim - 1)) if moves else range(value.ndim)
    return torch.from_numpy(np.ascontiguousarray(value.transpose(tuple(axes))))


def sample(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    if "embedding" in name:
        return generator.integers(0, 7, (3, *shape))
    return generator.uniform(-1, 1, (3, *shape)).astype("float32")


def keras_gradients(model: keras.Model, x: np.ndarray, weighting: np.ndarray) -> Any:
    """The output, and the gradients of its weighted sum."""
    variables = model.trainable_variables
    if ON_TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            output = model(x, training=False)
            loss = tf.reduce_sum(output * weighting)
        return output.numpy(), tape.gradient(loss, [v.value for v in variables])
    output = model(torch.from_numpy(x), training=False)
    (output * torch.from_numpy(weighting)).sum().backward()
    return output.detach().numpy(), [v.value.grad for v in variables]


def check_case(name: str, keras_model: keras.Model, torch_model: nn.Module, shape: Any) -> None:
    generator = np.random.default_rng(len(name))
    randomize(keras_model, generator)
    canonical = interop.weights(keras_model)
    interop.load_weights(torch_model, canonical)
    for key, value in interop.weights(torch_model).items():
        np.testing.assert_array_equal(value, canonical[key], err_msg=f"{name}: {key}")

    x = sample(name, shape, generator)
    moves = not is_sequence(name)
    theirs = torch_model.eval()(to_torch(x, moves and x.ndim > 2))
    weighting = generator.uniform(-1, 1, keras_model.output_shape).astype("float32")
    (theirs * to_torch(weighting, moves)).sum().backward()
    own, gradients = keras_gradients(keras_model, x, weighting)
    moved = to_torch(own, moves).numpy()
    np.testing.assert_allclose(moved, theirs.detach().numpy(), **TOLERANCE, err_msg=name)
    check_gradients(name, keras_model, torch_model, gradients)
    check_the_way_back(name, keras_model, canonical)
    check_they_agree(name, keras_model, torch_model)


def check_gradients(
    name: str, keras_model: keras.Model, torch_model: nn.Module, gradients: list[Any]
) -> None:
    variables = keras_model.trainable_variables
    entries = [e for e in _keras_side.list_model(keras_model, None, None).entries if e.trainable]
    wire = Wire(entries, [entry.layout for entry in entries], id)
    sent = dict(zip(wire.names, wire.encode(gradients, variables), strict=True))
    for entry in _torch_side.list_model(torch_model, None, None).entries:
        if entry.trainable:
            expected = entry.holder.grad.numpy()
            got = keras.ops.convert_to_numpy(sent.pop(entry.name))
            np.testing.assert_allclose(got, expected, **TOLERANCE, err_msg=f"{name}: {entry.name}")
    assert not sent, sent.keys()
    back = wire.decode(wire.encode(gradients, variables), variables)
    for gradient, received in zip(gradients, back, strict=True):
        pair = (
            keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(g)) for g in (gradient, received)
        )
        np.testing.assert_array_equal(*pair, err_msg=name)


def check_the_way_back(name: str, model: keras.Model, canonical: dict[str, np.ndarray]) -> None:
    before = [keras.ops.convert_to_numpy(v).copy() for v in model.weights]
    for variable in model.weights:
        variable.assign(keras.ops.zeros_like(variable))
    interop.load_weights(model, canonical)
    for value, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(value, keras.ops.convert_to_numpy(variable), err_msg=name)


def check_they_agree(name: str, keras_model: keras.Model, torch_model: nn.Module) -> None:
    """The handshake finds no difference between the two."""
    reports = [
        handshake.report_of(side.framework(), side.list_model(model, None, None), {})
        for side, model in ((_keras_side, keras_model), (_torch_side, torch_model))
    ]
    assert handshake.complaint(reports, [0, 1]) == "", (name, handshake.complaint(reports, [0, 1]))
    # An activation is a layer of its own in torch.
    facts = [{f for f in r.facts if not f.endswith(".activation")} for r in reports]
    assert facts[0] == facts[1] or "output_padding" in name, (name, facts)


# ---- Models of several paths --------------------------------------------------------------------


def nested_sum() -> Case:
    """Two flattened paths, one of them a nested model, are added."""
    image = keras.Input((6, 5, 2), batch_size=3)
    inner = keras.Sequential([keras.Input((6, 5, 2)), kl.Conv2D(3, 2), kl.Flatten()])
    other = kl.Flatten()(kl.Conv2D(3, 2)(image))
    added = kl.Dense(4)(kl.Add()([inner(image), other]))

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 3, 2), nn.Conv2d(2, 3, 2)
            self.dense = nn.Linear(60, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dense((self.first(x) + self.second(x)).flatten(1))

    return keras.Model(image, added), Sum(), (6, 5, 2)


def without_layers() -> Case:
    """Keras's functions instead of layers that permute and flatten."""
    image = keras.Input((6, 5, 2), batch_size=3)
    first = keras.ops.reshape(kl.Conv2D(3, 2)(image), (3, 60))
    second = keras.ops.reshape(keras.ops.transpose(kl.Conv2D(3, 2)(image), (0, 3, 1, 2)), (3, 60))
    scores = keras.ops.tanh(kl.Dense(4)(first)) + kl.Dense(4)(second)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 3, 2), nn.Conv2d(2, 3, 2)
            self.scores, self.others = nn.Linear(60, 4), nn.Linear(60, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.first(x).flatten(1), self.second(x).flatten(1)
            return self.scores(first).tanh() + self.others(second)

    return keras.Model(image, scores), Sum(), (6, 5, 2)


def subclassed() -> Case:
    """A model without a graph is a chain of its layers."""

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.flatten, self.dense = kl.Conv2D(3, 2), kl.Flatten(), kl.Dense(4)
            self.output_shape = (3, 4)

        def call(self, x: Any) -> Any:
            return self.dense(self.flatten(self.conv(x)))

    net = Net()
    net(np.zeros((3, 6, 5, 2), "float32"))
    return net, nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(60, 4)), (6, 5, 2)


# ---- What cannot be tied ------------------------------------------------------------------------


def flattened_and_joined() -> keras.Model:
    image = keras.Input((4, 3, 2))
    both = kl.Concatenate(name="join")([kl.Flatten()(image), kl.Flatten()(image)])
    return keras.Model(image, kl.Dense(4)(both))


def of_layer(shape: tuple[int, ...], layer: Any) -> keras.Model:
    return keras.Sequential([keras.Input(shape), layer])


def features_of_a_recurrent_layer() -> keras.Model:
    cut = [kl.LSTM(12), kl.Reshape((3, 2, 2)), kl.Conv2D(3, 2, name="window")]
    return keras.Sequential([keras.Input((5, 4)), *cut])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "join": (flattened_and_joined, "data_format='channels_first'"),
    "window": (features_of_a_recurrent_layer, "data_format='channels_first'"),
    "not built": (lambda: keras.Sequential([kl.Dense(3)]), "Input"),
    "'gru'": (lambda: of_layer((5, 4), kl.GRU(3, reset_after=False, name="gru")), "reset_after"),
    "'lstm'": (lambda: of_layer((5, 4), kl.LSTM(3, activation="relu", name="lstm")), "tanh"),
    "'prelu'": (lambda: of_layer((5,), kl.PReLU(name="prelu")), "names="),
    "'0'": (lambda: nn.Sequential(nn.Bilinear(3, 3, 2)), "names="),
    "'' (LSTM)": (lambda: nn.LSTM(4, 6, proj_size=2), "not in the table"),
    "'parametrizations.weight": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        "not in the table",
    ),
    "no shapes": (lambda: nn.LazyLinear(3), "run a batch"),
    "something else": (lambda: object(), "torch Module or a Keras model, got object"),
}


if ON_TENSORFLOW:
    REFUSED["'both'"] = (
        lambda: of_layer((5, 4), kl.Bidirectional(kl.LSTM(3), merge_mode="sum", name="both")),
        "concat",
    )


def check_refusals() -> None:
    for what, (make, advice) in REFUSED.items():
        try:
            interop.weights(make())
        except ValueError as error:
            told = str(error)
            assert advice in told and (what in told or what == "something else"), (what, told)
            continue
        raise AssertionError(f"{what} was not refused")


# What torch has no word for, and a model that is the same otherwise.
ONLY_KERAS: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module]]] = {
    "kernel.constraint": (
        lambda: of_layer((4,), kl.Dense(3, kernel_constraint="non_neg")),
        lambda: nn.Sequential(nn.Linear(4, 3)),
    ),
    "kernel.regularizer": (
        lambda: of_layer((4,), kl.Dense(3, kernel_regularizer="l2")),
        lambda: nn.Sequential(nn.Linear(4, 3)),
    ),
    "mask_zero": (
        lambda: of_layer((5,), kl.Embedding(7, 3, mask_zero=True)),
        lambda: nn.Sequential(nn.Embedding(7, 3)),
    ),
    "go_backwards": (
        lambda: of_layer((5, 4), kl.LSTM(3, go_backwards=True)),
        lambda: nn.Sequential(nn.LSTM(4, 3)),
    ),
    "synchronized": (
        lambda: of_layer(
            (4,), kl.BatchNormalization(epsilon=1e-5, momentum=0.9, synchronized=True)
        ),
        lambda: nn.Sequential(nn.BatchNorm1d(4)),
    ),
}


def check_what_only_keras_does_is_told() -> None:
    for what, (make_keras, make_torch) in ONLY_KERAS.items():
        told = complaint_of(make_keras(), None, make_torch(), None)
        assert what in told and "nothing" in told, (what, told)


def check_optimizers_that_step_otherwise_are_told() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
    sgd = keras.optimizers.SGD
    different = {
        "learning_rate_schedule": sgd(schedule),
        "loss_scale_factor": sgd(0.5, loss_scale_factor=8.0),
        "LossScaleOptimizer": keras.optimizers.LossScaleOptimizer(sgd(0.5)),
    }
    for what, optimizer in different.items():
        model = nn.Sequential(nn.Linear(4, 3))
        plain = torch.optim.SGD(model.parameters(), lr=0.5)
        told = complaint_of(of_layer((4,), kl.Dense(3)), optimizer, model, plain)
        assert what in told, (what, told)
    same = torch.optim.SGD(model.parameters(), lr=0.5)
    assert complaint_of(of_layer((4,), kl.Dense(3)), sgd(0.5), model, same) == ""


def complaint_of(
    keras_model: keras.Model, keras_optimizer: Any, torch_model: nn.Module, torch_optimizer: Any
) -> str:
    reports = []
    for side, model, optimizer in (
        (_keras_side, keras_model, keras_optimizer),
        (_torch_side, torch_model, torch_optimizer),
    ):
        listing = side.list_model(model, optimizer, None)
        settings = side.optimizer_settings(optimizer, listing) if optimizer else {}
        reports.append(handshake.report_of(side.framework(), listing, settings))
    return handshake.complaint(reports, [0, 1])


def cases() -> Iterator[tuple[str, keras.Model, nn.Module, tuple[int, ...]]]:
    for name, make in CASES.items():
        layers, torch_model, shape = make()
        dtype = "int32" if "embedding" in name else "float32"
        keras_model = keras.Sequential([keras.Input(shape, batch_size=3, dtype=dtype), *layers])
        yield name, keras_model, torch_model, shape
    yield "nested sum", *nested_sum()
    yield "without layers", *without_layers()
    yield "subclassed", *subclassed()


if __name__ == "__main__":
    for case in cases():
        if len(sys.argv) < 2 or case[0] in sys.argv[1:]:
            check_case(*case)
            print(case[0], "ok")
    check_refusals()
