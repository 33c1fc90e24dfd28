"""A registered plan of the core, with its buckets as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_ext import basics, plans
from bagua_ext._core import ffi, lib
from bagua_ext.reductions import Reduction
from bagua_ext.torch._submit import DTYPES

_TORCH_DTYPES = {number: dtype for dtype, number in DTYPES.items()}


class Plan:
    """Agreed buckets for one list of tensors. Collective: every rank makes it with equal arguments.

    All ranks are those of the core's ``group``. ``agreed`` is a further setting, "name=value", that
    must be equal on them.
    ``views[i]`` is the place of tensor i; it stays valid after ``drop`` and after shutdown. It has
    the tensor's strides where these leave no gap, as autograd's own gradients have.

    Raises:
        MismatchError: on every rank, if the ranks' arguments differ.
    """

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        reduction: Reduction,
        bucket_bytes: int,
        bucket_of: Sequence[int] | None,
        agreed: str = "",
        group: int = 0,
    ) -> None:
        described = [
            plans.Tensor(_label(own, tensor), DTYPES[tensor.dtype], tuple(tensor.shape))
            for own, tensor in zip(names, tensors, strict=True)
        ]
        self.number = plans.create(
            name, described, reduction, bucket_bytes, bucket_of, group, agreed
        )
        self.generation = basics.generation()
        self.views = self._make_views(tensors)
        self._used = ffi.new("uint8_t[]", max(len(tensors), 1))

    def finish(self) -> None:
        """Ends the step: waits until every bucket is reduced; missing tensors count as zeros."""
        number = self.number
        basics.wait_until_done(lambda seconds: lib.bagua_plan_finish(number, seconds))

    def used(self) -> bytes:
        """One byte per tensor: 1 if at least one rank had it ready in the step that ended."""
        basics.check(lib.bagua_plan_used(self.number, self._used))
        return bytes(ffi.buffer(self._used))

    def overlap(self) -> tuple[int, int]:
        """Bytes exchanged before the end of backward, and all bytes, over the plan's life."""
        overlapped, total = ffi.new("int64_t *"), ffi.new("int64_t *")
        basics.check(lib.bagua_plan_overlap(self.number, overlapped, total))
        return overlapped[0], total[0]

    def drop(self) -> None:
        """Forgets the plan on this rank; the views stay valid."""
        if self.number and self.generation == basics.generation() and basics.is_initialized():
            lib.bagua_plan_drop(self.number)
        self.number = 0

    def _make_views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        count = ffi.new("int32_t *")
        basics.check(lib.bagua_plan_bucket_count(self.number, count))
        buckets = [self._bucket(bucket) for bucket in range(count[0])]
        bucket, offset = ffi.new("int32_t *"), ffi.new("int64_t *")
        views = []
        for i, tensor in enumerate(tensors):
            basics.check(lib.bagua_plan_tensor_place(self.number, i, bucket, offset))
            flat = buckets[bucket[0]][offset[0] : offset[0] + tensor.numel()]
            views.append(flat.as_strided(tensor.shape, _strides(tensor)))
        return views

    def _bucket(self, bucket: int) -> torch.Tensor:
        data, size, dtype = ffi.new("void **"), ffi.new("int64_t *"), ffi.new("int32_t *")
        basics.check(lib.bagua_plan_bucket(self.number, bucket, data, size, dtype))
        kind = _TORCH_DTYPES[dtype[0]]
        if size[0] == 0:
            lib.bagua_memory_release(data[0])
            return torch.empty(0, dtype=kind)
        # The tensor holds the buffer, the buffer this pointer, and its end releases the memory.
        owner = ffi.gc(data[0], lib.bagua_memory_release)
        return torch.frombuffer(ffi.buffer(owner, size[0]), dtype=kind)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of a gradient of ``tensor``; optimizers rely on them being equal."""
    if tensor.is_contiguous():
        return tensor.stride()
    expected = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= count
    return tensor.stride()


def _label(name: str, tensor: torch.Tensor) -> str:
    """Returns the name that the ranks compare: it tells the order of the elements if unusual."""
    strides = _strides(tensor)
    if tensor.is_contiguous() or strides != tensor.stride():
        return name
    return f"{name} (strides {', '.join(map(str, strides))})"
