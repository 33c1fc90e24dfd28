"""DistributedOptimizer for Keras optimizers and for those of TF1-style programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from bagua_ext import basics
from bagua_ext.process_sets import global_process_set, numbered
from bagua_ext.reduce_ops import Average, ReduceOp
from bagua_ext.reductions import checked_bucket_bytes, make_reduction
from bagua_ext.tensorflow._autograph import keep_out
from bagua_ext.tensorflow._reducer import GradientReducer, Settings
from bagua_ext.tensorflow.compression import Compression, Compressor
from bagua_ext.tensorflow.tape import checked_groups

_LegacyOptimizer = tf.compat.v1.train.Optimizer


@keep_out
def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
    *,
    algorithm: Any = None,
    bucket_bytes: int | None = None,
) -> Any:
    """Returns an optimizer of the same kind whose gradients are reduced over all ranks.

    ``optimizer`` is a Keras optimizer, see ``bagua_ext.tensorflow.keras.DistributedOptimizer``, or
    one of tf.compat.v1.train, whose ``compute_gradients`` then reduces.

    Args:
        optimizer: the optimizer that makes the step.
        name: name of the new optimizer; None: "Distributed" and that of the wrapped class.
        use_locking: as of tf.compat.v1.train optimizers.
        device_dense, device_sparse: accepted for Horovod's sake.
        compression: format of float32 gradients on their way: Compression.none, fp16 or bf16.
        sparse_as_dense: make tf.IndexedSlices dense; otherwise they are gathered.
        backward_passes_per_step: calls whose gradients add up before they are reduced.
        op: Average or Sum.
        gradient_predivide_factor: f divides before the sum and multiplies after; Average only.
        average_aggregated_gradients: divide what added up by ``backward_passes_per_step``.
        num_groups: number of buckets to share the gradients out to; 0: by size.
        groups: lists of variables that share a bucket, or a number as ``num_groups``.
        process_set: the ranks that reduce together.
        scale_local_gradients: as of ``PartialDistributedGradientTape``.
        algorithm: None (reduces gradients by ``op``); nothing else is there yet.
        bucket_bytes: largest bucket in bytes; None: BAGUA_BUCKET_BYTES or 10 MiB.

    Raises:
        NotInitializedError: before ``init``.
        ValueError: an argument is wrong or not supported yet.
    """
    if isinstance(optimizer, _LegacyOptimizer):
        if algorithm is not None:
            raise ValueError(
                f"algorithm={algorithm!r} is not there yet; None (gradients are averaged) is"
            )
        basics.size()
        settings = Settings(
            name=numbered("tf.DistributedOptimizer", process_set),
            reduction=make_reduction(op, gradient_predivide_factor, compression),
            bucket_bytes=checked_bucket_bytes(bucket_bytes),
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
            groups=checked_groups(num_groups, groups),
            agreed=f"backward_passes_per_step={backward_passes_per_step}",
        )
        if backward_passes_per_step < 1:
            raise ValueError(
                f"backward_passes_per_step is {backward_passes_per_step}, expected 1 or more"
            )
        passes = (backward_passes_per_step, average_aggregated_gradients)
        return _Distributed(optimizer, name, use_locking, GradientReducer(settings), passes)
    import keras

    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "optimizer must be a Keras optimizer or one of tf.compat.v1.train, got "
            f"{type(optimizer).__name__}"
        )
    from bagua_ext.keras import DistributedOptimizer as KerasOptimizer

    return KerasOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        algorithm=algorithm,
        bucket_bytes=bucket_bytes,
    )


class _Passes:
    """Adds the gradients of one graph up over several runs; ``count`` of them make a step."""

    def __init__(self, count: int, averages: bool) -> None:
        self.count, self.averages = count, averages
        self._counter: tf.Variable | None = None
        self._sums: list[tf.Variable] = []

    def add(self, gradients: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Adds ``gradients`` up; returns whether a step is complete, and the sums so far."""
        self._make_variables(gradients)
        count = self._counter.assign_add(1)
        first = tf.equal(count % self.count, 1 % self.count)
        sums = [
            tf.where(first, gradient, own.read_value() + gradient)
            for own, gradient in zip(self._sums, gradients, strict=True)
        ]
        updates = [own.assign(total) for own, total in zip(self._sums, sums, strict=True)]
        with tf.control_dependencies(updates):
            complete = tf.equal(count % self.count, 0)
        if self.averages:
            sums = [own / tf.cast(self.count, own.dtype) for own in sums]
        return complete, sums

    def _make_variables(self, gradients: Sequence[tf.Tensor]) -> None:
        if self._counter is not None:
            return
        make = tf.compat.v1.get_variable if not tf.executing_eagerly() else None
        with tf.init_scope(), tf.compat.v1.variable_scope("bagua_passes", reuse=False):
            self._counter = _zeros(make, "counter", [], tf.int64)
            self._sums = [
                _zeros(make, f"sum_{i}", gradient.shape, gradient.dtype)
                for i, gradient in enumerate(gradients)
            ]


def _zeros(make: Any, name: str, shape: Any, dtype: tf.DType) -> tf.Variable:
    initial = tf.zeros(shape, dtype)
    if make is None:
        return tf.Variable(initial, trainable=False, name=name)
    return tf.compat.v1.Variable(initial, trainable=False, name=name, use_resource=True)


class _Distributed(_LegacyOptimizer):
    """Reduces the gradients that the wrapped optimizer computes."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reducer: GradientReducer,
        passes: tuple[int, bool],
    ) -> None:
        super().__init__(
            name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking
        )
        self._optimizer, self._reducer, self._passes = optimizer, reducer, passes
        self._complete: tf.Tensor | None = None

    @keep_out
    def compute_gradients(self, *arguments: Any, **options: Any) -> list[tuple[Any, Any]]:
        """The wrapped optimizer's gradients, reduced; between steps, zeros."""
        pairs = self._optimizer.compute_gradients(*arguments, **options)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if self._passes[0] == 1:
            return list(zip(self._reducer.reduce(gradients, variables), variables, strict=True))
        return list(zip(self._accumulated(gradients, variables), variables, strict=True))

    def _accumulated(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        dense = [tf.convert_to_tensor(gradients[i]) for i in present]
        self._complete, sums = _Passes(*self._passes).add(dense)
        targets = [variables[i] for i in present]

        def reduced() -> list[tf.Tensor]:
            return self._reducer.reduce(sums, targets)

        def nothing() -> list[tf.Tensor]:
            return [tf.zeros_like(own) for own in sums]

        results: list[Any] = [None] * len(gradients)
        for i, gradient in zip(present, tf.cond(self._complete, reduced, nothing), strict=True):
            results[i] = gradient
        return results

    @keep_out
    def apply_gradients(self, grads_and_vars: Any, *arguments: Any, **options: Any) -> Any:
        """The wrapped optimizer's step; between steps of several passes, nothing."""
        pairs = list(grads_and_vars)
        if self._complete is None:
            return self._optimizer.apply_gradients(pairs, *arguments, **options)

        def step() -> tf.Tensor:
            operation = self._optimizer.apply_gradients(pairs, *arguments, **options)
            with tf.control_dependencies([operation] if operation is not None else []):
                return tf.constant(True)

        done = tf.cond(self._complete, step, lambda: tf.constant(False))
        return done if tf.executing_eagerly() else done.op

    def get_slot(self, *arguments: Any, **options: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.get_slot(*arguments, **options)

    def get_slot_names(self, *arguments: Any, **options: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.get_slot_names(*arguments, **options)

    def variables(self) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.variables()
