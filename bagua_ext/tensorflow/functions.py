"""Broadcasts of variables and Python objects."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from bagua_ext import objects
from bagua_ext.exceptions import MismatchError
from bagua_ext.process_sets import global_process_set
from bagua_ext.reduce_ops import Min
from bagua_ext.tensorflow import _ops
from bagua_ext.tensorflow._autograph import keep_out
from bagua_ext.tensorflow.operations import eager_name, native_variable, overwrite

# ---- Objects ------------------------------------------------------------------------------------


@keep_out
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Returns rank ``root_rank``'s ``obj`` on every rank; that rank gets its own object back.

    The object is pickled; the other ranks' ``obj`` is ignored. No graph is needed: ``session`` is
    accepted for Horovod's sake.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


@keep_out
def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Callable[[Any], Any]:
    """Returns a function of an object that does what ``broadcast_object`` does."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@keep_out
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Returns the ranks' objects, in order of rank. The objects are pickled."""
    return objects.allgather_object(obj, name, process_set)


# ---- Variables ----------------------------------------------------------------------------------


def _signature(variables: list[Any]) -> list[str]:
    return [f"{variable.dtype.base_dtype.name}{variable.shape.as_list()}" for variable in variables]


def _require_same(variables: list[Any], process_set: Any) -> None:
    """Raises MismatchError on every rank unless all give as many, of the same shapes and dtypes."""
    signature = _signature(variables)
    digest = hashlib.sha256(repr(signature).encode()).digest()
    mine = int.from_bytes(digest[:7], "little")
    # Two ranks differ exactly if the smallest and the largest value do.
    bounds = objects.allreduce_array(
        np.array([mine, -mine]), "variables.check", Min, process_set=process_set
    )
    if bounds[0] == -bounds[1]:
        return
    names = [variable.name for variable in variables]
    everyone = objects.allgather_object((names, signature), "variables.signature", process_set)
    raise MismatchError(_difference(everyone))


def _difference(everyone: list[tuple[list[str], list[str]]]) -> str:
    names, first = everyone[0]
    for rank, (own_names, own) in enumerate(everyone[1:], start=1):
        if len(own) != len(first):
            return (
                f"broadcast_variables: rank {rank} gave {len(own)} variables, rank 0 gave "
                f"{len(first)}. All ranks must build the same model."
            )
        for i, (theirs, kind) in enumerate(zip(own, first, strict=True)):
            if theirs != kind:
                return (
                    f"broadcast_variables: variable {i} is '{own_names[i]}', {theirs}, on rank "
                    f"{rank} and '{names[i]}', {kind}, on rank 0. All ranks must build the same "
                    "model."
                )
    return "broadcast_variables: the ranks gave different variables"


@keep_out
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = global_process_set,
    inplace: bool = True,
) -> Any:
    """Overwrites ``variables`` with rank ``root_rank``'s values.

    ``variables`` are tf.Variables or Keras variables, such as ``model.variables``; all ranks give
    as many in the same order. Returns None; in a TF1-style graph, an operation to run. ``inplace``
    is accepted for Horovod's sake: it makes no difference.

    Raises:
        MismatchError: eagerly, on every rank, if numbers, shapes or dtypes differ; nothing is
            changed.
    """
    given = [native_variable(variable) for variable in variables]
    if tf.executing_eagerly():
        _require_same(given, process_set)
    return overwrite(given, root_rank, eager_name("variables"), process_set)


@keep_out
def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Returns an operation that gives all global variables of a TF1-style graph root's values.

    Raises:
        RuntimeError: executed eagerly, where there are no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() does not work eagerly: there are no global variables. "
            "Use broadcast_variables(model.variables, root_rank)."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts all global variables from ``root_rank`` when a monitored session was made.

    ``device`` places the operation as ``tf.device`` does.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root_rank, self._device = root_rank, device
        self._operation: tf.Operation | None = None

    def begin(self) -> None:
        """Adds the broadcast to the graph."""
        graph = tf.compat.v1.get_default_graph()
        if self._operation is None or self._operation.graph is not graph:
            with tf.device(self._device or None):
                self._operation = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the broadcast."""
        try:
            session.run(self._operation)
        except tf.errors.OpError as error:
            # Monitored sessions take AbortedError for a reason to begin again, without end.
            raise _ops.named_error(error) from error
