"""The core's own calls, as a program in C would make them, for measuring without a framework."""

from __future__ import annotations

from typing import Any

import numpy as np

from bagua_ext._core import ffi, lib


def call(status: int) -> None:
    """Raises RuntimeError with the core's text unless ``status`` is BAGUA_OK."""
    if status != lib.BAGUA_OK:
        raise RuntimeError(ffi.string(lib.bagua_last_error()).decode())


class FlatBucket:
    """One float32 tensor in a registered plan: a gradient bucket in memory that the ranks share.

    Made and dropped by all ranks together. ``data`` must not be used after ``drop``.
    """

    def __init__(self, name: str, count: int) -> None:
        label = ffi.new("char[]", name.encode())
        shape = ffi.new("int64_t[1]", [count])
        tensor = ffi.new("bagua_plan_tensor_t *")
        tensor.name, tensor.dtype, tensor.ndim, tensor.shape = label, lib.BAGUA_FLOAT32, 1, shape
        options = ffi.new("bagua_plan_options_t *")
        options.name, options.tensors, options.tensor_count = label, tensor, 1
        options.reduce_op, options.prescale, options.postscale = lib.BAGUA_AVERAGE, 1.0, 1.0
        handle = ffi.new("uint64_t *")
        call(lib.bagua_plan_create(options, -1.0, handle))
        self._plan = handle[0]
        data, size, dtype = ffi.new("void **"), ffi.new("int64_t *"), ffi.new("int32_t *")
        call(lib.bagua_plan_bucket(self._plan, 0, data, size, dtype))
        self._memory = data[0]
        self.data: np.ndarray = np.frombuffer(ffi.buffer(self._memory, count * 4), np.float32)

    def exchange(self) -> None:
        """Replaces ``data`` by its average over ranks."""
        call(lib.bagua_plan_ready(self._plan, 0))
        call(lib.bagua_plan_finish(self._plan, -1.0))

    def drop(self) -> None:
        """Forgets the plan and gives its memory back."""
        del self.data
        call(lib.bagua_plan_drop(self._plan))
        lib.bagua_memory_release(self._memory)


class Allreduce:
    """A named allreduce of float32 ``data`` in place, its request made once and run many times."""

    def __init__(self, name: str, data: np.ndarray) -> None:
        self._shape = ffi.new("int64_t[1]", [data.size])
        self._tensor = ffi.new("bagua_tensor_t *")
        self._tensor.data = ffi.cast("void *", data.ctypes.data)
        self._tensor.dtype, self._tensor.device = lib.BAGUA_FLOAT32, -1
        self._tensor.ndim, self._tensor.shape = 1, self._shape
        self._name = ffi.new("char[]", name.encode())
        request: Any = ffi.new("bagua_request_t *")
        request.kind, request.name = lib.BAGUA_ALLREDUCE, self._name
        request.reduce_op, request.prescale, request.postscale = lib.BAGUA_AVERAGE, 1.0, 1.0
        request.tensor_count, request.inputs = 1, self._tensor
        self._request = request
        self._handle = ffi.new("uint64_t *")
        self._data = data  # kept alive: the core holds its address

    def run(self) -> None:
        """Does it and waits."""
        call(lib.bagua_run(self._request, -1.0, self._handle))
