"""Registered plans of the core: the buckets of a training step, agreed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bagua_ext import basics
from bagua_ext._core import ffi, lib
from bagua_ext.reductions import Reduction


@dataclass(frozen=True)
class Tensor:
    """A tensor of a plan; ``dtype`` is the core's number."""

    name: str
    dtype: int
    shape: tuple[int, ...]


def create(
    name: str,
    tensors: Sequence[Tensor],
    reduction: Reduction,
    bucket_bytes: int,
    bucket_of: Sequence[int] | None,
    group: int,
    agreed: str,
) -> int:
    """Registers a plan on every rank of ``group`` and returns its number in the core.

    ``bucket_of``: the bucket of each tensor, not decreasing; None: cut by ``bucket_bytes``.
    ``agreed``: a further setting, "name=value", that must be equal on all ranks.

    Raises:
        MismatchError: on every rank, if the ranks' arguments differ.
    """
    keep: list[Any] = []  # what the options point to

    def kept(value: Any) -> Any:
        keep.append(value)
        return value

    entries = kept(ffi.new("bagua_plan_tensor_t[]", len(tensors)))
    for entry, tensor in zip(entries, tensors, strict=True):
        entry.name = kept(ffi.new("char[]", tensor.name.encode()))
        entry.dtype = tensor.dtype
        entry.ndim = len(tensor.shape)
        entry.shape = kept(ffi.new("int64_t[]", list(tensor.shape) or [0]))
    options = ffi.new("bagua_plan_options_t *")
    options.name = kept(ffi.new("char[]", name.encode()))
    options.group = group
    options.tensor_count, options.tensors = len(tensors), entries
    options.bucket_bytes = bucket_bytes
    options.reduce_op = reduction.op
    options.prescale, options.postscale = reduction.prescale, reduction.postscale
    options.codec = kept(ffi.new("char[]", reduction.codec.encode()))
    options.agreed = kept(ffi.new("char[]", agreed.encode()))
    if bucket_of is not None:
        options.bucket_of = kept(ffi.new("int32_t[]", list(bucket_of)))
    plan = ffi.new("uint64_t *", 0)
    basics.wait_until_done(lambda seconds: lib.bagua_plan_create(options, seconds, plan))
    return plan[0]
