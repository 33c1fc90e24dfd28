"""As ``failures.py`` for TensorFlow. Arguments: PLACE, and "graph" to do it in a tf.function.

The doomed rank is the last; it is killed in the middle of PLACE. Every other rank prints
"RESULT <class>: <text> after <seconds>". In a graph the class is that of the error's text.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from moment import MOMENT, end, end_soon

import bagua_ext.tensorflow as hvd

BIG = 6 << 20  # elements, so that a collective takes some milliseconds
ROUNDS = 10_000_000


def collective(place: str) -> Callable[[], Any]:
    x = tf.ones((BIG // 6, 6))
    share = x[: len(x) // hvd.size()]
    divisible = x[: len(share) * hvd.size()]
    variable = tf.Variable(x)
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: hvd.allreduce(x, name="big"),
        "small": lambda: hvd.allreduce(x[:10], name="small"),
        "grouped": lambda: hvd.grouped_allreduce([x[:1000], x[1000:2000]], name="group"),
        "allgather": lambda: hvd.allgather(share, name="gathered"),
        "broadcast": lambda: hvd.broadcast(x, 0, name="sent"),
        "variables": lambda: hvd.broadcast_([variable], 0),
        "reducescatter": lambda: hvd.reducescatter(x, name="scattered"),
        "alltoall": lambda: hvd.alltoall(divisible, name="exchanged"),
        "barrier": hvd.barrier,
        "step": make_step(),
    }
    return calls[place]


def make_step() -> Callable[[], Any]:
    weights = [tf.Variable(tf.random.normal((512, 512), stddev=0.05)) for _ in range(8)]

    def step() -> None:
        with hvd.DistributedGradientTape(tf.GradientTape(), bucket_bytes=1 << 20) as tape:
            y = tf.ones((16, 512))
            for weight in weights:
                y = tf.tanh(y @ weight)
            loss = tf.reduce_mean(y * y)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.01 * gradient)

    return step


def train_in_a_monitored_session(doomed: bool) -> None:
    """TensorFlow makes such a session anew after an AbortedError; the hook ends that."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        weight = v1.get_variable("w", initializer=tf.ones(4))
        v1.train.get_or_create_global_step()
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
        step = optimizer.minimize(tf.reduce_sum(weight**2))
        hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for number in range(ROUNDS):
                if doomed and number == 3:
                    end("kill")
                session.run(step)


def run(place: str, graph: bool) -> None:
    hvd.init()
    doomed = hvd.rank() == hvd.size() - 1
    if place == "session":
        train_in_a_monitored_session(doomed)
    call = collective(place)
    call = tf.function(call) if graph else call
    call()
    hvd.barrier()
    if doomed and place == "step":
        end("kill")  # the others are in the middle of a step
    if doomed:
        end_soon("kill")
    for _ in range(ROUNDS):
        call()


def is_lasting() -> None:
    """After a rank was lost every operation fails at once, and shutdown works."""
    for call in (hvd.barrier, lambda: hvd.allreduce(tf.ones(2), name="after")):
        try:
            call()
        except hvd.PeerLostError:
            continue
        raise AssertionError("an operation succeeded without the lost rank")
    hvd.shutdown()


def main() -> None:
    place, graph = sys.argv[1], sys.argv[2:] == ["graph"]
    try:
        run(place, graph)
    except (hvd.BaguaError, tf.errors.AbortedError) as error:
        seconds = time.monotonic() - float(MOMENT.read_text())
        kind, text = type(error).__name__, str(error)
        if graph:
            kind, text = re.search(
                r"(\w+Error): (.*)", text[text.rindex("PeerLostError") :]
            ).groups()
        print(f"RESULT {kind}: {text} after {seconds:.2f}", flush=True)
        is_lasting()


if __name__ == "__main__":
    main()
