"""Reduces lists of gradients through registered plans, eagerly and in graphs.

A plan is agreed with the other ranks when a list of variables is reduced for the first time: by the
first eager step, or while a graph is traced. All ranks do so at the same point of their programs.
Tracing a function again, for another batch size for instance, takes the plan that is there.

In a graph each gradient goes into its bucket as soon as it is computed, and buckets are exchanged
while the rest of the backward pass runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from bagua_ext import objects
from bagua_ext.buckets import Piece, lay_out
from bagua_ext.process_sets import group_of
from bagua_ext.reduce_ops import Average, Max
from bagua_ext.reductions import Reduction
from bagua_ext.tensorflow._autograph import keep_out
from bagua_ext.tensorflow._plan import Plan
from bagua_ext.tensorflow.compression import Compression
from bagua_ext.tensorflow.operations import (
    eager_name,
    grouped_allgather,
    grouped_allreduce,
    native_variable,
    scaled,
)

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None

# What the ranks have for a variable; the largest number counts.
_NOTHING, _SPARSE, _DENSE = 0, 1, 2

_COMPRESSION = {"fp16": Compression.fp16, "bf16": Compression.bf16}


@dataclass(frozen=True)
class Settings:
    """How gradients are reduced; equal on all ranks.

    ``groups``: lists of variables that share a bucket, or a number of buckets. ``names``: names of
    the gradients, in the order of the plan, for jobs whose ranks use other frameworks; otherwise
    gradients are named by their place and lie in reverse order, as backward reaches them.
    ``agreed``: a further setting, "name=value", that must be equal on all ranks.
    """

    name: str
    reduction: Reduction
    bucket_bytes: int
    sparse_as_dense: bool
    process_set: Any
    groups: Sequence[Sequence[Any]] | int | None = None
    names: Sequence[str] | None = None
    agreed: str = "backward_passes_per_step=1"


@dataclass
class _Registered:
    """A plan and what the ranks agreed on beside it, for one list of variables."""

    plan: Plan
    kinds: list[int]  # of each variable, over all ranks
    order: list[int]  # variable of each tensor of the plan


class GradientReducer:
    """Reduces gradients as ``settings`` say. Collective; used by one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._registered: dict[Any, _Registered] = {}
        self._numbers: dict[Any, int] = {}
        self._uses: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by graph

    @keep_out
    def reduce(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """Returns the reduced gradients of ``variables``, in their order.

        All ranks give the same variables by number, shape and dtype. A gradient that is None counts
        as zeros where another rank has one, and stays None where none has. tf.IndexedSlices are
        gathered, unless ``sparse_as_dense`` is set or another rank has a dense gradient.

        Raises:
            MismatchError: on every rank, if their variables or settings differ.
        """
        settings = self.settings
        if len(gradients) != len(variables):
            raise ValueError(f"{len(gradients)} gradients for {len(variables)} variables")
        given = list(gradients)
        if settings.sparse_as_dense:
            given = [_densified(gradient) for gradient in given]
        if not given or settings.process_set.size() == 1:
            return given
        floating = [i for i, v in enumerate(variables) if _native(v).dtype.is_floating]
        if len(floating) < len(given):
            return self._reduce_floating(given, list(variables), floating)
        shapes = [_shape_of(variable) for variable in variables]
        if any(shape is None for shape in shapes):
            return self._reduce_unplanned(given)
        return self._reduce_planned(given, list(variables), shapes)

    def _reduce_floating(
        self, given: list[Gradient], variables: list[Any], floating: list[int]
    ) -> list[Gradient]:
        for i in set(range(len(given))) - set(floating):
            if given[i] is not None:
                raise ValueError(
                    f"'{_path_of(variables[i])}' has a gradient of dtype {given[i].dtype.name}; "
                    "only floating-point gradients can be reduced"
                )
        reduced = self.reduce([given[i] for i in floating], [variables[i] for i in floating])
        results: list[Gradient] = [None] * len(given)
        for i, gradient in zip(floating, reduced, strict=True):
            results[i] = gradient
        return results

    # ---- With a plan --------------------------------------------------------------------------

    def _reduce_planned(
        self, given: list[Gradient], variables: list[Any], shapes: list[Any]
    ) -> list[Gradient]:
        registered = self._find(given, variables, shapes)
        kinds = registered.kinds
        results: list[Gradient] = [None] * len(given)
        dense = {
            position: _densified(given[i])
            for position, i in enumerate(registered.order)
            if given[i] is not None and (kinds[i] != _SPARSE)
        }
        reduced, used = registered.plan.run(dense)
        for position, i in enumerate(registered.order):
            if given[i] is not None or self._has(used, position, kinds[i]):
                results[i] = reduced[position]
        sparse = [i for i in range(len(given)) if kinds[i] == _SPARSE]
        for i, slices in zip(sparse, self._gather(given, shapes, sparse, variables), strict=True):
            results[i] = slices
        return results

    @staticmethod
    def _has(used: Any, position: int, kind: int) -> bool:
        """Whether some rank had a gradient: in this step if that is known, else at the start."""
        if tf.executing_eagerly():
            return bool(used[position])
        return kind != _NOTHING

    def _find(self, given: list[Gradient], variables: list[Any], shapes: list[Any]) -> _Registered:
        dtypes = [variable.dtype.base_dtype for variable in map(_native, variables)]
        # A graph says once and for all which gradients there are.
        once = tf.executing_eagerly() or self.settings.names is not None
        own = None if once else tuple(map(_kind, given))
        key = (tuple(zip(map(tuple, shapes), dtypes, strict=True)), own, self._use_in_graph())
        registered = self._registered.get(key)
        if registered is not None and registered.plan.is_current():
            return registered
        self._registered = {k: r for k, r in self._registered.items() if r.plan.is_current()}
        # A list keeps its number when it is registered anew, after shutdown and init.
        number = self._numbers.setdefault(key, len(self._numbers))
        name = self.settings.name if self.settings.names else f"{self.settings.name}.{number}"
        self._registered[key] = self._register(name, given, variables, shapes, dtypes)
        return self._registered[key]

    def _use_in_graph(self) -> int:
        """Distinguishes uses within one TF1-style graph, whose steps may run in any order."""
        if tf.executing_eagerly():
            return 0
        graph = tf.compat.v1.get_default_graph()
        if graph.building_function:
            return 0  # operations of a function run in the order of the program
        self._uses[graph] = self._uses.get(graph, -1) + 1
        return self._uses[graph]

    def _register(
        self,
        name: str,
        given: list[Gradient],
        variables: list[Any],
        shapes: list[Any],
        dtypes: list[tf.DType],
    ) -> _Registered:
        settings = self.settings
        kinds = self._agreed_kinds(name, given)
        planned = [i for i, kind in enumerate(kinds) if kind != _SPARSE]
        group_of_variable = _grouped(variables, settings.groups)
        pieces = [
            Piece(
                dtypes[i],
                int(np.prod(shapes[i], dtype=np.int64)) * dtypes[i].size,
                group_of_variable[i],
            )
            for i in planned
        ]
        order = range(len(planned)) if settings.names is not None else reversed(range(len(planned)))
        places, bucket_of = lay_out(pieces, list(order), settings.bucket_bytes)
        order = [planned[place] for place in places]
        plan = Plan(
            name=name,
            names=[self._name_of(i, variables[i]) for i in order],
            shapes=[shapes[i] for i in order],
            dtypes=[dtypes[i] for i in order],
            reduction=settings.reduction,
            bucket_bytes=settings.bucket_bytes,
            bucket_of=bucket_of,
            group=group_of(settings.process_set),
            agreed=settings.agreed,
        )
        return _Registered(plan, kinds, order)

    def _agreed_kinds(self, name: str, given: list[Gradient]) -> list[int]:
        if self.settings.names is not None:
            return [_DENSE] * len(given)
        own = np.array([_kind(gradient) for gradient in given], np.uint8)
        return objects.allreduce_array(
            own, f"{name}.kinds", Max, self.settings.process_set
        ).tolist()

    def _name_of(self, index: int, variable: Any) -> str:
        """Names a gradient by its place: Keras numbers layers by how many the process has made."""
        if self.settings.names is not None:
            return self.settings.names[index]
        return f"{index}.{_path_of(variable).split('/')[-1].split(':')[0]}"

    # ---- Sparse gradients and tensors of unknown shape ----------------------------------------

    def _gather(
        self, given: list[Gradient], shapes: list[Any], sparse: list[int], variables: list[Any]
    ) -> list[tf.IndexedSlices]:
        if not sparse:
            return []
        dtypes = [_native(variables[i]).dtype.base_dtype for i in sparse]
        own = [
            _as_slices(given[i], shapes[i], dtype) for i, dtype in zip(sparse, dtypes, strict=True)
        ]
        parts = [slices.values for slices in own]
        parts += [tf.cast(slices.indices, tf.int64) for slices in own]
        gathered = grouped_allgather(
            parts, eager_name(f"{self.settings.name}.slices"), process_set=self.settings.process_set
        )
        factor = self._sparse_factor()
        results = []
        for position, i in enumerate(sparse):
            values, indices = gathered[position], gathered[len(sparse) + position]
            values = values if factor == 1.0 else scaled(values, factor)
            shape = tf.constant(tuple(shapes[i]), tf.int64)
            results.append(tf.IndexedSlices(values, indices, dense_shape=shape))
        return results

    def _sparse_factor(self) -> float:
        reduction = self.settings.reduction
        size = self.settings.process_set.size() if reduction.op == Average else 1
        return reduction.prescale * reduction.postscale / size

    def _reduce_unplanned(self, given: list[Gradient]) -> list[Gradient]:
        """Reduces gradients of tensors whose shapes are known only when the graph runs.

        All ranks need gradients of the same ones.
        """
        reduction = self.settings.reduction
        present = [i for i, gradient in enumerate(given) if gradient is not None]
        reduced = grouped_allreduce(
            [given[i] for i in present],
            compression=_COMPRESSION.get(reduction.codec, Compression.none),
            op=reduction.op,
            prescale_factor=reduction.prescale,
            postscale_factor=reduction.postscale,
            process_set=self.settings.process_set,
            name=eager_name(f"{self.settings.name}.unplanned"),
        )
        results = list(given)
        for i, gradient in zip(present, reduced, strict=True):
            results[i] = gradient
        return results


# ---- Gradients and variables --------------------------------------------------------------------


def _native(variable: Any) -> Any:
    """Returns the tf.Variable of a Keras variable; other variables and tensors as they are."""
    if isinstance(variable, (tf.Variable, tf.Tensor)) or not hasattr(variable, "value"):
        return variable
    return native_variable(variable)


def _shape_of(variable: Any) -> list[int] | None:
    shape = tf.TensorShape(variable.shape)
    return shape.as_list() if shape.is_fully_defined() else None


def _path_of(variable: Any) -> str:
    return getattr(variable, "path", None) or getattr(variable, "name", "")


def _kind(gradient: Gradient) -> int:
    if gradient is None:
        return _NOTHING
    return _SPARSE if isinstance(gradient, tf.IndexedSlices) else _DENSE


def _densified(gradient: Gradient) -> Any:
    if gradient is None:
        return None
    return tf.convert_to_tensor(gradient)


def _as_slices(gradient: Gradient, shape: list[int], dtype: tf.DType) -> tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    if gradient is None:
        return tf.IndexedSlices(tf.zeros([0, *shape[1:]], dtype), tf.zeros([0], tf.int64))
    return tf.IndexedSlices(gradient, tf.range(shape[0], dtype=tf.int64))


def _grouped(
    variables: Sequence[Any], groups: Sequence[Sequence[Any]] | int | None
) -> list[int | None]:
    """Returns the group of each variable; None where the user grouped none."""
    if groups is None or groups == 0:
        return [None] * len(variables)
    if isinstance(groups, int):
        total = len(variables)
        count = min(groups, total)
        return [i * count // total for i in range(total)]
    by_id = {_identity(v): number for number, group in enumerate(groups) for v in group}
    return [by_id.get(_identity(variable)) for variable in variables]


def _identity(variable: Any) -> Any:
    """Names a variable: Keras variables and the tf.Variables in them are the same."""
    return getattr(_native(variable), "_unique_id", None) or id(variable)
