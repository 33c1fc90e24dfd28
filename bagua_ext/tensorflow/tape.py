"""Gradient tapes whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from bagua_ext import basics
from bagua_ext.process_sets import global_process_set, numbered
from bagua_ext.reduce_ops import Average, ReduceOp
from bagua_ext.reductions import Reduction, checked_bucket_bytes, make_reduction
from bagua_ext.tensorflow._autograph import keep_out
from bagua_ext.tensorflow._reducer import GradientReducer, Settings, _identity, _native
from bagua_ext.tensorflow.compression import Compression, Compressor

# Tapes come and go with each step; what they agreed on stays, by their arguments.
_reducers: dict[Any, GradientReducer] = {}


def _shared_reducer(
    reduction: Reduction,
    bucket_bytes: int,
    sparse_as_dense: bool,
    process_set: Any,
    groups: Sequence[Sequence[Any]] | int | None,
) -> GradientReducer:
    grouped = groups
    if not isinstance(groups, (int, type(None))):
        grouped = tuple(tuple(_identity(variable) for variable in group) for group in groups)
    key = (reduction, bucket_bytes, sparse_as_dense, id(process_set), grouped)
    if key not in _reducers:
        name = numbered("DistributedGradientTape", process_set)
        _reducers[key] = GradientReducer(
            Settings(name, reduction, bucket_bytes, sparse_as_dense, process_set, groups)
        )
    return _reducers[key]


def checked_groups(num_groups: int, groups: Any) -> Sequence[Sequence[Any]] | int | None:
    """Returns the grouping that the two arguments ask for.

    Raises:
        ValueError: ``groups`` is neither a number nor a list of lists of variables.
    """
    if isinstance(groups, int):
        num_groups, groups = groups, None
    if num_groups < 0:
        raise ValueError(f"num_groups is {num_groups}, expected 0 or more")
    if groups is None:
        return num_groups or None
    if not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups should be a list of lists of variables, or a whole number")
    known = [_identity(variable) for group in groups for variable in group]
    if len(set(known)) != len(known):
        raise ValueError("a variable occurs in groups more than once")
    return groups


class _DistributedTape(tf.GradientTape):
    """Records by the tape that it was given, and reduces what that returns."""

    def __init__(
        self,
        tape: tf.GradientTape,
        reducer: GradientReducer,
        local: Sequence[Any],
        scale_local_gradients: bool,
    ) -> None:
        # The base class's constructor would start a tape of its own.
        self._wrapped = tape
        self._reducer = reducer
        self._local = {_identity(variable) for variable in local}
        self._scale_local = scale_local_gradients

    @keep_out
    def __enter__(self) -> _DistributedTape:
        self._wrapped.__enter__()
        return self

    @keep_out
    def __exit__(self, *error: Any) -> None:
        self._wrapped.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped":
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    @keep_out
    def watch(self, tensor: Any) -> None:
        """Records what is done with ``tensor``."""
        self._wrapped.watch(tensor)

    @keep_out
    def stop_recording(self) -> Any:
        """As tf.GradientTape's."""
        return self._wrapped.stop_recording()

    @keep_out
    def reset(self) -> None:
        """Forgets what was recorded."""
        self._wrapped.reset()

    @keep_out
    def watched_variables(self) -> Any:
        """As tf.GradientTape's."""
        return self._wrapped.watched_variables()

    @keep_out
    def jacobian(self, *arguments: Any, **options: Any) -> Any:
        """As tf.GradientTape's; not reduced."""
        return self._wrapped.jacobian(*arguments, **options)

    @keep_out
    def batch_jacobian(self, *arguments: Any, **options: Any) -> Any:
        """As tf.GradientTape's; not reduced."""
        return self._wrapped.batch_jacobian(*arguments, **options)

    @keep_out
    def register_local_source(self, source: Any) -> None:
        """The gradient of ``source``, a variable, is not reduced."""
        self._local.add(_identity(source))

    @keep_out
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Returns the gradients of ``target``, reduced over all ranks; collective.

        Arguments and structure as tf.GradientTape's. A source without gradient on this rank gets
        one if another rank has it.
        """
        gradients = self._wrapped.gradient(target, sources, output_gradients, unconnected_gradients)
        flat_sources = tf.nest.flatten(sources)
        flat = tf.nest.flatten(gradients, expand_composites=False)
        shared = [i for i, s in enumerate(flat_sources) if _identity(s) not in self._local]
        reduced = self._reducer.reduce(
            [flat[i] for i in shared], [_native(flat_sources[i]) for i in shared]
        )
        results = [self._scaled(gradient) for gradient in flat]
        for i, gradient in zip(shared, reduced, strict=True):
            results[i] = gradient
        return tf.nest.pack_sequence_as(sources, results)

    def _scaled(self, gradient: Any) -> Any:
        """A local gradient counts as that of one rank among all, as the averaged ones do."""
        size = self._reducer.settings.process_set.size()
        if gradient is None or not self._scale_local or size == 1:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(size, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size, gradient.dtype)


@keep_out
def DistributedGradientTape(  # noqa: N802
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
    *,
    algorithm: Any = None,
    bucket_bytes: int | None = None,
) -> tf.GradientTape:
    """Returns a tape that records as ``gradtape`` and whose ``gradient`` is reduced over all ranks.

    All ranks call ``gradient`` alike: with variables of the same shapes in the same order. The
    gradients travel in buckets that are agreed by the first call; in a tf.function they are
    exchanged while the rest of the backward pass runs.

    Args:
        gradtape: the tape to wrap; it may have recorded already.
        device_dense, device_sparse: accepted for Horovod's sake.
        compression: format of float32 gradients on their way: Compression.none, fp16 or bf16.
        sparse_as_dense: make tf.IndexedSlices dense; otherwise they are gathered.
        op: Average or Sum.
        gradient_predivide_factor: f divides before the sum and multiplies after; Average only.
        num_groups: number of buckets to share the gradients out to; 0: by size.
        groups: lists of variables that share a bucket, or a number as ``num_groups``.
        process_set: the ranks that reduce together.
        scale_local_gradients: divide the gradients of sources that are registered as local by the
            number of ranks.
        algorithm: None (reduces gradients by ``op``); nothing else is there yet.
        bucket_bytes: largest bucket in bytes; None: BAGUA_BUCKET_BYTES or 10 MiB.

    Raises:
        NotInitializedError: before ``init``.
        ValueError: an argument is wrong or not supported yet.
    """
    basics.size()
    if algorithm is not None:
        raise ValueError(
            f"algorithm={algorithm!r} is not there yet; None (gradients are averaged) is"
        )
    reducer = _shared_reducer(
        make_reduction(op, gradient_predivide_factor, compression),
        checked_bucket_bytes(bucket_bytes),
        sparse_as_dense,
        process_set,
        checked_groups(num_groups, groups),
    )
    return _DistributedTape(gradtape, reducer, (), scale_local_gradients)


@keep_out
def PartialDistributedGradientTape(  # noqa: N802
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    *,
    algorithm: Any = None,
    bucket_bytes: int | None = None,
) -> tf.GradientTape:
    """As ``DistributedGradientTape``, leaving the variables of ``local_layers`` to each rank.

    ``local_layers``: a Keras layer or a list of them.

    Raises:
        ValueError: one of ``local_layers`` has no trainable variables attribute.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        algorithm=algorithm,
        bucket_bytes=bucket_bytes,
    )
    layers = local_layers or []
    for layer in layers if isinstance(layers, (list, tuple)) else [layers]:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers should be Keras layers, got {type(layer).__name__}")
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
