"""Training steps of a perceptron; what is said of the batches of ``cases.train`` holds here too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

import bagua_ext.tensorflow as bagua
from bagua_ext.bench import mwms
from bagua_ext.bench.engine import FlatBucket
from bagua_ext.bench.job import Job
from bagua_ext.bench.measure import Candidate, Pattern
from bagua_ext.bench.report import Report, Row
from bagua_ext.bench.tensorflow_cases.ways import averaging_array, mwms_sum
from bagua_ext.bench.training import LOCAL, OURS, RATE, check_weights, layers_of, with_exchange

PEER = "mwms"
_Tape = tf.GradientTape


def make_weights(parameters: int) -> list[np.ndarray]:
    """Of square layers, about ``parameters`` in all, the same on every rank."""
    width, depth = layers_of(parameters)
    draw = np.random.default_rng(0)
    scale = np.float32((2 / width) ** 0.5)  # rectified layers keep the size of what goes through
    return [draw.standard_normal((width, width), np.float32) * scale for _ in range(depth)]


@dataclass
class Trainer:
    """Variables, and a traced step that trains them on the same batch each time."""

    variables: Sequence[tf.Variable]
    step: Callable[[], object]

    def weights(self) -> np.ndarray:
        return _joined([variable.numpy() for variable in self.variables])


def _joined(weights: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([each.reshape(-1) for each in weights])


def _loss(variables: Sequence[tf.Variable], batch: tf.Tensor) -> tf.Tensor:
    *inner, last = variables
    for variable in inner:
        batch = tf.nn.relu(batch @ variable)
    return tf.reduce_mean(tf.square(batch @ last))


def _descend(variables: Sequence[tf.Variable], gradients: Sequence[tf.Tensor]) -> None:
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(RATE * gradient)


def _trainer(
    weights: list[np.ndarray], batch: np.ndarray, wrap: Callable[[_Tape], _Tape] = lambda tape: tape
) -> Trainer:
    """Takes the gradients that ``wrap`` makes of a tape's."""
    variables, given = [tf.Variable(each) for each in weights], tf.constant(batch)

    @tf.function(autograph=False)
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = _loss(variables, given)
        _descend(variables, wrap(tape).gradient(loss, variables))

    return Trainer(variables, step)


def _peer(weights: list[np.ndarray], batch: np.ndarray, strategy: mwms.Strategy) -> Trainer:
    """The same step in each of the strategy's replicas, their gradients averaged by it."""
    with strategy.scope():
        variables = [tf.Variable(each) for each in weights]
    given = tf.constant(batch)

    def update(strategy: mwms.Strategy, gradients: Sequence[tf.Tensor]) -> None:
        for variable, gradient in zip(variables, gradients, strict=True):
            strategy.extended.update(
                variable, lambda own, change: own.assign_sub(RATE * change), args=(gradient,)
            )

    def on_replica() -> None:
        with tf.GradientTape() as tape:
            loss = _loss(variables, given)
        gradients = mwms.all_reduce(mwms.MEAN, tape.gradient(loss, variables))
        tf.distribute.get_replica_context().merge_call(update, args=(gradients,))

    return Trainer(variables, tf.function(lambda: strategy.run(on_replica), autograph=False))


def _inputs(width: int, batch: int, size: int) -> np.ndarray:
    """Every rank's batch, by rank; each rank knows them all."""
    return np.random.default_rng(1).standard_normal((size, batch, width), np.float32)


def _exchange_alone(count: int, job: Job) -> dict[str, float]:
    """Median seconds of exchanging ``count`` gradients with nothing to overlap with."""
    pattern, bucket = Pattern(count, job.rank, job.size), FlatBucket("train.alone", count)
    candidates = [averaging_array(OURS, "alone", pattern, bucket.data, bucket.exchange)]
    if job.compares("mwms"):
        candidates.append(mwms_sum(PEER, "alone", pattern, job.strategy))
    samples = job.alternate(candidates, rounds=5)
    candidates.clear()
    bucket.drop()
    return {name: Row("", name, seconds).median for name, seconds in samples.items()}


def _measure_batch(batch: int, alone: dict[str, float], job: Job) -> list[Row]:
    start = make_weights(job.options.parameters)
    inputs = _inputs(len(start[0]), batch, job.size)
    mine = inputs[job.rank]
    trainers = {
        LOCAL: _trainer(start, mine),
        OURS: _trainer(start, mine, bagua.DistributedGradientTape),
    }
    if job.compares("mwms"):
        trainers[PEER] = _peer(start, mine, job.strategy)
    candidates = [
        Candidate(name, prepare=lambda: None, run=trainer.step, check=lambda _: None)
        for name, trainer in trainers.items()
    ]
    rounds = job.rounds(10)
    samples = job.alternate(candidates, rounds)

    joined = _trainer(start, np.concatenate(inputs))
    for _ in range(rounds + job.options.warmup):
        joined.step()
    wanted, before = joined.weights(), _joined(start)
    for name, trainer in trainers.items():
        if name != LOCAL:
            check_weights(name, trainer.weights(), wanted, before)
    rows = [Row(f"batch {batch}", name, seconds) for name, seconds in samples.items()]
    local = rows[0].median
    further = {OURS: f"floor {(local + alone[OURS]) * 1e3:.1f} ms"} if alone else {}
    return [with_exchange(row, local, alone, further) for row in rows]


def measure(job: Job) -> Report:
    """Samples of whole steps in a tf.function: forward, backward, exchange, plain descent."""
    count = _joined(make_weights(job.options.parameters)).size
    alone = _exchange_alone(count, job) if job.size > 1 else {}
    rows = [row for batch in job.options.batches for row in _measure_batch(batch, alone, job)]
    notes = [
        f"{count / (1 << 20):g} Mi parameters in float32, gradient descent by hand.",
        "adds: to the step without exchange. floor: that step and the exchange alone, of one flat "
        "tensor, in turn.",
    ]
    return Report("train", job.size, (PEER, LOCAL), rows, notes)
