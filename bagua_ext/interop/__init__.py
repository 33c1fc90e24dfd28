"""One data-parallel job in which some ranks train a torch model and others the same in Keras 3.

    optimizer = bagua_ext.interop.tie(model, optimizer)

on every rank, whatever its framework. The models must have the same layers in the same order;
``describe(model)`` tells what each tensor is called and how it lies. Only the model's own framework
is imported. Where equal settings of optimizers do not compute the same, ``interop.optimizers``
tells.
"""

from __future__ import annotations

from bagua_ext.interop._tie import (
    average_statistics,
    broadcast,
    describe,
    load_weights,
    tie,
    weights,
)
from bagua_ext.interop.layout import Layout

__all__ = [
    "Layout",
    "average_statistics",
    "broadcast",
    "describe",
    "load_weights",
    "tie",
    "weights",
]
