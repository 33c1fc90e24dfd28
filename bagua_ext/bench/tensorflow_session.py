"""A rank that measures TensorFlow's binding: one thread for arithmetic, results awaited."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

import bagua_ext.tensorflow as bagua
from bagua_ext.bench import mwms
from bagua_ext.bench.options import Options


@contextlib.contextmanager
def opened(options: Options) -> Iterator[mwms.Strategy | None]:
    """Meets the other ranks; yields the strategy to compare with, or None.

    Nothing has run in TensorFlow before: it starts its threads, and the strategy its servers, once.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.experimental.set_synchronous_execution(True)  # a call ends with its result
    bagua.init()
    yield mwms.make_strategy() if "mwms" in options.compare else None
