"""Gradients of the operations, registered with TensorFlow: the same formulas eagerly and in graphs.

They call the operations themselves, so that gradients of gradients exist too.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bagua_ext import basics
from bagua_ext._core import lib
from bagua_ext.exceptions import BaguaError
from bagua_ext.reduce_ops import NAMES, Average, Max, Min, Sum
from bagua_ext.tensorflow import _ops
from bagua_ext.tensorflow._ops import library

Tensor = tf.Tensor

_ONE = _ops.bits(1.0)


class _Attributes:
    """What the gradient's operations take over from the forward one."""

    def __init__(self, op: Any) -> None:
        name = op.get_attr("tensor_name")
        self.name = name.decode() if isinstance(name, bytes) else name
        self.group = op.get_attr("group")
        self.size = lib.bagua_group_size(self.group)

    def back(self, part: str = "") -> dict[str, Any]:
        """Name and group of an operation of the gradient."""
        suffix = f".gradient{part}"
        return {"tensor_name": f"{self.name}{suffix}" if self.name else "", "group": self.group}


def _scaling(op: Any) -> dict[str, int]:
    return {key: op.get_attr(key) for key in ("reduce_op", "prescale_bits", "postscale_bits")}


def _factor(op: Any) -> float:
    return _ops.factor(op.get_attr("prescale_bits")) * _ops.factor(op.get_attr("postscale_bits"))


def _sum(tensors: list[Tensor], common: dict[str, Any]) -> list[Tensor]:
    scaling = {"reduce_op": Sum, "prescale_bits": _ONE, "postscale_bits": _ONE}
    return _ops.run(library.bagua_allreduce, tensors, **scaling, **common)


def _require_linear(op: Any, what: str) -> None:
    reduce_op = op.get_attr("reduce_op")
    if reduce_op not in (Average, Sum):
        raise BaguaError(f"{what} has no gradient for op={NAMES[reduce_op]}; use Average or Sum")


@tf.RegisterGradient("BaguaAllreduce")
def _allreduce(op: Any, *grads: Tensor) -> list[Tensor]:
    attributes, reduce_op = _Attributes(op), op.get_attr("reduce_op")
    values = list(grads)
    if reduce_op in (Average, Sum):
        return _ops.run(library.bagua_allreduce, values, **_scaling(op), **attributes.back())
    if reduce_op not in (Min, Max):
        _require_linear(op, "allreduce")
    # Ranks that hold the extreme share the gradient evenly.
    factor = _factor(op)
    holds = [
        tf.cast(tf.equal(x * tf.cast(factor, x.dtype), y), grad.dtype)
        for x, y, grad in zip(op.inputs, op.outputs, values, strict=True)
    ]
    holders = _sum(holds, attributes.back(".holders"))
    totals = _sum(values, attributes.back())
    return [
        total * tf.cast(factor, total.dtype) * own / count
        for total, own, count in zip(totals, holds, holders, strict=True)
    ]


@tf.RegisterGradient("BaguaBroadcast")
def _broadcast(op: Any, grad: Tensor) -> Tensor:
    (total,) = _sum([grad], _Attributes(op).back())
    return total if basics.rank() == op.get_attr("root") else tf.zeros_like(total)


@tf.RegisterGradient("BaguaAllgather")
def _allgather(op: Any, *grads: Tensor) -> list[Tensor]:
    attributes = _Attributes(op)
    scalars = [tensor.shape.rank == 0 for tensor in op.inputs]
    own = [
        tf.ones([], tf.int64) if scalar else tf.shape(tensor, out_type=tf.int64)[0]
        for tensor, scalar in zip(op.inputs, scalars, strict=True)
    ]
    (table,) = _ops.run(library.bagua_allgather, [tf.stack(own)[None]], **attributes.back(".rows"))
    totals = _sum(list(grads), attributes.back())
    rank = lib.bagua_group_rank(attributes.group)
    begins = tf.reduce_sum(table[:rank], axis=0)
    results = []
    for i, total in enumerate(totals):
        rows = total[begins[i] : begins[i] + own[i]]
        results.append(tf.reshape(rows, []) if scalars[i] else rows)
    return results


@tf.RegisterGradient("BaguaReducescatter")
def _reducescatter(op: Any, *grads: Tensor) -> list[Tensor]:
    _require_linear(op, "reducescatter")
    attributes = _Attributes(op)
    factor = _factor(op) / (attributes.size if op.get_attr("reduce_op") == Average else 1)
    scaled = [grad * tf.cast(factor, grad.dtype) for grad in grads]
    return _ops.run(library.bagua_allgather, scaled, **attributes.back())


@tf.RegisterGradient("BaguaAlltoall")
def _alltoall(op: Any, grad: Tensor, _splits: Any) -> tuple[Tensor, None]:
    common = _Attributes(op).back()
    rows, _ = _ops.run(library.bagua_alltoall, grad, op.outputs[1], **common)
    return rows, None


for _name in ("BaguaPlanStep", "BaguaPlanTake", "BaguaPlanPut", "BaguaPlanBegin"):
    tf.no_gradient(_name)
