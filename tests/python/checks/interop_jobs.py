"""Jobs whose ranks have one framework or several: tied models are told apart or trained as one."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
from driver import raised, run_checks
from interop_models import (
    FRAMEWORK,
    adam,
    conv_net,
    double,
    freeze_first,
    images,
    joined,
    norm_net,
    sentences,
    sgd,
    text_net,
    train,
    train_one_bias,
    two_heads,
    unknown_net,
)

from bagua_ext import basics as hvd
from bagua_ext import interop, objects
from bagua_ext.exceptions import MismatchError
from bagua_ext.process_sets import ProcessSet, add_process_set, remove_process_set

STEPS = 20

Weights = dict[str, np.ndarray]


def last() -> bool:
    """True on the one rank that differs."""
    return hvd.rank() == hvd.size() - 1


def backend() -> str:
    """What computes on this rank."""
    keras = sys.modules.get("keras")
    return FRAMEWORK if keras is None else f"keras on {keras.config.backend()}"


def largest_difference(own: Weights, other: Weights) -> float:
    """Between two tensors of one name, relative to their length."""
    length = np.linalg.norm
    return max(
        float(length(other[name] - value) / max(length(value), 1e-9)) for name, value in own.items()
    )


def same_everywhere(net: Any, tolerance: float = 1e-6) -> None:
    """All ranks have this rank's weights, to the bit where they compute with the same backend."""
    own = interop.weights(net)
    for rank, (other, theirs) in enumerate(objects.allgather_object((backend(), own))):
        difference = largest_difference(own, theirs)
        limit = 0.0 if other == backend() else tolerance
        assert difference <= limit, (
            f"rank {rank}'s weights differ by {difference:.2e} > {limit:.1e}"
        )


def trained_as_by_one_process(make: Any, batches: Any, make_optimizer: Any = sgd) -> None:
    """All ranks' model, and one that this rank trains alone on all ranks' batches, get equal."""
    net, alone = make(), make()
    tied = interop.tie(net, make_optimizer(net))
    start = interop.weights(net)
    interop.load_weights(alone, start)
    train_one_bias(alone)
    train(net, tied, batches(STEPS, hvd.rank()))
    same_everywhere(net)
    train(alone, make_optimizer(alone), joined([batches(STEPS, r) for r in range(hvd.size())]))
    trained = interop.weights(net)
    for name, expected in interop.weights(alone).items():
        np.testing.assert_allclose(trained[name], expected, rtol=1e-3, atol=1e-5, err_msg=name)
    moved = [name for name in start if np.abs(trained[name] - start[name]).max() > 1e-3]
    assert moved == list(start), (moved, list(start))


# ---- Training -----------------------------------------------------------------------------------


def check_convolutions_are_trained_as_by_one_process() -> None:
    trained_as_by_one_process(conv_net, images)


def check_recurrent_layers_are_trained_as_by_one_process() -> None:
    trained_as_by_one_process(text_net, sentences)


def check_adam_with_a_tiny_epsilon_is_the_same() -> None:
    net = conv_net()
    tied = interop.tie(net, adam(net))
    train(net, tied, images(STEPS, hvd.rank()))
    same_everywhere(net, tolerance=1e-4)


def check_several_backwards_make_one_step() -> None:
    net, alone = conv_net(), conv_net()
    tied = interop.tie(net, sgd(net), backward_passes_per_step=2)
    interop.load_weights(alone, interop.weights(net))
    train(net, tied, images(STEPS, hvd.rank()), passes=2)
    same_everywhere(net)
    # The gradients of two backwards add up: those of the joined batch at twice the rate.
    ranks = [images(STEPS, rank) for rank in range(hvd.size())]
    pairs = joined([batches[first::2] for batches in ranks for first in (0, 1)])
    train(alone, sgd(alone, rate=0.2), pairs)
    trained = interop.weights(net)
    for name, expected in interop.weights(alone).items():
        np.testing.assert_allclose(trained[name], expected, rtol=1e-3, atol=1e-5, err_msg=name)


def check_statistics_are_each_ranks_own_until_they_are_averaged() -> None:
    net = norm_net()
    tied = interop.tie(net, sgd(net))
    same_everywhere(net, tolerance=0.0)
    train(net, tied, images(3, hvd.rank()))
    name = "001.batch_norm.moving_mean"
    own = interop.weights(net)[name]
    others = objects.allgather_object(own)
    assert hvd.size() == 1 or np.abs(others[0] - others[-1]).max() > 1e-4
    interop.average_statistics(net)
    np.testing.assert_allclose(interop.weights(net)[name], np.mean(others, 0), rtol=1e-5, atol=1e-7)
    interop.broadcast(net)
    same_everywhere(net, tolerance=0.0)


def check_members_of_a_process_set_are_tied_among_themselves() -> None:
    if hvd.size() < 3:
        return
    members = add_process_set(ProcessSet([0, hvd.size() - 1]))
    if members.included():
        net, alone = conv_net(), conv_net()
        tied = interop.tie(net, sgd(net), process_set=members)
        interop.load_weights(alone, interop.weights(net))
        train(net, tied, images(STEPS, hvd.rank()))
        train(alone, sgd(alone), joined([images(STEPS, rank) for rank in members.ranks]))
        trained = interop.weights(net)
        for name, expected in interop.weights(alone).items():
            np.testing.assert_allclose(trained[name], expected, rtol=1e-3, atol=1e-5, err_msg=name)
    objects.allreduce_array(np.ones(1), "members are done")
    remove_process_set(members)


def check_broadcast_takes_the_roots_weights() -> None:
    net = text_net()
    own = objects.allgather_object(interop.weights(net))
    interop.tie(net, sgd(net), root_rank=hvd.size() - 1)
    for name, value in interop.weights(net).items():
        np.testing.assert_array_equal(value, own[-1][name], err_msg=name)


# ---- Differences --------------------------------------------------------------------------------


def refused(net: Any, optimizer: Any, *words: str, **options: Any) -> str:
    """tie() raises MismatchError, on every rank with the same text, which holds ``words``."""
    text = str(raised(MismatchError, lambda: interop.tie(net, optimizer, **options), *words))
    assert set(objects.allgather_object(text)) == {text}
    assert objects.allreduce_array(np.ones(2), "still usable")[0] == 1
    return text


def check_shapes() -> None:
    net = conv_net(filters=6 if last() else 5)
    text = refused(
        net,
        sgd(net),
        "001.conv2d.kernel",
        "(torch)" if FRAMEWORK == "torch" else "(keras on",
        f"rank {hvd.size() - 1}",
    )
    assert "002.dense.kernel" in text and "000.conv2d" not in text and "learning_rate" not in text


def check_missing_tensors() -> None:
    net = conv_net(bias=not last())
    refused(net, sgd(net), "002.dense.bias", "nothing", "float32[7]")


def check_dtypes() -> None:
    net = double(conv_net) if last() else conv_net()
    refused(net, sgd(net), "000.conv2d.bias", "float32[4]", "float64[4]")


def check_settings_of_layers() -> None:
    net = norm_net(epsilon=1e-5 if last() else 1e-3)
    refused(net, sgd(net), "001.batch_norm.epsilon", "0.001", "1e-05")


def check_learning_rates() -> None:
    net = conv_net()
    text = refused(
        net, sgd(net, rate=0.2 if last() else 0.1), "optimizer.learning_rate", "0.1", "0.2"
    )
    assert "kernel" not in text


def check_kinds_of_optimizers() -> None:
    net = conv_net()
    optimizer = adam(net) if last() else sgd(net)
    refused(
        net, optimizer, "optimizer.kind", "SGD", "Adam", "optimizer.beta_1", "optimizer.momentum"
    )


def check_what_is_trained() -> None:
    net = conv_net(bias=True)
    if last():
        freeze_first(net)
    refused(net, sgd(net), "000.conv2d.kernel", "not trained")


def check_layers_that_only_one_framework_has() -> None:
    net = unknown_net()
    mixed = len(set(objects.allgather_object(FRAMEWORK))) > 1
    raised(ValueError, lambda: interop.weights(net), "not in the table")
    if mixed:
        refused(
            net, sgd(net), "PReLU", "not in the table", *map("rank {}:".format, range(hvd.size()))
        )
        return
    tied = interop.tie(net, sgd(net))
    train(net, tied, images(2, hvd.rank()))


def check_an_error_of_one_rank_reaches_all() -> None:
    net = conv_net()
    names = {"no such layer": "x"} if last() else None
    kind = ValueError if last() else MismatchError
    raised(kind, lambda: interop.tie(net, sgd(net), names=names), "no such layer")
    assert objects.allreduce_array(np.ones(2), "still usable")[0] == 1


def check_what_is_no_plain_optimizer() -> None:
    net = conv_net()
    raised(ValueError, lambda: interop.tie(net, "sgd"), "plain", "str")
    tied = interop.tie(net, sgd(net))
    raised(ValueError, lambda: interop.tie(net, tied), "plain", "DistributedOptimizer")
    raised(ValueError, lambda: interop.tie(net, sgd(net), num_groups=2), "num_groups")


def check_the_epsilon_of_adam_is_warned_of_where_it_matters() -> None:
    net = conv_net()
    mixed = len(set(objects.allgather_object(FRAMEWORK))) > 1
    for epsilon, expected in ((1e-7, mixed), (1e-12, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            interop.tie(net, adam(net, epsilon))
        told = [str(warning.message) for warning in caught]
        assert any("epsilon" in text for text in told) == expected, told


def check_allowed_differences_pass() -> None:
    net = conv_net()
    optimizer = sgd(net, rate=0.2 if last() else 0.1)
    interop.tie(net, optimizer, allow=["optimizer.learning_*"])


def check_names_pair_what_stands_in_another_order() -> None:
    order = ["second", "first"] if last() else ["first", "second"]
    net = two_heads(order)
    refused(net, sgd(net), "000.dense.kernel", "001.dense.kernel")
    names = {"first": "000.dense", "second": "001.dense"} if last() else None
    tied = interop.tie(net, sgd(net), names=names)
    train(net, tied, images(STEPS, hvd.rank()))
    own = interop.weights(net, names=names)
    for other in objects.allgather_object(own):
        for name, value in own.items():
            np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def check_only_the_own_framework_is_imported() -> None:
    if FRAMEWORK == "torch":
        assert "keras" not in sys.modules
    elif sys.modules["keras"].config.backend() == "tensorflow":
        assert "torch" not in sys.modules


if __name__ == "__main__":
    run_checks(globals())
