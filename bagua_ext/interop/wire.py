"""The gradients of a Keras model in the form in which they travel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from bagua_ext.interop.layout import Layout
from bagua_ext.interop.listing import Entry


class Wire:
    """Turns gradients of Keras variables into canonical tensors and back, eagerly or in a graph.

    A variable may be several tensors: the bias of a GRU is two of torch's.

    Args:
        entries: the trained tensors, in any order.
        layouts: the layout in which each one travels.
        key_of: what a Keras variable and the framework's variable in it share.
    """

    def __init__(
        self, entries: Sequence[Entry], layouts: Sequence[Layout], key_of: Callable[[Any], Any]
    ) -> None:
        pairs = sorted(zip(entries, layouts, strict=True), key=lambda p: p[0].name, reverse=True)
        self.names = [entry.name for entry, _ in pairs]
        self.shapes = [layout.shape for _, layout in pairs]
        self.dtypes = [entry.dtype for entry, _ in pairs]
        self._pairs = pairs
        self._key_of = key_of
        self._places: dict[Any, list[int]] = {}  # each variable's, by row
        for place in sorted(range(len(pairs)), key=lambda place: pairs[place][0].row or 0):
            self._places.setdefault(key_of(pairs[place][0].holder), []).append(place)

    def encode(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns one tensor, or None, for each of ``names``; sparse gradients get dense.

        Raises:
            ValueError: one of ``variables`` is none of the model's.
        """
        unknown = [v.name for v in variables if self._key_of(v) not in self._places]
        if unknown:
            raise ValueError(f"the model that was tied does not train {', '.join(unknown)}")
        pairs = zip(gradients, variables, strict=True)
        given = {self._key_of(variable): _dense(gradient) for gradient, variable in pairs}
        return [self._sent(entry, layout, given) for entry, layout in self._pairs]

    def decode(self, reduced: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradient, or None, of each of ``variables``; ``reduced`` is by ``names``."""
        return [self._received(variable, reduced) for variable in variables]

    def _sent(self, entry: Entry, layout: Layout, given: dict[Any, Any]) -> Any:
        gradient = given.get(self._key_of(entry.holder))
        if gradient is None:
            return None
        return to_canonical(layout, gradient if entry.row is None else gradient[entry.row])

    def _received(self, variable: Any, reduced: Sequence[Any]) -> Any:
        places = self._places[self._key_of(variable)]
        if any(reduced[place] is None for place in places):
            return None
        parts = []
        for place in places:
            entry, layout = self._pairs[place]
            parts.append(from_canonical(layout, reduced[place], entry.own_shape))
        return parts[0] if len(parts) == 1 else ops.stack(parts)


def _dense(gradient: Any) -> Any:
    if hasattr(gradient, "dense_shape"):
        return sys.modules["tensorflow"].convert_to_tensor(gradient)
    return gradient


def to_canonical(layout: Layout, own: Any) -> Any:
    """``Layout.to_canonical`` for a tensor of Keras's backend; a view where the backend has any."""
    if layout.is_same:
        return _reshaped(own, layout.split, layout.shape)
    moved = ops.transpose(ops.reshape(own, layout.split), layout.axes)
    if layout.blocks:
        moved = ops.take(moved, np.array(layout.blocks), axis=0)
    return _reshaped(moved, layout.dims, layout.shape)


def from_canonical(layout: Layout, canonical: Any, own_shape: tuple[int, ...]) -> Any:
    """Undoes ``to_canonical``."""
    if layout.is_same:
        return _reshaped(canonical, layout.shape, own_shape)
    moved = ops.reshape(canonical, layout.dims)
    if layout.blocks:
        moved = ops.take(moved, np.argsort(layout.blocks), axis=0)
    moved = ops.transpose(moved, tuple(map(int, np.argsort(layout.axes))))
    return _reshaped(moved, layout.split, own_shape)


def _reshaped(tensor: Any, shape: tuple[int, ...], wanted: tuple[int, ...]) -> Any:
    return tensor if shape == wanted else ops.reshape(tensor, wanted)
