"""The table of Keras's layers: what each is in every framework, and how its tensors lie in torch's.

A layout says how a Keras variable becomes torch's parameter: dense kernels are transposed, kernels
of convolutions go from (*window, in, out) to (out, in, *window), gates of a GRU change places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
from keras import layers as kl

from bagua_ext.interop._keras_flow import Features, Flow, follow
from bagua_ext.interop.layout import Layout
from bagua_ext.interop.listing import Layer


def list_layers(model: keras.Model) -> tuple[list[Layer], list[str]]:
    """Returns the layers that have variables, in the order of ``model.layers``, models unfolded.

    Also returns what keeps ranks of torch from having the same model.

    Raises:
        ValueError: the model has no variables yet.
    """
    if not model.built:
        raise ValueError(f"model '{model.name}' is not built: give it an Input, or call it")
    flow = follow(model)
    layers = []
    for layer in _unfolded(model):
        variables = _variables(layer)
        if variables:
            layers.append(_without_model(_listed(layer, variables, flow), f"{model.name}/"))
    return layers, flow.problems


def _without_model(listed: Layer, prefix: str) -> Layer:
    """Takes the model's own name, which Keras numbers, off all paths."""
    entries = [replace(entry, own=entry.own.removeprefix(prefix)) for entry in listed.entries]
    problem = listed.problem.replace(f"'{prefix}", "'")
    own = listed.own.removeprefix(prefix)
    return replace(listed, own=own, entries=entries, problem=problem)


def _unfolded(model: keras.Model) -> Iterator[Any]:
    seen: set[int] = set()
    for layer in model.layers:
        for own in _unfolded(layer) if isinstance(layer, keras.Model) else (layer,):
            if id(own) not in seen:
                seen.add(id(own))
                yield own


def _variables(layer: Any) -> list[Any]:
    """Returns the layer's variables without the states of random generators and metrics."""
    if not layer.built and not layer.weights:
        raise ValueError(f"layer '{layer.name}' is not built: call the model on a batch first")
    return list(layer.weights)


def _listed(layer: Any, variables: list[Any], flow: Flow) -> Layer:
    make = next((make for kind, make in _TABLE.items() if isinstance(layer, kind)), None)
    if make is None:
        return _unknown(layer, variables, "")
    features = flow.inlets.get(id(layer), Features()), flow.outlets.get(id(layer), Features())
    listed = make(layer, *features)
    known = {id(entry.holder) for entry in listed.entries}
    if known != {id(variable) for variable in variables}:
        return _unknown(layer, variables, listed.problem)
    return listed


def _unknown(layer: Any, variables: list[Any], why: str) -> Layer:
    kind, path = type(layer).__name__, layer.path
    listed = Layer(kind.lower(), path)
    why = why or "it is not in the table of layers that they share, or has arguments that are not."
    listed.problem = (
        f"layer '{path}' ({kind}) cannot be tied to another framework's: {why} Build the model of "
        "other layers; names= can leave out what is not trained."
    )
    for variable in variables:
        name = variable.path.removeprefix(f"{path}/").replace("/", ".")
        listed.add(name, variable.path, variable, Layout.same(tuple(variable.shape)))
    return listed


def _add(listed: Layer, variable: Any, name: str, layout: Layout | None = None) -> None:
    if variable is None:
        return
    layout = layout or Layout.same(tuple(variable.shape))
    listed.add(name, variable.path, variable, layout)
    # Ranks of torch train without them.
    for what in ("constraint", "regularizer"):
        if getattr(variable, what, None) is not None:
            listed.settings[f"{name}.{what}"] = type(getattr(variable, what)).__name__


def _note_activation(listed: Layer, layer: Any) -> None:
    """For ranks of Keras alone: in torch it is a layer of its own."""
    listed.facts["activation"] = str(keras.activations.serialize(layer.activation))


# ---- Layouts ------------------------------------------------------------------------------------


def _moved(shape: Any, *axes: int) -> Layout:
    """The layout of a variable whose axes change places."""
    shape = tuple(shape)
    return Layout(tuple(shape[axis] for axis in axes), shape, axes)


def _axes(count: int, features: Features) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the sizes of the axes that ``count`` features are made of, and torch's order."""
    if features.is_mixed and math.prod(features.dims) == count:
        return features.dims, features.order
    return (count,), (0,)


def _of_features(count: int, features: Features) -> Layout:
    """The layout of a variable with one value for each feature."""
    return Layout((count,), *_axes(count, features))


def _of_kernel(shape: Any, inlet: Features, outlet: Features) -> Layout:
    """The layout of a dense kernel (in, out); torch's is (out, in)."""
    inputs, outputs = shape
    in_dims, in_order = _axes(inputs, inlet)
    out_dims, out_order = _axes(outputs, outlet)
    axes = (*(len(in_dims) + axis for axis in out_order), *in_order)
    return Layout((outputs, inputs), (*in_dims, *out_dims), axes)


def _of_gates(shape: Any, gates: int, blocks: tuple[int, ...]) -> Layout:
    """The layout of a recurrent layer's kernel (in, gates * units); torch's is its transpose."""
    inputs, width = shape
    split = (inputs, gates, width // gates)
    return Layout((width, inputs), split, (1, 2, 0), blocks)


# ---- Layers -------------------------------------------------------------------------------------


def _dense(layer: Any, inlet: Features, outlet: Features) -> Layer:
    listed = Layer("dense", layer.path)
    if layer.kernel is not None and len(layer.kernel.shape) == 2:
        _add(listed, layer.kernel, "kernel", _of_kernel(layer.kernel.shape, inlet, outlet))
        _add(listed, layer.bias, "bias", _of_features(layer.kernel.shape[1], outlet))
    _note_activation(listed, layer)
    return listed


def _embedding(layer: Any, inlet: Features, outlet: Features) -> Layer:
    listed = Layer("embedding", layer.path)
    if layer.mask_zero:
        listed.settings["mask_zero"] = True
    _add(listed, layer.embeddings, "embeddings")
    return listed


def _conv(layer: Any, inlet: Features, outlet: Features) -> Layer:
    rank = layer.rank
    listed = Layer(f"conv{rank}d", layer.path)
    listed.settings = _conv_settings(layer) | {"groups": layer.groups}
    window = range(rank)
    _add(listed, layer.kernel, "kernel", _moved(layer.kernel.shape, rank + 1, rank, *window))
    _add(listed, layer.bias, "bias")
    _add_padding(listed, layer, inlet)
    _note_activation(listed, layer)
    return listed


def _depthwise(layer: Any, inlet: Features, outlet: Features) -> Layer:
    """In torch a convolution with as many groups as channels."""
    rank = layer.rank
    kernel = layer.kernel
    *window, channels, multiplier = kernel.shape
    listed = Layer(f"conv{rank}d", layer.path)
    listed.settings = _conv_settings(layer) | {"groups": channels}
    layout = _moved(kernel.shape, rank, rank + 1, *range(rank))
    layout = Layout((channels * multiplier, 1, *window), layout.split, layout.axes)
    _add(listed, kernel, "kernel", layout)
    _add(listed, layer.bias, "bias")
    _add_padding(listed, layer, inlet)
    _note_activation(listed, layer)
    return listed


def _conv_transpose(layer: Any, inlet: Features, outlet: Features) -> Layer:
    rank = layer.rank
    listed = Layer(f"conv{rank}d_transpose", layer.path)
    listed.settings = _conv_settings(layer) | {"groups": 1}
    window = range(rank)
    _add(listed, layer.kernel, "kernel", _moved(layer.kernel.shape, rank + 1, rank, *window))
    _add(listed, layer.bias, "bias")
    listed.facts["cropping"] = [_cropping(layer, axis) for axis in range(rank)]
    _note_activation(listed, layer)
    return listed


def _conv_settings(layer: Any) -> dict[str, Any]:
    return {"strides": tuple(layer.strides), "dilation": tuple(layer.dilation_rate)}


def _add_padding(listed: Layer, layer: Any, inlet: Features) -> None:
    """States the zeros before and after each spatial axis if they are known."""
    sides = [_sides(layer, inlet, axis) for axis in range(layer.rank)]
    if None not in sides:
        listed.facts["padding"] = sides


def _sides(layer: Any, inlet: Features, axis: int) -> tuple[int, int] | None:
    padded = inlet.padded[axis] if inlet.padded else (0, 0)
    reach = (layer.kernel_size[axis] - 1) * layer.dilation_rate[axis]
    if layer.padding == "valid":
        return padded
    if layer.padding == "causal":
        return padded[0] + reach, padded[1]
    stride = layer.strides[axis]
    total = reach
    if stride > 1:
        first = 1 if layer.data_format == "channels_last" else 2
        length = inlet.shape[first + axis] if inlet.shape else None
        if length is None:
            return None
        total = max((math.ceil(length / stride) - 1) * stride + reach + 1 - length, 0)
    return padded[0] + total // 2, padded[1] + total - total // 2


def _cropping(layer: Any, axis: int) -> tuple[int, int]:
    """Returns what is cut off before and after; a negative number is added behind."""
    stride = layer.strides[axis]
    reach = (layer.kernel_size[axis] - 1) * layer.dilation_rate[axis]
    more = None if layer.output_padding is None else layer.output_padding[axis]
    if layer.padding == "valid":
        return 0, -(max(stride - reach - 1, 0) if more is None else more)
    kernel = reach + 1
    total = stride + kernel - 2 if more is None else kernel + kernel % 2 - 2 + more
    left = min(total - total // 2, reach)
    return reach - left, reach - (total - left)


def _batch_norm(layer: Any, inlet: Features, outlet: Features) -> Layer:
    listed = Layer("batch_norm", layer.path)
    listed.settings = {"epsilon": layer.epsilon, "momentum": layer.momentum}
    if getattr(layer, "synchronized", False) or type(layer).__name__ == "SyncBatchNormalization":
        listed.settings["synchronized"] = True
    for name in ("gamma", "beta", "moving_mean", "moving_variance"):
        variable = getattr(layer, name, None)
        if variable is not None:
            features = inlet if inlet.is_mixed else outlet
            _add(listed, variable, name, _of_features(variable.shape[0], features))
    return listed


def _layer_norm(layer: Any, inlet: Features, outlet: Features) -> Layer:
    """torch normalizes the last axes; here the axes must be the last ones too, or all."""
    listed = Layer("layer_norm", layer.path, settings={"epsilon": layer.epsilon})
    if getattr(layer, "rms_scaling", False):
        listed.problem = "torch's LayerNorm has no rms_scaling."
        return listed
    for name in ("gamma", "beta"):
        variable = getattr(layer, name, None)
        if variable is None:
            continue
        layout = None
        if len(variable.shape) == 1:
            layout = _of_features(variable.shape[0], inlet if inlet.is_mixed else outlet)
        elif len(variable.shape) == len(inlet.order):
            layout = _moved(variable.shape, *inlet.order)
        _add(listed, variable, name, layout)
    return listed


def _group_norm(layer: Any, inlet: Features, outlet: Features) -> Layer:
    listed = Layer("group_norm", layer.path)
    listed.settings = {"epsilon": layer.epsilon, "groups": layer.groups}
    if inlet.is_mixed:
        listed.problem = "behind Flatten the groups of Keras and torch hold other features."
        return listed
    _add(listed, layer.gamma, "gamma")
    _add(listed, layer.beta, "beta")
    return listed


def _recurrent(kind: str) -> Callable[[Any, Features, Features], Layer]:
    def make(layer: Any, inlet: Features, outlet: Features) -> Layer:
        listed = Layer(kind, layer.path, settings={"bidirectional": False})
        if layer.go_backwards:
            listed.settings["go_backwards"] = True
        _add_cell(listed, layer, kind, "")
        return listed

    return make


def _bidirectional(layer: Any, inlet: Features, outlet: Features) -> Layer:
    kind = next((k for c, k in _RECURRENT.items() if isinstance(layer.forward_layer, c)), "")
    listed = Layer(kind, layer.path, settings={"bidirectional": True})
    if not kind or layer.merge_mode != "concat":
        listed.problem = "torch's layers join both directions as merge_mode='concat' does."
        listed.settings["merge_mode"] = str(layer.merge_mode)
        return listed
    _add_cell(listed, layer.forward_layer, kind, "")
    _add_cell(listed, layer.backward_layer, kind, "backward_")
    return listed


def _add_cell(listed: Layer, layer: Any, kind: str, prefix: str) -> None:
    """Adds a cell's variables, unless the cell computes what torch's cannot."""
    cell = layer.cell
    gates, blocks = {"lstm": (4, ()), "gru": (3, (1, 0, 2)), "simple_rnn": (1, ())}[kind]
    if kind == "simple_rnn":
        listed.settings["activation"] = keras.activations.serialize(cell.activation)
    elif _activations(cell) != ("tanh", "sigmoid"):
        listed.problem = "torch's have activation tanh and recurrent_activation sigmoid."
        listed.settings["activations"] = ", ".join(map(str, _activations(cell)))
        return
    if kind == "gru" and not cell.reset_after:
        listed.problem = "torch's GRU resets the state as reset_after=True does."
        return
    _add(listed, cell.kernel, f"{prefix}kernel", _of_gates(cell.kernel.shape, gates, blocks))
    recurrent = _of_gates(cell.recurrent_kernel.shape, gates, blocks)
    _add(listed, cell.recurrent_kernel, f"{prefix}recurrent_kernel", recurrent)
    if cell.bias is None:
        return
    width = cell.bias.shape[-1]
    layout = Layout((width,), (gates, width // gates), (0, 1), blocks)
    if kind != "gru":
        _add(listed, cell.bias, f"{prefix}bias", layout)
        return
    for row, name in enumerate(("bias", "recurrent_bias")):
        path = f"{cell.bias.path}[{row}]"
        listed.add(f"{prefix}{name}", path, cell.bias, layout, row=row)


def _activations(cell: Any) -> tuple[Any, Any]:
    serialize = keras.activations.serialize
    return serialize(cell.activation), serialize(cell.recurrent_activation)


_RECURRENT = {kl.LSTM: "lstm", kl.GRU: "gru", kl.SimpleRNN: "simple_rnn"}

# The first kind that fits counts; a layer whose variables it does not list is unknown.
_TABLE: dict[type, Callable[[Any, Features, Features], Layer]] = {
    kl.Dense: _dense,
    kl.Embedding: _embedding,
    kl.Conv1D: _conv,
    kl.Conv2D: _conv,
    kl.Conv3D: _conv,
    kl.DepthwiseConv1D: _depthwise,
    kl.DepthwiseConv2D: _depthwise,
    kl.Conv1DTranspose: _conv_transpose,
    kl.Conv2DTranspose: _conv_transpose,
    kl.Conv3DTranspose: _conv_transpose,
    kl.BatchNormalization: _batch_norm,
    kl.LayerNormalization: _layer_norm,
    kl.GroupNormalization: _group_norm,
    kl.Bidirectional: _bidirectional,
    **{layer: _recurrent(kind) for layer, kind in _RECURRENT.items()},
}
