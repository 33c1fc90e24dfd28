"""Calls the generated operations: eager or in a graph, with bagua_ext's errors."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from bagua_ext import basics, exceptions
from bagua_ext._core import ffi, lib
from bagua_ext.tensorflow._library import load_border, load_operations

library = load_operations()
border = load_border()
border.bagua_tensorflow_watch_interrupts(int(ffi.cast("uintptr_t", lib.bagua_interrupted)))

# One tensor: functions tell resources apart by the tensors that they capture.
_order: list[Any] = []

_NAMED = re.compile(
    r"(MismatchError|PeerLostError|CollectiveTimeoutError|AbortedError|NotInitializedError"
    r"|BaguaError|ValueError): (.*)",
    re.DOTALL,
)
_SUFFIX = re.compile(r"\s*(\[Op:\w+\]|\[\[\{\{node).*$", re.DOTALL)


def named_error(error: tf.errors.OpError) -> Exception:
    """Returns bagua_ext's exception for TensorFlow's; ``error`` itself if it is not of the core."""
    found = _NAMED.search(error.message or "")
    if found is None:
        return error
    name, text = found.groups()
    kind = ValueError if name == "ValueError" else getattr(exceptions, name)
    return kind(_SUFFIX.sub("", text))


def bits(factor: float) -> int:
    """Returns the bits of a double as an integer: attributes of type float would round it."""
    return struct.unpack("<q", struct.pack("<d", factor))[0]


def factor(value: int) -> float:
    """Undoes ``bits``."""
    return struct.unpack("<d", struct.pack("<q", value))[0]


def in_graph() -> Any:
    """Returns a scope for operations of the graph that is being built; XLA leaves them alone.

    Raises:
        ValueError: XLA is to compile the whole graph.
    """
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            "bagua_ext's operations cannot be part of a function that XLA compiles. Pass "
            "jit_compile=False to tf.function or Model.compile, or call the operation outside of "
            "the compiled function."
        )
    return tf.xla.experimental.jit_scope(compile_ops=False)


def order() -> list[Any]:
    """Returns what every operation takes as ``order`` where it is built: a function's operations
    and nested functions use this resource one after another, as the program says.
    """
    if tf.executing_eagerly() or not tf.compat.v1.get_default_graph().building_function:
        return []
    with tf.init_scope():
        if not tf.executing_eagerly():
            return []  # a branch or loop of a TF1-style graph
        if not _order:
            _order.append(tf.raw_ops.MutexV2(container="", shared_name="bagua_ext.order"))
    return _order


def run(function: Callable[..., Any], *inputs: Any, **attributes: Any) -> Any:
    """Calls a generated operation that waits for other ranks.

    Eagerly the calling thread waits, answering signals, and failures are bagua_ext's errors. In a
    graph nothing runs yet, and failures are TensorFlow's errors whose text begins with the name of
    bagua_ext's.
    """
    if not tf.executing_eagerly():
        with in_graph():
            return function(*inputs, order=order(), **attributes)
    return run_eagerly(function, *inputs, order=[], wait=True, **attributes)


def run_eagerly(function: Callable[..., Any], *inputs: Any, **attributes: Any) -> Any:
    """Calls a generated operation at once; its failures are bagua_ext's errors."""
    try:
        return function(*inputs, **attributes)
    except tf.errors.OpError as error:
        _raise_interruption(error)
        raise named_error(error) from None


def to_run(operation: Any) -> Any:
    """Returns ``operation`` where the caller has to run it: in a TF1-style graph; else None.

    Functions run all their operations of this kind.
    """
    if tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
        return None
    return operation


def _raise_interruption(error: tf.errors.OpError) -> None:
    if isinstance(error, tf.errors.CancelledError):
        interruption = basics.take_interruption()
        if interruption is not None:
            raise interruption
