"""SIGINT while an eager operation waits: KeyboardInterrupt at once, and nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from driver import raised, run_checks

import bagua_ext.tensorflow as hvd


def interrupted_on_rank_0(wait: Callable[[], object]) -> None:
    """Rank 0 waits for the others, which come only after it was interrupted."""
    if hvd.rank() == 0:
        begin = time.monotonic()
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        raised(KeyboardInterrupt, wait)
        assert time.monotonic() - begin < 5.0
    hvd.broadcast(tf.ones(1), 0, name="rank 0 was interrupted")


def sum_of_ones(name: str) -> None:
    got = hvd.allreduce(tf.ones(3), name=name, op=hvd.Sum)
    np.testing.assert_array_equal(got, np.full(3, hvd.size()))


def check_an_operation() -> None:
    interrupted_on_rank_0(lambda: sum_of_ones("blocking"))
    if hvd.rank() != 0:
        sum_of_ones("blocking")
    sum_of_ones("after")


def check_an_operation_that_makes_its_result() -> None:
    gather = lambda: hvd.allgather(tf.ones(2), name="g")  # noqa: E731
    interrupted_on_rank_0(gather)
    if hvd.rank() != 0:
        assert gather().shape == (2 * hvd.size(),)
    sum_of_ones("after")


def check_an_exception_of_the_handler() -> None:
    def refuse(_number: int, _frame: object) -> None:
        raise LookupError("the user's own")

    before = signal.signal(signal.SIGINT, refuse)
    if hvd.rank() == 0:
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        raised(LookupError, lambda: sum_of_ones("handled"), "the user's own")
    signal.signal(signal.SIGINT, before)
    hvd.barrier()
    if hvd.rank() != 0:
        sum_of_ones("handled")
    sum_of_ones("after")


if __name__ == "__main__":
    run_checks(globals())
