"""Models with a DistributedOptimizer are saved, loaded and trained on in every bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from driver import raised, run_checks
from keras_models import (
    ON_TENSORFLOW,
    assert_close,
    assert_same,
    assert_same_on_all_ranks,
    build,
    data,
    part,
    values,
)

import bagua_ext.keras as hvd

optimizers = keras.optimizers


def scheduled_adam() -> optimizers.Optimizer:
    schedule = optimizers.schedules.CosineDecay(0.05, decay_steps=9)
    return optimizers.Adam(schedule, use_ema=True, weight_decay=0.01)


def sgd() -> optimizers.Optimizer:
    return optimizers.SGD(0.1, momentum=0.9)


def loss_scaled() -> optimizers.Optimizer:
    return optimizers.LossScaleOptimizer(sgd(), initial_scale=4.0, dynamic_growth_steps=5)


def fit(model: keras.Model, seed: int = 0) -> None:
    """Three steps."""
    x, y = part(*data(12 * hvd.size(), seed))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)


def state(model: keras.Model) -> list[Any]:
    return values([*model.weights, *model.optimizer.variables])


def through_a_file(model: keras.Model, load: Callable[[Path], keras.Model]) -> keras.Model:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        return load(path)


def check_training_goes_on_in_every_bit() -> None:
    for make in (scheduled_adam, loss_scaled):
        model = build()
        model.compile(hvd.DistributedOptimizer(make(), gradient_predivide_factor=2.0), "mse")
        fit(model)
        loaded = through_a_file(model, keras.saving.load_model)
        assert type(loaded.optimizer) is type(model.optimizer)
        assert isinstance(loaded.optimizer, hvd.DistributedOptimizer)
        assert loaded.optimizer.get_config() == model.optimizer.get_config()
        assert_same(state(loaded), state(model))
        before = state(model)
        for number in (1, 2):
            fit(model, number)
            fit(loaded, number)
        assert_same(state(loaded), state(model))
        assert int(loaded.optimizer.iterations) == 9
        assert any((a != b).any() for a, b in zip(before, state(model), strict=True))
        assert_same_on_all_ranks(state(loaded))


def check_a_mixed_policy_where_it_is_loaded_adds_a_loss_scale() -> None:
    model = build()
    model.compile(hvd.DistributedOptimizer(sgd()), "mse", run_eagerly=True)
    fit(model)
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        loaded = through_a_file(model, keras.saving.load_model)
        fit(loaded, 1)
        again = through_a_file(loaded, keras.saving.load_model)
    finally:
        keras.config.set_dtype_policy(previous)
    assert isinstance(loaded.optimizer, optimizers.LossScaleOptimizer)
    fit(model, 1)
    # Powers of two scale without rounding; the layers kept their own dtypes.
    assert_close(loaded.weights, model.weights)
    assert_close(loaded.optimizer.inner_optimizer.variables, model.optimizer.variables)
    assert_same(state(again), state(loaded))


def check_options_and_groups_come_back() -> None:
    model = build()
    first, last = model.layers[0], model.layers[1]
    options = {
        "compression": hvd.Compression.fp16,
        "op": hvd.Sum,
        "backward_passes_per_step": 3,
        "average_aggregated_gradients": True,
        "bucket_bytes": 64,
        "sparse_as_dense": True,
        "scale_local_gradients": False,
        "groups": [[first.kernel, last.bias]],
        "name": "mine",
    }
    model.compile(hvd.DistributedOptimizer(sgd(), **options), "mse", run_eagerly=True)
    fit(model)
    loaded = through_a_file(model, keras.saving.load_model)
    config = loaded.optimizer.get_config()
    assert config == model.optimizer.get_config()
    assert (config["compression"], config["op"], config["name"]) == ("fp16", "Sum", "mine")
    assert config["groups"] == [[0, 3]]  # among kernel, bias, kernel, bias
    fit(model, 1)
    fit(loaded, 1)
    assert_same(state(loaded), state(model))


def check_a_plain_model_is_wrapped_with_its_state() -> None:
    for make in (scheduled_adam, loss_scaled):
        plain = build()
        plain.compile(make(), "mse", metrics=["mae"], run_eagerly=True)
        x, y = data(12 * hvd.size())
        plain.fit(x, y, batch_size=4 * hvd.size(), shuffle=False, verbose=0)
        loaded = through_a_file(plain, hvd.load_model)
        assert isinstance(loaded.optimizer, hvd.DistributedOptimizer)
        assert_same(state(loaded), state(plain))
        plain.fit(x, y, batch_size=4 * hvd.size(), shuffle=False, verbose=0)
        history = loaded.fit(*part(x, y), batch_size=4, shuffle=False, verbose=0).history
        assert set(history) == {"loss", "mae"}
        assert_close(state(loaded), state(plain), 1e-5)
        again = through_a_file(loaded, hvd.load_model)
        assert isinstance(again.optimizer, hvd.DistributedOptimizer)
        assert_same(state(again), state(loaded))


def check_load_model_takes_classes_and_compression() -> None:
    class Slow(optimizers.SGD):
        """A user's own."""

    plain = build()
    plain.compile(Slow(0.1), "mse", run_eagerly=True)

    def load(path: Path) -> keras.Model:
        options = {"custom_optimizers": [Slow], "compression": hvd.Compression.bf16}
        raised(ValueError, lambda: hvd.load_model(path, legacy_opts=True), "legacy_opts")
        return hvd.load_model(path, **options)

    loaded = through_a_file(plain, load)
    assert type(loaded.optimizer.wrapped) is Slow
    assert loaded.optimizer.get_config()["compression"] == "bf16"
    uncompiled = through_a_file(build(), hvd.load_model)
    assert getattr(uncompiled, "optimizer", None) is None


def check_weights_files_load_with_and_without_the_wrapper() -> None:
    plain, wrapped = build(), build(4)
    plain.compile(sgd(), "mse", run_eagerly=True)
    wrapped.compile(hvd.DistributedOptimizer(sgd()), "mse", run_eagerly=True)
    for source, target in ((wrapped, plain), (plain, wrapped)):
        fit(plain, 1)
        fit(wrapped, 2)
        assert any((a != b).any() for a, b in zip(state(source), state(target), strict=True))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.weights.h5"
            source.save_weights(path)
            target.load_weights(path)
        assert_same(state(target), state(source))


def check_a_file_holds_the_optimizers_state_once() -> None:
    sizes = []
    for wrap in (lambda optimizer: optimizer, hvd.DistributedOptimizer):
        model = build()
        model.compile(wrap(optimizers.Adam(0.01)), "mse", run_eagerly=True)
        fit(model)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.weights.h5"
            model.save_weights(path)
            sizes.append(path.stat().st_size)
    assert sizes[1] - sizes[0] < 1000, sizes


def check_loading_needs_no_init() -> None:
    model = build()
    model.compile(hvd.DistributedOptimizer(sgd()), "mse", run_eagerly=True)
    fit(model)
    x, y = data(4)
    hvd.shutdown()
    try:
        loaded = through_a_file(model, keras.saving.load_model)
        assert loaded.evaluate(x, y, verbose=0) == model.evaluate(x, y, verbose=0)
        assert_same([loaded.predict(x, verbose=0)], [model.predict(x, verbose=0)])
        raised(hvd.NotInitializedError, lambda: loaded.fit(x, y, verbose=0), "init()")
    finally:
        hvd.init()


def check_tensorflow_checkpoints_restore_the_optimizer() -> None:
    if not ON_TENSORFLOW:
        return
    import tensorflow as tf

    models = [build(), build(4)]
    for number, model in enumerate(models):
        model.compile(hvd.DistributedOptimizer(optimizers.Adam(0.05)), "mse", run_eagerly=True)
        fit(model, number)
    first, second = (
        tf.train.Checkpoint(model=model, optimizer=model.optimizer) for model in models
    )
    with tempfile.TemporaryDirectory() as folder:
        path = first.save(str(Path(folder) / "state"))
        second.restore(path).assert_consumed()
    assert_same(state(models[1]), state(models[0]))


if __name__ == "__main__":
    run_checks(globals())
