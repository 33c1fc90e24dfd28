"""A rank of a job in which torch and TensorFlow meet: ``mixed.py FRAMEWORK END``.

Both frameworks' ranks go through the same list of operations, by name, and compare what they get
with numpy. Then the last rank ends as END says ("kill" or "leave") while the others wait for it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

FRAMEWORK, END = sys.argv[1:3]
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool")


def torch_side() -> SimpleNamespace:
    import torch

    import bagua_ext.torch as hvd

    return SimpleNamespace(
        hvd=hvd,
        own=lambda array: torch.from_numpy(array.copy()),
        numpy=lambda tensor: tensor.numpy(),
        half=lambda array: torch.from_numpy(array.copy()).to(torch.bfloat16),
        widen=lambda tensor: tensor.float().numpy(),
        errors=(hvd.MismatchError, hvd.CollectiveTimeoutError, hvd.PeerLostError),
    )


def tensorflow_side() -> SimpleNamespace:
    import tensorflow as tf

    import bagua_ext.tensorflow as hvd

    return SimpleNamespace(
        hvd=hvd,
        own=tf.constant,
        numpy=lambda tensor: tensor.numpy(),
        half=lambda array: tf.cast(tf.constant(array), tf.bfloat16),
        widen=lambda tensor: tf.cast(tensor, tf.float32).numpy(),
        errors=(hvd.MismatchError, hvd.CollectiveTimeoutError, hvd.PeerLostError),
    )


side = torch_side() if FRAMEWORK == "torch" else tensorflow_side()
hvd = side.hvd


def values(rank: int, shape: tuple[int, ...] = (5, 3), dtype: str = "float32") -> np.ndarray:
    raw = (np.arange(int(np.prod(shape))) * 7 + rank * 5) % 11 % 3 + rank
    return (raw % 2 if dtype == "bool" else raw).astype(dtype).reshape(shape)


def everyone(*arguments: Any) -> list[np.ndarray]:
    return [values(rank, *arguments) for rank in range(hvd.size())]


def equal(got: Any, want: np.ndarray) -> None:
    np.testing.assert_array_equal(side.numpy(got), want.astype(side.numpy(got).dtype))


# ---- Values -------------------------------------------------------------------------------------


def check_every_dtype() -> None:
    for dtype in DTYPES:
        inputs = everyone((5, 3), dtype)
        got = hvd.allreduce(side.own(inputs[hvd.rank()]), name=f"sum.{dtype}", op=hvd.Sum)
        equal(got, np.logical_or.reduce(inputs) if dtype == "bool" else np.sum(inputs, axis=0))
    mine = side.half(values(hvd.rank()))
    got = side.widen(hvd.allreduce(mine, name="sum.bfloat16", op=hvd.Sum))
    np.testing.assert_array_equal(got, np.sum(everyone(), axis=0))


def check_every_operation() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = side.own(values(rank))
    for op, function in ((hvd.Min, np.min), (hvd.Max, np.max), (hvd.Product, np.prod)):
        equal(hvd.allreduce(mine, name=f"op{op}", op=op), function(everyone(), axis=0))
    got = hvd.allreduce(mine, name="scaled", prescale_factor=1 / 3, postscale_factor=6.0)
    np.testing.assert_allclose(side.numpy(got), 2 * np.mean(everyone(), axis=0), rtol=1e-6)
    rows = [values(r, (r + 1, 2)) for r in range(size)]
    equal(hvd.allgather(side.own(rows[rank]), name="rows"), np.concatenate(rows))
    equal(hvd.broadcast(mine, size - 1, name="root"), everyone()[-1])
    scattered = hvd.reducescatter(mine, name="scatter", op=hvd.Sum)
    equal(scattered, np.array_split(np.sum(everyone(), axis=0), size)[rank])
    sent = [np.full((size, 2), 10 * r) + np.arange(size)[:, None] for r in range(size)]
    splits = side.own(np.ones(size, np.int64))
    received, counts = hvd.alltoall(side.own(sent[rank]), splits, name="exchange")
    equal(received, np.stack([sent[r][rank] for r in range(size)]))
    equal(counts, np.ones(size))
    group = hvd.grouped_allreduce(
        [mine, side.own(values(rank, (4,), "int64"))], op=hvd.Sum, name="g"
    )
    equal(group[0], np.sum(everyone(), axis=0))
    equal(group[1], np.sum(everyone((4,), "int64"), axis=0))
    hvd.barrier()


def check_objects() -> None:
    assert hvd.broadcast_object({"from": hvd.rank()}, root_rank=hvd.size() - 1) == {
        "from": hvd.size() - 1
    }
    assert hvd.allgather_object(FRAMEWORK)[hvd.rank()] == FRAMEWORK
    assert len(set(hvd.allgather_object(FRAMEWORK))) == 2


def check_the_names_of_both_frameworks_are_unnamed_alike() -> None:
    for _ in range(3):
        equal(hvd.allreduce(side.own(values(hvd.rank())), op=hvd.Sum), np.sum(everyone(), axis=0))


# ---- Disagreement -------------------------------------------------------------------------------


def told(call: Callable[[], Any], kind: str, *words: str) -> None:
    try:
        call()
    except side.errors as error:
        assert type(error).__name__ == kind, error
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        return
    raise AssertionError(f"no {kind}")


def check_shapes_that_differ() -> None:
    shape = (2,) if hvd.rank() == 0 else (3,)
    call = lambda: hvd.allreduce(side.own(values(0, shape)), name="odd shape")  # noqa: E731
    told(call, "MismatchError", "odd shape", "float32[2]", "float32[3]", "rank 0", "rank 1")


def check_dtypes_that_differ() -> None:
    dtype = "float32" if hvd.rank() == 0 else "float64"
    call = lambda: hvd.allreduce(side.own(values(0, (2,), dtype)), name="odd dtype")  # noqa: E731
    told(call, "MismatchError", "odd dtype", "float32[2]", "float64[2]")


def check_operations_that_differ() -> None:
    op = hvd.Sum if hvd.rank() == 0 else hvd.Max
    call = lambda: hvd.allreduce(side.own(values(0)), name="odd op", op=op)  # noqa: E731
    told(call, "MismatchError", "odd op", "Sum", "Max")
    factor = 1.0 if hvd.rank() == 0 else 2.0
    call = lambda: hvd.allreduce(side.own(values(0)), name="odd factor", prescale_factor=factor)  # noqa: E731
    told(call, "MismatchError", "odd factor")


def check_names_that_differ() -> None:
    name = f"only rank {hvd.rank()}"
    call = lambda: hvd.allreduce(side.own(values(0)), name=name)  # noqa: E731
    told(call, "CollectiveTimeoutError", name, "BAGUA_TIMEOUT_SECONDS")
    hvd.barrier()


# ---- The end ------------------------------------------------------------------------------------


def end() -> None:
    last = hvd.size() - 1
    hvd.barrier()
    if hvd.rank() == last:
        if END == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.shutdown()
        return
    start = time.perf_counter()
    told(lambda: hvd.allreduce(side.own(values(0)), name="alone"), "PeerLostError", f"rank {last}")
    print(f"survived {time.perf_counter() - start:.3f}", flush=True)


if __name__ == "__main__":
    hvd.init()
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print(f"ok {name} {FRAMEWORK}", flush=True)
    end()
