"""Exchanges objects, bytes and numpy arrays between ranks of any framework, importing none.

Operations pair by name, dtype and shape: ``broadcast_object`` and ``allgather_object`` here and
those of ``bagua_ext.torch`` are two ends of the same operation, so that a rank may use either.
All functions are collective over ``process_set`` and wait; Ctrl-C ends the wait. They raise
MismatchError on every rank if the ranks' arguments differ.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bagua_ext import basics
from bagua_ext._core import ffi, lib
from bagua_ext.process_sets import global_process_set, group_of
from bagua_ext.reduce_ops import Average, ReduceOp

# By name: numpy knows bfloat16 only once a framework has registered it.
DTYPES: Mapping[str, int] = {
    "uint8": lib.BAGUA_UINT8,
    "int8": lib.BAGUA_INT8,
    "int16": lib.BAGUA_INT16,
    "int32": lib.BAGUA_INT32,
    "int64": lib.BAGUA_INT64,
    "float16": lib.BAGUA_FLOAT16,
    "bfloat16": lib.BAGUA_BFLOAT16,
    "float32": lib.BAGUA_FLOAT32,
    "float64": lib.BAGUA_FLOAT64,
    "bool": lib.BAGUA_BOOL,
}

# ---- Arrays -------------------------------------------------------------------------------------


def allreduce_array(
    array: np.ndarray, name: str, op: ReduceOp = Average, process_set: Any = global_process_set
) -> np.ndarray:
    """Returns the reduction of the ranks' arrays, which have one shape and dtype."""
    result = np.array(array, order="C")
    _run(lib.BAGUA_ALLREDUCE, result, name, process_set, op=op)
    return result


def broadcast_array(
    array: np.ndarray, root_rank: int, name: str, process_set: Any = global_process_set
) -> np.ndarray:
    """Returns a copy of global rank ``root_rank``'s array; the others give shape and dtype."""
    result = np.array(array, order="C")
    _run(lib.BAGUA_BROADCAST, result, name, process_set, root=root_rank)
    return result


def allgather_array(
    array: np.ndarray, name: str, process_set: Any = global_process_set
) -> np.ndarray:
    """Returns the ranks' arrays joined along the first dimension, in which they may differ."""
    array = np.ascontiguousarray(array)
    handle = _run(lib.BAGUA_ALLGATHER, array, name, process_set)
    try:
        return _result(handle, array.dtype)
    finally:
        lib.bagua_release(handle)


# ---- Bytes and objects --------------------------------------------------------------------------


def broadcast_bytes(
    data: bytes | None, root_rank: int, name: str, process_set: Any = global_process_set
) -> bytes:
    """Returns global rank ``root_rank``'s ``data``; that of the others is ignored."""
    is_root = basics.rank() == root_rank
    own = np.frombuffer(data if is_root and data else b"", np.uint8)
    length = np.array([own.size], np.int64)
    length = broadcast_array(length, root_rank, f"{name}.length", process_set)
    if not is_root:
        own = np.empty(int(length[0]), np.uint8)
    return broadcast_array(own, root_rank, f"{name}.bytes", process_set).tobytes()


def allgather_bytes(data: bytes, name: str, process_set: Any = global_process_set) -> list[bytes]:
    """Returns the ranks' ``data``, in order of rank."""
    own = np.frombuffer(data, np.uint8)
    lengths = allgather_array(np.array([own.size], np.int64), f"{name}.length", process_set)
    joined = allgather_array(own, f"{name}.bytes", process_set)
    return [part.tobytes() for part in np.split(joined, np.cumsum(lengths)[:-1])]


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Returns rank ``root_rank``'s ``obj`` on every rank; that rank gets its own object back.

    The object is pickled; the other ranks' ``obj`` is ignored.
    """
    is_root = basics.rank() == root_rank
    data = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL) if is_root else None
    data = broadcast_bytes(data, root_rank, name or "broadcast_object", process_set)
    # The bytes come from an authenticated rank of the same job.
    return obj if is_root else pickle.loads(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Returns the ranks' objects, in order of rank. The objects are pickled."""
    data = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    parts = allgather_bytes(data, name or "allgather_object", process_set)
    return [pickle.loads(part) for part in parts]


# ---- The core -----------------------------------------------------------------------------------


def _run(
    kind: int, array: np.ndarray, name: str, process_set: Any, op: ReduceOp = 0, root: int = 0
) -> int:
    """Runs one operation on ``array``, in place where it keeps its shape.

    Returns the handle of a result that the core keeps, to be released; 0 if there is none.
    """
    request, *kept = _request(kind, array, name, process_set, op, root)
    handle = ffi.new("uint64_t *", 0)
    _free_abandoned()
    try:
        status = lib.bagua_run(request, basics.WAIT_SECONDS, handle)
        if status == lib.BAGUA_IN_PROGRESS:
            basics.wait_until_done(lambda seconds: lib.bagua_wait(handle[0], seconds))
        else:
            basics.check(status)
    except BaseException:
        if handle[0]:
            _abandoned[handle[0]] = array
            _free_abandoned()
        raise
    if kind == lib.BAGUA_ALLGATHER:
        return handle[0]
    if handle[0]:
        lib.bagua_release(handle[0])
    return 0


def _request(
    kind: int, array: np.ndarray, name: str, process_set: Any, op: ReduceOp, root: int
) -> Sequence[Any]:
    """Returns the request, then what it points to."""
    dtype = DTYPES.get(array.dtype.name)
    if dtype is None:
        raise ValueError(
            f"'{name}' has dtype {array.dtype}, which cannot be communicated; use one of "
            f"{', '.join(DTYPES)}"
        )
    shape = ffi.new("int64_t[]", list(array.shape) or [0])
    tensor = ffi.new("bagua_tensor_t *", {"dtype": dtype, "device": -1, "ndim": array.ndim})
    tensor.shape = shape
    tensor.data = ffi.cast("void *", array.ctypes.data)
    text = ffi.new("char[]", name.encode())
    request = ffi.new("bagua_request_t *", {"kind": kind, "tensor_count": 1})
    request.group = group_of(process_set)
    request.name, request.inputs = text, tensor
    request.reduce_op, request.root = op, root
    request.prescale = request.postscale = 1.0
    return request, tensor, shape, text


# Arrays that the core still uses after a signal handler raised in the wait for them.
_abandoned: dict[int, np.ndarray] = {}


def _free_abandoned() -> None:
    for handle in [h for h in _abandoned if lib.bagua_poll(h) != lib.BAGUA_IN_PROGRESS]:
        lib.bagua_release(handle)
        del _abandoned[handle]


def _result(handle: int, dtype: np.dtype) -> np.ndarray:
    """Returns a copy of the result that the core keeps for ``handle``."""
    ndim, shape, data = ffi.new("int32_t *"), ffi.new("int64_t[16]"), ffi.new("void **")
    basics.check(lib.bagua_result_shape(handle, 0, ndim, shape))
    basics.check(lib.bagua_result_data(handle, 0, data))
    result = np.empty([shape[i] for i in range(ndim[0])], dtype)
    if result.nbytes:
        flat = result.reshape(-1).view(np.uint8)
        flat[:] = np.frombuffer(ffi.buffer(data[0], result.nbytes), np.uint8)
    return result
