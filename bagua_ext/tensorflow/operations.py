"""Collective operations on TensorFlow tensors, with Horovod's names, signatures and argument order.

Every rank calls an operation with the same name, dtype and, where not said otherwise, shape.
Without a name eager operations are matched by the order of the calls, operations of a graph by
their place in it. In a tf.function operations run one after another, in the order of the program;
use the grouped forms, or an optimizer or tape, for many tensors at once.

Eagerly, a disagreement raises MismatchError on every rank and a dead rank PeerLostError. In a
tf.function or a session the same are tf.errors.InvalidArgumentError and AbortedError, whose text
names the class. All operations are differentiable; ``device_dense`` and ``device_sparse`` place
them as ``tf.device`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from bagua_ext import basics
from bagua_ext.process_sets import global_process_set, group_of
from bagua_ext.reduce_ops import Average, ReduceOp, Sum, chosen_op
from bagua_ext.tensorflow import _ops
from bagua_ext.tensorflow._autograph import keep_out
from bagua_ext.tensorflow._ops import library
from bagua_ext.tensorflow.compression import Compression, Compressor

Tensor = tf.Tensor
Tensors = Sequence[Any]

_ONE = _ops.bits(1.0)


def _bits(factor: float) -> int:
    return _ONE if factor == 1.0 else _ops.bits(factor)


def _device(name: str) -> Any:
    return tf.device(name or None)


def _tensor(value: Any) -> Tensor:
    """Converts ``value`` unless it is a tensor: even then TensorFlow takes a microsecond."""
    return value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)


def _require_list(tensors: Any, what: str) -> None:
    if not isinstance(tensors, (list, tuple)):
        raise ValueError(f"{what} takes a list of tensors, got {type(tensors).__name__}")


# ---- allreduce ----------------------------------------------------------------------------------


def _reduce(
    function: Any, tensors: Tensors, name: str | None, op: ReduceOp, scales: Any, process_set: Any
) -> list[Tensor]:
    return _ops.run(
        function,
        tensors,
        tensor_name=name or "",
        reduce_op=op,
        prescale_bits=_bits(scales[0]),
        postscale_bits=_bits(scales[1]),
        group=group_of(process_set),
    )


@keep_out
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Returns the reduction of ``tensor`` over all ranks, a new tensor of its shape.

    ``op`` is Average (default; truncating for integers), Sum, Min, Max or Product. Values are
    multiplied by ``prescale_factor`` before and by ``postscale_factor`` after; ``compression``
    narrows them on their way. tf.IndexedSlices are gathered instead: the result holds the slices of
    all ranks. The gradient is the allreduce of the gradient with the same arguments; Min and Max
    pass it to the ranks that hold the extreme, Product has none.
    """
    op = chosen_op(average, op)
    scales = (prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        with _device(device_sparse):
            return _allreduce_slices(tensor, op, scales, name, process_set)
    with _device(device_dense):
        small, context = compression.compress(_tensor(tensor))
        results = _reduce(library.bagua_allreduce, [small], name, op, scales, process_set)
        return compression.decompress(results[0], context)


def _allreduce_slices(
    slices: tf.IndexedSlices, op: ReduceOp, scales: Any, name: str | None, process_set: Any
) -> tf.IndexedSlices:
    if op not in (Average, Sum):
        raise ValueError("tf.IndexedSlices are reduced with op=Average or op=Sum")
    values, indices = grouped_allgather(
        [slices.values, slices.indices], name=name, process_set=process_set
    )
    factor = scales[0] * scales[1] / (process_set.size() if op == Average else 1)
    if factor != 1.0:
        values = scaled(values, factor)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def scaled(values: Tensor, factor: float) -> Tensor:
    """Returns ``factor * values`` in the dtype of ``values``; whole numbers are truncated."""
    if values.dtype.is_floating:
        return values * tf.cast(factor, values.dtype)
    return tf.cast(tf.cast(values, tf.float64) * factor, values.dtype)


@keep_out
def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
    name: str | None = None,
) -> list[Any]:
    """Returns the reductions of ``tensors`` over all ranks: one operation, all or none.

    Arguments as of ``allreduce``. tf.IndexedSlices among them are reduced one by one.
    """
    _require_list(tensors, "grouped_allreduce")
    if not tensors:
        return []
    op = chosen_op(average, op)
    scales = (prescale_factor, postscale_factor)
    results: list[Any] = list(tensors)
    dense = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    for i in sorted(set(range(len(tensors))) - set(dense)):
        own_name = f"{name}.{i}" if name else None
        with _device(device_sparse):
            results[i] = _allreduce_slices(tensors[i], op, scales, own_name, process_set)
    if not dense:
        return results
    with _device(device_dense):
        pairs = [compression.compress(_tensor(tensors[i])) for i in dense]
        small = [tensor for tensor, _ in pairs]
        reduced = _reduce(library.bagua_allreduce, small, name, op, scales, process_set)
        for i, tensor, (_, context) in zip(dense, reduced, pairs, strict=True):
            results[i] = compression.decompress(tensor, context)
    return results


# ---- reducescatter ------------------------------------------------------------------------------


@keep_out
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Returns this rank's rows of the reduction of ``tensor`` over all ranks.

    The first dimension is cut evenly; the first ranks get one row more if it does not divide.
    """
    return grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        name,
    )[0]


@keep_out
def grouped_reducescatter(
    tensors: Tensors,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Tensor]:
    """As ``reducescatter`` for several tensors: one operation, all or none."""
    _require_list(tensors, "grouped_reducescatter")
    if not tensors:
        return []
    op = chosen_op(None, op)
    scales = (prescale_factor, postscale_factor)
    with _device(device_dense):
        pairs = [compression.compress(_tensor(tensor)) for tensor in tensors]
        small = [tensor for tensor, _ in pairs]
        rows = _reduce(library.bagua_reducescatter, small, name, op, scales, process_set)
        return [
            compression.decompress(own, context)
            for own, (_, context) in zip(rows, pairs, strict=True)
        ]


# ---- Exchanges ----------------------------------------------------------------------------------


@keep_out
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Tensor:
    """Returns the ranks' tensors joined along the first dimension, in which they may differ.

    The gradient of a rank's tensor is the sum over ranks of the gradients of its rows.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@keep_out
def grouped_allgather(
    tensors: Tensors,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> list[Tensor]:
    """As ``allgather`` for several tensors: one operation, all or none."""
    _require_list(tensors, "grouped_allgather")
    if not tensors:
        return []
    values = [_tensor(tensor) for tensor in tensors]
    group = group_of(process_set)
    return _ops.run(library.bagua_allgather, values, tensor_name=name or "", group=group)


@keep_out
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Tensor:
    """Returns global rank ``root_rank``'s tensor; the others give shape and dtype."""
    return _ops.run(
        library.bagua_broadcast,
        _tensor(tensor),
        root=root_rank,
        tensor_name=name or "",
        group=group_of(process_set),
    )


@keep_out
def broadcast_(
    variables: Any,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Overwrites ``variables`` with global rank ``root_rank``'s values, in place.

    ``variables`` is one tf.Variable or Keras variable, or a list of them; all ranks give as many,
    in the same order. Returns them; in a TF1-style graph, the operation to run.
    """
    given = list(variables) if isinstance(variables, (list, tuple)) else [variables]
    to_run = overwrite(given, root_rank, name or eager_name("broadcast_"), process_set)
    return variables if to_run is None else to_run


def eager_name(name: str) -> str:
    """Returns ``name`` eagerly. An operation of a graph is called as its node: it may run beside
    others of its kind.
    """
    return name if tf.executing_eagerly() else ""


def overwrite(variables: Tensors, root_rank: int, name: str, process_set: Any) -> Any:
    """Gives ``variables`` the root's values; returns an operation in a TF1-style graph."""
    given = [native_variable(variable) for variable in variables]
    direct = [variable for variable in given if _is_broadcast_in_place(variable)]
    operations = []
    for i, variable in enumerate(given):
        if not _is_broadcast_in_place(variable):
            own_name = f"{name}.{i}" if name else None
            value = broadcast(variable, root_rank, own_name, process_set=process_set)
            operations.append(tf.compat.v1.assign(variable, value))
    if direct:
        operation = _ops.run(
            library.bagua_broadcast_variables,
            [variable.handle for variable in direct],
            root=root_rank,
            tensor_name=name,
            group=group_of(process_set),
        )
        operations.append(operation)
    return None if _ops.to_run(operations) is None else tf.group(*operations)


def _is_broadcast_in_place(variable: tf.Variable) -> bool:
    """False for TF1's variables without a resource, and for those of a GPU."""
    return hasattr(variable, "handle") and "GPU" not in (variable.device or "")


def native_variable(variable: Any) -> tf.Variable:
    """Returns the tf.Variable of ``variable``, which may be a Keras variable around it.

    Raises:
        ValueError: it is neither, or holds text.
    """
    native = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
    if not isinstance(native, tf.Variable):
        raise ValueError(f"expected a tf.Variable or a Keras variable, got {variable!r}")
    if native.dtype.base_dtype == tf.string:
        raise ValueError(f"variable '{native.name}' is of dtype string, which cannot be sent")
    return native


@keep_out
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Sends rows of ``tensor`` to each rank and returns those received, in order of rank.

    ``splits`` says how many rows go to each rank; None: even parts. With ``splits`` the result is a
    pair: the rows, and how many of them came from each rank (int32).
    """
    group = group_of(process_set)
    given = tf.zeros([0], tf.int64) if splits is None else _as_counts(splits)
    rows, received = _ops.run(
        library.bagua_alltoall,
        _tensor(tensor),
        given,
        tensor_name=name or "",
        group=group,
    )
    return rows if splits is None else (rows, tf.cast(received, tf.int32))


def _as_counts(splits: Any) -> Tensor:
    counts = tf.convert_to_tensor(splits)
    if not counts.dtype.is_integer:
        raise ValueError(f"splits are {counts.dtype.name}, expected whole numbers")
    return tf.cast(counts, tf.int64)


# ---- No tensors ---------------------------------------------------------------------------------


@keep_out
def barrier(process_set: Any = global_process_set, name: str | None = None) -> Any:
    """Waits until every rank called it. In a TF1-style graph, returns the operation to run."""
    group = group_of(process_set)
    return _ops.to_run(_ops.run(library.bagua_barrier, tensor_name=name or "", group=group))


@keep_out
def join(name: str | None = None) -> Any:
    """Says that this rank has no more data, and waits until all ranks said so.

    Meanwhile other ranks' allreduces go on with zeros from this one. Returns the last rank to join,
    the same everywhere, an int32 tensor.
    """
    if tf.executing_eagerly():
        return tf.constant(basics.join(), tf.int32)
    return _ops.run(library.bagua_join, tensor_name=name or "")


# ---- Place in the job, as nodes -----------------------------------------------------------------


def _place(function: Any, process_set_id: int, name: str | None) -> Tensor:
    if tf.executing_eagerly():
        return _ops.run_eagerly(function, group=process_set_id, name=name)
    with _ops.in_graph():
        return function(group=process_set_id, name=name)


@keep_out
def size_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """The number of ranks, as an int32 tensor that a graph asks for when it runs."""
    return _place(library.bagua_size, process_set_id, name)


@keep_out
def rank_op(name: str | None = None) -> Tensor:
    """This process's rank, as an int32 tensor that a graph asks for when it runs."""
    return _place(library.bagua_rank, 0, name)


@keep_out
def local_size_op(name: str | None = None) -> Tensor:
    """The number of ranks on this host, as an int32 tensor."""
    return _place(library.bagua_local_size, 0, name)


@keep_out
def local_rank_op(name: str | None = None) -> Tensor:
    """This process's rank on its host, as an int32 tensor."""
    return _place(library.bagua_local_rank, 0, name)


@keep_out
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """1 if this process belongs to the set, else 0, as an int32 tensor."""
    return _place(library.bagua_process_set_included, process_set_id, name)
