"""What this package does with a Keras model. ``_torch_side`` has the same names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np

from bagua_ext.interop import optimizers
from bagua_ext.interop._keras_layers import list_layers
from bagua_ext.interop._keras_reducer import make_reducer
from bagua_ext.interop.layout import Layout
from bagua_ext.interop.listing import Entry, Listing, Names, number_layers
from bagua_ext.interop.wire import Wire

Optimizer = keras.optimizers.Optimizer


def framework() -> str:
    """Names the framework for the other ranks."""
    return f"keras on {keras.config.backend()}"


def list_model(model: keras.Model, optimizer: Optimizer | None, names: Names | None) -> Listing:
    """Returns the model's tensors; trained ones are the model's trainable variables.

    Raises:
        ValueError: a trainable variable is not listed.
    """
    layers, problems = list_layers(model)
    listing = number_layers(layers, names)
    trained = {id(variable) for variable in model.trainable_variables}
    entries = [_completed(entry, trained) for entry in listing.entries]
    listed = {id(entry.holder) for entry in entries}
    rest = [v.path for v in model.trainable_variables if id(v) not in listed]
    if rest and optimizer is not None:
        raise ValueError(
            f"the model trains {', '.join(rest)}, which is not among the tensors that the ranks "
            "share: only what is not trained can be left out"
        )
    return replace(listing, entries=entries, problems=listing.problems + problems)


def _completed(entry: Entry, trained: set[int]) -> Entry:
    dtype = keras.backend.standardize_dtype(entry.holder.dtype)
    return replace(entry, dtype=dtype, trainable=id(entry.holder) in trained)


def optimizer_settings(optimizer: Optimizer, listing: Listing) -> dict[str, Any]:
    """Returns the optimizer's settings by canonical name.

    Raises:
        ValueError: it is no optimizer of Keras, or distributed already.
    """
    if not isinstance(optimizer, Optimizer) or hasattr(optimizer, "register_local_var"):
        raise ValueError(f"expected a plain Keras optimizer, got {type(optimizer).__name__}")
    both = {decays: optimizers.of_keras(optimizer, decays) for decays in (True, False)}
    if keras.config.dtype_policy().name == "mixed_float16":
        for settings in both.values():
            settings["loss_scaling"] = True  # a DistributedOptimizer scales by itself then
    trained = [entry for entry in listing.entries if entry.trainable]
    decays = getattr(optimizer, "_use_weight_decay", lambda variable: True)
    return optimizers.summary({e.name: both[bool(decays(e.holder))] for e in trained})


def read(entry: Entry) -> np.ndarray:
    """Returns a copy in the model's own layout; bfloat16 as float32."""
    value = np.array(keras.ops.convert_to_numpy(entry.holder))
    if entry.dtype == "bfloat16":
        value = value.astype(np.float32)
    return value if entry.row is None else value[entry.row]


def write(entry: Entry, own: np.ndarray) -> None:
    """Sets the tensor to ``own``, which is in the model's own layout."""
    if entry.row is not None:
        rows = np.array(keras.ops.convert_to_numpy(entry.holder))
        rows[entry.row] = own
        own = rows
    entry.holder.assign(keras.ops.convert_to_tensor(own, dtype=entry.dtype))


def wrap(
    optimizer: Optimizer, listing: Listing, torchs: bool, plan_name: str, options: dict[str, Any]
) -> Optimizer:
    """Returns the DistributedOptimizer whose gradients travel in canonical order and layout."""
    from bagua_ext.keras.optimizer import DistributedOptimizer

    trained = [entry for entry in listing.entries if entry.trainable]
    layouts = [entry.layout if torchs else Layout.same(entry.own_shape) for entry in trained]
    distributed = DistributedOptimizer(optimizer, **options)
    wire = Wire(trained, layouts, optimizer._var_key)
    distributed._reducer = make_reducer(plan_name, wire, distributed._arguments)
    return distributed
