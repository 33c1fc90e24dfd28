"""Reduces the gradients of a tied Keras model, on either backend of Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from bagua_ext.interop.wire import Wire
from bagua_ext.keras._arguments import agreed as settings_to_agree_on

Exchange = Callable[[list[Any]], list[Any]]


class TiedReducer:
    """Stands in a Keras DistributedOptimizer for the reducer that it would make itself."""

    def __init__(self, wire: Wire, exchange: Exchange) -> None:
        self._wire, self._exchange = wire, exchange

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the reduced gradients of ``variables``; None where no rank has one.

        Collective: every call reduces all trained tensors of the model, those without a gradient
        on this rank as zeros.
        """
        sent = self._wire.encode(gradients, variables)
        return self._wire.decode(self._exchange(sent), variables)


def make_reducer(plan_name: str, wire: Wire, arguments: Any) -> TiedReducer:
    """Returns the reducer of an optimizer that was made with ``arguments``."""
    agreed = settings_to_agree_on(arguments.config)
    if keras.config.backend() == "torch":
        from bagua_ext.interop._torch_exchange import TorchExchange

        return TiedReducer(wire, TorchExchange(plan_name, wire, arguments, agreed).run)
    return TiedReducer(wire, _tensorflow_exchange(plan_name, wire, arguments, agreed))


def _tensorflow_exchange(plan_name: str, wire: Wire, arguments: Any, agreed: str) -> Exchange:
    import tensorflow as tf

    from bagua_ext.tensorflow._reducer import GradientReducer, Settings

    reducer = GradientReducer(
        Settings(
            name=plan_name,
            reduction=arguments.reduction,
            bucket_bytes=arguments.bucket_bytes,
            sparse_as_dense=True,
            process_set=arguments.process_set,
            names=wire.names,
            agreed=agreed,
        )
    )
    described = zip(wire.shapes, wire.dtypes, wire.names, strict=True)
    specs = [tf.TensorSpec(*description) for description in described]
    return lambda sent: reducer.reduce(sent, specs)
