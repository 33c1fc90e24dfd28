"""Gradients of the operations, registered with TensorFlow: the same formulas eagerly and in graphs.

They call the operations themselves, so that gradients of gradients exist too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from bagua_ext import basics
from bagua_ext._core import lib
from bagua_ext.exceptions import BaguaError
from bagua_ext.reduce_ops import NAMES, Average, Max, Min, Sum
from bagua_ext.tensorflow import _ops
from bagua_ext.tensorflow._ops import library
from bagua_ext.tensorflow._plan import Plan

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
def _allreduce(op: Any, *grads: Tensor) -> list[Tensor | None]:
    attributes, reduce_op = _Attributes(op), op.get_attr("reduce_op")
    # Tensors of whole numbers have none.
    places = [i for i, grad in enumerate(grads) if grad is not None]
    values = [tf.convert_to_tensor(grads[i]) for i in places]
    if reduce_op in (Average, Sum):
        results = _ops.run(library.bagua_allreduce, values, **_scaling(op), **attributes.back())
    elif reduce_op in (Min, Max):
        results = _extreme(op, attributes, places, values)
    else:
        _require_linear(op, "allreduce")
    return _spread(op, places, results)


def _extreme(
    op: Any, attributes: _Attributes, places: list[int], values: list[Tensor]
) -> list[Tensor]:
    """Ranks that hold the extreme share the gradient evenly."""
    factor = _factor(op)
    holds = [
        tf.cast(_is_extreme(op.inputs[i], op.outputs[i], factor), grad.dtype)
        for i, grad in zip(places, values, strict=True)
    ]
    holders = _sum(holds, attributes.back(".holders"))
    totals = _sum(values, attributes.back())
    return [
        tf.math.divide_no_nan(total * tf.cast(factor, total.dtype) * own, count)
        for total, own, count in zip(totals, holds, holders, strict=True)
    ]


def _is_extreme(x: Tensor, extreme: Tensor, factor: float) -> Tensor:
    if factor == 1.0:
        return tf.equal(x, extreme)
    # The core scales before and after, and rounds each time.
    scaled = x * tf.cast(factor, x.dtype)
    slack = 4 * np.finfo(x.dtype.as_numpy_dtype).eps if x.dtype != tf.bfloat16 else 2**-6
    return tf.abs(scaled - extreme) <= tf.cast(slack, x.dtype) * tf.abs(extreme)


def _spread(op: Any, places: list[int], results: list[Tensor]) -> list[Tensor | None]:
    """``results`` as gradients of the inputs at ``places``; the others have none."""
    gradients: list[Tensor | None] = [None] * len(op.inputs)
    for i, result in zip(places, results, strict=True):
        gradients[i] = result
    return gradients


@tf.RegisterGradient("BaguaBroadcast")
def _broadcast(op: Any, grad: Tensor) -> list[Tensor | None]:
    (total,) = _sum([grad], _Attributes(op).back())
    own = total if basics.rank() == op.get_attr("root") else tf.zeros_like(total)
    return _spread(op, [0], [own])


@tf.RegisterGradient("BaguaAllgather")
def _allgather(op: Any, *grads: Tensor) -> list[Tensor | None]:
    attributes = _Attributes(op)
    tensors = op.inputs[: len(grads)]
    scalars = [tensor.shape.rank == 0 for tensor in tensors]
    own = [
        tf.ones([], tf.int64) if scalar else tf.shape(tensor, out_type=tf.int64)[0]
        for tensor, scalar in zip(tensors, scalars, strict=True)
    ]
    (table,) = _ops.run(library.bagua_allgather, [tf.stack(own)[None]], **attributes.back(".rows"))
    places = [i for i, grad in enumerate(grads) if grad is not None]
    totals = _sum([tf.convert_to_tensor(grads[i]) for i in places], attributes.back())
    rank = lib.bagua_group_rank(attributes.group)
    begins = tf.reduce_sum(table[:rank], axis=0)
    results = []
    for i, total in zip(places, totals, strict=True):
        rows = total[begins[i] : begins[i] + own[i]]
        results.append(tf.reshape(rows, []) if scalars[i] else rows)
    return _spread(op, places, results)


@tf.RegisterGradient("BaguaReducescatter")
def _reducescatter(op: Any, *grads: Tensor) -> list[Tensor | None]:
    _require_linear(op, "reducescatter")
    attributes = _Attributes(op)
    factor = _factor(op) / (attributes.size if op.get_attr("reduce_op") == Average else 1)
    places = [i for i, grad in enumerate(grads) if grad is not None]
    scaled = [grads[i] * tf.cast(factor, grads[i].dtype) for i in places]
    return _spread(op, places, _ops.run(library.bagua_allgather, scaled, **attributes.back()))


@tf.RegisterGradient("BaguaAlltoall")
def _alltoall(op: Any, grad: Tensor, _splits: Any) -> list[Tensor | None]:
    common = _Attributes(op).back()
    rows, _ = _ops.run(library.bagua_alltoall, grad, op.outputs[1], **common)
    return _spread(op, [0], [rows])


# ---- Plans --------------------------------------------------------------------------------------


def _reduced_alike(op: Any, grads: tuple[Any, ...]) -> list[Tensor | None]:
    """Gradients of what a plan reduced: they are reduced as it reduces, at full precision."""
    plan = Plan.of_slot(op.get_attr("slot"))
    indices = op.get_attr("indices")
    reduction = plan.reduction
    scaling = {
        "reduce_op": reduction.op,
        "prescale_bits": _ops.bits(reduction.prescale),
        "postscale_bits": _ops.bits(reduction.postscale),
    }
    values = [tf.convert_to_tensor(grads[i]) for i in indices]
    common = {"tensor_name": "", "group": plan.group}
    results = _ops.run(library.bagua_allreduce, values, **scaling, **common)
    return _spread(op, list(range(len(indices))), results)


@tf.RegisterGradient("BaguaPlanStep")
def _plan_step(op: Any, *grads: Tensor) -> list[Tensor | None]:
    return _reduced_alike(op, grads)


@tf.RegisterGradient("BaguaPlanTake")
def _plan_take(op: Any, *grads: Tensor) -> list[Tensor | None]:
    return _reduced_alike(op, grads)


@tf.RegisterGradient("BaguaPlanPut")
def _plan_put(op: Any, grad: Tensor) -> list[Tensor | None]:
    return [None, grad]


tf.no_gradient("BaguaPlanBegin")
