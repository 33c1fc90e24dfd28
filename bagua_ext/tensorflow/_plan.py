"""A registered plan of the core as TensorFlow runs it."""

from __future__ import annotations

import ctypes
import itertools
import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from bagua_ext import basics, plans
from bagua_ext._core import lib
from bagua_ext.exceptions import BaguaError
from bagua_ext.reductions import Reduction
from bagua_ext.tensorflow import _ops
from bagua_ext.tensorflow._library import PlanTensor
from bagua_ext.tensorflow._ops import border, library

DTYPES: dict[tf.DType, int] = {
    tf.uint8: lib.BAGUA_UINT8,
    tf.int8: lib.BAGUA_INT8,
    tf.int16: lib.BAGUA_INT16,
    tf.int32: lib.BAGUA_INT32,
    tf.int64: lib.BAGUA_INT64,
    tf.float16: lib.BAGUA_FLOAT16,
    tf.bfloat16: lib.BAGUA_BFLOAT16,
    tf.float32: lib.BAGUA_FLOAT32,
    tf.float64: lib.BAGUA_FLOAT64,
    tf.bool: lib.BAGUA_BOOL,
}

# Graphs know a plan by its slot. No other process has the same: a graph that was saved by one finds
# no plan in another, instead of a wrong one.
_slots = itertools.count(secrets.randbits(62))
# A graph is run after the optimizer that built it is gone; it keeps the plans that it runs.
_kept: weakref.WeakKeyDictionary[Any, set[Plan]] = weakref.WeakKeyDictionary()
_by_slot: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()


class Plan:
    """Agreed buckets for one list of tensors. Collective: every rank makes it with equal arguments.

    After shutdown and init it is of no use, and neither are graphs that run it.

    Raises:
        MismatchError: on every rank, if the ranks' arguments differ.
    """

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[tf.DType],
        reduction: Reduction,
        bucket_bytes: int,
        bucket_of: Sequence[int] | None,
        group: int,
        agreed: str,
    ) -> None:
        self._slot = next(_slots)
        self.reduction, self.group = reduction, group
        self._shapes, self._dtypes = [list(shape) for shape in shapes], list(dtypes)
        tensors = [
            plans.Tensor(own, DTYPES[dtype], tuple(shape))
            for own, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
        self._number = plans.create(
            name, tensors, reduction, bucket_bytes, bucket_of, group, agreed
        )
        self._generation = basics.generation()
        self._fill_slot(names)
        _by_slot[self._slot] = self
        self._dropper = weakref.finalize(self, _drop, self._slot, self._number, self._generation)

    @staticmethod
    def of_slot(slot: int) -> Plan:
        """Returns the plan in a slot that a graph runs."""
        return _by_slot[slot]

    def _fill_slot(self, names: Sequence[str]) -> None:
        entries = (PlanTensor * len(self._shapes))()
        for entry, name, shape, dtype in zip(
            entries, names, self._shapes, self._dtypes, strict=True
        ):
            entry.name, entry.dtype, entry.ndim = name.encode(), DTYPES[dtype], len(shape)
            entry.shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        if border.bagua_tensorflow_fill_slot(self._slot, self._number, len(entries), entries):
            raise BaguaError(border.bagua_tensorflow_last_error().decode())

    def is_current(self) -> bool:
        """False after shutdown: the plan is gone."""
        return self._generation == basics.generation() and basics.is_initialized()

    def run(self, gradients: Mapping[int, tf.Tensor]) -> tuple[list[tf.Tensor], Any]:
        """Reduces a step's gradients, by place in the plan; those not given count as zeros.

        Returns the reduced values of all tensors, and one byte for each that says whether some rank
        gave it. In a graph both are tensors of the step that the graph will make.
        """
        indices = sorted(gradients)
        common = {
            "Tout": self._dtypes,
            "slot": self._slot,
            "indices": indices,
            "shapes": self._shapes,
        }
        if tf.executing_eagerly():
            values = [gradients[i] for i in indices]
            results, used = _ops.run_eagerly(library.bagua_plan_step, values, order=[], **common)
            return results, used.numpy()
        self._keep_with(tf.compat.v1.get_default_graph())
        with _ops.in_graph():
            order = _ops.order()
            token = library.bagua_plan_begin(order, slot=self._slot)
            values = [
                library.bagua_plan_put(token, gradients[i], slot=self._slot, index=i)
                for i in indices
            ]
            return library.bagua_plan_take(values, order, **common)

    def _keep_with(self, graph: Any) -> None:
        _kept.setdefault(graph, set()).add(self)
        # A function lives in the functions around it; the graph around all of these lives for ever.
        outer = getattr(graph, "outer_graph", None)
        if outer is not None and outer.building_function:
            self._keep_with(outer)


def _drop(slot: int, number: int, generation: int) -> None:
    border.bagua_tensorflow_empty_slot(slot)
    if generation == basics.generation() and basics.is_initialized():
        lib.bagua_plan_drop(number)
