"""The callbacks, each against values that are computed another way."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from driver import raised, run_checks
from keras_models import (
    FEATURES,
    ON_TENSORFLOW,
    OUTPUTS,
    apply,
    assert_close,
    assert_same,
    assert_same_on_all_ranks,
    build,
    data,
    differ,
    gradients,
    part,
    step,
    values,
)

import bagua_ext.keras as hvd

callbacks = hvd.callbacks
STEPS = 5  # of an epoch


class Watcher(keras.callbacks.Callback):
    """Notes ``look(model)`` before each batch."""

    def __init__(self, look: Callable[[keras.Model], Any]) -> None:
        super().__init__()
        self.look, self.seen = look, []

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.seen.append(self.look(self.model))


class Metrics(keras.callbacks.Callback):
    """Gives each epoch the metrics of ``make(epoch)``."""

    def __init__(self, make: Callable[[int], dict[str, Any]]) -> None:
        super().__init__()
        self.make = make

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs.update(self.make(epoch))


def fit(model: keras.Model, *given: keras.callbacks.Callback, epochs: int = 1) -> dict[str, Any]:
    x, y = part(*data(2 * STEPS * hvd.size()))
    options = {"epochs": epochs, "callbacks": list(given), "shuffle": False, "verbose": 0}
    return model.fit(x, y, batch_size=2, **options).history


def rate_of(model: keras.Model) -> float:
    return float(model.optimizer.learning_rate)


# ---- Broadcast ----------------------------------------------------------------------------------


def different(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """A compiled model whose weights, slots and iterations are each rank's own."""
    model = build(seed=10 + hvd.rank())
    for number in range(1 + hvd.rank()):
        step(model, optimizer, *data(4, hvd.rank() + number))
    model.compile(hvd.DistributedOptimizer(optimizer), "mse", run_eagerly=True)
    return model


def check_all_ranks_begin_with_the_roots_weights_and_optimizer_state() -> None:
    root = hvd.size() - 1
    model = different(keras.optimizers.Adam(0.01))
    state = [*model.weights, *model.optimizer.variables]
    expected = hvd.broadcast_object(values(state), root)
    assert hvd.rank() == root or differ(state, expected)
    callback = callbacks.BroadcastGlobalVariablesCallback(root)
    watcher = Watcher(lambda model: values([*model.weights, *model.optimizer.variables]))
    fit(model, callback, watcher)
    assert_same(watcher.seen[0], expected)
    assert int(model.optimizer.iterations) == hvd.size() + STEPS
    assert_same_on_all_ranks(state)
    # Once: what is different later stays so.
    model.set_weights([value + hvd.rank() for value in values(model.weights)])
    before = values(model.weights)
    fit(model, callback, watcher)
    assert_same(watcher.seen[STEPS][: len(before)], before)


def check_an_optimizer_without_variables_gets_them_first() -> None:
    model = build(seed=10 + hvd.rank())
    model.compile(hvd.DistributedOptimizer("adam"), "mse", run_eagerly=True)
    expected = hvd.broadcast_object(values(model.weights), 0)
    watcher = Watcher(lambda model: (values(model.weights), model.optimizer.built))
    fit(model, callbacks.BroadcastGlobalVariablesCallback(0), watcher)
    assert_same(watcher.seen[0][0], expected)
    assert watcher.seen[0][1]


def check_a_model_that_is_built_by_its_first_batch() -> None:
    for batches in (1, STEPS):
        keras.utils.set_random_seed(10 + hvd.rank())
        model = keras.Sequential([keras.layers.Dense(7), keras.layers.Dense(OUTPUTS)])
        model.compile(
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)),
            "mse",
            run_eagerly=True,
        )
        assert not model.built
        x, y = part(*data(2 * batches * hvd.size()))
        callback = callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(x, y, batch_size=2, callbacks=[callback], verbose=0)
        assert callback.broadcast_done
        assert_same_on_all_ranks([*model.weights, *model.optimizer.variables])


def check_dropout_stays_each_ranks_own() -> None:
    keras.utils.set_random_seed(10 + hvd.rank())
    dropout = keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((FEATURES,)), dropout, keras.layers.Dense(OUTPUTS)])
    model.compile(hvd.DistributedOptimizer("sgd"), "mse", run_eagerly=True)
    weights = {id(variable) for variable in model.weights}
    (seed,) = (variable for variable in model.variables if id(variable) not in weights)
    before = values([seed])
    watcher = Watcher(lambda model: values([seed]))
    fit(model, callbacks.BroadcastGlobalVariablesCallback(0), watcher)
    assert_same(watcher.seen[0], before)


def check_different_models_are_named_on_every_rank() -> None:
    if hvd.size() == 1:
        return
    units = 4 if hvd.rank() == 1 else 3
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(units)])
    words = ("rank 1", f"float32[{FEATURES}, 4]", f"float32[{FEATURES}, 3]")
    raised(hvd.MismatchError, lambda: hvd.broadcast_model(model, 0), *words)
    more = model.weights[: 1 + (hvd.rank() == 1)]
    raised(hvd.MismatchError, lambda: hvd.broadcast_variables(more, 0), "rank 1 has 2 variables")
    raised(ValueError, lambda: hvd.broadcast_global_variables(0), "broadcast_model(model, 0)")


def check_xla_is_turned_off_where_keras_chose_it() -> None:
    class Chosen(keras.Sequential):
        """A model for which Keras' "auto" is XLA, as on a GPU."""

        def _resolve_auto_jit_compile(self) -> bool:
            return True

    model = Chosen(build().layers)
    model.compile(hvd.DistributedOptimizer("sgd"), "mse")
    assert model.jit_compile
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, callbacks.BroadcastGlobalVariablesCallback(0), epochs=2)
    assert not model.jit_compile
    assert sum("XLA cannot compile" in str(warning.message) for warning in caught) == 1
    if ON_TENSORFLOW and hvd.size() > 1:
        asked = build()
        asked.compile(hvd.DistributedOptimizer("sgd"), "mse", jit_compile=True)
        raised(ValueError, lambda: fit(asked), "jit_compile=False")


# ---- Metrics ------------------------------------------------------------------------------------


def check_metrics_are_averaged_for_those_that_come_after() -> None:
    size, rank = hvd.size(), hvd.rank()
    model = build()
    model.compile(hvd.DistributedOptimizer("sgd"), "mse", run_eagerly=True)

    def make(epoch: int) -> dict[str, Any]:
        return {"val_own": (rank + 1.0) * 10**epoch, "text": f"of {rank}", "count": rank}

    before = [float(epoch) for epoch in range(2)]
    seen: list[dict[str, Any]] = []
    after = Metrics(lambda epoch: {})
    after.make = lambda epoch: seen.append(epoch) or {}
    history = fit(model, Metrics(make), callbacks.MetricAverageCallback(), after, epochs=2)
    mean = sum(range(1, size + 1)) / size
    np.testing.assert_allclose(history["val_own"], [mean * 10**epoch for epoch in before])
    np.testing.assert_allclose(history["count"], [mean - 1] * 2)
    assert history["text"] == [f"of {rank}"] * 2
    losses = hvd.allgather_object(history["loss"])
    assert all(other == losses[0] for other in losses)


def check_different_metrics_are_named_on_every_rank() -> None:
    if hvd.size() == 1:
        return
    callback = callbacks.MetricAverageCallback()
    logs = {"loss": 1.0, "extra": 2.0} if hvd.rank() == 1 else {"loss": 1.0}
    raised(hvd.MismatchError, lambda: callback.on_epoch_end(0, logs), "rank 1", "'extra'")


# ---- Learning rate ------------------------------------------------------------------------------


def rates(*given: keras.callbacks.Callback, epochs: int, rate: float = 0.5) -> list[float]:
    """The learning rate of each batch."""
    model = build()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate)), "mse", run_eagerly=True)
    watcher = Watcher(rate_of)
    logged = fit(model, *given, watcher, epochs=epochs)["lr"]
    last = [watcher.seen[STEPS * (epoch + 1) - 1] for epoch in range(epochs)]
    np.testing.assert_allclose(logged, last, 1e-6)
    return watcher.seen


def check_a_schedule_acts_in_its_epochs() -> None:
    schedule = callbacks.LearningRateScheduleCallback
    found = rates(schedule(0.2, lambda epoch: 0.5**epoch), epochs=3)
    expected = [0.2 * 0.5**epoch for epoch in range(3) for _ in range(STEPS)]
    np.testing.assert_allclose(found, expected, 1e-6)
    found = rates(schedule(0.2, 0.1, start_epoch=1, end_epoch=2, staircase=False), epochs=3)
    np.testing.assert_allclose(found, [0.5] * STEPS + [0.02] * 2 * STEPS, 1e-6)
    smooth = schedule(0.2, lambda epoch: 1 / (1 + epoch), staircase=False)
    expected = [0.2 / (1 + batch / STEPS) for batch in range(2 * STEPS)]
    np.testing.assert_allclose(rates(smooth, epochs=2), expected, 1e-6)


def check_a_warmup_ends_with_the_full_rate() -> None:
    size = hvd.size()
    found = rates(callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2), epochs=3)
    # On a straight line from 0.4 / size to 0.4, which the last batch of epoch 2 has.
    line = np.linspace(0.4 / size, 0.4, 2 * STEPS + 1)[1:]
    np.testing.assert_allclose(found, [*line, *[0.4] * STEPS], 1e-6)


def check_a_warmup_leaves_the_rate_to_others_afterwards() -> None:
    warmup = callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=1)
    decay = callbacks.LearningRateScheduleCallback(0.4, 0.1, start_epoch=1)
    found = rates(warmup, decay, epochs=2)
    np.testing.assert_allclose(found[STEPS - 1 :], [0.4, *[0.04] * STEPS], 1e-6)


def check_velocities_follow_the_rate() -> None:
    def multiplier(epoch: float) -> float:
        return 1 + epoch

    for correct in (True, False):
        alone, shared = build(), build()
        plain = keras.optimizers.SGD(0.1, momentum=0.9)
        distributed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        shared.compile(distributed, "mse", run_eagerly=True)
        schedule = callbacks.LearningRateScheduleCallback(
            0.1, multiplier, staircase=False, momentum_correction=correct
        )
        fit(shared, schedule)
        x, y = data(2 * STEPS * hvd.size())
        old = 0.1
        for batch in range(STEPS):
            new = 0.1 * multiplier(batch / STEPS)
            plain.learning_rate = new
            # The usual way: another momentum for the one step after the change.
            plain.momentum = 0.9 * (new / old if correct else 1.0)
            rows = slice(2 * hvd.size() * batch, 2 * hvd.size() * (batch + 1))
            apply(plain, gradients(alone, x[rows], y[rows]), alone.trainable_variables)
            old = new
        assert_close(shared.weights, alone.weights, 1e-5)


def check_rates_that_cannot_be_set_are_refused() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    model = build()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(schedule)), "mse", run_eagerly=True)
    warmup = callbacks.LearningRateWarmupCallback(0.1)
    raised(ValueError, lambda: fit(model, warmup), "ExponentialDecay")
    raised(ValueError, lambda: callbacks.LearningRateScheduleCallback(None, 1.0), "initial_lr")
    model.compile(hvd.DistributedOptimizer("sgd"), "mse", run_eagerly=True)
    batches = (tuple(pair) for pair in [part(*data(2 * hvd.size()))])
    options = {"callbacks": [warmup], "verbose": 0}
    raised(ValueError, lambda: model.fit(batches, **options), "steps_per_epoch")


# ---- Checkpoints --------------------------------------------------------------------------------


class Saved(keras.Sequential):
    """Notes who saves it; ``broken`` makes that fail halfway."""

    saves: list[str] = []
    broken = False

    def save(self, filepath: Any, **options: Any) -> None:
        self.saves.append(Path(filepath).name)
        super().save(filepath, **options)
        if self.broken:
            Path(filepath).write_bytes(b"half")
            raise OSError("no space left")


def check_the_best_model_is_kept_by_one_rank() -> None:
    Saved.saves = []
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp(), 0))
    path = folder / "below" / "best.keras"
    model = Saved(build().layers)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
    # Averages over ranks: 3, 1, 2, 0.5. Rank 0 by itself would find 3, 1, 2, 2.5.
    shift = [0.0, 0.0, 0.0, 2.0 if hvd.rank() == 0 else -2.0 / max(hvd.size() - 1, 1)]
    means = [3.0, 1.0, 2.0, 0.5]
    alone = hvd.size() == 1
    metrics = Metrics(lambda epoch: {"val_x": means[epoch] + (0.0 if alone else shift[epoch])})
    best = callbacks.BestModelCheckpoint("val_x", mode="min", filepath=path)
    given = (metrics, callbacks.MetricAverageCallback(), best)
    fit(model, *given, epochs=4)
    np.testing.assert_allclose(best.best, 0.5)
    assert len(Saved.saves) == (3 if hvd.rank() == 0 else 0), Saved.saves
    hvd.allgather_object(None)  # rank 0 is done
    assert [file.name for file in path.parent.iterdir()] == ["best.keras"]
    with keras.saving.custom_object_scope({"Saved": Saved}):
        assert_same(keras.saving.load_model(path).weights, model.weights)
    hvd.allgather_object(None)  # all have read
    kept = path.read_bytes()
    metrics.make, Saved.broken = (lambda epoch: {"val_x": 0.1}), True
    try:
        if hvd.rank() == 0:
            raised(OSError, lambda: best.on_epoch_end(4, {"val_x": 0.1}), "no space left")
        else:
            best.on_epoch_end(4, {"val_x": 0.1})
    finally:
        Saved.broken = False
    hvd.allgather_object(None)
    assert path.read_bytes() == kept
    assert [file.name for file in path.parent.iterdir()] == ["best.keras"]


def check_a_checkpoint_of_weights_and_one_without_a_place() -> None:
    model = build()
    model.compile(hvd.DistributedOptimizer("sgd"), "mse", run_eagerly=True)
    unset = callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=True)
    raised(ValueError, lambda: fit(model, unset), "filepath")
    raised(ValueError, lambda: callbacks.BestModelCheckpoint("a.keras"), "filepath='a.keras'")
    path = Path(hvd.broadcast_object(tempfile.mkdtemp(), 0)) / "at{epoch}.weights.h5"
    unset.filepath = str(path)
    fit(model, unset)
    hvd.allgather_object(None)
    other = build(seed=9)
    other.load_weights(path.with_name("at1.weights.h5"))
    assert_same(other.weights, model.weights)
    often = callbacks.BestModelCheckpoint("loss", save_freq=2, filepath=path.with_name("b.keras"))
    fit(model, often)
    assert often.best is not None and (hvd.rank() or path.with_name("b.keras").exists())


if __name__ == "__main__":
    run_checks(globals())
