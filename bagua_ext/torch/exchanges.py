"""Operations whose results differ from their inputs in shape: allgather, reducescatter, alltoall.

The rules of ``operations`` hold here too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_ext.process_sets import ProcessSet, global_process_set, group_of
from bagua_ext.reduce_ops import Average, ReduceOp, chosen_op
from bagua_ext.torch import _gradients, _submit
from bagua_ext.torch._compile import keep_out
from bagua_ext.torch._submit import AlltoallHandle, Handle, TakenHandle, wants_gradient
from bagua_ext.torch.compression import Compression, Compressor

Tensor = torch.Tensor

_is_compiling = torch.compiler.is_compiling


# ---- allgather ----------------------------------------------------------------------------------


def _first(handle: TakenHandle) -> TakenHandle:
    handle._settle = lambda: handle.results()[0]
    return handle


@keep_out
def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts gathering each of ``tensors`` from all ranks as one operation under one name."""
    group = group_of(process_set)
    _submit.check_tensors(tensors)
    dense = [tensor.detach() for tensor in tensors]
    number = _submit.started(torch.ops.bagua_ext.start_allgather(dense, name or "", group))
    return TakenHandle(number, dense, None)


@keep_out
def allgather_async(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts joining the ranks' tensors along the first dimension."""
    return _first(grouped_allgather_async([tensor], name, process_set))


def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns the ranks' tensors joined along the first dimension, in order of rank.

    First dimensions may differ between ranks, the others may not. The gradient is this rank's part
    of the sum of all ranks' gradients.
    """
    group = group_of(process_set)
    if _is_compiling():
        return torch.ops.bagua_ext.allgather(tensor, name or "", group)
    if wants_gradient(tensor):
        return _gradients.Allgather.apply(tensor, name, process_set)
    return allgather_async(tensor, name, process_set).wait()


@keep_out
def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Returns the allgather of each of ``tensors``, carried out as one operation."""
    if any(wants_gradient(tensor) for tensor in tensors):
        names = [f"{name}.{i}" if name else None for i in range(len(tensors))]
        return [allgather(t, own, process_set) for t, own in zip(tensors, names, strict=True)]
    return grouped_allgather_async(tensors, name, process_set).wait()


# ---- reducescatter ------------------------------------------------------------------------------


@keep_out
def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts the reducescatter of each of ``tensors`` as one operation under one name."""
    group = group_of(process_set)
    op = chosen_op(None, op)
    _submit.check_tensors(tensors)
    dense = [tensor.detach() for tensor in tensors]
    number = torch.ops.bagua_ext.start_reducescatter(
        dense, name or "", op, prescale_factor, postscale_factor, group
    )
    return TakenHandle(_submit.started(number), dense, None)


@keep_out
def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts reducing ``tensor`` over all ranks and keeping this rank's rows."""
    scales = (prescale_factor, postscale_factor)
    return _first(grouped_reducescatter_async([tensor], name, op, process_set, *scales))


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Returns this rank's rows of the reduction of ``tensor`` over all ranks.

    The first dimension is cut into as many parts as there are ranks; if it does not divide, the
    first ranks get one row more. The gradient is defined for Average and Sum.
    """
    group = group_of(process_set)
    op = chosen_op(None, op)
    small, context = compression.compress(tensor)
    scales = (prescale_factor, postscale_factor)
    if _is_compiling():
        output = torch.ops.bagua_ext.reducescatter(small, name or "", op, *scales, group)
    elif wants_gradient(small):
        output = _gradients.Reducescatter.apply(small, name, op, *scales, process_set)
    else:
        output = reducescatter_async(small, name, op, process_set, *scales).wait()
    return compression.decompress(output, context)


@keep_out
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Returns the reducescatter of each of ``tensors``, carried out as one operation."""
    scales = (prescale_factor, postscale_factor)
    if any(wants_gradient(tensor) for tensor in tensors):
        names = [f"{name}.{i}" if name else None for i in range(len(tensors))]
        return [
            reducescatter(tensor, own, compression, op, process_set, *scales)
            for tensor, own in zip(tensors, names, strict=True)
        ]
    pairs = [compression.compress(tensor) for tensor in tensors]
    small = [tensor for tensor, _ in pairs]
    outputs = grouped_reducescatter_async(small, name, op, process_set, *scales).wait()
    return [compression.decompress(out, ctx) for out, (_, ctx) in zip(outputs, pairs, strict=True)]


# ---- alltoall -----------------------------------------------------------------------------------


def _rows(splits: Tensor | Sequence[int] | None) -> Tensor:
    if splits is None:
        return torch.empty(0, dtype=torch.int64)
    return torch.as_tensor(splits, dtype=torch.int64, device="cpu")


@keep_out
def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts sending rows of ``tensor`` to every rank; the result is as ``alltoall``'s."""
    group = group_of(process_set)
    _submit.check_tensors([tensor])
    dense = tensor.detach()
    number = torch.ops.bagua_ext.start_alltoall(dense, _rows(splits), name or "", group)
    handle = AlltoallHandle(_submit.started(number), dense, process_set.size())
    if splits is None:
        return _first(handle)
    handle._settle = lambda: (handle.results()[0], handle.received())
    return handle


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends ``splits[i]`` rows of ``tensor`` to rank i; returns the rows received, by rank.

    Without ``splits`` the rows are shared out evenly. With them, returns the rows and how many
    came from each rank, int64[size]. The gradient travels back the same way.

    Raises:
        ValueError: ``splits`` does not hold one non-negative number per rank or does not add up to
            the number of rows; on this rank alone.
    """
    group = group_of(process_set)
    if _is_compiling():
        output, received = torch.ops.bagua_ext.alltoall(tensor, _rows(splits), name or "", group)
    elif wants_gradient(tensor):
        output, received = _gradients.Alltoall.apply(tensor, _rows(splits), name, process_set)
    else:
        return alltoall_async(tensor, splits, name, process_set).wait()
    return output if splits is None else (output, received)
