"""Process sets and join in TensorFlow, on 3 ranks: {0, 2} and {1, 2}."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from driver import raised, run_checks
from tensorflow_operations import both_ways, close, mine, reduced, values
from tensorflow_tape import Net, batch, descend, equal, own_rows, train, train_alone

import bagua_ext.tensorflow as hvd

SETS: dict[str, hvd.ProcessSet] = {}


def check_sets_are_added() -> None:
    for name, ranks in (("outer", [0, 2]), ("upper", [1, 2])):
        SETS[name] = hvd.add_process_set(ranks)
        assert SETS[name].size() == 2 and SETS[name].included() == (hvd.rank() in ranks)


def own_sets() -> list[hvd.ProcessSet]:
    """In another order on rank 2, which is in both: sets do not wait for each other."""
    return [group for group in SETS.values() if group.included()][:: -1 if hvd.rank() == 2 else 1]


def check_operations_among_members() -> None:
    for group in [group for group in SETS.values() if group.included()]:
        inputs = [values(rank, (4, 3)) for rank in group.ranks]
        own = {"process_set": group}

        def call(x: tf.Tensor, own: dict[str, hvd.ProcessSet] = own) -> list[tf.Tensor]:
            root = own["process_set"].ranks[1]
            ones = [1] * own["process_set"].size()
            return [
                hvd.allreduce(x, **own),
                hvd.allgather(x, **own),
                hvd.broadcast(x, root, **own),
                hvd.reducescatter(x, op=hvd.Sum, **own),
                hvd.alltoall(x[:2], splits=ones, **own)[0],
                *hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum, **own),
            ]

        total = reduced(inputs, "Sum")
        want = [
            reduced(inputs, "Average"),
            np.concatenate(inputs),
            inputs[1],
            np.split(total, 2)[group.rank()],
            np.stack([x[group.rank()] for x in inputs]),
            total,
            2 * total,
        ]
        for form in both_ways(call):
            for got, expected in zip(form(mine((4, 3))), want, strict=True):
                close(got, expected)
        variable = tf.Variable(mine((2,)))
        hvd.broadcast_variables([variable], group.ranks[0], process_set=group)
        close(variable, values(group.ranks[0], (2,)))
        assert hvd.allgather_object(hvd.rank(), process_set=group) == group.ranks


def check_nodes_tell_the_place_in_a_set() -> None:
    for group in SETS.values():
        size = hvd.size_op(process_set_id=group.process_set_id)
        included = hvd.process_set_included_op(process_set_id=group.process_set_id)
        assert (int(size), bool(included)) == (2, group.included())


def check_gradients_of_operations() -> None:
    for group in own_sets():
        x = mine((3,))
        with tf.GradientTape() as tape:
            tape.watch(x)
            target = tf.reduce_sum(
                hvd.allreduce(x, process_set=group, name="slope") * (hvd.rank() + 1.0)
            )
        want = np.full(3, np.mean([rank + 1.0 for rank in group.ranks]), np.float32)
        close(tape.gradient(target, x), want)


def check_tapes_of_members() -> None:
    for group in own_sets():
        rows = np.concatenate([np.arange(4 * rank, 4 * rank + 4) for rank in group.ranks])
        for graph in (False, True):
            alone, shared = Net(), Net()
            train_alone(
                alone, lambda step, rows=rows: [tf.gather(part, rows) for part in batch(step)]
            )
            train(shared, graph, process_set=group)
            equal(shared, alone)


def check_others_are_refused() -> None:
    for group in SETS.values():
        if not group.included():
            call = lambda group=group: hvd.allreduce(tf.ones(1), process_set=group)  # noqa: E731
            raised(ValueError, call, str(group.ranks))


def check_a_joined_rank_counts_as_zeros() -> None:
    net = Net()

    def step(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = net.loss(x, y)
        return tape.gradient(loss, net.variables)

    graph = tf.function(step)
    first = graph(*batch(0, own_rows()))
    descend(net.variables, first)
    if hvd.rank() == 0:  # has one batch less
        assert hvd.join() in range(3)
        return
    got = graph(*batch(1, own_rows()))
    total = 0.0
    for rank in (1, 2):
        with tf.GradientTape() as tape:
            loss = net.loss(*batch(1, slice(4 * rank, 4 * rank + 4)))
        total = total + tape.gradient(loss, net.variables)[0].numpy()
    np.testing.assert_allclose(got[0], total / 3, rtol=1e-4, atol=1e-6)
    x = hvd.allreduce(mine((4,)), op=hvd.Sum, name="joined")
    close(x, values(1, (4,)) + values(2, (4,)))
    last = tf.function(hvd.join)() if hvd.rank() == 1 else hvd.join()
    assert int(last) in range(3)


def check_all_are_back_after_a_join() -> None:
    close(
        hvd.allreduce(mine((4,)), op=hvd.Sum), reduced([values(r, (4,)) for r in range(3)], "Sum")
    )


if __name__ == "__main__":
    run_checks(globals())
