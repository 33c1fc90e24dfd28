"""torch.distributed with Gloo, beside the library measured and in the same processes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch.distributed as dist

import bagua_ext.torch as bagua


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A process group of all ranks, which meet where the launcher's MASTER_ADDR says.

    Raises:
        RuntimeError: if this build of torch has no Gloo.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise RuntimeError("this build of torch has no Gloo; leave it out of --compare")
    if bagua.size() == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo", rank=bagua.rank(), world_size=bagua.size())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of all_reduce_coalesced
        try:
            yield
        finally:
            dist.destroy_process_group()
