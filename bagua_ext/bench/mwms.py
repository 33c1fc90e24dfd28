"""tf.distribute.MultiWorkerMirroredStrategy, in the same processes as the library measured."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from bagua_ext import basics, objects

Strategy = tf.distribute.Strategy
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def make_strategy() -> Strategy:
    """A strategy whose workers are the ranks, with TensorFlow's own ring between them.

    Made by all ranks together, after ``init`` and before anything runs in TensorFlow.
    """
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        own = "{}:{}".format(*free.getsockname())
        workers = objects.allgather_object(own, "bench.mwms")  # each holds its port until then
    task = {"type": "worker", "index": basics.rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def all_reduce(op: tf.distribute.ReduceOp, value: Any) -> Any:
    """The reduction of a tensor, or of all tensors of a list at once, inside ``strategy.run``."""
    return tf.distribute.get_replica_context().all_reduce(op, value)


def summing(strategy: Strategy, given: Any, operations: int = 1) -> Callable[[], Any]:
    """A traced function that returns ``given`` summed over ranks, ``operations`` times in a row.

    ``given`` is part of the function: the strategy asks for the device of what it reduces, which
    arguments do not have.
    """

    def on_replica() -> Any:
        value = given
        for _ in range(operations):
            value = all_reduce(SUM, value)
        return value

    return tf.function(lambda: strategy.run(on_replica), autograph=False)
