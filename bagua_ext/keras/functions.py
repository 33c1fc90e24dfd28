"""Operations on values, broadcasts of variables, and loading of saved models."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from bagua_ext import objects
from bagua_ext.exceptions import MismatchError
from bagua_ext.keras.optimizer import Compression, DistributedOptimizer, framework
from bagua_ext.reduce_ops import Average, ReduceOp

Tensor = Any  # of the framework

# ---- Values -------------------------------------------------------------------------------------


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
) -> Tensor:
    """Returns the reduction over all ranks of ``value``: a tensor, an array or a number."""
    return framework.hvd.allreduce(
        keras.ops.convert_to_tensor(value),
        average=average,
        name=name,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def allgather(value: Any, name: str | None = None) -> Tensor:
    """Returns the ranks' values joined along the first dimension, in which they may differ."""
    return framework.hvd.allgather(keras.ops.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Tensor:
    """Returns rank ``root_rank``'s ``value``; the others give its shape and dtype."""
    return framework.hvd.broadcast(keras.ops.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Tensor:
    """Returns this rank's rows of the reduction of ``value`` over all ranks."""
    return framework.hvd.reducescatter(keras.ops.convert_to_tensor(value), name=name, op=op)


# ---- Variables ----------------------------------------------------------------------------------


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Overwrites Keras variables with rank ``root_rank``'s. Collective; not in compiled functions.

    Raises:
        MismatchError: on every rank, if shapes or dtypes differ; nothing is changed.
    """
    values = [keras.ops.convert_to_numpy(variable) for variable in variables]
    _require_same([f"{value.dtype}{list(value.shape)}" for value in values], variables)
    by_dtype: dict[np.dtype, list[int]] = {}
    for i, value in enumerate(values):
        by_dtype.setdefault(value.dtype, []).append(i)
    for dtype, members in by_dtype.items():
        flat = np.concatenate([values[i].reshape(-1) for i in members])
        flat = objects.broadcast_array(flat, root_rank, f"broadcast_variables.{dtype.name}")
        ends = np.cumsum([values[i].size for i in members])[:-1]
        for i, part in zip(members, np.split(flat, ends), strict=True):
            variables[i].assign(part.reshape(values[i].shape))


def _require_same(kinds: list[str], variables: Sequence[Any]) -> None:
    digest = hashlib.sha256(repr(kinds).encode()).hexdigest()
    digests = objects.allgather_object(digest, "broadcast_variables.digest")
    if len(set(digests)) == 1:
        return
    named = [f"{v.path} {kind}" for v, kind in zip(variables, kinds, strict=True)]
    everyone = objects.allgather_object(named, "broadcast_variables.kinds")
    other = next(r for r, own in enumerate(digests) if own != digests[0])
    pairs = zip(everyone[0], everyone[other], strict=False)
    first = next((p for p in pairs if p[0].split(" ", 1)[1] != p[1].split(" ", 1)[1]), None)
    detail = f"'{first[1]}' where rank 0 has '{first[0]}'" if first else "another number of them"
    raise MismatchError(
        f"broadcast_variables: rank {other} has {len(everyone[other])} variables, rank 0 has "
        f"{len(everyone[0])}; rank {other} has {detail}. All ranks must build the same model."
    )


def broadcast_model(model: keras.Model, root_rank: int) -> None:
    """Gives all ranks rank ``root_rank``'s weights and optimizer state. Collective.

    Random seeds stay each rank's own, so that dropout differs between ranks.
    """
    optimizer = getattr(model, "optimizer", None)
    state = optimizer.variables if optimizer is not None else []
    broadcast_variables([*model.weights, *state], root_rank)


def broadcast_global_variables(root_rank: int) -> None:
    """Always raises ValueError: Keras 3 keeps no list of all variables."""
    raise ValueError(
        "Keras 3 has no global variables. Use BroadcastGlobalVariablesCallback in model.fit, or "
        f"broadcast_model(model, {root_rank}) once the model is built."
    )


# ---- Saved models -------------------------------------------------------------------------------


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Loads a saved model so that it goes on training with a DistributedOptimizer.

    One that was saved with a DistributedOptimizer keeps it as it is; any other optimizer is wrapped
    together with its state. ``custom_optimizers`` are classes that ``custom_objects`` need not
    name. ``compression`` applies to what is wrapped here. Needs no ``init``.

    Raises:
        ValueError: ``legacy_opts`` is given: Keras 3 has no legacy optimizers.
    """
    if legacy_opts:
        raise ValueError("legacy_opts=True: Keras 3 has no legacy optimizers; leave it out")
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or isinstance(optimizer, DistributedOptimizer):
        return model
    with keras.saving.custom_object_scope(known):
        arguments = keras.saving.deserialize_keras_object(model.get_compile_config())
    # The loaded optimizer holds the loaded state; the one in `arguments` is a copy without it.
    arguments["optimizer"] = DistributedOptimizer(optimizer, compression=compression)
    model.compile(**arguments)
    return model
