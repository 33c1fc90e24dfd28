"""Hands tensors to the core and waits for them: the one place that fills in the core's requests.

Operations whose result has the input's shape go to the core through cffi, which costs less than a
dispatched torch operation. The others use torch.ops.bagua_ext, which makes their results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua_ext import basics
from bagua_ext._core import ffi, lib
from bagua_ext.basics import WAIT_SECONDS

DTYPES: dict[torch.dtype, int] = {
    torch.uint8: lib.BAGUA_UINT8,
    torch.int8: lib.BAGUA_INT8,
    torch.int16: lib.BAGUA_INT16,
    torch.int32: lib.BAGUA_INT32,
    torch.int64: lib.BAGUA_INT64,
    torch.float16: lib.BAGUA_FLOAT16,
    torch.bfloat16: lib.BAGUA_BFLOAT16,
    torch.float32: lib.BAGUA_FLOAT32,
    torch.float64: lib.BAGUA_FLOAT64,
    torch.bool: lib.BAGUA_BOOL,
}

_OK, _IN_PROGRESS = lib.BAGUA_OK, lib.BAGUA_IN_PROGRESS
_enqueue, _run, _wait, _release = (
    lib.bagua_enqueue,
    lib.bagua_run,
    lib.bagua_wait,
    lib.bagua_release,
)
_operations = torch.ops.bagua_ext
_MAX_NAMES = 4096

Settle = Callable[[], Any]


class Handle:
    """Ticket of an operation in flight; ``synchronize`` turns it into the result.

    It keeps the operation's tensors alive. A handle that is dropped early leaves them to the core
    until the operation ended.
    """

    __slots__ = ("_id", "_tensors", "_settle", "_result")

    def __init__(self, number: int, tensors: Any, settle: Settle | None) -> None:
        self._id = number
        self._tensors = tensors
        self._settle = settle  # makes the result; None: `tensors` is the result

    def poll(self) -> bool:
        """True once the operation ended, well or not; never blocks."""
        return self._id == 0 or lib.bagua_poll(self._id) != _IN_PROGRESS

    def wait(self) -> Any:
        """Waits for the operation and returns its result; a second call returns it again."""
        number = self._id
        if number:
            status = _wait(number, WAIT_SECONDS)
            while status == _IN_PROGRESS:
                status = _wait(number, WAIT_SECONDS)
            error = None if status == _OK else basics.error_of(status)
            self._finish(error)
        if self._settle is not None:
            settle, self._settle = self._settle, None
            self._tensors = settle()
        return self._tensors

    def _finish(self, error: Exception | None) -> None:
        number, self._id = self._id, 0
        if error is not None:
            self._settle = None
            self._discard(number)
            raise error
        self._release(number)

    def _release(self, number: int) -> None:
        _release(number)

    def _discard(self, number: int) -> None:
        _release(number)

    def __del__(self) -> None:
        number = getattr(self, "_id", 0)
        if number:
            _orphans.adopt(number, self._tensors)


class TakenHandle(Handle):
    """Handle of an operation whose results torch.ops.bagua_ext keeps until they are taken."""

    __slots__ = ("_received",)

    def _release(self, number: int) -> None:
        results = _operations.take.default(number)
        self._received = self._received_splits(number)
        _release(number)
        self._tensors = results

    def _discard(self, number: int) -> None:
        _operations.drop.default(number)

    def _received_splits(self, number: int) -> torch.Tensor | None:
        return None

    def results(self) -> list[torch.Tensor]:
        """The operation's results, in the order of its inputs; after ``wait``."""
        return self._tensors

    def received(self) -> torch.Tensor | None:
        """alltoall: rows received from each rank of the set, int64[size]; after ``wait``."""
        return self._received

    def __del__(self) -> None:
        number = getattr(self, "_id", 0)
        if number:
            _operations.drop.default(number)


class GroupHandle(TakenHandle):
    """TakenHandle of an operation whose results are known from the start."""

    __slots__ = ()

    def _release(self, number: int) -> None:
        _operations.drop.default(number)


class AlltoallHandle(TakenHandle):
    """TakenHandle that asks how many rows came from each of the set's ``size`` ranks."""

    __slots__ = ("_size",)

    def __init__(self, number: int, tensors: Any, size: int) -> None:
        super().__init__(number, tensors, None)
        self._size = size

    def _received_splits(self, number: int) -> torch.Tensor | None:
        splits = torch.empty(self._size, dtype=torch.int64)
        lib.bagua_result_splits(number, ffi.cast("int64_t *", splits.data_ptr()))
        return splits


class _Orphans:
    """Tensors of dropped handles whose operations still run."""

    def __init__(self) -> None:
        self._tensors: dict[int, Any] = {}

    def adopt(self, number: int, tensors: Any) -> None:
        """Keeps ``tensors`` until operation ``number`` ended; frees those that ended before."""
        self._tensors[number] = tensors
        for old in [n for n in list(self._tensors) if lib.bagua_poll(n) != _IN_PROGRESS]:
            if self._tensors.pop(old, None) is not None:
                _release(old)


_orphans = _Orphans()


class _Scratch(threading.local):
    """One request per thread, filled in anew for each operation; the core copies it."""

    def __init__(self) -> None:
        self.shape = ffi.new("int64_t[64]")
        self.sizes: Any = None  # what `shape` holds
        self.input = ffi.new("bagua_tensor_t *", {"shape": self.shape, "device": -1})
        self.output = ffi.new("bagua_tensor_t *", {"shape": self.shape, "device": -1})
        self.input_data = _address_of_data(self.input)
        self.output_data = _address_of_data(self.output)
        self.request = ffi.new("bagua_request_t *", {"inputs": self.input, "tensor_count": 1})
        self.root = self.group = 0  # what `request` holds
        self.handle = ffi.new("uint64_t *")


def _address_of_data(tensor: Any) -> Any:
    # Writing through an integer pointer spares a cast per call.
    return ffi.cast("uintptr_t *", ffi.addressof(tensor, "data"))


_scratch = _Scratch()
_names: dict[str | None, Any] = {None: ffi.NULL}


def _c_name(name: str) -> Any:
    if len(_names) > _MAX_NAMES:
        _names.clear()
        _names[None] = ffi.NULL
    _names[name] = text = ffi.new("char[]", name.encode())
    return text


def _reject(tensor: Any) -> None:
    """Raises the error that says why ``tensor`` cannot be communicated."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"tensor has layout {tensor.layout}; make it dense first (to_dense())")
    if not tensor.is_cpu:
        raise ValueError(f"tensor is on {tensor.device}; only CPU tensors are supported yet")
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"tensor has dtype {tensor.dtype}; use one of {known}")


def require_strided(tensor: torch.Tensor) -> None:
    """Raises TypeError or ValueError if ``tensor`` is no tensor or has no flat memory."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        _reject(tensor)


def check_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Raises TypeError or ValueError if one of ``tensors`` cannot be communicated."""
    for tensor in tensors:
        require_strided(tensor)
        if not tensor.is_cpu or tensor.dtype not in DTYPES:
            _reject(tensor)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` itself if it is contiguous, otherwise a contiguous copy of its values.

    Raises:
        TypeError, ValueError: as ``require_strided``.
    """
    require_strided(tensor)
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def wants_gradient(tensor: torch.Tensor) -> bool:
    """True if autograd has to know of an operation on ``tensor``; raises as ``require_strided``."""
    require_strided(tensor)
    return tensor.requires_grad and torch.is_grad_enabled()


def _fill(
    kind: int,
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    name: str | None,
    op: int,
    root: int,
    prescale: float,
    postscale: float,
    group: int,
) -> _Scratch:
    """Fills in this thread's request for one contiguous tensor."""
    scratch = _scratch
    dtype = DTYPES.get(tensor.dtype, -1)
    if dtype < 0 or not tensor.is_cpu:
        _reject(tensor)
    request, descriptor = scratch.request, scratch.input
    sizes = tensor.shape
    if sizes != scratch.sizes:
        scratch.shape[0 : len(sizes)] = sizes
        descriptor.ndim = scratch.output.ndim = len(sizes)
        scratch.sizes = sizes
    descriptor.dtype = dtype
    scratch.input_data[0] = tensor.data_ptr()
    if output is None:
        request.outputs = ffi.NULL
    else:
        scratch.output.dtype = dtype
        scratch.output_data[0] = output.data_ptr()
        request.outputs = scratch.output
    request.kind = kind
    text = _names.get(name)
    request.name = _c_name(name) if text is None else text
    request.reduce_op = op
    # Comparing costs less than writing what seldom changes.
    if root != scratch.root:
        request.root = scratch.root = root
    if group != scratch.group:
        request.group = scratch.group = group
    request.prescale = prescale
    request.postscale = postscale
    return scratch


def start(
    kind: int,
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    name: str | None,
    op: int = 0,
    root: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    group: int = 0,
) -> int:
    """Starts an allreduce or broadcast of a contiguous tensor and returns the core's handle.

    ``output`` None means in place.

    Raises:
        ValueError: the tensor cannot be communicated, or ``name`` is in flight already.
        NotInitializedError: before ``init``.
    """
    scratch = _fill(kind, tensor, output, name, op, root, prescale, postscale, group)
    handle = scratch.handle
    status = _enqueue(scratch.request, handle)
    if status:
        raise basics.error_of(status)
    return handle[0]


def run(
    kind: int,
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    name: str | None,
    op: int = 0,
    root: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    group: int = 0,
) -> None:
    """Carries out what ``start`` starts, with the calling thread's help, and waits for it."""
    scratch = _fill(kind, tensor, output, name, op, root, prescale, postscale, group)
    status = _run(scratch.request, WAIT_SECONDS, scratch.handle)
    if status == _IN_PROGRESS:
        Handle(scratch.handle[0], (tensor, output), None).wait()
    elif status:
        raise basics.error_of(status)


def start_group(
    tensors: list[torch.Tensor],
    outputs: list[torch.Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    group: int,
) -> int:
    """Starts one allreduce of several contiguous tensors; ``outputs`` may be ``tensors``.

    The handle belongs to a GroupHandle. Raises as ``start``.
    """
    check_tensors(tensors)
    number = _operations.start_allreduce.default(
        tensors, outputs, name or "", op, prescale, postscale, group
    )
    return started(number)


def barrier(group: int) -> None:
    """Waits until every rank of ``group`` called it."""
    request = ffi.new("bagua_request_t *", {"kind": lib.BAGUA_BARRIER, "group": group})
    request.prescale = request.postscale = 1.0
    handle = ffi.new("uint64_t *")
    status = _run(request, WAIT_SECONDS, handle)
    if status == _IN_PROGRESS:
        Handle(handle[0], None, None).wait()
    else:
        basics.check(status)


def started(number: int) -> int:
    """Returns ``number`` if torch.ops gave a handle; raises the error that it stands for if not."""
    if number <= 0:
        raise basics.error_of(-number)
    return number
