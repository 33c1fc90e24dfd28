"""DistributedOptimizer for Keras against one process trained on the joined batch."""

from __future__ import annotations

import importlib
from unittest import mock

import keras
import numpy as np
from driver import raised, run_checks
from keras_models import (
    ON_TENSORFLOW,
    Pair,
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
from bagua_ext.keras import _framework

optimizers = keras.optimizers
LossScaleOptimizer = optimizers.LossScaleOptimizer


def sgd() -> optimizers.Optimizer:
    return optimizers.SGD(0.1, momentum=0.9)


def decaying() -> optimizers.Optimizer:
    schedule = optimizers.schedules.ExponentialDecay(0.2, decay_steps=2, decay_rate=0.5)
    return optimizers.SGD(schedule, momentum=0.5, nesterov=True)


OPTIMIZERS = (
    sgd,
    decaying,
    lambda: optimizers.Adam(0.02),
    lambda: optimizers.AdamW(0.02, weight_decay=0.3),
    # The limits are far below the gradients: clipping before the average would differ.
    lambda: optimizers.SGD(0.5, clipnorm=0.05),
    lambda: optimizers.SGD(0.5, clipvalue=0.02),
    lambda: optimizers.Adam(0.02, global_clipnorm=0.05),
    lambda: optimizers.Adam(0.02, use_ema=True, ema_momentum=0.6, ema_overwrite_frequency=3),
    lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    lambda: optimizers.SGD(0.1, loss_scale_factor=16.0),
    lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
)


def check_steps_equal_those_on_the_joined_batch() -> None:
    for make in OPTIMIZERS:
        pair = Pair(make).train()
        pair.check(1e-5)
        assert_same_on_all_ranks(pair.shared.weights)


def check_averages_are_taken_over_at_the_end() -> None:
    pair = Pair(lambda: optimizers.SGD(0.3, use_ema=True, ema_momentum=0.5)).train()
    for model, optimizer in ((pair.alone, pair.plain), (pair.shared, pair.distributed)):
        before = values(model.weights)
        optimizer.finalize_variable_values(model.trainable_variables)
        assert differ(before, model.weights)
    pair.check()


def check_buckets_groups_and_predivision_change_nothing() -> None:
    for options in (
        {"bucket_bytes": 1},
        {"bucket_bytes": 100},
        {"num_groups": 2},
        {"groups": 3},
        {"gradient_predivide_factor": 4.0},
        {"sparse_as_dense": True},
        {"device_dense": "", "device_sparse": "", "name": "own"},
    ):
        Pair(sgd, **options).train(2).check()


def check_groups_of_variables() -> None:
    pair = Pair(sgd)
    layers = pair.shared.layers
    groups = [layers[0].trainable_variables, [layers[1].kernel]]
    pair.distributed = hvd.DistributedOptimizer(sgd(), groups=groups)
    names = [[v.path for v in group] for group in groups]
    assert pair.distributed.get_config()["groups"] == names
    pair.train(2).check()
    assert pair.distributed.get_config()["groups"] == [[0, 1], [2]]
    stranger = build().layers[0].kernel
    lost = hvd.DistributedOptimizer(sgd(), groups=[[stranger]])
    raised(ValueError, lambda: step(pair.shared, lost, *part(*data(12))), stranger.path)
    twice = [[stranger], [stranger]]
    raised(ValueError, lambda: hvd.DistributedOptimizer(sgd(), groups=twice), "more than once")


def check_a_sum_is_size_times_the_average() -> None:
    pair = Pair(lambda: optimizers.SGD(0.1))
    wrapped = optimizers.SGD(0.1 / hvd.size())
    pair.distributed = hvd.DistributedOptimizer(wrapped, op=hvd.Sum)
    pair.train()
    assert_close(pair.shared.weights, pair.alone.weights)


def check_compression_rounds_to_its_format() -> None:
    for compression, error in ((hvd.Compression.fp16, 2**-10), (hvd.Compression.bf16, 2**-7)):
        pair = Pair(lambda: optimizers.SGD(1.0), compression=compression).train(1)
        if hvd.size() == 1:
            continue
        before = values(build().weights)
        differs = False
        for own, alone, first in zip(
            values(pair.shared.weights), values(pair.alone.weights), before, strict=True
        ):
            largest = np.abs(alone - first).max()
            np.testing.assert_allclose(own, alone, atol=4 * error * largest)
            differs |= bool((np.abs(own - alone) > 1e-6 * largest).any())
        assert differs, f"{compression} left every gradient as it was"


def check_local_variables_stay_this_ranks_own() -> None:
    size, rank = hvd.size(), hvd.rank()
    for scale in (True, False):
        model = build()
        options = {"local_layers": model.layers[1], "scale_local_gradients": scale}
        optimizer = hvd.PartialDistributedOptimizer(optimizers.SGD(1.0), **options)
        x, y = data(4 * size)
        everyone = [
            gradients(build(), x[r::size], y[r::size]) for r in range(size)
        ]  # of each rank, then of each variable
        before = values(model.trainable_variables)
        step(model, optimizer, *part(x, y))
        taken = [a - b for a, b in zip(before, values(model.trainable_variables), strict=True)]
        for i, one in enumerate(taken):
            averaged = sum(np.asarray(own[i]) for own in everyone) / size
            own = np.asarray(everyone[rank][i]) / (size if scale else 1)
            np.testing.assert_allclose(one, averaged if i < 2 else own, atol=1e-6)


def check_local_variables_are_saved_by_place_and_refused_where_they_matter() -> None:
    model = build()
    distributed = hvd.PartialDistributedOptimizer(sgd(), local_layers=model.layers[1])
    distributed.build(model.trainable_variables)
    loaded = type(distributed).from_config(distributed.get_config())
    again = build()
    loaded.build(again.trainable_variables)
    local = [
        i
        for i, v in enumerate(again.trainable_variables)
        if loaded._wrapped._var_key(v) in loaded._local
    ]
    assert local == [2, 3] and loaded.get_config()["local_variables"] == [2, 3]
    clipped, scaled = optimizers.SGD(1.0, global_clipnorm=1.0), LossScaleOptimizer(sgd())
    for optimizer, word in ((clipped, "global_clipnorm"), (scaled, "loss scaling")):
        make = lambda one=optimizer: hvd.PartialDistributedOptimizer(  # noqa: E731
            one, local_layers=model.layers[1]
        )
        raised(ValueError, make, word, model.layers[1].trainable_variables[0].path)


def check_two_counts_of_calls_are_refused() -> None:
    accumulating = optimizers.SGD(1.0, gradient_accumulation_steps=2)
    call = lambda: hvd.DistributedOptimizer(accumulating, backward_passes_per_step=2)  # noqa: E731
    raised(ValueError, call, "gradient_accumulation_steps=2", "backward_passes_per_step")


def check_passes_add_up_before_the_reduction() -> None:
    for average in (True, False):
        options = {"backward_passes_per_step": 3, "average_aggregated_gradients": average}
        alone, shared = build(), build()
        # The sum of 3 means is 3 times the mean of the whole.
        plain = optimizers.SGD(0.1 if average else 0.3, momentum=0.9)
        distributed = hvd.DistributedOptimizer(sgd(), **options)
        for number in range(2):
            x, y = data(12 * hvd.size(), number)
            step(alone, plain, x, y)
            for third in range(3):
                before = values(shared.weights)
                rows = slice(third * 4 * hvd.size(), (third + 1) * 4 * hvd.size())
                step(shared, distributed, *part(x[rows], y[rows]))
                moved = differ(before, shared.weights)
                assert moved == (third == 2), (number, third)
        assert_close(shared.weights, alone.weights)
        assert int(distributed.iterations) == 6 and int(plain.iterations) == 2
        assert len(distributed.variables) == len(plain.variables)
    text = raised(ValueError, lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0))
    assert "backward_passes_per_step is 0" in str(text)


def check_gradients_that_are_missing() -> None:
    alone, shared = build(), build()
    plain, distributed = sgd(), hvd.DistributedOptimizer(sgd())
    last, size = hvd.size() - 1, hvd.size()
    unused = alone.trainable_variables[-1]
    for number in range(3):
        x, y = data(4 * size, number)
        each = [gradients(alone, x[r::size], y[r::size]) for r in range(size)]
        given = gradients(shared, *part(x, y))
        # Variable 0 is missing on the last rank alone, the last variable on all.
        expected = [
            sum(np.asarray(own[i]) for r, own in enumerate(each) if i or r != last) / size
            for i in range(len(given))
        ]
        expected[0] = None if size == 1 else expected[0]
        expected[-1] = given[-1] = None
        if hvd.rank() == last:
            given[0] = None
        tensors = [None if e is None else keras.ops.convert_to_tensor(e) for e in expected]
        apply(plain, tensors, alone.trainable_variables)
        apply(distributed, given, shared.trainable_variables)
        assert_close(shared.weights, alone.weights)
    assert_same([unused], [build().trainable_variables[-1]])


def check_a_process_set_trains_by_itself() -> None:
    ranks = sorted({0, hvd.size() - 1})
    members = hvd.global_process_set
    if hvd.size() > 2:
        members = hvd.add_process_set(ranks)
    alone, shared = build(), build()
    plain, distributed = sgd(), hvd.DistributedOptimizer(sgd(), process_set=members)
    config = distributed.get_config()
    assert config["process_set"] == (ranks if hvd.size() > 2 else None)
    restored = hvd.DistributedOptimizer.from_config(config)
    for optimizer in (distributed, restored):
        x, y = data(4 * len(ranks))
        if hvd.rank() not in ranks:
            raised(ValueError, lambda o=optimizer: step(shared, o, x, y), "ProcessSet")
            continue
        step(alone, plain, x, y)
        place = slice(ranks.index(hvd.rank()), None, len(ranks))
        step(shared, optimizer, x[place], y[place])
        assert_close(shared.weights, alone.weights)
        alone, shared, plain = build(), build(), sgd()
    if hvd.size() > 2:
        hvd.remove_process_set(members)
    raised(ValueError, lambda: hvd.DistributedOptimizer("sgd", process_set=[0]), "process_set=[0]")


def check_values_of_any_kind_are_reduced_and_exchanged() -> None:
    size, rank = hvd.size(), hvd.rank()
    to_numpy = keras.ops.convert_to_numpy
    assert float(hvd.allreduce(float(rank))) == (size - 1) / 2
    assert float(hvd.allreduce(np.float32(rank), average=False)) == size * (size - 1) / 2
    highest = hvd.allreduce(np.arange(3) * rank, name="highest", op=hvd.Max)
    np.testing.assert_array_equal(to_numpy(highest), np.arange(3) * (size - 1))
    gathered = to_numpy(hvd.allgather(np.full((rank + 1, 2), rank, "float32")))
    np.testing.assert_array_equal(gathered[:, 1], np.repeat(np.arange(size), np.arange(size) + 1))
    root = hvd.broadcast([1.5 * rank, 2.0], size - 1)
    np.testing.assert_array_equal(to_numpy(root), [1.5 * (size - 1), 2.0])
    rows = hvd.reducescatter(np.arange(2.0 * size, dtype="float32") * (rank + 1), op=hvd.Sum)
    expected = np.arange(2.0 * size)[2 * rank : 2 * rank + 2] * size * (size + 1) / 2
    np.testing.assert_array_equal(to_numpy(rows), expected)


def check_it_is_an_optimizer_and_the_wrapped_ones_attributes_are_its_own() -> None:
    wrapped = optimizers.SGD(0.1, momentum=0.9, clipnorm=3.0, weight_decay=0.2)
    distributed = hvd.DistributedOptimizer(wrapped)
    assert isinstance(distributed, keras.optimizers.Optimizer)
    assert not isinstance(distributed, LossScaleOptimizer)
    assert distributed.wrapped is wrapped and distributed.name == "DistributedSGD"
    assert (distributed.momentum, distributed.clipnorm, distributed.built) == (0.9, 3.0, False)
    distributed.learning_rate, distributed.momentum, distributed.weight_decay = 0.5, 0.8, None
    assert float(wrapped.learning_rate) == 0.5 and wrapped.momentum == 0.8
    assert wrapped.weight_decay is None
    model = build()
    distributed.exclude_from_weight_decay(var_names=["bias"])
    distributed.build(model.trainable_variables)
    assert wrapped.built and distributed.variables == wrapped.variables
    assert wrapped._use_weight_decay(model.layers[0].bias) is False
    distributed.set_weights([np.ones(v.shape, "float32") for v in wrapped.variables])
    assert all((value == 1).all() for value in values(wrapped.variables))
    distributed.loss_scale_factor = 4.0
    assert wrapped.loss_scale_factor == 4.0 and float(distributed.scale_loss(2.0)) == 8.0
    distributed.loss_scale_factor = None
    raised(AttributeError, lambda: distributed.beta_1, "beta_1")
    raised(ValueError, lambda: hvd.DistributedOptimizer(distributed), "already")
    raised(ValueError, lambda: hvd.DistributedOptimizer(3), "got int")
    raised(ValueError, lambda: hvd.DistributedOptimizer("sgd", op=hvd.Max), "op=Average or op=Sum")
    raised(ValueError, lambda: hvd.DistributedOptimizer("sgd", algorithm="bytegrad"), "algorithm")
    raised(ValueError, lambda: hvd.DistributedOptimizer("sgd", num_groups=-1), "-1")
    raised(ValueError, lambda: distributed.apply([]) or hvd.DistributedOptimizer("x"), "x")


def check_loss_scales_stay_equal_when_one_rank_overflows() -> None:
    def make() -> LossScaleOptimizer:
        return LossScaleOptimizer(sgd(), initial_scale=8.0, dynamic_growth_steps=2)

    alone, shared = build(), build()
    plain, distributed = make(), hvd.DistributedOptimizer(make())
    assert isinstance(distributed, LossScaleOptimizer)
    assert isinstance(distributed, hvd.DistributedOptimizer)
    scales = []
    for number in range(6):
        x, y = data(4 * hvd.size(), number)
        overflows = number in (1, 4)
        if overflows:
            x[hvd.size() - 1] = np.inf  # in the last rank's part alone
        step(alone, plain, x, y)
        before = values(shared.weights)
        step(shared, distributed, *part(x, y))
        moved = differ(before, shared.weights)
        assert moved != overflows, number
        scales.append(float(distributed.dynamic_scale))
    assert scales == [8.0, 4.0, 4.0, 8.0, 4.0, 4.0], scales
    assert_close(shared.weights, alone.weights)
    assert_close(distributed.variables, plain.variables)
    assert int(distributed.iterations) == int(plain.iterations) == 4


def check_a_loss_scale_outside_is_refused() -> None:
    words = "DistributedOptimizer(LossScaleOptimizer(optimizer))"
    raised(ValueError, lambda: LossScaleOptimizer(hvd.DistributedOptimizer(sgd())), words)
    model = build(dtype="mixed_float16")
    model.dtype_policy = "mixed_float16"
    optimizer = hvd.DistributedOptimizer(sgd())
    raised(ValueError, lambda: model.compile(optimizer, "mse"), words)
    model.compile(hvd.DistributedOptimizer(LossScaleOptimizer(sgd())), "mse")


def check_two_optimizers_take_turns() -> None:
    first, second = Pair(sgd), Pair(lambda: optimizers.Adam(0.01))
    for number in range(3):
        first.train(1, number)
        second.train(1, 10 + number)
    first.check()
    second.check(1e-5)


def check_one_optimizer_steps_parts_of_a_model_in_turn() -> None:
    alone, shared = build(), build()
    plain, distributed = sgd(), hvd.DistributedOptimizer(sgd())
    plain.build(alone.trainable_variables)
    distributed.build(shared.trainable_variables)
    for number in range(4):
        chosen = slice(2) if number % 2 else slice(1, 4)
        x, y = data(4 * hvd.size(), number)
        for model, optimizer, rows in (
            (alone, plain, (x, y)),
            (shared, distributed, part(x, y)),
        ):
            variables = model.trainable_variables[chosen]
            apply(optimizer, gradients(model, *rows, variables), variables)
        assert_close(shared.weights, alone.weights)
    assert_close(distributed.variables, plain.variables)


def check_a_step_needs_init_and_nothing_else_does() -> None:
    model = build()
    model.compile(hvd.DistributedOptimizer(sgd()), "mse", run_eagerly=True)
    x, y = data(4)
    hvd.shutdown()
    try:
        assert hvd.DistributedOptimizer(sgd()).iterations == 0
        assert model.predict(x, verbose=0).shape == y.shape
        assert model.evaluate(x, y, verbose=0) > 0
        words = ("init()", "optimizer.wrapped")
        raised(hvd.NotInitializedError, lambda: model.fit(x, y, verbose=0), *words)
    finally:
        hvd.init()
    model.fit(x, y, verbose=0)
    assert_same_on_all_ranks(model.weights)


def check_the_module_for_tensorflow_is_the_same_and_other_backends_are_refused() -> None:
    if not ON_TENSORFLOW:
        return
    import bagua_ext.tensorflow.keras as on_tensorflow

    assert on_tensorflow.DistributedOptimizer is hvd.DistributedOptimizer
    assert on_tensorflow.callbacks.MetricAverageCallback is hvd.callbacks.MetricAverageCallback
    assert set(hvd.__all__) <= set(dir(on_tensorflow))
    with mock.patch("keras.config.backend", lambda: "torch"):
        raised(ImportError, lambda: importlib.reload(on_tensorflow), "KERAS_BACKEND=tensorflow")
    with mock.patch("keras.config.backend", lambda: "jax"):
        raised(ImportError, _framework.load_framework, "'jax'", "KERAS_BACKEND=torch")


if __name__ == "__main__":
    run_checks(globals())
