"""Broadcasts of whole models, optimizers and Python objects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bagua_ext import basics, objects
from bagua_ext.exceptions import MismatchError
from bagua_ext.process_sets import ProcessSet, global_process_set, group_of
from bagua_ext.reduce_ops import Min
from bagua_ext.torch._compile import keep_out
from bagua_ext.torch.operations import allreduce, broadcast_

Tensor = torch.Tensor
NamedTensors = list[tuple[str, Tensor]]


# ---- Objects ------------------------------------------------------------------------------------


@keep_out
def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns rank ``root_rank``'s ``obj`` on every rank; that rank gets its own object back.

    The object is pickled; the other ranks' ``obj`` is ignored.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


@keep_out
def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the ranks' objects, in order of rank. The objects are pickled."""
    return objects.allgather_object(obj, name, process_set)


# ---- Tensors by name ----------------------------------------------------------------------------


def _signature(named: NamedTensors) -> list[tuple[str, str]]:
    return [
        (name, f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        for name, tensor in named
    ]


def _require_same(named: NamedTensors, what: str, process_set: ProcessSet) -> None:
    """Raises MismatchError on every rank unless all have the same names, shapes and dtypes."""
    signature = _signature(named)
    digest = hashlib.sha256(repr(signature).encode()).digest()
    mine = int.from_bytes(digest[:7], "little")
    # Two ranks differ exactly if the smallest and the largest value do.
    bounds = allreduce(
        torch.tensor([mine, -mine]), name=f"{what}.check", op=Min, process_set=process_set
    )
    if bounds[0] == -bounds[1]:
        return
    signatures = allgather_object(signature, f"{what}.signature", process_set)
    raise MismatchError(_difference(signatures, process_set.ranks, what))


def _difference(signatures: list[list[tuple[str, str]]], ranks: list[int], what: str) -> str:
    first = dict(signatures[0])
    for rank, other in zip(ranks[1:], signatures[1:], strict=True):
        for name, kind in other:
            if first.get(name, "nothing") != kind:
                return (
                    f"{what} '{name}': rank {rank} has {kind}, rank {ranks[0]} has "
                    f"{first.get(name, 'nothing')}. All ranks must build the same model."
                )
        for name, kind in first.items():
            if name not in dict(other):
                return (
                    f"{what} '{name}': rank {rank} has nothing, rank {ranks[0]} has {kind}. "
                    "All ranks must build the same model."
                )
    return f"{what}: the ranks have the same tensors in different order. Build them in one order."


def _broadcast_tensors(
    named: NamedTensors, root_rank: int, what: str, process_set: ProcessSet
) -> None:
    """Overwrites ``named`` with the root's values: one broadcast for each dtype."""
    _require_same(named, what, process_set)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for _, tensor in named:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for dtype, tensors in by_dtype.items():
        name = f"{what}.{str(dtype).removeprefix('torch.')}"
        if len(tensors) == 1:
            broadcast_(tensors[0], root_rank, name, process_set)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        broadcast_(flat, root_rank, name, process_set)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


@keep_out
def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrites the tensors of ``params`` with rank ``root_rank``'s.

    ``params`` is a ``state_dict()`` (buffers included) or an iterable of (name, tensor) such as
    ``named_parameters()``. Entries that are no tensors are left alone.

    Raises:
        ValueError: ``params`` is neither.
        MismatchError: on every rank, if names, shapes or dtypes differ; nothing is changed.
    """
    group_of(process_set)  # raises, whatever `params` holds
    items = list(params.items()) if isinstance(params, Mapping) else list(params)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in items):
        raise ValueError(
            "params must be a state_dict or an iterable of (name, tensor), as named_parameters() "
            "returns"
        )
    tensors = [item for item in items if isinstance(item[1], Tensor)]
    _broadcast_tensors(tensors, root_rank, "parameter", process_set)


# ---- Optimizer state ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slot:
    """Stands in a pickled structure for a tensor that is sent by itself."""

    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _take_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Returns ``value`` with its tensors replaced by slots; the tensors are appended."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return _Slot(len(tensors) - 1, value.dtype, tuple(value.shape))
    if isinstance(value, dict):
        return {key: _take_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_tensors(item, tensors) for item in value)
    return value


def _find_slots(value: Any, slots: list[_Slot]) -> None:
    if isinstance(value, _Slot):
        slots.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _find_slots(item, slots)
    elif type(value) in (list, tuple):
        for item in value:
            _find_slots(item, slots)


def _put_tensors(value: Any, tensors: Mapping[int, Tensor]) -> Any:
    """Undoes ``_take_tensors``."""
    if isinstance(value, _Slot):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _put_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_tensors(item, tensors) for item in value)
    return value


@keep_out
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank rank ``root_rank``'s optimizer state and hyperparameters.

    The other ranks' state is replaced, whether it was there or not. ``model`` is accepted for
    Horovod's sake and not needed.
    """
    is_root = basics.rank() == root_rank
    sent: list[Tensor] = []
    structure = _take_tensors(optimizer.state_dict(), sent) if is_root else None
    structure = broadcast_object(structure, root_rank, "optimizer_state", process_set)
    slots: list[_Slot] = []
    _find_slots(structure, slots)
    tensors = {
        slot.index: sent[slot.index] if is_root else torch.empty(slot.shape, dtype=slot.dtype)
        for slot in slots
    }
    named = [(f"state {index}", tensor) for index, tensor in sorted(tensors.items())]
    _broadcast_tensors(named, root_rank, "optimizer_state", process_set)
    if not is_root:
        optimizer.load_state_dict(_put_tensors(structure, tensors))
