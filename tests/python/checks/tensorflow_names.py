"""The module's names, and what its functions say before init."""

from __future__ import annotations

import sys

import tensorflow as tf
from driver import raised

import bagua_ext.tensorflow as hvd

if __name__ == "__main__":
    missing = [name for name in hvd.__all__ if not hasattr(hvd, name)]
    assert not missing, missing
    assert "torch" not in sys.modules
    for name in ("elastic", "start_timeline"):
        raised(AttributeError, lambda name=name: getattr(hvd, name), name, "not there yet")
    raised(AttributeError, lambda: hvd.nonsense, "no attribute 'nonsense'")
    tape = tf.GradientTape()
    for call in (
        hvd.rank,
        hvd.size,
        hvd.barrier,
        lambda: hvd.allreduce(tf.ones(1)),
        lambda: hvd.DistributedGradientTape(tape),
        lambda: hvd.broadcast_variables([tf.Variable(1.0)], 0),
    ):
        raised(hvd.NotInitializedError, call, "init")
    raised(hvd.NotInitializedError, hvd.size_op, "init()")
