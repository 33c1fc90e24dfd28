"""Objects, bytes and numpy arrays between ranks, without a framework or against one."""

from __future__ import annotations

import signal

import numpy as np
from driver import raised, run_checks

from bagua_ext import basics as hvd
from bagua_ext import objects
from bagua_ext.exceptions import MismatchError
from bagua_ext.process_sets import ProcessSet, add_process_set, remove_process_set
from bagua_ext.reduce_ops import Max


def check_objects_of_every_size() -> None:
    for length in (0, 1, 1000, 100_000):
        own = {"rank": hvd.rank(), "text": "x" * length * hvd.rank()}
        expected = [{"rank": r, "text": "x" * length * r} for r in range(hvd.size())]
        assert objects.allgather_object(own) == expected
        root = hvd.size() - 1
        assert objects.broadcast_object(own, root) == expected[root]
    own = [hvd.rank()]
    assert (objects.broadcast_object(own) is own) == (hvd.rank() == 0)


def check_bytes() -> None:
    parts = [bytes(range(r)) * 3 for r in range(hvd.size())]
    assert objects.allgather_bytes(parts[hvd.rank()], "parts") == parts
    data = b"from the root" if hvd.rank() == hvd.size() - 1 else None
    assert objects.broadcast_bytes(data, hvd.size() - 1, "data") == b"from the root"


def check_arrays_of_every_dtype() -> None:
    for dtype in sorted(objects.DTYPES.keys() - {"bfloat16", "bool"}):
        own = (np.arange(6).reshape(2, 3) + hvd.rank()).astype(dtype)
        top = np.arange(6).reshape(2, 3) + hvd.size() - 1
        np.testing.assert_array_equal(objects.allreduce_array(own, dtype, Max), top.astype(dtype))
        np.testing.assert_array_equal(
            objects.broadcast_array(own.T, 0, dtype), np.arange(6).reshape(2, 3).T
        )
        rows = objects.allgather_array(own[: hvd.rank() % 3], dtype)
        expected = [(np.arange(6).reshape(2, 3) + r)[: r % 3] for r in range(hvd.size())]
        np.testing.assert_array_equal(rows, np.concatenate(expected).astype(dtype))
        assert rows.dtype == own.dtype


def check_scalars_and_averages() -> None:
    mean = objects.allreduce_array(np.float64(hvd.rank()), "scalar")
    assert mean.shape == () and mean == (hvd.size() - 1) / 2


def check_what_cannot_be_sent() -> None:
    raised(ValueError, lambda: objects.allreduce_array(np.ones(2, complex), "c"), "'c'", "complex")


def check_shapes_that_differ() -> None:
    if hvd.size() > 1:
        own = np.ones(2 + (hvd.rank() == 1))
        raised(MismatchError, lambda: objects.allreduce_array(own, "grown"), "grown", "rank 1")
    assert objects.allreduce_array(np.ones(2), "usable")[0] == 1


def check_members_of_a_process_set() -> None:
    if hvd.size() == 1:
        return
    members = add_process_set(ProcessSet([hvd.size() - 1]))
    if members.included():
        assert objects.allgather_object("alone", process_set=members) == ["alone"]
        assert objects.broadcast_object("alone", hvd.rank(), process_set=members) == "alone"
    objects.allgather_object(None)
    remove_process_set(members)


def check_a_signal_ends_the_wait_and_leaves_the_operation_to_the_core() -> None:
    if hvd.size() == 1:
        return
    own = np.full(1000, float(hvd.rank()))
    if hvd.rank() == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        raised(KeyboardInterrupt, lambda: objects.allgather_array(own, "late"))
        del own
    objects.allreduce_array(np.ones(1), "rank 0 was interrupted")
    if hvd.rank() != 0:
        joined = objects.allgather_array(own, "late")
        np.testing.assert_array_equal(joined, np.repeat(np.arange(float(hvd.size())), 1000))
    objects.allreduce_array(np.ones(1), "all have it")


def check_torch_is_the_other_end() -> None:
    """Rank 0 calls torch's functions, the others these."""
    if hvd.rank() == 0:
        import bagua_ext.torch as end
    else:
        end = objects
    assert end.allgather_object(hvd.rank()) == list(range(hvd.size()))
    assert end.broadcast_object(hvd.rank(), hvd.size() - 1) == hvd.size() - 1


if __name__ == "__main__":
    run_checks(globals())
