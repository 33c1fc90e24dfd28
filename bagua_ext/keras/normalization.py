"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import keras
from keras import ops

from bagua_ext.keras.optimizer import framework
from bagua_ext.process_sets import ProcessSet, global_process_set


@keras.saving.register_keras_serializable(package="bagua_ext")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """BatchNormalization whose batch, in training, is the batches of all ranks joined.

    Output, gradients and moving averages are those of one process with the joined batch; the ranks'
    batches may differ in size. Takes BatchNormalization's arguments, ``fused`` for Horovod's sake,
    and ``process_set``, the ranks whose batches are joined. These call it alike; in inference, and
    where there is one rank, nothing is exchanged.

    Raises:
        NotInitializedError: called in training before ``init``.
    """

    def __init__(
        self, fused: bool = False, process_set: ProcessSet = global_process_set, **options: Any
    ) -> None:
        if fused or options.pop("synchronized", False):
            raise ValueError(
                "SyncBatchNormalization takes neither fused=True nor synchronized=True"
            )
        super().__init__(**options)
        self._process_set = process_set
        self.supports_jit = False  # XLA cannot hold a collective of this package

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        process_set = copy.copy(self._process_set)  # the set of these ranks that was added
        if process_set.size() == 1:
            return super()._moments(inputs, mask)
        own = self._own_moments(inputs, mask)
        # One exchange of means and sums of squared deviations: unlike sums of squares these do not
        # cancel where the mean is large.
        rows = ops.expand_dims(ops.stack(own), 0)
        gathered = framework.hvd.allgather(rows, process_set=process_set)
        count, mean, deviation = (gathered[:, i] for i in range(3))
        total = ops.maximum(ops.sum(count, 0), 1.0)
        joined_mean = ops.sum(count * mean, 0) / total
        between = ops.sum(count * ops.square(mean - joined_mean), 0)
        return joined_mean, (ops.sum(deviation, 0) + between) / total

    def _own_moments(self, inputs: Any, mask: Any) -> tuple[Any, Any, Any]:
        """Returns this rank's counts, means and sums of squared deviations, by channel."""
        axes, channels = self._reduction_axes, inputs.shape[self.axis]
        if mask is None:
            rows = math.prod(ops.shape(inputs)[axis] for axis in axes)
            count = ops.broadcast_to(ops.cast(rows, inputs.dtype), (channels,))
        else:
            chosen = ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs))
            chosen = ops.cast(chosen, "bool")
            inputs = ops.where(chosen, inputs, 0)
            count = ops.sum(ops.cast(chosen, inputs.dtype), axes)
        mean = ops.sum(inputs, axes) / ops.maximum(count, 1.0)
        along = [1] * len(inputs.shape)
        along[self.axis] = channels
        deviation = inputs - ops.reshape(mean, along)
        if mask is not None:
            deviation = ops.where(chosen, deviation, 0)
        return count, mean, ops.sum(ops.square(deviation), axes)

    def get_config(self) -> dict[str, Any]:
        """Returns what ``from_config`` needs."""
        config = super().get_config()
        del config["synchronized"]
        is_global = self._process_set is global_process_set
        return {**config, "process_set": None if is_global else self._process_set.ranks}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SyncBatchNormalization:
        """Returns the layer that ``get_config`` described; needs no ``init``."""
        options = dict(config)
        ranks = options.pop("process_set")
        if ranks is not None:
            options["process_set"] = ProcessSet(ranks)
        return cls(**options)
