"""What this package needs of TensorFlow. ``_torch`` has the same names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import bagua_ext.tensorflow as hvd
from bagua_ext.reductions import Reduction
from bagua_ext.tensorflow._autograph import keep_out
from bagua_ext.tensorflow._reducer import GradientReducer, Settings


def make_reducer(
    name: str,
    reduction: Reduction,
    bucket_bytes: int,
    sparse_as_dense: bool,
    process_set: Any,
    groups: Sequence[Sequence[Any]] | int | None,
    agreed: str,
) -> GradientReducer:
    """Returns an object whose ``reduce(gradients, variables)`` returns the reduced gradients."""
    return GradientReducer(
        Settings(
            name=name,
            reduction=reduction,
            bucket_bytes=bucket_bytes,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
            groups=groups,
            agreed=agreed,
        )
    )


def add_to(total: Any, gradient: Any) -> None:
    """Adds a gradient, dense or sparse, to the Keras variable ``total``."""
    if isinstance(gradient, tf.IndexedSlices):
        total.value.scatter_add(gradient)
    else:
        total.value.assign_add(gradient)


def scaled(gradient: Any, factor: float) -> Any:
    """Returns ``gradient * factor``, sparse if it is."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def value_of(variable: Any) -> tf.Tensor:
    """Returns a tensor with the value that a Keras variable has here and now."""
    return tf.convert_to_tensor(variable.value)


def choose(condition: tf.Tensor, if_true: Callable[[], None], if_false: Callable[[], None]) -> None:
    """Calls one of two functions; in a graph, builds both."""
    if tf.executing_eagerly():
        (if_true if bool(condition) else if_false)()
    else:
        tf.cond(condition, if_true, if_false)


__all__ = ["add_to", "choose", "hvd", "keep_out", "make_reducer", "scaled", "value_of"]
