"""Collective operations on PyTorch tensors, with Horovod's names, signatures and argument order.

Every rank of ``process_set`` calls an operation with the same name (or, unnamed, as its n-th
unnamed one on that set), dtype and, where not said otherwise, shape. Results are over the ranks of
the set, in their order; ``root_rank`` is a global rank. A disagreement raises MismatchError on
every rank, a dead rank PeerLostError; both where the result is asked for. A name that is in flight
already, or a set that this rank is no member of, raises ValueError at the call.

``*_async`` return a Handle; inputs and outputs must not be touched until ``synchronize`` returns
for it. ``*_`` work in place. The blocking forms are differentiable and can be compiled; the
asynchronous and in-place ones have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua_ext import basics
from bagua_ext._core import lib
from bagua_ext.process_sets import ProcessSet, global_process_set, group_of
from bagua_ext.reduce_ops import ReduceOp, chosen_op
from bagua_ext.torch import _gradients, _submit
from bagua_ext.torch._compile import keep_out
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
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank called it."""
    _submit.barrier(group_of(process_set))


@keep_out
def join(device: int = -1) -> int:
    """Waits until every rank called it, and returns the last one; for ranks with uneven data.

    Until then the allreduces of the other ranks with op Sum or Average, and the steps of their
    optimizers, go on with zeros from this one; Average still divides by the number of all ranks.
    Whatever else they submit raises MismatchError there. Gradients of a DistributedOptimizer do not
    keep their values over it. A rank must have made its first step with an optimizer before it
    joins, or the others' first step with it raises MismatchError.

    ``device`` is accepted for Horovod's sake: nothing is computed on it.

    Raises:
        ValueError: this rank is in the midst of a step of an optimizer: call ``synchronize`` first.
        PeerLostError: a rank died or left.
        CollectiveTimeoutError: some ranks neither join nor work.
    """
    return basics.join()


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
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts reducing ``tensor`` in place over all ranks; the result is ``tensor``."""
    group = 0 if process_set is global_process_set else group_of(process_set)
    op = chosen_op(average, op)
    scales = (prescale_factor, postscale_factor)
    return _start_in_place(_ALLREDUCE, tensor, name, op, 0, *scales, group)


@keep_out
def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts reducing ``tensor`` over all ranks into a new tensor of its shape."""
    group = group_of(process_set)
    op = chosen_op(average, op)
    return _start_new(_ALLREDUCE, tensor, name, op, 0, prescale_factor, postscale_factor, group)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces ``tensor`` in place over all ranks and returns it.

    ``op`` is Average (default; truncating for integers), Sum, Min, Max or Product. Values are
    multiplied by ``prescale_factor`` before and by ``postscale_factor`` after.
    """
    group = 0 if process_set is global_process_set else group_of(process_set)
    op = chosen_op(average, op)
    if _is_compiling():
        scales = (prescale_factor, postscale_factor)
        return tensor.copy_(torch.ops.bagua_ext.allreduce(tensor, name or "", op, *scales, group))
    return _run_in_place(_ALLREDUCE, tensor, name, op, 0, prescale_factor, postscale_factor, group)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns the reduction of ``tensor`` over all ranks, a new tensor of its shape.

    As ``allreduce_``; ``compression`` narrows the values on their way. The gradient is the
    allreduce of the gradient with the same arguments; Min and Max pass it to the ranks that hold
    the extreme, Product has none.
    """
    group = group_of(process_set)
    op = chosen_op(average, op)
    small, context = compression.compress(tensor)
    scales = (prescale_factor, postscale_factor)
    if _is_compiling():
        output = torch.ops.bagua_ext.allreduce(small, name or "", op, *scales, group)
    elif wants_gradient(small):
        output = _gradients.Allreduce.apply(small, name, op, *scales, process_set)
    else:
        output = _run_new(_ALLREDUCE, small, name, op, 0, *scales, group)
    return compression.decompress(output, context)


@keep_out
def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts reducing ``tensors`` in place as one operation under one name: all or none."""
    group = group_of(process_set)
    op = chosen_op(average, op)
    tensors = list(tensors)
    values = [dense(tensor) for tensor in tensors]

    def settle() -> list[Tensor]:
        with torch.no_grad():
            for tensor, reduced in zip(tensors, values, strict=True):
                if tensor is not reduced:
                    tensor.copy_(reduced)
        return tensors

    scales = (prescale_factor, postscale_factor)
    number = _submit.start_group(values, values, name, op, *scales, group)
    return GroupHandle(number, values, settle)


@keep_out
def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts reducing ``tensors`` into new tensors as one operation under one name."""
    group = group_of(process_set)
    op = chosen_op(average, op)
    values = [dense(tensor) for tensor in tensors]
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in values]
    scales = (prescale_factor, postscale_factor)
    number = _submit.start_group(values, outputs, name, op, *scales, group)
    return GroupHandle(number, values, lambda: outputs)


@keep_out
def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
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
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Returns the reductions of ``tensors``, carried out as one operation under one name."""
    group = group_of(process_set)
    chosen = chosen_op(average, op)
    pairs = [compression.compress(tensor) for tensor in tensors]
    small = [tensor for tensor, _ in pairs]
    scales = (prescale_factor, postscale_factor)
    if _is_compiling():
        outputs = torch.ops.bagua_ext.grouped_allreduce(small, name or "", chosen, *scales, group)
    elif any(wants_gradient(tensor) for tensor in small):
        outputs = _gradients.GroupedAllreduce.apply(name, chosen, *scales, process_set, *small)
    else:
        outputs = grouped_allreduce_async(small, None, name, chosen, *scales, process_set).wait()
    contexts = [context for _, context in pairs]
    return [compression.decompress(out, ctx) for out, ctx in zip(outputs, contexts, strict=True)]


# ---- broadcast ----------------------------------------------------------------------------------


@keep_out
def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts overwriting ``tensor`` with rank ``root_rank``'s; the result is ``tensor``."""
    group = group_of(process_set)
    return _start_in_place(_BROADCAST, tensor, name, 0, root_rank, 1.0, 1.0, group)


@keep_out
def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts copying rank ``root_rank``'s ``tensor`` into a new tensor on every rank."""
    group = group_of(process_set)
    return _start_new(_BROADCAST, tensor, name, 0, root_rank, 1.0, 1.0, group)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrites ``tensor`` with rank ``root_rank``'s and returns it."""
    group = group_of(process_set)
    if _is_compiling():
        return tensor.copy_(torch.ops.bagua_ext.broadcast(tensor, name or "", root_rank, group))
    return _run_in_place(_BROADCAST, tensor, name, 0, root_rank, 1.0, 1.0, group)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns a copy of rank ``root_rank``'s ``tensor``, which has the same shape everywhere.

    The gradient of the root is the sum of all ranks' gradients; that of the others is zero.
    """
    group = group_of(process_set)
    if _is_compiling():
        return torch.ops.bagua_ext.broadcast(tensor, name or "", root_rank, group)
    if wants_gradient(tensor):
        return _gradients.Broadcast.apply(tensor, name, root_rank, process_set)
    return _run_new(_BROADCAST, tensor, name, 0, root_rank, 1.0, 1.0, group)
