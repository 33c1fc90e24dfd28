"""Collective operations on PyTorch tensors, with Horovod's names, signatures and argument order.

Every rank calls an operation with the same name (or, unnamed, as its n-th unnamed operation), dtype
and, where not said otherwise, shape. A disagreement raises MismatchError on every rank, a dead rank
PeerLostError; both where the result is asked for. A name that is in flight already raises
ValueError at the call.

``*_async`` return a Handle; inputs and outputs must not be touched until ``synchronize`` returns
for it. ``*_`` work in place. The blocking forms are differentiable and can be compiled; the
asynchronous and in-place ones have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua_ext._core import lib
from bagua_ext.process_sets import GlobalProcessSet, global_process_set, require_global
from bagua_ext.torch import _gradients, _submit
from bagua_ext.torch._compile import keep_out
from bagua_ext.torch._reduce_op import ReduceOp, chosen_op
from bagua_ext.torch._submit import GroupHandle, Handle, dense, wants_gradient
from bagua_ext.torch.compression import Compression, Compressor

Tensor = torch.Tensor

_ALLREDUCE, _BROADCAST = lib.BAGUA_ALLREDUCE, lib.BAGUA_BROADCAST
_is_compiling = torch.compiler.is_compiling


@keep_out
def synchronize(handle: Handle) -> Any:
    """Waits for an asynchronous operation and returns its result.

    Raises:
        MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: the operation failed.
    """
    return handle.wait()


@keep_out
def poll(handle: Handle) -> bool:
    """True once ``synchronize`` would return at once."""
    return handle.poll()


@keep_out
def barrier(process_set: GlobalProcessSet = global_process_set) -> None:
    """Waits until every rank called it."""
    require_global(process_set)
    _submit.barrier()


# ---- allreduce ----------------------------------------------------------------------------------


def _settle_copy(tensor: Tensor, values: Tensor) -> Any:
    def settle() -> Tensor:
        with torch.no_grad():
            return tensor.copy_(values)

    return settle


def _start_in_place(kind: int, tensor: Tensor, *arguments: Any) -> Handle:
    values = dense(tensor)
    number = _submit.start(kind, values, None, *arguments)
    if values is tensor:
        return Handle(number, tensor, None)
    return Handle(number, (tensor, values), _settle_copy(tensor, values))


def _run_in_place(kind: int, tensor: Tensor, *arguments: Any) -> Tensor:
    values = dense(tensor)
    _submit.run(kind, values, None, *arguments)
    return tensor if values is tensor else _settle_copy(tensor, values)()


def _start_new(kind: int, tensor: Tensor, *arguments: Any) -> Handle:
    values = dense(tensor)
    output = torch.empty_like(values, requires_grad=False)
    number = _submit.start(kind, values, output, *arguments)
    return Handle(number, (values, output), lambda: output)


def _run_new(kind: int, tensor: Tensor, *arguments: Any) -> Tensor:
    values = dense(tensor)
    output = torch.empty_like(values, requires_grad=False)
    _submit.run(kind, values, output, *arguments)
    return output


@keep_out
def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: GlobalProcessSet = global_process_set,
) -> Handle:
    """Starts reducing ``tensor`` in place over all ranks; the result is ``tensor``."""
    if process_set is not global_process_set:
        require_global(process_set)
    op = chosen_op(average, op)
    return _start_in_place(_ALLREDUCE, tensor, name, op, 0, prescale_factor, postscale_factor)


@keep_out
def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: GlobalProcessSet = global_process_set,
) -> Handle:
    """Starts reducing ``tensor`` over all ranks into a new tensor of its shape."""
    require_global(process_set)
    op = chosen_op(average, op)
    return _start_new(_ALLREDUCE, tensor, name, op, 0, prescale_factor, postscale_factor)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: GlobalProcessSet = global_process_set,
) -> Tensor:
    """Reduces ``tensor`` in place over all ranks and returns it.

    ``op`` is Average (default; truncating for integers), Sum, Min, Max or Product. Values are
    multiplied by ``prescale_factor`` before and by ``postscale_factor`` after.
    """
    if process_set is not global_process_set:
        require_global(process_set)
    op = chosen_op(average, op)
    if _is_compiling():
        scales = (prescale_factor, postscale_factor)
        return tensor.copy_(torch.ops.bagua_ext.allreduce(tensor, name or "", op, *scales))
    return _run_in_place(_ALLREDUCE, tensor, name, op, 0, prescale_factor, postscale_factor)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: GlobalProcessSet = global_process_set,
) -> Tensor:
    """Returns the reduction of ``tensor`` over all ranks, a new tensor of its shape.

    As ``allreduce_``; ``compression`` narrows the values on their way. The gradient is the
    allreduce of the gradient with the same arguments; Min and Max pass it to the ranks that hold
    the extreme, Product has none.
    """
    require_global(process_set)
    op = chosen_op(average, op)
    small, context = compression.compress(tensor)
    scales = (prescale_factor, postscale_factor)
    if _is_compiling():
        output = torch.ops.bagua_ext.allreduce(small, name or "", op, *scales)
    elif wants_gradient(small):
        output = _gradients.Allreduce.apply(small, name, op, *scales)
    else:
        output = _run_new(_ALLREDUCE, small, name, op, 0, *scales)
    return compression.decompress(output, context)


@keep_out
def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: GlobalProcessSet = global_process_set,
) -> Handle:
    """Starts reducing ``tensors`` in place as one operation under one name: all or none."""
    require_global(process_set)
    op = chosen_op(average, op)
    tensors = list(tensors)
    values = [dense(tensor) for tensor in tensors]

    def settle() -> list[Tensor]:
        with torch.no_grad():
            for tensor, reduced in zip(tensors, values, strict=True):
                if tensor is not reduced:
                    tensor.copy_(reduced)
        return tensors

    number = _submit.start_group(values, values, name, op, prescale_factor, postscale_factor)
    return GroupHandle(number, values, settle)


@keep_out
def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: GlobalProcessSet = global_process_set,
) -> Handle:
    """Starts reducing ``tensors`` into new tensors as one operation under one name."""
    require_global(process_set)
    op = chosen_op(average, op)
    values = [dense(tensor) for tensor in tensors]
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in values]
    number = _submit.start_group(values, outputs, name, op, prescale_factor, postscale_factor)
    return GroupHandle(number, values, lambda: outputs)


@keep_out
def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: GlobalProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduces ``tensors`` in place as one operation under one name and returns them."""
    scales = (prescale_factor, postscale_factor)
    return grouped_allreduce_async_(tensors, average, name, op, *scales, process_set).wait()


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: GlobalProcessSet = global_process_set,
) -> list[Tensor]:
    """Returns the reductions of ``tensors``, carried out as one operation under one name."""
    require_global(process_set)
    chosen = chosen_op(average, op)
    pairs = [compression.compress(tensor) for tensor in tensors]
    small = [tensor for tensor, _ in pairs]
    scales = (prescale_factor, postscale_factor)
    if _is_compiling():
        outputs = torch.ops.bagua_ext.grouped_allreduce(small, name or "", chosen, *scales)
    elif any(wants_gradient(tensor) for tensor in small):
        outputs = _gradients.GroupedAllreduce.apply(name, chosen, *scales, *small)
    else:
        outputs = grouped_allreduce_async(small, None, name, chosen, *scales).wait()
    contexts = [context for _, context in pairs]
    return [compression.decompress(out, ctx) for out, ctx in zip(outputs, contexts, strict=True)]


# ---- broadcast ----------------------------------------------------------------------------------


@keep_out
def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: GlobalProcessSet = global_process_set,
) -> Handle:
    """Starts overwriting ``tensor`` with rank ``root_rank``'s; the result is ``tensor``."""
    require_global(process_set)
    return _start_in_place(_BROADCAST, tensor, name, 0, root_rank)


@keep_out
def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: GlobalProcessSet = global_process_set,
) -> Handle:
    """Starts copying rank ``root_rank``'s ``tensor`` into a new tensor on every rank."""
    require_global(process_set)
    return _start_new(_BROADCAST, tensor, name, 0, root_rank)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: GlobalProcessSet = global_process_set,
) -> Tensor:
    """Overwrites ``tensor`` with rank ``root_rank``'s and returns it."""
    require_global(process_set)
    if _is_compiling():
        return tensor.copy_(torch.ops.bagua_ext.broadcast(tensor, name or "", root_rank))
    return _run_in_place(_BROADCAST, tensor, name, 0, root_rank)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: GlobalProcessSet = global_process_set,
) -> Tensor:
    """Returns a copy of rank ``root_rank``'s ``tensor``, which has the same shape everywhere.

    The gradient of the root is the sum of all ranks' gradients; that of the others is zero.
    """
    require_global(process_set)
    if _is_compiling():
        return torch.ops.bagua_ext.broadcast(tensor, name or "", root_rank)
    if wants_gradient(tensor):
        return _gradients.Broadcast.apply(tensor, name, root_rank)
    return _run_new(_BROADCAST, tensor, name, 0, root_rank)
