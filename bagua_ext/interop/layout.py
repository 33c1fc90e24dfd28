"""How a framework's parameter lies in the layout that all ranks of a mixed job share.

The bytes that travel are in canonical order. A rank whose framework keeps a parameter in another
order permutes it on the way into the bucket and back on the way out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """canonical = own.reshape(split).transpose(axes)[blocks].reshape(shape).

    Args:
        shape: canonical shape.
        split: the parameter's own shape, with axes cut in two where needed, e.g. gates from units.
        axes: axes of ``split`` in canonical order.
        blocks: order of the entries of the first canonical axis before the final reshape (gates of
            a GRU); empty: as they are.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    axes: tuple[int, ...]
    blocks: tuple[int, ...] = ()

    @staticmethod
    def same(shape: tuple[int, ...]) -> Layout:
        """Returns the layout of a parameter that is canonical already."""
        return Layout(tuple(shape), tuple(shape), tuple(range(len(shape))))

    @property
    def is_same(self) -> bool:
        """True if the bytes are in canonical order already."""
        return not self.blocks and self.axes == tuple(range(len(self.split)))

    @property
    def dims(self) -> tuple[int, ...]:
        """``split`` in canonical order."""
        return tuple(self.split[axis] for axis in self.axes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance in elements, in the parameter's own memory, along each of ``dims``."""
        own = [math.prod(self.split[axis + 1 :]) for axis in range(len(self.split))]
        return tuple(own[axis] for axis in self.axes)

    def to_canonical(self, own: np.ndarray) -> np.ndarray:
        """Returns a contiguous copy of ``own`` in canonical order and shape."""
        moved = own.reshape(self.split).transpose(self.axes)
        if self.blocks:
            moved = moved[list(self.blocks)]
        return np.ascontiguousarray(moved).reshape(self.shape)

    def from_canonical(self, canonical: np.ndarray, own_shape: tuple[int, ...]) -> np.ndarray:
        """Undoes ``to_canonical``; the result is a contiguous copy of shape ``own_shape``."""
        moved = np.asarray(canonical).reshape(self.dims)
        if self.blocks:
            moved = moved[list(np.argsort(self.blocks))]
        return np.ascontiguousarray(moved.transpose(np.argsort(self.axes))).reshape(own_shape)
