"""Follows features through a Keras model: where their order differs from torch's.

Keras flattens (height, width, channels), torch (channels, height, width). What is learned for each
flattened feature, such as the kernel of a Dense layer behind Flatten, lies accordingly; so does
what makes features that become an image, such as a Dense layer before Reshape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import keras
from keras import layers as kl


@dataclass(frozen=True)
class Features:
    """How the axes behind the batch lie, compared with a torch model.

    Args:
        order: the tensor's axes in torch's order; (2, 0, 1) if it is (height, width, channels).
        dims: flattened: sizes of the axes before that, else ().
        padded: zeros that were put before and after each spatial axis.
        shape: the tensor's shape, the batch included; () if it is not known.
        makers: by id, the layers that give flat features their order; None: others, too.
        unflattened: sizes of the axes that flat features were cut into, else ().
    """

    order: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()
    padded: tuple[tuple[int, int], ...] = ()
    shape: tuple[int | None, ...] = ()
    makers: tuple[int, ...] | None = None
    unflattened: tuple[int, ...] = ()

    @property
    def is_mixed(self) -> bool:
        """True if flattened features lie in another order than in torch."""
        return bool(self.dims) and self.order != tuple(range(len(self.dims)))


@dataclass
class Flow:
    """What each layer gets and makes, by id, and what torch cannot be made to follow."""

    inlets: dict[int, Features] = field(default_factory=dict)
    outlets: dict[int, Features] = field(default_factory=dict)  # of features that become images
    problems: list[str] = field(default_factory=list)


_SPATIAL = (
    *(kl.Conv1D, kl.Conv2D, kl.Conv3D, kl.DepthwiseConv1D, kl.DepthwiseConv2D),
    *(kl.SeparableConv1D, kl.SeparableConv2D),
    *(kl.Conv1DTranspose, kl.Conv2DTranspose, kl.Conv3DTranspose),
    *(kl.MaxPooling1D, kl.MaxPooling2D, kl.MaxPooling3D),
    *(kl.AveragePooling1D, kl.AveragePooling2D, kl.AveragePooling3D),
    *(kl.GlobalMaxPooling1D, kl.GlobalMaxPooling2D, kl.GlobalMaxPooling3D),
    *(kl.GlobalAveragePooling1D, kl.GlobalAveragePooling2D, kl.GlobalAveragePooling3D),
    *(kl.ZeroPadding2D, kl.ZeroPadding3D, kl.Cropping2D, kl.Cropping3D),
    *(kl.UpSampling2D, kl.UpSampling3D),
)
_ZERO_PADDING = (kl.ZeroPadding1D, kl.ZeroPadding2D, kl.ZeroPadding3D)
# Layers of sequences: what comes out has no channels to be moved.
_SEQUENCE = (kl.RNN, kl.Embedding, kl.Bidirectional)


def follow(model: keras.Model) -> Flow:
    """Follows the features through ``model`` and its nested models.

    A model that is no Sequential or Functional is taken as a chain of its layers, in the order in
    which they were assigned.

    Raises:
        ValueError: a layer has no shapes yet.
    """
    flow = Flow()
    _through_model(model, [Features(makers=())], flow)
    return flow


def _through_model(model: keras.Model, inputs: list[Features], flow: Flow) -> Features:
    graph = getattr(model, "_functional", None) or model
    if hasattr(graph, "_nodes_by_depth"):
        return _through_graph(graph, inputs, flow)
    state = inputs[0]
    for layer in model.layers:
        state = _through(layer, [replace(state, shape=_built_shape(layer))], (), flow)
    return state


def _through_graph(graph: Any, inputs: list[Features], flow: Flow) -> Features:
    states: dict[int, Features] = {}
    given = iter(inputs)
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            # Inputs of a nested model are what the outer one puts in.
            if node.is_input:
                state = next(given, Features(makers=()))
                if not state.order and not state.unflattened:
                    state = replace(_image(tuple(node.outputs[0].shape)), makers=state.makers)
                states[id(node.outputs[0])] = state
                continue
            found = [_state_of(tensor, states) for tensor in node.arguments.keras_tensors]
            outcome = _through(node.operation, found, tuple(node.outputs[0].shape), flow)
            states |= {id(tensor): outcome for tensor in node.outputs}
    return states.get(id(graph.outputs[0]), Features())


def _state_of(tensor: Any, states: dict[int, Features]) -> Features:
    return replace(states.get(id(tensor), Features()), shape=tuple(tensor.shape))


def _built_shape(layer: Any) -> tuple[Any, ...]:
    """The input shape that a layer was built for, () if it tells none."""
    shapes: Iterable[Any] = (layer._build_shapes_dict or {}).values()
    first = next(iter(shapes), ())
    return tuple(first) if first and not isinstance(first[0], (tuple, list)) else ()


# ---- One operation ------------------------------------------------------------------------------


def _through(operation: Any, found: list[Features], shape: tuple[Any, ...], flow: Flow) -> Features:
    """Returns the state behind ``operation``, whose output has ``shape``, () if unknown."""
    state = found[0] if found else Features()
    known = flow.inlets.setdefault(id(operation), state)
    if (known.dims, known.order) != (state.dims, state.order) and (known.dims or state.dims):
        flow.problems.append(f"layer '{operation.name}' is used on features of different order.")
    kind = type(operation).__name__  # Keras has functions of these names beside its layers
    if isinstance(operation, keras.Model):
        return _through_model(operation, found, flow)
    if isinstance(operation, kl.Flatten):
        return _flattened(state, operation.data_format == "channels_first")
    if kind == "Reshape":
        return _reshaped(operation, state, shape[1:] or operation.target_shape, flow)
    if kind in ("Permute", "Transpose") and state.order:
        axes = operation.dims if kind == "Permute" else (operation.axes or ())[1:]
        return Features(tuple([axis - 1 for axis in axes].index(axis) for axis in state.order))
    if isinstance(operation, _SPATIAL):
        _unflatten(operation, state, flow)
        return _padded(operation, _spatial(_rank(operation, state), operation.data_format))
    if isinstance(operation, kl.Dense):
        return Features(makers=(id(operation),) if len(state.shape) == 2 else None)
    if isinstance(operation, _SEQUENCE):
        return Features()
    return _unchanged(operation, found, shape, flow)


def _unchanged(
    operation: Any, found: list[Features], shape: tuple[Any, ...], flow: Flow
) -> Features:
    """The state behind an operation on single elements, or behind one that is not known."""
    if isinstance(operation, kl.ZeroPadding1D):
        return _padded(operation, found[0])
    mixed = [state for state in found if state.is_mixed]
    if mixed:
        alike = all((s.dims, s.order) == (mixed[0].dims, mixed[0].order) for s in found)
        if alike and shape in ((), mixed[0].shape):
            return mixed[0]
        return _lost(operation, flow)
    if len(found) == 1 and shape in ((), found[0].shape):
        makers = found[0].makers
        if makers is not None and getattr(operation, "weights", ()):
            makers = (*makers, id(operation))
        return replace(found[0], padded=(), makers=makers)
    state = next((state for state in found if state.order), Features())
    if state.order and len(shape) == len(state.shape):
        return replace(state, padded=(), makers=None)
    return _image(shape)


def _lost(operation: Any, flow: Flow) -> Features:
    flow.problems.append(
        f"layer '{operation.name}' ({type(operation).__name__}) takes flattened features "
        "(channels last) whose order is another in torch, and what it makes of them cannot be "
        "followed. Put it before Flatten or behind a Dense layer, or use "
        "data_format='channels_first' in the layers before Flatten."
    )
    return Features()


# ---- Images -------------------------------------------------------------------------------------


def _image(shape: tuple[Any, ...]) -> Features:
    """A tensor of four or five axes counts as images; one of three as a sequence."""
    if len(shape) < 4:
        return Features()
    return _spatial(len(shape), keras.config.image_data_format())


def _spatial(rank: int, data_format: str) -> Features:
    axes = tuple(range(rank - 1))
    return Features((axes[-1], *axes[:-1]) if data_format == "channels_last" else axes)


def _rank(layer: Any, state: Features) -> int:
    digits = [int(c) for c in type(layer).__name__ if c.isdigit()]
    return len(state.shape) or (digits[0] + 2 if digits else 0)


def _padded(layer: Any, state: Features) -> Features:
    if not isinstance(layer, _ZERO_PADDING):
        return state
    pads = layer.padding
    return replace(state, padded=(pads,) if isinstance(pads[0], int) else tuple(pads))


# ---- Flattened features -------------------------------------------------------------------------


def _flattened(state: Features, moves_channels: bool) -> Features:
    """Behind Flatten; ``moves_channels``: it puts the first axis last before."""
    dims, order = state.shape[1:], state.order
    if not state.shape and order:
        raise ValueError("a Flatten layer has no shapes yet: call the model on a batch first")
    if len(dims) < 2:
        return replace(state, padded=())
    order = order or tuple(range(len(dims)))
    if moves_channels:
        dims = (*dims[1:], dims[0])
        order = tuple((axis - 1) % len(dims) for axis in order)
    if None in dims or math.prod(dims) == 0:
        return Features()
    return Features(order, dims, makers=state.makers if state.makers == () else None)


def _reshaped(operation: Any, state: Features, target: tuple[Any, ...], flow: Flow) -> Features:
    if state.is_mixed:
        return Features(state.order) if target == state.dims else _lost(operation, flow)
    if len(target) == 1:
        return _flattened(state, False)
    if len(state.shape) != 2:
        return _image((None, *target))
    return Features(makers=state.makers, unflattened=tuple(target))


def _unflatten(layer: Any, state: Features, flow: Flow) -> None:
    """``layer`` takes as images what were flat features: tells those who made them."""
    dims = state.unflattened
    if not dims or layer.data_format == "channels_first" or 1 in (dims[-1], math.prod(dims[:-1])):
        return
    if state.makers is None:
        flow.problems.append(
            f"layer '{layer.name}' ({type(layer).__name__}) takes as images what were flat "
            "features, whose order is another in torch, and what made them cannot be followed. "
            "Use data_format='channels_first' there."
        )
        return
    order = _spatial(len(dims) + 1, layer.data_format).order
    flow.outlets |= {maker: Features(order, dims) for maker in state.makers}
